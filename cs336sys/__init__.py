"""Benchmark, profile and parallelise Transformer training."""

__version__ = "0.1.0"
