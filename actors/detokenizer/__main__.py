"""`python -P -m radixcast.actors.detokenizer`: started by the supervisor."""

from radixcast.actors.detokenizer.actor import DetokenizerActor
from radixcast.actors.host import main

if __name__ == "__main__":
    main(DetokenizerActor)
