"""The cases: what a program does to a model and in its steps, the same in one process and on ranks."""

import contextlib
import functools
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from cs336sys.errors import CapabilityError
from cs336sys.settings.verification import VerifiedWorkload
from cs336sys.training import user_models
from cs336sys.training.model import blocks_of, build_model, make_batch

# A power of two, so that scaling rounds nothing.
LOSS_SCALE = 1024.0


@dataclass(frozen=True)
class Program:
    """Actions of a case.

    Attributes:
        steps: each on a batch of its own.
        micro: micro-batches of a step.
        no_sync: all but the last micro-batch of a step are run under ``no_sync``.
        clip: gradients are clipped to half of the first step's norm.
        scale: the loss is scaled, and infinite on one rank in the second step, which every rank has to skip.
        uneven: the last rank has one sequence fewer.
        unused: a layer's parameters are unused on the last rank.
        frozen, tied, checkpoint, compile: done to the model before it is wrapped.
        evaluate: an evaluation after every step but the last.
        late: the rank that is late before each of its collectives; None: none is.
        start: ranks other than the first begin with other weights.
        resume: after two steps everything is saved and loaded into new objects: ``own`` state dicts, ``dcp``, or by
            another number of ``ranks``.
    """

    steps: int = 3
    micro: int = 1
    no_sync: bool = False
    clip: bool = False
    scale: bool = False
    uneven: bool = False
    unused: bool = False
    frozen: bool = False
    tied: bool = False
    evaluate: bool = False
    checkpoint: bool = False
    compile: bool = False
    late: int | None = None
    start: bool = False
    resume: str | None = None

    @property
    def trained_alone(self) -> "Program":
        """Return the program of one process: the same training without changes that must not matter."""
        return replace(
            self, micro=1, no_sync=False, checkpoint=False, compile=False, late=None, start=False, resume=None
        )


PROGRAMS = {
    "step": Program(),
    "accumulation": Program(micro=2),
    "no-sync": Program(micro=2, no_sync=True),
    "clipping": Program(clip=True),
    "scaling": Program(scale=True),
    "uneven": Program(uneven=True),
    "unused": Program(unused=True),
    "frozen": Program(frozen=True),
    "tied": Program(tied=True),
    "evaluation": Program(evaluate=True),
    "checkpoint": Program(checkpoint=True),
    "compile": Program(compile=True, steps=2),
    "late": Program(late=0, steps=2),
    "start": Program(start=True),
    "dropout": Program(steps=1),
    "groups": Program(steps=0),
    "order": Program(steps=2),
    "save": Program(resume="own"),
    "save-dcp": Program(resume="dcp"),
    "save-ranks": Program(resume="ranks"),
    "run": Program(steps=20),
}

# Programs of which one rank alone meets a condition, and what that is.
CONDITIONS = {
    "no condition": Program(steps=2),
    "a parameter that one rank does not use": Program(steps=2, unused=True),
    "an overflow on one rank": Program(steps=2, scale=True),
    "fewer sequences on one rank": Program(steps=2, uneven=True),
}

# The step in which a program that scales has an infinite loss on one rank, which every rank has to skip; from 1.
OVERFLOWN_STEP = 2

# Steps before everything is saved.
SAVED_AFTER = 2


@dataclass
class Subject:
    """A model as a case trains it.

    Attributes:
        tied: the name of the parameter that two layers share; None without one.
        is_off: whether the parameters of the program's unused layer are unused now.
    """

    model: nn.Module
    tied: str | None
    is_off: bool = False


def build_subject(
    workload: VerifiedWorkload, program: Program, device: torch.device, dtype: torch.dtype, seed_shift: int = 0
) -> Subject:
    """Build the model of a case, in ``dtype`` with dropout off unless the case is about it.

    Args:
        seed_shift: added to the workload's seed.

    Raises:
        CapabilityError: the case does not apply to this model.
    """
    training = replace(workload.training, seed=workload.training.seed + seed_shift)
    model = build_model(training, device).to(dtype).train()
    if workload.case != "dropout":
        _drop_nothing(model)
    tied = _shared_name(model)
    subject = Subject(model, _tie(model) if program.tied and tied is None else tied)
    if program.frozen:
        _freeze(model)
    if program.unused:
        _make_switchable(workload, subject, dtype)
    if program.checkpoint or program.compile:
        blocks = blocks_of(training, model)
        if not blocks:
            raise CapabilityError("the model has no list of blocks; name them by --blocks")
        for block in blocks.values():
            if program.checkpoint:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            else:
                # The wrap is what is asked about, not the code that a compiler writes.
                block.compile(backend="aot_eager" if device.type == "cpu" else "inductor", dynamic=False)
    return subject


def _drop_nothing(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("p", "dropout", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _shared_name(model: nn.Module) -> str | None:
    """The name of a parameter that several modules hold."""
    every = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return next((name for name, parameter in model.named_parameters() if every[id(parameter)] > 1), None)


def _tie(model: nn.Module) -> str:
    weights = {name: module._parameters.get("weight") for name, module in model.named_modules()}
    holders = [name for name, weight in weights.items() if weight is not None and weight.dim() == 2]
    embeddings = [name for name in holders if "embed" in type(model.get_submodule(name)).__name__.lower()]
    for name, other in itertools.product(embeddings, reversed(holders)):
        weight, replaced = weights[name], weights[other]
        if other != name and replaced.shape == weight.shape and "embed" not in other.lower():
            model.get_submodule(other).weight = weight
            return f"{name}.weight"
    raise CapabilityError("no weight of the model has the shape of an embedding to be tied to")


def _freeze(model: nn.Module) -> None:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    if len(matrices) < 3:
        raise CapabilityError("the model has fewer than three matrices, so none is frozen")
    matrices[len(matrices) // 2].requires_grad_(False)


def _make_switchable(workload: VerifiedWorkload, subject: Subject, dtype: torch.dtype) -> None:
    """Let a layer whose input needs no gradient be computed without any while the subject is off."""
    if workload.data_ranks == 1:
        raise CapabilityError("the ranks share each sequence, so a parameter that one of them uses all do")
    model, independent_layers = subject.model, list[nn.Module]()

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.requires_grad for tensor in tensors):
            independent_layers.append(module)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                handle = module.register_forward_pre_hook(look, with_kwargs=True)
                hooks.callback(handle.remove)
        inputs, _ = batch_of(workload, next(model.parameters()).device, dtype, 0)
        user_models.call_model(model, inputs)
    if not independent_layers:
        raise CapabilityError("every layer with parameters depends on others, so none can be unused by itself")
    layer = independent_layers[0]
    forward = layer.forward

    def switchable(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad() if subject.is_off else contextlib.nullcontext():
            return forward(*args, **kwargs)

    layer.forward = switchable


def batch_of(workload: VerifiedWorkload, device: torch.device, dtype: torch.dtype, step: int) -> tuple[Any, Any]:
    """The batch of all ranks in a step, its floating point tensors in ``dtype``."""
    batch = make_batch(workload.training, device, step)
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


@dataclass(frozen=True)
class Share:
    """A part of a batch.

    Attributes:
        data: which of the ranks that share the batch it is for, and ``micro`` which micro-batch of its.
        weight: its sequences over all of the batch.
        sequences: which of the batch.
    """

    data: int
    micro: int
    weight: float
    sequences: slice

    def of(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        return tree_map_only(Tensor, lambda tensor: tensor[self.sequences], batch)


def shares_of(workload: VerifiedWorkload, program: Program, micro: int) -> list[Share]:
    """Cut a batch into micro-batches of data ranks, in the order of the ranks."""
    size, ranks = workload.training.size.batch_size, workload.data_ranks
    total = size - 1 if program.uneven else size
    share_size = size // ranks // micro
    shares = []
    for index in range(ranks * micro):
        first, last = index * share_size, min((index + 1) * share_size, total)
        shares.append(Share(*divmod(index, micro), (last - first) / total, slice(first, last)))
    return shares


def loss_of(workload: VerifiedWorkload, output: Any, targets: Any) -> Tensor:
    """The mean loss of what the model returned.

    Raises:
        UserCodeError: it is no scalar, or the output holds no logits.
    """
    user, size = workload.training.user, workload.training.size
    if user.loss is not None:
        loss = user_models.load(user.loss)(output, targets)
        return user_models.scalar_loss(loss, user.loss, with_gradients=torch.is_grad_enabled())
    logits = getattr(output, "logits", output)
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    logits = user_models.token_logits(logits, targets, user.model or workload.wrap, size.vocab_size)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
