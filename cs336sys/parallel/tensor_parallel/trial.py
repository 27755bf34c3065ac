"""Tries a model on a few tokens, whole and shared: the names of its modules do not prove what its layers compute.

The trial has random weights and one block of each kind, which takes little time and memory. What layers return,
and all gradients, must be the same but for rounding.
"""

import copy
import dataclasses
from collections.abc import Iterable
from types import FunctionType, NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336sys.accounting.sharding.partition import cut_dimension, own_part
from cs336sys.errors import UsageError
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.tensor_parallel.layers import TensorGroup, share_layers, shared_layers
from cs336sys.parallel.tensor_parallel.weights import Initialize, cut_weights, part_of

# Faults change a result by 1 % and more (a root mean square over half of 2560 numbers: 2 %), rounding by 0.001 % in
# fp32, by 0.01 % in TF32.
_TOLERANCE = 1e-3

# Attributes of these types may decide what a module computes.
_SETTINGS = (bool, int, float, str, NoneType, FunctionType, type)

# What the trial computed, in order: the name of a layer, and this rank's part of its output or a gradient.
_Results = list[tuple[str, Tensor]]


def require_same_results(
    model: nn.Module,
    group: dist.ProcessGroup,
    tensor_group: TensorGroup,
    initialize: Initialize,
    device: torch.device | None,
) -> None:
    """Refuse a model that computes something else once its layers are shared. Every rank of the group calls it.

    Args:
        model: before it is cut; it is not changed.
        initialize, device: as of :class:`.wrapper.TensorParallel`.

    Raises:
        UsageError: on every rank, naming the layer.
    """
    # Nothing to compare where ranks send nothing, and no values where nobody gives any to a model on the meta device.
    if not tensor_group.name or (initialize is None and any(tensor.is_meta for tensor in model.parameters())):
        return
    device = device or next(model.parameters()).device
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda_devices), torch.autocast(device.type, enabled=False), torch.enable_grad():
        # Unlike torch.manual_seed(), these leave the generators of other devices alone.
        torch.default_generator.manual_seed(0)
        if cuda_devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        refusal = _trial_refusal(model, group, tensor_group, initialize, device)
    refusal = next((of_rank for of_rank in gather_objects(refusal, group) if of_rank), None)
    if refusal is not None:
        raise UsageError(refusal)


def _trial_refusal(
    model: nn.Module, group: dist.ProcessGroup, tensor_group: TensorGroup, initialize: Initialize, device: torch.device
) -> str | None:
    """Run the trial with the caller's seed, and return why the model is refused; None if it computes the same."""
    try:
        trial, block_numbers = _trial_of(model, initialize, device)
        vocabulary = len(trial.get_parameter("token_embeddings.weight"))
        tokens = _trial_tokens(vocabulary, tensor_group.size).to(device)
        grad_logits = torch.randn(*tokens.shape, len(trial.get_parameter("lm_head.weight")), device=device)
        versions = {name: parameter._version for name, parameter in trial.named_parameters()}
        expected = _run_trial(trial, tokens, grad_logits, tensor_group, group=None)
        # nn.Embedding(max_norm=) shortens rows that it looks up: once shared, also the row that stands in for others'.
        changed = [name for name, parameter in trial.named_parameters() if parameter._version != versions[name]]
    except Exception as error:
        return (
            f"{type(model).__name__} cannot be tried on a few token ids, to compare what it computes whole and shared: "
            f"{type(error).__name__}: {error}"
        )
    try:
        share_layers(trial, tensor_group, cut_weights(trial, group, initialize=None, device=None))  # It has values.
        results = _run_trial(trial, tokens, grad_logits, tensor_group, group)
        # Not "greater than": NaN is a difference, too. The last term is for gradients that are zero.
        different = [
            name
            for (name, whole), (_, part) in zip(expected, results, strict=True)
            if whole.shape != part.shape or not (part - whole).norm() <= _TOLERANCE * whole.norm() + 1e-6
        ]
        culprit = next((name.removesuffix(".weight") for name in (*changed, *different)), None)  # The first.
    except Exception as error:
        culprit = f"the model ({type(error).__name__}: {error})"
    if culprit is None:
        return None
    if culprit.startswith("layers."):
        # The trial has fewer blocks: name the block of the model that its block stands for.
        _, number, *layer = culprit.split(".")
        culprit = ".".join(("layers", str(block_numbers[int(number)]), *layer))
    return (
        f"{culprit} computes something else where {tensor_group.size} tensor parallel ranks share its layers, in a "
        "trial with random weights: let it compute each head, inner feature and token by itself, or choose FSDP"
    )


def _trial_tokens(vocabulary: int, ranks: int) -> Tensor:
    """Return two short random sequences, (2, S), without the tokens of ranks' first rows if there are others."""
    # In the shared embedding, a rank's first row stands in for all tokens of other ranks. Its own token is tried at the
    # end of _run_trial(), by the embedding alone.
    stand_in_rows = {own_part(vocabulary, rank, ranks).start for rank in range(ranks)}
    choices = torch.tensor([token for token in range(vocabulary) if token not in stand_in_rows] or [0])
    # At least 4 tokens, and as many for each rank, which may share the sequence.
    return choices[torch.randint(len(choices), (2, ranks if ranks > 3 else 2 * ranks))]


def _trial_of(model: Any, initialize: Initialize, device: torch.device) -> tuple[nn.Module, list[int]]:
    """Return a copy of the model with random weights and one block of each kind, and the numbers of these blocks."""
    kinds: dict[Any, int] = {}  # The number of the first block of each kind.
    for number, block in enumerate(model.layers):
        kinds.setdefault(_block_kind(block), number)
    layers = copy.copy(model.layers)
    layers._modules = {str(number): model.layers[original] for number, original in enumerate(kinds.values())}
    # What deepcopy() takes for copies that it has made already: an empty one of each parameter, but for those of the
    # blocks that are left out, which are not copied; and below, for the list of all blocks, a copy of the shorter list.
    memo: dict[int, Any] = {}
    for parameter in {*model.parameters()} - ({*model.layers.parameters()} - {*layers.parameters()}):
        empty = torch.empty_like(parameter, device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=empty.is_floating_point())
    memo[id(model.layers)] = copy.deepcopy(layers, memo)
    trial = copy.deepcopy(model, memo).eval()
    for part in trial.modules():
        if initialize is not None and any(buffer.is_meta for buffer in part.buffers(recurse=False)):
            part.to_empty(device=device, recurse=False)
            initialize(part)
    # Half precision rounds as much as a fault changes.
    if any(parameter.itemsize < 4 for parameter in trial.parameters()):
        trial.float()
    # Random weights: outputs of matrices are as large as inputs, and gains of norms about 1.
    for parameter in trial.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return trial, list(kinds.values())


def _block_kind(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that compute the same with different weights."""
    parts = []
    for name, part in block.named_modules():
        settings = tuple((key, value) for key, value in sorted(vars(part).items()) if isinstance(value, _SETTINGS))
        shapes = tuple((key, value.shape) for key, value in part._parameters.items() if value is not None)
        parts.append((name, type(part), settings, shapes))
    return tuple(parts)


def _run_trial(
    trial: Any, tokens: Tensor, grad_logits: Tensor, tensor_group: TensorGroup, group: dist.ProcessGroup | None
) -> _Results:
    """Run the trial forward and backward, and its embedding on all tokens; return outputs and gradients by layer.

    Args:
        grad_logits: the gradient of the logits of all tokens.
        group: the ranks that share the trial's layers; None if these are whole.
    """
    rank, size = tensor_group.rank, tensor_group.size
    columns = own_part(grad_logits.size(-1), rank, size)
    results: _Results = []

    def record(name: str, tensor: Tensor, *, is_logits: bool = False) -> None:
        # Of whole layers, the part that this rank would have.
        if group is None and is_logits:
            tensor = tensor[..., columns.start : columns.stop]
        elif group is None and tensor_group.sequence_parallel:
            tensor = tensor.chunk(size, -2)[rank]
        results.append((name, tensor.detach().clone()))

    def record_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in named_parameters:  # An embedding's gradient may be sparse.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            if group is None:
                gradient = part_of(gradient, name, rank, size)
            elif tensor_group.sequence_parallel and cut_dimension(name) is None:
                # Each rank has the gradient that its own tokens give.
                dist.all_reduce(gradient, group=group)
            results.append((name.removesuffix(".weight"), gradient))

    def watch(name: str, layer: nn.Module) -> Any:
        return layer.register_forward_hook(lambda _, inputs, output: record(name, output, is_logits=name == "lm_head"))

    blocks = {f"layers.{number}": block for number, block in enumerate(trial.layers)}
    hooks = [watch(name, layer) for name, layer in (shared_layers(trial) | blocks).items()]
    output = trial(tokens)
    logits = output if isinstance(output, Tensor) else output[0]  # A model may return more after them.
    record("the model", logits, is_logits=True)
    (logits * (grad_logits if group is None else grad_logits[..., columns.start : columns.stop])).sum().backward()
    for hook in hooks:
        hook.remove()
    record_gradients(trial.named_parameters())
    trial.zero_grad()
    # All tokens, by the embedding alone: those of the trial lack some, see _trial_tokens().
    results.append(("token_embeddings", _run_embedding(trial.token_embeddings, tensor_group, group, tokens.device)))
    record_gradients([("token_embeddings.weight", trial.token_embeddings.weight)])
    return results


def _run_embedding(
    embedding: Any, tensor_group: TensorGroup, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """Run the embedding forward and backward on all tokens; return the vectors of those that this rank would have."""
    if group is None:
        vocabulary = len(embedding.weight)
        rows = own_part(vocabulary, tensor_group.rank, tensor_group.size)
    else:
        # Without communication: this rank's rows alone are compared.
        embedding.tensor_group = dataclasses.replace(tensor_group, name="", sequence_parallel=False)
        vocabulary = embedding.vocabulary
        rows = range(embedding.first_row, embedding.first_row + len(embedding.weight))
    vectors = embedding(torch.arange(vocabulary, device=device))
    vectors.sum().backward()
    return vectors.detach()[rows.start : rows.stop]
