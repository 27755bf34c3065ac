"""What statistics, files and matching give of small inputs, written down in ``figures.txt`` (tests/written_figures.py).

Other tests compare the statistics with scipy's and with simulated truths; here each count, limit and field has a row.
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import gzip
import math
import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from written_figures import figures_test, outcome

from cs336sys.errors import UsageError
from cs336sys.results import comparison, foreign, model, plain_pickle, recording, schema, statistics
from cs336sys.results.file import ResultsFile, check_appendable
from cs336sys.results.model import Cell, Results, Run, Samples

RISING = [1.0, 2.0, 4.0, 7.0, 11.0, 16.0]
MIXED = [3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0, 6.0]
RUN = (
    '{"schema_version": 1, "kind": "run", "run_id": "r", "time": "t", "arguments": [], "machine": {}, '
    '"environment": {}}'
)
CELL = (
    '{"schema_version": 1, "kind": "cell", "command": "bench", "configuration": {"size": "xl"}, "status": "ok", '
    '"samples": {"step": {"unit": "ms", "method": "m", "measured": [1.5], "warmup": []}}, "derived": {}, "run_id": "r"}'
)


def of(*measured, unit="ms"):
    return Samples(unit, "clock", measured)


def run(run_id="r", machine=None, **environment):
    return Run(run_id, "2026", (), machine or {}, environment)


def saved_arguments(*given, home="/home/me/"):
    """Return the words of a command line as they are saved, where /home/me is a link to /data/me."""
    with (
        patch.dict("os.environ", HOME=home),
        patch("os.path.realpath", lambda path: path.replace("/home/me", "/data/me")),
    ):
        return list(Run("id", "now", given, {}, {}).arguments)


def cell(*measured, run_id="r", status="ok", command="bench", unit="ms", series="step", **configuration):
    samples = {series: of(*measured, unit=unit)} if measured else {}
    return Cell(command, configuration, status, samples, {}, None, run_id)


def series(*runs, unit="ms"):
    """Return runs, of each its rounds, of each the samples; a single list is one round of one run."""
    runs = [[runs]] if not isinstance(runs[0], list) else runs
    return comparison.Measured(tuple(tuple(of(*samples, unit=unit) for samples in rounds) for rounds in runs))


def fields_of(difference):
    """Return the fields of a difference in the order of figures.txt."""
    names = ("level", "median_a", "median_b", "ratio", "ratio_low", "ratio_high", "p_value")
    names += ("independent", "is_significant", "to_decide")
    assert set(names) == set(vars(difference))
    return tuple(getattr(difference, name) for name in names)


def sides_compared(a, b, **settings):
    """Return the difference of two sides."""
    return fields_of(statistics.compare_sides(a, b, **settings))


def compared(a, b, **settings):
    """Return a comparison with all that is said about it."""
    found = comparison.compare_samples(a, b, **settings)
    names = ("verdict", "verdict_text", "reason", "stalls", "slower_percent", "slower_percent_at_most")
    lags = (found.autocorrelation_a, found.autocorrelation_b)
    values = {name: getattr(found, name) for name in names}
    return values | {"difference": found.difference and fields_of(found.difference), "autocorrelations": lags}


def matched(of_a, of_b, runs_a=(), runs_b=()):
    """Return which cells are compared with which, by their samples, and how many are left out."""
    sides = [
        Results({one.run_id: one for one in runs}, tuple(cells)) for cells, runs in ((of_a, runs_a), (of_b, runs_b))
    ]
    found = comparison.match_cells(*sides)

    def shown(side):
        rounds = [
            [list(one.samples["step"].measured) if one.samples else one.status for one in rows] for rows in side.runs
        ]
        return rounds, side.left_out, side.status

    pairs = [(shown(pair.a), shown(pair.b), pair.is_measured, pair.is_broken) for pair in found.pairs]
    alone = [list(map(shown, sides)) for sides in (found.only_a, found.only_b)]
    nearest = comparison.nearest_difference(found)
    return [*pairs, *alone, nearest, comparison.machine_differences(found.pairs, *sides)]


def with_file(content, function, name="saved.jsonl"):
    """Return what a function makes of a file with this content; None: there is none."""
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            return function(path)
        except UsageError as error:
            return str(error).replace(f"{folder}/", "")


def read(content, name="saved.jsonl"):
    """Return the runs, the cells and what is left out of a file."""

    def of_file(path):
        results = model.read_results(path)
        return list(results.runs), [tuple(vars(one).values()) for one in results.cells], results.passed_over

    return with_file(content, of_file, name)


def appended(content, *records, name="saved.jsonl", between=None):
    """Return a file's content after records were appended, faults and notices; ``between`` changes it meanwhile."""

    def append(path):
        file = ResultsFile(path)
        for number, record in enumerate(records):
            file.append(record)
            if number == 0 and between is not None:
                between(path)
        file.close()
        text = path.read_bytes()
        text = gzip.decompress(text) if name.endswith("gz") else text
        notices = [notice.replace(f"{path.parent}/", "") for notice in file.notices]
        return [*text.decode().splitlines(), f"fault: {file.fault}", *notices]

    return with_file(content, append, name)


def members(compressed, limit=None):
    try:
        return list(foreign.members_of(compressed, limit))
    except foreign.TooLargeError:
        return "too large"


def unpickled(data, resident_bytes=(0,) * 99):
    with patch.object(plain_pickle, "_resident_bytes", iter(resident_bytes).__next__):
        return with_file(data, plain_pickle.read_plain_pickle, "s.pickle")


def recorded():
    """Return what a function's caller gets of its runs and cells, and the command line inside and outside of it."""
    with recording.recording({}) as started:
        recording.record(run("q"), 1, 2)
        recording.record(None, 3)
        inside = recording.command_line()
    recording.record(run("later"), 4)
    return started.cells, list(started.runs), inside, recording.command_line() == tuple(sys.argv[1:])


test_figures_are_those_written_down = figures_test(globals())
