"""FLOPs: worked by hand, and equal to what torch's counter sees when the model runs."""

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.accounting.flops import FlopCounts, attention_flops, flops_by_component, linear_flops, model_flops
from cs336sys.settings.sizes import SIZES, ModelSize, choose_size

pytestmark = pytest.mark.usefixtures("own_attention")


def test_linear_layer_worked_by_hand():
    # 5 rows of 7 inputs and 3 outputs: 2 * 5 * 7 * 3; its backward is two products of that size.
    assert linear_flops(5, 7, 3, backward=False) == 210
    assert linear_flops(5, 7, 3, backward=True) == 630


@pytest.mark.parametrize(
    ("causal", "backward", "flops"),
    [
        (False, False, 3840),  # 4 * 2 * 3 * 4 * 5 * 8
        (True, False, 1920),  # half
        (False, True, 13440),  # 3.5 * 3840
        (True, True, 6720),
    ],
)
def test_attention_in_the_flash_attention_papers_convention(causal, backward, flops):
    assert attention_flops(2, 3, 4, 5, 8, causal=causal, backward=backward) == flops


def test_attention_flops_of_a_published_benchmark_shape():
    # FlashAttention-2's benchmark: 16 heads of 128, 16k tokens, causal: 4 * 16384^2 * 128 * 16 / 2 = 1.0995e12.
    assert attention_flops(1, 16, 16384, 16384, 128, causal=True, backward=False) == 2**40


def test_components_worked_by_hand():
    size = ModelSize("hand", d_model=8, d_ff=20, num_layers=3, num_heads=2, vocab_size=50, context=4, batch_size=2)
    assert flops_by_component(size, backward=False, causal=False) == FlopCounts(
        projections=12288,  # 3 layers * 4 * 2 * 8 tokens * 8 * 8
        attention=3072,  # 3 layers * 4 * 2 sequences * 2 heads * 4 * 4 * 4
        feed_forward=23040,  # 3 layers * 3 * 2 * 8 tokens * 8 * 20
        lm_head=6400,  # 2 * 8 tokens * 8 * 50
    )
    assert model_flops(size, backward=False, causal=False) == 44800
    assert model_flops(size, backward=False) == 44800 - 1536
    # The backward pass of a step is twice the forward, attention's too: nothing recomputed is counted.
    assert model_flops(size) == 3 * (44800 - 1536)


def test_leaderboard_step():
    # 65536 tokens: 6 * 65536 * (34 * (4 * 4096^2 + 3 * 4096 * 11008) + 4096 * 151936) = 2.9502e15 of linear layers, and
    # 34 layers * 3 * 4 * 2 * 32 * 32768^2 * 128 / 2 = 1.7944e15 of causal attention.
    assert model_flops(SIZES["8b"]) == 2_950_333_302_865_920 + 1_794_402_968_371_200


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
    model = BasicsTransformerLM(
        size.vocab_size, size.context, size.d_model, size.num_layers, size.num_heads, size.d_ff, rope_theta=10_000.0
    )
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.context))
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model(tokens), tokens)
        if backward:
            loss.backward()
    assert counter.get_total_flops() == model_flops(size, backward=backward, causal=False)
