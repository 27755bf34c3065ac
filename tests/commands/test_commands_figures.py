"""What commands make of values and of other commands, written down in ``figures.txt`` (tests/written_figures.py)."""

# Further names are used in figures.txt.
# ruff: noqa: F401

import re
from pathlib import Path

import pytest
from run_commands import invoke
from written_figures import read_figures, rows_of, write_figures

from cs336sys.command_line.options.bytes import read_memory_limit
from cs336sys.commands.allreduce.options import message_sizes
from cs336sys.commands.memprof.page import axis_ticks

PATH = Path(__file__).with_name("figures.txt")


def job(line):
    """Return the GPUs of a node, who starts the ranks, and the command that a job runs."""
    result = invoke("slurm", line)
    assert result.exit_code == 0, result.output
    (gpus,) = re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", result.stdout, re.MULTILINE)
    start = "torchrun" if "torch.distributed.run" in result.stdout else "the command"
    return int(gpus), start, result.stdout.rpartition(" cs336sys ")[2].strip()


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_figures_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


if __name__ == "__main__":
    write_figures(PATH, globals())
