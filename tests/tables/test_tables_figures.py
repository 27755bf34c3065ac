"""What numbers and tables look like in each format and on terminals of any width, written down in ``figures.txt``.

Lines of a text end in ``|`` there (tests/written_figures.py).
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import html
import io
import json
import math
import re
from dataclasses import replace

from rich.console import Console
from written_figures import figures_test, outcome

from cs336sys.accounting.derivation import Derived
from cs336sys.commands.bench.tables import bench_tables, clock_notes, joined_readings, median_clock
from cs336sys.commands.ddp.tables import ddp_tables
from cs336sys.commands.losses.tables import loss_tables
from cs336sys.results.model import Cell, Run, Samples
from cs336sys.results.statistics import Interval
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.profiling import LossWorkload
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.tables.numbers import (
    format_mean_std,
    format_number,
    format_operand,
    format_quantity,
    format_value,
    in_shown_unit,
    unit_label,
)
from cs336sys.tables.outputs import FORMATS
from cs336sys.tables.page import html_page, html_table
from cs336sys.tables.predictions import answers_table
from cs336sys.tables.render import render
from cs336sys.tables.table import Column, Table, grid_of, select_columns, select_in_groups
from cs336sys.tables.terminal import print_tables
from cs336sys.tables.titles import interpreted_notes, steps_words


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


NOISY = Table(
    "t",
    "T",
    (Column("step_ms", "step", "ms"), Column("over", "over", "ratio")),
    [{"step_ms": ms(1.0, 3.0), "over": Interval(1.1, 0.5, 2.0, 1.0, to_decide=40)}, {"over": 1.0}],
    steadier="more --steps",
)
# What people do not see and programs get: settings, origin and hidden columns.
WHOLE = Table(
    "t",
    "t",
    (Column("step_ms", "step", "ms", spread="samples"), Column("wall_ms", "wall", "ms")),
    [{"size": "tiny", "seed": 0, "wall_ms": 2.0, "run_id": "a"}],
    hidden=["wall_ms"],
    settings=[Column("size", "size"), Column("seed", "seed")],
    origin=[Column("run_id", "run")],
)


def held(*rows):
    """Return a table of two columns of memory, in GiB."""
    columns = (Column("peak_gib", "peak", "gib"), Column("state_gib", "state", "gib"))
    return Table("m", "m", columns, [dict(zip(("peak_gib", "state_gib"), row, strict=True)) for row in rows])


def headers(tables):
    return [[column.header for column in table.shown_columns] for table in tables]


def notes_of_interpreter(*settings, device="cuda", gpu="NVIDIA H200", interpreted="1"):
    cells = [Cell("bench", {"device": device} | each, "ok") for each in settings]
    return interpreted_notes(cells, Run("", "", (), {"gpu": gpu}, {"TRITON_INTERPRET": interpreted}))


def title(**settings):
    """Return the title of a step that failed, with these settings."""
    return bench_tables([Cell("bench", Workload(SIZES["tiny"], **settings).configuration(), "oom")], None)[0].title


def losses(count):
    """Return the header of the last losses' mean, and the mean, of losses 0, 1, 2, ..."""
    values = Samples("nats", "of every step", tuple(map(float, range(count))))
    configuration = LossWorkload(Workload(SIZES["tiny"]), "README.md", text_digest="0123").configuration()
    (table,) = loss_tables([Cell("losses", configuration, "ok", {"loss": values})], None)
    return [(column.header, table.rows[0]["last_loss"]) for column in table.columns if column.key == "last_loss"]


def sent_by(*transports):
    """Return the title of bucketed steps, and whether it takes a column to tell them apart."""
    workload = Workload(SIZES["tiny"])
    workloads = [ParallelWorkload(workload, "bucketed", 2, bucket_mb="block", transport=one) for one in transports]
    table = ddp_tables([Cell("ddp", one.configuration(), "oom", reason="none") for one in workloads], None)[0]
    return table.title, "transport" in [column.key for column in table.columns]


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
