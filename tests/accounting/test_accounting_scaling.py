"""The simulation of many devices: limits that are known, and what each part must do."""

from dataclasses import replace

import pytest

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.hardware import Cluster, OverlapSlowdown
from cs336sys.accounting.scaling import DeviceTime, Dtypes, Simulation
from cs336sys.accounting.sharding.partition import Mesh
from cs336sys.accounting.sharding.step import ShardedStep, predicted_sent_bytes
from cs336sys.accounting.sharding.tensor import TensorStep
from cs336sys.settings.sizes import SIZES

SIZE = replace(SIZES["small"], batch_size=64)
BF16 = Dtypes("bf16")
DEVICE = DeviceTime(sequence_s=10e-3, optimizer_s=8e-3)
CLUSTER = Cluster(8, 400e9, 50e9, 0.0, 140e9)


def simulate(size, dtypes, mesh, cluster, device, checkpointing="none"):
    return Simulation(size, dtypes, cluster, device, checkpointing).step(mesh)


def test_slow_links_expose_all_that_is_sent():
    """With links so slow that nothing computes beside them, each part takes its bytes over the bandwidth."""
    slow = replace(CLUSTER, bytes_per_s=1e6, node_bytes_per_s=1e6)
    sequences = SIZE.batch_size * 10e-3
    fsdp = simulate(SIZE, BF16, Mesh(1, 4, 1), slow, DEVICE)
    norms = ShardedStep("fsdp", SIZE, 4, "bf16", "flash")
    sent = predicted_sent_bytes(norms)
    # Of the passes, computing is exposed in neither; norms are small.
    assert fsdp.parts_s["fsdp"] + fsdp.parts_s["computing"] == pytest.approx(sent / 1e6, rel=0.08)
    ddp = simulate(SIZE, BF16, Mesh(4, 1, 1), slow, DEVICE)
    gradients_s = 4 * count_parameters(SIZE) * 2 * 3 / 4 / 1e6
    assert ddp.parts_s["ddp"] == pytest.approx(gradients_s - sequences / 4 * 2 / 3)
    tensor = simulate(SIZE, BF16, Mesh(1, 1, 4), slow, DEVICE)
    step = TensorStep("fsdp+tensor-sequence", SIZE, 4, 1, "bf16")
    assert tensor.parts_s["tp"] == pytest.approx(step.sent_for_layers / 1e6)
    assert tensor.parts_s["computing"] == pytest.approx(sequences / 4)
    assert (fsdp.longest_part, ddp.longest_part, tensor.longest_part) == ("fsdp", "ddp", "tp")


def test_a_ring_is_as_fast_as_its_slowest_link():
    assert CLUSTER.ring_bytes_per_s(8, 1) == 400e9
    assert CLUSTER.ring_bytes_per_s(4, 2) == 400e9
    assert CLUSTER.ring_bytes_per_s(8, 2) == CLUSTER.ring_bytes_per_s(2, 8) == 50e9
    fast = replace(CLUSTER, node_bytes_per_s=800e9)
    assert fast.ring_bytes_per_s(16, 1) == 400e9
    measured = replace(CLUSTER, ranks_bytes_per_s=((2, 300e9), (16, 1e12)))
    assert [measured.ring_bytes_per_s(ranks, 1) for ranks in (2, 4, 16)] == [300e9, 400e9, 50e9]


@pytest.mark.parametrize(
    ("beside", "computing_s", "communication_s", "seconds"),
    [
        (OverlapSlowdown(), 3.0, 2.0, 3.0),
        (OverlapSlowdown(), 2.0, 3.0, 3.0),
        # 4 s of communication at half speed; a quarter of 12 s of computing is left to do meanwhile.
        (OverlapSlowdown(0.75, 0.5), 12.0, 2.0, 4.0 + 12.0 - 3.0),
        # 4 s of computing at 0.75; communication has done half of that.
        (OverlapSlowdown(0.75, 0.5), 3.0, 6.0, 4.0 + 6.0 - 2.0),
        (OverlapSlowdown(0.5, 0.5), 0.0, 6.0, 6.0),
    ],
)
def test_concurrent_work_is_slower(beside, computing_s, communication_s, seconds):
    assert beside.seconds(computing_s, communication_s) == pytest.approx(seconds)
