import pytest
from kept_workers import every_command  # noqa: F401
from torch import nn
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.errors import SYNONYMS, a_value, nearest_name


@pytest.mark.parametrize(("value", "called"), [([], "a list"), (nn.Identity(), "an Identity"), (None, "None")])
def test_a_value_is_called_by_its_type_with_the_right_article(value, called):
    assert a_value(value) == called


@pytest.mark.parametrize(
    ("command", "name", "meant"),
    [
        ("bench", "--seq-len", "--context"),
        ("bench", "--dtype", "--precision"),
        ("kernels", "--precision", "--dtype"),
        ("bench", "--amp", "--precision"),
        ("ddp", "--gpus", "--world-size"),
        ("ddp", "--strategy", "--mode"),
        ("shard", "--mode", "--strategy"),
        ("losses", "--lr", "--learning-rate"),
        ("bench", "--n_embd", "--d-model"),
        ("bench", "--block_size", "--context"),
        ("bench", "--hidden_size", "--d-model"),
        ("bench", "--precison", "--precision"),
    ],
)
def test_an_unknown_option_suggests_a_synonym_before_similar_letters(command, name, meant):
    result = CliRunner().invoke(app, [command, name, "1"])
    assert (result.exit_code, result.stderr) == (2, f"error: no such option: {name}; did you mean {meant}?\n")


def test_an_unknown_value_suggests_a_synonym():
    assert "did you mean cuda?" in CliRunner().invoke(app, ["bench", "--device", "gpu"]).stderr
    assert [nearest_name(text, ("fp32", "bf16", "fp16")) for text in ("Half", "bfloat16", "int8")] == [
        "fp16",
        "bf16",
        None,
    ]


def test_synonyms_stand_for_options_or_values_and_are_none_themselves(every_command):  # noqa: F811
    options = {name.lstrip("-") for _, command in every_command for option in command.params for name in option.opts}
    values = {"cuda", "fp32", "bf16", "fp16", "sdpa", "flash"}
    assert set(SYNONYMS) - values <= options
    for name, synonyms in SYNONYMS.items():
        assert name not in synonyms.split()
        assert len(set(synonyms.split())) == len(synonyms.split())
