"""Predict steps of a model that is not ours from what was counted in it: products by shape, bytes, kernels, memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cs336sys.accounting.step_time.work import (
    COMPILED_ENTRIES,
    OPTIMIZER_LAUNCH,
    Amounts,
    StepWork,
    attention_square,
    product_work,
)
from cs336sys.workload.training import Workload

# Of our model, half precision against fp32 in eager execution: bytes and kernels (accounting/step_time/work.py).
_HALF_BYTES, _HALF_KERNELS = 0.89, 1.24
# Of our model, a compiled block against an eager one.
_COMPILED_BYTES, _COMPILED_KERNELS = 0.18, 0.24


@dataclass(frozen=True)
class CountedPass:
    """Work of a pass with batches of 1 and of 2 sequences, from which other batches follow.

    Attributes:
        products: rows, columns, inner dimension and how many, of each batch.
        bytes: of operations that are no products, in fp32.
        kernels: operations.
    """

    products: tuple[Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int]]]
    bytes: tuple[float, float]
    kernels: int

    def products_of(self, batch: int, device: str) -> float:
        """Return FLOPs, with what idle multiprocessors of a GPU waste."""
        total = 0.0
        for first, second in zip(*self.products, strict=True):
            rows, columns, inner = (max(1, a + (b - a) * (batch - 1)) for a, b in zip(first, second, strict=True))
            total += product_work(rows, columns, inner, device)
        return total

    def bytes_of(self, batch: int) -> float:
        """Return bytes of a batch."""
        return self.bytes[0] + (self.bytes[1] - self.bytes[0]) * (batch - 1)


@dataclass(frozen=True)
class CountedModel:
    """A user's model, by a step of it on tensors without values.

    Attributes:
        parameters: how many.
        tensors: of parameters.
        forward, backward: passes in fp32, without torch's attention.
        attention: heads of one sequence, queries and head dimension of each call of torch's attention.
        peaks: bytes at the peak, by checkpointing, of batches of 1 and of 2 sequences.
    """

    parameters: int
    tensors: int
    forward: CountedPass
    backward: CountedPass
    attention: Sequence[tuple[int, int, int]]
    peaks: Mapping[str, tuple[float, float]]

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> "CountedModel":
        """Read what the counting process returned."""

        def counted(name: str) -> CountedPass:
            one, two = ([tuple(shape) for shape in shapes] for shapes in columns[name]["products"])
            first, second = columns[name]["bytes"]
            return CountedPass((one, two), (first, second), columns[name]["kernels"])

        peaks = {name: (one, two) for name, (one, two) in columns["peaks"].items()}
        calls = [(heads, queries, dimension) for heads, queries, dimension in columns["attention"]]
        passes = counted("forward"), counted("backward")
        return cls(columns["parameters"], columns["tensors"], *passes, calls, peaks)

    def work(self, workload: Workload, checkpointing: str) -> StepWork:
        """Count a step as :func:`~cs336sys.accounting.step_time.work.step_work` does for our model."""
        half, batch = workload.precision != "fp32", workload.size.batch_size
        compiled = workload.compile != "off"
        work = StepWork()
        for amounts, counted in ((work.forward, self.forward), (work.backward, self.backward)):
            amounts["half_products" if half else "full_products"] += counted.products_of(batch, workload.device)
            moved = counted.bytes_of(batch) * (_HALF_BYTES if half else 1.0)
            kernels = counted.kernels * (_HALF_KERNELS if half else 1.0)
            if compiled:
                moved, kernels = moved * _COMPILED_BYTES, kernels * _COMPILED_KERNELS
            # Autocast's casts of all weights.
            moved += 6 * self.parameters if half else 0
            amounts.add({"fused_bytes" if compiled else "eager_bytes": moved, "kernels": kernels})
        name = "flash" if workload.attention == "flash" else "sdpa"
        for heads, queries, dimension in self.attention:
            square = attention_square(batch * heads, queries, dimension, workload.device)
            work.forward.add({f"{name}_forward": 2 * square, "kernels": 1})
            work.backward.add({f"{name}_backward": 5 * square, "kernels": 3})
        if checkpointing != "none":
            work.recomputed = Amounts(work.forward)
            work.backward.add(work.recomputed)
        if workload.optimizer == "course":
            work.optimizer.add({"course_parameters": self.parameters, "kernels": 7 * self.tensors})
        else:
            moments = 4 if workload.state_dtype == "bf16" else 8
            work.optimizer.add({"state_bytes": (12 + 2 * moments) * self.parameters, "kernels": 4})
        for phase, amounts in work.phases.items():
            amounts["gaps"] = amounts["kernels"]
            work.launches[phase] = amounts["kernels"] * (OPTIMIZER_LAUNCH if phase == "optimizer" else 1.0)
            if phase != "optimizer" and workload.compile == "block":
                work.launches[phase] += COMPILED_ENTRIES * workload.size.num_layers
        return work

    def memory(self, workload: Workload, checkpointing: str) -> float:
        """Return bytes at the peak, by the dry run's batches; compiled steps hold less than this."""
        one, two = self.peaks[checkpointing]
        peak = one + (two - one) * (workload.size.batch_size - 1)
        return peak - (4 * self.parameters if workload.state_dtype == "bf16" else 0)
