"""Model resolution: from what `--model-path` says to one `ModelSpec` that every actor is handed as data.

`resolve_model` finds the files (embedded alias, folder, .gguf, hub id), reads the dialect that they are described in
and checks that the engine can run them. It reads no weights and imports neither torch nor transformers.
"""

from radixcast.models.resolve import resolve_model

__all__ = ["resolve_model"]
