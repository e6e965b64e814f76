"""`python -P -m radixcast.actors.gateway`: started by the supervisor."""

from radixcast.actors.gateway.actor import GatewayActor
from radixcast.actors.host import main

if __name__ == "__main__":
    main(GatewayActor)
