"""What ring attention needs of an attention kernel: forward with logsumexp, and backward with both given."""

from typing import Protocol

from torch import Tensor


class BlockAttention(Protocol):
    """Attention of some queries to one block of the keys, where the softmax goes over more keys than these.

    Shapes: query (..., H, S_q, D), key and value (..., H_kv, S_k, D), of any strides; logsumexp and delta
    (..., H, S_q), in float32, or float64 of float64 inputs.
    :func:`cs336sys.kernels.attention.flash_attention` and ``flash_attention_backward`` are such a pair.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The output over these keys alone, (..., H, S_q, D), and the logsumexp of their scores; no autograd."""
        ...

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor,
        logsumexp: Tensor,
        delta: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq, and its dk and dv, from the logsumexp over all keys and delta = rowsum(dO * O)."""
        ...
