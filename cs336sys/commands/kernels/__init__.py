"""Checks and times the fused kernels compared with other implementations: what there is, and how it is measured."""
