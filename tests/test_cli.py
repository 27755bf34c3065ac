import contextlib
import io
import re
import subprocess
import sys

import pytest
import typer
from kept_workers import every_command  # noqa: F401
from typer.testing import CliRunner

from cs336sys import __version__
from cs336sys.cli import COMMANDS, PANELS, app
from cs336sys.command_line.invocation import MOST_USED


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"cs336sys {__version__}\n"
    shown = CliRunner().invoke(app, ["-h"]).stdout
    listed = re.findall(r"─ ([A-Z][a-z ]+?) ─|│ ([a-z]+) +[A-Z]", shown)
    expected = [word for panel, commands in PANELS.items() for word in (panel, *commands)]
    assert [panel or command for panel, command in listed if panel != "Options"] == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"cs336sys {command}" in result.stdout


EMPTY_PROGRAM = ("-c", "import typer; app = typer.Typer(); app.command()(lambda: None); app()")


def modules_imported(*arguments):
    command = [sys.executable, "-X", "importtime", *arguments, "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(line.startswith("import time:") for line in told.splitlines())


@pytest.mark.parametrize(("arguments", "times_empty"), [([], 1.25), (["bench"], 1.55)])
def test_help_imports_little_more_than_typer(arguments, times_empty):
    """Typer's own help imports 367 modules, ``cs336sys --help`` 425 and ``bench --help`` 525."""
    assert modules_imported("-m", "cs336sys", *arguments) < times_empty * modules_imported(*EMPTY_PROGRAM)


@pytest.mark.parametrize("columns", [80, 100])
def test_help_of_bench_fits_on_a_screen_in_named_panels(columns):
    shown = CliRunner().invoke(app, ["bench", "--help-all"], env={"COLUMNS": str(columns)}).stdout
    assert len(shown.splitlines()) < 70
    assert all(len(line) <= columns for line in shown.splitlines())
    rows = "\n".join(re.findall(r"^│ (-.+)", shown, flags=re.M))
    # What is said of an option stands on its line, but for the sizes with their numbers.
    longer = re.findall(r"^│ (-.+)\n│  ", shown, flags=re.M)
    assert [row.split()[0] for row in longer] == ["--size"]
    for default in ("train", "off", "reference", "course", "fp32", "step", "5", "10", "1", "auto", "0"):
        assert f"[default: {default}]" in rows
    # Each option has a row of its own: two in a row look like aliases.
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="cs336sys")
    options = {option.opts[0] for option in root.get_command(context, "bench").get_params(context)}
    assert len(options) > 40
    assert {name for name in options if not re.search(rf"^{name}(,-o)? ", rows, flags=re.M)} <= {"-h", "--help"}
    for panel in ("Model", "What runs", "Measuring", "Output"):
        assert f"─ {panel} ─" in shown
    assert "small 129M" in shown
    assert "env var" not in shown
    rule = "CS336SYS_BENCH_SIZE=small is bench's --size small"
    assert rule in " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())


def rows_of_help(command, context, *, shows_all):
    command.shows_all = shows_all
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        command.format_help(context, None)
    return re.findall(r"^│ (--[a-z0-9-]+)", shown.getvalue(), flags=re.M), shown.getvalue()


def test_short_help_shows_the_ten_most_used_options(every_command, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "100")
    names, lengths = set(), {}
    for context, command in every_command:
        every, text = rows_of_help(command, context, shows_all=True)
        assert "--help-all" not in text
        shown, text = rows_of_help(command, context, shows_all=False)
        names |= set(every)
        lengths[context.command_path] = (len(shown), len(every))
        assert [name for name in every if name in shown] == shown, "in the order of all"
        is_short = shown == every
        assert is_short == (len(every) <= 12) == ("--help-all" not in text), context.command_path
        if not is_short:
            assert len(shown) == 10
            assert f"The 10 most used of {len(every)} options; --help-all shows all." in text
            # One that help hides is used less than each that it shows, or is in no list and stands behind.
            ranks = [MOST_USED.index(name) if name in MOST_USED else len(MOST_USED) for name in every]
            hidden = [rank for rank, name in zip(ranks, every, strict=True) if name not in shown]
            assert min(hidden) >= max(rank for rank, name in zip(ranks, every, strict=True) if name in shown)
    assert set(MOST_USED) <= names
    assert lengths["cs336sys bench"] == (10, 49)
