"""Finding out in time whether a result can be written."""

from pathlib import Path

from cs336sys.errors import UsageError


def check_writable(path: Path, option: str) -> None:
    """Raise before anything is measured if the file cannot be written; a file that is there keeps its content.

    Raises:
        UsageError: it cannot; the sentence names the option that asked for it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            # Another rank of the same command may have been faster.
            path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, option, error) from error


def unwritable(path: Path, option: str, error: OSError) -> UsageError:
    return UsageError(f"cannot write {option} {path}: {error.strerror or error}")
