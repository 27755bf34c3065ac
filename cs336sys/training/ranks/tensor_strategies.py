"""The strategies of ``shard`` whose ranks share layers or sequences: ours, alone and on a mesh, and torch's own."""

import contextlib
import datetime
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cs336_basics.model
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336sys.accounting.sharding.context import split_of
from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import flash_attention, flash_attention_backward
from cs336sys.parallel.collectives import process_group
from cs336sys.parallel.context_parallel import AllToAllAttention, ContextGroup, RingAttention
from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.tensor_parallel import COMPILE_OPTIONS, TensorParallel
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.training import model as models
from cs336sys.training.ranks.strategies import (
    BUCKETS,
    OptimizerChoice,
    Replica,
    averaging_replica,
    build_plain_model,
    fully_sharded,
    sequences_of_rank,
)
from cs336sys.training.step import AUTOCAST_DTYPES


def _data_tensor_mesh(workload: ParallelWorkload, device: torch.device) -> DeviceMesh:
    """Return the mesh (groups, ranks that share layers), of which the latter are neighbours."""
    return _kept_mesh(process_group(group=None), device.type, workload.data_ranks, workload.group_ranks)


# Groups cost ranks a rendezvous, and NCCL memory: the same for all cells of one default group.
@functools.lru_cache(maxsize=1)
def _kept_mesh(default: dist.ProcessGroup, device_type: str, data_ranks: int, tensor_ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type, (data_ranks, tensor_ranks), mesh_dim_names=("data", "tp"))


def tensor_parallel(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Share layers among the neighbours of a mesh, whose groups share the batch."""
    record, training = workload.strategy_record, workload.training
    mesh = _data_tensor_mesh(workload, device)
    # Layers are filled on the device one after the other, so that the whole model never exists.
    plain = build_plain_model(workload, torch.device("meta"), compile_options=COMPILE_OPTIONS)
    torch.manual_seed(training.seed)
    shared = TensorParallel(
        plain,
        mesh["tp"],
        sequence_parallel=record.is_sequence_parallel,
        initialize=models.initialize_layer,
        device=device,
        communicates=record.communicates,
    )
    model: Any = shared  # It has changed plain in place; what shares the batch among groups wraps that.
    if record.outer == "ddp":
        model = BucketedDDP(plain, BUCKETS, group=mesh["data"])
    elif record.gathers_ahead:  # Groups share the batch, and weights, as this project's FSDP does.
        from cs336sys.parallel.fsdp import FSDP

        assert workload.prefetch is not None
        half = AUTOCAST_DTYPES.get(training.precision)
        model = FSDP(plain, half, prefetch=workload.prefetch, group=mesh["data"])

    def gather_parameters() -> Mapping[str, Tensor]:
        return shared.full_state_dict(parts=model.gather_full_params() if record.gathers_ahead else None)

    return Replica(
        model,
        optimizer(model.parameters()),
        synchronize=_gradient_completion(model, shared),
        gather_parameters=gather_parameters,
        buckets=getattr(model, "buckets", ()),
        scaler_class=ShardedGradScaler,
        wait_for_gathers=getattr(model, "wait_for_gathers", None),
        loss=functools.partial(shared.loss, compiles=training.is_compiled),
    )


def _gradient_completion(model: Any, shared: TensorParallel) -> Callable[[], None] | None:
    """Return what completes gradients: over groups that share the batch, then over ranks that share layers; or None."""

    def finish() -> None:
        model.finish_gradient_synchronization()
        shared.finish_gradient_synchronization()

    if model is not shared:  # A wrapper around its layers averages over the groups.
        return finish
    return shared.finish_gradient_synchronization if shared.completes_gradients else None


def torch_tensor(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Apply torch's ``parallelize_module`` as torchtitan does, with ``loss_parallel``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    training, ranks = workload.training, workload.group_ranks
    size = training.size
    if size.vocab_size % ranks or size.d_ff % ranks:
        raise CapabilityError(
            f"strategy '{workload.strategy}': loss_parallel needs equal parts of the vocabulary, {size.vocab_size}, "
            f"and d_ff is {size.d_ff}; choose multiples of {ranks}"
        )
    if not training.optimizer_record.takes_dtensors or training.scales_loss:
        raise CapabilityError(
            f"strategy '{workload.strategy}' keeps DTensors: choose --optimizer fused or course, and bf16 or fp32"
        )
    model: Any = build_plain_model(workload, device)  # Blocks are compiled at their first call, with the layers below.
    with torch.no_grad():
        _as_torch_layers(model)
    _parallelize(model, _data_tensor_mesh(workload, device)["tp"], workload.strategy_record.is_sequence_parallel)
    for block in model.layers:
        block.attn.num_heads //= ranks  # Projections return this rank's heads; the workload refuses uneven ones.
    parameters = list(model.parameters())
    # torch's optimizers update the tensors of a group together, which must all be DTensors, or none.
    groups = [
        [parameter for parameter in parameters if isinstance(parameter, DTensor) == is_distributed]
        for is_distributed in (True, False)
    ]
    return Replica(
        model,
        optimizer([{"params": group} for group in groups if group]),
        around=loss_parallel,  # It replaces the operators of torch's own cross entropy, of (tokens, vocabulary).
        loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()),
    )


def torch_linear(layer: Any) -> nn.Linear:
    """Put a layer's weight, (out, in), and its bias into one of torch's, which torch's tensor-parallel styles know."""
    with torch.device("meta"):  # Without memory for the weight that is replaced.
        linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[0], bias=False)
    linear.weight = layer.weight
    linear.register_parameter("bias", dict(layer.named_parameters()).get("bias"))
    return linear


def _as_torch_layers(model: nn.Module) -> None:
    """Replace our layers by torch's, which ``ColwiseParallel`` and ``RowwiseParallel`` know."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            weight = getattr(child, "weight", None)
            # Norms, whose weights are vectors, stay.
            if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
                continue
            layer: nn.Module = torch_linear(child)
            if name == "token_embeddings":
                layer = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
                layer.weight = weight  # The constructor has made another parameter of it.
            setattr(module, name, layer)


def _parallelize(model: Any, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Give each layer its style, with the residual stream whole or in slices of the sequence between layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    whole_input = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    norms = ("layers.*.ln[12]", "ln_final") if sequence_parallel else ()
    parallelize_module(
        model,
        mesh,
        {
            "token_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "layers.*.attn": whole_input,
            "layers.*.attn.[qkv]_proj": ColwiseParallel(),
            "layers.*.attn.output_proj": RowwiseParallel(output_layouts=between),
            "layers.*.ffn": whole_input,
            "layers.*.ffn.w[13]": ColwiseParallel(),
            "layers.*.ffn.w2": RowwiseParallel(output_layouts=between),
            **dict.fromkeys(norms, SequenceParallel()),  # Next, logits stay DTensors: loss_parallel takes these.
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    # clone() waits for the embedding's collective: compiled blocks lose the layout of what still arrives (torch 2.13).
    model.token_embeddings.register_forward_hook(lambda _, inputs, embedded: embedded.clone())


def give_positions(model: nn.Module, positions: Tensor) -> None:
    """Let the model's attention rotate queries and keys by where their tokens stand, in place of 0 to S - 1.

    Args:
        model: of ``cs336_basics``, this project's or anybody's whose attention takes ``token_positions``.
        positions: (S,), int64.
    """
    attention_class = cs336_basics.model.CausalMultiHeadSelfAttention
    if "token_positions" not in inspect.signature(attention_class.forward).parameters:
        raise CapabilityError(
            "cs336_basics.model.CausalMultiHeadSelfAttention.forward takes no token_positions, so that a rank cannot "
            "tell it where its slice of a sequence is: add the argument, or choose a strategy that splits no sequence"
        )

    def with_positions(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden_states = args[:1]  # A block may pass positions of its own as the second argument.
        return hidden_states, kwargs | {"token_positions": positions}

    for module in model.modules():
        if isinstance(module, attention_class):
            module.register_forward_pre_hook(with_positions, with_kwargs=True)


# Implementations of a block of ring attention by a workload's attention: torch's own has no logsumexp.
_IMPLEMENTATIONS = {"flash": "auto", "reference": "reference"}


@dataclass(frozen=True)
class KernelBlocks:
    """This project's attention as the :class:`~cs336sys.parallel.context_parallel.BlockAttention` of a ring."""

    implementation: str = "auto"  # As of ``flash_attention``.

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        return flash_attention(query, key, value, is_causal, return_logsumexp=True, implementation=self.implementation)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return flash_attention_backward(*arguments, implementation=self.implementation)


def _ring(context: ContextGroup, workload: ParallelWorkload) -> RingAttention:
    """Return ring attention with the workload's kernels; refuse --attention whose kernels a ring cannot use."""
    implementation = _IMPLEMENTATIONS.get(workload.training.attention)
    if implementation is None:
        raise CapabilityError(
            f"strategy '{workload.strategy}' puts blocks together by their logsumexps, which --attention "
            f"{workload.training.attention} does not return; choose {' or '.join(_IMPLEMENTATIONS)}"
        )
    return RingAttention(context, KernelBlocks(implementation))


def context_parallel(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Hold a slice of every sequence of its group on each rank, and all state or a slice of that."""
    record, ranks = workload.strategy_record, workload.group_ranks
    split = split_of(workload.strategy, workload.training.size, ranks)
    group = _attention_group(process_group(group=None), workload.timeout_s, ranks)
    context = ContextGroup(split, group, communicates=record.communicates)
    if record.trades_heads:  # For tokens, all to all; else keys and values go around a ring.
        model_attention = functools.partial(models.model_attention, is_causal=True)
        attention: Any = AllToAllAttention(
            context, models.causal_attention(workload.training.attention) or model_attention
        )
    else:
        attention = _ring(context, workload)
    if workload.training.is_compiled:
        attention = torch.compiler.disable(attention)  # Its collectives are launched between the compiled parts.
    positions = context.positions(device)
    share = (sequences_of_rank(workload), positions)
    of_this_rank: dict[str, Any] = {"share": share, "loss_weight": context.loss_weight}
    if record.gathers_ahead:  # As this project's FSDP alone does.
        # FSDP shards over all ranks, also those of one group, because each has gradients of other tokens.
        replica = fully_sharded(workload, device, optimizer, attention)
        give_positions(replica.model, positions)
        return replace(replica, **of_this_rank)
    plain = build_plain_model(workload, device, attention)
    give_positions(plain, positions)
    if not record.communicates:  # The step that others are compared with: without communication.
        return Replica(plain, optimizer(plain.parameters()), **of_this_rank)
    return averaging_replica(plain, optimizer, **of_this_rank)


# The same for all cells of one default group.
@functools.lru_cache(maxsize=1)
def _attention_group(default: dist.ProcessGroup, timeout_s: float, ranks: int) -> dist.ProcessGroup:
    """Return this rank's group of neighbours, with its own communicator: attention must not wait for gradients."""
    options = None
    if dist.get_backend(default) == "nccl":
        # Attention's kernels fill the GPU: those of NCCL, which start with them, would wait for the first to end.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=timeout_s)  # torch warns if it is not the argument below.
    groups = [list(range(first, first + ranks)) for first in range(0, default.size(), ranks)]
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.new_subgroups_by_enumeration(groups, timeout=timeout, pg_options=options)[0]  # This rank's, of all.


def torch_context(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
    """Use torch's ``context_parallel``: a ring in zigzag order under ``scaled_dot_product_attention``."""
    training, world_size = workload.training, workload.world_size
    if device.type != "cuda":
        raise CapabilityError("strategy 'torch-context': torch's context_parallel supports only SDPA's CUDA kernels")
    if not training.attention_record.is_torchs:
        raise CapabilityError(
            f"strategy 'torch-context' replaces torch's attention, and --attention {training.attention} is not "
            f"torch's; choose sdpa"
        )
    if training.is_compiled or training.uses_graphs:
        raise CapabilityError(
            "strategy 'torch-context' replaces SDPA while a step runs, which compiled or captured code would not "
            "notice: choose --compile off and --cuda-graph off"
        )
    if training.size.context % (2 * world_size):
        raise CapabilityError(
            f"strategy 'torch-context' cuts sequences into {2 * world_size} equal chunks: context "
            f"{training.size.context} is no multiple of that"
        )
    from torch.distributed.tensor.experimental import context_parallel

    context = ContextGroup(split_of("torch-context", training.size, world_size))
    mesh = init_device_mesh("cuda", (world_size,))
    plain = build_plain_model(workload, device)
    positions = context.positions(device)
    give_positions(plain, positions)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        """Let the ring compute torch's attention within this."""
        # context_parallel wants buffers to cut along the sequence. Inputs are cut already, so it gets an unused one.
        sequence = torch.empty(1, training.size.context, device=device)
        torch_attention = F.scaled_dot_product_attention
        try:
            # Of SDPA, those that torch's ring knows: all but the one that keeps scores.
            with (
                sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
                context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[1], no_restore_buffers={sequence}),
            ):
                yield
        finally:
            F.scaled_dot_product_attention = torch_attention  # torch 2.11 leaves its own there after an error.

    return averaging_replica(plain, optimizer, share=(slice(None), positions), around=around)  # All sequences.
