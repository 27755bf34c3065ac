"""What numbers and tables look like in each format and on terminals of any width, written down in ``figures.txt``.

Lines of a text end in ``|`` there (tests/written_figures.py).
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import io
import math
from dataclasses import replace

from rich.console import Console
from written_figures import figures_test, outcome

from cs336sys.accounting.derivation import Derived
from cs336sys.commands.bench.tables import clock_notes, joined_readings, median_clock
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import Interval
from cs336sys.tables.numbers import (
    format_mean_std,
    format_number,
    format_operand,
    format_quantity,
    format_value,
    in_shown_unit,
    unit_label,
)
from cs336sys.tables.predictions import answers_table
from cs336sys.tables.render import render
from cs336sys.tables.table import Column, Table, select_in_groups
from cs336sys.tables.terminal import print_tables


def ms(*measured):
    return Samples("ms", "cuda events", measured)


TIMES = Table(
    "times",
    "Times",
    [Column("size", "size"), Column("step_ms", "step", "ms"), Column("error", "error")],
    [
        {"size": "a", "step_ms": ms(3.0, 5.0), "error": "1.0e-05"},
        {"size": "b", "step_ms": ms(), "error": "2.0e-06"},
        {"size": "c", "step_ms": ms(1.0), "error": None},
        {"size": "d", "step_ms": 11.0, "error": "none"},
    ],
)
RATIOS = Table(
    "ratios",
    "Ratios",
    [Column("size", "size"), Column("ratio", "ratio", "ratio")],
    [{"size": name, "ratio": value} for name, value in (("a", Interval(2.0, 1.0, 3.0)), ("b", math.nan), ("c", 1.5))],
)


def order(tables):
    return ["".join(row["size"] for row in table.rows) for table in tables]


SWEEP = Table(
    "bench",
    "bench: H200, torch 2.11",
    (
        Column("size", "size"),
        Column("parameters", "parameters", "parameters"),
        Column("forward_ms", "forward", "ms"),
        Column("tokens_per_s", "tokens/s", "tokens_per_s"),
        Column("mfu_percent", "MFU", "percent"),
        Column("launch_bound", "launch-bound"),
        Column("status", "status"),
    ),
    [
        {"size": "small", "parameters": 128_625_408, "forward_ms": ms(12.0, 12.2, 12.7), "tokens_per_s": 165432.1}
        | {"mfu_percent": None, "launch_bound": True, "status": "ok", "seed": 3},
        {"size": "2.7b", "parameters": 3_406_809_600, "forward_ms": None, "status": "oom"},
    ],
    notes=("mean ± standard deviation of 3 steps",),
)

# Everything that one of the formats could take for its own syntax.
HOSTILE_TEXT = 'a|b <c> [d] *e* `f` _g_ h_i #j $k & 50% {l} ~m ^n \\o "p"'
HOSTILE = Table("hostile", HOSTILE_TEXT, (Column("text", HOSTILE_TEXT),), [{"text": HOSTILE_TEXT}], (HOSTILE_TEXT,))
EMPTY = Table("empty", "nothing measured", (Column("size", "size"), Column("step_ms", "step", "ms")), [])
MANY = Table(
    "bench",
    "bench: H200",
    (
        Column("size", "size"),
        Column("precision", "precision"),
        Column("bits", "bits"),
        *(Column(f"{phase}_ms", phase, "ms") for phase in ("forward", "backward", "optimizer")),
        Column("status", "status"),
    ),
    [
        {"size": "small", "precision": precision, "bits": 32 if row < 2 else 16, "status": "ok"}
        | {"forward_ms": 1000.0 + row, "backward_ms": 2.0, "optimizer_ms": ms(*(3.0 + row / 4, 3.0))}
        for row, precision in enumerate(["fp32", "tf32", "bf16", "fp16"])
    ],
)


def clocked(clocks, limits=None, degrees=60):
    """Return a cell whose GPU was read at these clocks, in MHz; None: it was not read."""
    count = len(clocks or ())
    readings = {
        "time_s": [0.05 * number for number in range(count)],
        "sm_clock_mhz": clocks,
        "temperature_c": [degrees] * count,
        "power_w": [500.0] * count,
        "clock_limits": limits or [""] * count,
    }
    return Cell("bench", {}, "ok", {}, {"gpu_readings": None if clocks is None else readings})


STEADY = clocked([345, 1980, 1980, 1965])
OF_AN_EARLIER_VERSION = Cell("bench", {}, "ok")


def lines(text):
    """Return the lines of a text, so wide that each gets a row of its own."""
    return [f"{line:58}|" for line in text.splitlines()]


def drawn(table, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_tables([table], console)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    assert max(map(len, text.splitlines())) <= width
    return lines(text)


test_figures_are_those_written_down = figures_test(globals())
