"""Tensor parallel training: the matrices of every layer are shared by all ranks."""

from cs336sys.parallel.tensor_parallel.layers import COMPILE_OPTIONS, vocabulary_parallel_cross_entropy
from cs336sys.parallel.tensor_parallel.wrapper import TensorParallel

__all__ = ["COMPILE_OPTIONS", "TensorParallel", "vocabulary_parallel_cross_entropy"]
