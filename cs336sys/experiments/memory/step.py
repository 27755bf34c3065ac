"""A training step with checkpoints around its blocks, put on from outside: the model's files stay as they are."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.accounting.checkpointing import group_sizes
from cs336sys.experiments.training import TrainStep, build_model, keeping_input
from cs336sys.measure.allocations.recorder import StepRecorder
from cs336sys.measure.allocations.timeline import RECOMPUTATION
from cs336sys.measure.saved_tensors import SavedTensor, saved_tensors
from cs336sys.workload import MemoryWorkload


class MemoryStep(TrainStep):
    """A :class:`TrainStep` that can be recorded.

    Attributes:
        names: the model's modules, each with the one name that it has without checkpointing.
        blocks: its Transformer blocks.
        recorder: told of phases and recomputations while it is set.
    """

    def __init__(self, workload: MemoryWorkload, device: torch.device):
        model = build_model(workload.training, device)
        self.names = unique_names(model)
        self.blocks = list(model.layers)
        self.recorder: StepRecorder | None = None
        model.layers = checkpointed(self.blocks, workload.checkpointing, self.region)
        super().__init__(workload.training, device, model=model)

    def region(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.region(name)

    def run_recorded(self, recorder: StepRecorder) -> None:
        """One step, with the loss as a phase of its own, recorded: as it is launched, or captured in CUDA graphs."""
        self.recorder = recorder
        try:
            self.run_phases(recorder.region, recorder)
        finally:
            self.recorder = None

    def run_phases(
        self,
        around: Callable[[str], AbstractContextManager[None]],
        all_around: AbstractContextManager[Any] | None = None,
    ) -> None:
        """One step, with the loss as a phase of its own, launched or, where the workload says so, captured.

        Captured, memory is taken and given back as in a launched step; replays do neither.

        Args:
            around: entered around each phase, with its name.
            all_around: entered once, around all of them.
        """
        with contextlib.ExitStack() as outer:
            if self.workload.cuda_graph == "off":
                outer.enter_context(all_around or contextlib.nullcontext())
                for name, phase in self.phases_with_loss.items():
                    with around(name):
                        phase()
                return

            entered = False

            def around_captured(name: str) -> AbstractContextManager[None]:
                # The first phase is captured after the warm-up, which is not to be seen.
                nonlocal entered
                if not entered and all_around is not None:
                    outer.enter_context(all_around)
                entered = True
                return around(name)

            self.capture(with_loss=True, around=around_captured)

    def optimizer_state(self) -> list[Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors that exist before a step, by category."""
        return {
            "parameters": list(self.model.parameters()),
            "optimizer state": self.optimizer_state(),
            "other": [self.inputs, self.targets, *self._batch, *self.model.buffers()],
        }

    def block_saved_tensors(self) -> list[SavedTensor]:
        """What the block in the middle saves for its backward pass, on a random input of the workload's shape."""
        size = self.workload.size
        block = self.blocks[size.num_layers // 2]
        with self.device:
            x = torch.randn(size.batch_size, size.context, size.d_model, requires_grad=True)
        names = unique_names(block) if self.workload.compile == "off" else None
        with self._precision():
            return saved_tensors(lambda: block(x), [*block.parameters(), *block.buffers()], names)


def unique_names(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that have one name in the model; one that several blocks share counts as a part of each."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)
    return {module: names[0] for module, names in paths.items() if len(names) == 1}


Region = Callable[[str], AbstractContextManager[None]]


def checkpointed(blocks: Sequence[nn.Module], checkpointing: str, region: Region) -> nn.ModuleList:
    """What takes the place of a model's blocks, by the strategies of ``accounting.checkpointing``.

    Args:
        region: entered around every recomputation.
    """
    if checkpointing == "none":
        return nn.ModuleList(blocks)
    if checkpointing == "nested":
        return nn.ModuleList([_NestedCheckpoints(blocks, region)])
    groups, first = [], 0
    for count in group_sizes(checkpointing, len(blocks)):
        groups.append(_Checkpoint(blocks[first : first + count], region))
        first += count
    return nn.ModuleList(groups)


class _Checkpoint(nn.Module):
    """Keeps the input of its blocks alone, and runs them again in the backward pass."""

    def __init__(self, blocks: Sequence[nn.Module], region: Region):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._region = region

    def forward(self, x: Tensor) -> Tensor:
        return keeping_input(self._run, list(self.blocks), x)

    def _run(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        with self._recomputation():
            for block in blocks:
                x = block(x)
            return x

    def _recomputation(self) -> AbstractContextManager[None]:
        in_backward = torch._C._current_graph_task_id() != -1
        return self._region(RECOMPUTATION) if in_backward else contextlib.nullcontext()


class _NestedCheckpoints(_Checkpoint):
    """Checkpoints of halves, inside which are checkpoints of halves, down to single blocks."""

    def forward(self, x: Tensor) -> Tensor:
        if len(self.blocks) == 1:
            return super().forward(x)
        return self._halves(list(self.blocks), x)

    def _halves(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        if len(blocks) == 1:
            return self._run(blocks, x)
        middle = (len(blocks) + 1) // 2
        with self._recomputation():
            for half in (blocks[:middle], blocks[middle:]):
                x = keeping_input(self._halves, half, x)
            return x
