"""Predict a step's memory without a GPU and without memory: run it on fake tensors, which have shapes only."""

import contextlib
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from cs336sys.accounting.checkpointing import SUBLAYERS, group_sizes
from cs336sys.accounting.memory import GIB
from cs336sys.allocations.history import FakeHistory
from cs336sys.allocations.recorder import StepRecorder
from cs336sys.allocations.timeline import AllocationTimeline, largest_allocations, peak_position, repeated, thinned
from cs336sys.allocations.without_values import DecisionsRead, WithoutValues
from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.kernels.attention import flash_attention
from cs336sys.machine.late_imports import why_no_triton
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.profiling import LARGEST_ALLOCATIONS, MemoryWorkload
from cs336sys.settings.training import Workload
from cs336sys.training import user_models
from cs336sys.training.checkpoints import MemoryStep
from cs336sys.training.model import ATTENTION_FUNCTIONS
from cs336sys.training.step import with_notes


@dataclass(frozen=True)
class PhasePeak:
    """Most bytes held at once in a phase."""

    phase: str
    allocated: int
    reserved: int | None  # What the CUDA allocator had taken from the device, None on a CPU.


def timeline_peaks(timeline: AllocationTimeline) -> list[PhasePeak]:
    """Return the peaks of a timeline's phases; it knows only the tensors' bytes."""
    totals = timeline.totals()
    return [PhasePeak(phase.name, totals[peak_position(totals, phase)], reserved=None) for phase in timeline.phases()]


def summary(
    workload: MemoryWorkload, timeline: AllocationTimeline, peaks: list[PhasePeak], block: dict[str, int | None] | None
) -> dict[str, Any]:
    """Reduce a timeline, and its :func:`block_changes`, to what its cell keeps."""
    totals, bytes_by_category = timeline.totals(), timeline.bytes_by_category()
    phases = []
    for phase, peak in zip(timeline.phases(), peaks, strict=True):
        position = peak_position(totals, phase)
        phases.append(asdict(peak) | {category: sizes[position] for category, sizes in bytes_by_category.items()})
    highest = max(peaks, key=lambda peak: peak.allocated)
    reserved = [peak.reserved for peak in peaks if peak.reserved is not None]
    predicted = workload.peak if workload.training.is_ours else None  # By formula.
    return {
        "phases": phases,
        "peak_gib": highest.allocated / GIB,
        "peak_phase": highest.phase,
        "reserved_gib": max(reserved) / GIB if reserved else None,
        "predicted_gib": predicted and predicted.total_gib,
        "predicted_moment": predicted and predicted.moment,
        "lost_events": timeline.lost_events,
        "largest": largest_allocations(timeline, LARGEST_ALLOCATIONS),
        # Tables show the growth over a block as the bytes that it saves, and under checkpoints it does not save them.
        "block": block if workload.checkpointing == "none" else None,
        "timeline": thinned(bytes_by_category),
        "regions": [asdict(region) for region in timeline.phases()],
    }


def block_changes(timeline: AllocationTimeline, block_names: Sequence[str]) -> dict[str, int | None] | None:
    """Return the changes of memory over one block, in the middle of the model, in bytes.

    Returns:
        ``forward_growth``: from just before the previous block's first allocation in the forward pass to just before
        this block's; ``backward_change``: in the backward pass, from this block's to the previous block's; both None in
        compiled code, whose modules are not seen. ``gradients``: of the block's parameters. Without a backward pass or
        a second block, None in place of the dictionary.
    """
    block = len(block_names) // 2
    if block == 0:
        return None
    prefix = f"{block_names[block]}."  # Of parameters, whose names only their gradients' allocations have.
    gradients = sum(allocation.size for allocation in timeline.allocations if allocation.parameter.startswith(prefix))
    if not gradients:
        return None
    totals = timeline.totals()

    def held_before_block(index: int, phase: str) -> int | None:
        starts = (
            allocation.start
            for allocation in timeline.allocations
            if allocation.phase == phase and allocation.origin.module.startswith(f"{block_names[index]}.")
        )
        first = min(starts, default=None)  # At least 1: what is there at 0, before the first event, has no phase.
        return None if first is None else totals[first - 1]

    changes = {"forward_growth": ("forward", block - 1, block), "backward_change": ("backward", block, block - 1)}
    result: dict[str, int | None] = {"gradients": gradients}
    for name, (phase, start, end) in changes.items():
        before, after = held_before_block(start, phase), held_before_block(end, phase)
        result[name] = None if before is None or after is None else after - before
    return result


_DECISION_SEQUENCES = 2  # Sequences of the step on real tensors that shows what users' code decides by their values.


@dataclass(frozen=True)
class TracedStep:
    """A step on fake tensors."""

    timeline: AllocationTimeline
    parameters: int  # Of its model.
    block: dict[str, int | None] | None  # Its :func:`block_changes`.
    # Lines of a user's code that read numbers from tensors, which are zero here, with how often.
    guessed: Mapping[str, int] = field(default_factory=dict)

    def notes(self, workload: Workload) -> list[str]:
        """Return a sentence on :attr:`guessed` in a list, which is empty if no line of those reads is known."""
        lines = ", ".join(f"{line} ({times} times)" for line, times in self.guessed.items() if line)
        if not lines:
            return []
        return [
            f"{workload.user.model}: traced with zeros where its step reads numbers from tensors, so that it may "
            f"hold other memory than this: {lines}"
        ]


def _traced_timeline(workload: MemoryWorkload, follow_operations: bool, progress: Progress) -> TracedStep:
    """Trace a step; if our model has many blocks, trace three steps of few, and repeat what each adds to the last.

    Every block is traced after all if the three show that what blocks add does not repeat to the byte.
    """
    size, checkpointing = workload.training.size, workload.checkpointing
    # Blocks after which memory repeats: those that share a checkpoint; only the last one may have fewer.
    period = 1 if checkpointing in (*SUBLAYERS, "none", "nested") else group_sizes(checkpointing, size.num_layers)[0]
    fewest_blocks = 2 * period + size.num_layers % period  # All others are whole periods.
    repeats = workload.training.is_ours and checkpointing != "nested"  # Halves of halves depend on the whole depth.
    blocks_of_three_steps = 3 * (fewest_blocks + period)  # In all: up to so many are traced as they are.
    if not repeats or size.num_layers <= blocks_of_three_steps:
        progress(f"tracing {size.num_layers} blocks on fake tensors")
        return _traced_whole(workload, follow_operations)
    steps = []
    for blocks in (fewest_blocks, fewest_blocks + period, fewest_blocks + 2 * period):
        progress(f"tracing {blocks} of {size.num_layers} blocks on fake tensors")
        training = replace(workload.training, size=replace(size, num_layers=blocks))
        steps.append(_traced_whole(replace(workload, training=training), follow_operations))
    first, second, third = steps
    times = (size.num_layers - fewest_blocks) // period
    timeline = repeated((first.timeline, second.timeline, third.timeline), times)
    if timeline is None:
        return _traced_whole(workload, follow_operations)
    parameters = first.parameters + times * (second.parameters - first.parameters)
    return TracedStep(timeline, parameters, third.block)  # That of the most blocks that were traced.


def _traced_whole(workload: MemoryWorkload, follow_operations: bool) -> TracedStep:
    """Run a step of all blocks on fake tensors of the CPU, with what computes on a GPU alone replaced until it ends."""
    on_cpu = workload.training.device == "cpu"
    training = replace(workload.training, compile="off", cuda_graph="off", device="cpu")  # A step holds the same.
    if training.scales_loss:
        training = replace(training, precision="bf16")  # It has as many bytes, and runs everywhere.
    workload = replace(workload, training=training, snapshot=None)
    decisions = _decisions(workload, torch.device("cpu" if on_cpu or not torch.cuda.is_available() else "cuda"))
    with (
        mock.patch.dict(
            ATTENTION_FUNCTIONS, flash=lambda Q, K, V, mask=None: _flash_of_a_gpu(Q, K, V, is_causal=mask is not None)
        ),
        mock.patch.object(user_models.attention, "_flash_attention", _flash_of_a_gpu),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", user_models.torch_attention),
        user_models.copied_code(),
        _adamw_without_kernels(training),
        # Else conversions of parameters, such as .to(), would swap tensors, and deep copies of modules copy the mode.
        mock.patch.object(torch.utils, "swap_tensors", _give_data),
        mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode, create=True),
        _decided_as_with_values(),
        FakeTensorMode(),
        WithoutValues(decisions) as valueless,
    ):
        # Two passes stand for any number: the second finds the gradients of the first, as do all later ones.
        step = MemoryStep(workload, torch.device("cpu"), passes=min(2, workload.micro_batches))
        valueless.guessed.clear()  # Numbers that constructors read do not decide what a step holds.
        _create_optimizer_state(step)
        live_tensors = step.held()
        history = FakeHistory([tensor for tensors in live_tensors.values() for tensor in tensors], on_cpu=on_cpu)
        recorder = StepRecorder(history, step.names, follow_operations=follow_operations)
        step.run_recorded(recorder)
        timeline = recorder.timeline(live_tensors=live_tensors, held_size=None, optimizer_state=step.optimizer_state())
        parameters = sum(parameter.numel() for parameter in step.model.parameters())
        block = block_changes(timeline, step.block_names)
        return TracedStep(timeline, parameters, block, {} if training.is_ours else dict(valueless.guessed))


def predict_memory(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Predict one cell of ``memprof --dry-run``: runs in the worker process, needs no GPU and little memory."""
    workload = MemoryWorkload.from_configuration(configuration)
    traced = predicted_timeline(workload, follow_operations=True, progress=progress)
    derived = summary(workload, traced.timeline, timeline_peaks(traced.timeline), traced.block)
    return Outcome(
        "ok", derived=with_notes({"parameters": traced.parameters} | derived, traced.notes(workload.training))
    )


def predicted_timeline(
    workload: MemoryWorkload, *, follow_operations: bool = False, progress: Progress = lambda stage: None
) -> TracedStep:
    """Return the timeline of a step after the first, as far as the results of its operations show it.

    Compiled workloads are traced eagerly, those in CUDA graphs launched, which holds the same, and fp16 as bf16, which
    has as many bytes and runs everywhere. What kernels use inside, cuBLAS workspaces and the allocator's rounding are
    not seen.

    Args:
        follow_operations: find the origin of every allocation, which takes longer.

    Raises:
        CapabilityError: a user's model does not run on fake tensors; with real ones it may.
    """
    training = workload.training
    if training.is_ours:
        return _traced_timeline(workload, follow_operations, progress)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # torch logs on standard error what it raises, too.
    try:
        with mock.patch.object(logger, "disabled", True), user_models.telling_user_errors(training):
            return _traced_timeline(workload, follow_operations, progress)
    except UserCodeError as error:
        raise CapabilityError(
            f"{training.user.model}: no memory is predicted, as its step does not run on tensors without values "
            f"({error!s:.300}); doctor --model says whether it runs with them"
        ) from error


def _decisions(workload: MemoryWorkload, device: torch.device) -> dict[str, bool]:
    """Record what a user's model decides by values of tensors, at a tiny size, where they are real.

    On a GPU where there is one: a model's own kernels may run nowhere else.
    """
    training = workload.training
    if training.is_ours:
        return {}
    sequences = min(training.size.batch_size // workload.micro_batches, _DECISION_SEQUENCES)
    for size in user_models.tiny_sizes(training.size):
        tiny = replace(training, size=replace(size, batch_size=sequences), device=device.type)
        try:
            with user_models.telling_user_errors(training), user_models.copied_code(), torch.random.fork_rng():
                step = MemoryStep(replace(workload, training=tiny, micro_batches=1), device)
                with DecisionsRead() as recorder:
                    step.forward()
                    if training.has_backward:
                        step.backward()
        except UserCodeError:
            # Not every model runs at every size; tracing at the workload's own size reports what fails there.
            continue
        return recorder.decisions
    return {}


def _decided_as_with_values() -> AbstractContextManager[Any]:
    """Let models of Hugging Face leave out masks as in a real step; given fake tensors they make every mask."""
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        return contextlib.nullcontext()
    return mock.patch.object(module, "is_fake_tensor", return_value=False)


def _give_data(tensor: Tensor, other: Tensor) -> None:
    """Stand in for ``torch.utils.swap_tensors``, which refuses fake tensors: their mode holds weak references."""
    tensor.data = other.data


# Our kernels as one operation, as on a GPU; where Triton is missing, as the tiles that a CPU computes.
_flash_of_a_gpu = functools.partial(flash_attention, implementation="triton" if why_no_triton() is None else "tiled")


def _adamw_without_kernels(workload: Workload) -> AbstractContextManager[Any]:
    """Let our AdamW make its state and nothing else: its kernels need addresses."""
    if not workload.optimizer_record.is_ours:
        return contextlib.nullcontext()
    from cs336sys.kernels.adamw import AdamW

    return mock.patch.object(AdamW, "_update", lambda optimizer, part: optimizer.make_state(part.members))


def _create_optimizer_state(step: MemoryStep) -> None:
    """Take an optimizer step on gradients of any values, so that the state exists before the recorded step."""
    if step.optimizer is None:
        return
    for parameter in step.model.parameters():
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
    step.optimizer.step()
    step.optimizer.zero_grad()
