"""The strategies of ``shard`` whose ranks share layers: ours, alone and on a mesh, and torch's own next to them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cs336sys.accounting.sharding.partition import outer_dimension
from cs336sys.accounting.sharding.tensor import OWN_TENSOR_STRATEGIES, is_sequence_parallel
from cs336sys.errors import CapabilityError
from cs336sys.experiments.models import initialize_layer
from cs336sys.experiments.parallel.sharded_strategies import BUCKETS, full_tensors
from cs336sys.experiments.parallel.strategies import OptimizerChoice, Prepare, Replica, build_plain_model
from cs336sys.experiments.training import AUTOCAST_DTYPES
from cs336sys.parallel.collectives import process_group
from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.gradient_slices import ShardedGradScaler
from cs336sys.parallel.tensor_parallel import COMPILE_OPTIONS, TensorParallel
from cs336sys.workload import ParallelWorkload

_META = torch.device("meta")


def _mesh(workload: ParallelWorkload, device: torch.device) -> DeviceMesh:
    """(groups, ranks that share layers): the latter are neighbours."""
    return _kept_mesh(process_group(None), device.type, workload.data_ranks, workload.group_ranks)


# Groups cost ranks a rendezvous, and NCCL memory: the same for all cells of one default group.
@functools.lru_cache(maxsize=1)
def _kept_mesh(default: dist.ProcessGroup, device_type: str, data_ranks: int, tensor_ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type, (data_ranks, tensor_ranks), mesh_dim_names=("data", "tp"))


def _share(workload: ParallelWorkload) -> slice:
    """The sequences of this rank's group."""
    first = dist.get_rank() // workload.group_ranks * workload.share
    return slice(first, first + workload.share)


def _tensor_parallel(strategy: str, *, communicates: bool = True) -> Prepare:
    """Layers shared by the neighbours of a mesh; what is outside of them shares the batch."""
    outer = outer_dimension(strategy)

    def prepare(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
        training = workload.training
        mesh = _mesh(workload, device)
        # Layers are filled on the device one after the other, so that the whole model never exists.
        plain = build_plain_model(workload, _META, compile_options=COMPILE_OPTIONS)
        torch.manual_seed(training.seed)
        shared = TensorParallel(
            plain,
            mesh["tp"],
            sequence_parallel=is_sequence_parallel(strategy),
            initialize=initialize_layer,
            device=device,
            communicates=communicates,
        )
        model: Any = shared
        whole: Callable[[], Mapping[str, Tensor]] = shared.full_state_dict
        if outer == "ddp":
            model = BucketedDDP(plain, BUCKETS, group=mesh["data"])
        elif outer == "fsdp":
            from cs336sys.parallel.fsdp import FSDP

            assert workload.prefetch is not None
            half = AUTOCAST_DTYPES.get(training.precision)
            model = sharded = FSDP(plain, half, prefetch=workload.prefetch, group=mesh["data"])

            def whole() -> Mapping[str, Tensor]:
                return shared.full_state_dict(sharded.gather_full_params())

        return Replica(
            model,
            optimizer(model.parameters()),
            _in_turn(model, shared),
            whole,
            getattr(model, "buckets", ()),
            scaler_class=ShardedGradScaler,
            wait_for_gathers=getattr(model, "wait_for_gathers", None),
            share=_share(workload),
            loss=functools.partial(shared.loss, compiles=training.compile != "off"),
        )

    return prepare


def _in_turn(model: Any, shared: TensorParallel) -> Callable[[], None] | None:
    """Complete gradients over groups that share the batch, then over ranks that share layers."""

    def finish() -> None:
        model.finish_gradient_synchronization()
        shared.finish_gradient_synchronization()

    if model is not shared:
        return finish
    return shared.finish_gradient_synchronization if shared.completes_gradients else None


def _torch_tensor(strategy: str) -> Prepare:
    """torch's ``parallelize_module`` as torchtitan uses it, with ``loss_parallel``."""
    sequence_parallel = is_sequence_parallel(strategy)

    def prepare(workload: ParallelWorkload, device: torch.device, optimizer: OptimizerChoice) -> Replica:
        from torch.distributed.tensor import DTensor

        training, ranks = workload.training, workload.group_ranks
        size = training.size
        if size.vocab_size % ranks or size.d_ff % ranks:
            raise CapabilityError(
                f"strategy '{strategy}': loss_parallel needs equal parts of the vocabulary, {size.vocab_size}, and "
                f"d_ff is {size.d_ff}; choose multiples of {ranks}"
            )
        if training.optimizer not in ("course", "fused") or training.precision == "fp16":
            raise CapabilityError(
                f"strategy '{strategy}' keeps DTensors: choose --optimizer fused or course, and bf16 or fp32"
            )
        model: Any = build_plain_model(replace(workload, training=replace(training, compile="off")), device)
        with torch.no_grad():
            _as_torch_layers(model)
        _parallelize(model, _mesh(workload, device)["tp"], sequence_parallel)
        for block in model.layers:
            block.attn.num_heads //= ranks
            if training.compile == "block":
                block.compile(dynamic=False)
        parameters = list(model.parameters())
        # An optimizer of torch's updates DTensors and others apart.
        groups = [
            [one for one in parameters if isinstance(one, DTensor) == is_distributed]
            for is_distributed in (True, False)
        ]
        return Replica(
            model,
            optimizer([{"params": group} for group in groups if group]),
            None,
            lambda: full_tensors(model),
            share=_share(workload),
            around=_loss_parallel,
            loss=_distributed_cross_entropy,
        )

    return prepare


def _as_torch_layers(model: nn.Module) -> None:
    """Put torch's layers, which ``ColwiseParallel`` and ``RowwiseParallel`` know, in the places of ours."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            weight = getattr(child, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
                continue
            with torch.device("meta"):
                layer = (
                    nn.Embedding(*weight.shape)
                    if name == "token_embeddings"
                    else nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                )
            layer.weight = weight
            setattr(module, name, layer)


def _parallelize(model: Any, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    norms = {"ln1": SequenceParallel(), "ln2": SequenceParallel()} if sequence_parallel else {}

    def entered() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))

    parallelize_module(
        model,
        mesh,
        {
            "token_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
            **({"ln_final": SequenceParallel()} if sequence_parallel else {}),
        },
    )
    # A compiled block may not be given what is still arriving: its backward pass would lose the layout (torch 2.13).
    model.token_embeddings.register_forward_hook(lambda _, inputs, embedded: embedded.clone())
    for block in model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "attn": entered(),
                "attn.q_proj": ColwiseParallel(),
                "attn.k_proj": ColwiseParallel(),
                "attn.v_proj": ColwiseParallel(),
                "attn.output_proj": RowwiseParallel(output_layouts=between),
                "ffn": entered(),
                "ffn.w1": ColwiseParallel(),
                "ffn.w3": ColwiseParallel(),
                "ffn.w2": RowwiseParallel(output_layouts=between),
                **norms,
            },
        )


@contextlib.contextmanager
def _loss_parallel() -> Iterator[None]:
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():
        yield


def _distributed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


PREPARE_TENSOR: dict[str, Prepare] = {
    **{strategy: _tensor_parallel(strategy) for strategy in OWN_TENSOR_STRATEGIES},
    "tensor-unsynchronized": _tensor_parallel("tensor", communicates=False),
    "tensor-sequence-unsynchronized": _tensor_parallel("tensor-sequence", communicates=False),
    "torch-tensor": _torch_tensor("torch-tensor"),
    "torch-tensor-sequence": _torch_tensor("torch-tensor-sequence"),
}
