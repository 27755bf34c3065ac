"""Build a workload's model, with its attention, its batches and its optimizer."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import cs336_basics.model
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from cs336sys.errors import CapabilityError
from cs336sys.machine.late_imports import importing_no_compiler, why_no_triton
from cs336sys.settings.choices import ATTENTION, FUSED_KERNELS_MODULE, import_named
from cs336sys.settings.course_package import course_package
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import is_user_code
from cs336sys.training import user_models

# Causal attention of query, key and value, each (..., heads, S, D).
CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

_model_attention = cs336_basics.model.scaled_dot_product_attention


def sdpa(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute torch's attention in the signature of the model's, whose only mask is the causal one."""
    return F.scaled_dot_product_attention(Q, K, V, is_causal=mask is not None)


# Replacements of cs336_basics.model.scaled_dot_product_attention; our kernels once a workload has chosen them.
ATTENTION_FUNCTIONS: dict[str, Callable[..., Tensor]] = {"reference": _model_attention, "sdpa": sdpa}


def attention_function(name: str) -> Callable[..., Tensor]:
    """Return attention in the signature of the model's, by a name of :data:`~cs336sys.settings.choices.ATTENTION`."""
    if name not in ATTENTION_FUNCTIONS:
        attend = ATTENTION[name].load()
        ATTENTION_FUNCTIONS[name] = lambda Q, K, V, mask=None: attend(Q, K, V, is_causal=mask is not None)
    return ATTENTION_FUNCTIONS[name]


def model_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Compute the model's own attention, with its own softmax, of (..., S, D)."""
    mask = None
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    return _model_attention(query, key, value, mask)


def use_attention(workload: Workload) -> None:
    """Let all models of the process compute the workload's attention: they look it up in their module at every call.

    A model of the user's may call torch's, or that of ``cs336_basics``.
    """
    if workload.is_ours and not workload.keeps_scores:  # The attention that keeps them is the model's own.
        _require_replaceable_attention()
    cs336_basics.model.scaled_dot_product_attention = attention_function(workload.attention)
    if workload.is_ours:
        # An earlier workload of this process may have replaced it for a user's model.
        F.scaled_dot_product_attention = user_models.torch_attention
    else:
        user_models.replace_attention(workload.attention)


@functools.cache
def _require_replaceable_attention() -> None:
    """Refuse another attention where the model of somebody's ``cs336_basics`` calls its own: tried on four tokens."""
    package = course_package()
    if package.is_ours:
        return
    attention = mock.Mock(wraps=_model_attention)
    size = choose_size("tiny", d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=16, context=4)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), attention_replaced(attention), torch.no_grad():
        _plain_model(Workload(size))(torch.zeros(1, size.context, dtype=torch.int64))
    if not attention.called:
        raise CapabilityError(
            f"the cs336_basics of {package.name} computes attention without its "
            "cs336_basics.model.scaled_dot_product_attention, so that no other can take its place; choose --attention "
            "reference, or call that by its name in the module model"
        )


def attention_replaced(attention: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """Let all models of the process compute attention by this function, of the model's signature, within this."""
    return mock.patch.object(cs336_basics.model, "scaled_dot_product_attention", attention)


def causal_attention(name: str) -> CausalAttention | None:
    """Return causal attention of query, key, value by its name; None for the model's own, which looks at the mask."""
    return None if ATTENTION[name].keeps_scores else _with_causal_mask(attention_function(name))


# Attention functions other than the model's look only at whether there is a mask, and take it for the causal one.
_ANY_MASK = torch.ones((), dtype=torch.bool)


# The same function for all models, so that code compiled for one model serves the others.
@functools.cache
def _with_causal_mask(compute: Callable[..., Tensor]) -> CausalAttention:
    return lambda query, key, value: compute(query, key, value, _ANY_MASK)


def require_kernels(option: str) -> None:
    """Refuse an option where our kernels cannot be loaded: Triton is not installed, or cannot be imported."""
    if (reason := why_no_triton()) is not None:
        raise CapabilityError(f"{option} needs {reason}")


def build_model(
    workload: Workload,
    device: torch.device,
    attention: CausalAttention | None = None,
    compile_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build the workload's model on ``device``: initialized from its seed, compiled as it says.

    Attention is replaced for the whole process, see :func:`use_attention`.

    Args:
        attention: in place of the workload's, of our model.
        compile_options: options of torch.compile for blocks.
    """
    use_attention(workload)
    if attention is not None:
        # The model's only mask is the causal one.
        cs336_basics.model.scaled_dot_product_attention = lambda Q, K, V, mask=None: attention(Q, K, V)
    torch.manual_seed(workload.seed)
    with device:
        model = _plain_model(workload)
    if any(tensor.device.type != device.type for tensor in (*model.parameters(), *model.buffers())):
        model = model.to(device)  # A user's function may have built parts of its model on another device.
    if workload.fused_kernels:
        require_kernels(f"--kernels {workload.kernels}")
        fused = import_module(FUSED_KERNELS_MODULE).fuse(
            model, attention or causal_attention(workload.attention), workload.fused_kernels
        )
        if workload.splits_weights:
            fused.stack_weights(torch.bfloat16)  # The optimizer, made later, keeps the bits of fp32 that bf16 lacks.
    if workload.is_compiled_whole:
        model.compile(dynamic=False)
    elif workload.compiles_blocks:
        blocks = blocks_of(workload, model)
        if not blocks:
            raise CapabilityError(
                f"compile block: {workload.user.model} has no list of blocks; choose model, or name them by --blocks"
            )
        for block in blocks.values():
            block.compile(dynamic=False, options=None if compile_options is None else dict(compile_options))
    return model


def _plain_model(workload: Workload) -> nn.Module:
    """Build the user's model or ours, on the present default device, as its own code says."""
    size = workload.size
    if workload.user.model is not None:
        return user_models.build(workload.user.model, size)
    settings = {name: getattr(size, name) for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff")}
    return cs336_basics.model.BasicsTransformerLM(**settings, context_length=size.context, rope_theta=10_000.0)


def blocks_of(workload: Workload, model: nn.Module) -> dict[str, nn.Module]:
    """Return the Transformer blocks of a workload's model by their names in it; a user's model may have none."""
    layers = getattr(model, "layers", None)
    if workload.is_ours and isinstance(layers, nn.ModuleList):
        return {f"layers.{number}": block for number, block in enumerate(layers)}
    # A user's model, or one of a cs336_basics of the user's, which may keep its blocks elsewhere.
    return user_models.find_blocks(model, workload.user.blocks)


def build_by_layers(workload: Workload, device: torch.device) -> nn.Module:
    """Build the workload's model, not compiled, with the first values that sharded strategies give it.

    They initialize one layer at a time, because no rank ever holds all weights. This gives our model the values that
    :func:`build_model` gives it. A user's model whose layers cannot be initialized alone is built whole, on the CPU.
    """
    workload = replace(workload, compile="off")
    if workload.is_ours:
        return build_model(workload, device)
    initialize = initializer_of(workload)
    if initialize is None:
        return build_model(workload, torch.device("cpu")).to(device)
    model = build_model(workload, torch.device("meta"))
    torch.manual_seed(workload.seed)
    return user_models.fill(model, initialize, device)


def initializer_of(workload: Workload) -> Callable[[nn.Module], None] | None:
    """Return the initializer of one layer; None if a user's model has none."""
    if workload.user.model is None:
        return initialize_layer
    initialize, _ = user_models.layer_initializer(workload.user.model, workload.size)
    return initialize


def build_compared_model(workload: Workload, device: torch.device) -> nn.Module:
    """Build the model that a workload's training is compared with, see :func:`plainly_trained`.

    Where the workload keeps weights in bf16, this model starts from the same, and keeps them in fp32.
    """
    model = build_model(plainly_trained(workload), device)
    if workload.splits_weights:
        for parameter in model.get_submodule("layers").parameters():
            if parameter.dim() > 1:  # Matrices of blocks, which alone are kept in bf16.
                parameter.data = parameter.data.bfloat16().float()
    return model


def keeping_input(run: Callable[..., Any], *inputs: Any, keeps_random: bool = False, **named: Any) -> Any:
    """Return ``run(*inputs)``, of which only the inputs are kept: the backward pass runs it again for what it saved.

    Args:
        keeps_random: draw the same random numbers again; our model draws none.
    """
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=keeps_random, **named)


@torch.no_grad()
def initialize_layer(layer: nn.Module) -> None:
    """Give a layer that was built on the meta device, and now has memory, the values that its constructor would draw.

    Called for all of ``model.modules()`` in order, after ``torch.manual_seed`` of the workload's seed, it draws the
    numbers that :func:`build_model` draws. Layers without weights are left alone.
    """
    model = cs336_basics.model
    if type(layer) in (model.Linear, model.Embedding, model.RMSNorm):
        weight = layer.get_parameter("weight")
        # Linear takes the dimensions of its weight, (out, in), as (in, out).
        dimensions = reversed(weight.shape) if type(layer) is model.Linear else weight.shape
        with weight.device:
            weight.copy_(type(layer)(*dimensions).get_parameter("weight"))


def make_batch(workload: Workload, device: torch.device, number: int = 0) -> tuple[Any, Any]:
    """Make inputs and targets of the workload's seed: token ids and next ones, each (batch_size, context), int64.

    Or whatever the user's function returns, whose tensors have the batch first.

    Args:
        number: 0 is the batch that is timed; others are different ones.
    """
    size = workload.size
    if device.type == "meta":
        batch = make_batch(workload, torch.device("cpu"), number)  # torch draws no random numbers on the meta device.
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
    if workload.user.batch is not None:
        return user_models.make_user_batch(workload.user.batch, size, workload.seed + number, device)
    seeded = torch.Generator(device).manual_seed(workload.seed + number)
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.context + 1), generator=seeded, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plainly_trained(workload: Workload) -> Workload:
    """Return the reference of a workload: no CUDA graphs, and in place of our kernels PyTorch's, not compiled."""
    plain = replace(workload, cuda_graph="off")
    if workload.attention_record.is_ours and workload.is_ours:  # For a user's model, command flash checks it.
        plain = replace(plain, attention="sdpa", compile="off")  # With scores in memory a long context would not fit.
    if workload.optimizer_record.is_ours:
        # torch's, not cs336_basics': a user's may add eps before it corrects the bias, and checks choose a large eps.
        plain = replace(plain, optimizer="fused", state_dtype="fp32", update="step", compile="off")
    if workload.fused_kernels:
        plain = replace(plain, kernels="reference", compile="off")
    return plain


# torch would import its compiler at the first call of these methods, to have them left out of it: 1.4 of the 3.6 CPU
# seconds in which a process starts and trains a tiny model.
for _method in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    importing_no_compiler(getattr(torch.optim.Optimizer, _method))

_LEARNING_RATE = 1e-3  # torch's default.


def choose_optimizer(workload: Workload) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the workload's class of optimizer and its settings; for CUDA graphs it counts steps on the GPU if it can.

    Raises:
        CapabilityError: it is ours, and Triton is not installed; or it is the user's, with groups of parameters.
    """
    if is_user_code(workload.optimizer):
        return user_models.optimizer_class(workload.optimizer)
    record = workload.optimizer_record
    if record.is_ours:
        require_kernels(f"--optimizer {workload.optimizer}")
        return import_named(record.name), {"state_dtype": workload.state_dtype}
    optimizer_class, settings = import_named(record.name), record.settings
    parameters = inspect.signature(optimizer_class).parameters
    if workload.uses_graphs and "capturable" in parameters:
        settings = {**settings, "capturable": True}
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        settings = {**settings, "lr": _LEARNING_RATE}  # A cs336_basics of the user's need not have a default.
    return optimizer_class, settings


def build_optimizer(workload: Workload, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """Build the workload's optimizer of these parameters; ``settings`` replace those of the workload's choice."""
    if is_user_code(workload.optimizer):
        return user_models.make_optimizer(workload.optimizer, parameters, settings)
    optimizer_class, defaults = choose_optimizer(workload)
    return optimizer_class(parameters, **{**defaults, **settings})
