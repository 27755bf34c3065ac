"""Defaults from settings files."""

import json
import os
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.command_line.options import settings_file
from cs336sys.command_line.options.reading import Effect, effect_of, setting, with_read_options
from cs336sys.errors import UsageError

SETTINGS = """
[bench]
size = "tiny"
context = [64, 128]
batch-size = 2
vocab_size = 99
bf16 = true

[account.memory]
size = "tiny"
world-size = 4
strategy = "fsdp"
"""


def run(*arguments, **environment):
    return CliRunner().invoke(app, arguments, env=environment, auto_envvar_prefix="CS336SYS")


def planned(*arguments, **environment):
    result = run("bench", "--dry-run", "--format", "json", *arguments, **environment)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["tables"][0]["rows"]
    return [(row["size"], row["context"], row["batch_size"], row["vocab_size"], row["precision"]) for row in rows]


FROM_FILE = [("tiny", 64, 2, 99, "bf16"), ("tiny", 128, 2, 99, "bf16")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_tool(text):
    """The same tables, in a pyproject.toml."""
    return text.replace("\n[", "\n[tool.cs336sys.")


def test_a_settings_file_gives_defaults_and_stands_anywhere_on_the_line(folder):
    (folder / "s.toml").write_text(SETTINGS)
    assert planned("--config", "s.toml") == planned("--config=s.toml") == FROM_FILE
    assert planned(CS336SYS_CONFIG="s.toml") == FROM_FILE
    first = run("--config", "s.toml", "account", "memory")
    assert first.stdout == run("account", "memory", "--size", "tiny", "--world-size", "4", "--strategy", "fsdp").stdout
    assert first.stdout != run("account", "memory").stdout


def test_the_nearest_pyproject_is_read_where_no_file_is_named(folder, monkeypatch):
    (folder / "pyproject.toml").write_text(as_tool(SETTINGS))
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert planned() == FROM_FILE
    (folder / "below" / "s.toml").write_text("[bench]\ncontext = 32")
    assert planned("--config", "s.toml") == [("tiny", 32, 4, 10000, "fp32")], "in the place of it, not beside it"
    (folder / "below" / "pyproject.toml").write_text("[project]\nname = 'another'")
    assert planned() == [("tiny", 512, 4, 10000, "fp32")]


def test_the_line_goes_before_variables_and_these_before_the_file(folder):
    (folder / "pyproject.toml").write_text(as_tool(SETTINGS))
    variables = {"CS336SYS_BENCH_CONTEXT": "256", "CS336SYS_BENCH_BATCH_SIZE": "3"}
    assert planned("--batch-size", "5", **variables) == [("tiny", 256, 5, 99, "bf16")]
    # Another way to say it does not hide what is asked for.
    assert {row[-1] for row in planned("--precision", "fp32,fp16")} == {"fp32", "fp16"}
    assert {row[-1] for row in planned("--fp16")} == {"fp16"}
    assert {row[-1] for row in planned(CS336SYS_BENCH_PRECISION="fp32")} == {"fp32"}


def test_mistakes_of_the_nearest_pyproject_and_of_groups_name_their_place(folder):
    path = folder / "pyproject.toml"
    path.write_text("[tool.cs336sys.account.memory]\nsizes = 'tiny'")
    assert run("account", "memory").stderr == (
        f"error: {path}: tool.cs336sys.account.memory.sizes: memory has no such option; did you mean size?\n"
    )
    path.write_text("[tool.cs336sys.account]\nmemry = {}")
    assert run("account", "xxl").stderr.startswith(f"error: {path}: tool.cs336sys.account.memry: choose from memory, ")
    assert run("bench", "--config", "no.toml").stderr == "error: cannot read no.toml: No such file or directory\n"


def test_a_line_says_which_file_gave_settings(folder):
    path = folder / "pyproject.toml"
    path.write_text(as_tool(SETTINGS))
    line = f"settings from {path}: --size, --batch-size, --vocab-size, --bf16\n"
    assert run("bench", "--dry-run", "--context", "32").stderr == line
    told = run("slurm", "bench", "--context", "32")
    assert (told.exit_code, told.stderr) == (0, line)
    assert run("bench", "--dry-run", "--config", str(path), "--context", "32").stderr == line, (
        "named, its table is read"
    )
    assert run("bench", "--help").stderr == run("account", "xxl").stderr == ""
    assert run("bench", "--dry-run", "--context", "32", RANK="1", WORLD_SIZE="2").stderr == ""


CODE, WRITES, READS, CONNECTS = "names code to run", "writes a file", "reads a file", "opens connections"


@pytest.mark.parametrize(
    ("command", "setting", "effect"),
    [
        ("bench", "model = 'mine.py:build'", CODE),
        ("bench", "optimizer = ['fused', 'mine.py:build']", CODE),
        ("bench", "optimizer = 'fused, mine.py:build'", CODE),
        ("bench", "OPTIMIZER = 'mine.py:build'", "no such option"),
        ("verify", "wrap = 'ddp,mine.py:f'", CODE),
        ("account.memory", "output = 'precious.md'", WRITES),
        ("losses", "text = 'precious.md'", READS),
        ("bench", "track = 'wandb'", CONNECTS),
    ],
)
def test_a_file_that_was_found_sets_only_harmless_options(command, setting, effect, folder):
    path = folder / "pyproject.toml"
    path.write_text(f"[tool.cs336sys.{command}]\n{setting}\n")
    (folder / "mine.py").write_text("raise SystemExit('code of a stranger')")
    (folder / "precious.md").write_text("precious")
    key = setting.partition(" ")[0]
    refused = run(*command.split("."))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {path}: tool.cs336sys.{command}.{key}")
    assert effect in refused.stderr
    if effect != "no such option":
        assert refused.stderr.endswith(
            f": {effect}, which a file that was found may not; give --{key} on the command line, or name the file: "
            f"--config {path}\n"
        )
    assert (folder / "precious.md").read_text() == "precious"
    path.write_text(path.read_text().replace("tool.cs336sys.", ""))
    named = run("--config", str(path), *command.split("."), "--no-such")
    assert "which a file that was found may not" not in named.stderr


def refusal(command, name, value):
    """Why a found file may not set an option of a command, or an empty text."""
    context = typer.Context(command, info_name=command.name)
    found = {settings_file._PLACE: "p: ", settings_file._FILE: "pyproject.toml", settings_file._IS_NAMED: False}
    context.meta.update(found)
    context.default_map = {name: value}
    try:
        settings_file.defaults_of(context, command.params)
    except UsageError as error:
        return str(error)
    return ""


def test_a_found_file_sets_no_option_of_any_command_that_is_not_harmless(every_command):
    for _, command in every_command:
        for option in command.params:
            if option.param_type_name == "option" and option.expose_value and not option.is_eager:
                effect = effect_of(command.callback.declared[option.name])
                name = max(option.opts, key=len).removeprefix("--")
                sentence = refusal(command, name, True if getattr(option, "is_flag", False) else "x.py:f")
                assert (effect.value in sentence) == (effect is not Effect.HARMLESS), (command.name, name)
    harmless_names = [("verify", "wrap", "ddp"), ("bench", "optimizer", ["fused", "adamw"]), ("bench", "optimizer", [])]
    commands = {command.name: command for _, command in every_command}
    for command, name, value in harmless_names:
        assert refusal(commands[command], name, value) == ""


def test_an_option_without_a_declared_effect_is_refused():
    def new(upload: Annotated[str, typer.Option(help="New.")] = "", count: Annotated[int, setting()] = 1) -> None: ...

    app = typer.Typer()
    app.command()(with_read_options(new))
    command = typer.main.get_command(app)
    assert "upload = 'x': does not declare what it may do, which" in refusal(command, "upload", "x")
    assert refusal(command, "count", 3) == ""


def test_a_file_of_another_user_is_refused_unless_it_is_named(folder, monkeypatch):
    path = folder / "pyproject.toml"
    path.write_text(as_tool(SETTINGS))
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    if os.geteuid() == 0:
        os.chown(path, 4711, 4711)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused = run("bench", "--dry-run")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {path}: belongs to another user, ")
    assert refused.stderr.endswith(f"; --config {path} takes them, and --config {os.devnull} none\n")
    assert planned("--config", str(path)) == FROM_FILE
    assert planned("--config", os.devnull) == [("tiny", 512, 4, 10000, "fp32")]
    path.write_text("[project]\nname = 'another'")
    assert run("bench", "--dry-run").exit_code == 0, "it has no settings"


def test_help_shows_the_defaults_of_the_file(folder):
    (folder / "pyproject.toml").write_text("[tool.cs336sys.bench]\nsteps = 77")
    assert "[default: 77]" in run("bench", "--help-all").stdout
