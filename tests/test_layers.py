"""The shape of the code: arrows run down, no import cycles, and nothing of what must never be in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "engine": "radixcast",
    "actors": "radixcast.actors",
    "kernels": "radixcast.kernels",
    "protocols": "radixcast.protocols",
}
LAYERS = ("engine", "actors", "kernels", "protocols")
MAY_IMPORT = {
    "engine": {"engine", "actors", "kernels", "protocols"},
    "actors": {"actors", "kernels", "protocols"},
    "kernels": {"kernels"},
    "protocols": {"protocols"},
}
ALLOWED_PACKAGES = {"protocols": {"msgspec", "numpy"}, "kernels": {"torch", "triton", "numba", "llvmlite", "numpy"}}
"""What layer 1 may import besides the standard library."""
BANNED = {
    r"^\s*(import|from) (pickle|cPickle|cloudpickle|dill|marshal|shelve)\b|\bpickle\.\w": "pickle",
    r"\b(recv|send)_pyobj\b": "pickle over ZeroMQ",
    r"(?<![\w.])eval\(": "eval",
    r"(?<![\w.])exec\(": "exec",
    r"trust_remote_code\s*=\s*True": "code from a model repository",
    r"\btorch\.load\(": "pickle through torch",
    r"\bjinja2\.Environment\(|(?<!Sandboxed)\bEnvironment\(": "templates outside the sandbox",
    r"tcp://\*": "a socket open to every network",
    r"^\s*except\s*:": "a bare except",
    r"^\s*(import|from) multiprocessing\b": "multiprocessing (actors start with python -m)",
}


def module_of(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


def sources() -> dict[str, Path]:
    """Module name -> file, for every module of the package."""
    return {module_of(path): path for folder in LAYERS for path in sorted((ROOT / folder).rglob("*.py"))}


SOURCES = sources()


def layer(module: str) -> str:
    """The top-level folder that a module of ours lies in."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in LAYERS else "engine"


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at import time) for every import; `from a import b` gives a.b where that is a module of ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = _ranges_that_run_later(tree)
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        now = not any(start <= node.lineno <= end for start, end in later)
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno, now
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for name in node.names:
            longer = f"{module}.{name.name}"
            yield (longer if longer in SOURCES else module), node.lineno, now


def _ranges_that_run_later(tree: ast.Module) -> list[tuple[int, int]]:
    """Lines of function bodies and of `if TYPE_CHECKING:` blocks: their imports can't close a cycle at start-up."""
    ranges = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef):
            ranges.append((node.lineno, node.end_lineno or node.lineno))
    return ranges


def test_arrows_run_down_only() -> None:
    wrong = []
    for module, path in SOURCES.items():
        own = layer(module)
        for imported, line, _ in imports(path):
            target = layer(imported) if imported.split(".")[0] == "radixcast" else own
            if target not in MAY_IMPORT[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} must not import {imported} ({target})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", sorted(ALLOWED_PACKAGES))
def test_layer_one_imports_little(folder: str) -> None:
    import sys

    allowed = ALLOWED_PACKAGES[folder] | set(sys.stdlib_module_names) | {"radixcast"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {imported}"
        for module, path in SOURCES.items()
        if layer(module) == folder
        for imported, line, _ in imports(path)
        if imported.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_runner_and_kernels_import_torch() -> None:
    """Start-up time and memory are features: tokenizer, scheduler, detokenizer and gateway never load torch."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {imported}"
        for module, path in SOURCES.items()
        if layer(module) == "actors" and not module.startswith("radixcast.actors.model_runner")
        for imported, line, _ in imports(path)
        if imported.split(".")[0] in ("torch", "transformers") or imported.startswith("radixcast.kernels")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {
        module: {name for name, _, now in imports(path) if now and name in SOURCES and name != module}
        for module, path in SOURCES.items()
    }
    assert not (cycle := _find_cycle(graph)), " -> ".join(cycle)


def _find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle as a list that starts and ends with the same node, or []."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph[node]):
            if found := visit(target, [*trail, node]):
                return found
        done.add(node)
        return []

    for node in graph:
        if found := visit(node, []):
            return found
    return []


def test_the_cycle_finder_finds() -> None:
    assert _find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert _find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_nothing_banned() -> None:
    wrong = []
    for path in SOURCES.values():
        name = str(path.relative_to(ROOT))
        for number, text in enumerate(_code_lines(path), 1):
            for pattern, what in BANNED.items():
                if re.search(pattern, text):
                    wrong.append(f"{name}:{number}: {what}: {text.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def _code_lines(path: Path) -> list[str]:
    """Lines without comments and docstrings: text may name what code may not use."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if alone and isinstance(statement.value.value, str):
                for number in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
                    lines[number] = ""
    return [re.sub(r"(^|\s)#.*", "", line) for line in lines]


@pytest.mark.parametrize(
    "line",
    ["import pickle", "x = eval(text)", "socket.recv_pyobj()", "torch.load(f)", "env = jinja2.Environment()", "    except:"],
)
def test_the_bans_match(line: str) -> None:
    assert any(re.search(pattern, line) for pattern in BANNED)


@pytest.mark.parametrize(
    "line", ["'pickle files are refused'", "model.eval()", "self.evaluate(x)", "SandboxedEnvironment()", "except ValueError:"]
)
def test_the_bans_leave_alone(line: str) -> None:
    assert not any(re.search(pattern, line) for pattern in BANNED)


def test_every_module_says_what_it_is() -> None:
    without = [
        str(path.relative_to(ROOT))
        for path in SOURCES.values()
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not without, f"no docstring: {without}"


def test_no_top_level_folders_beside_the_agreed_ones() -> None:
    agreed = {*LAYERS, "tests", "scripts", "build", "dist", "shared", "radixcast.egg-info"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert folders <= agreed, folders - agreed
