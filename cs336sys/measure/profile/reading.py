"""Opens a profiler's file, of whatever kind it is. Standard library only."""

from pathlib import Path

from cs336sys.errors import CapabilityError, UsageError
from cs336sys.measure.diagnosis.profilers import find_nsys
from cs336sys.measure.profile.capture import Capture
from cs336sys.measure.profile.chrome_trace import GZIP_MAGIC, read_chrome_trace
from cs336sys.measure.profile.nsys import REPORT_SUFFIXES, export, read_nsys_database
from cs336sys.processes.folders import OwnedFolder

_SQLITE_MAGIC = b"SQLite format 3\x00"


def open_capture(path: Path) -> Capture:
    """Read an nsys report (``.nsys-rep``, exported by the installed nsys), its export, or a trace of torch.profiler.

    Raises:
        UsageError: the file cannot be read, or is none of these, or lacks what is needed.
        CapabilityError: it is a report, and nsys is not installed.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"{path} is a pipe or a device, and a report is read more than once: give a file")
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if head.startswith(_SQLITE_MAGIC):
        return read_nsys_database(path)
    if path.suffix in REPORT_SUFFIXES:
        return _export_and_read(path)
    if path.suffix == ".qdstrm":
        raise UsageError(
            f"{path} is what nsys leaves when its importer fails: run its QdstrmImporter, or fix what "
            "`cs336sys doctor` says about it and profile again"
        )
    if head.startswith(GZIP_MAGIC) or head.lstrip().startswith((b"{", b"[")):
        return read_chrome_trace(path)
    raise UsageError(
        f"{path} is no report: it should be a .nsys-rep or .sqlite file of Nsight Systems, or a trace of "
        "torch.profiler (.json, .json.gz)"
    )


def _export_and_read(report: Path) -> Capture:
    nsys = find_nsys()
    if nsys is None:
        raise CapabilityError(
            f"{report} has to be exported by nsys, which is not installed here: where it is, run "
            f"`nsys export --type sqlite {report.name}`, and read the .sqlite file"
        )
    with OwnedFolder() as folder:
        database = folder / "report.sqlite"
        export(nsys, report, database)
        # Everything is loaded by then, so the database may go.
        return read_nsys_database(database, str(report))
