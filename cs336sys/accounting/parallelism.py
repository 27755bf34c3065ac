"""Limits of spreading a feed-forward layer before communication takes longer than computing.

Source: CS336 assignment 2 (2026), sections 8.2 to 8.5. One SwiGLU layer, ``x`` (B, D), ``W1`` and ``W2`` (D, D_FF),
``W3`` (D_FF, D); matrix products count, everything element-wise does not. A device computes ``C`` FLOP/s and sends
``W`` bytes/s; collectives are rings (``communication.py``). Communication overlaps with computing, so the
layer is communication-bound where communication takes longer.

Data parallelism (dp) splits the batch and all-reduces weight gradients. FSDP splits the batch and the weights: it
gathers weights in both passes and reduce-scatters gradients. Tensor parallelism (tp) splits ``W1`` and ``W2`` by
columns and ``W3`` by rows, and all-reduces the output, and in the backward pass the input's gradient. fsdp-tp does both
on a mesh of ``N_FSDP x N_TP`` devices.

Everything takes numbers or symbols (:mod:`cs336sys.accounting.derivation`), so a formula is written once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from cs336sys.accounting.communication import ring_all_gather_s, ring_all_reduce_s
from cs336sys.accounting.derivation import Derived, Expression, Number, maximum, number_of, symbol, why
from cs336sys.accounting.sharding.partition import Mesh
from cs336sys.errors import UsageError

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Parallelism:
    """A way of spreading the layer, and the 2026 handout's problem about it."""

    title: str  # Of its tables.
    axes: Mapping[str, str]  # ``fsdp`` (dp's, too) and ``tp``, with the symbols of their numbers of devices.
    source: str  # Of its formulas.
    problem: str
    parts: str  # Letters that ask for FLOPs, times, and most devices with axes that overlap or share the network.
    passes: Sequence[str] = PASSES  # That the problem is about.
    communicates: Sequence[str] = PASSES  # The passes that communicate.

    @property
    def has_two_axes(self) -> bool:
        return len(self.axes) > 1


_HANDOUT, _BACKWARD = "2026 handout, 8.", PASSES[1:]
PARALLELISMS = {
    "dp": Parallelism(
        "Data parallel", {"fsdp": "N_DP"}, f"{_HANDOUT}2", "data_parallel_calcs", "abc", _BACKWARD, _BACKWARD
    ),
    "fsdp": Parallelism("Fully sharded data parallel", {"fsdp": "N_FSDP"}, f"{_HANDOUT}3", "fsdp_calcs", "abc"),
    "tp": Parallelism("Tensor parallel", {"tp": "N_TP"}, f"{_HANDOUT}4", "tp_calcs", "bcd"),
    "fsdp-tp": Parallelism(
        "FSDP and TP on a mesh", {"fsdp": "N_FSDP", "tp": "N_TP"}, f"{_HANDOUT}5", "fsdp_tp_calcs", "abcd", PASSES[:1]
    ),
}


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer and the devices it runs on.

    Attributes:
        batch: tokens of the whole batch, B.
        d_model, d_ff: D and D_FF.
        flops_per_s: of one device, C.
        bytes_per_s: egress bandwidth of one device, W.
        element_bytes: of a weight, gradient or activation; the handout assumes FP16.
    """

    batch: Number
    d_model: Number
    d_ff: Number
    flops_per_s: Number
    bytes_per_s: Number
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            value = number_of(getattr(self, name))
            if not 0 < value < math.inf:
                raise UsageError(f"{name} {value}: must be positive")

    @property
    def weight_bytes(self) -> Number:
        """Return the bytes of the three matrices."""
        return 3 * self.element_bytes * self.d_model * self.d_ff


def layer_flops(layer: Layer, which: str, *, fsdp: Number = 1, tp: Number = 1) -> Number:
    """Count FLOPs of one device: it has ``B / fsdp`` rows and ``D_FF / tp`` columns, whatever is gathered for them.

    A matrix product (a, b) x (b, c) takes ``2 a b c``. The forward pass has one for each of the three matrices,
    ``6 B D D_FF``; the backward pass two, the gradients of its input and of itself, ``12 B D D_FF``.

    Args:
        which: ``forward`` or ``backward``.
        fsdp: devices that the batch is split over, data parallel ones alike.
        tp: devices that the matrices are split over.
    """
    products = 3 if which == "forward" else 6
    return 2 * products * layer.batch * layer.d_model * layer.d_ff / (fsdp * tp)


def _fsdp_comm_s(layer: Layer, which: str, fsdp: Number, tp: Number = 1) -> Number:
    """Return the seconds of an all-gather of a device's part of the weights, backward of a reduce-scatter, too."""
    gather_s = ring_all_gather_s(layer.weight_bytes / tp, fsdp, layer.bytes_per_s)
    return gather_s if which == "forward" else 2 * gather_s


def _tensor_parallel_comm_s(layer: Layer, tp: Number, fsdp: Number = 1) -> Number:
    """Return the seconds of an all-reduce of a device's rows: of the output, or of the input's gradient, as large."""
    activation_bytes = layer.element_bytes * layer.batch * layer.d_model
    return ring_all_reduce_s(activation_bytes / fsdp, tp, layer.bytes_per_s)


def communication_s(
    strategy: str, layer: Layer, which: str, *, fsdp: Number = 1, tp: Number = 1, overlapped: bool = True
) -> Number:
    """Return the seconds that one pass communicates under a strategy, one of :data:`PARALLELISMS`.

    Args:
        fsdp: devices of dp or fsdp, and of the mesh's first axis.
        tp: devices of tp, and of the mesh's second axis.
        overlapped: whether the two axes of fsdp-tp communicate at the same time.
    """
    parallelism = PARALLELISMS[strategy]
    if which not in parallelism.communicates:
        return 0
    # dp all-reduces gradients, in the time in which fsdp's backward pass gathers weights and reduce-scatters gradients.
    along = {"fsdp": _fsdp_comm_s(layer, which, fsdp, tp), "tp": _tensor_parallel_comm_s(layer, tp, fsdp)}
    times = [along[axis] for axis in parallelism.axes]
    return maximum(*times) if overlapped else sum(times)


def fsdp_reach(layer: Layer) -> Number:
    """Return ``b = (2 / e) B W / C``: dp and fsdp are communication-bound from ``1 + b`` devices on.

    For ``e = 2`` bytes an element, ``6 (N - 1) / N D D_FF / W <= 6 B D D_FF / (N C)`` is ``N - 1 <= B W / C``. In the
    backward pass both sides double, and data parallelism has the backward pass alone.
    """
    return 2 / layer.element_bytes * layer.batch * layer.bytes_per_s / layer.flops_per_s


def tp_reach(layer: Layer, which: str) -> Number:
    """Return ``t = (3 / e) D_FF W / C``, backward twice that: tp is communication-bound from ``1 + t`` devices on.

    For ``e = 2`` bytes an element, ``4 (N - 1) / N B D / W <= 6 B D D_FF / (N C)`` is ``N - 1 <= 1.5 D_FF W / C``. The
    backward pass computes twice as much alongside the same all-reduce.
    """
    products = 3 if which == "forward" else 6
    return products / layer.element_bytes * layer.d_ff * layer.bytes_per_s / layer.flops_per_s


def largest_mesh_shared(b: Number, t: Number) -> tuple[Number, Number]:
    """Return ``(N_FSDP, N_TP)`` of the largest fsdp-tp mesh whose axes share the network.

    ``b`` and ``t`` are :func:`fsdp_reach` and :func:`tp_reach`. The sum of both times is as long as computing where
    ``(N_FSDP - 1) / b + (N_TP - 1) / t = 1``. On that line the derivative of ``N_FSDP N_TP`` is zero at
    ``N_FSDP / b = N_TP / t``: ``N_FSDP = (b + t + b t) / (2 t)`` and ``N_TP = (b + t + b t) / (2 b)``. Where one of
    them would be under 1, the other axis alone reaches furthest.
    """
    corner = b + t + b * t
    if corner < 2 * t:
        return 1, 1 + t
    if corner < 2 * b:
        return 1 + b, 1
    return corner / (2 * t), corner / (2 * b)


def most_devices(strategy: str, layer: Layer, which: str, *, overlapped: bool = True) -> Number:
    """Return the devices at which a pass communicates as long as it computes (arguments as in :func:`communication_s`).

    Infinity for dp's forward pass, which does not communicate.
    """
    parallelism = PARALLELISMS[strategy]
    if which not in parallelism.communicates:
        return math.inf
    b, t = fsdp_reach(layer), tp_reach(layer, which)
    if parallelism.has_two_axes and not overlapped:
        return math.prod(largest_mesh_shared(b, t))
    most = {"fsdp": 1 + b, "tp": 1 + t}  # Axes that overlap go to their own limits.
    return math.prod(most[axis] for axis in parallelism.axes)


def best_split(layer: Layer, devices: float, which: str, *, overlapped: bool) -> tuple[float, float]:
    """Return ``(N_FSDP, N_TP)`` of so many devices that communicates for the shortest time, not whole numbers.

    The times are ``g (N_FSDP - 1) / N`` and ``r (N_TP - 1) / N``, ``g`` and ``r`` being what gathering all weights and
    reducing all activations would take on ever more devices. Their sum is least at ``N_FSDP = sqrt(N r / g)``; their
    maximum where they are equal, the root of ``g N_FSDP^2 + (r - g) N_FSDP - r N``.
    """
    # At N = 2 both factors (N - 1) / N are 1 / 2.
    g = number_of(2 * _fsdp_comm_s(layer, which, fsdp=2))
    r = number_of(2 * _tensor_parallel_comm_s(layer, tp=2))
    if overlapped:
        fsdp = (g - r + math.sqrt((g - r) ** 2 + 4 * g * r * devices)) / (2 * g)
    else:
        fsdp = math.sqrt(devices * r / g)
    fsdp = min(max(fsdp, 1.0), float(devices))
    return fsdp, devices / fsdp


def fastest_mesh(layer: Layer, devices: int) -> Mesh:
    """Return the fsdp-tp mesh of so many devices with the fastest forward pass, if its axes share the network."""
    meshes = [Mesh(fsdp=fsdp, tp=devices // fsdp) for fsdp in range(1, devices + 1) if devices % fsdp == 0]

    def seconds(mesh: Mesh) -> float:
        return number_of(communication_s("fsdp-tp", layer, "forward", fsdp=mesh.fsdp, tp=mesh.tp, overlapped=False))

    return min(meshes, key=seconds)


# Parts of a problem, counted from 1.
_FLOPS, _COMMUNICATION, _LIMIT, _SHARED_LIMIT = 1, 2, 3, 4

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


def parallelism_answers(strategy: str, layer: Layer, mesh: Mesh) -> list[Derived]:
    """Answer the handout's problem on one strategy: FLOPs, times and largest numbers of devices.

    Args:
        strategy: one of :data:`PARALLELISMS`.
        layer: in plain numbers.
        mesh: dp and fsdp use its first axis, tp its second.
    """
    width, inner = symbol("D", layer.d_model), symbol("D_FF", layer.d_ff)
    rates = symbol("C", layer.flops_per_s), symbol("W", layer.bytes_per_s)
    named = Layer(symbol("B", layer.batch), width, inner, *rates, layer.element_bytes)
    record = PARALLELISMS[strategy]
    # An axis that a strategy does not use leaves no trace in its formulas.
    axes = {axis: symbol(name, getattr(mesh, axis)) for axis, name in record.axes.items()}
    rows: list[Derived] = []
    times: list[list[Expression]] = []  # Of each pass its computing and, where there is any, communication.
    for which, short in {"forward": "fwd", "backward": "bwd"}.items():
        row = partial(_pass_row, strategy, which)
        flops, reason = layer_flops(named, which, **axes), why("computing", which)
        count = row("flops", "FLOPs of a device", flops, f"F_{short}", _FLOPS, reason=reason)
        computing = row("s", "computing time", count.as_symbol() / named.flops_per_s, f"T_{short}")
        communication = _communication_rows(strategy, named, axes, which, name=f"K_{short}")
        rows += [count, computing, *communication]
        times.append([computing.as_symbol(), *(row.as_symbol() for row in communication if row.symbol == f"K_{short}")])
    overlapped, in_turn = sum(maximum(*of_pass) for of_pass in times), sum(chain(*times))
    quantity, step_row = "both passes, communication overlapped with computing", partial(Derived, source=record.source)
    rows.append(step_row(quantity, overlapped, "s", reason=why("overlapped_step")))
    rows.append(step_row("both passes, nothing overlapped", in_turn, "s", reason=why("step_in_turn")))
    return [*rows, *(_mesh_limits(named) if record.has_two_axes else _limits(strategy, named))]


def _pass_row(
    strategy: str, which: str, unit: str, quantity: str, result: Number, name: str = "", part: int = 0, **details: str
) -> Derived:
    """Return a row about one pass, which answers this part of the strategy's problem; 0: it is a step on the way."""
    record = PARALLELISMS[strategy]
    question = f"{record.problem} ({record.parts[part - 1]})" if part and which in record.passes else ""
    return Derived(f"{quantity}, {which}", result, unit, name, source=record.source, question=question, **details)


def _communication_rows(strategy: str, layer: Layer, axes: Mapping[str, Any], which: str, name: str) -> list[Derived]:
    """Return the communication times of a pass; ``name`` is that of the pass's, with axes overlapped.

    ``axes`` are the devices of each axis, ``fsdp`` and ``tp`` as :func:`communication_s` takes them, as symbols.
    """
    parallelism = PARALLELISMS[strategy]
    if which not in parallelism.communicates:
        return []
    row = partial(_pass_row, strategy, which, "s", part=_COMMUNICATION)
    reasons = [why(f"along_{axis}", strategy, which) for axis in axes]
    if not parallelism.has_two_axes:
        return [row("communication time", communication_s(strategy, layer, which, **axes), name, reason=reasons[0])]
    seconds = _fsdp_comm_s(layer, which, **axes)
    along_fsdp = row("communication time along FSDP", seconds, f"{name}_FSDP", reason=reasons[0])
    seconds = _tensor_parallel_comm_s(layer, **axes)
    along_tp = row("communication time along TP", seconds, f"{name}_TP", reason=reasons[1])
    both = along_fsdp.as_symbol(), along_tp.as_symbol()
    overlapped = row("communication time, axes overlapped", maximum(*both), name, reason=why("overlapped_axes"))
    quantity = "communication time, axes sharing the network"
    shared = row(quantity, sum(both), part=0, reason=why("shared_axes"))
    return [along_fsdp, along_tp, overlapped, shared]


def _limits(strategy: str, layer: Layer) -> list[Derived]:
    """Return, for each pass that communicates, the most devices before communication takes longer than computing."""
    quantity = "most devices before communication takes longer than computing"
    parallelism = PARALLELISMS[strategy]
    (name,) = parallelism.axes.values()
    row = partial(_pass_row, unit="devices", part=_LIMIT, quantity=quantity, name=name, relation="<=")
    return [
        row(strategy, which, result=most_devices(strategy, layer, which), reason=why(f"{strategy}_{which}_limit"))
        for which in parallelism.communicates
    ]


def _mesh_limits(layer: Layer) -> list[Derived]:
    """Return the largest meshes of fsdp-tp for each pass, with both axes overlapped and sharing the network."""
    rows = []
    for which in PASSES:
        row = partial(_pass_row, "fsdp-tp", which, "devices")
        quantity, reason = "devices beyond the first that FSDP alone could use", why("fsdp_reach")
        fsdp_alone = row(quantity, fsdp_reach(layer), "b", reason=reason)
        quantity, reason = "devices beyond the first that TP alone could use", why("tp_reach")
        tp_alone = row(quantity, tp_reach(layer, which), "t", reason=reason)
        b, t = fsdp_alone.as_symbol(), tp_alone.as_symbol()
        most, reason = (1 + b) * (1 + t), why("most_overlapped", which)
        overlapped = row("most devices, axes overlapped", most, "N", _LIMIT, relation="<=", reason=reason)
        fsdp, tp = (
            row(f"{axis} of that mesh, axes sharing the network", devices, axis)
            for axis, devices in zip(("N_FSDP", "N_TP"), largest_mesh_shared(b, t), strict=True)
        )
        most, reason = fsdp.as_symbol() * tp.as_symbol(), why("most_shared")
        shared = row("most devices, axes sharing the network", most, "N", _SHARED_LIMIT, relation="<=", reason=reason)
        rows += [fsdp_alone, tp_alone, overlapped, fsdp, tp, shared]
    return rows
