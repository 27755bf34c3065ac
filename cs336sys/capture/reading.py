"""Reading of a profiler's file, of whatever kind it is, and of the files of several ranks."""

import codecs
import itertools
import re
import sqlite3
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cs336sys.capture.analysis import Analysis, analyze
from cs336sys.capture.capture import EMPTY, FILE_BYTES, TOO_SLOW, Capture, ForeignFileError, say_capture
from cs336sys.capture.chrome_trace import GZIP_MAGIC, UTF16_MARKS, ZIP_MAGIC, content_digest, load_trace
from cs336sys.capture.integrity import check_capture
from cs336sys.capture.nsys import REPORT_SUFFIXES, export, load_export
from cs336sys.capture.ranks import RanksAnalysis, match_ranks
from cs336sys.capture.timeline import Timeline, timelines
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.machine.diagnosis.software import find_nsys
from cs336sys.processes.files import OwnedFolder
from cs336sys.results.foreign import MIB

# What damaged compression, tables, text and values raise.
_DAMAGE = (
    *(OSError, EOFError, zlib.error, zipfile.BadZipFile, sqlite3.DatabaseError, ArithmeticError, RecursionError),
    *(ValueError, KeyError, TypeError, AttributeError),
)
_ENDINGS = (".json", ".json.gz", ".sqlite", *REPORT_SUFFIXES)


def open_capture(path: Path, called: str | None = None) -> Capture:
    """Read an nsys report (``.nsys-rep``, exported by the installed nsys), its export, or a trace of torch.profiler.

    Args:
        called: what errors call the file instead of its path, such as the report that a database was exported from.

    Raises:
        UsageError: the file cannot be read, or is none of these, or lacks what is needed.
        CapabilityError: it is a report, and nsys is not installed.
    """
    called = called or str(path)
    try:
        # Opening what is missing, or a folder, raises an error that says so; opening a pipe would wait.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"{called} {say_capture('pipe')}")
        with path.open("rb") as stream:
            head = stream.read(4096)  # White space may precede JSON.
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read {called}: {error.strerror or error}") from error
    if size > FILE_BYTES:
        raise UsageError(f"{called} {say_capture('too large', mib=FILE_BYTES // MIB)}")
    if not head:
        raise UsageError(f"{called} {EMPTY}")
    is_database = head.startswith(b"SQLite format 3\x00")
    if path.suffix in REPORT_SUFFIXES and not is_database:  # An export needs no nsys, whatever its name.
        nsys = find_nsys()
        if nsys is None:
            raise CapabilityError(f"{path} {say_capture('no nsys', file=path.name)}")
        with OwnedFolder() as folder:
            database = folder / "report.sqlite"
            export(nsys, path, database)
            return open_capture(database, called)
    if path.suffix == ".qdstrm":
        raise UsageError(f"{called} {say_capture('failed importer')}")
    is_json = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"["))
    if not is_database and not is_json and not head.startswith((GZIP_MAGIC, ZIP_MAGIC, *UTF16_MARKS)):
        raise UsageError(f"{called} {say_capture('no report')}")
    try:
        return check_capture(load_export(path) if is_database else load_trace(path))
    except UsageError as error:
        raise type(error)(f"{called} {error}") from error
    except _DAMAGE as error:
        # load_export lets SQLite interrupt itself after READING_S.
        if getattr(error, "sqlite_errorname", None) == "SQLITE_INTERRUPT":
            raise UsageError(f"{called} {TOO_SLOW}") from error
        kind = "an SQLite database" if is_database else "a trace of torch.profiler"
        raise UsageError(f"{called} cannot be read as {kind}: {error}") from error


@dataclass(frozen=True)
class AnalysedCaptures:
    """Captures that were read and analysed."""

    analyses: tuple[Analysis, ...]  # Of each GPU, ordered by rank.
    timelines: tuple[Timeline, ...]  # Likewise.
    path: Path  # The first file.
    capture: Capture  # Of it.
    ranks: RanksAnalysis | None  # Analysis of all together; None for a single GPU, or where no collectives match.
    notes: tuple[str, ...]  # How ranks were told apart.


def capture_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those of folders, each once, or raise a UsageError: a folder holds no capture."""
    files: dict[Path, None] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():  # Each rank may have a folder in it.
            inside, deeper = ([file for file in path.glob(way) if file.name.endswith(_ENDINGS)] for way in ("*", "*/*"))
            inside = sorted(inside or deeper, key=_natural_key)
            if not inside:
                raise UsageError(f"{path} is a folder without captures: files that end in {', '.join(_ENDINGS)}")
        files |= dict.fromkeys(inside)
    return list(files)


def _natural_key(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names by their values: rank 2 before rank 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


class _GpuCapture(NamedTuple):
    """One GPU of one file."""

    path: Path
    capture: Capture
    timeline: Timeline
    gpus_in_file: int


def read_captures(paths: Sequence[Path], step: str | None = None, *, single: bool = False) -> AnalysedCaptures:
    """Read one capture, or those of several ranks.

    Ranks are those that files name; where they name none or one twice, those of file names (``rank3``), else their
    order. GPUs of one capture are told apart like ranks. Other programs' files in a folder are passed over. ``step``:
    name of the ranges that are the steps. A UsageError refuses unreadable files, two of a rank, two where one is read.
    """
    gpus: list[_GpuCapture] = []
    passed_over: list[ForeignFileError] = []
    for path in capture_files(paths):
        try:
            capture = open_capture(path)
        except ForeignFileError as error:
            if path in paths:
                raise
            passed_over.append(error)
            continue
        if single and gpus:
            raise UsageError(f"one report is read at a time, not {gpus[0].path} and {path}: run the command for each")
        try:
            file_timelines = timelines(capture, step)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        gpus += [_GpuCapture(path, capture, timeline, len(file_timelines)) for timeline in file_timelines]
    if not gpus:
        raise passed_over[0]
    capture_of_file = {gpu.path: gpu.capture for gpu in gpus}
    for first, second in itertools.combinations(capture_of_file, 2):
        begin, also_begin = (capture_of_file[path].work.start for path in (first, second))
        if np.array_equal(begin, also_begin) and content_digest(first) == content_digest(second):
            raise UsageError(f"{first} and {second} are copies of one file, and no two ranks: leave one out")
    world = _world_size(gpus)
    rank_of_file, notes = _ranks_of_files({path: capture.rank for path, capture in capture_of_file.items()}, world)
    notes += tuple(f"passed over: {error}" for error in passed_over)
    gpus.sort(key=lambda gpu: (rank_of_file[gpu.path], gpu.timeline.gpu[0]))
    gpu_timelines = tuple(gpu.timeline for gpu in gpus)
    ranks = None
    if len(gpus) > 1:
        # One file may hold the GPUs of all ranks.
        missing = _missing_ranks(set(rank_of_file.values()), world, notes) if len(rank_of_file) > 1 else ""
        ranks = match_ranks(gpu_timelines, missing)
        if ranks is None:
            notes += (say_capture("no collectives"),)
    analyses = []
    named_parts = 1 if len({path.name for path in rank_of_file}) == len(rank_of_file) else 2  # With its folder's name.
    for place, (gpu, label) in enumerate(zip(gpus, _labels(gpus, rank_of_file), strict=True)):
        file = "/".join(gpu.path.parts[-named_parts:])
        waiting_ns = None if ranks is None or ranks.matching.why_no_waits else ranks.waiting_ns[place]
        analysis = analyze(gpu.capture, gpu.timeline, file, label, waiting_ns, ranks=-1 if ranks is None else len(gpus))
        # By the numbers of match_ranks: equal ones are one step on all ranks.
        numbers = analysis.step_numbers if ranks is None else ranks.step_numbers[place]
        analyses.append(replace(analysis, step_numbers=numbers))
    return AnalysedCaptures(tuple(analyses), gpu_timelines, gpus[0].path, gpus[0].capture, ranks, notes)


_RANKS_BY_NAME = "ranks by the names of the files"
_RANKS_BY_ORDER = "the files do not say their ranks, which are their order here"


def _ranks_of_files(recorded_ranks: Mapping[Path, int | None], world: int) -> tuple[dict[Path, int], tuple[str, ...]]:
    """Return the rank of each file, and notes on how they were told apart.

    Where a file has recorded none, or two the same, the names of files and folders decide (``rank3``). Where these do
    not tell all files apart, their order does, unless all have recorded a rank: then two of one rank are an error.
    """
    ranks = [rank for rank in recorded_ranks.values() if rank is not None]
    if len(recorded_ranks) == 1 or len(set(ranks)) == len(recorded_ranks):
        return dict(zip(recorded_ranks, ranks or [0], strict=True)), ()  # A single file that names none is rank 0.
    for named_parts in (1, 2):  # The file's name, then with that of its folder.
        names = ["/".join(path.parts[-named_parts:]) for path in recorded_ranks]
        numbers = [re.findall(r"rank[-_ .=]?(\d+)", name, re.IGNORECASE) for name in names]
        ranks_in_names = [max(map(int, of_name)) for of_name in numbers if of_name]  # A local rank is no larger.
        if len(set(ranks_in_names)) == len(recorded_ranks):
            return dict(zip(recorded_ranks, ranks_in_names, strict=True)), (_RANKS_BY_NAME,)
    if len(ranks) < len(recorded_ranks):
        if numbers_in_names := _distinct_numbers(names, world):
            return dict(zip(recorded_ranks, numbers_in_names, strict=True)), (_RANKS_BY_NAME,)
        return {path: place for place, path in enumerate(recorded_ranks)}, (_RANKS_BY_ORDER,)
    repeated_rank = next(rank for rank in ranks if ranks.count(rank) > 1)
    files = " and ".join(str(path) for path, rank in recorded_ranks.items() if rank == repeated_rank)
    raise UsageError(f"{files} say that they are rank {repeated_rank}: give one file a rank, or name them rank0, rank1")


def _labels(gpus: Sequence[_GpuCapture], rank_of_file: Mapping[Path, int]) -> list[str]:
    """Return what tells each GPU from the others; "" for the only one."""
    names = [f"GPU {gpu.timeline.gpu[0]}" for gpu in gpus]  # All work of a timeline is of one GPU and one process.
    if len(rank_of_file) > 1:
        ranks = [f"rank {rank_of_file[gpu.path]}" for gpu in gpus]
        rows = zip(gpus, ranks, names, strict=True)
        return [f"{rank}, {name}" if gpu.gpus_in_file > 1 else rank for gpu, rank, name in rows]
    if len(set(names)) < len(gpus):
        # Several processes of the file ran on the same GPU.
        return [f"{name} of process {gpu.timeline.process[0]}" for gpu, name in zip(gpus, names, strict=True)]
    return names if len(gpus) > 1 else [""]


def _distinct_numbers(names: Sequence[str], world: int) -> tuple[int, ...]:
    """Return the numbers that alone tell names apart if they are ranks of the world (``TP-0``, ``TP-2``), else none."""
    zeros = (0,) * len(names)
    # Coordinates of a grid (``dp1-tp0``) are columns, too: unless all others are 0, none of them is the rank.
    columns, coordinates = (
        {tuple(map(int, column)) for column in zip(*map(number.findall, names), strict=False)}
        for number in (re.compile(r"\d+"), re.compile(r"(?<![a-z])[cdept]p[-_ .=]?(\d+)", re.IGNORECASE))
    )
    # Times and processes are beyond the world size.
    varying = {column for column in columns if len(set(column)) > 1 and (max(column) < world or not world)}
    is_alike = len({re.sub(r"\d+", "0", name) for name in names}) == 1
    if not is_alike or len(varying) != 1 or coordinates - varying - {zeros}:
        return ()
    (column,) = varying
    is_rank = len(set(column)) == len(names) and (world > 0 or column in coordinates)
    return column if is_rank else ()


def _world_size(gpus: Sequence[_GpuCapture]) -> int:
    """Return the world size by any file's, any group's size, and the ranks that groups list; 0 if none is recorded."""
    world_sizes = [gpu.capture.ranks for gpu in gpus]
    for gpu in gpus:
        records = gpu.timeline.collective_records
        world_sizes += [record.ranks for record in records[:1000]]  # Steps repeat the same collectives.
        # torch shortens long lists of ranks with "...".
        for group in {record.group for record in records if "..." not in record.group}:
            listed = re.search(r"\[[\d, ]*\]", group)
            world_sizes += [int(rank) + 1 for rank in re.findall(r"\d{1,9}", listed[0] if listed else "")]
    return max(world_sizes)


def _missing_ranks(ranks: set[int], world: int, notes: Sequence[str]) -> str:
    """Name the ranks that have no file, or say how many if ranks are just the files' order; "" for none."""
    if _RANKS_BY_ORDER in notes:
        count, missing = max(world - len(ranks), 0), []
    else:
        # A damaged file may name any number. A gap between ranks shows even where no size is recorded.
        missing = sorted({*range(min(world, 100_000)), *range(min(ranks), min(max(ranks), 100_000))} - ranks)
        count, world = len(missing), max(world, max(ranks) + 1)
    return say_capture("missing ranks", count=count, world=world, ranks=missing[:9]) if count else ""
