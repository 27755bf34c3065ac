"""Temporary folders that do not stay when the process that they belong to is killed: others remove them. No torch."""

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import zlib
from pathlib import Path


class OwnedFolder:
    """A new temporary folder, locked as long as this process lives.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        self.path, self._lock = _make()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_abandoned() -> None:
    """Remove the folders whose processes died without removing them.

    The kernel gives a lock back when the last process that holds it is gone, and it alone knows of its locks: folders
    that another kernel's processes made in a shared file system are left alone.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            cleanup.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_prefix()))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            # A file system without locks: nobody will find it unlocked, either.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            # Another process found the folder between its making and its lock, took it for abandoned and removed it.
            os.close(lock)


def _prefix() -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = platform.node()
    return f"cs336sys-{zlib.crc32(kernel.encode()):08x}-"
