"""A training step with checkpoints around its blocks, put on from outside: the model's files stay as they are."""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336sys.accounting.checkpointing import SUBLAYERS, group_sizes
from cs336sys.allocations.recorder import SavedTensor, StepRecorder, saved_tensors
from cs336sys.allocations.timeline import RECOMPUTATION
from cs336sys.errors import CapabilityError
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.training.model import blocks_of, build_model, keeping_input
from cs336sys.training.step import TrainStep

RegionContext = Callable[[str], AbstractContextManager[None]]


class MemoryStep(TrainStep):
    """A :class:`TrainStep` that can be recorded.

    Attributes:
        names: the model's modules, each with the one name that it has without checkpointing.
        blocks: its Transformer blocks.
        recorder: told of phases and recomputations while it is set.

    Args:
        passes: how many of its micro-batches a step computes; all of them where it is None.
    """

    def __init__(self, workload: MemoryWorkload, device: torch.device, *, passes: int | None = None):
        training = workload.training
        self.micro_batches = workload.micro_batches
        self.passes = workload.micro_batches if passes is None else passes
        model = build_model(training, device)
        self.names = unique_names(model)
        blocks = blocks_of(training, model)
        self.block_names, self.blocks = list(blocks), list(blocks.values())
        self.recorder: StepRecorder | None = None
        # Our model calls its layers in a loop, so a list of checkpoints, also of several blocks each, can replace them.
        if training.is_ours and isinstance(getattr(model, "layers", None), nn.ModuleList):
            model.layers = checkpointed(self.blocks, workload.checkpointing, self.region)
        elif workload.checkpointing == "block":
            checkpoint_calls(self.blocks, self.region)
        elif workload.checkpointing != "none":
            raise CapabilityError(
                f"--checkpoint {workload.checkpointing}: {training.user.model or type(model).__name__} calls its "
                "blocks itself, one by one; choose none or block"
            )
        super().__init__(training, device, model=model)
        if self.passes > 1:
            # Forward and backward passes alternate, and are timed together.
            self.phases = {"backward": self._accumulate, "optimizer": self.optimizer_step}

    def region(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.region(name)

    def run_recorded(self, recorder: StepRecorder) -> None:
        """Record one step, with the loss as a phase of its own, as it is launched or captured in CUDA graphs."""
        self.recorder = recorder
        try:
            self.run_phases(around=recorder.region, all_around=recorder)
        finally:
            self.recorder = None

    def run_phases(
        self,
        around: Callable[[str], AbstractContextManager[None]],
        all_around: AbstractContextManager[Any] = contextlib.nullcontext(),
    ) -> None:
        """Run one step, with the loss as a phase of its own, launched or, where the workload says so, captured.

        A capture takes memory and gives it back as a launched step does; replays do neither.

        Args:
            around: entered around each phase, with its name.
            all_around: entered once, around all of them.
        """
        with contextlib.ExitStack() as outer:
            if not self.workload.uses_graphs:
                outer.enter_context(all_around)
                for name, phase in self._all_passes():
                    with around(name):
                        phase()
                return

            # capture() first runs its warm-up, which is not recorded: only the first captured phase enters all_around.
            pending = [all_around]

            def around_captured(name: str) -> AbstractContextManager[None]:
                while pending:
                    outer.enter_context(pending.pop())
                return around(name)

            self.capture(with_loss=True, around=around_captured)

    def _all_passes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the phases of a step in order, those of each micro-batch with its part of the batch."""
        phases = dict(self.phases_with_loss)
        if self.passes == 1:
            yield from phases.items()
            return
        update = phases.pop("optimizer")
        inputs, targets = self.inputs, self.targets
        sequences = self.workload.size.batch_size // self.micro_batches
        for first in range(0, self.passes * sequences, sequences):
            part = operator.itemgetter(slice(first, first + sequences))
            self.inputs, self.targets = tree_map_only(Tensor, part, (inputs, targets))
            for name, phase in phases.items():
                yield name, phase
                # So gradients add up to those of the whole batch. A fused kernel computes the loss in the forward pass.
                if name == ("loss" if "loss" in phases else "forward"):
                    assert self.loss is not None
                    self.loss = self.loss / self.micro_batches
        self.inputs, self.targets = inputs, targets
        yield "optimizer", update

    def _accumulate(self) -> None:
        """Run the forward and backward passes of all micro-batches."""
        for name, phase in self._all_passes():
            if name != "optimizer":
                phase()

    def optimizer_state(self) -> list[Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors that exist before a step, by category; copies of parameters are among the parameters."""
        copies = [] if self.fused is None or self.fused.copies is None else self.fused.copies.tensors
        return {
            "parameters": [*self.model.parameters(), *copies],
            "optimizer state": self.optimizer_state(),
            "other": [*self.batch, *self.model.buffers()],
        }

    def block_saved_tensors(self) -> list[SavedTensor]:
        """List what the middle block saves for its backward pass, on a random input of the workload's shape.

        A block of a user's model gets what the model gives it. Of a model without blocks nothing is known.
        """
        if not self.blocks:
            return []
        size = self.workload.size
        block = self.blocks[len(self.blocks) // 2]
        names = None if self.workload.is_compiled else unique_names(block)  # Compiled code has no modules.
        if self.workload.is_ours:
            shape = size.batch_size, size.context, size.d_model
            args, kwargs = (torch.randn(shape, device=self.device, requires_grad=True),), dict[str, Any]()
        else:
            args, kwargs = self._inputs_of(block)
        with self._precision():
            existing = [*self.held()["parameters"], *block.buffers()]
            return saved_tensors(lambda: first_tensor(block(*args, **kwargs)), excluded=existing, names=names)

    def _inputs_of(self, block: nn.Module) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a block's first call in a forward pass, detached; hidden states require gradients."""
        calls: list[tuple[Any, dict[str, Any]]] = []
        hook = block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        with torch.no_grad():
            self.compute_logits()
        hook.remove()
        if not calls:
            raise CapabilityError(f"block {type(block).__name__} is never called in a forward pass")
        hidden = first_tensor(calls[0])

        def detached(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(tensor is hidden and tensor.is_floating_point())

        return tree_map_only(Tensor, detached, calls[0])


def first_tensor(value: Any) -> Any:
    """Return the first tensor in what a module takes or returns; None if there is none."""
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)


def checkpoint_calls(blocks: Sequence[nn.Module], region: RegionContext) -> None:
    """Let each call of a block keep its inputs and random state alone; enter ``region`` around recomputations."""

    def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _recomputation(region):
            return call(*args, **kwargs)

    for block in blocks:
        call = block._compiled_call_impl or block._call_impl  # Module.__call__ prefers the first; both run hooks.
        block._compiled_call_impl = functools.partial(keeping_input, functools.partial(run, call), keeps_random=True)


def unique_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that have one name in the model, with it; one that several blocks share has several."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)
    return {module: names[0] for module, names in paths.items() if len(names) == 1}


def _recomputation(region: RegionContext) -> AbstractContextManager[None]:
    """Enter ``region`` where the backward pass runs a block again."""
    is_in_backward = torch._C._current_graph_task_id() != -1  # -1: this thread runs no backward pass.
    return region(RECOMPUTATION) if is_in_backward else contextlib.nullcontext()


def checkpointed(blocks: Sequence[nn.Module], checkpointing: str, region: RegionContext) -> nn.ModuleList:
    """Return the replacement of a model's blocks, by the strategies of ``accounting.checkpointing``."""
    if checkpointing == "none":
        return nn.ModuleList(blocks)
    if checkpointing == "nested":
        return nn.ModuleList([_NestedCheckpoints(blocks, region)])
    if checkpointing in SUBLAYERS:
        return nn.ModuleList([_SublayerCheckpoints(block, SUBLAYERS[checkpointing], region) for block in blocks])
    remaining = iter(blocks)
    sizes = group_sizes(checkpointing, len(blocks))  # "block" or "every=K": K blocks in a row share a checkpoint.
    return nn.ModuleList([_Checkpoint(list(itertools.islice(remaining, count)), region) for count in sizes])


class _Checkpoint(nn.Module):
    """Keeps the input of its blocks alone, and runs them again in the backward pass."""

    def __init__(self, blocks: Sequence[nn.Module], region: RegionContext):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._region = region

    def forward(self, x: Tensor) -> Tensor:
        return keeping_input(self._run, list(self.blocks), x)

    def _run(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        with _recomputation(self._region):
            for block in blocks:
                x = block(x)
            return x


class _NestedCheckpoints(_Checkpoint):
    """Checkpoints of halves, inside which are checkpoints of halves, down to single blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(self.blocks) == 1 else self._halves(list(self.blocks), x)

    def _halves(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        """Run the blocks, with a checkpoint around each half of them."""
        if len(blocks) == 1:
            return self._run(blocks, x)
        middle = (len(blocks) + 1) // 2
        with _recomputation(self._region):
            for half in (blocks[:middle], blocks[middle:]):
                x = keeping_input(self._halves, half, x)
            return x


class _SublayerCheckpoints(_Checkpoint):
    """Computes what a block computes, with a checkpoint around its attention, its feed-forward layer, or each."""

    def __init__(self, block: nn.Module, layers: Sequence[str], region: RegionContext):
        super().__init__([block], region)
        self._layers = layers

    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        for name, parts in (("attn", (block.ln1, block.attn)), ("ffn", (block.ln2, block.ffn))):
            x = x + (keeping_input(self._run, parts, x) if name in self._layers else self._run(parts, x))
        return x
