"""--chat-template: a built-in name, a jinja file or a JSON file -> jinja source."""

from __future__ import annotations

from pathlib import Path

from radixcast.actors.tokenizer.templates import BUILTIN_TEMPLATES
from radixcast.models.tokenizer_files import read_json, template_of
from radixcast.protocols.errors import StartupError


def choose_template(given: str) -> str:
    """Jinja source of the template that `given` names. Raises StartupError listing the built-in names."""
    if given in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[given]
    path = Path(given).expanduser()
    if not path.is_file():
        names = ", ".join(sorted(BUILTIN_TEMPLATES))
        raise StartupError(f"--chat-template {given}: no such file, and not a built-in template ({names})")
    if path.suffix == ".json":
        source = template_of(read_json(path))
        if source is None:
            raise StartupError(f"--chat-template {given}: the JSON file has no `chat_template`")
        return source
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template {given}: {error}") from None
