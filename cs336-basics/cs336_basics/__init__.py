"""A Transformer language model from scratch: ``model``, ``nn_utils``, ``optimizer`` and ``data``."""

__version__ = "0.1.0"

# A package of the same name that is not marked like this one is somebody else's, and results say so.
MADE_FOR_CS336SYS = True
