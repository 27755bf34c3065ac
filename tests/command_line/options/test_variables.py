"""Variables that set nothing are refused, by the nearest name."""

from typer.testing import CliRunner

from cs336sys.cli import app

PLAN = ["bench", "--size", "tiny", "--dry-run", "--format", "csv", "--columns", "size,batch_size"]


def run(arguments, **variables):
    return CliRunner().invoke(app, arguments, env=variables, auto_envvar_prefix="CS336SYS")


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
