"""Options of every command: what they refuse, offer and may do, their variables, and files that they may write."""

import gzip
import importlib
import json
import re

import pytest
from typer.testing import CliRunner

from cs336sys.cli import COMMANDS, app, module_of
from cs336sys.command_line.options.reading import Effect, effect_of
from cs336sys.errors import UsageError

NUMBERS = ("<int>", "<number>", "<s>")

# Options whose range is not declared with them: the sizes' own, and what depends on others.
RANGE_CHECKED_LATER = {
    *("--vocab-size", "--d-model", "--d-ff", "--num-layers", "--num-heads", "--steps", "--check-layers"),
    *("--cell-timeout", "--factor", "--learning-rate", "--confidence"),
    *("--bandwidth", "--node-bandwidth", "--call-us", "--flops", "--year"),
    *(f"cs336sys account {name} --context" for name in ("attention", "scaling")),
    *(f"cs336sys account {name} --devices" for name in ("xxl", "scaling")),
}

# Options that may be 0 with a range from 0, or whose range is checked later.
MAY_BE_ZERO = RANGE_CHECKED_LATER | {
    *("--seed", "--warmup", "--cool-down", "--warmup-ms", "--weight-decay"),
    *("--keep-gathered", "--percentiles", "--prefetch", "--launch-us", "--lines", "--measure"),
}

NAMED_VALUES = {
    *("--size", "--mode", "--precision", "--compile", "--attention", "--kernels", "--optimizer", "--state-dtype"),
    *("--update", "--cuda-graph", "--synchronize", "--device", "--track", "--interleave", "--checkpoint", "--profiler"),
    *("--implementation", "--op", "--dtype", "--grid", "--backend", "--collective", "--transport", "--gradient-dtype"),
    *("--strategy", "--status"),
}


def run(*arguments, **variables):
    return CliRunner().invoke(app, arguments, env=variables, auto_envvar_prefix="CS336SYS")


def rule_of(context, option, value):
    """The rule by which the option's own reader refuses a value; empty if it accepts it."""
    try:
        option.process_value(context, [value] if option.multiple else value)
    except UsageError as refusal:
        return str(refusal).removeprefix(f"{option.opts[0]} '{value}': ")
    return ""


def test_every_option_refuses_what_it_cannot_be(every_command):
    """By its own reader, before anything else is looked at: no file, no other option, no torch."""
    options = [
        (context, option)
        for context, command in every_command
        for option in command.params
        if getattr(option, "metavar", None) in (*NUMBERS, "<a,b>", "<name>")
    ]
    named, numbers = set(), 0
    for context, option in options:
        name, where = option.opts[0], f"{context.command_path} {option.opts[0]}"
        rule = rule_of(context, option, "no-such")
        if rule.startswith("choose from "):
            named.add(name)
        elif option.metavar in NUMBERS or rule == "not a number":
            numbers += 1
            assert rule == "not a number", where
            for value in ("inf", "nan", "1e23"):
                assert rule_of(context, option, value).startswith("must be "), where
            assert {name, where} & RANGE_CHECKED_LATER or rule_of(context, option, "-1").startswith("must be "), where
            assert {name, where} & MAY_BE_ZERO or rule_of(context, option, "0").startswith("must be "), where
    assert numbers > 150
    assert named >= NAMED_VALUES


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


def test_every_option_is_set_by_the_variable_of_its_name(every_command):
    found = {}
    for context, command in every_command:
        for option in command.get_params(context):
            if option.param_type_name == "option" and option.expose_value and not option.is_eager:
                name = option.opts[0].removeprefix("--").replace("-", "_").upper()
                path = "_".join(context.command_path.split()[1:]).upper()
                assert option.envvar == f"CS336SYS_{path}_{name}"
                found[option.envvar] = option
    assert {"CS336SYS_NSYS_FROM", "CS336SYS_NSYS_RANGE", "CS336SYS_ACCOUNT_XXL_NUM_BLOCKS"} <= found.keys()


@pytest.mark.parametrize("variable", ["VERSION", "HELP", "SHOW_COMPLETION", "ACCOUNT_HELP", "ACCOUNT_XXL_HELP"])
def test_no_variable_turns_a_command_into_help(variable):
    result = run("account", "xxl", **{f"CS336SYS_{variable}": "1"})
    assert result.exit_code == 0
    assert "126 blocks" in result.stdout


def test_variables_of_options_and_other_commands_are_no_mistakes():
    variables = {
        "CS336SYS_BENCH_BATCH_SIZE": "3",
        "CS336SYS_FLASH_NUM_HEADS": "4",
        "CS336SYS_NSYS": "/usr/bin/nsys",
        "CS336SYS_DEBUG": "1",
        "CS336SYS_CONFIG": "/dev/null",
        "CS336SYS_TRITON_ENGINE": "hopper",
        "CS336SYS_BENCH_HELP": "1",
    }
    result = run(
        "bench", *["--size", "tiny", "--dry-run", "--format", "csv", "--columns", "size,batch_size"], **variables
    )
    assert (result.exit_code, result.stdout.splitlines()[1:]) == (0, ["plan,tiny,3"]), result.stderr
    assert run("bench", "--help", CS336SYS_BENCH_STEP="1").exit_code == 0, "a mistake hides no help"


def test_every_command_with_a_table_takes_the_selection_of_tables_and_columns(every_command):
    """Where their tables are made of measured cells, a wrong name loses nothing: see test_sweep."""
    shown = {"format", "output", "table", "columns", "sort", "wide"}
    others = {command.name for _, command in every_command if not shown <= {option.name for option in command.params}}
    assert others == {"report", "slurm"}, "which write documents and scripts"


@pytest.mark.parametrize(("tools", "size"), [({"nvidia-smi"}, "small"), (set(), "tiny")])
@pytest.mark.parametrize("command", ["bench", "nsys", "ddp"])
def test_without_a_gpu_the_smallest_model_is_trained_unless_one_is_named(command, tools, size, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools else None)
    result = run(command, "--dry-run", "--format", "json")
    assert {row["size"] for table in json.loads(result.stdout)["tables"] for row in table["rows"]} == {size}


def test_wide_text_is_not_cut_or_turned():
    drawn = run("bench", "--size", "tiny", "--dry-run", "--wide").stdout.splitlines()
    assert drawn[1].startswith("╭─")
    assert len(drawn[1]) > 200


# Every option that may do more than choose what is computed and shown: a settings file that was found sets none.
EFFECTS = {
    Effect.READS_FILE: {"--from", "--against", "--allreduce", "--measured", "--rates", "--text", "trace --ceilings"},
    Effect.WRITES_FILE: {
        *("--output", "--save", "--plot", "--plot-buckets", "--plot-scaling", "--html", "--snapshot", "--keep"),
        *("--trace", "--folder", "--run", "--keep-settings", "doctor --ceilings"),
    },
    Effect.RUNS_CODE: {
        *("--model", "--loss", "--batch", "--optimizer", "--wrap", "--finish", "--kernel", "--setup", "--sbatch"),
    },
    Effect.CONNECTS: {"--track"},
    Effect.UNDECLARED: set(),
}


def test_every_option_declares_its_effect(every_command):
    """verify's --wrap and flash's --kernel were missing from a list kept elsewhere, and so was every file to write."""
    names = {effect: set() for effect in Effect}
    for _, command in every_command:
        for option in command.params:
            if option.param_type_name == "option" and not option.is_eager:
                effect = effect_of(command.callback.declared.get(option.name))
                name = max(option.opts, key=len)
                names[effect].add(f"{command.name} {name}" if name == "--ceilings" else name)
                if option.metavar == "<file>":
                    assert effect in (Effect.READS_FILE, Effect.WRITES_FILE), (command.name, name)
    harmless = names.pop(Effect.HARMLESS)
    assert names == EFFECTS
    assert len(harmless) > 100
    assert not harmless.intersection(*EFFECTS.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("attn --save r.md --output ./r.md", "--save r.md and --output r.md: one file cannot hold both"),
        ("attn --output p.txt --plot p.txt", "--plot p.txt and --output p.txt: one file cannot hold both"),
        ("show r.jsonl --format csv --output r.jsonl", r"r\.jsonl.* give another"),
        ("account parallel --format csv --output r.jsonl.gz", r"r\.jsonl\.gz.* give another"),
        ("report --year 2025 --from r.jsonl --format html --output r.jsonl", r"r\.jsonl.* give another"),
        ("losses --text book.txt --output ./book.txt", r"book\.txt.* give another"),
    ],
)
def test_inputs_and_results_are_not_overwritten(arguments, sentence, tmp_path, monkeypatch):
    """``show r.jsonl --output r.jsonl`` left a table in the place of measurements, and ``losses`` of its text."""
    monkeypatch.chdir(tmp_path)
    record = json.dumps({"schema_version": 1, "kind": "run"}).encode() + b"\n"
    files = {"r.jsonl": record, "r.jsonl.gz": gzip.compress(record), "book.txt": b"It was"}
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert re.search(sentence, result.stderr)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
