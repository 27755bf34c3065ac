"""``cs336sys trace``: what a capture says, of any number of ranks, and what changed between two."""

import contextlib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cs336sys import __version__
from cs336sys.command_line.faults import say
from cs336sys.command_line.options.output import OutputOptions, SaveOption
from cs336sys.command_line.options.reading import reads_file, setting, writes_file
from cs336sys.errors import UsageError
from cs336sys.findings import sentence
from cs336sys.results.model import Cell, Run
from cs336sys.results.recording import command_line, record

if TYPE_CHECKING:
    from cs336sys.accounting.communication import BusBandwidths
    from cs336sys.accounting.hardware import Ceilings
    from cs336sys.capture.analysis import Analysis


@dataclass(frozen=True)
class ReadingOptions:
    """Options for what captures are compared with, and for what is shown of them."""

    against: Annotated[
        Sequence[Path], reads_file(help="A later capture (or ranks, or a folder): show what changed.")
    ] = ()
    step: Annotated[str | None, setting(help="Name of the ranges that are the steps.")] = None
    top: Annotated[int, setting(help="Show this many kernels, operators and modules.", min=1)] = 10
    full_names: Annotated[bool, setting("--full-names", help="Show the whole names of kernels.")] = False
    roofline: Annotated[
        bool, setting("--roofline", help="Compare operators with the GPU's peak FLOPs and bandwidth.")
    ] = False
    ceilings: Annotated[
        Path | None, reads_file(help="--roofline with what doctor --ceilings measured on that GPU.")
    ] = None
    allreduce: Annotated[
        Path | None, reads_file(help="Results of allreduce on such GPUs, for collectives' bandwidth alone.")
    ] = None

    def check_gpu(self, measured: "Ceilings", analyses: Iterable["Analysis"]) -> None:
        """Raise a UsageError for a capture of another GPU than the one that ``--ceilings`` measured."""
        for analysis in analyses:
            if analysis.gpu_name != measured.gpu:
                facts = {"path": self.ceilings, "measured_gpu": measured.gpu, "analysis": analysis}
                raise UsageError(sentence(__package__, "other ceilings", **facts))


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Captures of torch.profiler or nsys, one a rank, or their folder."),
    ],
    reading: ReadingOptions = ReadingOptions(),
    html: Annotated[
        Path | None, writes_file("--html", help="Write timeline and tables to this page, and print the verdict.")
    ] = None,
    save: SaveOption = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Say where the time of a recorded training step goes, which rank holds the others up, and what to try next.

    cs336sys trace step.json.gz

    cs336sys trace run/ --html run.html

    cs336sys trace before.nsys-rep --against after.nsys-rep
    """
    from cs336sys.accounting.hardware import read_ceilings
    from cs336sys.capture.reading import read_captures
    from cs336sys.commands.trace.difference_tables import AFTER, BEFORE, capture_cells, saved_trace_tables
    from cs336sys.commands.trace.page import trace_page
    from cs336sys.commands.trace.tables import DisplayOptions
    from cs336sys.results.file import check_appendable
    from cs336sys.tables.outputs import write_file
    from cs336sys.tables.page import check_page_writable

    output.check()
    check_page_writable(html)
    if reading.allreduce is not None and reading.against:
        raise UsageError("--allreduce: --against compares no collectives' bandwidths; choose one of the two")
    ceilings = None if reading.ceilings is None else read_ceilings(reading.ceilings)
    if save is not None:
        check_appendable(save)
    captures = {BEFORE: read_captures(files, reading.step)}
    if reading.against:
        captures[AFTER] = read_captures(reading.against, reading.step)
    for captures_of_side in captures.values():
        for note in captures_of_side.notes:
            say(f"note: {note}")
        if ceilings is not None:
            reading.check_gpu(ceilings, captures_of_side.analyses)
    first_analyses = captures[BEFORE].analyses
    bandwidths = None if reading.allreduce is None else _read_bandwidths(reading.allreduce, first_analyses)
    roofline = reading.roofline or ceilings is not None
    shown = DisplayOptions(reading.top, reading.full_names, roofline, ceilings, bandwidths)
    run_id = str(uuid.uuid4())
    cells = [cell for side, of_side in captures.items() for cell in capture_cells(side, of_side, shown, run_id)]
    tables = saved_trace_tables(cells, reading.top, reading.full_names)
    _record_and_save(save, run_id, first_analyses[0], cells)
    # With a page, tables are printed if anything of their output was chosen; else the verdict alone.
    if html is None or any(vars(output).values()):
        output.emit(tables)
    else:
        output.write(tables[:1])
    if html is not None:
        write_file(html, trace_page(tables, list(captures.values())).encode(), "--html")
        say(f"wrote {html}")


def _read_bandwidths(path: Path, analyses: Iterable["Analysis"]) -> "BusBandwidths":
    """Read what ``allreduce`` measured on the GPUs of the capture, or with Gloo for one of CPUs."""
    from cs336sys.accounting.communication import BusBandwidths
    from cs336sys.results.model import read_results

    gpu = next((analysis.gpu_name for analysis in analyses if analysis.gpu_name), "")
    results = read_results(path)
    cells = [cell for cell in results.cells if not gpu or results.runs[cell.run_id].machine.get("gpu") == gpu]
    bandwidths = BusBandwidths.of_cells(cells, "nccl" if gpu else "gloo")
    if not bandwidths.points:
        raise UsageError(sentence(__package__, "other collectives", path=path, gpu=gpu))
    return bandwidths


def _record_and_save(path: Path | None, run_id: str, first: "Analysis", cells: list[Cell]) -> None:
    from cs336sys.results.file import ResultsFile

    # Of the machine that made the capture, not this one: its file names the GPU alone.
    machine = {"gpu": first.gpu_name or None, "profiler": first.profiler}
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    run = Run(run_id, now, command_line(), machine, {"cs336sys": __version__})
    record(run, *cells)
    if path is None:
        return
    with contextlib.closing(ResultsFile(path)) as results:
        results.append(run)
        for cell in cells:
            results.append(cell)
        if results.fault is not None:
            raise results.fault
