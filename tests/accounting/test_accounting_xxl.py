"""The XXL model on paper: its batch checked on the times, and what no number of devices can do."""

import math

import pytest

from cs336sys.accounting.xxl import XXL, FeedForwardStack, TpuMesh, batch_answers, memory_answers
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


def test_activations_that_no_sharding_fits():
    # Half of 35.9 GB of activations and 439.7 GB of copies.
    answer = memory_answers(XXL, 2048, 80e9, 95e9, weight_copies=True)[-1]
    assert answer.value == math.inf
    assert answer.reason.startswith("Never")
    assert "237.8 GB, which is more than the 95 GB of a device" in answer.reason
    assert "bf16 copies of all weights, 439.7 GB" in answer.reason
    # Nothing is left for states where that half fills a device exactly.
    exactly = memory_answers(FeedForwardStack(1, 1, 1), 50, 80e9, 100)
    assert by_quantity(exactly)["smallest N_FSDP with less than that"] == math.inf


@pytest.mark.parametrize("mesh", [MESH, TpuMesh(8, 8, 1, 2, 1e14, 1e11), TpuMesh(4, 1, 3, 1, 4.6e14, 1.8e11)])
def test_at_the_batch_computing_takes_as_long_as_communication(mesh):
    found = by_quantity(batch_answers(XXL, mesh))
    computing, along_x, along_y = forward_times(found["overall batch, axes overlapped"], XXL, mesh)
    assert computing == pytest.approx(max(along_x, along_y))
    computing, along_x, along_y = forward_times(found["overall batch, axes sharing the links"], XXL, mesh)
    assert computing == pytest.approx(along_x + along_y)


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ((4.6e14, -1.8e11), r"bytes per s -1\.8e\+11: must be positive"),
        ((math.nan, 1.8e11), "flops per s nan: must be positive"),
    ],
)
def test_impossible_values_are_refused(rates, sentence):
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        batch_answers(XXL, TpuMesh(1, 4, 2, 1, *rates))
