"""The model, batches and loss of a program, the same in one process and on ranks."""

import contextlib
import functools
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cs336sys.errors import CapabilityError
from cs336sys.parallel.fsdp.calls import cast_floating
from cs336sys.settings.verification import Program, VerifiedWorkload
from cs336sys.training import user_models
from cs336sys.training.model import blocks_of, build_model, make_batch


@dataclass
class Subject:
    """A model as a case trains it."""

    model: nn.Module
    tied: str | None  # The name of the parameter that two layers share.
    is_off: bool = False  # Whether the parameters of the program's unused layer are unused now.


def build_subject(
    workload: VerifiedWorkload, program: Program, device: torch.device, dtype: torch.dtype, seed_shift: int = 0
) -> Subject:
    """Build the model of a case, in ``dtype`` with dropout off unless the case is about it, from a shifted seed.

    Raises:
        CapabilityError: the case does not apply to this model.
    """
    training = replace(workload.training, seed=workload.training.seed + seed_shift)
    model = build_model(training, device).to(dtype).train()
    if not program.masks:
        for module in model.modules():
            for name in ("p", "dropout", "dropout_p"):  # What layers call their probability of dropout.
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    named = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for _, parameter in named)
    tied = next((name for name, parameter in named if uses[id(parameter)] > 1), None)  # None: the model ties nothing.
    subject = Subject(model, _tie(model) if program.tied and tied is None else tied)
    if program.frozen:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
        if len(matrices) < 3:
            raise CapabilityError("the model has fewer than three matrices, so none is frozen")
        matrices[len(matrices) // 2].requires_grad_(False)  # One in the middle: others on both sides are trained.
    if program.unused:
        _make_switchable(workload, subject, dtype)
    blocks = blocks_of(training, model) if program.checkpoints or program.compiles else {}
    if not blocks and (program.checkpoints or program.compiles):
        raise CapabilityError("the model has no list of blocks; name them by --blocks")
    for block in blocks.values():
        if program.checkpoints:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        else:
            # The wrap is tested, not the compiled code: on a CPU blocks are only traced, which needs no C++ compiler.
            block.compile(backend="aot_eager" if device.type == "cpu" else "inductor", dynamic=False)
    return subject


def _tie(model: nn.Module) -> str:
    """Let the last layer that can share an embedding's weight do so, and return the weight's name."""
    weights = {name: module._parameters.get("weight") for name, module in model.named_modules()}
    matrices = {name: weight for name, weight in weights.items() if weight is not None and weight.dim() == 2}
    embeddings = [name for name in matrices if "embed" in type(model.get_submodule(name)).__name__.lower()]
    for embedding, other in itertools.product(embeddings, reversed(matrices)):
        is_embedding = other == embedding or "embed" in other.lower()
        if matrices[other].shape == matrices[embedding].shape and not is_embedding:
            model.get_submodule(other).weight = matrices[embedding]
            return f"{embedding}.weight"
    raise CapabilityError("no weight of the model has the shape of an embedding to be tied to")


def _make_switchable(workload: VerifiedWorkload, subject: Subject, dtype: torch.dtype) -> None:
    """Let the first layer whose input needs no gradient, as an embedding, compute without while the subject is off."""
    if workload.data_ranks == 1:
        raise CapabilityError("the ranks share each sequence, so a parameter that one of them uses all do")
    model, independent_layers = subject.model, list[nn.Module]()

    def note_independent(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.requires_grad for tensor in tensors):
            independent_layers.append(module)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_pre_hook(note_independent, with_kwargs=True))
        inputs, _ = batch_of(workload, next(model.parameters()).device, dtype, step=0)
        user_models.call_model(model, inputs)
    if not independent_layers:
        raise CapabilityError("every layer with parameters depends on others, so none can be unused by itself")
    layer = independent_layers[0]
    forward = layer.forward

    # Without gradients the layer's parameters are unused. No other layer loses its own: none computes its input.
    def switchable_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad() if subject.is_off else contextlib.nullcontext():
            return forward(*args, **kwargs)

    layer.forward = switchable_forward


def batch_of(workload: VerifiedWorkload, device: torch.device, dtype: torch.dtype, step: int) -> tuple[Any, Any]:
    """Return inputs and targets of all ranks in a step, floating point tensors in ``dtype``."""
    return cast_floating(make_batch(workload.training, device, step), dtype)


def loss_of(workload: VerifiedWorkload, output: Any, targets: Any) -> Tensor:
    """Return the mean loss of what the model returned.

    Raises:
        UserCodeError: it is no scalar, or the output holds no logits.
    """
    user, size = workload.training.user, workload.training.size
    if user.loss is not None:
        loss = user_models.load(user.loss)(output, targets)
        return user_models.scalar_loss(loss, user.loss, with_gradients=torch.is_grad_enabled())
    logits = getattr(output, "logits", output)
    if hasattr(logits, "full_tensor"):  # A DTensor, as a user's wrap may return.
        logits = logits.full_tensor()
    logits = user_models.token_logits(logits, targets, user.model or workload.wrap, size.vocab_size)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
