"""Which device a measurement runs on."""

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
