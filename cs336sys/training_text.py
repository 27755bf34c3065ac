"""The text that models learn from: files, and folders of them. Plain data, no torch."""

import hashlib
from pathlib import Path

from cs336sys.errors import UsageError

# What counts as text in a folder.
_ENDINGS = (".md", ".txt")


def read_text(paths: str) -> bytes:
    """The bytes of files, separated by commas, one after another; of a folder, those of its text files by name.

    Raises:
        UsageError: a file cannot be read, or all of them are empty.
    """
    content = b""
    for path in map(Path, paths.split(",")):
        files = sorted(one for one in path.iterdir() if one.suffix in _ENDINGS) if path.is_dir() else [path]
        try:
            content += b"".join(file.read_bytes() for file in files)
        except OSError as error:
            raise UsageError(f"--text {path}: cannot be read ({error.strerror})") from error
    if not content:
        raise UsageError(
            f"--text {paths}: there is nothing to learn from; of a folder {' and '.join(_ENDINGS)} are read"
        )
    return content


def digest(paths: str) -> str:
    """What :func:`read_text` reads, as 12 hexadecimal digits.

    Raises:
        UsageError: as there.
    """
    return hashlib.sha256(read_text(paths)).hexdigest()[:12]
