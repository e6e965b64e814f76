"""The cache folder: where it is, and how several processes may fill it at once.

Every file appears under its final name complete or not at all (written beside it, then renamed), and work that must not
be done twice happens under a lock file. Errors of the operating system become one StartupError that names the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from radixcast.protocols.errors import StartupError

CACHE_VARIABLE = "RADIXCAST_CACHE"


def cache_root() -> Path:
    """$RADIXCAST_CACHE, else $XDG_CACHE_HOME/radixcast, else ~/.cache/radixcast; not created."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg).expanduser() / "radixcast"
    try:
        return Path.home() / ".cache" / "radixcast"
    except RuntimeError:
        raise StartupError(f"this user has no home folder: set {CACHE_VARIABLE} to a folder that can be written") from None


class FileKey(msgspec.Struct, frozen=True):
    """What identifies a file's content without reading it."""

    path: str
    """Real path."""
    size: int
    """Bytes."""
    mtime_ns: int
    """Nanoseconds since the epoch."""

    @classmethod
    def of(cls, path: Path) -> FileKey:
        """Key of an existing file. Raises OSError."""
        real = path.resolve(strict=True)
        stat = real.stat()
        return cls(str(real), stat.st_size, stat.st_mtime_ns)

    def digest(self, version: int) -> str:
        """16 hex digits that change with the file and with `version`, the version of what is derived from it."""
        return hashlib.sha256(f"{version}\0{self.path}\0{self.size}\0{self.mtime_ns}".encode()).hexdigest()[:16]


@contextlib.contextmanager
def os_errors(what: str, path: Path) -> Iterator[None]:
    """Turn OSError into a StartupError that says what was tried, where, and what the operator can do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        hint = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "no permission",
            errno.EPERM: "no permission",
        }.get(error.errno or 0, error.strerror or str(error))
        raise StartupError(f"can't {what}: {hint} ({where}); {CACHE_VARIABLE} names another cache folder") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; makes the folder. Waits for whoever holds it; the kernel frees it when its holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds all of it or is untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
