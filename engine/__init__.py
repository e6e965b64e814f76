"""Radixcast: what users touch. Names resolve on first use, so that `import radixcast.actors.…` loads nothing else.

`Engine` runs a model in child processes of this program, `EngineClient` talks to a running server over ZMQ.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixcast.actors.client import EngineClient
    from radixcast.actors.collect import Output
    from radixcast.engine import Engine
    from radixcast.protocols.public import Chat, Generate, TextDelta
    from radixcast.protocols.sampling import SamplingParams
    from radixcast.protocols.server_args import ServerArgs

__version__ = "0.1.0"

_HOMES = {
    "Chat": "radixcast.protocols.public",
    "Engine": "radixcast.engine",
    "EngineClient": "radixcast.actors.client",
    "Generate": "radixcast.protocols.public",
    "Output": "radixcast.actors.collect",
    "SamplingParams": "radixcast.protocols.sampling",
    "ServerArgs": "radixcast.protocols.server_args",
    "TextDelta": "radixcast.protocols.public",
}

__all__ = [
    "Chat",
    "Engine",
    "EngineClient",
    "Generate",
    "Output",
    "SamplingParams",
    "ServerArgs",
    "TextDelta",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'radixcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
