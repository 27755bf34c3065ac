"""The 2026 handout's questions on parallelism, answered by the formulas of ``accounting.parallelism`` with numbers.

Problems ``data_parallel_calcs``, ``fsdp_calcs``, ``tp_calcs`` and ``fsdp_tp_calcs``, sections 8.2 to 8.5.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cs336sys.accounting.derivation import Derived, Number, maximum, symbol
from cs336sys.accounting.parallelism import (
    PASSES,
    Layer,
    communication_s,
    fsdp_communication_s,
    fsdp_reach,
    largest_mesh_overlapped,
    largest_mesh_shared,
    layer_flops,
    most_devices,
    tp_communication_s,
    tp_reach,
)
from cs336sys.errors import UsageError

# Where each strategy's FLOPs, communication times and largest numbers of devices are asked for.
_PROBLEMS = {
    "dp": ("data_parallel_calcs", "(a)", "(b)", "(c)"),
    "fsdp": ("fsdp_calcs", "(a)", "(b)", "(c)"),
    "tp": ("tp_calcs", "(b)", "(c)", "(d)"),
    "fsdp-tp": ("fsdp_tp_calcs", "(a)", "(b)", "(c)", "(d)"),
}
_SHORT = {"forward": "fwd", "backward": "bwd"}
_SECTIONS = {"dp": "8.2", "fsdp": "8.3", "tp": "8.4", "fsdp-tp": "8.5"}

# Problem tp_calcs (a). Every device i holds W1_i, W2_i (D, D_FF / N_TP) and W3_i (D_FF / N_TP, D).
TP_BACKWARD = (
    ("dz_i = dy W3_i^T", "(B, D_FF / N_TP)", "dy is whole on every device, W3_i a slice of rows: no communication."),
    ("dx2_i = dz_i * f(x1_i)", "(B, D_FF / N_TP)", "Element by element."),
    ("dx1_i = dz_i * f'(x1_i) * x2_i", "(B, D_FF / N_TP)", "Element by element."),
    ("dx_i = dx1_i W1_i^T + dx2_i W2_i^T", "(B, D)", "Sums over this device's D_FF / N_TP columns only."),
    ("dx = all-reduce({dx_i})", "(B, D)", "The sum over all columns: the only communication."),
    ("dW3_i = z_i^T dy", "(D_FF / N_TP, D)", "The gradient of a device's own slice, complete: it has the whole batch."),
    ("dW2_i = x^T dx2_i", "(D, D_FF / N_TP)", "Likewise; x was saved whole."),
    ("dW1_i = x^T dx1_i", "(D, D_FF / N_TP)", "Likewise."),
)


@dataclass(frozen=True)
class Mesh:
    """Devices by axis.

    Raises:
        UsageError: an axis has no device.
    """

    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.fsdp < 1 or self.tp < 1:
            raise UsageError(f"mesh {self.fsdp}x{self.tp}: every axis needs at least 1 device")

    @property
    def devices(self) -> int:
        return self.fsdp * self.tp


class _Axes(NamedTuple):
    """Devices by axis; one that a strategy does not use leaves no trace in its formulas."""

    fsdp: Number = 1
    tp: Number = 1


def parallelism_answers(strategy: str, layer: Layer, mesh: Mesh) -> list[Derived]:
    """FLOPs, times and largest numbers of devices of one strategy.

    Args:
        strategy: one of :data:`~cs336sys.accounting.parallelism.PARALLELISMS`.
        layer: in plain numbers.
        mesh: dp and fsdp use its first axis, tp its second.
    """
    named = Layer(
        batch=symbol("B", layer.batch),
        d_model=symbol("D", layer.d_model),
        d_ff=symbol("D_FF", layer.d_ff),
        flops_per_s=symbol("C", layer.flops_per_s),
        bytes_per_s=symbol("W", layer.bytes_per_s),
        element_bytes=layer.element_bytes,
    )
    axes = {
        "dp": _Axes(fsdp=symbol("N_DP", mesh.fsdp)),
        "fsdp": _Axes(fsdp=symbol("N_FSDP", mesh.fsdp)),
        "tp": _Axes(tp=symbol("N_TP", mesh.tp)),
        "fsdp-tp": _Axes(symbol("N_FSDP", mesh.fsdp), symbol("N_TP", mesh.tp)),
    }[strategy]
    forward, backward = (
        [*_computing(strategy, named, axes, which), *_communication(strategy, named, axes, which)] for which in PASSES
    )
    limits = _mesh_limits(named) if strategy == "fsdp-tp" else _limits(strategy, named)
    return [*forward, *backward, *_step(strategy, forward, backward), *limits]


def _row(
    strategy: str,
    which: str,
    part: int,
    quantity: str,
    result: Number,
    unit: str,
    name: str = "",
    **details: str,
) -> Derived:
    """A row about one pass.

    Args:
        part: which part of the strategy's problem it answers: 1 FLOPs, 2 communication, 3 and 4 limits; 0 none.
    """
    # The handout asks for data parallelism's backward pass alone, and for the mesh's forward pass alone.
    asked = part and which != {"dp": "forward", "fsdp-tp": "backward"}.get(strategy)
    problem = _PROBLEMS[strategy]
    return Derived(
        f"{quantity}, {which}",
        result,
        unit,
        name,
        source=f"2026 handout, {_SECTIONS[strategy]}",
        question=f"{problem[0]} {problem[part]}" if asked else "",
        **details,
    )


def _computing(strategy: str, layer: Layer, axes: _Axes, which: str) -> list[Derived]:
    row = partial(_row, strategy, which)
    products = "one product each" if which == "forward" else "two products each, for input and weight gradients"
    reason = f"Three matrices, {products}, of 2 B D D_FF FLOPs, spread evenly."
    flops = layer_flops(layer, which, fsdp=axes.fsdp, tp=axes.tp)
    count = row(1, "FLOPs of a device", flops, "flops", f"F_{_SHORT[which]}", reason=reason)
    return [count, row(0, "computing time", count.as_symbol() / layer.flops_per_s, "s", f"T_{_SHORT[which]}")]


def _communication(strategy: str, layer: Layer, axes: _Axes, which: str) -> list[Derived]:
    """The communication times of a pass; the one named K_fwd or K_bwd is the pass's, with axes overlapped."""
    if (strategy, which) == ("dp", "forward"):
        return []
    row = partial(_row, strategy, which)
    name = f"K_{_SHORT[which]}"
    weights = {
        "dp": "The gradients of all three matrices are all-reduced.",
        "forward": "All three matrices are all-gathered.",
        "backward": "All three matrices are all-gathered again, and their gradients reduce-scattered in the same time.",
    }["dp" if strategy == "dp" else which]
    reduced = {"forward": "the output, (B, D)", "backward": "the gradient of the input, (B, D)"}[which]
    activations = f"Each device has a partial sum of {reduced}: an all-reduce."
    if strategy != "fsdp-tp":
        seconds = communication_s(strategy, layer, which, fsdp=axes.fsdp, tp=axes.tp)
        return [row(2, "communication time", seconds, "s", name, reason=activations if strategy == "tp" else weights)]
    along_fsdp = row(
        2,
        "communication time along FSDP",
        fsdp_communication_s(layer, axes.fsdp, which, tp=axes.tp),
        "s",
        f"{name}_FSDP",
        reason=f"{weights} TP has split each matrix N_TP ways.",
    )
    along_tp = row(
        2,
        "communication time along TP",
        tp_communication_s(layer, axes.tp, fsdp=axes.fsdp),
        "s",
        f"{name}_TP",
        reason=f"{activations} FSDP has split its rows N_FSDP ways.",
    )
    both = along_fsdp.as_symbol(), along_tp.as_symbol()
    longer = "The axes have links of their own: the longer one counts."
    return [
        along_fsdp,
        along_tp,
        row(2, "communication time, axes overlapped", maximum(*both), "s", name, reason=longer),
        row(0, "communication time, axes sharing the network", sum(both), "s", reason="As in (d): both, in turn."),
    ]


def _step(strategy: str, forward: list[Derived], backward: list[Derived]) -> list[Derived]:
    """Both passes together, with and without overlap of computing and communication."""
    times = [
        [row.as_symbol() for row in rows if row.symbol in (f"T_{short}", f"K_{short}")]
        for rows, short in ((forward, "fwd"), (backward, "bwd"))
    ]
    sums = (
        ("communication overlapped with computing", sum(maximum(*terms) for terms in times), "The longer one counts."),
        ("nothing overlapped", sum(term for terms in times for term in terms), "Each waits for the other."),
    )
    source = f"2026 handout, {_SECTIONS[strategy]}"
    return [Derived(f"both passes, {how}", total, "s", reason=reason, source=source) for how, total, reason in sums]


def _limits(strategy: str, layer: Layer) -> list[Derived]:
    """The largest number of devices of one axis."""
    reasons = {
        ("dp", "backward"): "Communication hardly grows with N_DP, but a device computes 1 / N_DP of the batch: "
        "K <= T is (N_DP - 1) / N_DP <= B W / (N_DP C).",
        ("fsdp", "forward"): "Half of the backward pass's communication beside half of its FLOPs.",
        ("fsdp", "backward"): "All-gather and reduce-scatter are as long as data parallelism's all-reduce.",
        ("tp", "forward"): "K <= T is 4 (N_TP - 1) / N_TP x B D / W <= 6 B D D_FF / (N_TP C), for two-byte elements: "
        "B and D cancel.",
        ("tp", "backward"): "Twice the FLOPs beside an all-reduce of the same size.",
    }
    return [
        _row(
            strategy,
            which,
            3,
            "most devices before communication takes longer than computing",
            most_devices(strategy, layer, which),
            "devices",
            {"dp": "N_DP", "fsdp": "N_FSDP", "tp": "N_TP"}[strategy],
            relation="<=",
            reason=reasons[strategy, which],
        )
        for which in PASSES
        if (strategy, which) in reasons
    ]


def _mesh_limits(layer: Layer) -> list[Derived]:
    """The largest meshes of fsdp-tp, with both axes overlapped and sharing the network."""
    rows = []
    for which in PASSES:
        row = partial(_row, "fsdp-tp", which)
        b = row(
            0,
            "devices beyond the first that FSDP alone could use",
            fsdp_reach(layer),
            "devices",
            "b",
            reason="K along FSDP <= T: N_TP divides both and cancels, as in fsdp_calcs (c).",
        )
        t = row(
            0,
            "devices beyond the first that TP alone could use",
            tp_reach(layer, which),
            "devices",
            "t",
            reason="K along TP <= T: N_FSDP divides both and cancels, as in tp_calcs (d).",
        )
        reaches = b.as_symbol(), t.as_symbol()
        product = "3 B D_FF W^2 / (2 C^2)" if which == "forward" else "3 B D_FF W^2 / C^2"
        overlapped = row(
            3,
            "most devices, axes overlapped",
            largest_mesh_overlapped(*reaches),
            "devices",
            "N",
            relation="<=",
            reason=f"The longer axis counts, so each goes to its own limit; b t is {product} for two-byte elements.",
        )
        best = [
            row(0, f"{axis} of that mesh, axes sharing the network", devices, "devices", axis)
            for axis, devices in zip(("N_FSDP", "N_TP"), largest_mesh_shared(*reaches), strict=True)
        ]
        shared = row(
            4,
            "most devices, axes sharing the network",
            best[0].as_symbol() * best[1].as_symbol(),
            "devices",
            "N",
            relation="<=",
            reason="The sum counts: (N_FSDP - 1) / b + (N_TP - 1) / t <= 1. On that line N_FSDP N_TP is largest at "
            "N_FSDP / b = N_TP / t: (b + t + b t)^2 / (4 b t), which is b t / 4 for many devices.",
        )
        rows += [b, t, overlapped, *best, shared]
    return rows
