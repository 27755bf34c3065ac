"""Random inputs of attention: query, key, value and the gradient of the output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336sys.measure.device import DTYPES
from cs336sys.workload import FLASH_ATTENTION_4, AttentionWorkload

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Query, key and value that require gradients, and the output's gradient: (batch, heads, context, head_dim).

    Key and value may have fewer heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def random_inputs(workload: AttentionWorkload, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(workload.seed)
    tensors = [
        torch.randn(
            (workload.batch_size, heads, workload.context, workload.head_dim),
            generator=generator,
            device=device,
            dtype=DTYPES[workload.dtype],
        )
        for heads in (workload.heads, workload.key_heads, workload.key_heads, workload.heads)
    ]
    if workload.implementation in FLASH_ATTENTION_4:
        # As it wants them in memory, and as a model that uses it would have them.
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    return Inputs(*tensors)
