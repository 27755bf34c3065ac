import resource
import subprocess
import sys

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
    """Processor time of the best of several runs, because other processes share the cores; it waits for nothing."""
    durations = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "cs336sys", *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        durations.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(durations) < limit_s
