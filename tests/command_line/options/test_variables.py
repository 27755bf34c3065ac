"""Variables that set nothing are refused, by the nearest name."""

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app

PLAN = ["bench", "--size", "tiny", "--dry-run", "--format", "csv", "--columns", "size,batch_size"]


def run(arguments, **variables):
    return CliRunner().invoke(app, arguments, env=variables, auto_envvar_prefix="CS336SYS")


@pytest.mark.parametrize(
    ("variable", "arguments", "sentence"),
    [
        ("CS336SYS_BENCH_STEP", PLAN, "bench has no such option; did you mean CS336SYS_BENCH_STEPS?"),
        ("CS336SYS_BENCH_QQQ", PLAN, "bench has no such option; root bench --help-all shows its options"),
        ("CS336SYS_BENHC_SIZE", PLAN, "unknown command 'benhc': choose from bench, "),
        (
            "CS336SYS_ACCOUNT_MEMORY_SIZ",
            ["account", "memory"],
            "memory has no such option; did you mean CS336SYS_ACCOUNT_MEMORY_SIZE?",
        ),
        ("CS336SYS_ACCOUNT_MEMRY_SIZE", ["account", "memory"], "unknown command 'memry': choose from memory, "),
        ("CS336SYS_STEPS", PLAN, "'steps' is no command; the variable of an option names one: CS336SYS_BENCH_STEPS"),
        ("CS336SYS_BATCH_SIZE", ["show"], "'batch' is no command; the variable of an option names one: "),
        ("CS336SYS_ACCOUNT_SIZE", ["account", "memory"], "'size' is no command; the variable of an option names one: "),
        ("CS336SYS_BENCH_SEQ_LEN", PLAN, "bench has no such option; did you mean CS336SYS_BENCH_CONTEXT?"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(variable, arguments, sentence):
    result = run(arguments, **{variable: "1"})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {variable}: {sentence}")


def test_help_is_shown_all_the_same():
    assert run(["bench", "--help"], CS336SYS_BENCH_STEP="1").exit_code == 0


def test_variables_of_options_and_other_commands_are_no_mistakes():
    result = run(
        PLAN,
        CS336SYS_BENCH_BATCH_SIZE="3",
        CS336SYS_FLASH_NUM_HEADS="4",
        CS336SYS_NSYS="/usr/bin/nsys",
        CS336SYS_DEBUG="1",
        CS336SYS_CONFIG="/dev/null",
        CS336SYS_TRITON_ENGINE="hopper",
        CS336SYS_BENCH_HELP="1",
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1] == "plan,tiny,3"
