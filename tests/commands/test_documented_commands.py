"""Every command of the README and of the pages under docs/ means something, and the pages' stories can be followed."""

import contextlib
import glob
import importlib
import itertools
import json
import math
import os
import re
import shlex
from pathlib import Path

import pytest
from agents_page import COMMANDS as ANSWERING
from agents_page import missing_fields
from typer.testing import CliRunner

from cs336sys.accounting.step_time.rates import h200_rates
from cs336sys.cli import COMMANDS, app, module_of
from cs336sys.errors import CapabilityError
from cs336sys.results.statistics import fewest_samples

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "docs" / "results"
PAGES = (
    "README.md",
    "AGENTS.md",
    *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))),
    *(f"docs/guides/{path.name}" for path in sorted((REPOSITORY / "docs/guides").glob("*.md"))),
)
RESULT_PAGES = tuple(f"docs/results/{path.name}" for path in sorted((REPOSITORY / "docs/results").glob("*.md")))

# Shown as they were typed in their day: a baseline that was not measured was passed over, and a mode since removed.
OF_EARLIER_VERSIONS = ("--baseline sdpa-flash --dtype fp32", "--mode bucketed,bucketed-step,torch")

# Variables to which bash gives values of its own, whatever a page sets them to.
SET_BY_BASH = {"GROUPS", "UID", "EUID", "PPID", "RANDOM", "SECONDS", "LINENO", "DIRSTACK"}

# What stands for something that the reader fills in.
PLACEHOLDER = re.compile(r"\.\.\.|[A-Z]{4,}|FILE")


def text_of(page):
    return (REPOSITORY / page).read_text(encoding="utf-8")


def commands_of(page):
    """The arguments of every command on a page, with the line it is on; comments, pipes and placeholders aside."""
    text = text_of(page).replace("\\\n", " ")
    code = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for block in code for line in with_variables_put_in(block).splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in lines:
        begun = re.search(rf"\bcs336sys (?=(?:{'|'.join(COMMANDS)})\b)(.*)", line)
        if begun is None:
            continue
        words = shlex.split(begun[1].split(" #")[0].replace(r"\|", "|"), comments=True)
        end = next((number for number, word in enumerate(words) if word in ("|", ">", "&&", ";", "2>")), len(words))
        is_mentioned = words[:end] in (["show"], ["compare"]) or {"--help", "--help-all"} & set(words)
        has_placeholder = any(PLACEHOLDER.search(word) for word in words[:end])
        is_old = any(old in " ".join(words) for old in OF_EARLIER_VERSIONS)
        if not (is_mentioned or has_placeholder or is_old or words[:end] in found):
            found.append(words[:end])
    return found


def with_variables_put_in(block):
    """Replace ``$NAME`` by what the block sets it to."""
    for name, value in re.findall(r'^([A-Z]+)="([^"]*)"', block, flags=re.M):
        assert name not in SET_BY_BASH, f"bash would not set {name}"
        block = block.replace(f"${name}", value)
    return block


def without(arguments, *options):
    """The arguments without these options and their values."""
    return [
        word
        for number, word in enumerate(arguments)
        if word not in options and not (number and arguments[number - 1] in options)
    ]


# Of results files that a command shows where it asks for nothing of them, or that a pattern stands for.
_MOST_BYTES = 50_000

# Their values are known once the files are read.
ASKS = {"--command", "--status", "--table", "--columns", "--sort"}


def smallest_of(pattern: str) -> list[str]:
    """The smallest files of a pattern, together of at most :data:`_MOST_BYTES`."""
    paths = sorted(glob.glob(pattern), key=os.path.getsize)
    sizes = itertools.accumulate(map(os.path.getsize, paths))
    return [path for path, size in zip(paths, sizes, strict=True) if size <= _MOST_BYTES]


class MeasuringError(Exception):
    """All that was asked for has been understood; from here on it would be measured."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader of the pages stands: beside the project's docs, with results of their own."""
    path = tmp_path_factory.mktemp("reader")
    (path / "docs").symlink_to(REPOSITORY / "docs")
    (path / "results").symlink_to(REPOSITORY / "docs" / "results")
    for page in PAGES:
        for name, code in re.findall(r"^```python\n# (\w+\.py)\b(.*?)^```", text_of(page), flags=re.M | re.S):
            (path / name).write_text(f"#{code}")
    # The reader's other functions, which no page shows: nothing of the file is run.
    names = {name for page in PAGES for name in re.findall(r"\bmine\.py:(\w+)", text_of(page))}
    with (path / "mine.py").open("a") as file:
        file.writelines(f"\n\ndef {name}(*arguments): ...\n" for name in sorted(names))
    return path


@pytest.fixture
def understood(folder, every_command, monkeypatch):
    """A function that goes with a command to where it would measure.

    What is no measurement is done where it takes milliseconds; else options are looked at and files are not.
    """
    monkeypatch.chdir(folder)

    def stop(*arguments, **settings):
        raise MeasuringError

    for name in COMMANDS:
        module = importlib.import_module(module_of(name))
        if hasattr(module, "run_sweep"):
            monkeypatch.setattr(module, "run_sweep", stop)
    # This CPU's take half a minute to measure.
    monkeypatch.setattr("cs336sys.commands.tune.options._cpu_rates", lambda plain: h200_rates())
    # Pages are for a machine that holds their models.
    monkeypatch.setattr("cs336sys.run.sweep._SMALL_GIB", math.inf)
    known = {tuple(context.command_path.split()[1:]): (context, command) for context, command in every_command}

    def understand(arguments):
        name = tuple(arguments[: 2 if arguments[0] == "account" else 1])
        context, command = known[name]
        words = [one for word in arguments[len(name) :] for one in (smallest_of(word) if "*" in word else [word])]
        if name[0] == "account":
            # Drawing takes seconds; what is drawn is checked in test_account.
            words = without(words, "--plot")
        if name[0] == "tune":
            # Few of the configurations, which are predicted in a second.
            words += ["--compile", "block", "--checkpoint", "none"]
        below = command.make_context(command.name, words, parent=context.parent)
        is_measured = hasattr(importlib.import_module(module_of(name[0])), "run_sweep")
        # All files are shown in test_show: here those that take milliseconds, and those of which something is asked.
        size = sum(Path(word).stat().st_size for word in words if word.endswith(".jsonl.gz") and Path(word).exists())
        is_shown = 0 < size < _MOST_BYTES or (size and ASKS & set(words))
        shows_a_table = name[0] == "show" and not {"--html", "--plot"} & set(words) and is_shown
        if name[0] == "account" or shows_a_table or (is_measured and "--from" not in words):
            with contextlib.suppress(MeasuringError, CapabilityError), below:
                command.invoke(below)

    return understand


def test_the_pages_have_commands():
    counts = {page: len(commands_of(page)) for page in PAGES}
    assert counts["README.md"] >= 12
    assert sum(counts.values()) > 90
    used = {command[0] for page in PAGES for command in commands_of(page)}
    assert used == set(COMMANDS), "a command without a page"
    saved = next(command for command in commands_of("README.md") if command[-2:] == ["--save", "before.jsonl"])
    assert int(saved[saved.index("--rounds") + 1]) >= fewest_samples(), "its file can serve a gate"
    (shown,) = [command[2:] for command in commands_of("README.md") if command[:2] == ["show", "before.jsonl"]]
    result = CliRunner().invoke(app, ["show", str(RESULTS / "bench-h200.jsonl.gz"), *shown, "--format", "csv"])
    expected = "table,size,precision,compile,step_ms_mean,step_ms_std,step_ms_median,tokens_per_s"
    assert result.stdout.splitlines()[0] == expected


@pytest.mark.parametrize("page", [*PAGES, *RESULT_PAGES])
def test_every_command_of_a_page_has_known_options_and_values(page, understood, capsys):
    for arguments in commands_of(page):
        try:
            understood(arguments)
        except Exception as error:
            pytest.fail(f"{page}: cs336sys {shlex.join(arguments)}: {error}")


WITH_DRY_RUN = ("bench", "nsys", "memprof", "ddp", "shard", "allreduce")

# A dry run refuses the files, since it measures nothing to write there, and trackers that are not installed.
FILES_OF_MEASUREMENTS = ("--plot", "--plot-scaling", "--trace", "--keep", "--snapshot", "--track")


def test_every_command_that_can_says_what_it_would_run(folder, monkeypatch):
    """Of models up to 13 billion parameters, none of which is built; the reader's are in test_user_models_command."""
    monkeypatch.chdir(folder)
    planned = 0
    for arguments in {tuple(command) for page in PAGES for command in commands_of(page) if command[0] in WITH_DRY_RUN}:
        if {"--from", "--model"} & set(arguments):
            continue
        faster = ["--no-predict"] if arguments[0] == "memprof" and "--no-predict" not in arguments else []
        values = {index + 1 for index, argument in enumerate(arguments) if argument in FILES_OF_MEASUREMENTS}
        kept = [one for index, one in enumerate(arguments) if not {index, index + 1} & values]
        result = CliRunner().invoke(app, [*kept, *faster, "--dry-run", "--format", "json"])
        assert result.exit_code == 0, f"{arguments}: {result.output}"
        assert json.loads(result.stdout)["tables"][0]["rows"], arguments
        planned += 1
    assert planned > 30


@pytest.mark.parametrize(
    ("question", "command"),
    [
        # What the command measures is shown from results.
        ("Is my step launch-bound?", f"show {RESULTS}/bench-graph-h200.jsonl.gz --format json"),
        ("What MFU do I reach?", f"show {RESULTS}/bench-graph-h200.jsonl.gz --format json"),
        ("What fits on 32 GB?", None),
        ("What is the fastest configuration that fits?", None),
        (
            "Did it get slower?",
            f"compare {RESULTS}/compare-a-h200.jsonl.gz {RESULTS}/compare-b-h200.jsonl.gz --format json",
        ),
    ],
)
def test_answers_for_programs_have_their_fields(question, command):
    command = command or ANSWERING[question].replace("--size medium", "--size small")
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code in (0, 1), result.output
    assert missing_fields(question, result.stdout) == []
