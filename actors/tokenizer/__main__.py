"""`python -P -m radixcast.actors.tokenizer`: started by the supervisor."""

from radixcast.actors.host import main
from radixcast.actors.tokenizer.actor import TokenizerActor

if __name__ == "__main__":
    main(TokenizerActor)
