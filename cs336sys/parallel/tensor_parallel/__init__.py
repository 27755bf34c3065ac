"""Tensor parallel training: the matrices of every layer are shared by all ranks.

- ``layers.py``: what each layer does besides what it did alone, what ranks send each other for it, and the loss of
  logits of which each rank has a part.
- ``weights.py``: how weights are cut, and put together again.
- ``wrapper.py``: the class.
"""

from cs336sys.parallel.tensor_parallel.layers import COMPILE_OPTIONS, vocabulary_parallel_cross_entropy
from cs336sys.parallel.tensor_parallel.wrapper import TensorParallel

__all__ = ["COMPILE_OPTIONS", "TensorParallel", "vocabulary_parallel_cross_entropy"]
