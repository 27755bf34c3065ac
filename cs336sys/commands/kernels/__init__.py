"""The fused kernels, checked and timed next to other implementations: what there is, and how it is measured."""
