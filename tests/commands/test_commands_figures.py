"""What commands make of values and of other commands, written down in ``figures.txt`` (tests/written_figures.py)."""

# Further names are used in figures.txt.
# ruff: noqa: F401

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from run_commands import invoke
from written_figures import read_figures, rows_of, write_figures

from cs336sys.accounting.hardware import Ceilings
from cs336sys.accounting.step_time.prediction import StepConfiguration
from cs336sys.command_line.options.reading import read_memory_limit
from cs336sys.commands.allreduce.options import message_sizes
from cs336sys.commands.doctor.options import ceilings_table
from cs336sys.commands.losses.tables import loss_tables
from cs336sys.commands.memprof.page import axis_ticks
from cs336sys.commands.nsys import measure
from cs336sys.commands.tune.tables import compared_to_best, fastest, is_decided
from cs336sys.errors import CapabilityError
from cs336sys.machine import diagnosis
from cs336sys.machine.diagnosis.software import Check, Profiler
from cs336sys.machine.system import Capacity, cpu_model
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.tables.titles import by_configuration

PATH = Path(__file__).with_name("figures.txt")


def job(line):
    """Return the GPUs of a node, who starts the ranks, and the command that a job runs."""
    result = invoke("slurm", line)
    assert result.exit_code == 0, result.output
    (gpus,) = re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", result.stdout, re.MULTILINE)
    start = "torchrun" if "torch.distributed.run" in result.stdout else "the command"
    return int(gpus), start, result.stdout.rpartition(" cs336sys ")[2].strip()


def account(line, *keys, table=0):
    """Return the titles of the tables that ``account`` prints, and columns of one of them."""
    printed = json.loads(invoke("account", line, "--format json").stdout)["tables"]
    return [shown["title"] for shown in printed], [
        tuple(row.get(key) for key in keys) for row in printed[table]["rows"]
    ]


def quantities(line, *wanted):
    """Return derived values that ``account`` prints."""
    printed = json.loads(invoke("account", line, "--format json").stdout)["tables"]
    rows = {row["quantity"]: row for table in printed for row in table["rows"] if "derivation" in row}
    return [(name, rows[name]["value"], rows[name]["unit"]) for name in wanted]


def compared(first, second, device="cuda"):
    """Return the checkpoints of the faster of two configurations, and whether their rounds decide that it is."""
    workload, cells = Workload(SIZES["tiny"], device=device), []
    for checkpointing, medians in (("none", first), ("block", second)):
        configuration = StepConfiguration(workload, checkpointing).configuration()
        for number, median in enumerate(medians, 1):
            step = Samples("ms", "cpu clock", tuple(median + 0.01 * n for n in range(5)))
            cells.append(Cell("tune", configuration | {"round": number}, "ok", {"step": step}))
    groups = by_configuration(cells)
    best = fastest(groups)
    (comparison,) = compared_to_best(groups, best).values()
    return groups[best][0].configuration["checkpointing"], is_decided(comparison, device)


def plan(line, *keys, gpu_gib=None):
    """Return the title and the notes of a dry run, columns of its rows, and what it says on a machine of such GPUs."""
    capacity = None if gpu_gib is None else Capacity("H200", gpu_gib)
    with (
        mock.patch("cs336sys.machine.system.capacity", return_value=capacity),
        mock.patch("cs336sys.commands.shard.options.gpu_capacity", return_value=capacity),
        mock.patch("cs336sys.run.cells.Worker.measure", None),
    ):
        result = invoke(line, "--dry-run --format json")
    if result.exit_code:
        return result.stderr
    (table,) = json.loads(result.stdout)["tables"]
    rows = [tuple(row.get(key) for key in keys) for row in table["rows"]]
    return [table["title"], *rows, *table["notes"], result.stderr]


def printed(line):
    """Return the exit code and the lines that a command prints on any machine."""
    result = invoke(line)
    shown = result.stdout.replace(cpu_model(), "a CPU").replace(torch.__version__, "TORCH")
    return [result.exit_code, *shown.splitlines(), *result.stderr.splitlines()]


def diagnosed(*checks):
    with mock.patch.object(diagnosis, "diagnose", return_value=list(checks)):
        return printed("doctor --format table")


def compared_losses(*runs):
    """Return whether steps are shown, and the differences of losses from the first of the same batches."""
    cells = []
    for losses, drawn_by in runs:
        configuration = {"text": "t", "text_digest": "1", "context": 4, "batch_size": 1, "seed": 0} | drawn_by
        cells.append(Cell("losses", configuration, "ok", {"loss": Samples("nats", "of every step", tuple(losses))}))
    (table,) = loss_tables(cells, None)
    columns = {column.key for column in table.columns}
    names = ("largest_difference", "mean_difference", "steps")
    return ["steps" in columns, *(tuple(row.get(name) for name in names) for row in table.rows)]


def profiler_of(name, device, is_installed, makes_reports=True):
    """Return whether a cell on this device is profiled by nsys, and why not; or the refusal."""
    installed = Profiler(Path("nsys"), "2025.3.1.0") if is_installed else None
    with (
        mock.patch.object(measure, "find_nsys", return_value=installed),
        mock.patch.object(measure, "makes_reports", return_value=makes_reports),
    ):
        try:
            chosen, why_not = measure._choose_nsys(name, torch.device(device))
        except CapabilityError as error:
            return str(error)
    return chosen is not None, why_not


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_figures_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


if __name__ == "__main__":
    write_figures(PATH, globals())
