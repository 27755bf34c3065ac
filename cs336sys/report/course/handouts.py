"""The problems of each year in the handout's order, by its names."""

from cs336sys.report.course.problem import Problem
from cs336sys.report.course.problems.benchmarking_script import BENCHMARKING_SCRIPT
from cs336sys.report.course.problems.calculations import (
    ALTERNATE_RING_ALL_REDUCE,
    COMMUNICATION_ACCOUNTING,
    DATA_PARALLEL_CALCS,
    FSDP_CALCS,
    FSDP_TP_CALCS,
    TP_CALCS,
)
from cs336sys.report.course.problems.code import (
    DDP_BUCKETED,
    DDP_OVERLAP,
    FLASH_BACKWARD,
    FLASH_FORWARD,
    FSDP,
    LEADERBOARD_2026,
    NAIVE_DDP,
    OPTIMIZER_STATE_SHARDING,
)
from cs336sys.report.course.problems.ddp import (
    DDP_BUCKETED_BENCHMARKING,
    DDP_OVERLAP_BENCHMARKING,
    MINIMAL_DDP_FLAT_BENCHMARKING,
    NAIVE_DDP_BENCHMARKING,
)
from cs336sys.report.course.problems.distributed_communication import DISTRIBUTED_COMMUNICATION
from cs336sys.report.course.problems.flash_benchmarking import FLASH_BENCHMARKING, LEADERBOARD_2025, WEIGHTED_SUM
from cs336sys.report.course.problems.gradient_checkpointing import GRADIENT_CHECKPOINTING
from cs336sys.report.course.problems.memory_profiling import MEMORY_PROFILING_2025, MEMORY_PROFILING_2026
from cs336sys.report.course.problems.mixed_precision import BENCHMARKING_MIXED_PRECISION, MIXED_PRECISION_ACCUMULATION
from cs336sys.report.course.problems.nsys_profile import NSYS_PROFILE
from cs336sys.report.course.problems.pytorch_attention import PYTORCH_ATTENTION, TORCH_COMPILE
from cs336sys.report.course.problems.sharding import FSDP_ACCOUNTING, OPTIMIZER_STATE_SHARDING_ACCOUNTING

# The worked example and 2025's leaderboard are no problems of the handouts, and are asked for all the same.
PROBLEMS: dict[int, tuple[Problem, ...]] = {
    2025: (
        BENCHMARKING_SCRIPT,
        NSYS_PROFILE,
        MIXED_PRECISION_ACCUMULATION,
        BENCHMARKING_MIXED_PRECISION,
        MEMORY_PROFILING_2025,
        PYTORCH_ATTENTION,
        TORCH_COMPILE,
        WEIGHTED_SUM,
        FLASH_FORWARD,
        FLASH_BACKWARD,
        FLASH_BENCHMARKING,
        LEADERBOARD_2025,
        DISTRIBUTED_COMMUNICATION,
        NAIVE_DDP,
        NAIVE_DDP_BENCHMARKING,
        MINIMAL_DDP_FLAT_BENCHMARKING,
        DDP_OVERLAP,
        DDP_OVERLAP_BENCHMARKING,
        DDP_BUCKETED,
        DDP_BUCKETED_BENCHMARKING,
        COMMUNICATION_ACCOUNTING,
        OPTIMIZER_STATE_SHARDING,
        OPTIMIZER_STATE_SHARDING_ACCOUNTING,
    ),
    2026: (
        BENCHMARKING_SCRIPT,
        NSYS_PROFILE,
        MIXED_PRECISION_ACCUMULATION,
        BENCHMARKING_MIXED_PRECISION,
        MEMORY_PROFILING_2026,
        GRADIENT_CHECKPOINTING,
        PYTORCH_ATTENTION,
        TORCH_COMPILE,
        WEIGHTED_SUM,
        FLASH_FORWARD,
        FLASH_BACKWARD,
        FLASH_BENCHMARKING,
        DISTRIBUTED_COMMUNICATION,
        NAIVE_DDP,
        NAIVE_DDP_BENCHMARKING,
        MINIMAL_DDP_FLAT_BENCHMARKING,
        DDP_OVERLAP,
        DDP_OVERLAP_BENCHMARKING,
        OPTIMIZER_STATE_SHARDING,
        OPTIMIZER_STATE_SHARDING_ACCOUNTING,
        FSDP,
        FSDP_ACCOUNTING,
        ALTERNATE_RING_ALL_REDUCE,
        DATA_PARALLEL_CALCS,
        FSDP_CALCS,
        TP_CALCS,
        FSDP_TP_CALCS,
        LEADERBOARD_2026,
    ),
}
