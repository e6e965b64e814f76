"""What is installed is what is in the checkout, and an actor loads no more than it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "engine": "radixcast",
    "actors": "radixcast.actors",
    "kernels": "radixcast.kernels",
    "protocols": "radixcast.protocols",
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages() -> dict[str, Path]:
    """Package name -> folder, for every folder that holds Python files."""
    found = {}
    for top, name in FOLDERS.items():
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]:
            if folder.is_dir() and any(folder.glob("*.py")):
                found[".".join([name, *folder.relative_to(ROOT / top).parts])] = folder
    return found


def test_pyproject_lists_every_package() -> None:
    """An editable install hides a forgotten one, a wheel does not."""
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages())
    assert listed == sorted(listed)


def test_every_package_has_an_init() -> None:
    without = [str(folder.relative_to(ROOT)) for folder in packages().values() if not (folder / "__init__.py").exists()]
    assert not without


def test_typed_marker_is_in_every_top_folder() -> None:
    assert all((ROOT / top / "py.typed").is_file() for top in FOLDERS)


def test_version_is_told_once_in_each_place() -> None:
    import radixcast

    assert radixcast.__version__ == PYPROJECT["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources; needs the build backend to be installed, not the network."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for name, folder in packages().items():
        for path in [*folder.glob("*.py"), *folder.glob("py.typed")]:
            assert f"{name.replace('.', '/')}/{path.name}" in inside
    tops = {path.split("/")[0] for path in inside if not path.split("/")[0].endswith(".dist-info")}
    assert tops == {"radixcast"}, "top-level packages beside ours would overwrite others'"


def loaded_by(module: str) -> set[str]:
    """Top-level packages in sys.modules after importing `module` in a fresh interpreter."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "numba", "triton", "gguf", "safetensors", "huggingface_hub", "IPython", "pandas"}


@pytest.mark.parametrize(
    "module",
    [
        "radixcast",
        "radixcast.protocols",
        "radixcast.models",
        "radixcast.bench_serving",
        "radixcast.actors.gateway.__main__",
        "radixcast.actors.tokenizer.__main__",
        "radixcast.actors.scheduler.__main__",
        "radixcast.actors.detokenizer.__main__",
        "radixcast.actors.supervisor",
        "radixcast.actors.client",
        "radixcast.launch_server",
        "radixcast.cli",
    ],
)
def test_only_the_runner_loads_what_is_heavy(module: str) -> None:
    folder = next(f for f, name in sorted(FOLDERS.items(), key=lambda item: -len(item[1])) if module.startswith(name))
    rest = module.removeprefix(FOLDERS[folder]).strip(".").replace(".", "/")
    assert (ROOT / folder / f"{rest}.py").exists() or (ROOT / folder / rest).is_dir(), f"{module} is gone: name its successor"
    assert not loaded_by(module) & HEAVY


def test_the_scripts_can_be_run() -> None:
    for name in ("scripts/setup", "scripts/serve", "scripts/test", "scripts/link", "scripts/lint", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), f"{name} is not executable"
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
