"""Fused kernels in Triton, and attention."""

from cs336sys.machine.triton_package import repair_interpreter

repair_interpreter()
