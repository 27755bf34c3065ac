"""What results can be written as, and finding out in time whether they can be."""

from pathlib import Path

from cs336sys.errors import UsageError

FORMATS = ("table", "markdown", "csv", "json", "latex", "typst")
_PICTURES = (".png", ".svg", ".pdf")


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


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """Find out before anything is measured whether a picture can be written.

    Raises:
        UsageError: the file's ending is no picture's, or its folder cannot be written.
    """
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise UsageError(f"{option} {path}: the file must end in {', '.join(_PICTURES)}")
    check_writable(path, option)


def unwritable(path: Path, option: str, error: OSError) -> UsageError:
    return UsageError(f"cannot write {option} {path}: {error.strerror or error}")
