"""Softmax, the cross-entropy loss and gradient clipping."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32 if it is fp16 or bf16, itself otherwise: sums of exponentials and of squares need the range."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``exp(x_i) / sum_j exp(x_j)`` along ``dim``; shape and dtype of ``x``, computed in fp32 if that is a half type.

    A slice that is ``-inf`` throughout has no softmax and gives NaN, as in ``torch.softmax``.
    """
    exponentials = _shifted(x, dim).exp()
    # The derivative of a division by the sum would take three more passes over the whole tensor.
    return (exponentials * exponentials.sum(dim, keepdim=True).reciprocal()).to(x.dtype)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``x_i - log sum_j exp(x_j)`` along ``dim``; shape and dtype of ``x``, computed in fp32 if that is a half type."""
    shifted = _shifted(x, dim)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(x.dtype)


def _shifted(x: Tensor, dim: int) -> Tensor:
    # Softmax does not change when a constant is subtracted, so the maximum keeps exp from overflowing and is owed no
    # gradient.
    x = at_least_fp32(x)
    return x - x.detach().amax(dim, keepdim=True)


def cross_entropy(inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions of ``-log softmax(inputs)[target]``, in nats.

    fp16 and bf16 logits are computed with in fp32. For the backward pass, nothing of the size of the logits is kept but
    the logits themselves, which exist anyhow. Second derivatives are refused by a RuntimeError of autograd's.

    Args:
        inputs: logits, (..., vocab_size).
        targets: token ids, (...), int64.

    Returns:
        A scalar: fp64 for fp64 logits, fp32 for all others.
    """
    return _CrossEntropy.apply(inputs, targets)


class _CrossEntropy(torch.autograd.Function):
    # With m = max(x) and s = sum_j exp(x_j - m), the loss of a position is log(s) + m - x_target, and its derivative is
    # exp(x - m) / s, less 1 at the target. Subtracting m, which is fp32, promotes an fp16 or bf16 x.

    @staticmethod
    def forward(ctx, logits, targets):
        index = targets.unsqueeze(-1)
        m = at_least_fp32(logits.amax(-1, keepdim=True))
        s = (logits - m).exp_().sum(-1, keepdim=True)
        ctx.save_for_backward(logits, index, m, s)
        return (s.log() + (m - logits.gather(-1, index))).mean()

    @staticmethod
    def backward(ctx, grad_loss):
        logits, index, m, s = ctx.saved_tensors
        share = grad_loss / index.numel()
        # A second derivative would take s for a constant: autograd refuses it, as the result of exp_ is overwritten.
        grad = (logits - m).exp_().mul_(share / s)
        grad.scatter_add_(-1, index, -share.expand(index.shape))
        return grad.to(logits.dtype), None


@torch.no_grad()
def clip_gradient(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> None:
    """Scales the gradients in place so that their joint L2 norm is at most ``max_norm`` (Pascanu et al. 2013, alg. 1).

    The norm is taken over all gradients as one vector, in fp32 or wider, and never leaves their device: the host does
    not wait for it. Parameters without a gradient are passed over.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    dtype = functools.reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
