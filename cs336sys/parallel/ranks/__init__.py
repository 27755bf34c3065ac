"""Processes that run a function as the ranks of one process group.

- ``launch.py``: how do I run a function on N ranks, spawned here or started by torchrun?
- ``spawned.py``: what does a rank do from its first moment to its last, and what does the parent do with its errors?
"""
