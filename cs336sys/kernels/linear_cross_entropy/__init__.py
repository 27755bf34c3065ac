"""A linear layer and the cross-entropy of its logits, of which only one chunk of tokens exists at a time."""

from cs336sys.kernels.linear_cross_entropy.operators import LinearCrossEntropy, linear_cross_entropy
from cs336sys.kernels.linear_cross_entropy.reference import reference_linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy", "reference_linear_cross_entropy"]
