"""The rounds of ``bench``, pooled from made-up cells, and differences that noise may have made: ``rounds.txt``.

Expressions and what they give (tests/written_figures.py).
"""

# Further names are used in rounds.txt.
# ruff: noqa: F401

import math
from dataclasses import replace
from pathlib import Path

import pytest
from written_figures import read_figures, rows_of, write_figures

from cs336sys.commands.bench.tables import bench_tables, pool_bench_rounds
from cs336sys.results.model import Cell, Samples, read_results
from cs336sys.results.statistics import Interval
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload
from cs336sys.tables.numbers import format_value
from cs336sys.tables.render import render
from cs336sys.tables.table import with_rows
from cs336sys.tables.titles import largest_known

PATH = Path(__file__).with_name("rounds.txt")
GRAPHS = Path(__file__).parents[2] / "docs" / "results" / "bench-graph-h200.jsonl.gz"

# Of a step at size tiny, batch 4, context 512, by hand: 3 passes' worth of 2 layers' projections (4 x 2 x 2048 x 128^2)
# and attention (4 x 4 x 4 x 512^2 x 32 / 2) and feed-forward (3 x 2 x 2048 x 128 x 512), and of the output head.
TINY_TFLOP = 3 * (2 * (268_435_456 + 268_435_456 + 805_306_368) + 5_242_880_000) / 1e12


def cell(number, step_ms, *, status="ok", reason=None, peak_gib=0.5, gpu_busy_ms=5.0, mfu_percent=50.0, **settings):
    """A cell of round ``number`` on a GPU with a peak of 4 TFLOP/s (unless it is unknown)."""
    configuration = Workload(
        SIZES["tiny"], device="cuda", warmup=1, steps=len(step_ms) or 1, **settings
    ).configuration()
    configuration |= {} if number is None else {"round": number}
    if status != "ok":
        return Cell("bench", configuration, status, reason=reason)
    samples = {
        name: Samples(
            "ms", "cuda events", tuple(share * ms for ms in step_ms), warmup=(share * 1000.0 * (number or 1),)
        )
        for name, share in {"forward": 0.25, "backward": 0.5, "optimizer": 0.25, "step": 1.0, "wall": 2.0}.items()
    }
    derived = {
        "parameters": 3_084_928,
        "first_step_s": 10.0 * (number or 1),
        "peak_gib": peak_gib,
        # Other than what follows from the samples, so that columns which are not made anew stand out.
        "tokens_per_s": 1.0,
        "tflops": 2.0,
        "mfu_percent": mfu_percent,
        "gpu_busy_ms": gpu_busy_ms,
    }
    return Cell("bench", configuration, "ok", samples, derived)


def read_by_sensors(cell, gib, clock):
    """Return a cell with a peak of main memory and one reading of its GPU's clock."""
    readings = {"peak_resident_gib": gib, "gpu_readings": {"time_s": [0.1], "sm_clock_mhz": [clock]}}
    return replace(cell, derived=cell.derived | readings)


ROUNDS = [
    read_by_sensors(cell(1, (10.0, 20.0), peak_gib=0.5, gpu_busy_ms=5.0), 0.7, 1980),
    read_by_sensors(cell(2, (30.0, 60.0), peak_gib=0.7, gpu_busy_ms=21.0), 0.9, 1500),
    read_by_sensors(cell(3, (40.0, 20.0), peak_gib=0.6, gpu_busy_ms=20.0), 0.8, 1900),
]
BROKEN = [
    cell(1, (10.0,)),
    cell(2, (), status="timeout", reason="not done after 5 s"),
    cell(3, (), status="oom", reason="out of memory at step 1/1"),
    cell(4, (10.0,)),
]
UNKNOWN = {"peak_gib": None, "gpu_busy_ms": None, "mfu_percent": None}


def by_attention(**steps):
    """Return rounds of one step or two, by attention."""
    rounds = range(max(map(len, steps.values())))
    named = [(number, name, of[number]) for number in rounds for name, of in steps.items() if number < len(of)]
    return [cell(number + 1, step_ms, attention=name, gpu_busy_ms=17.0) for number, name, step_ms in named]


def shown(cells, *names, **options):
    """Return the titles and notes of the tables of pooled cells, and these columns of each row that has them."""
    return [
        [table.title, *({name: plain(row[name]) for name in names if name in row} for row in table.rows), *table.notes]
        for table in with_rows(*bench_tables(pool_bench_rounds(cells), None, **options))
    ]


def plain(value):
    """Return the mean of samples; an interval's estimate, and what tables print of it."""
    if isinstance(value, Interval):
        return value.estimate, format_value(value, "ratio")
    return value.mean if isinstance(value, Samples) else value


def headers(method):
    """Return the columns of a step that was timed like this."""
    (one,) = pool_bench_rounds([cell(1, (10.0, 20.0))])
    one = replace(one, samples={name: replace(series, method=method) for name, series in one.samples.items()})
    return [column.key for column in bench_tables([one], None)[0].shown_columns]


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_rounds_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


if __name__ == "__main__":
    write_figures(PATH, globals())
