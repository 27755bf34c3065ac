"""A Transformer language model from scratch: ``model``, ``nn_utils``, ``optimizer`` and ``data``."""

__version__ = "0.1.0"
