"""Runs echo.Hub as a process: python -P -m fakes.echo_hub."""

from fakes.echo import Hub
from radixcast.actors.host import main

if __name__ == "__main__":
    main(Hub)
