"""The command line: `radixcast serve …`, `radixcast --version`. `python -m radixcast.launch_server …` is `radixcast serve …`.

What is wrong is told in one line on stderr; nobody gets a traceback for a misspelt flag.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

import radixcast
from radixcast.config import UsageError, parse_args
from radixcast.protocols.errors import StartupError
from radixcast.serve import serve

USAGE = """usage: radixcast COMMAND [flags]

commands:
  serve       serve a model over HTTP and ZMQ (radixcast serve --help lists the flags)

  --version   print the version
  --help      print this"""

COMMANDS = ("serve",)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `radixcast`; returns the exit status (2: wrong usage)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"radixcast {radixcast.__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else " (there is: serve)"
        return _fail(f"unknown command {words[0]!r}{hint}", 2)
    return launch(words[1:], prog="radixcast serve")


def launch(words: Sequence[str], *, prog: str) -> int:
    """`radixcast serve` with these flags; returns the exit status."""
    if "--version" in words:
        print(f"radixcast {radixcast.__version__}")
        return 0
    try:
        return serve(parse_args(words, os.environ, prog=prog))
    except UsageError as error:
        return _fail(str(error), 2)
    except StartupError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("stopped before it was ready", 130)
    except SystemExit as end:  # --help
        return end.code if isinstance(end.code, int) else 0


def _fail(line: str, status: int) -> int:
    print(f"radixcast: {line}", file=sys.stderr, flush=True)
    return status
