"""The strategies of ``shard`` that give each rank a slice of every sequence: ours, and torch's own next to them."""

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336sys.accounting.sharding.context import ALL_TO_ALL, RING, SHARDED_CONTEXT_STRATEGIES, split_of
from cs336sys.accounting.sharding.partition import outer_dimension
from cs336sys.errors import CapabilityError
from cs336sys.experiments.models import CausalAttention, causal_attention, give_positions, model_attention
from cs336sys.experiments.parallel.sharded_strategies import averaging_replica, fully_sharded
from cs336sys.experiments.parallel.strategies import OptimizerChoice, Prepare, Replica, build_plain_model
from cs336sys.kernels.attention import flash_attention, flash_attention_backward
from cs336sys.parallel.collectives import process_group
from cs336sys.parallel.context_parallel import AllToAllAttention, ContextGroup, RingAttention
from cs336sys.workload import ParallelWorkload

# Of SDPA, those that torch's ring knows: all but the one that keeps scores.
_RING_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

# What computes a block of ring attention, by the name of workload.ATTENTION: torch's own has no logsumexp.
_IMPLEMENTATIONS = {"flash": "auto", "reference": "reference"}


@dataclass(frozen=True)
class KernelBlocks:
    """This project's attention as the :class:`~cs336sys.parallel.context_parallel.BlockAttention` of a ring.

    Attributes:
        implementation: as of ``flash_attention``.
    """

    implementation: str = "auto"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        return flash_attention(query, key, value, is_causal, return_logsumexp=True, implementation=self.implementation)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return flash_attention_backward(*arguments, implementation=self.implementation)


def _ring(context: ContextGroup, workload: ParallelWorkload) -> RingAttention:
    implementation = _IMPLEMENTATIONS.get(workload.training.attention)
    if implementation is None:
        raise CapabilityError(
            f"strategy '{RING}' puts blocks together by their logsumexps, which --attention "
            f"{workload.training.attention} does not return; choose {' or '.join(_IMPLEMENTATIONS)}"
        )
    return RingAttention(context, KernelBlocks(implementation))


def _all_to_all(context: ContextGroup, workload: ParallelWorkload) -> AllToAllAttention:
    attention = causal_attention(workload.training.attention) or functools.partial(model_attention, is_causal=True)
    return AllToAllAttention(context, attention)


_ATTENTION: dict[str, Callable[[ContextGroup, ParallelWorkload], CausalAttention]] = {
    RING: _ring,
    ALL_TO_ALL: _all_to_all,
}


def _context_parallel(strategy: str, *, communicates: bool = True) -> Prepare:
    """A slice of every sequence of its group on each rank; all state on all ranks, or in slices on them."""
    compute = _ATTENTION[strategy.rpartition("+")[2]]

    def prepare(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
        ranks = workload.group_ranks
        split = split_of(strategy, workload.training.size, ranks)
        context = ContextGroup(
            split, _own_group(process_group(None), workload.timeout_s, ranks), communicates=communicates
        )
        attention = compute(context, workload)
        if workload.training.compile != "off":
            # Its collectives are launched between the compiled parts.
            attention = torch.compiler.disable(attention)
        positions = context.positions(device)
        first = dist.get_rank() // ranks * workload.share
        of_this_rank: dict[str, Any] = {
            "share": (slice(first, first + workload.share), positions),
            "loss_weight": context.loss_weight,
        }
        if outer_dimension(strategy) == "fsdp":
            # Over all ranks: each has gradients of tokens of its own.
            replica = fully_sharded(workload, device, optimizer, attention)
            give_positions(replica.model, positions)
            return replace(replica, **of_this_rank)
        plain = build_plain_model(workload, device, attention)
        give_positions(plain, positions)
        if not communicates:
            parameters = dict(plain.named_parameters())
            return Replica(plain, optimizer(plain.parameters()), None, lambda: parameters, **of_this_rank)
        return averaging_replica(plain, optimizer, **of_this_rank)

    return prepare


# The same for all cells of one default group.
@functools.lru_cache(maxsize=1)
def _own_group(default: dist.ProcessGroup, timeout_s: float, ranks: int) -> dist.ProcessGroup:
    """This rank and its neighbours, on a communicator of their own: what attention waits for must not queue behind
    gradients.
    """
    options = None
    if dist.get_backend(default) == "nccl":
        # Attention's kernels fill the GPU: those of NCCL, which start with them, would wait for the first to end.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=timeout_s)
    groups = [list(range(first, first + ranks)) for first in range(0, default.size(), ranks)]
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.new_subgroups_by_enumeration(groups, timeout=timeout, pg_options=options)[0]


def _torch_context(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """torch's ``context_parallel``: a ring in zigzag order under ``scaled_dot_product_attention``.

    Raises:
        CapabilityError: it cannot do this.
    """
    training, world_size = workload.training, workload.world_size
    if device.type != "cuda":
        raise CapabilityError("strategy 'torch-context': torch's context_parallel supports only SDPA's CUDA kernels")
    if training.attention != "sdpa":
        raise CapabilityError(
            f"strategy 'torch-context' replaces torch's attention, and --attention {training.attention} is not "
            f"torch's; choose sdpa"
        )
    if training.compile != "off" or training.cuda_graph == "on":
        raise CapabilityError(
            "strategy 'torch-context' replaces SDPA while a step runs, which compiled or captured code would not "
            "notice: choose --compile off and --cuda-graph off"
        )
    if training.size.context % (2 * world_size):
        raise CapabilityError(
            f"strategy 'torch-context' cuts sequences into {2 * world_size} equal chunks: context "
            f"{training.size.context} is no multiple of that"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    context = ContextGroup(split_of("torch-context", training.size, world_size))
    mesh = init_device_mesh("cuda", (world_size,))
    plain = build_plain_model(workload, device)
    positions = context.positions(device)
    give_positions(plain, positions)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        # Inputs are cut already, as it would cut them: it needs to be shown a sequence to know its length.
        sequence = torch.empty(1, training.size.context, device=device)
        own = F.scaled_dot_product_attention
        try:
            with (
                sdpa_kernel(_RING_BACKENDS),
                context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1], no_restore_buffers={sequence}),
            ):
                yield
        finally:
            # torch 2.11 leaves its own there after an error.
            F.scaled_dot_product_attention = own

    return averaging_replica(plain, optimizer, share=(slice(None), positions), around=around)


PREPARE_CONTEXT: dict[str, Prepare] = {
    **{strategy: _context_parallel(strategy) for strategy in (*_ATTENTION, *SHARDED_CONTEXT_STRATEGIES)},
    **{f"{strategy}-unsynchronized": _context_parallel(strategy, communicates=False) for strategy in _ATTENTION},
    "torch-context": _torch_context,
}
