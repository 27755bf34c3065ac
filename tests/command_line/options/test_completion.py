"""What a shell offers for the value of an option, asked for as typer's scripts for bash ask."""

import importlib
import re
import sys

import pytest
from typer.testing import CliRunner

from cs336sys.cli import COMMANDS, app, module_of
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES


def offered(line):
    """What the last word of the line can become."""
    words = line.split(" ")
    answer = CliRunner().invoke(
        app,
        [],
        env={"_CS336SYS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        prog_name="cs336sys",
    )
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cs336sys be", ["bench"]),
        ("cs336sys account me", ["memory"]),
        ("cs336sys bench --preci", ["--precision"]),
        ("cs336sys bench --size ", list(SIZES)),
        ("cs336sys bench --size s", ["small"]),
        ("cs336sys bench --precision fp32,", ["fp32,bf16", "fp32,fp16"]),
        ("cs336sys bench --precision fp32,b", ["fp32,bf16"]),
        ("cs336sys bench --attention f", ["flash"]),
        ("cs336sys ddp --mode buck", ["bucketed"]),
        ("cs336sys kernels --op rms", ["rms-norm"]),
        ("cs336sys shard --format c", ["csv"]),
        ("cs336sys account parallel --strategy fsdp-", ["fsdp-tp"]),
        ("cs336sys bench --save ", []),
        ("cs336sys show ", []),
    ],
)
def test_the_values_of_an_option_are_offered_and_files_are_left_to_the_shell(line, expected):
    assert offered(line) == expected


# Which tables and columns there are is known when there are tables.
OF_TABLES = {"--table", "--columns", "--sort"}


def test_every_option_that_takes_one_of_some_names_offers_them(every_command, monkeypatch):
    """An option that offers nothing must not refuse a word because it is none of some names."""

    def stop(*arguments, **settings):
        raise UsageError("this would be measured")

    for name in COMMANDS:
        module = importlib.import_module(module_of(name))
        if hasattr(module, "run_sweep"):
            monkeypatch.setattr(module, "run_sweep", stop)
    offering, refused = 0, []
    for context, command in every_command:
        for option in command.params:
            if getattr(option, "metavar", None) not in ("<name>", "<a,b>") or option.opts[0] in OF_TABLES:
                continue
            if option.shell_complete(context, ""):
                offering += 1
            elif command.name not in ("doctor", "report"):
                try:
                    command.invoke(command.make_context(command.name, [option.opts[0], "zzz"], parent=context.parent))
                except Exception as error:
                    refused += re.findall(rf"^{option.opts[0]} 'zzz': choose from .*", str(error))
    assert refused == [], "give the option autocompletion=among(its names)"
    assert offering > 60


def test_completion_imports_no_torch():
    before = set(sys.modules)
    offered("cs336sys memprof --checkpoint n")
    assert not {"torch", "triton", "matplotlib"} & (set(sys.modules) - before)
