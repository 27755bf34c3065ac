"""Blocks of keys are merged; that all of them are the attention to all keys is seen on ranks."""

import math

import pytest
import torch

from cs336sys.parallel.context_parallel.ring import merge_block


def test_queries_that_have_seen_no_key_yet_take_the_block_and_those_that_see_none_stay():
    """And two that have seen keys of large scores, whose exponentials overflow."""
    out, logsumexp = torch.zeros(5, 2), torch.tensor([-math.inf, -math.inf, 1.0, 900.0, 900.0])
    block_out = torch.ones(5, 2, dtype=torch.bfloat16)
    block_logsumexp = torch.tensor([2.0, -math.inf, -math.inf, 900.0, 990.0])
    merge_block(out, logsumexp, block_out, block_logsumexp)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0], [0.5, 0.5], [1, 1]]
    assert logsumexp.tolist() == [2.0, -math.inf, 1.0, pytest.approx(900 + math.log(2)), 990.0]
