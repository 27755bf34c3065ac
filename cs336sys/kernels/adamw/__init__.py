"""AdamW of all parameters in a few launches."""

from cs336sys.kernels.adamw.optimizer import AdamW
from cs336sys.kernels.adamw.reference import reference_adamw

__all__ = ["AdamW", "reference_adamw"]
