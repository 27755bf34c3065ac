"""The text that models learn from: files, and folders of them. Plain data, no torch."""

import hashlib
import stat
from pathlib import Path

from cs336sys.errors import UsageError

# A byte is a token: a step of 4 x 512 has read so many after 500,000.
_MOST_BYTES = 10**9

# What counts as text in a folder.
_ENDINGS = (".md", ".txt")


def read_text(paths: str) -> bytes:
    """The bytes of files, separated by commas, one after another; of a folder, those of its text files by name.

    Raises:
        UsageError: a file cannot be read, or all of them are empty.
    """
    content = bytearray()
    for path in map(Path, paths.split(",")):
        try:
            files = sorted(one for one in path.iterdir() if one.suffix in _ENDINGS) if path.is_dir() else [path]
            for file in files:
                # Devices have no end, and a pipe may wait for ever for its writer.
                if not stat.S_ISREG(file.stat().st_mode):
                    raise UsageError(f"--text {file}: is no file of text; give a file or a folder")
                with file.open("rb") as stream:
                    content += stream.read(_MOST_BYTES + 1 - len(content))
                if len(content) > _MOST_BYTES:
                    raise UsageError(
                        f"--text {paths}: holds more than {_MOST_BYTES / 1e9:g} GB, the most that is read into "
                        f"memory; give less text"
                    )
        except OSError as error:
            raise UsageError(f"--text {path}: cannot be read ({error.strerror})") from error
    if not content:
        raise UsageError(
            f"--text {paths}: there is nothing to learn from; of a folder {' and '.join(_ENDINGS)} are read"
        )
    return bytes(content)


def text_digest(paths: str) -> str:
    """Return a digest of what :func:`read_text` reads, as 12 hexadecimal digits.

    Raises:
        UsageError: as there.
    """
    return hashlib.sha256(read_text(paths)).hexdigest()[:12]
