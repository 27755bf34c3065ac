"""Limits of one layer, many devices and a model too large for any: by search, and what each part must do."""

import math
from dataclasses import replace

import pytest

from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.hardware import Cluster, OverlapSlowdown
from cs336sys.accounting.parallelism import PASSES, Layer, best_split, communication_s, layer_flops, most_devices
from cs336sys.accounting.scaling import DeviceTime, Dtypes, Simulation
from cs336sys.accounting.sharding.partition import Mesh
from cs336sys.accounting.sharding.step import ShardedStep, predicted_sent_bytes
from cs336sys.accounting.sharding.tensor import TensorStep
from cs336sys.accounting.xxl import XXL, TpuMesh, batch_answers
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES

# B 64, D 4, D_FF 8; a device computes 100 FLOP/s and sends 10 bytes/s; two bytes an element.
LAYER = Layer(64, 4, 8, 100, 10)


def mesh_communication_s(layer, fsdp, tp, which, *, overlapped):
    return communication_s("fsdp-tp", layer, which, fsdp=fsdp, tp=tp, overlapped=overlapped)


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        Layer(131072, 2560, 10240, 989.4e12, 450e9),
        Layer(4, 4, 800, 100, 10),  # TP alone reaches furthest.
        Layer(6400, 4, 1, 100, 1),  # FSDP alone does.
    ],
    ids=["hand", "H200", "wide", "narrow"],
)
def test_no_mesh_is_larger_than_the_largest(layer, which, overlapped):
    """All splits of slightly fewer devices than the limit: one computes longer; of slightly more: none does."""
    limit = most_devices("fsdp-tp", layer, which, overlapped=overlapped)

    def is_compute_bound(devices: float) -> bool:
        computing_s = layer_flops(layer, which, fsdp=devices) / layer.flops_per_s
        splits = (devices ** (step / 20_000) for step in range(20_001))
        return any(
            mesh_communication_s(layer, fsdp, devices / fsdp, which, overlapped=overlapped) <= computing_s
            for fsdp in splits
        )

    assert is_compute_bound(0.999 * limit)
    assert not is_compute_bound(1.001 * limit)


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("devices", [1, 2, 7, 64, 4096])
def test_best_split_communicates_for_the_shortest_time(devices, overlapped):
    layer = Layer(131072, 2560, 10240, 989.4e12, 450e9)
    fsdp, tp = best_split(layer, devices, "forward", overlapped=overlapped)
    assert fsdp * tp == pytest.approx(devices)
    best_s = mesh_communication_s(layer, fsdp, tp, "forward", overlapped=overlapped)
    for step in range(201):
        other = devices ** (step / 200)
        other_s = mesh_communication_s(layer, other, devices / other, "forward", overlapped=overlapped)
        assert other_s >= best_s * (1 - 1e-9) - 1e-15


@pytest.mark.parametrize("field", ["flops_per_s", "bytes_per_s"])
def test_impossible_layers_are_refused(field):
    values = {"batch": 64, "d_model": 4, "d_ff": 8, "flops_per_s": 100, "bytes_per_s": 10}
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError, match="must be positive"):
            Layer(**values | {field: wrong})
    with pytest.raises(UsageError, match="mesh 0x2: every axis needs at least 1 device"):
        Mesh(fsdp=0, tp=2)


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
