"""Count a user's model on tensors without values: products by shape, bytes, kernels, and its memory by a dry run."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336sys.allocations.without_values import WithoutValues
from cs336sys.errors import CapabilityError
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.training import Workload
from cs336sys.training import user_models
from cs336sys.training.flop_counting import PRODUCTS, attention_skipped
from cs336sys.training.memory_prediction import predicted_timeline, timeline_peaks
from cs336sys.training.step import TrainStep

# Operations that start no kernel: they make a tensor without writing it, or look at one in another way.
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "lift_fresh", "_reshape_alias")


class OperationCount(TorchDispatchMode):
    """A sum of the operations that run while it is entered.

    Attributes:
        products: rows, columns and inner dimension of each product; a batch of products counts as one with its rows.
        bytes: that the others read and write, expanded dimensions once.
        kernels: operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int]] = []
        self.bytes = 0
        self.kernels = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, unless it starts no kernel."""
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in _FREE:
            return result
        self.kernels += 1
        if name in PRODUCTS:
            left, right = (args[index] for index in PRODUCTS[name])
            self.products.append((left.shape[:-1].numel(), right.shape[-1], left.shape[-1]))
            return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.bytes += sum(map(_moved_bytes, tensors))
        return result


def _moved_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory: dimensions of stride 0, which are expanded, count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


class _RMSNorm(torch.autograd.Function):
    """Stands in for RMSNorm, several operations on a CPU, by one a pass that moves what a GPU's fused kernel moves."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        value, weight = ctx.saved_tensors
        return gradients[0] + value, None if weight is None else torch.empty_like(weight)


def _normalize(value: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(value, weight)


def count_model(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Count operations and memory of a user's model with one sequence and with two: runs in the worker process.

    Derived columns: the fields of :class:`~cs336sys.accounting.step_time.work.CountedModel`, which extrapolates from
    the two to other batches, and counts AdamW for whatever optimizer the user has.
    """
    workload = Workload.from_configuration(configuration)
    sized = [replace(workload, size=replace(workload.size, batch_size=batch), optimizer="fused") for batch in (1, 2)]
    counts_by_batch: list[dict[str, OperationCount]] = []
    for training in sized:
        progress(f"counting a step of {training.size.batch_size}")
        parameters, attention_calls, counts = _count_step(training)
        counts_by_batch.append(counts)
    peaks: dict[str, list[int]] = {}
    for checkpointing in ("none", "block"):
        progress(f"tracing memory, checkpoint {checkpointing}")
        traced = [predicted_timeline(MemoryWorkload(training, checkpointing=checkpointing)) for training in sized]
        peaks[checkpointing] = [max(peak.allocated for peak in timeline_peaks(step.timeline)) for step in traced]
    columns: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        # They are of the last batch, whose two sequences have twice the heads of one.
        "attention": [(heads // 2, queries, dimension) for heads, queries, dimension in attention_calls],
        "peaks": peaks,
    }
    for name in ("forward", "backward"):
        first, second = (counts[name] for counts in counts_by_batch)
        if len(first.products) != len(second.products):
            raise CapabilityError(
                f"{workload.user.model}: does other products with another batch, so it is not predicted"
            )
        columns[name] = {
            "products": [first.products, second.products],
            "bytes": [first.bytes, second.bytes],
            "kernels": first.kernels,  # A larger batch makes kernels larger, not more.
        }
    return Outcome("ok", derived=columns)


def _count_step(workload: Workload) -> tuple[list[nn.Parameter], list[tuple[int, int, int]], dict[str, OperationCount]]:
    """Return the parameters, calls of attention (heads, queries, head dimension), and operations by pass, in fp32."""
    counted = replace(workload, precision="fp32", attention="sdpa", mode="forward-backward")
    calls: list[tuple[int, int, int]] = []
    counts = {"forward": OperationCount(), "backward": OperationCount()}
    try:
        with user_models.copied_code(), WithoutValues() as unlaunched:
            step = TrainStep(counted, torch.device("meta"))
            with attention_skipped(calls), mock.patch.object(F, "rms_norm", _normalize):
                with counts["forward"]:
                    step.forward()
                with counts["backward"]:
                    step.backward()
    except Exception as error:
        raise CapabilityError(
            f"{workload.user.model}: cannot be counted, as its step does not run on tensors without values "
            f"({error!s:.300}); measure it by bench"
        ) from error
    if unlaunched.launches:
        raise CapabilityError(
            f"{workload.user.model}: launches kernels of Triton ({', '.join(unlaunched.launches)}), whose time is "
            "not predicted; measure it by bench"
        )
    return list(step.model.parameters()), calls, counts
