import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from cs336sys import __version__
from cs336sys.cli import COMMANDS, app


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"cs336sys {__version__}\n"
    shown = CliRunner().invoke(app, ["-h"]).stdout
    for command in COMMANDS:
        assert command in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"cs336sys {command}" in result.stdout


def test_unknown_command_is_refused():
    result = CliRunner().invoke(app, ["benhc"])
    assert result.exit_code == 2
    assert "benhc" in result.stderr


@pytest.mark.parametrize(("arguments", "limit_s"), [(["--help"], 0.3), (["bench", "--help"], 0.5)])
def test_help_is_fast(arguments, limit_s):
    """The best of several runs, because other processes share the cores."""
    durations = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "cs336sys", *arguments], capture_output=True, check=True)
        durations.append(time.perf_counter() - started)
    assert min(durations) < limit_s
