"""ServerArgs from a command line, a --config file, the environment or keyword arguments. All are derived from the struct.

Precedence: command line, then environment (keys only), then --config, then the defaults. Whatever is wrong is one line that
names the flag, with the near match for a misspelt one. Nothing here knows what a flag does.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import msgspec
import yaml

from radixcast.protocols.errors import StartupError
from radixcast.protocols.server_args import Flag, ServerArgs, check

ENVIRONMENT = {"api_key": "RADIXCAST_API_KEY", "admin_api_key": "RADIXCAST_ADMIN_API_KEY"}
"""Fields that may come from the environment, so that they don't show in a process list."""

_GROUPS = {
    "model": "model",
    "http": "network",
    "memory": "memory and radix cache",
    "schedule": "scheduling",
    "faults": "faults",
    "log": "logging",
    "server": "server",
}


class UsageError(StartupError):
    """The command line, the config file or a keyword argument is wrong (exit status 2)."""


class _Field(NamedTuple):
    name: str
    flag: Flag
    type: msgspec.inspect.Type
    """Without None and without metadata."""
    annotation: Any
    default: Any


def _fields() -> list[_Field]:
    info = msgspec.inspect.type_info(ServerArgs)
    assert isinstance(info, msgspec.inspect.StructType)
    hints = msgspec.structs.fields(ServerArgs)
    found = []
    for field, hint in zip(info.fields, hints, strict=True):
        inner, flag = field.type, Flag(help="")
        if isinstance(inner, msgspec.inspect.Metadata):
            flag, inner = (inner.extra or {}).get("flag", flag), inner.type
        if isinstance(inner, msgspec.inspect.UnionType):
            inner = next(t for t in inner.types if not isinstance(t, msgspec.inspect.NoneType))
        found.append(_Field(field.name, flag, inner, hint.type, field.default))
    return found


FIELDS = _fields()


# ------------------------------------------------------------------ command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def parse_args(argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "radixcast serve") -> ServerArgs:
    """Command line -> checked ServerArgs. Raises UsageError (one line); --help and --version print and raise SystemExit(0)."""
    parser = _parser(prog)
    given, rest = parser.parse_known_args(list(argv))
    if rest:
        raise UsageError(_unknown_word(rest[0]))
    values = vars(given)
    config = values.pop("config", None)
    merged = load_config(Path(config)) if config is not None else {}
    merged |= {name: environ[key] for name, key in ENVIRONMENT.items() if environ.get(key)}
    return _checked(merged | values)


def _parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [flags]",
        description="Serve a model over HTTP (OpenAI and native routes) and ZMQ.",
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file of flags; the command line overrides it")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in FIELDS:
        title = _GROUPS.get(field.flag.group, field.flag.group)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], field)
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: _Field) -> None:
    names = [_spelt(field.name), *field.flag.aliases]
    shown = "" if field.default is None or field.default is msgspec.NODEFAULT else f" (default: {field.default})"
    text = field.flag.help.replace("%", "%%")
    if isinstance(field.type, msgspec.inspect.BoolType):
        group.add_argument(*names, dest=field.name, action="store_true", help=text)
        return
    convert = _converter(field)
    metavar = "{" + ",".join(map(str, _choices(field))) + "}" if _choices(field) else _metavar(field)
    group.add_argument(*names, dest=field.name, type=convert, metavar=metavar, help=text + shown.replace("%", "%%"))


def _converter(field: _Field) -> Callable[[str], Any]:
    """Text of a flag -> its value; argparse puts the flag's name in front of what ArgumentTypeError says."""
    choices = _choices(field)

    def choice(text: str) -> str:
        if text not in choices:
            near = difflib.get_close_matches(text, choices, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}{hint}")
        return text

    def integer(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,18}", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer")
        return int(text)

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number")
        return value

    if choices:
        return choice
    if isinstance(field.type, msgspec.inspect.IntType):
        return integer
    if isinstance(field.type, msgspec.inspect.FloatType):
        return number
    return str


def _choices(field: _Field) -> tuple[str, ...]:
    """Values of a Literal in the order that they are written (msgspec sorts them); () for other types."""
    if not isinstance(field.type, msgspec.inspect.LiteralType):
        return ()
    annotation = field.annotation
    while get_origin(annotation) is not Literal:
        annotation = next(a for a in get_args(annotation) if isinstance(a, type(Literal[1])) or get_args(a))
    return get_args(annotation)


def _metavar(field: _Field) -> str:
    if isinstance(field.type, msgspec.inspect.IntType):
        return "N"
    return "X" if isinstance(field.type, msgspec.inspect.FloatType) else "TEXT"


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")


def _unknown_word(word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected word {word!r} (flags start with --)"
    flag = word.split("=")[0]
    return f"unknown flag {flag}{_near(flag, [n for f in FIELDS for n in (_spelt(f.name), *f.flag.aliases)])}"


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


# ------------------------------------------------------------------ files and keyword arguments


def load_config(path: Path) -> dict[str, Any]:
    """A YAML or JSON mapping of flags (spelt with - or _) -> field values by field name. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"--config {path}: must hold a mapping of flags, got {type(data).__name__}")
    return _by_field(data, f"--config {path}: ")


def from_kwargs(**kwargs: Any) -> ServerArgs:
    """Keyword arguments (field names or aliases, as `model`) -> checked ServerArgs. Raises UsageError."""
    return _checked(_by_field(kwargs, ""))


def _by_field(data: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Keys as users spell them -> field names, each value converted to its field's type."""
    known = {f.name: f for f in FIELDS}
    for field in FIELDS:
        known |= {alias.lstrip("-").replace("-", "_"): field for alias in field.flag.aliases}
    values: dict[str, Any] = {}
    for key, value in data.items():
        found = known.get(str(key).lstrip("-").replace("-", "_"))
        if found is None:
            raise UsageError(f"{where}unknown key {key!r}{_near(str(key).replace('-', '_'), list(known))}")
        if found.name in values:
            raise UsageError(f"{where}{key!r} is given twice")
        try:
            values[found.name] = msgspec.convert(value, found.annotation)
        except msgspec.ValidationError as error:
            raise UsageError(f"{where}{key}: {error}{_near_choice(found, value)}") from None
    return values


def _near_choice(field: _Field, value: Any) -> str:
    choices = _choices(field)
    return f" (one of {', '.join(choices)}{_near(str(value), choices)})" if choices else ""


def _checked(values: dict[str, Any]) -> ServerArgs:
    args = ServerArgs(**values)
    try:
        check(args)
    except UsageError:
        raise
    except StartupError as error:
        raise UsageError(str(error)) from None
    return args
