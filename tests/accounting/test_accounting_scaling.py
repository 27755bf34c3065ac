"""The simulation of many devices: limits that are known, and what each part must do."""

from dataclasses import replace

import pytest

from cs336sys.accounting.parameters import count_parameters
from cs336sys.accounting.scaling import (
    Cluster,
    DeviceTime,
    MeshShape,
    fastest,
    in_fewest_parts,
    meshes_of,
    simulate,
)
from cs336sys.accounting.sharding.step import ShardedStep, predicted_sent_bytes, rank_peak
from cs336sys.accounting.sharding.tensor import TensorStep
from cs336sys.errors import UsageError
from cs336sys.sizes import SIZES

SIZE = replace(SIZES["small"], batch_size=64)
DEVICE = DeviceTime(sequence_s=10e-3, optimizer_s=8e-3)
CLUSTER = Cluster(8, 400e9, 50e9, 0.0, 140e9)


def test_one_device_takes_its_own_time():
    step = simulate(replace(SIZE, batch_size=4), "bf16", MeshShape(1, 1, 1), CLUSTER, DEVICE)
    assert step.step_s == pytest.approx(4 * 10e-3 + 8e-3)
    assert step.memory == rank_peak(ShardedStep("none", replace(SIZE, batch_size=4), 1, "bf16", "flash")).total
    again = simulate(replace(SIZE, batch_size=4), "bf16", MeshShape(1, 1, 1), CLUSTER, DEVICE, "block")
    assert again.computing_s == pytest.approx(4 / 3 * step.computing_s)
    assert again.memory < step.memory


def test_slow_links_expose_all_that_is_sent():
    """With links so slow that nothing computes beside them, each part takes its bytes over the bandwidth."""
    slow = replace(CLUSTER, bytes_per_s=1e6, node_bytes_per_s=1e6)
    sequences = SIZE.batch_size * 10e-3
    fsdp = simulate(SIZE, "bf16", MeshShape(1, 4, 1), slow, DEVICE)
    norms = ShardedStep("fsdp", SIZE, 4, "bf16", "flash")
    sent = predicted_sent_bytes(norms)
    # Of the passes, computing is exposed in neither; norms are small.
    assert fsdp.exposed_fsdp_s + fsdp.computing_s == pytest.approx(sent / 1e6, rel=0.08)
    ddp = simulate(SIZE, "bf16", MeshShape(4, 1, 1), slow, DEVICE)
    gradients_s = 4 * count_parameters(SIZE) * 2 * 3 / 4 / 1e6
    assert ddp.exposed_ddp_s == pytest.approx(gradients_s - sequences / 4 * 2 / 3)
    tensor = simulate(SIZE, "bf16", MeshShape(1, 1, 4), slow, DEVICE)
    step = TensorStep("fsdp+tensor-sequence", SIZE, 4, 1, "bf16")
    assert tensor.tensor_s == pytest.approx(step.sent_for_layers / 1e6)
    assert tensor.computing_s == pytest.approx(sequences / 4)
    assert (fsdp.limit, ddp.limit, tensor.limit) == ("fsdp", "ddp", "tp")


def test_a_ring_is_as_fast_as_its_slowest_link():
    assert CLUSTER.ring_bytes_per_s(8, 1) == 400e9
    assert CLUSTER.ring_bytes_per_s(4, 2) == 400e9
    assert CLUSTER.ring_bytes_per_s(8, 2) == CLUSTER.ring_bytes_per_s(2, 8) == 50e9
    fast = replace(CLUSTER, node_bytes_per_s=800e9)
    assert fast.ring_bytes_per_s(16, 1) == 400e9


def test_fast_links_leave_computing_and_the_optimizer():
    fast = replace(CLUSTER, bytes_per_s=1e18, node_bytes_per_s=1e18)
    for mesh in (MeshShape(16, 1, 1), MeshShape(1, 16, 1), MeshShape(2, 4, 2)):
        step = simulate(SIZE, "bf16", mesh, fast, DEVICE)
        assert step.step_s == pytest.approx(64 * 10e-3 / 16 + 8e-3 / (mesh.fsdp * mesh.tp), rel=1e-6)


def test_what_does_not_fit_passes_in_parts():
    size = replace(SIZE, batch_size=512)
    mesh = MeshShape(1, 8, 1)
    whole = simulate(size, "bf16", mesh, CLUSTER, DEVICE)
    tight = replace(CLUSTER, memory_bytes=whole.memory * 0.6)
    parts = in_fewest_parts(size, "bf16", mesh, tight, DEVICE)
    assert whole.accumulation == 1
    assert parts.accumulation == 2
    assert parts.memory <= tight.memory_bytes < whole.memory
    assert parts.computing_s == pytest.approx(whole.computing_s)
    assert parts.exposed_fsdp_s == pytest.approx(2 * whole.exposed_fsdp_s)
    found = fastest(8, size, "bf16", tight, DEVICE)
    assert found is not None
    assert found[0].memory <= tight.memory_bytes
    assert found[0].step_s <= parts.step_s
    nothing = fastest(8, size, "bf16", replace(CLUSTER, memory_bytes=1e6), DEVICE)
    assert nothing is not None
    assert nothing[0].memory > 1e6


def test_meshes_divide_batch_and_heads_inside_nodes():
    meshes = list(meshes_of(32, SIZE, CLUSTER))
    assert all(mesh.devices == 32 and mesh.tp <= 8 and SIZE.num_heads % mesh.tp == 0 for mesh in meshes)
    assert {mesh.tp for mesh in meshes} == {1, 2, 4}
    for dimension, mesh in (("ddp", MeshShape(4, 1, 1)), ("fsdp", MeshShape(1, 4, 1)), ("tp", MeshShape(1, 1, 4))):
        assert list(meshes_of(4, SIZE, CLUSTER, dimension)) == [mesh]
        found = fastest(4, SIZE, "bf16", CLUSTER, DEVICE, dimension=dimension)
        assert found is not None
        assert found[0].mesh == mesh
    assert not list(meshes_of(7, replace(SIZE, batch_size=64), CLUSTER))
    assert fastest(7, SIZE, "bf16", CLUSTER, DEVICE) is None
    for mesh, words in ((MeshShape(3, 1, 1), "divide the batch"), (MeshShape(1, 1, 5), "heads")):
        with pytest.raises(UsageError, match=words):
            simulate(SIZE, "bf16", mesh, CLUSTER, DEVICE)
    with pytest.raises(UsageError, match="inside a node"):
        simulate(replace(SIZE, num_heads=16), "bf16", MeshShape(1, 1, 16), CLUSTER, DEVICE)


def test_a_cluster_has_devices_and_links():
    with pytest.raises(UsageError, match="node_bytes_per_s 0: must be positive"):
        Cluster(8, 1.0, 0, 0.0, 1.0)
