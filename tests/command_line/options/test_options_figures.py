"""What options read, refuse and offer, written down in ``figures.txt`` (tests/written_figures.py)."""

# Further names are used in figures.txt.
# ruff: noqa: F401

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner
from written_figures import outcome, read_figures, rows_of, write_figures

from cs336sys.cli import app
from cs336sys.command_line.options.reading import LARGEST_WHOLE_NUMBER, between, one_of, read_function, split_list
from cs336sys.errors import a_value, nearest_name
from cs336sys.settings.sizes import SIZES

from_one = between(1, LARGEST_WHOLE_NUMBER, is_whole=True)
PATH = Path(__file__).with_name("figures.txt")
PLAN = ("bench", "--size", "tiny", "--dry-run", "--format", "csv", "--columns", "size,batch_size")


def refused(arguments, settings="", **variables):
    """Return the error of a command line where a settings file has these; of a list of names the first."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "s.toml")
        file.write_text(settings)
        words = [*arguments, *(["--config", str(file)] if settings else [])]
        result = CliRunner().invoke(app, words, prog_name="cs336sys", env=variables, auto_envvar_prefix="CS336SYS")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return re.sub(r"(choose from \w+), [^;\n]*", r"\1, ...", result.stderr).replace(str(file), "s.toml").splitlines()


def function(source):
    """Return what is said of ``missing`` in a file, whose path may be absolute, too."""
    with TemporaryDirectory() as folder:
        Path(folder, "mine.py").write_text(source)
        absolute = outcome(read_function, f"{folder}/mine.py:missing").replace(f"{folder}/", "")
        here = os.getcwd()
        os.chdir(folder)
        try:
            relative = outcome(read_function, "mine.py:missing")
        finally:
            os.chdir(here)
    assert relative == absolute
    return relative


def offered(line):
    """Return what the last word of the line can become, as typer's script for bash asks."""
    words = str(len(line.split(" ")) - 1)
    variables = {"_CS336SYS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": words}
    return CliRunner().invoke(app, [], env=variables, prog_name="cs336sys").stdout.split()


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_figures_are_those_written_down(expression, rows):
    assert rows_of(expression, globals()) == rows


if __name__ == "__main__":
    write_figures(PATH, globals())
