"""Rotary position embeddings, from projections as they come out of the matrix product to what attention reads."""

from cs336sys.kernels.rope.operators import Rope, RopeQKV, rope, rope_qkv
from cs336sys.kernels.rope.reference import reference_rope

__all__ = ["Rope", "RopeQKV", "reference_rope", "rope", "rope_qkv"]
