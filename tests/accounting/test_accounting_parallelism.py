"""Rings, and the roofline of a parallel feed-forward layer: by hand, by simulation and by search."""

import math

import pytest

from cs336sys.accounting.communication import (
    alternate_ring_all_reduce_s,
    ring_all_gather_s,
    ring_all_reduce_s,
)
from cs336sys.accounting.parallelism import (
    PARALLELISMS,
    PASSES,
    Layer,
    Mesh,
    best_split,
    best_whole_mesh,
    communication_s,
    fsdp_reach,
    largest_mesh_shared,
    layer_flops,
    most_devices,
    parallelism_answers,
    tp_reach,
)
from cs336sys.errors import UsageError

# B 64, D 4, D_FF 8; a device computes 100 FLOP/s and sends 10 bytes/s; two bytes an element.
LAYER = Layer(64, 4, 8, 100, 10)


def mesh_communication_s(layer, fsdp, tp, which, *, overlapped):
    return communication_s("fsdp-tp", layer, which, fsdp=fsdp, tp=tp, overlapped=overlapped)


def test_rings_worked_by_hand():
    # 12 bytes on 4 devices at 2 bytes/s: shares of 3 bytes take 1.5 s, three of them 4.5 s; whole tensors 6 s each.
    assert ring_all_gather_s(12, 4, 2) == 4.5
    assert ring_all_reduce_s(12, 4, 2) == 9.0
    assert alternate_ring_all_reduce_s(12, 4, 2) == 18.0
    assert ring_all_reduce_s(12, 1, 2) == 0


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_rings_simulated(devices):
    """The handout's algorithms on lists, counting the bytes that the busiest device sends in each step."""
    tensors = [[10**device * (chunk + 1) for chunk in range(devices)] for device in range(devices)]
    total = [sum(column) for column in zip(*tensors, strict=True)]
    element_bytes, bytes_per_s = 6, 3
    size_bytes = element_bytes * devices

    # Reduce-scatter, then all-gather: in each step a device passes one chunk to its right.
    partial, sent = [list(tensor) for tensor in tensors], 0
    for step in range(1, 2 * devices - 1):
        gathering = step >= devices
        outgoing = [(device - step) % devices for device in range(devices)]
        chunks = [partial[device][outgoing[device]] for device in range(devices)]
        sent += element_bytes
        for device in range(devices):
            left = (device - 1) % devices
            chunk = outgoing[left]
            partial[device][chunk] = chunks[left] if gathering else partial[device][chunk] + chunks[left]
    assert partial == [total] * devices
    assert ring_all_reduce_s(size_bytes, devices, bytes_per_s) == pytest.approx(sent / bytes_per_s)
    assert ring_all_gather_s(size_bytes, devices, bytes_per_s) == pytest.approx(sent / bytes_per_s / 2)

    # The alternate one: whole tensors go round, and every device adds up what comes by.
    sums, sent = [list(tensor) for tensor in tensors], 0
    for step in range(1, devices):
        sent += size_bytes
        for device in range(devices):
            incoming = tensors[(device - step) % devices]
            sums[device] = [a + b for a, b in zip(sums[device], incoming, strict=True)]
    assert sums == [total] * devices
    assert alternate_ring_all_reduce_s(size_bytes, devices, bytes_per_s) == pytest.approx(sent / bytes_per_s)


def test_flops_worked_by_hand():
    # Three matrices of 4 x 8: 2 * 64 * 32 = 4096 each, 12,288 forward, twice that backward; on 4 devices a quarter.
    assert layer_flops(LAYER, "forward") == 12_288
    assert layer_flops(LAYER, "forward", fsdp=4) == 3072
    assert layer_flops(LAYER, "backward", tp=4) == 6144
    assert layer_flops(LAYER, "forward", fsdp=2, tp=3) == 2048


def test_communication_worked_by_hand():
    # The weights are 3 * 32 * 2 = 192 bytes, input or output 64 * 4 * 2 = 512 bytes.
    assert communication_s("dp", LAYER, "forward", fsdp=4) == 0
    assert communication_s("dp", LAYER, "backward", fsdp=4) == pytest.approx(28.8)  # 2 * 3/4 * 192 / 10
    assert communication_s("fsdp", LAYER, "forward", fsdp=4) == pytest.approx(14.4)
    assert communication_s("fsdp", LAYER, "backward", fsdp=4) == pytest.approx(28.8)
    for which in PASSES:
        assert communication_s("tp", LAYER, which, tp=4) == pytest.approx(76.8)  # 2 * 3/4 * 512 / 10
    # On 2 x 4: FSDP gathers 192 / 4 = 48 bytes, 1/2 * 48 / 10; TP reduces 512 / 2 = 256 bytes, 2 * 3/4 * 256 / 10.
    mesh = {"fsdp": 2, "tp": 4}
    assert communication_s("fsdp-tp", LAYER, "forward", **mesh, overlapped=True) == pytest.approx(38.4)
    assert communication_s("fsdp-tp", LAYER, "forward", **mesh, overlapped=False) == pytest.approx(40.8)
    assert communication_s("fsdp-tp", LAYER, "backward", **mesh, overlapped=False) == pytest.approx(43.2)


def test_largest_numbers_of_devices_worked_by_hand():
    # B W / C = 6.4; 1.5 D_FF W / C = 1.2, and twice that in the backward pass.
    assert fsdp_reach(LAYER) == pytest.approx(6.4)
    assert tp_reach(LAYER, "forward") == pytest.approx(1.2)
    assert tp_reach(LAYER, "backward") == pytest.approx(2.4)
    assert most_devices("dp", LAYER, "forward") == math.inf
    assert most_devices("dp", LAYER, "backward") == pytest.approx(7.4)
    assert most_devices("fsdp", LAYER, "forward") == pytest.approx(7.4)
    assert most_devices("tp", LAYER, "backward") == pytest.approx(3.4)
    assert most_devices("fsdp-tp", LAYER, "backward", overlapped=True) == pytest.approx(7.4 * 3.4)
    # b t = 15.36, the corner 6.4 + 2.4 + 15.36 = 24.16; 24.16^2 / (4 * 15.36).
    assert most_devices("fsdp-tp", LAYER, "backward", overlapped=False) == pytest.approx(24.16**2 / 61.44)
    # Four-byte elements halve both reaches.
    fp32 = Layer(64, 4, 8, 100, 10, element_bytes=4)
    assert (fsdp_reach(fp32), tp_reach(fp32, "forward")) == (pytest.approx(3.2), pytest.approx(0.6))


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("strategy", PARALLELISMS[:3])
def test_at_the_limit_communication_takes_as_long_as_computing(strategy, which):
    devices = most_devices(strategy, LAYER, which)
    if devices == math.inf:
        return
    axis = {"tp" if strategy == "tp" else "fsdp": devices}
    computing_s = layer_flops(LAYER, which, **axis) / LAYER.flops_per_s
    assert communication_s(strategy, LAYER, which, **axis) == pytest.approx(computing_s)


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


def test_best_whole_mesh_is_the_best_of_all_divisors():
    layer = Layer(131072, 2560, 10240, 989.4e12, 450e9)
    assert best_whole_mesh(layer, 64, "forward", overlapped=False) == Mesh(fsdp=32, tp=2)
    times = {
        fsdp: mesh_communication_s(layer, fsdp, 64 // fsdp, "forward", overlapped=False)
        for fsdp in (1, 2, 4, 8, 16, 32, 64)
    }
    assert min(times, key=times.get) == 32
    assert best_whole_mesh(layer, 7, "forward", overlapped=True) in (Mesh(fsdp=7), Mesh(tp=7))


def test_mesh_sides_of_the_largest_shared_mesh():
    # b 6.4, t 1.2: the corner is 15.28; N_FSDP 15.28 / 2.4, N_TP 15.28 / 12.8.
    assert largest_mesh_shared(6.4, 1.2) == (pytest.approx(15.28 / 2.4), pytest.approx(15.28 / 12.8))
    assert largest_mesh_shared(0.4, 8.0) == (1, 9.0)
    assert largest_mesh_shared(8.0, 0.4) == (9.0, 1)


def test_step_times_by_hand():
    answers = {answer.quantity: answer.value for answer in parallelism_answers("fsdp", LAYER, Mesh(fsdp=4))}
    # Forward 30.72 s beside 14.4 s, backward 61.44 s beside 28.8 s.
    assert answers["both passes, communication overlapped with computing"] == pytest.approx(92.16)
    assert answers["both passes, nothing overlapped"] == pytest.approx(135.36)


@pytest.mark.parametrize("field", ["flops_per_s", "bytes_per_s"])
def test_impossible_layers_are_refused(field):
    values = {"batch": 64, "d_model": 4, "d_ff": 8, "flops_per_s": 100, "bytes_per_s": 10}
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError, match="must be positive"):
            Layer(**values | {field: wrong})
    with pytest.raises(UsageError, match="mesh 0x2: every axis needs at least 1 device"):
        Mesh(fsdp=0, tp=2)
