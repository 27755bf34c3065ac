"""What an attention implementation accepts, said once for all of them."""

import torch

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL_MAX_HEAD_DIM = 256


def check_attention_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, for_kernel: bool = True
) -> None:
    """Refuses, in one sentence, tensors that are not query (..., S_q, D) and key and value (..., S_k, D).

    No queries (S_q = 0) and empty leading dimensions are accepted. Kernels take float32, float16 and bfloat16 and
    D <= 256; with ``for_kernel=False`` any floating dtype and any D >= 1 pass.

    Raises:
        ValueError: fewer than two dimensions, leading dimensions, key lengths or head dimensions that differ, no keys,
            a head dimension out of range, or several devices.
        TypeError: a dtype that is not supported, or several dtypes.
    """
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if min(len(query_shape), len(key_shape), len(value_shape)) < 2:
        raise ValueError(
            "query, key and value need at least 2 dimensions (..., sequence, head_dim), got shapes "
            f"{tuple(query_shape)}, {tuple(key_shape)} and {tuple(value_shape)}"
        )
    head_dim = query_shape[-1]
    if not head_dim == key_shape[-1] == value_shape[-1]:
        raise ValueError(
            "query, key and value must have the same head dimension, "
            f"got {head_dim}, {key_shape[-1]} and {value_shape[-1]}"
        )
    if not query_shape[:-2] == key_shape[:-2] == value_shape[:-2]:
        raise ValueError(
            "query, key and value must have the same leading dimensions, got "
            f"{tuple(query_shape[:-2])}, {tuple(key_shape[:-2])} and {tuple(value_shape[:-2])}"
        )
    if key_shape != value_shape:
        raise ValueError(f"key and value must have the same sequence length, got {key_shape[-2]} and {value_shape[-2]}")
    if key_shape[-2] == 0:
        raise ValueError("key and value have sequence length 0: attention needs at least 1 key")
    if head_dim == 0:
        raise ValueError("the head dimension is 0: it must be at least 1")
    if for_kernel and head_dim > KERNEL_MAX_HEAD_DIM:
        raise ValueError(f"head dimension {head_dim} is too large: the kernels take at most {KERNEL_MAX_HEAD_DIM}")

    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have the same dtype, got {dtype}, {key.dtype} and {value.dtype}")
    if for_kernel and dtype not in KERNEL_DTYPES:
        raise TypeError(f"dtype {dtype} is not supported: the kernels take {', '.join(map(str, KERNEL_DTYPES))}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype {dtype} is not supported: attention takes floating-point tensors")
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on the same device, got {query.device}, {key.device} and {value.device}"
        )
