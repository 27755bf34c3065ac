"""A training step on meshes that nobody here has, from the time of one device: a simulation.

Neighbours share layers (tp); next come ranks that share the state (fsdp), then copies of both (ddp). A ring among ranks
of one dimension is as fast as its slowest link: that inside a node if the whole ring lies in one, else that between.

What is counted, for ``c`` seconds that one device computes on a sequence:

- computing: ``c`` times the sequences of a group of tp ranks, over tp; a third of it is the forward pass.
- fsdp: weights gathered in both passes and gradients scattered, alongside the computing of their pass. Exposed are the
  time beyond that computing and the first or last unit of each pass, which has nothing alongside it.
- ddp: gradients all-reduced, alongside the backward pass, after fsdp's share of it.
- tp: sums over ranks in every block, alongside nothing.
- optimizer: one device's time over fsdp x tp.

While a device computes and communicates, both may be slower than alone (:class:`.hardware.OverlapSlowdown`). A group's
batch that does not fit passes in parts: each gathers and scatters anew, and ddp waits for the last.

Source: 2026 handout, sections 8.2 to 8.5, with the whole model and two levels of bandwidth instead of one layer.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from cs336sys.accounting.flops import count_parameters, model_flops, parameter_shapes
from cs336sys.accounting.hardware import Cluster
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.sharding.fsdp import all_gathered_bytes, sharded_units
from cs336sys.accounting.sharding.partition import Mesh, heads_refusal
from cs336sys.accounting.sharding.step import ShardedStep, rank_moments, rank_peak
from cs336sys.accounting.sharding.tensor import TensorStep
from cs336sys.errors import UsageError
from cs336sys.settings.sizes import ELEMENT_BYTES, ModelSize

_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Dtypes:
    """The dtypes in which numbers are kept and sent.

    Attributes:
        computed: what a step computes in: ``fp32``, ``bf16`` or ``fp16``.
        gradients: what ddp sends, and keeps between backward pass and optimizer.
        state: AdamW's moments, and with fsdp all that a rank keeps: a name of :data:`.sharding.fsdp.STATE_BYTES`.
    """

    computed: str
    gradients: str = "fp32"
    state: str = "fp32"

    @property
    def text(self) -> str:
        return f"{self.computed}, ddp's gradients in {self.gradients}, state in {self.state}"


@dataclass(frozen=True)
class DeviceTime:
    """The time that one device needs by itself.

    Attributes:
        sequence_s: forward and backward pass of one sequence, nothing computed again.
        optimizer_s: the update of all parameters.
    """

    sequence_s: float
    optimizer_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """A step on a mesh.

    Attributes:
        parts_s: seconds that follow each other: ``computing``, exposed ``fsdp`` and ``ddp``, ``tp``, ``optimizer``.
        memory: of the fullest rank, in bytes.
    """

    mesh: Mesh
    batch_size: int
    accumulation: int
    parts_s: Mapping[str, float]
    memory: float

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def memory_gib(self) -> float:
        return self.memory / GIB

    @property
    def longest_part(self) -> str:
        return max(self.parts_s, key=self.parts_s.__getitem__)


@dataclass(frozen=True)
class Simulation:
    """The training that is simulated, and the devices.

    Attributes:
        size: its batch is that of all devices.
        device: one of them, by itself.
        checkpointing: ``none`` or ``block``.
    """

    size: ModelSize
    dtypes: Dtypes
    cluster: Cluster
    device: DeviceTime
    checkpointing: str = "none"

    def with_batch(self, batch_size: int) -> "Simulation":
        return replace(self, size=replace(self.size, batch_size=batch_size))

    def step(self, mesh: Mesh, accumulation: int = 1) -> SimulatedStep:
        """Simulate a step on this mesh, in which ``accumulation`` parts of the batch pass one after the other.

        Raises:
            UsageError: ranks of ddp and fsdp do not divide the batch, those of tp the heads; or tp leaves a node.
        """
        size, dtypes, cluster, device = self.size, self.dtypes, self.cluster, self.device
        groups = mesh.ddp * mesh.fsdp
        if size.batch_size % (groups * accumulation):
            raise UsageError(
                f"{groups} groups of ranks with {accumulation} parts each do not divide the batch of {size.batch_size}"
            )
        if (refusal := heads_refusal(size.num_heads, mesh.tp)) is not None:
            raise UsageError(refusal)
        if mesh.tp > cluster.node_devices:
            raise UsageError(f"tp={mesh.tp}: layers are shared inside a node, which has {cluster.node_devices} devices")
        part = replace(size, batch_size=size.batch_size // accumulation)
        recomputed_share = _FORWARD_SHARE if self.checkpointing == "block" else 0.0
        forward_s = device.sequence_s * part.batch_size / groups / mesh.tp * _FORWARD_SHARE
        backward_s = forward_s * (1 - _FORWARD_SHARE + recomputed_share) / _FORWARD_SHARE

        # Independent of the batch: with batch 1, their cache has one entry for all.
        gather_s, scatter_s, unhidden_s = _fsdp_times(replace(size, batch_size=1), dtypes.computed, mesh, cluster)
        overlapped_s = cluster.slowdown.seconds
        backward_with_fsdp_s = overlapped_s(backward_s, gather_s + scatter_s)
        # ddp sends with the last part only.
        last_backward_s = overlapped_s(backward_s, gather_s + scatter_s + _ddp_s(size, dtypes.gradients, mesh, cluster))
        exposed_fsdp_s = overlapped_s(forward_s, gather_s) - forward_s + backward_with_fsdp_s - backward_s + unhidden_s
        parts_s = {
            "computing": accumulation * (forward_s + backward_s),
            "fsdp": accumulation * exposed_fsdp_s,
            "ddp": last_backward_s - backward_with_fsdp_s,
            "tp": accumulation * _tensor_s(part, dtypes.computed, mesh, cluster, self.checkpointing),
            "optimizer": device.optimizer_s / (mesh.fsdp * mesh.tp),
        }
        memory = _mesh_peak_bytes(part, dtypes, mesh, self.checkpointing)
        return SimulatedStep(mesh, size.batch_size, accumulation, parts_s, memory)

    def with_least_accumulation(self, mesh: Mesh) -> SimulatedStep:
        """Return the :meth:`step` with the least accumulation that fits; that of single sequences if none does."""
        for accumulation in _divisors(max(1, self.size.batch_size // (mesh.ddp * mesh.fsdp))):
            step = self.step(mesh, accumulation)
            if step.memory <= self.cluster.memory_bytes:
                break
        return step

    def meshes(self, devices: int, dimension: str | None = None) -> Iterator[Mesh]:
        """Yield all meshes of so many devices that :meth:`step` takes, or the one with all of them in a dimension."""
        for tp in _divisors(devices):
            if tp > self.cluster.node_devices or self.size.num_heads % tp:
                continue
            for fsdp in _divisors(devices // tp):
                mesh = Mesh(devices // tp // fsdp, fsdp, tp)
                is_requested = dimension is None or getattr(mesh, dimension) == devices
                if is_requested and self.size.batch_size % (mesh.ddp * mesh.fsdp) == 0:
                    yield mesh

    def fastest(self, devices: int, dimension: str | None = None) -> tuple[SimulatedStep, SimulatedStep] | None:
        """Return the fastest step that fits, or the smallest if none does, and the fastest without accumulation.

        None if no mesh of so many devices divides batch and heads. ``dimension``: ``ddp``, ``fsdp`` or ``tp`` has all.
        """
        steps = [self.with_least_accumulation(mesh) for mesh in self.meshes(devices, dimension)]
        if not steps:
            return None
        # Without accumulation, whether it fits or not.
        fastest_at_once = min((self.step(step.mesh) for step in steps), key=lambda step: step.step_s)
        fitting = [step for step in steps if step.memory <= self.cluster.memory_bytes]
        if not fitting:
            return min(steps, key=lambda step: step.memory), fastest_at_once
        return min(fitting, key=lambda step: step.step_s), fastest_at_once

    def flops_per_s(self, step: SimulatedStep) -> float:
        """Return the model FLOPs (nothing computed again) that a device computes a second."""
        return model_flops(replace(self.size, batch_size=step.batch_size)) / step.step_s / step.mesh.devices


@cache
def _fsdp_times(size: ModelSize, precision: str, mesh: Mesh, cluster: Cluster) -> tuple[float, float, float]:
    """Return seconds: of a pass's all-gathers, a step's reduce-scatters, and a unit of both, which nothing hides."""
    if mesh.fsdp == 1:
        return 0.0, 0.0, 0.0
    shapes = parameter_shapes(size)
    # A ring's members are tp devices apart, and have a part of the layers.
    bytes_per_s = cluster.ring_bytes_per_s(mesh.fsdp, mesh.tp)
    seconds_per_byte = (mesh.fsdp - 1) / mesh.fsdp / mesh.tp / bytes_per_s
    units, e = sharded_units(shapes).values(), ELEMENT_BYTES[precision]
    calls_s = len(units) * cluster.call_s
    # Both passes are counted, and the unit kept between them once: a pass gathers half.
    gather_s = all_gathered_bytes(shapes, e, mesh.fsdp) / 2 * seconds_per_byte + calls_s
    scatter_s = e * sum(math.prod(shape) for unit in units for shape in unit) * seconds_per_byte + calls_s
    return gather_s, scatter_s, (gather_s + scatter_s) / len(units)


def _ddp_s(size: ModelSize, gradients: str, mesh: Mesh, cluster: Cluster) -> float:
    """Return the seconds of the all-reduce of gradients in this dtype, in buckets of blocks."""
    if mesh.ddp == 1:
        return 0.0
    group_ranks = mesh.fsdp * mesh.tp
    gradient_bytes = ELEMENT_BYTES[gradients] * count_parameters(size) / group_ranks
    seconds_per_byte = 2 * (mesh.ddp - 1) / mesh.ddp / cluster.ring_bytes_per_s(mesh.ddp, group_ranks)
    return gradient_bytes * seconds_per_byte + size.num_layers * cluster.call_s


def _tensor_s(size: ModelSize, precision: str, mesh: Mesh, cluster: Cluster, checkpointing: str) -> float:
    """Return the seconds of the sums over ranks that share layers: four a block, and the loss."""
    if mesh.tp == 1:
        return 0.0
    # The tp ranks also split sequences between layers, and compute in the dtype in which weights are gathered.
    step = TensorStep("fsdp+tensor-sequence", size, mesh.tp, mesh.ddp * mesh.fsdp, precision, checkpointing)
    # Every sum is a reduce-scatter and an all-gather: embedded tokens and the LM head have one, the loss has two.
    calls_s = 2 * (4 * size.num_layers + 4) * cluster.call_s
    return step.sent_for_layers / cluster.ring_bytes_per_s(mesh.tp, distance=1) + calls_s


@cache
def _mesh_peak_bytes(size: ModelSize, dtypes: Dtypes, mesh: Mesh, checkpointing: str) -> float:
    """Return a rank's bytes at the peak: a share of the state, and of the batch, which tp ranks have in common.

    They are a tp-th of those of a rank without tp, as if the ranks shared the norms and the batch, too.
    """
    of_group = replace(size, batch_size=size.batch_size // mesh.ddp)
    strategy = "fsdp" if mesh.fsdp > 1 else "none"
    step = ShardedStep(strategy, of_group, mesh.fsdp, dtypes.computed, "flash", checkpointing, state_dtype=dtypes.state)
    if mesh.fsdp > 1:
        return rank_peak(step).total / mesh.tp
    # Only fsdp knows other dtypes than fp32: take from each moment what gradients and moments in half precision save.
    gradient_share, moment_share = ELEMENT_BYTES[dtypes.gradients] / 4, 0.5 if dtypes.state == "bf16" else 1.0
    of_moments = (
        moment.total - (1 - gradient_share) * moment.gradients - (1 - moment_share) * moment.optimizer_state
        for moment in rank_moments(step)
    )
    return max(of_moments) / mesh.tp


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
