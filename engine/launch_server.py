"""`python -m radixcast.launch_server …`: the same as `radixcast serve …`."""

from __future__ import annotations

import sys

from radixcast.cli import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], prog="python -m radixcast.launch_server"))
