"""Tokenizer files of a folder: tokenizer.json, the texts of special tokens and the chat template, in all their spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from radixcast.protocols.errors import StartupError


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder's tokenizer files say."""

    tokenizer_file: str
    """Absolute path of tokenizer.json."""
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    add_bos: bool | None = None
    """True: tokenizer_config.json wants BOS in front and the post-processor does not put it there. None: nobody says."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} when there is no such file. Raises StartupError for anything else."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StartupError(f"can't read {path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return document


def locate_tokenizer(path: str | Path) -> Path:
    """Absolute path of the tokenizer.json that `path` (a folder, or the file itself) means. Raises StartupError."""
    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise StartupError(f"no tokenizer.json: looked for {file}")
    if file.suffix != ".json":
        raise StartupError(f"{file} is not a tokenizer.json (SentencePiece and vocabulary files must be converted to one)")
    return file.resolve()


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read the tokenizer in `path` (a folder or a tokenizer.json). Raises StartupError when it is missing or malformed."""
    file = locate_tokenizer(path)
    folder = file.parent
    config = read_json(folder / "tokenizer_config.json")
    legacy = read_json(folder / "special_tokens_map.json")
    tokenizer = read_json(file)

    def text(name: str) -> str:
        value = config.get(name, legacy.get(name))
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else ""

    bos, eos = text("bos_token"), text("eos_token")
    ids = _ids(tokenizer)
    return TokenizerFiles(
        tokenizer_file=str(file),
        chat_template=folder_template(folder, config),
        bos_token=bos,
        eos_token=eos,
        pad_token=text("pad_token"),
        bos_token_id=ids.get(bos),
        eos_token_id=ids.get(eos),
        add_bos=_add_bos(config.get("add_bos_token"), bos, ids, tokenizer.get("post_processor")),
    )


def folder_template(folder: Path, config: dict[str, Any] | None = None) -> str | None:
    """The chat template of a model folder: chat_template.jinja, chat_template.json, then tokenizer_config.json."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"can't read {folder / 'chat_template.jinja'}: {error}") from None
    own = read_json(folder / "chat_template.json")
    return template_of(own or (read_json(folder / "tokenizer_config.json") if config is None else config))


def template_of(document: dict[str, Any]) -> str | None:
    """`chat_template` of a JSON document: a string, or a list of named ones (the one named default, else the first)."""
    value = document.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    elif isinstance(value, dict):
        value = value.get("default") or next(iter(value.values()), None)
    return value if isinstance(value, str) and value else None


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token text -> id, for added tokens and (where it is a mapping) the vocabulary."""
    vocab = (tokenizer.get("model") or {}).get("vocab")
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    for entry in tokenizer.get("added_tokens") or ():
        ids[entry["content"]] = entry["id"]
    return ids


def _add_bos(wanted: Any, bos: str, ids: dict[str, int], processor: dict[str, Any] | None) -> bool | None:
    if _adds(processor, bos):
        return False
    return wanted and bos in ids if isinstance(wanted, bool) else None


def _adds(processor: dict[str, Any] | None, token: str) -> bool:
    """Whether the post-processor puts `token` into a single text."""
    if not processor:
        return False
    if processor.get("type") == "Sequence":
        return any(_adds(part, token) for part in processor.get("processors") or ())
    if processor.get("type") == "TemplateProcessing":
        pieces = [piece.get("SpecialToken", {}).get("id") for piece in processor.get("single") or ()]
        return token in pieces
    return False
