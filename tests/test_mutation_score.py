"""The program that measures what tests find tells faults that a test finds from those that none does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import Mutant, apply, mutants_of

TOOLS = Path(__file__).parents[1] / "tools"

SOURCE = '''"""Two is a number."""

import functools

LEAST = 10


def is_large(value: int = 3) -> bool:
    """Return whether 1 < 2."""
    return value > LEAST


@functools.cache
def double(value):
    if value is None:
        raise ValueError("choose 1 or 2")
    return value * 2


def never(value):
    return value - 1
'''
TESTS = """import pytest
from small import numbers


@pytest.fixture(scope="module")
def four():
    return numbers.double(2)


def test_large():
    assert numbers.is_large(12) and not numbers.is_large(2)


def test_four_is_even(four):
    assert four % 2 == 0


def test_double(four):
    assert four == 4


def test_double_is_kept():
    assert numbers.double(2) == 4


def test_fails():
    assert numbers.never(2) == 5
"""
PROGRAM = """
import mutation_score
mutation_score.ROOMS = {"small": mutation_score.Room(("small",), ("checks",))}
mutation_score.PRELOADED = ()
mutation_score.main()
"""


def test_each_fault_has_one_outcome(tmp_path):
    """Found, survived although a test reaches it, and unreached, since a test that fails anyway does not count."""
    for path, text in (("small/numbers.py", SOURCE), ("checks/test_numbers.py", TESTS)):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-c", PROGRAM, "--root", str(tmp_path), "--out", str(tmp_path / "out"), "--every-test"]
    result = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True)
    assert not result.returncode, result.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "mutants.jsonl").read_text().splitlines()]
    outcomes = {record["mutant"].partition(":")[2]: record["outcome"] for record in records}
    assert outcomes == {
        "5:8 off by one": "survived",
        "8:26 off by one": "survived",
        "10:17 comparison": "survived",
        "15:13 comparison": "found",
        "17:17 arithmetic": "found",
        "17:19 off by one": "found",
        "21:17 arithmetic": "unreached",
        "21:19 off by one": "unreached",
    }
    # A test reaches what a fixture that it shares has reached, and what a function would have computed for it alone.
    [tripled] = [record for record in records if record["mutant"].endswith("17:19 off by one")]
    assert {name.partition("::")[2] for name in tripled["failed"]} == {"test_double", "test_double_is_kept"}
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["small", "8", "8", "3", "0", "3", "2", "0", "37.5%"] in rows
    assert ["-", "return", "value", ">", "LEAST"] in rows
    assert (tmp_path / "small" / "numbers.py").read_text() == SOURCE


def plant(source, old, new, line=1, column=0):
    return apply(Mutant("numbers.py", "", line, column, old, new, (line, line), False), source.encode())


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        pytest.param("a < b", "c", "d", id="another text is there"),
        pytest.param("# a < b", "# a", "# b", id="the program is the same"),
        pytest.param("a < b", "a <", "a <<<", id="no program"),
    ],
)
def test_fault_that_cannot_be_planted_counts_as_none(source, old, new):
    assert plant(source, old, new) is None


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("if (a < b): pass", ["if ((not (a < b))): pass", "if (a <= b): pass"]),
        ("if a is  not b: pass", ["if a is b: pass"]),
        ("x = (a) // (b)", ["x = (a) * (b)"]),
        ("x -= 2", ["x += 2", "x -= 3"]),
        ("close(a, b)", ["pass", "close(b, a)"]),
        ("x = f(*a, b) or min(a, b)", []),
        ("x = 'é', a['key'], 1.5, True", ["'key_'", "3.0", "False"]),
        ("def f(a: int = 1) -> 'key': 'text'", ["def f(a: int = 2) -> 'key': 'text'"]),
        ("raise ValueError(f'{a + 1}', 2 + 2)", []),
        ("warnings.warn(a, b)", []),
        ("class A:\n def __repr__(self): return 1", []),
        ("x = [a for a in b if a]", ["x = [a for a in b if (not (a))]"]),
    ],
)
def test_faults_of_a_statement(source, faults):
    planted = [apply(mutant, source.encode()).decode() for mutant in mutants_of("a.py", source.encode())]
    assert len(planted) == len(faults)
    assert all(fault in text for fault, text in zip(faults, planted, strict=True))


def test_no_fault_is_planted_that_changes_nothing():
    source = b"with suppress(A, B): x = np.maximum(a, b), np.argsort(a, kind='stable'), zip(c, strict=True)"
    assert mutants_of("m.py", source) == []
