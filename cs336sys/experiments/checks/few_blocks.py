"""Check a model of few blocks, for what looks into steps and compares nothing."""

from dataclasses import replace

import torch

from cs336sys.experiments.checks.step import Checked, check_training
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.parity.weights import STEPS
from cs336sys.workload import Workload

# Blocks that are checked for what looks into steps: with two, a norm also computes the addition that ends a block.
_FEW_BLOCKS = 2

# What was found for steps that are looked into in several ways.
_of_few_blocks: dict[Workload, tuple[Checked | None, Outcome | None]] = {}


def check_few_blocks(workload: Workload, device: torch.device, progress: Progress) -> tuple[list[str], Outcome | None]:
    """:func:`check_training` of a model of few blocks, before a step of ours is looked into by what compares nothing.

    Returns:
        what was compared, in words, nothing where nothing is ours; and a ``wrong`` outcome if rounding does not explain
        what was found.
    """
    workload = replace(workload, warmup=0, steps=1)
    if workload.is_ours:
        few = min(_FEW_BLOCKS, workload.size.num_layers)
        workload = replace(workload, size=replace(workload.size, num_layers=few))
    if workload not in _of_few_blocks:
        _of_few_blocks[workload] = check_training(workload, device, progress)
    checked, wrong = _of_few_blocks[workload]
    if checked is None:
        return [], wrong
    off = checked.off
    blocks = f"{off.num_layers} block{'s' if off.num_layers > 1 else ''}"
    return [
        f"checked first, {blocks} against PyTorch's operations: after {STEPS} steps off by at most "
        f"{100 * off.relative:.2g} % ({off.parameter})",
        *off.notes,
    ], wrong
