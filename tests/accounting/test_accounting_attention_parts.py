from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.accounting.flops import attention_matmuls, attention_softmax
from cs336sys.settings.sizes import SIZES

SMALL = SIZES["small"]


def test_matmul_flops_are_what_torch_counts():
    q = torch.empty(4, 12, 512, 64, device="meta")
    with FlopCounterMode(display=False) as counter:
        (q @ q.mT) @ q
    assert attention_matmuls(SMALL, "fp32").flops == 12 * counter.get_total_flops()


def test_softmax_flops_and_bytes_by_hand():
    scores = 12 * 4 * 12 * 512 * 512
    softmax = attention_softmax(SMALL, "fp32")
    assert (softmax.flops, softmax.bytes) == (5 * scores, 8 * scores)
    assert attention_softmax(SMALL, "bf16").bytes == 4 * scores


def test_matmul_bytes_count_four_vectors_and_two_matrices():
    # One layer, head and sequence of 8 tokens: Q, K, V, O of 8 x 2 and the scores written and read, 8 x 8.
    size = replace(SMALL, d_model=2, num_heads=1, num_layers=1, batch_size=1, context=8)
    assert attention_matmuls(size, "bf16").bytes == 2 * (4 * 16 + 2 * 64)


@pytest.mark.parametrize("context", [128, 1024])
def test_the_ratio_of_flops_is_five_quarters_of_the_head_dimension(context):
    size = replace(SMALL, context=context)
    ratio = attention_softmax(size, "fp32").flops / attention_matmuls(size, "fp32").flops
    assert ratio == pytest.approx(5 / (4 * size.head_dim))
