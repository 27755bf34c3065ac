"""Where the Hopper kernels can be used; they run behind :mod:`cs336sys.kernels.attention.operators`."""

import importlib.util

import torch

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
OLDEST_TRITON = (3, 6)


def why_unavailable(query: torch.Tensor) -> str | None:
    """One sentence why the Hopper kernels cannot take ``query`` and its keys, or None if they can."""
    if not query.is_cuda:
        return f"implementation 'hopper' runs on CUDA tensors, got {query.device}"
    capability = torch.cuda.get_device_capability(query.device)
    if capability != (9, 0):
        name, (major, minor) = torch.cuda.get_device_name(query.device), capability
        return f"implementation 'hopper' needs a GPU of compute capability 9.0 (H100, H200), {name} has {major}.{minor}"
    version = _triton_version()
    if version < OLDEST_TRITON:
        installed = ".".join(map(str, version)) if version else "none"
        return f"implementation 'hopper' needs triton {'.'.join(map(str, OLDEST_TRITON))} or later, found {installed}"
    if query.dtype not in DTYPES:
        return f"implementation 'hopper' takes float16 and bfloat16, got {query.dtype}"
    if query.shape[-1] not in HEAD_DIMS:
        choices = f"{', '.join(map(str, HEAD_DIMS[:-1]))} or {HEAD_DIMS[-1]}"
        return f"implementation 'hopper' takes head dimension {choices}, got {query.shape[-1]}"
    num_sequences = query.shape[:-2].numel()
    if num_sequences * (query.shape[-2] + 256) >= 2**31:
        return f"implementation 'hopper' addresses fewer than 2^31 rows, got {num_sequences} x {query.shape[-2]}"
    return None


def _triton_version() -> tuple[int, ...]:
    if importlib.util.find_spec("triton") is None:
        return ()
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
