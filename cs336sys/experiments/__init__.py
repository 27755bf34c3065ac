"""Build and measure one cell of a command.

Kernels look for Triton's interpreter when they are loaded: without a GPU they run in it, as far as they run at all.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
