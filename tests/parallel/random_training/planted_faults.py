"""Faults planted into the parallel classes, each of which random programs must find.

A fault changes what ranks compute and not which collectives they call, so that nothing hangs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from program_ranks import run_programs
from random_programs import DDP, Program

from cs336sys.parallel import gradient_slices
from cs336sys.parallel.buckets import GradientBucket
from cs336sys.parallel.collectives import Broadcasts, MeanReduction, MeanScatter
from cs336sys.parallel.context_parallel import AllToAllAttention, ContextGroup, attention
from cs336sys.parallel.fsdp.unit import ShardedUnit
from cs336sys.parallel.sharded_optimizer import local
from cs336sys.parallel.tensor_parallel import wrapper as tensor_wrapper

_attend_all_to_all = AllToAllAttention.__call__


@dataclass(frozen=True)
class Fault:
    """A function that is replaced in one class, and the programs that use the class.

    Attributes:
        owner, name: where the function is.
        fits: whether a program uses it.
    """

    owner: Any
    name: str
    replacement: Any
    fits: Callable[[Program], bool]


def _merge_without_rescaling(out: Any, logsumexp: Any, block_out: Any, block_logsumexp: Any) -> None:
    seen = (block_logsumexp > -torch.inf).unsqueeze(-1)
    out.add_(torch.where(seen, block_out, 0.0))
    logsumexp.copy_(torch.logaddexp(logsumexp, block_logsumexp))


def _heads_of_the_next_rank(attention: Any, query: Any, key: Any, value: Any) -> Any:
    ranks = attention.context.world_size
    return _attend_all_to_all(attention, query, key, value).roll(query.shape[-3] // ranks if ranks > 1 else 0, -3)


def _uses(*wrappers: str, kind: str = "") -> Callable[[Program], bool]:
    def fits(program: Program) -> bool:
        return program.wrapper in wrappers and not program.inner and (not kind or kind in program.kinds)

    return fits


def _shares(inner: str) -> Callable[[Program], bool]:
    return lambda program: program.inner == inner and program.mesh(program.world_size)[1] > 1


_SUM = property(lambda reduction: dist.ReduceOp(dist.ReduceOp.SUM))

FAULTS = {
    "a rank without a gradient gets none": Fault(
        GradientBucket, "finish", lambda bucket, present: bucket.begin_step(), _uses(*DDP, kind="Skipped")
    ),
    "gradients are summed": Fault(MeanReduction, "_reduce_op", _SUM, _uses(*DDP)),
    "rank 0 sends what others have updated": Fault(
        local,
        "Broadcasts",
        lambda tensors, sources, *rest: Broadcasts(tensors, [0] * len(sources), *rest),
        _uses("naive+optimizer", "bucketed+optimizer"),
    ),
    "slices are clipped by this rank's norm": Fault(
        gradient_slices, "gather_numbers", lambda number, group=None: number.view(1), _uses("optimizer-flat", "fsdp")
    ),
    "slices of gradients are summed": Fault(MeanScatter, "_reduce_op", _SUM, _uses("optimizer-flat")),
    "gradients under no_sync are dropped": Fault(
        ShardedUnit, "keep_gradients", ShardedUnit.drop_gradients, _uses("fsdp")
    ),
    "replicated gradients stay as they are": Fault(
        MeanReduction, "start", lambda reduction, tensors: None, _uses("fsdp", kind="Vectors")
    ),
    "gradients of norms are not summed": Fault(tensor_wrapper, "dist", mock.Mock(), _shares("sequence-parallel")),
    "a ring merges without rescaling": Fault(attention, "merge_block", _merge_without_rescaling, _shares("ring")),
    "heads come back to the wrong place": Fault(
        AllToAllAttention, "__call__", _heads_of_the_next_rank, _shares("all-to-all")
    ),
    "a rank counts its own targets alone": Fault(
        ContextGroup,
        "mean_loss",
        lambda context, loss_sum, targets: loss_sum / targets.clamp(min=1),
        lambda program: _shares("ring")(program) or _shares("all-to-all")(program),
    ),
}


def run_faulty_programs(fault_name: str, *args: Any) -> None:
    """Run programs as :func:`program_ranks.run_programs` does, with a fault."""
    fault = FAULTS[fault_name]
    with mock.patch.object(fault.owner, fault.name, fault.replacement):
        run_programs(*args)
