"""Blocks of keys, merged one after another, are the attention to all of them."""

import math

import pytest
import torch

from cs336sys.kernels.attention import flash_attention
from cs336sys.parallel.context_parallel.ring import merge_block


def whole(blocks, scale=1.0):
    torch.manual_seed(0)
    query = scale * torch.randn(2, 3, 5, 8, dtype=torch.float64)
    key, value = (torch.randn(2, 3, sum(blocks), 8, dtype=torch.float64) for _ in range(2))
    return query, key, value


def attend(query, key, value):
    return flash_attention(query, key, value, return_logsumexp=True, implementation="reference")


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("blocks", [(4,), (1, 6), (3, 1, 5, 2)])
def test_in_any_order(blocks, scale):
    """Scores of hundreds, too, whose exponentials overflow."""
    query, key, value = whole(blocks, scale)
    expected = attend(query, key, value)
    pairs = list(zip(key.split(blocks, -2), value.split(blocks, -2), strict=True))
    for order in (pairs, pairs[::-1]):
        out, logsumexp = attend(query, *order[0])
        for block in order[1:]:
            merge_block(out, logsumexp, *attend(query, *block))
        torch.testing.assert_close((out, logsumexp), expected, rtol=1e-12, atol=1e-13)


def test_queries_that_have_seen_no_key_yet_take_the_block_and_those_that_see_none_stay():
    out, logsumexp = torch.zeros(3, 2), torch.tensor([-math.inf, -math.inf, 1.0])
    block_out, block_logsumexp = torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([2.0, -math.inf, -math.inf])
    merge_block(out, logsumexp, block_out, block_logsumexp)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert logsumexp.tolist() == [2.0, -math.inf, 1.0]
