"""Count a step of a user's model, for which there is no formula: parameters, FLOPs, calls of attention."""

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import cs336_basics.model
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cs336sys.allocations.without_values import WithoutValues
from cs336sys.errors import summary_of
from cs336sys.run.cells import Progress
from cs336sys.settings.training import Workload
from cs336sys.training import user_models
from cs336sys.training.model import attention_replaced, sdpa
from cs336sys.training.step import TrainStep


@dataclass
class StepCount:
    """The work of one step of a user's model, as far as the shapes of its tensors show it."""

    parameters: int | None = None  # Of the model, tied ones once; None where it cannot even be built without memory.
    # Model FLOPs as ``accounting.flops`` counts them, those of torch's attention and Triton's kernels aside; None where
    # they could not be counted.
    flops: int | None = None
    # Lines that wait for the GPU because they read a number from a tensor, with how often.
    reads: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)  # Kernels of Triton, with how often.
    failure: str = ""  # Why there are no FLOPs.
    drops: bool = False  # Whether it has layers of dropout.
    hidden: list[str] = field(default_factory=list)  # Tensors that look like parameters and are none.


def count_step(workload: Workload) -> StepCount:
    """Count a step of a user's model, once for many workloads: settings that change no count get one value."""
    mode = "forward-backward" if workload.has_backward else "forward"
    launched = replace(workload, mode=mode, precision="fp32", compile="off", cuda_graph="off", device="cpu")
    # FLOPs of attention are not counted here, but by AttentionCalls on real tensors: they depend on what masks hold.
    return _count_cached(replace(launched, kernels="reference", attention="sdpa", warmup=0, steps=1))


@functools.lru_cache(maxsize=4)
def _count_cached(workload: Workload) -> StepCount:
    """Count a launched step on the meta device; where it fails there, return what was counted so far, and why."""
    count = StepCount()
    valueless = WithoutValues()
    try:
        with attention_kept(), user_models.copied_code(), valueless:
            step = TrainStep(workload, torch.device("meta"))
            valueless.guessed.clear()  # Building the model is no part of a step.
            valueless.launches.clear()
            count.parameters = sum(parameter.numel() for parameter in step.model.parameters())
            count.hidden = user_models.hidden_parameters(step.model)
            count.drops = any(isinstance(part, _DropoutNd) and part.p > 0 for part in step.model.modules())
            with attention_skipped(), FlopCounterMode(display=False) as counter:  # AttentionCalls counts attention.
                step.forward()
                if workload.has_backward:
                    step.backward()
            count.flops = counter.get_total_flops()
    except Exception as error:
        count.failure = summary_of(error)
    count.reads = Counter({line or "somewhere": times for line, times in valueless.guessed.items()})  # "": unknown.
    count.launches = valueless.launches
    return count


@contextlib.contextmanager
def attention_kept() -> Iterator[None]:
    """Let all models of the process compute attention after this as before it, whatever was built in it."""
    # Both are patched with themselves: leaving the patches puts them back.
    torch_kept = mock.patch.object(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    with attention_replaced(cs336_basics.model.scaled_dot_product_attention), torch_kept:
        yield


class _SkippedAttention(torch.autograd.Function):
    """Stands in for attention: makes tensors of the shapes of its result and gradients, without work."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
        return query.new_empty((*batch, *query.shape[-3:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def attention_skipped(calls: list[tuple[int, int, int]] | None = None) -> AbstractContextManager[None]:
    """Let torch's attention do no work within this; append (heads, queries, head dimension) to ``calls``."""

    def attend(call: user_models.AttentionCall, attention: Callable[..., Tensor]) -> Tensor:
        if calls is not None:
            calls.append((call.query.shape[:-2].numel(), *call.query.shape[-2:]))
        return _SkippedAttention.apply(call.query, call.key, call.value)

    return user_models.watched_attention(attend)


_HIDDEN_SCORE = -1e4  # Masks add -inf, the dtype's least value or, in fp16, -1e4 to the score of a hidden pair.

# Products, and which of their arguments are the operands.
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
_TAKES_SHAPE_ALONE = re.compile(r"new_|.*_like$")  # Operations that take a shape, and no values, from their argument.


class _MarkedTensors:
    """A set of tensors and of all their views: it keeps weak references to their storages, not the tensors."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def update(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:  # Others, such as sparse ones, have no storage.
                storage = StorageWeakRef(tensor.untyped_storage())
                self._storages[storage.cdata] = storage

    def __contains__(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return storage is not None and not storage.expired()  # Another storage may get the address of a freed one.


class AttentionCalls(TorchDispatchMode):
    """Counts of attention in a forward pass of real tensors: torch's, and of batched products with a softmax between.

    Args:
        batch: the tensors that a mask may depend on.

    Attributes:
        calls: of torch's ``scaled_dot_product_attention``, by why our kernels cannot stand in for it, or ``""`` where
            they can.
        flops: of torch's attention, for visible pairs of tokens alone; minus those of hidden pairs in attention that a
            model computes by products, which a counter of shapes has counted whole.
        is_upper_bound: whether a mask depends on the batch. All pairs under such a mask are counted.
    """

    supports_higher_order_operators = True  # Without it torch refuses them, such as flex_attention, in this mode.

    def __init__(self, batch: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.flops = 0
        self.is_upper_bound = False
        # What was computed from the batch, and scores that a mask computed from it hides.
        self._from_batch, self._masked_by_batch = _MarkedTensors(), _MarkedTensors()
        self._from_batch.update(batch)
        self._is_in_attention = False
        # The last batched product's shape and inner dimension; how many of its pairs are hidden, once softmax read it.
        self._scores: tuple[torch.Size, int] | None = None
        self._hidden_pairs: int | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count attention within this context."""
        with user_models.watched_attention(self._attend), self:
            yield

    def _attend(self, call: user_models.AttentionCall, attention: Callable[..., Tensor]) -> Tensor:
        """Count the FLOPs of the pairs of tokens that a call of torch's attention sees, and call it."""
        query, key, value, mask = call.query, call.key, call.value, call.mask
        self.calls[call.why_not_ours() or ""] += 1  # "": our kernels can compute it.
        heads, queries, keys = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
        if mask is not None and mask in self._from_batch:
            self.is_upper_bound, mask = True, None
        self._is_in_attention = True  # __torch_dispatch__ must not count what is called here.
        try:
            if mask is not None:
                visible = mask if mask.dtype == torch.bool else mask > _HIDDEN_SCORE
                visible = visible.expand(*visible.shape[:-2], queries, keys)
                # Several heads may share a mask.
                pairs = visible_pairs(visible) * heads // visible.shape[:-2].numel()
            else:
                pairs = heads * (causal_pairs(queries, keys) if call.is_causal else queries * keys)
            # Products of queries and keys, and of probabilities and values: 2 FLOPs a multiplication and addition.
            self.flops += 2 * pairs * (query.shape[-1] + value.shape[-1])
            return call.by(attention)
        finally:
            self._is_in_attention = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow what depends on the batch, and count products with a softmax between them."""
        result = function(*args, **(kwargs or {}))
        if self._is_in_attention:
            return result
        name = getattr(getattr(function, "overloadpacket", function), "__name__", "")  # Not all are overloads.
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        from_batch = [tensor for tensor in inputs if tensor in self._from_batch]
        if from_batch and not _TAKES_SHAPE_ALONE.match(name):
            self._from_batch.update(outputs)
        if name in PRODUCTS:
            # Attention's products are batched. No product returns scores that a mask hides: its result is not marked.
            if name.endswith("bmm"):
                left, right = (args[position] for position in PRODUCTS[name])
                self._count_product(left, right, result)
        elif self._hides_by_batch(name, args, from_batch) or any(tensor in self._masked_by_batch for tensor in inputs):
            self._masked_by_batch.update(outputs)
        if name in ("_softmax", "_safe_softmax"):
            self._count_softmax(args[0])
        return result

    def _hides_by_batch(self, name: str, args: Any, from_batch: list[Tensor]) -> bool:
        """Return whether an operation hides scores by a mask that was computed from the batch."""
        if name.startswith("masked_fill"):
            return args[1] in self._from_batch  # Its mask.
        if name == "where":
            return args[0] in self._from_batch  # Its condition.
        # A sum of scores and of a mask of large negative numbers, both computed from the batch.
        is_masking_sum = name in ("add", "add_") and len(from_batch) == 2
        return is_masking_sum and any(tensor.is_floating_point() and _hides(tensor) for tensor in from_batch)

    def _count_softmax(self, scores: Tensor) -> None:
        """Subtract hidden pairs from the FLOPs of the last product, if softmax takes its result, masked, as scores."""
        if self._scores is None:
            return
        (_, queries, keys), inner = self._scores  # A batched product has three dimensions.
        rows = self._scores[0][:-1].numel()
        # Softmax may take more columns than keys: an attention sink is one more.
        if scores.shape[-1] < keys or scores.shape[:-1].numel() != rows or not _hides(scores):
            return
        if scores in self._masked_by_batch:
            self.is_upper_bound = True
            return
        visible = (scores[..., :keys] > _HIDDEN_SCORE).reshape(-1, queries, keys)
        self._hidden_pairs = rows * keys - visible_pairs(visible)
        self.flops -= 2 * self._hidden_pairs * inner  # Of the product before; _count_product() does the next one's.

    def _count_product(self, left: Tensor, right: Tensor, result: Tensor) -> None:
        """Subtract hidden pairs from the FLOPs of probabilities (``left``) times values; keep the result as scores."""
        if self._hidden_pairs is not None and self._scores is not None and left.shape == self._scores[0]:
            self.flops -= 2 * self._hidden_pairs * right.shape[-1]
        self._scores, self._hidden_pairs = (result.shape, left.shape[-1]), None


def _hides(scores: Tensor) -> bool:
    """Return whether any pair is hidden."""
    return scores.numel() > 0 and scores.min().item() <= _HIDDEN_SCORE


def causal_pairs(queries: int, keys: int) -> int:
    """Return the pairs of ``is_causal=True``: of a square half, by the papers' convention, else the visible ones."""
    square = min(queries, keys)  # Query i sees keys 0 to i.
    if queries == keys:
        return (square * square + 1) // 2  # Of a single pair all.
    return square * (square + 1) // 2 + max(0, queries - keys) * keys


def visible_pairs(visible: Tensor) -> int:
    """Count the pairs that masks of shape (..., queries, keys) show; of a causal square as :func:`causal_pairs`."""
    queries, keys = visible.shape[-2:]
    pairs = visible.sum((-1, -2))
    if queries == keys:
        is_causal = (visible == torch.ones_like(visible).tril()).flatten(-2).all(-1)
        pairs = torch.where(is_causal, causal_pairs(queries, keys), pairs)
    return int(pairs.sum().item())


def counted_columns(step: TrainStep, progress: Progress) -> dict[str, Any]:
    """Return ``parameters``, and of a user's model ``flops`` and ``notes``; runs a forward pass: call it uncaptured."""
    workload = step.workload
    if workload.is_ours:
        return {"parameters": workload.parameters}
    progress("counting")
    count = count_step(workload)
    attention = AttentionCalls(leaf for leaf in tree_leaves(step.inputs) if isinstance(leaf, Tensor))
    # Compiled code shows no calls. set_stance imports the compiler, so it is called only for such models.
    eager = torch.compiler.set_stance("force_eager") if workload.is_compiled else contextlib.nullcontext()
    course_attention = mock.Mock(wraps=sdpa)  # Attention of cs336_basics is counted like a call of torch's.
    with torch.no_grad(), eager, attention_replaced(course_attention):
        step.compute_logits(attention.watching())
    # By value of --attention: calls that it changes. reference leaves all; our kernels can compute those under "".
    replaced_calls = {"reference": 0, "sdpa": course_attention.call_count, "flash": attention.calls[""]}
    parameters = count.parameters or sum(parameter.numel() for parameter in step.model.parameters())
    # The backward pass of a product is two of its size; what is computed again does not count.
    times = 3 if workload.has_backward else 1
    flops = None if count.flops is None else count.flops + times * attention.flops
    return {
        "parameters": parameters,
        "flops": flops,
        "flops_are_upper_bound": attention.is_upper_bound,
        "same_attention": [name for name, calls in replaced_calls.items() if not calls],  # Values without an effect.
        "notes": [
            *user_models.hidden_warnings(str(workload.user.model), user_models.hidden_parameters(step.model)),
            *_flop_notes(workload, count, attention),
            *fused_notes(step),
        ],
    }


def fused_notes(step: TrainStep) -> list[str]:
    """Return a note that counts the modules of a user's model that fused kernels replace, or no note."""
    handle = step.fused
    if not step.workload.fused_kernels or handle is None or not handle.recognized:
        return []
    counts = dict(handle.recognized)
    if step.loss_without_logits is None:
        counts.pop("linear-cross-entropy", None)  # It was recognized, but --loss takes its place.
    replaced = ", ".join(f"{times} x {name}" for name, times in counts.items())
    copies = f"; {len(list(handle.copies))} weights have copies" if handle.copies is not None else ""
    return [f"{step.workload.user.model}: fused kernels replace {replaced or 'no module'}{copies}"]


def _flop_notes(workload: Workload, count: StepCount, attention: AttentionCalls) -> list[str]:
    """Return notes on what computes attention, on FLOPs that are not counted, and on waits for the GPU."""
    name = str(workload.user.model)
    notes = []
    if workload.attention_record.is_ours:
        if ours := attention.calls[""]:  # Counted by the reason why flash cannot compute them, "" where it can.
            notes.append(f"{name}: {ours} calls of torch's scaled_dot_product_attention are computed by flash")
        elif not attention.calls.total():
            notes.append(f"{name}: never calls torch's scaled_dot_product_attention, so flash takes the place of none")
        notes += [
            f"{name}: {times} of its {attention.calls.total()} calls of attention go to torch's, {reason}"
            for reason, times in attention.calls.items()
            if reason
        ]
    if count.failure:
        notes.append(f"{name}: no FLOPs, its step does not run on the meta device ({count.failure})")
    if attention.is_upper_bound:
        notes.append(f"{name}: FLOPs are an upper bound, as a mask of attention depends on the batch; no MFU")
    if count.launches:
        notes.append(f"{name}: no FLOPs are counted in kernels of Triton: {_with_times(count.launches)}")
    if count.reads:
        lines = _with_times(count.reads)
        notes.append(f"{name}: a step reads numbers from tensors, and waits for the GPU each time: {lines}")
    return notes


def _with_times(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count} times)" for name, count in counts.items())
