"""Opens a profiler's file, of whatever kind it is, and the files of several ranks."""

import os
import re
import sqlite3
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cs336sys.capture.analysis import Analysis, analyze
from cs336sys.capture.capture import FILE_BYTES, TOO_SLOW, Capture
from cs336sys.capture.chrome_trace import GZIP_MAGIC, UTF16_MARKS, ZIP_MAGIC, load_trace
from cs336sys.capture.integrity import check_capture
from cs336sys.capture.nsys import REPORT_SUFFIXES, export, load_export
from cs336sys.capture.ranks import RanksAnalysis, match_ranks
from cs336sys.capture.timeline import Timeline, timelines
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.machine.diagnosis.profilers import find_nsys
from cs336sys.processes.folders import OwnedFolder
from cs336sys.results.foreign import MIB

# Strangers' files: damaged compression, tables and text.
_DAMAGED = (OSError, EOFError, zlib.error, zipfile.BadZipFile, sqlite3.DatabaseError, ArithmeticError, RecursionError)
_WRONG_VALUES = (ValueError, KeyError, TypeError, AttributeError)


def open_capture(path: Path, called: str | None = None) -> Capture:
    """Read an nsys report (``.nsys-rep``, exported by the installed nsys), its export, or a trace of torch.profiler.

    Args:
        called: what errors call the file instead of its path.

    Raises:
        UsageError: the file cannot be read, or is none of these, or lacks what is needed.
        CapabilityError: it is a report, and nsys is not installed.
    """
    called = called or str(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"{called} is a pipe or a device, and a report is read more than once: give a file")
        with path.open("rb") as stream:
            head, size = stream.read(4096), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise UsageError(f"cannot read {called}: {error.strerror or error}") from error
    if size > FILE_BYTES:
        raise UsageError(
            f"{called} holds more than {FILE_BYTES // MIB:,} MiB, which is the most that is read: profile fewer steps"
        )
    is_database = head.startswith(b"SQLite format 3\x00")
    if path.suffix in REPORT_SUFFIXES and not is_database:
        nsys = find_nsys()
        if nsys is None:
            raise CapabilityError(
                f"{path} has to be exported by nsys, which is not installed here: where it is, run "
                f"`nsys export --type sqlite {path.name}`, and read the .sqlite file"
            )
        with OwnedFolder() as folder:
            database = folder / "report.sqlite"
            export(nsys, path, database)
            return open_capture(database, called)
    if path.suffix == ".qdstrm":
        raise UsageError(
            f"{called} is what nsys leaves when its importer fails: run its QdstrmImporter, or fix what "
            "`cs336sys doctor` says about it and profile again"
        )
    is_text = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"["))
    if not is_database and not is_text and not head.startswith((GZIP_MAGIC, ZIP_MAGIC, *UTF16_MARKS)):
        raise UsageError(
            f"{called} is no report: it should be a .nsys-rep or .sqlite file of Nsight Systems, or a trace of "
            "torch.profiler (.json, .json.gz)"
        )
    try:
        return check_capture(load_export(path) if is_database else load_trace(path))
    except UsageError as error:
        raise UsageError(f"{called} {error}") from error
    except (*_DAMAGED, *_WRONG_VALUES) as error:
        if getattr(error, "sqlite_errorname", None) == "SQLITE_INTERRUPT":
            raise UsageError(f"{called} {TOO_SLOW}") from error
        kind = "an SQLite database" if is_database else "a trace of torch.profiler"
        raise UsageError(f"{called} cannot be read as {kind}: {error}") from error


_ENDINGS = (".json", ".json.gz", ".sqlite", *REPORT_SUFFIXES)


@dataclass(frozen=True)
class Read:
    """Analyses of some captures.

    Attributes:
        analyses: of each GPU; of several ranks in their order.
        timelines: of the same.
        capture: the first file.
        ranks: what they say together; None for a single GPU, or where no collectives match.
        notes: how ranks were told apart.
    """

    analyses: tuple[Analysis, ...]
    timelines: tuple[Timeline, ...]
    capture: Capture
    ranks: RanksAnalysis | None
    notes: tuple[str, ...]


def capture_files(paths: Sequence[Path]) -> list[Path]:
    """The files, and those of the folders among them.

    Raises:
        UsageError: a folder holds no capture.
    """
    files: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted((file for file in path.iterdir() if file.name.endswith(_ENDINGS)), key=_natural_order)
            if not inside:
                raise UsageError(f"{path} is a folder without captures: files that end in {', '.join(_ENDINGS)}")
        files += [file for file in inside if file not in files]
    return files


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Sort numbers in names by their values: rank 2 before rank 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


class _RankCapture(NamedTuple):
    """One GPU of one file; ``gpus`` is how many the file has."""

    path: Path
    capture: Capture
    timeline: Timeline
    gpus: int


def read_captures(paths: Sequence[Path], step: str | None = None) -> Read:
    """Read one capture, or those of several ranks.

    Ranks are those that files name; where they name none or one twice, those of file names (``rank3``), else their
    order. GPUs of one capture are told apart like ranks.

    Args:
        step: name of the ranges that are the steps.

    Raises:
        UsageError: a file cannot be read, or two are of one rank.
    """
    gpus = []
    for path in capture_files(paths):
        capture = open_capture(path)
        try:
            of_file = timelines(capture, step)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        gpus += [_RankCapture(path, capture, timeline, len(of_file)) for timeline in of_file]
    rank_of, notes = _ranks_of_files({gpu.path: gpu.capture.rank for gpu in gpus})
    gpus.sort(key=lambda gpu: (rank_of[gpu.path], gpu.timeline.gpu[0]))
    ranks = None
    if len(gpus) > 1:
        missing = "" if len(rank_of) == 1 else _missing_ranks(gpus, rank_of.values(), is_counted=_COUNTED in notes)
        ranks = match_ranks([gpu.timeline for gpu in gpus], missing)
        if ranks is None:
            notes += ("no collectives that join ranks are on more than one rank, so that nobody can say who waited",)
    analyses = []
    for place, (gpu, label) in enumerate(zip(gpus, _labels(gpus, rank_of), strict=True)):
        waiting_ns = None if ranks is None or ranks.matching.why_no_waits else ranks.waiting_ns[place]
        analysis = analyze(gpu.capture, gpu.timeline, gpu.path, label, waiting_ns, -1 if ranks is None else len(gpus))
        analyses.append(analysis if ranks is None else replace(analysis, step_numbers=ranks.step_numbers[place]))
    return Read(tuple(analyses), tuple(gpu.timeline for gpu in gpus), gpus[0].capture, ranks, notes)


_COUNTED = "the files do not say their ranks, which are their order here"


def _ranks_of_files(recorded: Mapping[Path, int | None]) -> tuple[dict[Path, int], tuple[str, ...]]:
    """Return the rank of each file, and a note about them.

    Args:
        recorded: of each file, the rank that it names.
    """
    ranks = [rank for rank in recorded.values() if rank is not None]
    if len(recorded) == 1 or len(set(ranks)) == len(recorded):
        return dict(zip(recorded, ranks or [0], strict=True)), ()
    names = [re.search(r"rank[-_ .]?(\d+)", path.name, re.IGNORECASE) for path in recorded]
    named = [int(name[1]) for name in names if name]
    if len(set(named)) == len(recorded):
        return dict(zip(recorded, named, strict=True)), ("ranks by the names of the files",)
    if len(ranks) < len(recorded):
        return {path: place for place, path in enumerate(recorded)}, (_COUNTED,)
    twice = next(rank for rank in ranks if ranks.count(rank) > 1)
    both = " and ".join(str(path) for path, rank in recorded.items() if rank == twice)
    raise UsageError(f"{both} are both of rank {twice}: give one file for each rank")


def _labels(gpus: Sequence[_RankCapture], rank_of: Mapping[Path, int]) -> list[str]:
    if len(rank_of) > 1:
        return [f"rank {rank_of[gpu.path]}" + (f", GPU {gpu.timeline.gpu[0]}" if gpu.gpus > 1 else "") for gpu in gpus]
    labels = [f"GPU {gpu.timeline.gpu[0]}" if len(gpus) > 1 else "" for gpu in gpus]
    if len(set(labels)) < len(gpus):
        labels = [f"GPU {gpu.timeline.gpu[0]} of process {gpu.timeline.process[0]}" for gpu in gpus]
    return labels


def _missing_ranks(gpus: Sequence[_RankCapture], ranks: Collection[int], *, is_counted: bool) -> str:
    """Name the ranks that the files or their groups speak of, and that have no file."""
    worlds = [gpu.capture.ranks for gpu in gpus]
    for gpu in gpus:
        records = gpu.timeline.collective_records
        worlds += [record.ranks for record in records[:1000]]
        for group in {record.group for record in records if "..." not in record.group}:
            listed = re.search(r"\[[\d, ]*\]", group)
            worlds += [int(rank) + 1 for rank in re.findall(r"\d{1,9}", listed[0] if listed else "")]
    world = max(worlds)
    missing = [] if is_counted else sorted(set(range(min(world, 100_000))) - set(ranks))
    if not missing and (not is_counted or len(ranks) >= world):
        return ""
    if is_counted or len(missing) > 8:
        return f"{world - len(ranks)} of {world} ranks have no file"
    noun, verb = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
    return f"{noun} {', '.join(map(str, missing))} of {world} {verb} no file"
