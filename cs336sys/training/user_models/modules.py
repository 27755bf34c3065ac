"""A model's blocks, tensors that look like parameters, and models that get their first values one layer at a time."""

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336sys.errors import UserCodeError
from cs336sys.settings.sizes import ModelSize
from cs336sys.training.user_models.loading import build, copied_code


def find_blocks(model: nn.Module, patterns: str | None) -> dict[str, nn.Module]:
    """Return the model's blocks by name, in the order of its modules; there may be none.

    Without ``patterns`` take the most numerous class of modules that fill an ``nn.ModuleList`` or ``nn.Sequential``;
    lists inside a block do not count.

    Args:
        patterns: names, separated by commas; a star stands for anything between two dots, as in ``encoder.layers.*``.
    """
    if patterns is not None:
        named, pattern_list = dict(model.named_modules()), patterns.split(",")
        matching = {name: named[name] for name in named if any(_matches_pattern(name, part) for part in pattern_list)}
        if not matching:
            lists = {name.rpartition(".")[0] for name in named if name.rpartition(".")[2].isdigit()}
            listed = ", ".join(f"'{name}.*'" for name in sorted(lists)) or "none"
            raise UserCodeError(f"--blocks '{patterns}': no module has such a name; its lists are {listed}")
        return matching
    by_class: dict[type[nn.Module], dict[str, nn.Module]] = {}
    _collect_blocks(model, name="", by_class=by_class)
    return max(by_class.values(), key=len, default={})


def _matches_pattern(name: str, pattern: str) -> bool:
    parts, pattern_parts = name.split("."), pattern.strip().split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch.fnmatchcase, parts, pattern_parts))


def _collect_blocks(module: nn.Module, name: str, by_class: dict[type[nn.Module], dict[str, nn.Module]]) -> None:
    """Add to ``by_class`` the modules in each list whose members are of one class and have children."""
    children = {f"{name}.{child_name}" if name else child_name: child for child_name, child in module.named_children()}
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = {type(child) for child in children.values()}
    if is_list and len(classes) == 1:
        (block_class,) = classes
        # Layers of torch's own in a row, without children, are what blocks are made of.
        have_children = any(list(child.children()) for child in children.values())
        if have_children and not issubclass(block_class, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            by_class.setdefault(block_class, {}).update(children)
            return  # Lists inside a block do not count.
    for child_name, child in children.items():
        _collect_blocks(child, child_name, by_class)


_MOST_NAMES = 3  # In a warning.


def hidden_parameters(model: nn.Module) -> list[str]:
    """Name tensors that require gradients in attributes, lists and dictionaries, and in modules in these."""
    registered = {id(parameter) for parameter in model.parameters()}
    hidden: dict[int, str] = {}
    visited = {id(part) for part in model.modules()}
    for name, part in model.named_modules():
        for attribute, value in vars(part).items():
            # These hold what is registered.
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for where, tensor in _tensors(value, f"{name}.{attribute}".removeprefix("."), visited):
                    if id(tensor) not in registered:
                        hidden.setdefault(id(tensor), where)
    return list(hidden.values())


def hidden_warnings(reference: str, names: list[str]) -> list[str]:
    """Return a note where :func:`hidden_parameters` has named some, as a list."""
    if not names:
        return []
    listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if names[_MOST_NAMES:] else "")
    return [
        f"warning: {reference}: {len(names)} tensors that require gradients ({listed}) are not among its parameters(), "
        "so nothing trains or counts them: keep modules in nn.ModuleList, tensors as nn.Parameter"
    ]


def _tensors(value: Any, name: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained tensors in an attribute's value by name, outside of objects with ``visited`` ids."""
    if isinstance(value, Tensor):
        # A tensor that was computed is no leaf.
        if value.requires_grad and value.is_leaf:
            yield name, value
        return
    if id(value) in visited or not isinstance(value, list | tuple | dict | set | nn.Module):
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        for parameter_name, parameter in value.named_parameters():
            yield f"{name}.{parameter_name}", parameter
        return
    members: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in members:
        yield from _tensors(member, f"{name}.{key}", visited)


Initialize = Callable[[nn.Module], None]

# Copies that are built both ways have at most so many elements, and so many layers, heads, words and positions.
_MOST_ELEMENTS = 50_000_000
_LAYERS, _HEADS, _WORDS, _POSITIONS = 2, 4, 512, 64

# Each byte of memory before a layer is filled, by seed: what nothing fills then differs from seed to seed. 255: NaN.
_POISON = (255, 0)

# Two samples differ if chance would make them differ so much once in a million times: by the largest distance of their
# distributions (Kolmogorov and Smirnov), and by mean and log variance in standard deviations.
_LARGEST_DISTANCE = 2.7
_MOST_DEVIATIONS = 5.0


@functools.lru_cache(maxsize=16)
def layer_initializer(reference: str, size: ModelSize) -> tuple[Initialize | None, str]:
    """Return what fills one layer's parameters and buffers, its children aside; or None, and why nothing does.

    Layers fill themselves by ``reset_parameters``, those of Hugging Face by the model's ``_init_weights``. What a
    constructor does besides would be lost, so a copy at a tiny size is built both ways: all buffers, all that is the
    same from seed to seed, and the distributions of all else must be the same.
    """
    try:
        with torch.device("meta"), copied_code():
            model = build(reference, size)
    except Exception:
        # If it fails with memory, too, building it there reports the error.
        return None, "it cannot be built on the meta device"
    for name, part in model.named_modules():
        attributes = [value for key, value in vars(part).items() if key not in ("_parameters", "_buffers", "_modules")]
        if any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves(attributes)):
            return None, f"{name or 'it'} has tensors that are neither parameters nor buffers"
    if hidden := hidden_parameters(model):
        return None, f"{hidden[0]} is not among its parameters()"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return None, f"{name} has hooks, which new memory would lose"
    error: Exception | None = None
    for tiny in tiny_sizes(size):
        try:
            with copied_code(), torch.random.fork_rng(devices=[]):
                differing_tensor = _first_difference(reference, tiny)
        except Exception as raised:
            error = raised
            continue
        if differing_tensor:
            return None, f"{differing_tensor} would start otherwise"
        return _initializer(model), ""
    return None, f"no copy of a tiny size can be built to compare ({type(error).__name__})"


def tiny_sizes(size: ModelSize) -> Iterator[ModelSize]:
    """Yield sizes at which a copy of a model is built, the smallest first; some models can be built at none."""
    head = size.d_model // size.num_heads
    heads = min(_HEADS, size.num_heads)
    tiny = replace(
        size,
        num_layers=min(_LAYERS, size.num_layers),
        num_heads=heads,
        d_model=heads * head,
        d_ff=min(size.d_ff, 4 * heads * head),
        context=min(size.context, _POSITIONS),
    )
    yield replace(tiny, vocab_size=min(size.vocab_size, _WORDS))
    yield tiny  # Some models have special tokens among the last of their vocabulary.
    yield replace(size, num_layers=min(_LAYERS, size.num_layers))  # Some have a fixed number of heads.


def _initializer(model: nn.Module) -> Initialize:
    """Return what fills one layer by the model's ``_init_weights``, or else by its own ``reset_parameters``."""
    init_weights = getattr(model, "_init_weights", None)

    @torch.no_grad()
    def initialize(layer: nn.Module) -> None:
        reset = getattr(layer, "reset_parameters", None)
        if callable(init_weights):
            init_weights(layer)
        elif callable(reset):
            reset()

    return initialize


def fill(model: nn.Module, initialize: Initialize, device: torch.device, poison: int | None = None) -> nn.Module:
    """Give a model on the meta device memory, and each layer its first values; tied weights stay tied.

    Bytes of new memory are ``poison``, so that a check notices what no layer fills.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for layer in [layer for layer in model.modules() if any(tensor.is_meta for tensor in _own_tensors(layer))]:
        before = dict(layer._parameters)  # to_empty() replaces them.
        layer.to_empty(device=device, recurse=False)
        if poison is not None:
            for tensor in _own_tensors(layer):
                tensor.untyped_storage().fill_(poison)  # type: ignore[attr-defined]
        initialize(layer)
        for name, parameter in before.items():
            if parameter is not None:
                new_parameter = layer._parameters[name]
                assert new_parameter is not None
                new_parameter.__dict__.update(vars(parameter))  # Attributes that the model has put on it.
                # Layers that share a weight get the one that was filled first.
                layer._parameters[name] = filled.setdefault(parameter, new_parameter)
    return model


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _first_difference(reference: str, size: ModelSize) -> str:
    """Name a tensor that starts otherwise where the model is filled layer by layer; "" if none does."""
    whole, filled = [], []
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in build(reference, size).parameters()) > _MOST_ELEMENTS:
            raise MemoryError("a model that is large at every size")  # layer_initializer() names the type.
    for seed, poison in zip((0, 1), _POISON, strict=True):
        torch.manual_seed(seed)
        with torch.device("cpu"):
            whole.append(build(reference, size))
        with torch.device("meta"):
            model = build(reference, size)
        torch.manual_seed(seed)
        filled.append(fill(model, _initializer(model), torch.device("cpu"), poison))
    tensors = [_named_tensors(model) for model in (*whole, *filled)]
    reference_tensors = tensors[0]
    for named_tensors in tensors[1:]:
        if named_tensors.keys() != reference_tensors.keys():
            return next(iter(named_tensors.keys() ^ reference_tensors.keys()))
    for name in reference_tensors:
        if not _start_alike(*(named_tensors[name] for named_tensors in tensors)):
            return name
    # Blocks that are copies of one start the same built whole, but not filled. Neither dictionary has constant tensors.
    copies_of_whole, copies_of_filled = (_identical_tensors(_named_tensors(models[0])) for models in (whole, filled))
    return next((name for name, copies in copies_of_whole.items() if copies != copies_of_filled.get(name, copies)), "")


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


_equal = functools.partial(torch.isclose, rtol=0.0, atol=0.0, equal_nan=True)


def _start_alike(*tensors: Tensor) -> bool:
    """Return whether a tensor starts alike in two models built whole, of two seeds, and two filled by layers, of these.

    Elements that both seeds draw alike are not random, and must be equal.
    """
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
        return False
    # view_as_real takes none that is conjugated lazily.
    first, second, of_layers, of_layers_again = resolved = [tensor.resolve_conj() for tensor in tensors]
    is_fixed = _equal(first, second)
    if not (_equal(first, of_layers) & _equal(first, of_layers_again))[is_fixed].all():
        return False
    if is_fixed.all():
        return True
    drawn = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in resolved]
    if first.is_complex():
        is_fixed = is_fixed[..., None].expand_as(drawn[0])
    samples = [tensor.double()[~is_fixed] for tensor in drawn]
    if not _same_distribution(torch.cat(samples[:2]), torch.cat(samples[2:])):
        return False
    for dim in range(min(2, first.dim()) if first.dim() > 1 else 0):  # Rows and columns, which a vector lacks.
        # Orthogonal rows, or a scale of their own for some, do not show in single elements.
        norms = [tensor.double().transpose(0, dim).flatten(1).norm(dim=1) for tensor in drawn]
        if not _same_distribution(torch.cat(norms[:2]), torch.cat(norms[2:])):
            return False
    return True


def _same_distribution(first: Tensor, second: Tensor) -> bool:
    """Return whether two samples of one length may be from one distribution: by its shape, mean and variance."""
    if not (first.isfinite().all() and second.isfinite().all()):
        return False
    size = len(first)
    values = torch.cat([first, second]).sort().values
    shares = [torch.searchsorted(sample.sort().values, values, right=True) / size for sample in (first, second)]
    if (shares[0] - shares[1]).abs().max() > _LARGEST_DISTANCE * math.sqrt(2 / size):  # Kolmogorov-Smirnov.
        return False
    # The deviations below are those of large samples: of so few numbers they prove nothing.
    if size < 8:
        return True
    centered = torch.cat([first - first.mean(), second - second.mean()])
    variance = centered.square().mean().item()
    if variance == 0 or first.var() == 0 or second.var() == 0:  # A constant has no log variance.
        return bool(torch.equal(first, second))
    kurtosis = centered.pow(4).mean().item() / variance**2
    mean_difference = abs((first.mean() - second.mean()).item())
    log_variance_difference = abs(math.log((first.var() / second.var()).item()))
    # Standard deviations of the two differences, for large samples. Two values have kurtosis 1, which would give 0.
    mean_deviation = math.sqrt(2 * variance / size)
    log_variance_deviation = math.sqrt(2 * max(0.5, kurtosis - 1) / size)
    has_same_mean = mean_difference <= _MOST_DEVIATIONS * mean_deviation
    return has_same_mean and log_variance_difference <= _MOST_DEVIATIONS * log_variance_deviation


def _identical_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return, for each tensor, the names of those bitwise the same, but for constant ones, which many layers have."""
    names: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() > 1 and (tensor != tensor.flatten()[0]).any():
            values = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            names.setdefault((tensor.shape, tensor.dtype, values), []).append(name)
    return {name: group for group in names.values() for name in group}
