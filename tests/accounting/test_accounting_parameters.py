"""Parameter counts: against the handouts' figures, and against the model itself."""

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM

from cs336sys.accounting.flops import count_parameters, parameter_shapes
from cs336sys.settings.sizes import SIZES, choose_size


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("xl", 1_998_235_200),  # 48 * (4 * 1600^2 + 3 * 1600 * 6400 + 2 * 1600) + 2 * 10000 * 1600 + 1600
        ("2.7b", 3_406_809_600),  # 32 * (4 * 2560^2 + 3 * 2560 * 10240 + 2 * 2560) + 2 * 10000 * 2560 + 2560
        ("10b", 12_832_823_808),  # 50 * (4 * 4608^2 + 3 * 4608 * 12288 + 2 * 4608) + 2 * 10000 * 4608 + 4608
        ("8b", 8_125_698_048),  # 34 * (4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 151936 * 4096 + 4096
    ],
)
def test_handout_sizes(name, parameters):
    assert count_parameters(SIZES[name]) == parameters


@pytest.mark.parametrize("size", [*SIZES.values(), choose_size("tiny", d_model=48, num_heads=6, d_ff=100)], ids=str)
def test_model_has_the_predicted_parameters(size):
    with torch.device("meta"):
        model = BasicsTransformerLM(
            size.vocab_size, 8, size.d_model, size.num_layers, size.num_heads, size.d_ff, rope_theta=10_000.0
        )
    assert parameter_shapes(size) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert count_parameters(size) == sum(parameter.numel() for parameter in model.parameters())
