"""The device of a measurement, and torch's dtypes by the names that commands and results give them."""

import torch

from cs336sys.errors import CapabilityError


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        CapabilityError: ``cuda`` was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise CapabilityError("device 'cuda': torch sees no CUDA GPU here; choose cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


# In the order of workload.COLLECTIVE_DTYPES: first those of sizes.PRECISIONS.
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int32": torch.int32,
}
