"""`python -m radixcast …`: the same as `radixcast …`."""

from __future__ import annotations

import sys

from radixcast.cli import main

if __name__ == "__main__":
    sys.exit(main())
