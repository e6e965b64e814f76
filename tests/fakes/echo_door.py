"""Runs echo.Door as a process: python -P -m fakes.echo_door."""

from fakes.echo import Door
from radixcast.actors.host import main

if __name__ == "__main__":
    main(Door)
