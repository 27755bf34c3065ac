"""What one cell measures, and how: plain data, no torch.

- ``configured.py``: how a workload becomes a cell's configuration, and comes back from it.
- ``training.py``: one model, its batch, and how its steps run.
- ``parallel.py``: the same, shared by several ranks.
- ``operations.py``: one operation by itself.
"""

from cs336sys.workload.configured import DEVICES
from cs336sys.workload.operations import (
    CLASSIFIER,
    COLLECTIVE_DTYPES,
    IMPLEMENTATIONS,
    KERNEL_IMPLEMENTATIONS,
    KERNELS,
    AttentionWorkload,
    CollectiveWorkload,
    KernelWorkload,
)
from cs336sys.workload.parallel import (
    BACKENDS,
    BLOCK_CHECKPOINTING,
    BUCKETED_STRATEGIES,
    DATA_PARALLEL_STRATEGIES,
    FULLY_SHARDED,
    SHARDING_STRATEGIES,
    WHOLE_BLOCKS,
    ParallelWorkload,
    bucket_name,
)
from cs336sys.workload.training import (
    ATTENTION,
    COMPARED_SETTINGS,
    COMPILE_MODES,
    CUDA_GRAPH,
    FUSED_KERNELS,
    LARGEST_ALLOCATIONS,
    MODEL_KERNELS,
    MODES,
    OPTIMIZERS,
    PHASES_OF_MODE,
    PROFILERS,
    STATE_DTYPES,
    SYNCHRONIZE,
    LossWorkload,
    MemoryWorkload,
    ProfileWorkload,
    UserCode,
    Workload,
    parse_kernels,
)

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "BLOCK_CHECKPOINTING",
    "BUCKETED_STRATEGIES",
    "CLASSIFIER",
    "COLLECTIVE_DTYPES",
    "COMPARED_SETTINGS",
    "COMPILE_MODES",
    "CUDA_GRAPH",
    "DATA_PARALLEL_STRATEGIES",
    "DEVICES",
    "FULLY_SHARDED",
    "FUSED_KERNELS",
    "IMPLEMENTATIONS",
    "KERNELS",
    "KERNEL_IMPLEMENTATIONS",
    "LARGEST_ALLOCATIONS",
    "MODEL_KERNELS",
    "MODES",
    "OPTIMIZERS",
    "PHASES_OF_MODE",
    "PROFILERS",
    "SHARDING_STRATEGIES",
    "STATE_DTYPES",
    "SYNCHRONIZE",
    "WHOLE_BLOCKS",
    "AttentionWorkload",
    "CollectiveWorkload",
    "KernelWorkload",
    "LossWorkload",
    "MemoryWorkload",
    "ParallelWorkload",
    "ProfileWorkload",
    "UserCode",
    "Workload",
    "bucket_name",
    "parse_kernels",
]
