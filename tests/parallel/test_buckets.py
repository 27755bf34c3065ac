"""Bucket assignment: plain arithmetic on sizes."""

import cProfile
import pstats

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cs336sys.errors import UsageError
from cs336sys.parallel.buckets import TensorSpec, assign_buckets, block_of, bucket_rule


def specs(*sizes):
    return [TensorSpec(index, size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "cap_bytes", "buckets"),
    [
        ((40, 30, 20, 10), 60, [[3, 2, 1], [0]]),  # 10 + 20 + 30 fill a bucket exactly: at most the cap
        ((40, 30, 20, 10), 59, [[3, 2], [1], [0]]),
        ((10, 100, 10), 50, [[2], [1], [0]]),  # larger than the cap: alone
        ((10, 20, 30), None, [[2, 1, 0]]),
        ((10, 20, 30), 0, [[2], [1], [0]]),
        ((10, 20, 30), 1e9, [[2, 1, 0]]),
        ((5,), 0.5, [[0]]),
        ((), 10, []),
    ],
)
def test_buckets_worked_by_hand(sizes, cap_bytes, buckets):
    assert assign_buckets(specs(*sizes), cap_bytes) == buckets


def test_each_kind_has_buckets_of_its_own_ordered_by_when_they_complete():
    tensors = [TensorSpec(index, 10, kind) for index, kind in enumerate("abaabb")]
    # In reverse: b5 b4 fill a bucket, a3 a2 the next one; b1 and a0 open new ones.
    assert assign_buckets(tensors, 20) == [[5, 4], [3, 2], [1], [0]]
    # Without a cap the b's complete with index 1, the a's with index 0.
    assert assign_buckets(tensors, None) == [[5, 4, 1], [3, 2, 0]]
    # A bucket of a's that was opened first but completes last comes last.
    tensors = [TensorSpec(index, 10, kind) for index, kind in enumerate("abba")]
    assert assign_buckets(tensors, None) == [[2, 1], [3, 0]]


def test_tied_weights_count_once_at_their_first_place():
    tensors = [TensorSpec("embedding", 40), TensorSpec("norm", 10), TensorSpec("embedding", 40)]
    assert assign_buckets(tensors, None) == [[1, 0]]
    assert assign_buckets(tensors, 45) == [[1], [0]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_every_tensor_is_in_one_bucket_and_no_bucket_could_take_the_next_tensor(tier, sizes, cap):
    buckets = assign_buckets(specs(*sizes), cap)
    assert [index for bucket in buckets for index in bucket] == list(reversed(range(len(sizes))))
    filled = [sum(sizes[index] for index in bucket) for bucket in buckets]
    assert all(size <= cap or len(bucket) == 1 for size, bucket in zip(filled, buckets, strict=True))
    assert all(size + sizes[after[0]] > cap for size, after in zip(filled, buckets[1:], strict=False))


@pytest.mark.parametrize("cap_bytes", [-1, float("nan")])
def test_impossible_cap_is_refused(cap_bytes):
    with pytest.raises(UsageError, match="bucket cap"):
        assign_buckets(specs(1), cap_bytes)


def test_buckets_of_whole_blocks_hold_at_least_25_mb():
    names = [
        "embed.weight",
        *(f"layers.{block}.{part}.weight" for block in range(3) for part in ("a", "b")),
        "head.weight",
    ]
    assert [block_of(name) for name in names] == [
        "embed",
        *("layers.0",) * 2,
        *("layers.1",) * 2,
        *("layers.2",) * 2,
        "head",
    ]
    megabytes = [64, 20, 20, 20, 20, 1, 2, 30]
    tensors = [
        TensorSpec(name, int(size * 1e6), block=block_of(name)) for name, size in zip(names, megabytes, strict=True)
    ]
    rule = bucket_rule("block")
    # The last block is too small to be alone.
    assert assign_buckets(tensors, rule) == [[7], [6, 5, 4, 3], [2, 1], [0]]
    mixed = [tensor._replace(kind=index % 2) for index, tensor in enumerate(tensors)]
    assert sorted(index for bucket in assign_buckets(mixed, rule) for index in bucket) == list(range(8))
    with pytest.raises(UsageError, match="bucket size 'blocks': choose 'block', or megabytes, or None"):
        bucket_rule("blocks")


@pytest.mark.parametrize("cap_bytes", [100, 1e9])
def test_calls_grow_with_the_tensors(cap_bytes):
    few, many = cProfile.Profile(), cProfile.Profile()
    few.runcall(assign_buckets, specs(*[10] * 60), cap_bytes)
    many.runcall(assign_buckets, specs(*[10] * 240), cap_bytes)
    assert pstats.Stats(many).total_calls < 5 * pstats.Stats(few).total_calls
