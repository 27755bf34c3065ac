"""The ground truth of tests of linear_cross_entropy."""

import torch
from torch import Tensor
from torch.nn import functional


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute linear_cross_entropy in plain PyTorch, with all logits at once, for any dtypes."""
    logits = functional.linear(hidden, weight).reshape(-1, len(weight))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat_targets = targets.flatten()
    loss = functional.cross_entropy(
        logits,
        flat_targets,
        weight=None if class_weight is None else class_weight.to(logits.dtype),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    logsumexp = logits.logsumexp(-1)
    if z_loss:
        is_counted = flat_targets != ignore_index
        squares = z_loss * logsumexp.square().where(is_counted, 0)
        loss = loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / is_counted.sum()}[reduction]
    if reduction == "none":
        loss = loss.view(targets.shape)
    return (loss, logsumexp.detach().view(targets.shape)) if return_logsumexp else loss
