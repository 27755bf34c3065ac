"""Cuts the weights of a model over tensor parallel ranks, and puts them together again."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import cut_dimension, heads_refusal, own_part, own_rows
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import all_gather_single
from cs336sys.parallel.gradient_slices import WAS_CUT, mark_slice
from cs336sys.parallel.rank_consistency import broadcast_from_first

# A function of the user that fills the tensors of one module on the meta device; None if there is none.
Initialize = Callable[[nn.Module], None] | None


def require_shareable(model: nn.Module, world_size: int) -> None:
    """Refuse a model that tensor parallel ranks cannot share.

    Raises:
        UsageError: a module or parameter of ``cs336_basics`` is missing, there is another, a parameter has hooks, or
            ranks outnumber heads, tokens or inner features, or do not divide the heads.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        cut_dimension(name)  # It refuses names that it does not know.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"{name} has a hook, which would be lost: register it on the parameter of the wrapped module, where it "
                "sees the gradient of this rank's part"
            )
    for name in ("token_embeddings", "layers", "ln_final", "lm_head"):
        _require(model, name, "the model")
    for number, block in enumerate(model.get_submodule("layers").children()):
        for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ffn.w1", "ffn.w2", "ffn.w3"):
            _require(block, name, f"layers.{number}")
        attention: Any = block.get_submodule("attn")
        if not isinstance(getattr(attention, "num_heads", None), int):
            raise UsageError(
                f"layers.{number}.attn ({type(attention).__name__}) has no num_heads, by which it splits projections "
                "into heads: name that attribute so"
            )
        rows = {name: len(attention.get_submodule(name).weight) for name in ("q_proj", "k_proj", "v_proj")}
        if len(set(rows.values())) > 1:
            raise UsageError(
                f"layers.{number}.attn: its projections have {rows} rows: tensor parallel ranks share heads that are "
                "as many for queries, keys and values"
            )
        refusal = heads_refusal(attention.num_heads, world_size)
        if refusal is not None:
            raise UsageError(f"layers.{number}.attn: {refusal}")
        _require_enough(len(block.get_submodule("ffn.w1").get_parameter("weight")), "inner features", world_size)
    _require_enough(len(model.get_submodule("token_embeddings").get_parameter("weight")), "tokens", world_size)


def _require(module: nn.Module, name: str, where: str) -> None:
    """Refuse a module (``where`` in the model) without the layer of this name, or whose layer has no weight."""
    try:
        layer = module.get_submodule(name)
    except AttributeError as error:
        raise UsageError(f"{where} ({type(module).__name__}) has no module {name}, which cs336_basics has") from error
    if name != "layers" and not isinstance(getattr(layer, "weight", None), Tensor):
        raise UsageError(f"{where}.{name} ({type(layer).__name__}) has no weight")


def _require_enough(length: int, contents: str, world_size: int) -> None:
    if length < world_size:
        raise UsageError(
            f"{world_size} tensor parallel ranks cannot share {length} {contents}: choose at most {length}"
        )


def cut_weights(
    model: nn.Module, group: dist.ProcessGroup, initialize: Initialize, device: torch.device | None
) -> dict[str, torch.Size]:
    """Replace every parameter by this rank's part of the first rank's, layer by layer; tied weights stay tied.

    Layers on the meta device get memory on ``device`` and values by ``initialize`` first, whole, so that never more
    than one layer is whole. Buffers become those of the first rank. Attributes of parameters stay with them.

    Returns:
        the shapes of the whole parameters by their names, tied ones under each of theirs.
    """
    shapes: dict[str, torch.Size] = {}
    # By the whole parameter and by its part: a module may come twice, and a tied parameter in several layers.
    parts: dict[nn.Parameter, tuple[nn.Parameter, torch.Size]] = {}
    for module_name, layer in model.named_modules(remove_duplicate=False):
        tensors = [*layer._parameters.values(), *layer._buffers.values()]
        # Read before to_empty(), which makes new parameters without them.
        attributes = {name: vars(whole).copy() for name, whole in layer._parameters.items() if whole is not None}
        if initialize is not None and any(tensor is not None and tensor.is_meta for tensor in tensors):
            layer.to_empty(device=device, recurse=False)
            initialize(layer)
        for attribute, whole in layer._parameters.items():
            if whole is None:
                continue
            name = f"{module_name}.{attribute}"
            if whole not in parts:
                broadcast_from_first([whole], group)
                part_tensor = part_of(whole.detach(), name, group.rank(), group.size())
                part = nn.Parameter(part_tensor, requires_grad=whole.requires_grad)
                vars(part).update(attributes[attribute] | {WAS_CUT: False})
                parts[whole] = parts[part] = part, whole.shape
                setattr(whole, WAS_CUT, whole.requires_grad)
            layer._parameters[attribute], shapes[name] = parts[whole]
    broadcast_from_first(list(model.buffers()), group)
    return shapes


def mark_parts(model: nn.Module, group: dist.ProcessGroup, shapes: Mapping[str, torch.Size]) -> None:
    """Mark parameters that are this rank's part of a whole one, so that functions for whole ones refuse them."""
    size = group.size()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dimension = cut_dimension(name)
        if dimension is not None:
            shape = tuple(shapes[name])
            length = shape[dimension]
            # As torch.chunk cuts (own_rows()), unless that leaves nothing for the last rank: then its part differs.
            is_chunked = own_part(length, size - 1, size) == own_rows(length, size - 1, size)
            mark_slice(parameter, dist.get_process_group_ranks(group), (shape, dimension) if is_chunked else None)


def require_parts(model: nn.Module, shapes: Mapping[str, torch.Size], rank: int, world_size: int) -> None:
    """Refuse a model that does not hold this rank's part of each parameter, under the names that these had."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in (*parameters, *shapes):
        if name not in parameters or name not in shapes:
            raise UsageError(
                f"{name} was {'added' if name in parameters else 'removed'} after ranks had shared out the module: "
                "change the module before it is wrapped"
            )
        expected = shape_of_part(shapes[name], name, rank, world_size)
        if list(parameters[name].shape) != expected:
            raise UsageError(
                f"{name} has the shape {tuple(parameters[name].shape)}, and this rank's part {tuple(expected)}"
            )


def shape_of_part(shape: torch.Size, name: str, rank: int, world_size: int) -> list[int]:
    """Return the shape of a rank's part of the parameter of this name, which has ``shape`` as a whole."""
    part_shape, dimension = list(shape), cut_dimension(name)
    if dimension is not None:
        part_shape[dimension] = len(own_part(part_shape[dimension], rank, world_size))
    return part_shape


def part_of(whole: Tensor, name: str, rank: int, world_size: int) -> Tensor:
    """Return a rank's part of a tensor that is cut as the parameter of this name; itself if every rank has it whole."""
    dimension = cut_dimension(name)
    if dimension is None:
        return whole
    indices = own_part(whole.size(dimension), rank, world_size)
    return whole.narrow(dimension, indices.start, len(indices)).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def whole_tensor(part: Tensor, name: str, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """Return a whole copy of a tensor cut as the parameter of this name. Every rank of the group calls it."""
    dimension = cut_dimension(name)
    if dimension is None:
        return part.clone()
    sizes = [len(own_part(shape[dimension], rank, group.size())) for rank in range(group.size())]
    # All-gathers need parts of equal size along the first dimension.
    padded = part.new_zeros(max(sizes), *part.movedim(dimension, 0).shape[1:])
    padded[: part.size(dimension)] = part.movedim(dimension, 0)
    gathered = padded.new_empty(len(sizes), *padded.shape)
    all_gather_single(gathered.flatten(0, 1), padded, group=group)
    parts = [padded_part[:size] for padded_part, size in zip(gathered, sizes, strict=True)]
    return torch.cat(parts).movedim(0, dimension).contiguous()
