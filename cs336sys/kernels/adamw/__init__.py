"""AdamW of all parameters in a few launches."""

from cs336sys.kernels.adamw.kernels import reference_adamw
from cs336sys.kernels.adamw.optimizer import AdamW

__all__ = ["AdamW", "reference_adamw"]
