"""Write results to files, and find out before measuring whether they can be written."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cs336sys.errors import OutputError, ReaderLeft, UsageError
from cs336sys.processes.files import written_whole

if TYPE_CHECKING:
    import matplotlib.axes
    import numpy as np
    from matplotlib.figure import Figure

# For modules that import matplotlib when they draw.
Axes: TypeAlias = "matplotlib.axes.Axes"

FORMATS = ("table", "markdown", "csv", "json", "latex", "typst")
# The format of a file whose name says it.
FORMAT_OF_ENDING = {".csv": "csv", ".json": "json", ".md": "markdown", ".markdown": "markdown"}
FORMAT_OF_ENDING |= {".tex": "latex", ".txt": "table", ".typ": "typst"}
_PICTURES = (".png", ".svg", ".pdf")


def read_output(text: str) -> Path:
    """Return the file of ``--output``, or the folder, which is made, where the name ends with a slash."""
    path = Path(text)
    if text.endswith("/"):
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(error.strerror) from error
    return path


def check_writable(path: Path, option: str) -> None:
    """Raise a UsageError, before anything is measured, if a file cannot be written, or holds what ``--save`` wrote.

    A file that is there keeps its content.
    """
    from cs336sys.results.model import holds_results

    if path.is_file() and holds_results(path):
        raise UsageError(f"{option} {path}: holds saved results, which would be lost; give another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            # Where a link led to nothing, the new file goes and the link stays. Another rank may have been faster.
            Path(os.path.realpath(path)).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(_unwritable(f"{option} {path}", error)) from error


def require_folder(path: Path, option: str) -> None:
    """Raise a UsageError if a file's folder does not exist: most often its name is misspelt."""
    if not path.parent.exists():
        raise UsageError(f"cannot write {option} {path}: there is no folder {path.parent}; make it, or give another")


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """Raise a UsageError, before anything is measured, if a picture cannot be written."""
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise UsageError(f"{option} {path}: the file must end in {', '.join(_PICTURES)}")
    require_folder(path, option)
    check_writable(path, option)


def write_file(path: Path, content: bytes, option: str) -> None:
    """Write the file of an option, whole or not at all, or raise an OutputError: a disk may fill up meanwhile."""
    try:
        with written_whole(path) as whole:
            whole.write_bytes(content)
    except OSError as error:
        raise OutputError(_unwritable(f"{option} {path}", error)) from error


def new_axes(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> "tuple[Figure, np.ndarray[Any, Any]]":
    """Return a figure of this size in inches and its axes by row and column; ``options`` as of ``Figure.subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend_columns(figure: "Figure") -> int:
    """Return how many entries of a legend fit side by side above the plots."""
    # A handle and a name of 20 characters at 9 points; "activations and buffers" and its handle take 1.8 inches at 7.
    return max(1, int(figure.get_figwidth() / 1.8))


def write_figure(figure: "Figure", path: Path, option: str = "--plot", metadata: dict[str, Any] | None = None) -> None:
    """Write a picture in the format of its file's ending, or raise an OutputError."""
    content = io.BytesIO()
    _show_names_as_typed(figure)
    figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata)
    if path.suffix == ".png":  # In 256 colours, which is all that plots have: a third of the bytes.
        from PIL import Image

        picture = Image.open(content).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        content = io.BytesIO()
        picture.save(content, format="png", optimize=True)
    write_file(path, content.getvalue(), option)


def _show_names_as_typed(figure: "Figure") -> None:
    """Let no name be read as mathematics (``$x$``) or LaTeX, as only powers of ten on logarithmic axes should be."""
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter

    # A logarithmic axis writes its ticks as powers, but its label is a name.
    logarithmic = [axis for axis in figure.findobj(Axis) if isinstance(axis.get_major_formatter(), LogFormatter)]
    powers = {text for axis in logarithmic for text in axis.findobj(Text) if text is not axis.label}
    for text in figure.findobj(Text):
        if text not in powers:
            text.set_parse_math(False)
            text.set_usetex(False)


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Raise ReaderLeft where nobody reads standard output in this context, or OutputError where it cannot be written.

    Characters that its encoding lacks become ``?``: numbers that took an hour to measure must not end in a traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError as error:
        _discard_stdout()
        raise ReaderLeft from error
    except OSError as error:
        _discard_stdout()
        raise OutputError(_unwritable("standard output", error)) from error


def _discard_stdout() -> None:
    """Send buffered text to nowhere, or Python would try again at its end, and print a traceback."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _unwritable(name: str, error: OSError) -> str:
    return f"cannot write {name}: {error.strerror or error}"
