"""`python -P -m radixcast.actors.scheduler`: started by the supervisor."""

from radixcast.actors.host import main
from radixcast.actors.scheduler.actor import SchedulerActor

if __name__ == "__main__":
    main(SchedulerActor)
