"""Tensor parallel training: the matrices of every layer are shared by all ranks.

- ``group.py``: what ranks send each other inside of a model.
- ``layers.py``: what each layer does besides what it did alone, and the loss of logits of which each rank has a part.
- ``weights.py``: how weights are cut, and put together again.
- ``wrapper.py``: the class.
"""

from cs336sys.parallel.tensor_parallel.group import COMPILE_OPTIONS
from cs336sys.parallel.tensor_parallel.layers import vocabulary_parallel_cross_entropy
from cs336sys.parallel.tensor_parallel.wrapper import TensorParallel

__all__ = ["COMPILE_OPTIONS", "TensorParallel", "vocabulary_parallel_cross_entropy"]
