"""How far a feed-forward layer can be spread before communication takes longer than computing.

Source: CS336 assignment 2 (2026), sections 8.2 to 8.5. One SwiGLU layer, ``x`` (B, D), ``W1`` and ``W2`` (D, D_FF),
``W3`` (D_FF, D); matrix products count, everything element-wise does not. A device computes ``C`` FLOP/s and sends
``W`` bytes/s; collectives are rings (:mod:`cs336sys.accounting.rings`). Communication overlaps with computing, so the
layer is communication-bound where communication takes longer.

Data parallelism (dp) splits the batch and all-reduces weight gradients. FSDP splits the batch and the weights: it
gathers weights in both passes and reduce-scatters gradients. Tensor parallelism (tp) splits ``W1`` and ``W2`` by
columns and ``W3`` by rows, and all-reduces the output, and in the backward pass the input's gradient. fsdp-tp does both
on a mesh of ``N_FSDP x N_TP`` devices.

Everything takes numbers or symbols (:mod:`cs336sys.accounting.derivation`), so a formula is written once.
"""

import math
from dataclasses import dataclass

from cs336sys.accounting.derivation import Number, maximum, number_of
from cs336sys.accounting.rings import ring_all_gather_s, ring_all_reduce_s
from cs336sys.errors import UsageError

PARALLELISMS = ("dp", "fsdp", "tp", "fsdp-tp")
PASSES = ("forward", "backward")


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
        for name in ("batch", "d_model", "d_ff", "flops_per_s", "bytes_per_s", "element_bytes"):
            value = number_of(getattr(self, name))
            if not 0 < value < math.inf:
                raise UsageError(f"{name} {value}: must be positive")

    @property
    def weight_bytes(self) -> Number:
        """Bytes of the three matrices."""
        return 3 * self.element_bytes * self.d_model * self.d_ff

    @property
    def activation_bytes(self) -> Number:
        """Bytes of the layer's input, and as many of its output: (B, D)."""
        return self.element_bytes * self.batch * self.d_model


def layer_flops(layer: Layer, which: str, *, fsdp: Number = 1, tp: Number = 1) -> Number:
    """FLOPs of one device: it has ``B / fsdp`` rows and ``D_FF / tp`` columns, whatever is gathered for them.

    A matrix product (a, b) x (b, c) takes ``2 a b c``. The forward pass has one for each of the three matrices,
    ``6 B D D_FF``; the backward pass two, the gradients of its input and of itself, ``12 B D D_FF``.

    Args:
        which: ``forward`` or ``backward``.
        fsdp: devices that the batch is split over, data parallel ones alike.
        tp: devices that the matrices are split over.
    """
    products = 3 if which == "forward" else 6
    return 2 * products * layer.batch * layer.d_model * layer.d_ff / (fsdp * tp)


def dp_communication_s(layer: Layer, devices: Number, which: str) -> Number:
    """Backward: an all-reduce of the gradients of all three matrices. Forward: nothing, 0."""
    return 0 if which == "forward" else ring_all_reduce_s(layer.weight_bytes, devices, layer.bytes_per_s)


def fsdp_communication_s(layer: Layer, devices: Number, which: str, *, tp: Number = 1) -> Number:
    """Forward: an all-gather of the weights. Backward: another, and a reduce-scatter of their gradients, as long.

    Args:
        tp: devices that tensor parallelism has split each matrix over; a device gathers its part.
    """
    gather = ring_all_gather_s(layer.weight_bytes / tp, devices, layer.bytes_per_s)
    return gather if which == "forward" else 2 * gather


def tp_communication_s(layer: Layer, devices: Number, *, fsdp: Number = 1) -> Number:
    """Forward: an all-reduce of the output. Backward: one of the input's gradient, as large, so as long.

    Args:
        fsdp: devices that the batch is split over; a device reduces its own rows.
    """
    return ring_all_reduce_s(layer.activation_bytes / fsdp, devices, layer.bytes_per_s)


def mesh_communication_s(layer: Layer, fsdp: Number, tp: Number, which: str, *, overlapped: bool) -> Number:
    """Both axes of fsdp-tp: the longer one if their collectives overlap, the sum if they share the network."""
    along_fsdp = fsdp_communication_s(layer, fsdp, which, tp=tp)
    along_tp = tp_communication_s(layer, tp, fsdp=fsdp)
    return maximum(along_fsdp, along_tp) if overlapped else along_fsdp + along_tp


def communication_s(
    strategy: str, layer: Layer, which: str, *, fsdp: Number = 1, tp: Number = 1, overlapped: bool = True
) -> Number:
    """Communication time of one pass under a strategy, one of :data:`PARALLELISMS`.

    Args:
        fsdp: devices of dp or fsdp, and of the mesh's first axis.
        tp: devices of tp, and of the mesh's second axis.
        overlapped: whether the two axes of fsdp-tp communicate at the same time.
    """
    if strategy == "dp":
        return dp_communication_s(layer, fsdp, which)
    if strategy == "fsdp":
        return fsdp_communication_s(layer, fsdp, which)
    if strategy == "tp":
        return tp_communication_s(layer, tp)
    return mesh_communication_s(layer, fsdp, tp, which, overlapped=overlapped)


def fsdp_reach(layer: Layer) -> Number:
    """``b``: dp and fsdp are communication-bound from ``1 + b`` devices on, ``b = (2 / e) B W / C``.

    For ``e = 2`` bytes an element, ``6 (N - 1) / N D D_FF / W <= 6 B D D_FF / (N C)`` is ``N - 1 <= B W / C``. In the
    backward pass both sides double, and data parallelism has the backward pass alone.
    """
    return _over(2, layer.element_bytes) * layer.batch * layer.bytes_per_s / layer.flops_per_s


def tp_reach(layer: Layer, which: str) -> Number:
    """``t``: tp is communication-bound from ``1 + t`` devices on, ``t = (3 / e) D_FF W / C``, backward twice that.

    For ``e = 2`` bytes an element, ``4 (N - 1) / N B D / W <= 6 B D D_FF / (N C)`` is ``N - 1 <= 1.5 D_FF W / C``. The
    backward pass computes twice as much beside the same all-reduce.
    """
    products = 3 if which == "forward" else 6
    return _over(products, layer.element_bytes) * layer.d_ff * layer.bytes_per_s / layer.flops_per_s


def largest_mesh_overlapped(b: Number, t: Number) -> Number:
    """Devices of fsdp-tp whose axes overlap: each axis goes to its own limit, ``(1 + b) (1 + t)``.

    Args:
        b, t: :func:`fsdp_reach` and :func:`tp_reach`.
    """
    return (1 + b) * (1 + t)


def largest_mesh_shared(b: Number, t: Number) -> tuple[Number, Number]:
    """``(N_FSDP, N_TP)`` of the largest fsdp-tp mesh whose axes share the network (arguments as above).

    The sum of both times is as long as computing where ``(N_FSDP - 1) / b + (N_TP - 1) / t = 1``. On that line the
    derivative of ``N_FSDP N_TP`` is zero at ``N_FSDP / b = N_TP / t``: ``N_FSDP = (b + t + b t) / (2 t)`` and
    ``N_TP = (b + t + b t) / (2 b)``. Where one of them would be under 1, the other axis alone reaches furthest.
    """
    corner = b + t + b * t
    if corner < 2 * t:
        return 1, 1 + t
    if corner < 2 * b:
        return 1 + b, 1
    return corner / (2 * t), corner / (2 * b)


def most_devices(strategy: str, layer: Layer, which: str, *, overlapped: bool = True) -> Number:
    """Devices at which a pass communicates as long as it computes (arguments as in :func:`communication_s`).

    Infinity for dp's forward pass, which does not communicate.
    """
    b, t = fsdp_reach(layer), tp_reach(layer, which)
    if strategy == "dp":
        return math.inf if which == "forward" else 1 + b
    if strategy == "fsdp":
        return 1 + b
    if strategy == "tp":
        return 1 + t
    fsdp, tp = largest_mesh_shared(b, t)
    return largest_mesh_overlapped(b, t) if overlapped else fsdp * tp


def best_split(layer: Layer, devices: float, which: str, *, overlapped: bool) -> tuple[float, float]:
    """The mesh ``(N_FSDP, N_TP)`` of so many devices that communicates for the shortest time, not whole numbers.

    The times are ``g (N_FSDP - 1) / N`` and ``r (N_TP - 1) / N``, ``g`` and ``r`` being what gathering all weights and
    reducing all activations would take without end. Their sum is least at ``N_FSDP = sqrt(N r / g)``; their maximum
    where they are equal, the root of ``g N_FSDP^2 + (r - g) N_FSDP - r N``.
    """
    # At N = 2 both factors (N - 1) / N are 1 / 2.
    g = number_of(2 * fsdp_communication_s(layer, 2, which))
    r = number_of(2 * tp_communication_s(layer, 2))
    if overlapped:
        fsdp = (g - r + math.sqrt((g - r) ** 2 + 4 * g * r * devices)) / (2 * g)
    else:
        fsdp = math.sqrt(devices * r / g)
    fsdp = min(max(fsdp, 1.0), float(devices))
    return fsdp, devices / fsdp


def best_whole_mesh(layer: Layer, devices: int, which: str, *, overlapped: bool) -> tuple[int, int]:
    """The mesh ``(N_FSDP, N_TP)`` of so many devices, in whole numbers, that communicates for the shortest time."""
    meshes = [(fsdp, devices // fsdp) for fsdp in range(1, devices + 1) if devices % fsdp == 0]

    def seconds(mesh: tuple[int, int]) -> float:
        fsdp, tp = mesh
        return number_of(mesh_communication_s(layer, fsdp, tp, which, overlapped=overlapped))

    return min(meshes, key=seconds)


def _over(number: int, element_bytes: int) -> float:
    """``number / element_bytes``, an integer where it is one, for the formula's sake."""
    return number // element_bytes if number % element_bytes == 0 else number / element_bytes
