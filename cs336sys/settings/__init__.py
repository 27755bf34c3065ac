"""The settings of one cell: plain data, no torch.

- ``training.py``: one model, its batch, and how its steps run; how a workload becomes a cell's configuration.
- ``profiling.py``: the same, with memory recorded, loss followed or kernels profiled.
- ``parallel.py``: the same, shared by several ranks.
- ``operations.py``: one operation by itself; imported by name, for commands that train need none.
"""
