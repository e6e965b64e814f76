"""The README's tables are derived from the code; when one is stale, the failure prints what belongs there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from radixcast.actors.gateway.routes import ROUTES
from radixcast.config import FIELDS
from radixcast.protocols import limits
from radixcast.protocols.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def flags_table() -> str:
    """One row a flag, in the order of ServerArgs."""
    rows = ["| flag | default | what |", "| --- | --- | --- |"]
    for field in FIELDS:
        names = ", ".join(f"`{name}`" for name in (f"--{field.name.replace('_', '-')}", *field.flag.aliases))
        default = "" if field.default is None or isinstance(field.default, bool) else f"`{field.default}`"
        rows.append(f"| {names} | {default} | {field.flag.help} |")
    return "\n".join(rows)


def limits_table() -> str:
    """One row a constant of protocols/limits.py, with its docstring."""
    source = (ROOT / "protocols" / "limits.py").read_text(encoding="utf-8")
    found = re.findall(r'^([A-Z_]+) = [^\n]*\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL)
    rows = ["| limit | value | of |", "| --- | --- | --- |"]
    for name, text in found:
        value = f"{getattr(limits, name):,}".replace(",", " ")
        rows.append(f"| `{name}` | {value} | {' '.join(text.split())} |")
    return "\n".join(rows)


def test_every_flag_has_its_row() -> None:
    assert [field.name for field in FIELDS] == [field.name for field in msgspec.structs.fields(ServerArgs)]
    assert flags_table() in README, f"the README's flags table must be:\n\n{flags_table()}\n"


def test_every_limit_has_its_row() -> None:
    assert limits_table() in README, f"the README's limits table must be:\n\n{limits_table()}\n"


def test_every_route_is_named_or_an_alias() -> None:
    """Aliases (v1/, z-pages, older names) need no row."""
    aliases = {"/", "/healthz", "/livez", "/readyz", "/v1/tokenize", "/v1/detokenize", "/model_info", "/get_server_info"}
    missing = [route.pattern for route in ROUTES if route.pattern not in aliases and f"{route.pattern}`" not in README]
    assert not missing


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (ROOT / link).exists(), link


def test_python_blocks_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_it_opens_with_the_two_commands() -> None:
    first = README.index("```sh")
    assert README.index("./scripts/serve") > first
    assert README.index("./scripts/serve") < README.index("./scripts/test") < README.index("curl")
