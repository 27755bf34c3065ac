"""Models that are built without memory, and get their first values one layer at a time."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from cs336sys.experiments.user_models.loading import build, copied_code
from cs336sys.sizes import ModelSize

Initialize = Callable[[nn.Module], None]


def layer_initializer(reference: str, size: ModelSize) -> Initialize | None:
    """What fills the parameters and buffers of one layer of a user's model, its children aside; None if nothing does.

    Layers fill themselves by ``reset_parameters``, those of Hugging Face by the model's ``_init_weights``. Each class
    is tried: a layer of it, filled with NaN, must have none afterwards.
    """
    try:
        with torch.device("meta"), copied_code():
            model = build(reference, size)
    except Exception:
        # Whatever the reason is, it will be told when the model is built with memory, if it is one there.
        return None
    if any(isinstance(value, Tensor) and value.is_meta for part in model.modules() for value in vars(part).values()):
        # Tensors that are neither parameters nor buffers stay where they are.
        return None
    init_weights = getattr(model, "_init_weights", None)

    @torch.no_grad()
    def initialize(layer: nn.Module) -> None:
        reset = getattr(layer, "reset_parameters", None)
        if callable(init_weights):
            init_weights(layer)
        elif callable(reset):
            reset()

    smallest: dict[type[nn.Module], nn.Module] = {}
    for layer in layers_without_memory(model):
        known = smallest.get(type(layer))
        if known is None or _elements(layer) < _elements(known):
            smallest[type(layer)] = layer
    return initialize if all(_is_filled(layer, initialize) for layer in smallest.values()) else None


def layers_without_memory(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with a parameter or buffer of their own on the meta device, in the order of ``model.modules()``."""
    for module in model.modules():
        if any(tensor.is_meta for tensor in _own_tensors(module)):
            yield module


def fill(model: nn.Module, initialize: Initialize, device: torch.device) -> nn.Module:
    """Give a model on the meta device memory and values, layer by layer; weights that are tied stay so."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for layer in list(layers_without_memory(model)):
        before = dict(layer._parameters)
        layer.to_empty(device=device, recurse=False)
        initialize(layer)
        for name, parameter in before.items():
            if parameter is not None:
                own = layer._parameters[name]
                assert own is not None
                layer._parameters[name] = filled.setdefault(parameter, own)
    return model


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _elements(layer: nn.Module) -> int:
    return sum(tensor.numel() for tensor in _own_tensors(layer))


def _is_filled(layer: nn.Module, initialize: Initialize) -> bool:
    # Without the children: the copy is of this layer alone.
    own = copy.copy(layer)
    own._modules = {}
    own._parameters, own._buffers = dict(layer._parameters), dict(layer._buffers)
    own.to_empty(device="cpu", recurse=False)
    tensors = [tensor for tensor in _own_tensors(own) if tensor.is_floating_point()]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(torch.nan)
    with torch.random.fork_rng(devices=[]):
        try:
            initialize(own)
        except Exception:
            return False
    return not any(tensor.isnan().any() for tensor in tensors)
