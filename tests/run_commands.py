"""Commands as users type them, run in this process."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from cs336sys.cli import app


def _split(words: Any) -> list[str]:
    if isinstance(words, list | tuple):
        return [word for part in words for word in _split(part)]
    return shlex.split(words) if isinstance(words, str) else [str(words)]


def invoke(*words: Any, **settings: Any) -> Result:
    """Run a command; a text may hold several words, and a list several texts and paths."""
    return CliRunner().invoke(app, _split(words), **settings)


def tables(result: Result) -> dict[str, dict]:
    """Return the tables that a command printed with ``--format json``, by name."""
    assert result.exit_code == 0, result.output
    return {table["name"]: table for table in json.loads(result.stdout)["tables"]}


def shown(path: Path) -> str:
    """Return what ``show`` prints of saved cells, as JSON."""
    result = invoke("show", path, "--format json")
    assert result.exit_code == 0, result.output
    return result.stdout


def imported_by(*lines: str) -> list[str]:
    """Return which of the modules that take long to import these commands need, run in a process of their own."""
    script = (
        "import shlex, sys\nfrom typer.testing import CliRunner\nfrom cs336sys.cli import app\n"
        "for line in sys.argv[1:]:\n"
        "    result = CliRunner().invoke(app, shlex.split(line))\n"
        "    assert result.exit_code == 0, result.output\n"
        "slow = ('torch', 'triton', 'matplotlib', 'scipy', 'numpy')\n"
        "print(*[name for name in slow if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()
