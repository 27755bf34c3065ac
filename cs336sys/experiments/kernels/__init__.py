"""Checks and times the fused kernels beside other implementations: what there is, and how it is measured."""
