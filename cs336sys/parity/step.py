"""Check that a step in CUDA graphs, or with our kernels, trains like a plain one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.machine.device import free_gpu_memory
from cs336sys.parity.rounding import tolerance
from cs336sys.parity.training import LOSS, SCALES, train
from cs336sys.parity.weights import OPTIMIZER_SETTINGS, STEPS, TensorComparison, WeightDifference, rounding_note
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.choices import CUDA_GRAPHS_MODULE
from cs336sys.settings.training import Workload
from cs336sys.training import user_models
from cs336sys.training.model import (
    build_compared_model,
    build_model,
    build_optimizer,
    choose_optimizer,
    plainly_trained,
)
from cs336sys.training.step import TrainStep

# Replayed steps may be this many times as far from launched ones as those are from the same steps launched again; and
# how often they are launched to find that distance, and to find that there is none. Of 20 right replays (small, bf16,
# SDPA, H200), 8 were 0.5 to 0.7 % off, and one such was called wrong after three repetitions, all within 0.09 %.
_REPEATED_OF_REPLAYS = 3.0
_MOST_REPEATS = 16
_SAME_REPEATS = 3

# Of the tolerance, what replays may be off wherever launched steps differ by a single bit. Where few sums are in no
# fixed order, one run differs from another by now nothing, now much: with 30 elements of the embedding's gradient one
# bit off in each step (4 blocks, bf16), pairs of 30 runs were 0 to 4e-7 apart, and 16 % of right replays more than
# three times as far off as the first launched steps that differed.
_ROUNDED = 0.01


@dataclass(frozen=True)
class Checked:
    """Distances of a workload's training from other trainings of the same model on the same batches."""

    off: WeightDifference  # From PyTorch's operations, launched.
    replayed: WeightDifference | None = None  # Replayed steps from launched ones of the same kernels.
    # Launched steps from the same launched again, where replayed ones are not the same bit by bit; the farthest.
    repeated: WeightDifference | None = None

    def columns(self) -> dict[str, Any]:
        off = self.off
        columns: dict[str, Any] = {"largest_difference": off.largest, "relative_difference_percent": 100 * off.relative}
        if off.notes:
            columns["notes"] = list(off.notes)
        for name, other in (("replayed", self.replayed), ("repeated", self.repeated)):
            if other is not None:
                columns[f"{name}_difference_percent"] = 100 * other.relative
        return columns


def check_training(
    workload: Workload, device: torch.device, progress: Progress
) -> tuple[Checked | None, Outcome | None]:
    """Train as the workload says and as it is plainly done, on the same batches, and compare weights and losses.

    Kernels of ours are compared with PyTorch's operations, both launched; and steps in CUDA graphs with launched ones
    of the same kernels. These must be the same bit by bit, or where launched steps do not repeat, not much farther off
    than those are from each other. An optimizer that is not torch's and counts its steps on the GPU for a graph is
    compared with itself counting on the CPU. In mode ``forward`` losses of users' models are compared.

    Returns:
        how far they are apart, and an outcome ``wrong`` if rounding is no reason; twice None for a plain workload.

    Raises:
        CapabilityError: the step cannot be captured, or the kernels cannot run.
    """
    if plainly_trained(workload) == workload:
        return None, None
    if workload.is_ours and not workload.has_backward:
        workload = workload.with_layers(1)  # All of a model that fits without gradients may not fit with them.
    # Losses of random weights hardly depend on what computes them, so that weights are compared, too.
    if not workload.updates_parameters and (workload.has_backward or workload.is_ours):
        # Fused kernels read copies of weights that our AdamW writes, which cannot unscale gradients of a scaled loss.
        is_ours = workload.optimizer_record.is_ours or (workload.is_fused and not workload.scales_loss)
        workload = replace(workload, mode="train", optimizer="adamw" if is_ours else "fused")
    check = _StepCheck(workload, replace(workload, cuda_graph="off"), device, progress)
    if workload.is_ours:
        return check.run()
    with user_models.nothing_dropped():
        checked = check.run()
    if workload.is_compiled:
        torch.compiler.reset()  # It was compiled without dropout.
    return checked


@dataclass(frozen=True)
class _StepCheck:
    """The check of a workload: ``launched`` is the same without CUDA graphs."""

    workload: Workload
    launched: Workload
    device: torch.device
    progress: Progress

    def run(self) -> tuple[Checked, Outcome | None]:
        """Check launched steps against plain ones, and replays against launched ones; an outcome says what is wrong."""
        workload, launched, has_graphs = self.workload, self.launched, self.workload.uses_graphs
        if has_graphs:
            import_module(CUDA_GRAPHS_MODULE).require_graphs(self.device)
        kernels_off = weights = None  # How far kernels are off, and what launched steps trained, for _check_replays().
        plain = plainly_trained(launched)
        if plain != launched:
            # In place of our attention comes SDPA, not compiled. If only that differs, one block shows as much as all.
            is_attention_alone = replace(plain, attention=launched.attention, compile=launched.compile) == launched
            pair = (launched.with_layers(1), plain.with_layers(1)) if is_attention_alone else (launched, plain)
            kernels_off, weights = self._check_launched(*pair)
            if not kernels_off.relative <= tolerance(workload):
                return self._wrong("with our kernels", Checked(kernels_off))
            if kernels_off.num_layers != workload.size.num_layers:
                weights = None  # Replays train all layers.
        elif self._counts_on_device():  # No kernel is ours, but the optimizer does not count as where it is launched.
            small = launched.with_layers(1) if launched.is_ours else launched
            counting_off, _ = self._check_launched(launched=small, plain=small)  # Their optimizers alone differ.
            if not counting_off.relative <= tolerance(workload):
                return self._wrong("counting on the GPU, as for a graph", Checked(counting_off))
        if not has_graphs:
            assert kernels_off is not None, "check_training() has nothing to check of a plain workload"
            return Checked(kernels_off), None
        replayed, repeated = self._check_replays(weights)
        checked = Checked(replayed if kernels_off is None else kernels_off, replayed, repeated)
        if replayed.relative <= self._allowed_of_replays(repeated):
            return checked, None
        return self._wrong("replayed", checked)

    def _counts_on_device(self) -> bool:
        """Return whether an optimizer that is not torch's has other settings for graphs, as to count on the GPU."""
        if not self.workload.updates_parameters:
            return False
        optimizer_class, settings = choose_optimizer(self.workload)
        is_torchs = optimizer_class.__module__.startswith("torch.")
        return settings != choose_optimizer(self.launched)[1] and not is_torchs

    def _check_launched(self, launched: Workload, plain: Workload) -> tuple[WeightDifference, dict[str, Tensor]]:
        """Return how far launched steps are off ``plain`` ones, and what they trained."""
        build = functools.partial(build_compared_model, launched, self.device)  # Its weights may be in bf16.
        self.progress("checking: PyTorch's operations" if plain != launched else "checking: launched steps")
        train_plainly = functools.partial(_trained_for_check, plain, self.device, build)
        expected = self._free_for_training(train_plainly(), launched)
        self.progress("checking: our kernels" if plain != launched else "checking: the optimizer")
        # With the optimizer of the steps in graphs, if there are any: it may count its steps on the device for them.
        trained = _trained_for_check(launched, self.device, optimizer_workload=self.workload)
        return self._compare(launched, expected, trained, train_again=train_plainly), trained

    def _check_replays(self, weights: dict[str, Tensor] | None) -> tuple[WeightDifference, WeightDifference | None]:
        """Return how far replayed steps are off launched ones, which trained ``weights``, and these off themselves."""
        workload, launched = self.workload, self.launched
        # Even where its steps are launched, the optimizer counts them on the device, as it must in a graph.
        train_counting = functools.partial(_trained_for_check, device=self.device, optimizer_workload=workload)
        if weights is None:
            self.progress("checking: launched steps")
            weights = train_counting(launched)
        expected = self._free_for_training(weights, workload)
        self.progress("checking: replayed steps")
        # Again whatever the scale: kernels are the same, so only sums in no fixed order explain a difference.
        replayed = self._compare(
            workload, expected, train_counting(workload), lambda loss_scale: train_counting(launched)
        )
        if replayed.relative == 0 or not replayed.relative <= tolerance(self.workload):
            return replayed, None  # There is nothing to explain, or more than rounding ever does.
        repeated = None  # The farthest repetition: more are launched until one is so far off that replays may be.
        for count in range(1, _MOST_REPEATS + 1):
            self.progress("checking: launched steps again")
            repetition = self._compare(workload, expected, train_counting(launched))
            if repetition.relative > (0 if repeated is None else repeated.relative):
                repeated = repetition
            repeats_exactly = repeated is None and count == _SAME_REPEATS  # So often without a difference.
            if repeats_exactly or replayed.relative <= self._allowed_of_replays(repeated):
                break
        return replayed, repeated

    def _allowed_of_replays(self, repeated: WeightDifference | None) -> float:
        """Return how far replayed steps may be off, relatively: not at all where launched ones repeat."""
        if repeated is None:
            return 0.0
        allowed = tolerance(self.workload)
        return min(max(_REPEATED_OF_REPLAYS * repeated.relative, _ROUNDED * allowed), allowed)

    def _compare(
        self,
        workload: Workload,
        expected: dict[str, Tensor],
        trained: dict[str, Tensor],
        train_again: Callable[..., dict[str, Tensor]] | None = None,
    ) -> WeightDifference:
        """Compare what two trainings return, relative to how far weights moved, but for what rounding explains.

        ``train_again`` trains the reference with a ``loss_scale``, by which gradients are divided again, so that it
        differs from the first by rounding alone. None explains nothing.
        """
        _free_memory(self.device)
        start = dict(build_compared_model(workload, self.device).named_parameters())
        allowed = tolerance(workload)
        comparison = TensorComparison(start, expected, trained, allowed)
        losses = {name: loss.item() for name, loss in expected.items() if name.startswith(LOSS)}
        del start, expected, trained  # Unless a caller keeps them: the reference needs the memory to train again.
        _free_memory(self.device)
        others = []
        # A loss that is far off is wrong, whatever explains the weights.
        if train_again is not None and comparison.far and not comparison.far.keys() & losses.keys():
            for scale in SCALES:
                other = train_again(loss_scale=scale)
                # Only if it has the same losses: where training diverges, its distance explains nothing.
                if all(abs(other[name].item() - loss) <= allowed * abs(loss) for name, loss in losses.items()):
                    # A weight that only ``trained`` has is in no reference.
                    others.append({name: other[name].cpu() for name in comparison.far if name in other})
                del other
                _free_memory(self.device)
        explained = comparison.explained(lambda name: [other[name] for other in others if name in other])
        difference = comparison.farthest(num_layers=workload.size.num_layers, explained=explained)
        note = rounding_note(explained, len(comparison.distances) - len(losses), allowed)  # Losses are no parameters.
        return replace(difference, notes=(note,)) if explained else difference

    def _free_for_training(self, trained: dict[str, Tensor], workload: Workload) -> dict[str, Tensor]:
        """Return tensors where they wait while a workload trains: in host memory if a GPU may lack room for both."""
        _free_memory(self.device)
        free_bytes = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        # Only our model's peak is predicted. 0.8: what it may take of the free memory next to weights that wait there.
        if free_bytes and workload.is_ours and workload.predicted_peak().total < 0.8 * free_bytes:
            return trained
        waiting = {name: value.cpu() for name, value in trained.items()}
        trained.clear()  # The caller's dictionary, which would keep them on the GPU.
        _free_memory(self.device)
        return waiting

    def _wrong(self, how: str, checked: Checked) -> tuple[Checked, Outcome]:
        """Say that weights trained as ``how`` says are off, or those of replays, by more than rounding explains."""
        off, allowed = checked.replayed or checked.off, tolerance(self.workload)
        if not off.relative <= allowed:
            reason = f"more than rounding explains ({100 * allowed:g} %)"
        elif checked.repeated is not None:
            reason = f"and those repeat within {100 * checked.repeated.relative:.3g} %"
        else:
            reason = "and those repeat bit by bit"
        reason = (
            f"{how}: after {STEPS} steps {off.parameter} is off by {100 * off.relative:.3g} % of how far launched "
            f"steps move it, {reason}"
        )
        return checked, Outcome("wrong", derived=checked.columns(), reason=reason)


def _trained_for_check(
    workload: Workload,
    device: torch.device,
    build: Callable[[], nn.Module] | None = None,
    *,
    optimizer_workload: Workload | None = None,
    loss_scale: float = 1.0,
) -> dict[str, Tensor]:
    """Train a workload as :func:`train` does, launched or in CUDA graphs.

    Args:
        build: makes the model; None is the workload's.
        optimizer_workload: whose optimizer takes the place of the workload's.
        loss_scale: multiplies the loss, and divides the gradients, which are rounded elsewhere then.
    """
    model = build_model(workload, device) if build is None else build()
    optimizer = scaler = None
    if loss_scale != 1.0:
        # 2^16 is what GradScaler itself begins with.
        scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale * (2**16 if workload.scales_loss else 1))
    if workload.updates_parameters:
        optimizer = build_optimizer(optimizer_workload or workload, model.parameters(), **OPTIMIZER_SETTINGS)
    step = TrainStep(workload, device, model=model, optimizer=optimizer, scaler=scaler)
    return train(step, model, step.warmup_of_capture)


def _free_memory(device: torch.device) -> None:
    # Collecting garbage takes up to a second where the compiler is loaded, and gives nothing back on a CPU.
    if device.type == "cuda":
        free_gpu_memory()


# Results for steps that are looked into in several ways.
_checked_few_blocks: dict[Workload, tuple[Checked | None, Outcome | None]] = {}


def check_few_blocks(workload: Workload, device: torch.device, progress: Progress) -> tuple[list[str], Outcome | None]:
    """Run :func:`check_training` on a model of few blocks, for commands that look into a step and compare nothing.

    Returns:
        sentences on what was compared, if anything is ours; and a ``wrong`` outcome if rounding does not explain it.
    """
    workload = replace(workload, warmup=0, steps=1)  # A check has steps of its own: with other steps it is the same.
    if workload.is_ours:
        # Two: the fused norm that begins the second block also computes the addition that ends the first.
        workload = workload.with_layers(2)
    if workload not in _checked_few_blocks:
        _checked_few_blocks[workload] = check_training(workload, device, progress)
    checked, failure = _checked_few_blocks[workload]
    if checked is None:  # The workload is plain itself.
        return [], failure
    off = checked.off
    blocks = f"{off.num_layers} block{'s' if off.num_layers > 1 else ''}"
    return [
        f"checked first, {blocks} against PyTorch's operations: after {STEPS} steps off by at most "
        f"{100 * off.relative:.2g} % ({off.parameter})",
        *off.notes,
    ], failure
