"""The settings of one cell: plain data, no torch.

- ``training.py``: one model, its batch, and how its steps run; how a workload becomes a cell's configuration.
- ``profiling_options.py``: the same, with memory recorded, loss followed or kernels profiled.
- ``parallel.py``: the same, shared by several ranks.
- ``operations.py``: one operation by itself; imported by name, for commands that train need none.
"""

from cs336sys.workload.parallel import (
    BACKENDS,
    CONTEXT_STRATEGIES,
    DATA_PARALLEL_STRATEGIES,
    SHARD_STRATEGIES,
    SHARDING_STRATEGIES,
    ParallelWorkload,
    bucket_name,
)
from cs336sys.workload.profiling_options import (
    LARGEST_ALLOCATIONS,
    LossWorkload,
    MemoryWorkload,
    ProfileWorkload,
)
from cs336sys.workload.training import (
    ATTENTION,
    COMPARED_SETTINGS,
    STATE_DTYPES,
    UserCode,
    Workload,
)
