"""Parameters and FLOPs: the handouts', the model's own, and what torch counts when it runs; peaks of GPUs, and MFU."""

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.accounting.flops import (
    attention_flops,
    attention_matmuls,
    count_parameters,
    model_flops,
    parameter_shapes,
)
from cs336sys.accounting.hardware import model_flops_utilization, peak_tflops
from cs336sys.settings.sizes import SIZES, choose_size

pytestmark = pytest.mark.usefixtures("own_attention")


def model_of(size):
    return BasicsTransformerLM(
        size.vocab_size, size.context, size.d_model, size.num_layers, size.num_heads, size.d_ff, rope_theta=10_000.0
    )


def test_parameters_of_the_handouts_sizes():
    # As 48 * (4 * 1600^2 + 3 * 1600 * 6400 + 2 * 1600) + 2 * 10000 * 1600 + 1600.
    counts = {"xl": 1_998_235_200, "2.7b": 3_406_809_600, "10b": 12_832_823_808, "8b": 8_125_698_048}
    assert {name: count_parameters(SIZES[name]) for name in counts} == counts


@pytest.mark.parametrize("size", [*SIZES.values(), choose_size("tiny", d_model=48, num_heads=6, d_ff=100)], ids=str)
def test_model_has_the_predicted_parameters(size):
    with torch.device("meta"):
        parameters = dict(model_of(size).named_parameters())
    assert parameter_shapes(size) == {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    assert count_parameters(size) == sum(parameter.numel() for parameter in parameters.values())


def test_attention_in_the_flash_attention_papers_convention():
    """A causal mask leaves half, and both passes are 3.5 times the forward pass."""
    kinds = [(False, False), (True, False), (False, True), (True, True)]
    counts = [attention_flops(2, 3, 4, 5, 8, causal=causal, backward=backward) for causal, backward in kinds]
    assert counts == [4 * 2 * 3 * 4 * 5 * 8 * share for share in (1, 0.5, 3.5, 1.75)]


def test_matrix_products_of_attention_are_what_torch_counts():
    q = torch.empty(4, 12, 512, 64, device="meta")
    with FlopCounterMode(display=False) as counter:
        (q @ q.mT) @ q
    assert attention_matmuls(SIZES["small"], "fp32").flops == 12 * counter.get_total_flops()


@pytest.mark.parametrize(
    "size",
    [
        choose_size("tiny", context=32, batch_size=2, vocab_size=100),
        choose_size("tiny", d_model=48, d_ff=112, num_layers=3, num_heads=6, context=17, batch_size=3, vocab_size=61),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_flop_counter_sees_exactly_these_flops(size, backward):
    """The model's own attention computes the whole square, so this is ``causal=False``."""
    model = model_of(size)
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.context))
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model(tokens), tokens)
        if backward:
            loss.backward()
    assert counter.get_total_flops() == model_flops(size, backward=backward, causal=False)


def test_peak_is_that_of_the_precision():
    kinds = [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True), ("fp16", False)]
    peaks = [peak_tflops("NVIDIA H200", precision, tf32=tf32) for precision, tf32 in kinds]
    assert peaks == [66.9, 494.7, 989.4, 989.4, 989.4]


def test_gpu_with_a_similar_or_unknown_name_has_no_peak():
    names = ("NVIDIA GB200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100X", "")
    assert [name for name in names if peak_tflops(name, "bf16") is not None] == []


def test_mfu_is_the_share_of_the_peak():
    # 4.947e14 operations in two seconds are a quarter of 989.4 TFLOP/s.
    assert model_flops_utilization(494_700_000_000_000, 2.0, 989.4) == pytest.approx(0.25)
    assert model_flops_utilization(10**15, 1.0, None) is None
