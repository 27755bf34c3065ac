"""The strategies of ``shard``: who holds which part of the training state, and torch's own next to ours.

Named in :mod:`cs336sys.settings.strategies`, as those of :mod:`~cs336sys.training.ranks.strategies`. A strategy imports
what it alone needs: ``FSDP`` brings torch's compiler, ``fully_shard`` DTensor and SymPy, a second and more each, which
the ranks of all others are spared.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.errors import CapabilityError
from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.training import model as models
from cs336sys.training.ranks.strategies import (
    OptimizerChoice,
    Replica,
    build_plain_model,
    keep_by_parts,
    replica_of,
    replica_of_torch,
)
from cs336sys.training.step import AUTOCAST_DTYPES

# The size of buckets in all strategies that average gradients, so that only what they shard makes a difference.
BUCKETS = "block"

_META, _CPU = torch.device("meta"), torch.device("cpu")


def averaged_in_buckets(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Hold all state on every rank."""
    return averaging_replica(build_plain_model(workload, device), optimizer)


def averaging_replica(plain: nn.Module, optimizer: OptimizerChoice, **settings: Any) -> Replica:
    """Average the gradients of a model in buckets, during the backward pass; ``settings`` are fields of the replica."""
    model = BucketedDDP(plain, BUCKETS)
    return replica_of(model, plain, optimizer(model.parameters()), **settings)


def sharded_optimizer(workload: ParallelWorkload, device: torch.device, choice: OptimizerChoice) -> Replica:
    """Average as :func:`averaging_replica`; each rank has the optimizer state of its share of whole parameters."""
    plain = build_plain_model(workload, device)
    model = BucketedDDP(plain, BUCKETS)
    optimizer = choice.shard(ShardedOptimizer, plain.parameters(), module=plain)
    replica = replica_of(model, plain, optimizer, sharded=optimizer)
    return replace(replica, whole_parameters=functools.partial(_parameters_once_received, plain, optimizer))


def flat_sharded_optimizer(workload: ParallelWorkload, device: torch.device, choice: OptimizerChoice) -> Replica:
    """Update a slice of every parameter on each rank, which gets the mean gradient of that slice alone."""
    model = build_plain_model(workload, device)
    optimizer = choice.shard(ShardedOptimizer, model.parameters(), flat=True, module=model)
    return Replica(
        model,
        optimizer,
        synchronize=optimizer.finish_gradient_synchronization,
        whole_parameters=functools.partial(_parameters_once_received, model, optimizer),
        scaler_class=ShardedGradScaler,
        sharded=optimizer,
    )


def fully_sharded(
    workload: ParallelWorkload,
    device: torch.device,
    optimizer: OptimizerChoice,
    attention: models.CausalAttention | None = None,
) -> Replica:
    """Hold weights, gradients and optimizer state in slices; no rank ever holds the whole model.

    An exception is a user's model with layers that cannot be initialized alone: each rank builds it on the CPU first.

    Args:
        attention: in place of the workload's.
    """
    _require_blocks(workload)
    assert workload.prefetch is not None
    from cs336sys.parallel.fsdp import FSDP

    training = workload.training
    initialize = models.initializer_of(training)
    # Not built with split weights, which are those of blocks alone: below, all weights become bf16, or none.
    in_fp32 = replace(training, state_dtype="fp32")
    build_device = _CPU if initialize is None else _META
    plain = build_plain_model(replace(workload, training=in_fp32), build_device, attention)
    if workload.has_half_weights:
        plain.to(torch.bfloat16)
    torch.manual_seed(training.seed)
    # None: FSDP looks for blocks itself, as it does for those of our model.
    blocks = None if training.is_ours else list(models.blocks_of(training, plain).values()) or None
    half = AUTOCAST_DTYPES.get(training.precision)
    if blocks is not None and half is not None:
        cast_outputs_of_replicated(plain, blocks, half)  # Our norms return the dtype that they get.
    model = FSDP(
        plain,
        half,
        prefetch=workload.prefetch,
        keep_gathered=workload.keep_gathered,
        unit_modules=blocks,
        initialize=initialize,
        device=device,
    )
    return Replica(
        model,
        optimizer(model.parameters()),
        synchronize=model.finish_gradient_synchronization,
        whole_parameters=model.gather_full_params,
        scaler_class=ShardedGradScaler,
        watched_gathers=model.watched_gathers,
        wait_for_gathers=model.wait_for_gathers,
    )


def cast_outputs_of_replicated(model: nn.Module, blocks: Collection[nn.Module], dtype: torch.dtype) -> None:
    """Cast what replicated layers (norms, in fp32 on every rank) return to ``dtype``, as matrices after them expect.

    FSDP does so for torch's own layers; this adds hooks to all others.
    """
    from cs336sys.parallel.fsdp.calls import cast_floating
    from cs336sys.parallel.fsdp.parameter import plan_sharding

    replicated = (owner for entry in plan_sharding(model, blocks).replicated for owner, _ in entry.owners)
    # Each layer once, though it may own several parameters.
    for owner in dict.fromkeys(replicated):
        if not type(owner).__module__.startswith("torch.nn."):
            owner.register_forward_hook(lambda _, args, output: cast_floating(output, dtype))


def torch_zero(workload: ParallelWorkload, device: torch.device, choice: OptimizerChoice) -> Replica:
    """Wrap in torch's DDP and ZeroRedundancyOptimizer: whole parameters, broadcast after the step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain = build_plain_model(workload, device)
    model = nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    return replica_of_torch(model, choice.shard(ZeroRedundancyOptimizer, model.parameters()))


def torch_fsdp(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Apply torch's ``fully_shard`` to each block and to the rest; our model is filled meanwhile, a user's before."""
    _require_blocks(workload)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    training = workload.training
    half = AUTOCAST_DTYPES.get(training.precision)
    if training.is_ours:
        model = models.build_model(replace(training, compile="off"), _META)  # Below, forward alone is compiled.
        kept = kept_blocks(workload.checkpointing)
        if kept is not None:
            keep_by_parts(model, training.size, kept)
        torch.manual_seed(training.seed)  # Layers draw their values below.
    else:
        model = models.build_by_layers(training, device)
        normalizes = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
        if normalizes and device.type == "cpu" and half is not None:
            raise CapabilityError(
                f"strategy 'torch-fsdp' with {training.precision}: torch's fully_shard combines batch norm weights in "
                f"half precision with statistics in fp32, which no CPU kernel supports; choose fp32, or fsdp"
            )
    blocks = parts = list(models.blocks_of(training, model).values())
    if training.is_ours:
        # All layers in parts: each is filled just before it is sharded, so that no rank ever holds the whole model.
        parts = [
            part for child in model.children() for part in (child if isinstance(child, nn.ModuleList) else [child])
        ]
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=None if half is None else torch.float32)
    mesh = init_device_mesh(device.type, (workload.world_size,))
    for part in parts:
        if training.is_ours:
            for layer in part.modules():
                layer.to_empty(device=device, recurse=False)
                models.initialize_layer(layer)
        if part in blocks:
            # forward runs inside the hooks that gather: compiled, they would break the graph; under a checkpoint, they
            # would run again with the block.
            if training.compiles_blocks:
                part.forward = torch.compile(part.forward, dynamic=False)
            if workload.checkpointing == "block":
                part.forward = functools.partial(models.keeping_input, part.forward, keeps_random=not training.is_ours)
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Replica(model, optimizer(model.parameters()), whole_parameters=lambda: full_tensors(model))


def _parameters_once_received(model: nn.Module, optimizer: ShardedOptimizer) -> Mapping[str, Tensor]:
    """Return the parameters once those that other ranks have updated are there."""
    optimizer.wait_for_parameters()
    return dict(model.named_parameters())


def full_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Return all parameters by name, those that are DTensors whole. All ranks call it together."""
    from torch.distributed.tensor import DTensor

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in parameters.items()}


def _require_blocks(workload: ParallelWorkload) -> None:
    """Refuse a model that is compiled as a whole."""
    if workload.training.is_compiled_whole:
        raise CapabilityError(
            f"strategy '{workload.strategy}': compiled as a whole, the model leaves no place to gather its parts; "
            "choose --compile block"
        )
