"""What a shell offers for the value of an option, asked for as typer's scripts for bash ask."""

import sys

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.sizes import SIZES


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
        ("cs336sys ddp --mode buck", ["bucketed", "bucketed-step"]),
        ("cs336sys kernels --op rms", ["rms-norm"]),
        ("cs336sys shard --format c", ["csv"]),
        ("cs336sys account parallel --strategy fsdp-", ["fsdp-tp"]),
        ("cs336sys bench --save ", []),
        ("cs336sys show ", []),
    ],
)
def test_the_values_of_an_option_are_offered_and_files_are_left_to_the_shell(line, expected):
    assert offered(line) == expected


# Options whose values are no choice: names that the user gives, or what only a file can tell.
FREE = {
    *(
        "--from",
        "--only",
        "--skip",
        "--memory-limit",
        "--model",
        "--loss",
        "--batch",
        "--blocks",
        "--account",
        "--partition",
    ),
    *("--range", "--table", "--columns", "--sort", "--metric", "--percentiles", "--baseline", "--mesh", "--command"),
    *("--bucket-mb", "--message", "--gradients", "--context", "--batch-size", "--warmup", "--tokens"),
    *("--width", "--vocab-size", "--world-size", "--prefetch", "--head-dim", "--num-heads", "--d-model", "--devices"),
}


def test_every_option_that_takes_one_of_some_names_offers_them(every_command):
    silent = {
        option.opts[0]
        for context, command in every_command
        for option in command.params
        if getattr(option, "metavar", None) in ("<name>", "<a,b>") and not option.shell_complete(context, "")
    }
    assert silent <= FREE, "give the option autocompletion=among(its names)"


def test_completion_imports_no_torch():
    before = set(sys.modules)
    offered("cs336sys memprof --checkpoint n")
    assert not {"torch", "triton", "matplotlib"} & (set(sys.modules) - before)
