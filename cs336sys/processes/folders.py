"""Temporary folders that other processes remove when the process that made them is killed. No torch."""

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import zlib
from pathlib import Path


class OwnedFolder:
    """A new temporary folder at ``path``, locked as long as this process lives."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix()))
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY)
                # In a file system without locks nobody takes it for abandoned, either.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                # Another process saw the folder before its lock, took it for abandoned and removed it.
                os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_abandoned() -> None:
    """Remove the folders whose processes died without removing them, which releases their locks.

    Only the kernel where a lock was taken knows of it: folders of other machines in a shared file system stay.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            cleanup.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # An error where its process lives.
            shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    """Return the beginning of the names of all folders that processes of this boot of the machine make."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = platform.node()
    return f"cs336sys-{zlib.crc32(kernel.encode()):08x}-"
