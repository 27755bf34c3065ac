"""Files and folders of processes that may be killed: written whole or not at all, and removed by others. No torch."""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary file next to ``path``, which it replaces when the context ends without an error.

    Its name ends as that of ``path``, by which some writers choose a format. Its permissions are those of ``path``, or
    of any new file. Where ``path`` is a symbolic link, the file that it leads to is replaced.

    ``path`` itself is given, and written in place, where another file cannot replace it: a pipe or a device; a file
    that this process holds open, as standard output is (``/dev/stdout``); one with several names, of another owner or
    group, or that may not be written; one in a folder that takes no new files.

    Raises:
        OSError: the file cannot be made or cannot replace ``path``. It is removed then, as after any error.
    """
    target = Path(os.path.realpath(path))
    try:
        existing = path.stat()
    except FileNotFoundError:
        existing = None
    partial = _make_replacement(target, existing)
    if partial is None:
        yield path
        return
    try:
        yield partial
        try:
            partial.replace(target)
        except OSError:
            # A mount point, or another's file in a folder like /tmp: the complete content is copied.
            shutil.copyfile(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _make_replacement(target: Path, existing: os.stat_result | None) -> Path | None:
    """Make an empty file that can replace ``target``; None where none can."""
    if existing is not None:
        # Some network file systems count no names.
        is_plain = stat.S_ISREG(existing.st_mode) and existing.st_nlink <= 1 and os.access(target, os.W_OK)
        if not is_plain or any(os.path.samestat(existing, opened) for opened in _open_files()):
            return None
    # File systems allow names of 255 bytes, and a character may take four.
    partial = target.with_name(f".{secrets.token_hex(4)}-{target.name[-40:]}")
    try:
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # A file written in place would be cut short.
        return None
    try:
        new = os.fstat(descriptor)
        if existing is None:
            return partial
        if (new.st_uid, new.st_gid) == (existing.st_uid, existing.st_gid):
            with contextlib.suppress(OSError):  # some file systems have no permissions
                partial.chmod(stat.S_IMODE(existing.st_mode))
            return partial
    finally:
        os.close(descriptor)
    partial.unlink()  # It would give the file to another owner or group.
    return None


def _open_files() -> Iterator[os.stat_result]:
    """List the files that this process holds open, as far as the system says."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir("/dev/fd")
    for name in names:
        # The descriptor by which the folder was listed is among them, and closed.
        with contextlib.suppress(OSError, ValueError):
            yield os.fstat(int(name))


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
