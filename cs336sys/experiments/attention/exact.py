"""Attention in float64, and how far implementations are from it."""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from cs336sys.experiments.attention.inputs import Attention, Inputs, random_inputs
from cs336sys.measure.relative_error import RelativeError, relative_errors
from cs336sys.workload import AttentionWorkload

# Rows of the score matrix that the float64 reference holds at a time: 0.5 GiB at context 65,536.
_REFERENCE_ROWS = 1024


@functools.lru_cache(maxsize=1)
def reference_results(workload: AttentionWorkload, device: torch.device) -> dict[str, Tensor]:
    """:func:`exact_results` of :func:`random_inputs`.

    The last result is kept, because every implementation of a sweep is compared with the same one.
    """
    return exact_results(random_inputs(workload, device), workload)


def exact_results(inputs: Inputs, workload: AttentionWorkload) -> dict[str, Tensor]:
    """Output and gradients in float64, computed a few rows of scores at a time.

    Plain softmax attention and its derivative (FlashAttention-2 handout, equations 4 to 6 and 13 to 19).
    """
    device = inputs.query.device
    query, key, value, grad_out = (tensor.detach().double() for tensor in (*inputs.differentiable, inputs.grad_out))
    scale, group = 1 / math.sqrt(workload.head_dim), workload.heads // workload.key_heads
    out, grad_query = torch.empty_like(query), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for batch in range(len(query)):
        for head in range(workload.heads):
            for start in range(0, workload.context, _REFERENCE_ROWS):
                at = batch, head, slice(start, start + _REFERENCE_ROWS)
                first = 0 if workload.window is None else max(0, start + 1 - workload.window)
                keys = slice(first, start + _REFERENCE_ROWS if workload.causal else None)
                seen = batch, head // group, keys
                scores = scale * query[at] @ key[seen].mT
                if workload.causal:
                    row, column = (torch.arange(size, device=device) for size in scores.shape)
                    row, column = start + row[:, None], first + column
                    invisible = column > row
                    if workload.window is not None:
                        invisible |= column <= row - workload.window
                    scores.masked_fill_(invisible, -math.inf)
                weights = scores.softmax(-1)
                out[at] = weights @ value[seen]
                grad_value[seen] += weights.mT @ grad_out[at]
                delta = (grad_out[at] * out[at]).sum(-1, keepdim=True)
                grad_scores = weights * (grad_out[at] @ value[seen].mT - delta)
                grad_query[at] = scale * grad_scores @ key[seen]
                grad_key[seen] += scale * grad_scores.mT @ query[at]
    return {"out": out, "dq": grad_query, "dk": grad_key, "dv": grad_value}


def attention_errors(
    attention: Attention, workload: AttentionWorkload, device: torch.device
) -> dict[str, RelativeError]:
    """The errors of the output and of each gradient of a second call.

    The first call compiles, and later ones may reach the kernels another way: a second call is what is timed.
    """
    # The implementation decides neither inputs nor reference.
    workload = replace(workload, implementation="")
    inputs = random_inputs(workload, device)
    torch.autograd.grad(attention(*inputs.differentiable), inputs.differentiable, inputs.grad_out)
    return relative_errors(_results(attention, inputs), reference_results(workload, device))


def _results(attention: Attention, inputs: Inputs) -> dict[str, Tensor]:
    out = attention(*inputs.differentiable)
    gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def errors_of_first_sequence(
    attention: Attention, workload: AttentionWorkload, device: torch.device
) -> dict[str, RelativeError]:
    """As :func:`attention_errors` of one call, whose first sequence alone is looked at: in float64 all take long."""
    inputs = random_inputs(workload, device)
    results = {name: tensor[:1] for name, tensor in _results(attention, inputs).items()}
    first = Inputs(*(tensor.detach()[:1] for tensor in (*inputs.differentiable, inputs.grad_out)))
    return relative_errors(results, exact_results(first, workload))
