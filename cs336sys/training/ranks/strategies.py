"""The strategies by which ranks train one model: how each wraps a model and an optimizer on a rank.

A strategy is a :data:`Prepare` function, which its record in :mod:`cs336sys.settings.strategies` names: first those of
``ddp``, then those of ``shard``, which say who holds which part of the training state. Everything else (checking,
timing, counting, tables) is the same for all. A strategy imports what it alone needs: ``FSDP`` brings torch's compiler,
``fully_shard`` DTensor and SymPy, a second and more each, which the ranks of all others are spared.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336sys.accounting.checkpointing import kept_blocks
from cs336sys.errors import CapabilityError
from cs336sys.parallel.copy_engines import CopyEngines
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import is_user_code
from cs336sys.training import model as models
from cs336sys.training import user_models
from cs336sys.training.step import AUTOCAST_DTYPES

if TYPE_CHECKING:
    from cs336sys.parallel.fsdp.gather_order import GatherWatch

# On every rank torch's compiler warns that checkpoints with a policy must have no operations in place: ours have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


def keep_by_parts(model: nn.Module, size: ModelSize, blocks_with_gate_and_up: int) -> None:
    """Let blocks keep their inputs, the products of d_model columns, and attention; the last so many gate and up, too.

    Everything else is computed again in the backward pass. Products are told apart by their shapes. This is ``keep=N``
    where the backward pass is torch's own; :mod:`cs336sys.board.transformer_block` keeps the same in one of its own.

    Args:
        model: with ``layers``, which may be compiled each by itself: the compiler sees what is kept.
        size: with another ``d_ff`` than ``d_model``.
    """
    blocks: list[Any] = list(model.get_submodule("layers").children())
    # All blocks that keep the same have one function, so that they share compiled code.
    forwards = {keeps: _checkpointed_block(blocks[0].forward.__func__, size.d_ff, keeps) for keeps in (False, True)}
    for index, block in enumerate(blocks):
        block.forward = types.MethodType(forwards[index >= len(blocks) - blocks_with_gate_and_up], block)


def _checkpointed_block(run: Callable[..., Tensor], d_ff: int, keeps_gate_and_up: bool) -> Callable[..., Tensor]:
    """Return a block's ``forward`` within torch's selective checkpoint."""
    policy = functools.partial(_policy, d_ff, keeps_gate_and_up)  # It tells products apart by their widths.
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(block: nn.Module, x: Tensor) -> Tensor:
        # The model draws no random numbers whose state would have to be kept.
        return checkpoint(
            lambda hidden: run(block, hidden), x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return forward


def _policy(d_ff: int, keeps_gate_and_up: bool, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Decide whether the result of an operator is kept or computed again."""
    # Attention's operators: their outputs and logsumexps are kept.
    is_kept = any(name in str(operator) for name in ("scaled_dot_product", "flash_attention_forward"))
    if operator is torch.ops.aten.mm.default:
        inner, columns = args[0].shape[1], args[1].shape[1]
        # The last product of a block, of inner dimension d_ff, is in the input of the next block, which is kept.
        is_kept = inner != d_ff and (keeps_gate_and_up or columns != d_ff)  # Gate and up have d_ff columns.
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Replica:
    """The model, optimizer and state that one rank trains."""

    model: nn.Module  # Called with this rank's token ids.
    optimizer: torch.optim.Optimizer
    # Gathers what :meth:`whole_parameters` returns, where the model has slices that are no DTensors.
    gather_parameters: Callable[[], Mapping[str, Tensor]] | None = None
    # Run between backward pass and optimizer step, a phase of its own; None if there is none.
    synchronize: Callable[[], None] | None = None
    # Of gradients or weights; ``launch()`` of each starts a collective during a step, in this order.
    buckets: Sequence[Any] = ()
    # What scales the loss for fp16: ranks that hold slices of gradients must agree on overflow.
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler
    # Notes, for the steps within it, whether gathered weights arrive before they are needed.
    watched_gathers: Callable[[], AbstractContextManager["GatherWatch"]] | None = None
    communicates_in_backward: bool = True  # Whether the backward pass launches what ``synchronize`` waits for.
    # The optimizer that sends updated parameters while the next forward pass runs; None if none does.
    sharded: ShardedOptimizer | None = None
    # Waits for what the forward pass gathers for the backward pass; None if it gathers nothing.
    wait_for_gathers: Callable[[], None] | None = None
    share: Any = None  # Index of this rank's part of inputs and targets; None is its sequences of the batch.
    loss_weight: float = 1.0  # What this rank's mean loss counts in the mean of all.
    # Entered for the forward and the backward pass of every step together.
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    # Of what the model returned and this rank's targets, where that is not all logits; None is the workload's.
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    copy_engines: CopyEngines | None = None  # What sends gradients, where no collective does.

    def named_parameters(self) -> dict[str, Any]:
        """Return the parameters as they are, by their names in the model without a wrapper for data parallelism."""
        is_wrapped = isinstance(self.model, _DATA_PARALLEL)
        return dict((self.model.get_submodule("module") if is_wrapped else self.model).named_parameters())

    def whole_parameters(self) -> Mapping[str, Tensor]:
        """Return every parameter unsharded by these names, when no step is under way. All ranks call it together.

        The tensors may be the model's own.
        """
        if self.gather_parameters is not None:
            return self.gather_parameters()
        if self.sharded is not None:  # Other ranks may still send some.
            self.sharded.wait_for_parameters()
        return {
            name: parameter.detach().full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for name, parameter in self.named_parameters().items()
        }


_DATA_PARALLEL = (NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, nn.parallel.DistributedDataParallel)


def replica_of(model: Any, optimizer: torch.optim.Optimizer, **settings: Any) -> Replica:
    """Build the replica of a data-parallel wrapper of ours; ``settings`` are other fields of the replica."""
    synchronize = model.finish_gradient_synchronization
    return Replica(model, optimizer, synchronize=synchronize, buckets=model.buckets, **settings)


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer: its class and the settings to construct it with."""

    training: Workload  # The workload that chooses it.
    changed: Mapping[str, Any]  # Settings instead of those of the workload's choice.

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        return models.build_optimizer(self.training, parameters, **self.changed)

    def shard(self, wrapper: Callable[..., Any], parameters: Any, **options: Any) -> Any:
        """Build ``wrapper``, a class that shares this optimizer out among ranks, with ``options`` of its own."""
        optimizer_class, settings = models.choose_optimizer(self.training)
        is_users = is_user_code(self.training.optimizer)
        changed = user_models.overriding_settings(settings, self.changed) if is_users else self.changed
        return wrapper(parameters, optimizer_class, **options, **{**settings, **changed})


def sequences_of_rank(workload: ParallelWorkload) -> slice:
    """Return this rank's part of the batch, or that of the ranks with which it shares layers or sequences."""
    first = dist.get_rank() // workload.group_ranks * workload.sequences_per_rank
    return slice(first, first + workload.sequences_per_rank)


# Called on every rank, in a process group, with the device of the rank.
Prepare = Callable[[ParallelWorkload, torch.device, OptimizerChoice], Replica]


def build_plain_model(
    workload: ParallelWorkload,
    device: torch.device,
    attention: models.CausalAttention | None = None,
    compile_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build the model that a strategy wraps: with checkpoints around its blocks if the workload says so.

    The checkpoints are outside the compiled code, which all blocks go on sharing, and inside what a wrapper puts around
    calls of a block.

    Args:
        attention, compile_options: as of :func:`~cs336sys.training.model.build_model`.
    """
    model = models.build_model(workload.training, device, attention, compile_options)
    if workload.checkpointing == "block":
        for block in models.blocks_of(workload.training, model).values():
            run = block._compiled_call_impl or block._call_impl  # Module.__call__ prefers the first; both run hooks.
            keeping = functools.partial(models.keeping_input, run, keeps_random=not workload.training.is_ours)
            block._compiled_call_impl = keeping
    kept = kept_blocks(workload.checkpointing)
    if kept is not None and workload.has_own_block_backward:
        from cs336sys.board.transformer_block import choose_kept

        sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        # None is our flash attention; the model's own cannot be kept.
        choose_kept(model, kept, attention=sdpa if workload.training.attention_record.is_torchs else None)
    elif kept is not None:
        keep_by_parts(model, workload.training.size, kept)
    return model


def unsynchronized(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Train a model of its own on every rank: the step of the other strategies without their communication."""
    model = build_plain_model(workload, device)
    return Replica(model, _optimizer_of(model, workload, optimizer))


def _optimizer_of(model: nn.Module, workload: ParallelWorkload, optimizer: OptimizerChoice) -> torch.optim.Optimizer:
    """Make a model's optimizer, and let gradients be in bf16 where they may, before a wrapper asks for their dtype."""
    trained = optimizer(model.parameters())
    if workload.has_half_gradients:
        from cs336sys.kernels.fuse import fused_kernels

        fused = fused_kernels(model)
        assert fused is not None  # Only fused workloads have half gradients.
        fused.keep_copies(torch.bfloat16, trained, gradient_dtype=torch.bfloat16)
    return trained


def replicated(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Hold all state on every rank; a wrapper of ours averages gradients."""
    plain = build_plain_model(workload, device)
    trained = _optimizer_of(plain, workload, optimizer)
    settings: dict[str, Any] = {"gradient_dtype": AUTOCAST_DTYPES.get(workload.gradient_dtype)}
    if workload.strategy_record.has_buckets:
        settings |= {"bucket_size_mb": workload.bucket_mb, "copy_engines": workload.uses_copy_engines}
    model = workload.strategy_record.load("wrapper")(plain, **settings)
    copy_engines = getattr(model, "copy_engines", None)
    return replica_of(model, trained, communicates_in_backward=model.overlaps, copy_engines=copy_engines)


def torch_ddp(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Wrap in torch's DDP, with gradients that are views of its buckets; it waits at the end of the backward pass."""
    if workload.gradient_dtype == "bf16" and dist.get_backend() != "nccl":
        raise CapabilityError("strategy 'torch': torch's DDP sends gradients in bf16 only through NCCL; choose fp32")
    plain = build_plain_model(workload, device)
    model = nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    if workload.gradient_dtype in hooks:
        model.register_comm_hook(state=None, hook=hooks[workload.gradient_dtype])
    return Replica(model, optimizer(model.parameters()))


# The size of buckets in all strategies that average gradients, so that only what they shard makes a difference.
BUCKETS = "block"


def averaged_in_buckets(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Hold all state on every rank."""
    return averaging_replica(build_plain_model(workload, device), optimizer)


def averaging_replica(plain: nn.Module, optimizer: OptimizerChoice, **settings: Any) -> Replica:
    """Average the gradients of a model in buckets, during the backward pass; ``settings`` are fields of the replica."""
    model = BucketedDDP(plain, BUCKETS)
    return replica_of(model, optimizer(model.parameters()), **settings)


def sharded_optimizer(workload: ParallelWorkload, device: torch.device, choice: OptimizerChoice) -> Replica:
    """Average as :func:`averaging_replica`; each rank has the optimizer state of its share of whole parameters."""
    plain = build_plain_model(workload, device)
    model = BucketedDDP(plain, BUCKETS)
    optimizer = choice.shard(ShardedOptimizer, plain.parameters(), module=plain)
    return replica_of(model, optimizer, sharded=optimizer)


def flat_sharded_optimizer(workload: ParallelWorkload, device: torch.device, choice: OptimizerChoice) -> Replica:
    """Update a slice of every parameter on each rank, which gets the mean gradient of that slice alone."""
    model = build_plain_model(workload, device)
    optimizer = choice.shard(ShardedOptimizer, model.parameters(), flat=True, module=model)
    return Replica(
        model,
        optimizer,
        synchronize=optimizer.finish_gradient_synchronization,
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
    build_device = torch.device("cpu" if initialize is None else "meta")
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
        gather_parameters=model.gather_full_params,
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
    return Replica(model, choice.shard(ZeroRedundancyOptimizer, model.parameters()))


def torch_fsdp(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Apply torch's ``fully_shard`` to each block and to the rest; our model is filled meanwhile, a user's before."""
    _require_blocks(workload)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    training = workload.training
    half = AUTOCAST_DTYPES.get(training.precision)
    if training.is_ours:
        # Below, forward alone is compiled.
        model = models.build_model(replace(training, compile="off"), torch.device("meta"))
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
    return Replica(model, optimizer(model.parameters()))


def _require_blocks(workload: ParallelWorkload) -> None:
    """Refuse a model that is compiled as a whole."""
    if workload.training.is_compiled_whole:
        raise CapabilityError(
            f"strategy '{workload.strategy}': compiled as a whole, the model leaves no place to gather its parts; "
            "choose --compile block"
        )
