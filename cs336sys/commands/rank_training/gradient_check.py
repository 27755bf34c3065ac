"""Check that a fully sharded step has the loss and the gradients of one process in fp32 arithmetic.

Weights after a few steps, as ``verification`` compares them, say little where weights are kept in half precision: they
are rounded after each step. So gradients are compared, of the whole batch, vocabulary and context, on as few blocks as
one GPU can hold in fp32.
"""

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.accounting.flops import count_parameters
from cs336sys.commands.rank_training.rank import rank_job
from cs336sys.commands.rank_training.verification import mean_gradients
from cs336sys.errors import CapabilityError
from cs336sys.findings import sentence
from cs336sys.parallel.collectives import gather_numbers
from cs336sys.parallel.ranks.launch import Ranks
from cs336sys.parity.rounding import GRADIENT_TOLERANCES, LOSS_TOLERANCES
from cs336sys.parity.weights import relative_difference
from cs336sys.run.cells import Outcome
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.training.model import build_model, keeping_input, make_batch
from cs336sys.training.ranks.step import ParallelStep, rank_device
from cs336sys.training.step import set_matmul_precision

CHECKED_LAYERS = 2  # Blocks of the model that is checked, at most.

_TOKENS = 1024  # Taken at a time by the LM head in fp32: their logits of 151,936 words are 0.6 GB.


@dataclass(frozen=True)
class GradientDifference:
    """Distance of a step's loss and gradients from those of one process."""

    loss: float  # Of the whole batch.
    expected_loss: float
    parameter: str  # The one whose gradient is farthest off.
    relative: float  # By how much: the norm of the difference over that of the gradient.
    num_layers: int  # Blocks of the model that was checked.

    def is_rounding(self, precision: str) -> bool:
        """Return whether rounding explains both differences."""
        relative_loss = abs(self.loss - self.expected_loss) / self.expected_loss
        return relative_loss <= LOSS_TOLERANCES[precision] and self.relative <= GRADIENT_TOLERANCES[precision]


# Results for cells that differ only in how many blocks keep what, or in how many steps are timed.
_checked: dict[ParallelWorkload, GradientDifference] = {}


def gradients_outcome(ranks: Ranks, workload: ParallelWorkload) -> tuple[dict[str, Any], Outcome | None]:
    """Check a workload, and return derived columns, and a ``wrong`` outcome where rounding is no reason."""
    checked = with_few_blocks(workload)
    if checked not in _checked:
        _checked[checked], *_ = ranks.run(check_gradients, checked)  # All ranks have the same.
    difference = _checked[checked]
    derived = {
        "parameters": count_parameters(workload.training.size),
        "largest_difference": None,
        "relative_difference_percent": 100 * difference.relative,
        "checked_parameter": difference.parameter,
        "checked_layers": difference.num_layers,
        "checked_loss": difference.loss,
        "expected_loss": difference.expected_loss,
    }
    if difference.is_rounding(workload.training.precision):
        return derived, None
    reason = sentence(__package__, "wrong gradients", strategy=workload.strategy, difference=difference)
    return derived, Outcome("wrong", derived=derived, reason=reason)


@rank_job
def check_gradients(workload: ParallelWorkload) -> GradientDifference:
    """Compare passes of ``fsdp`` or ``torch-fsdp`` on few blocks with one process; all ranks call it together."""
    device = rank_device(workload)
    step = ParallelStep(workload, device)
    for name, run in step.phases.items():
        if name != "optimizer":  # Weights stay those of the gradients.
            run()
    assert step.loss is not None
    loss = gather_numbers(step.loss.detach().float()).mean().item()  # Ranks have equally many sequences.
    weights, gradients = dict(step.replica.whole_parameters()), mean_gradients(step.replica)
    del step
    gc.collect()  # The plain model needs the memory.
    expected_loss, expected = _gradients_of_one_process(workload, weights, device)
    relative = {name: _relative(gradient, expected[name], rows) for name, (gradient, rows) in gradients.items()}
    worst = max(relative, key=relative.__getitem__)
    return GradientDifference(loss, expected_loss, worst, relative[worst], workload.training.size.num_layers)


def with_few_blocks(workload: ParallelWorkload) -> ParallelWorkload:
    """Shrink a workload to the two blocks of the check.

    Where the workload chooses how many blocks keep gate and up, or how many keep their weights gathered, at most one of
    the two does, so that a block without is checked, too.
    """
    checked_layers = workload.check_layers or CHECKED_LAYERS  # The user may ask for fewer.
    training = workload.training.with_layers(min(CHECKED_LAYERS, checked_layers))
    kept = kept_blocks(workload.checkpointing)  # The N of keep=N; None for other checkpoints.
    checkpointing = workload.checkpointing if kept is None else f"keep={min(kept, 1)}"
    return replace(
        workload,
        training=replace(training, warmup=0, steps=1),
        checkpointing=checkpointing,
        keep_gathered=min(1, workload.keep_gathered),
    )


def _relative(gradient: Tensor | None, expected: Tensor, rows: range | None) -> float:
    """Return the norm of the difference over that of what is expected, of all ranks' rows; infinite if one is NaN.

    All ranks call it together. ``rows`` of the parameter are this rank's, None for all.
    """
    expected_rows = expected if rows is None else expected[rows.start : rows.stop]
    off = expected_rows if gradient is None else gradient.float() - expected_rows
    squares = torch.stack((off.square().sum(), expected_rows.square().sum()))
    dist.all_reduce(squares)
    return relative_difference(*squares.sqrt().tolist())


def _gradients_of_one_process(
    workload: ParallelWorkload, weights: dict[str, Tensor], device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the whole batch, in fp32 arithmetic of PyTorch; ``weights`` are emptied."""
    plain = replace(
        workload.training,
        precision="fp32",
        state_dtype="fp32",
        compile="off",
        kernels="reference",
        attention="sdpa",  # In fp32 that is its memory-efficient kernel, which keeps no scores.
        tf32=False,
    )
    set_matmul_precision(plain)
    model: Any = build_model(plain, device)
    lacking = [name for name in ("token_embeddings", "layers", "ln_final", "lm_head") if not hasattr(model, name)]
    if lacking:
        raise CapabilityError(sentence(__package__, "unknown parts", lacking=lacking))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    weights.clear()
    inputs, targets = make_batch(plain, device)
    total_loss = 0.0
    # One sequence after the other, so that one's activations exist at a time.
    for tokens, target_ids in zip(inputs, targets, strict=True):
        x = model.token_embeddings(tokens[None])
        for layer in model.layers:
            x = keeping_input(layer, x)
        hidden = model.ln_final(x)[0]  # Of the one sequence, (tokens, width).
        losses = [
            keeping_input(lambda rows, ids: F.cross_entropy(model.lm_head(rows), ids, reduction="sum"), *chunk)
            for chunk in zip(hidden.split(_TOKENS), target_ids.split(_TOKENS), strict=True)
        ]
        loss = torch.stack(losses).sum() / targets.numel()
        loss.backward()
        total_loss += loss.item()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return total_loss, gradients
