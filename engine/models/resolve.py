"""resolve_model: from ServerArgs to the one ModelSpec of the node.

`--model-path` is, in this order: an alias of an embedded model (./NAME means a folder of that name), a local folder, a local
.gguf file, a hub id. What exists on disk is never looked for on the hub. With a warm cache this takes milliseconds and
touches no network.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from msgspec.structs import replace

from radixcast.models.description import Description
from radixcast.models.embedded import EMBEDDED, fetch_embedded
from radixcast.models.gguf_config import describe_gguf
from radixcast.models.hf_config import describe_folder
from radixcast.models.hub import fetch_from_hub, looks_like_hub_id
from radixcast.models.templates import choose_template
from radixcast.models.tokenizer_files import read_tokenizer_files
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs


def resolve_model(args: ServerArgs) -> ModelSpec:
    """Find and describe the model that `args` ask for. Raises StartupError telling the operator what to change."""
    found = _describe(args.model_path)
    if found.tokenizer_problem and not args.tokenizer_path:
        raise StartupError(found.tokenizer_problem)
    spec = ModelSpec(
        name=args.served_model_name or found.name,
        path=args.model_path,
        config=found.config,
        weight_files=found.weight_files,
        weight_format=found.weight_format,
        tokenizer_file=found.tokenizer_file,
        chat_template=found.chat_template,
        bos_token_id=found.bos_token_id,
        add_bos=found.add_bos,
        eos_token_ids=found.eos_token_ids,
        bos_token=found.bos_token,
        eos_token=found.eos_token,
        pad_token=found.pad_token,
        context_length=_context_length(args.context_length, found),
        sampling_defaults=found.sampling_defaults,
        weight_version=args.weight_version,
    )
    if args.tokenizer_path:
        spec = _with_tokenizer(spec, args.tokenizer_path)
    if args.chat_template:
        spec = replace(spec, chat_template=choose_template(args.chat_template))
    return spec


def _describe(model_path: str) -> Description:
    if not model_path.strip():
        raise StartupError("--model-path is empty")
    path = Path(model_path).expanduser()
    if model_path in EMBEDDED:
        file = fetch_embedded(model_path)
        return describe_gguf(file, name=model_path, folder=file.parent)
    if path.is_dir():
        return describe_folder(path.resolve(), name=path.resolve().name or "model")
    if path.is_file():
        return _describe_file(path)
    if looks_like_hub_id(model_path) and path.suffix != ".gguf":
        return describe_folder(fetch_from_hub(model_path), name=model_path)
    raise _nothing_found(model_path)


def _describe_file(path: Path) -> Description:
    if path.suffix.lower() == ".gguf":
        return describe_gguf(path, name=path.stem)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise StartupError(f"{path} is a pickle, which can run code when read, and is refused; use safetensors or GGUF")
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise StartupError(f"{path} is one file of a model folder: give --model-path the folder, {path.parent}")
    raise StartupError(f"{path} is neither a model folder nor a .gguf file")


def _nothing_found(model_path: str) -> StartupError:
    aliases = ", ".join(EMBEDDED)
    near = difflib.get_close_matches(model_path, EMBEDDED, 1)
    guess = f"; did you mean {near[0]}?" if near else ""
    return StartupError(
        f"no model {model_path!r}: it is no alias ({aliases}), there is no such folder or .gguf file, "
        f"and it is no hub id of the form org/name{guess}"
    )


def _context_length(asked: int | None, found: Description) -> int:
    if asked is None:
        return found.context_length
    if asked > found.context_length:
        raise StartupError(
            f"--context-length {asked} is more than the {found.context_length} tokens that {found.name} was made for"
        )
    return asked


def _with_tokenizer(spec: ModelSpec, path: str) -> ModelSpec:
    """Another tokenizer: its template and special tokens replace the model's where it has them."""
    files = read_tokenizer_files(path)
    eos = spec.eos_token_ids if files.eos_token_id is None else (files.eos_token_id, *spec.eos_token_ids)
    return replace(
        spec,
        tokenizer_file=files.tokenizer_file,
        chat_template=files.chat_template or spec.chat_template,
        bos_token=files.bos_token or spec.bos_token,
        eos_token=files.eos_token or spec.eos_token,
        pad_token=files.pad_token or spec.pad_token,
        bos_token_id=spec.bos_token_id if files.bos_token_id is None else files.bos_token_id,
        add_bos=spec.add_bos if files.add_bos is None else files.add_bos,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )
