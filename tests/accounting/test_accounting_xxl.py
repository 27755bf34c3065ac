"""The XXL model on paper: figures worked by hand from the handout's numbers, and its batch checked on the times."""

import math

import pytest

from cs336sys.accounting.xxl import (
    XXL,
    FeedForwardStack,
    TpuMesh,
    batch_answers,
    memory_answers,
)
from cs336sys.errors import UsageError


def forward_times(batch, stack, mesh):
    """Seconds of one block's forward pass: computing, FSDP's all-gathers, TP's all-gather and reduce-scatter.

    ``4 B D F / (X Y C)``, ``4 D F / (Y W M_X)``, ``4 B D / (X W M_Y)``: two matrices of two FLOPs and two bytes an
    element. The book leaves out the factor ``(n - 1) / n`` of collectives.
    """
    d, f = stack.d_model, stack.d_ff
    computing = 4 * batch * d * f / (mesh.x * mesh.y * mesh.flops_per_s)
    along_x = 4 * d * f / (mesh.y * mesh.bytes_per_s * mesh.m_x)
    along_y = 4 * batch * d / (mesh.x * mesh.bytes_per_s * mesh.m_y)
    return computing, along_x, along_y


MESH = TpuMesh(16, 4, 2, 1, 4.6e14, 2 * 9e10)


def by_quantity(answers):
    return {answer.quantity: answer.value for answer in answers}


def test_parameters_states_and_activations():
    assert (XXL.d_model, XXL.d_ff, XXL.num_blocks) == (16384, 53248, 126)
    found = by_quantity(memory_answers(XXL, 1, 80e9, 95e9))
    # 16384 * 53248 = 872,415,232; two matrices in 126 blocks.
    assert found["parameters"] == 219_848_638_464
    assert found["master weights, accumulated gradients, optimizer state"] == 3_517_578_215_424
    # A token saves 2 * (16384 + 53248) = 139,264 bytes in a block, 17,547,264 in 126.
    assert found["saved for backward"] == 17_547_264
    small = by_quantity(memory_answers(FeedForwardStack(2, 3, 5), 7, 80e9, 95e9))
    assert small["saved for backward"] == 350  # 2 bytes * 7 tokens * 5 blocks * 5


def test_memory_answers_of_the_reference_batch():
    found = by_quantity(memory_answers(XXL, 2048, 80e9, 95e9))
    assert found["saved for backward"] == 35_936_796_672
    assert found["all of it"] == 3_553_515_012_096
    assert found["GPUs that hold all of it"] == 45  # 44.4
    assert found["GPUs that hold the states alone"] == 44  # 43.97
    # (3517.578 + 17.968) / (95 - 17.968) = 45.897
    assert found["sharding at which a device is exactly full"] == pytest.approx(3535.546613760e9 / 77.031601664e9)
    assert found["smallest N_FSDP with less than that"] == 46
    assert found["memory of a device then"] == pytest.approx(94.828e9, rel=1e-5)


def test_sharding_is_the_smallest_that_fits():
    for tokens in (1, 320, 2048, 10_000):
        smallest = by_quantity(memory_answers(XXL, tokens, 80e9, 95e9))["smallest N_FSDP with less than that"]
        half = 17_547_264 * tokens / 2
        of_device, of_fewer = ((3_517_578_215_424 + half) / devices + half for devices in (smallest, smallest - 1))
        assert of_device < 95e9 <= of_fewer


def test_activations_that_no_sharding_fits():
    # Half of 12,000 tokens' activations are 105 GB.
    answers = memory_answers(XXL, 12_000, 80e9, 95e9)
    assert by_quantity(answers)["smallest N_FSDP with less than that"] == math.inf
    assert answers[-1].reason.startswith("Never")
    # Nothing is left for states where that half fills a device exactly.
    exactly = memory_answers(FeedForwardStack(1, 1, 1), 50, 80e9, 100)
    assert by_quantity(exactly)["smallest N_FSDP with less than that"] == math.inf


def test_weight_copies_on_request():
    found = by_quantity(memory_answers(XXL, 2048, 80e9, 95e9, weight_copies=True))
    assert found["saved for backward"] == 35_936_796_672 + 439_697_276_928


def test_an_infinite_answer_says_what_it_assumes():
    answer = memory_answers(XXL, 2048, 80e9, 95e9, weight_copies=True)[-1]
    assert answer.value == math.inf
    # (35.9 + 439.7) / 2 GB.
    assert "237.8 GB, which is more than the 95 GB of a device" in answer.reason
    assert "bf16 copies of all weights, 439.7 GB" in answer.reason


def test_batch_answers_of_the_handout():
    found = by_quantity(batch_answers(XXL, MESH))
    # alpha = 4.6e14 / 1.8e11 = 23,000 / 9; b = alpha / (2 * 4); on 64 devices 64 b.
    assert found["FLOPs a byte of communication"] == pytest.approx(23_000 / 9)
    assert found["most TP"] == pytest.approx(53248 * 9 / 23_000)
    assert found["per-device batch, axes overlapped"] == pytest.approx(2875 / 9)
    assert found["overall batch, axes overlapped"] == pytest.approx(184_000 / 9)
    # 1 - 4 / 20.836 = 0.80803
    assert found["per-device batch, axes sharing the links"] == pytest.approx(319.4444444 / 0.8080261752, rel=1e-8)
    assert found["overall batch, axes sharing the links"] == pytest.approx(64 * 395.3392282, rel=1e-8)
    assert found["overall batch with Y = 16"] == pytest.approx(64 * 23_000 / 9 / 32)
    assert found["overall batch with the best mesh"] == pytest.approx(64 * (23_000 / 9) ** 2 / (2 * 53248))
    assert found["overall batch with one more axis of links for FSDP"] == pytest.approx(64 * 23_000 / 9 / 12)
    assert found["overall batch with weights sent in 8 bits"] == pytest.approx(64 * 2875 / 18)
    assert found["overall batch with a pipeline of 4 stages"] == pytest.approx(46_000 / 9)


@pytest.mark.parametrize("mesh", [MESH, TpuMesh(8, 8, 1, 2, 1e14, 1e11), TpuMesh(4, 1, 3, 1, 4.6e14, 1.8e11)])
def test_at_the_batch_computing_takes_as_long_as_communication(mesh):
    found = by_quantity(batch_answers(XXL, mesh))
    computing, along_x, along_y = forward_times(found["overall batch, axes overlapped"], XXL, mesh)
    assert computing == pytest.approx(max(along_x, along_y))
    computing, along_x, along_y = forward_times(found["overall batch, axes sharing the links"], XXL, mesh)
    assert computing == pytest.approx(along_x + along_y)


def test_forward_times_worked_by_hand():
    # 4 * 6 * 2 * 3 = 144 FLOPs on 2 * 3 devices of 4 FLOP/s; 4 * 2 * 3 / (3 * 5 * 2) s; 4 * 6 * 2 / (2 * 5 * 1) s.
    mesh = TpuMesh(2, 3, 2, 1, 4, 5)
    assert forward_times(6, FeedForwardStack(2, 3, 1), mesh) == (6.0, 0.8, 4.8)


def test_more_tp_than_hides_is_never_compute_bound():
    wide = TpuMesh(2, 32, 2, 1, 4.6e14, 1.8e11)
    answers = {answer.quantity: answer for answer in batch_answers(XXL, wide)}
    for axes in ("overlapped", "sharing the links"):
        assert answers[f"per-device batch, axes {axes}"].value == math.inf
        assert answers[f"per-device batch, axes {axes}"].reason.startswith("Never")
    computing, _, along_y = forward_times(1e9, XXL, wide)
    assert along_y > computing
    # F M_Y / alpha is 4: with as many, FSDP has no time left after TP, and none is needed beside it.
    limit = by_quantity(batch_answers(FeedForwardStack(1, 8, 1), TpuMesh(2, 4, 1, 1, 2, 1)))
    assert limit["per-device batch, axes overlapped"] == 0.5
    assert limit["per-device batch, axes sharing the links"] == math.inf


def test_best_mesh_beats_every_split():
    devices = 64
    batch = by_quantity(batch_answers(XXL, MESH))["overall batch with the best mesh"]
    compute_bound = []
    for step in range(2001):
        x = devices ** (step / 2000)
        mesh = TpuMesh(x, devices / x, 2, 1, MESH.flops_per_s, MESH.bytes_per_s)
        # The least batch of this split: FSDP needs alpha / (2 Y) a device, and TP must be hidden.
        compute_bound.append(by_quantity(batch_answers(XXL, mesh))["overall batch, axes overlapped"])
    assert min(compute_bound) == pytest.approx(batch, rel=1e-2)
    assert min(compute_bound) >= batch * (1 - 1e-9)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: batch_answers(XXL, TpuMesh(1, 4, 2, 1, 4.6e14, -1.8e11)), "bytes per s -1.8e+11: must be positive"),
        (lambda: batch_answers(XXL, TpuMesh(1, 4, 2, 1, math.nan, 1.8e11)), "flops per s nan: must be positive"),
    ],
)
def test_impossible_values_are_refused(call, sentence):
    with pytest.raises(UsageError) as refusal:
        call()
    assert str(refusal.value) == sentence
