"""The roofline of a parallel feed-forward layer, by search."""

import math

import pytest

from cs336sys.accounting.parallelism import PASSES, Layer, Mesh, best_split, communication_s, layer_flops, most_devices
from cs336sys.errors import UsageError

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
