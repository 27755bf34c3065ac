"""Comparison of tensors and collectives of ranks with the same training in one process; every tolerance is here."""
