"""Fused kernels in Triton, and attention."""

from cs336sys.machine.late_imports import repair_interpreter

repair_interpreter()
