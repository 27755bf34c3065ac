"""Opens a profiler's file, of whatever kind it is, and the files of several ranks."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cs336sys.capture.analysis import Analysis, analyze
from cs336sys.capture.capture import FILE_BYTES, Capture, group_ranks
from cs336sys.capture.chrome_trace import GZIP_MAGIC, UTF16_MARKS, ZIP_MAGIC, read_chrome_trace
from cs336sys.capture.nsys import REPORT_SUFFIXES, export, read_nsys_database
from cs336sys.capture.ranks import RanksAnalysis, match_ranks
from cs336sys.capture.timeline import Timeline, timelines
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.measure.diagnosis.profilers import find_nsys
from cs336sys.processes.folders import OwnedFolder
from cs336sys.results.foreign import MIB


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
            head, size = stream.read(4096), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if size > FILE_BYTES:
        raise UsageError(
            f"{path} holds more than {FILE_BYTES // MIB:,} MiB, which is the most that is read: profile fewer steps"
        )
    if head.startswith(b"SQLite format 3\x00"):
        return read_nsys_database(path)
    if path.suffix in REPORT_SUFFIXES:
        return _export_and_read(path)
    if path.suffix == ".qdstrm":
        raise UsageError(
            f"{path} is what nsys leaves when its importer fails: run its QdstrmImporter, or fix what "
            "`cs336sys doctor` says about it and profile again"
        )
    is_text = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"["))
    if is_text or head.startswith((GZIP_MAGIC, ZIP_MAGIC, *UTF16_MARKS)):
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


def read_captures(paths: Sequence[Path], step: str | None = None) -> Read:
    """Read one capture, or those of several ranks.

    Ranks are those that files name; where they name none or one twice, those of file names (``rank3``), else their
    order. GPUs of one capture are told apart like ranks.

    Args:
        step: name of the ranges that are the steps.

    Raises:
        UsageError: a file cannot be read, or two are of one rank.
    """
    rank_captures = []
    for path in capture_files(paths):
        capture = open_capture(path)
        try:
            of_file = timelines(capture, step)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        rank_captures += [(path, capture, timeline, len(of_file)) for timeline in of_file]
    labels, notes, order, missing = _labels(rank_captures)
    rank_captures = [rank_captures[number] for number in order]
    labels = [labels[number] for number in order]
    gpu_timelines = tuple(timeline for _, _, timeline, _ in rank_captures)
    ranks = match_ranks(gpu_timelines, missing) if len(rank_captures) > 1 else None
    analyses = []
    for number, (path, capture, timeline, _) in enumerate(rank_captures):
        if ranks is None:
            analyses.append(analyze(capture, timeline, path, labels[number]))
            continue
        waiting_ns = None if ranks.matching.why_no_waits else ranks.waiting_ns[number]
        analysis = analyze(capture, timeline, path, labels[number], waiting_ns, len(rank_captures))
        analyses.append(replace(analysis, step_numbers=ranks.step_numbers[number]))
    if len(rank_captures) > 1 and ranks is None:
        notes = (*notes, "no collectives that join ranks are on more than one rank, so that nobody can say who waited")
    return Read(tuple(analyses), gpu_timelines, rank_captures[0][1], ranks, notes)


RankCapture = tuple[Path, Capture, Timeline, int]


def _labels(rank_captures: Sequence[RankCapture]) -> tuple[list[str], tuple[str, ...], list[int], str]:
    """Return labels of GPUs and ranks, notes about them, their order, and which ranks have no file, in words."""
    files = list(dict.fromkeys(path for path, *_ in rank_captures))
    if len(files) == 1:
        count = len(rank_captures)
        labels = [f"GPU {timeline.gpu}" if count > 1 else "" for _, _, timeline, _ in rank_captures]
        if len(set(labels)) < count:
            labels = [f"GPU {timeline.gpu} of process {timeline.process}" for _, _, timeline, _ in rank_captures]
        return labels, (), list(range(count)), ""
    ranks = [
        next(capture.rank for capture_path, capture, *_ in rank_captures if capture_path == path) for path in files
    ]
    notes: tuple[str, ...] = ()
    is_counted = False
    if None in ranks or len(set(ranks)) < len(ranks):
        names = [re.search(r"rank[-_ .]?(\d+)", path.name, re.IGNORECASE) for path in files]
        if all(names) and len({name[1] for name in names if name}) == len(files):
            ranks, notes = [int(name[1]) for name in names if name], ("ranks by the names of the files",)
        elif None in ranks:
            ranks, notes = list(range(len(files))), ("the files do not say their ranks, which are their order here",)
            is_counted = True
        else:
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            both = " and ".join(str(path) for path, rank in zip(files, ranks, strict=True) if rank == twice)
            raise UsageError(f"{both} are both of rank {twice}: give one file for each rank")
    rank_of = dict(zip(files, ranks, strict=True))
    labels = [
        f"rank {rank_of[path]}" + (f", GPU {timeline.gpu}" if count > 1 else "")
        for path, _, timeline, count in rank_captures
    ]
    order = sorted(
        range(len(rank_captures)),
        key=lambda number: (rank_of[rank_captures[number][0]] or 0, rank_captures[number][2].gpu),
    )
    return labels, notes, order, _missing_ranks(rank_captures, [rank for rank in ranks if rank is not None], is_counted)


def _missing_ranks(rank_captures: Sequence[RankCapture], ranks: Sequence[int], is_counted: bool) -> str:
    """Name the ranks that the files or their groups speak of, and that have no file."""
    worlds = [capture.ranks for _, capture, *_ in rank_captures if capture.ranks]
    for *_, timeline, _ in rank_captures:
        for group in {record.group for record in timeline.collectives.records}:
            worlds.append(max(group_ranks(group) or (-1,)) + 1)
        worlds += [record.ranks for record in timeline.collectives.records[:1000]]
    world = max(worlds, default=0)
    missing = [] if is_counted else sorted(set(range(min(world, 100_000))) - set(ranks))
    if not missing and (not is_counted or len(ranks) >= world):
        return ""
    if is_counted or len(missing) > 8:
        return f"{world - len(ranks)} of {world} ranks have no file"
    noun, verb = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
    return f"{noun} {', '.join(map(str, missing))} of {world} {verb} no file"
