"""The ground truth of linear_cross_entropy."""

import torch
from torch.nn import functional


def reference_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_logsumexp: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch, with all logits at once, for any dtypes: the ground truth of the tests."""
    logits = functional.linear(hidden, weight).reshape(-1, len(weight))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat_targets = targets.flatten()
    loss = functional.cross_entropy(logits, flat_targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
    logsumexp = logits.logsumexp(-1)
    if z_loss:
        loss = loss + z_loss * logsumexp[flat_targets != ignore_index].square().mean()
    return (loss, logsumexp.detach().view(targets.shape)) if return_logsumexp else loss
