"""Find the modules that fused kernels can replace in any model, by comparing their outputs instead of their names."""

import contextlib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from cs336sys.kernels.rms_norm import reference_rms_norm
from cs336sys.kernels.rope import reference_rope
from cs336sys.kernels.swiglu import reference_swiglu

_EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon")  # Attributes in which norms keep their epsilon.

# Widths of the trial weights of a SwiGLU. They differ, so that no other order of layers fits.
_WIDTH, _INNER_WIDTH = 4, 6
# Scales of the rows of an input. The last one reveals modules that clamp large values.
_ROW_SCALES = (0.1, 1.0, 1e3)
# Leading dimensions of the inputs. A module may refuse all but the first, which are those of a batch of sequences.
_LEADING_SHAPES = ((2,), (), (1, 2))
# Largest error of an output, relative to the largest element of its row, by the dtype of input and weights.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
_GRADIENT_TOLERANCE = 1e-3  # Largest error of a gradient in float32, likewise.

# An operation, its arguments and its named arguments, with ... for the result of the operation before.
_Step = tuple[Callable, tuple, dict[str, Any]]

# A loss times this passes the cap of logits unchanged: where x is so small, tanh(x) is x, and its derivative 1.
CAPPED_LOSS_SCALE = 2.0**-40


class Head(NamedTuple):
    """The layer that computes logits, of which the model returns ``softcap * tanh(logits / softcap)`` if not None."""

    layer: nn.Module
    softcap: float | None


class Gate(NamedTuple):
    """Names of the layers of a module that computes ``down(silu(gate(x)) * up(x))``."""

    gate: str
    up: str
    down: str


def norm_epsilon(module: nn.Module) -> float | None:
    """Return the epsilon of an RMSNorm, or None for any other module.

    The module runs on random rows with random weights, on the CPU. So Gemma's norm, whose weight is an offset from 1,
    is none, and neither is a norm that returns float32 for a bfloat16 input.
    """
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or any(module.children()):
        return None
    shapes = {"weight": tuple(parameters["weight"].shape)}
    for name in _EPSILON_NAMES:
        eps = getattr(module, name, None)
        # In the first row, of size sqrt(eps), eps counts as much as the mean square.
        if isinstance(eps, float) and _computes(
            module, lambda x, weight, eps=eps: reference_rms_norm(x, weight, eps), shapes, (eps**0.5, *_ROW_SCALES[1:])
        ):
            return eps
    return None


def gate_layers(module: nn.Module) -> Gate | None:
    """Return the gate, up and down projections of a SwiGLU, or None for any other module.

    The module runs with small random weights instead of its own, on the CPU. Layers with hooks are left alone: fused
    kernels that read copies of the weights do not call them.
    """
    layers = {name: child for name, child in module.named_children() if is_linear(child) and not _has_hooks(child)}
    if len(layers) != 3 or len(list(module.parameters())) != 3:
        return None
    for gate in itertools.starmap(Gate, itertools.permutations(layers)):
        shapes = dict.fromkeys((f"{gate.gate}.weight", f"{gate.up}.weight"), (_INNER_WIDTH, _WIDTH))
        shapes[f"{gate.down}.weight"] = (_WIDTH, _INNER_WIDTH)
        if _computes(module, lambda x, gate, up, down: reference_swiglu(x @ gate.T, x @ up.T) @ down.T, shapes):
            return gate
    return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes exactly ``x @ weight.T``, as ``torch.nn.Linear`` without a bias does."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 2 or any(module.children()):
        return False
    if "forward" in module.__dict__:  # Somebody has replaced what its class computes.
        return False
    if type(module) is nn.Linear:
        return True
    return _computes(module, lambda x, weight: x @ weight.T, {"weight": (_INNER_WIDTH, _WIDTH)})


def is_rotation(module: nn.Module, theta: float, head_dim: int) -> bool:
    """Return whether a module rotates pairs of neighbours, (..., S, head_dim) by positions (S,), with this base.

    On the meta device, where its tables have no values, the answer is yes.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor) for tensor in tensors):
        return True
    device = tensors[0].device if tensors else torch.device("cpu")
    with _isolated_trial():  # It seeds the CPU's random numbers alone, so the sample comes from there.
        sample, positions = torch.randn((2, 2, head_dim), device="cpu").to(device), torch.tensor([1, 0], device=device)
        reference = functools.partial(reference_rope, positions=positions, theta=theta)
        return all(_agrees(lambda x: module(x, positions), reference, [sample.to(dtype)]) for dtype in _TOLERANCES)


def is_prenorm_block(block: nn.Module) -> bool:
    """Return whether a block computes ``x + attn(ln1(x))`` and then ``x + ffn(ln2(x))``, whatever its parts compute.

    The block runs with other functions in place of its parts, which shows how it joins them.
    """
    parts: dict[str, Callable[[Tensor], Tensor]] = {
        "ln1": torch.sin, "attn": torch.tanh, "ln2": torch.cos, "ffn": torch.sigmoid
    }  # fmt: skip

    def expected(x: Tensor) -> Tensor:
        x = x + parts["attn"](parts["ln1"](x))
        return x + parts["ffn"](parts["ln2"](x))

    with contextlib.ExitStack() as stack:
        for name, compute in parts.items():
            stack.enter_context(mock.patch.dict(getattr(block, name).__dict__, {"forward": compute}))
        return _computes(block, expected, shapes={})  # Without its parts a block has no weights.


def find_head(model: nn.Module) -> Head | None:
    """Return the last linear layer if the model returns its output unchanged or capped, directly or as ``.logits``.

    The model runs on two tokens, without attention, whose values do not matter here: in training mode and in
    evaluation mode. A model that reads its logits or changes them otherwise, in place too, has no head: None.
    """
    layers = [module for module in model.modules() if is_linear(module)]
    if not layers:
        return None
    head = layers[-1]

    vocab_size = len(head.get_parameter("weight"))
    with _restored_modes(model):

        def record(*shape: int) -> list[list[_Step] | None]:
            """Record in both modes what the model does to a tensor of this shape in place of its logits."""
            # The modes differ in batch size and tokens as well, on which the operations must not depend.
            return [
                _record_logits(model.train(is_training), head, batch=1 + is_training, shape=shape)
                for is_training in (True, False)
            ]

        # The fused head later returns a loss: a scalar where the model does nothing to it, else (1, 1, 1).
        if record() == [[], []]:
            return Head(head, softcap=None)
        steps, *others = record(1, 1, vocab_size) + record(1, 1, 1)
    softcap = _read_softcap(steps, vocab_size) if steps and all(other == steps for other in others) else None
    return None if softcap is None else Head(head, softcap)


def _record_logits(model: nn.Module, head: nn.Module, batch: int, shape: tuple[int, ...]) -> list[_Step] | None:
    """Return the operations that turn the output of ``head`` into the model's; None if these are not a chain.

    Args:
        batch: the model gets so many sequences of two tokens, all of them ``batch - 1``: calls differ in both.
        shape: of the zeros that take the place of the logits.
    """
    weight = head.get_parameter("weight")
    device, tokens_shape = weight.device, (batch, 2)
    # Fake tensors may be on a GPU that this machine lacks.
    restores_gpu_state = device.type == "cuda" and torch.cuda.is_available()
    watch = _Watch()

    def replace_logits(hidden: Tensor) -> Tensor:
        if hidden.shape != (*tokens_shape, weight.shape[1]) or watch.results:
            raise ValueError("this layer does not compute the logits of every token, or not once")
        watch.results.append(hidden.new_zeros(shape))
        return watch.results[0]

    def zero_attention(*inputs: Any, **named_inputs: Any) -> Tensor:
        query, _, value, *_ = (*inputs, *named_inputs.values())  # Query, key, value, whatever their names.
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))

    name = "scaled_dot_product_attention"
    # A model's file may import torch's function or, as the course's, define its own.
    sources = [torch.nn.functional, *(sys.modules.get(type(part).__module__) for part in model.modules())]
    try:
        with (
            contextlib.ExitStack() as stack,
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if restores_gpu_state else []),
            mock.patch.dict(head.__dict__, {"forward": replace_logits}),
            watch,
        ):
            for source in dict.fromkeys(sources):
                if hasattr(source, name):
                    stack.enter_context(mock.patch.object(source, name, zero_attention))
            output = model(torch.full(tokens_shape, fill_value=batch - 1, dtype=torch.int64, device=device))
    except Exception:
        return None
    is_last = bool(watch.results) and getattr(output, "logits", output) is watch.results[-1]
    return watch.steps if is_last and watch.is_chain else None


class _Watch(TorchDispatchMode):
    """Records the operations on a tensor, on their results, and on other tensors of the same memory.

    Attributes:
        results: the tensor, which whoever watches puts here, and the result of each operation.
        steps: the operations.
        is_chain: whether each operation takes the result of the one before it, and no other tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.steps: list[_Step] = []
        self.is_chain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # "prim": operations by which fake tensors ask for their device. For ... below see _Step.
        if self.results and self.is_chain and func.namespace != "prim":
            memory = {result.untyped_storage()._cdata for result in self.results}
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(tensor.untyped_storage()._cdata in memory for tensor in tensors):
                self.is_chain = len(tensors) == 1 and tensors[0] is self.results[-1] and isinstance(output, Tensor)
                self.results.append(output)
                self.steps.append((func, *tree_map_only(Tensor, lambda _: ..., (args, kwargs or {}))))
        return output


def _read_softcap(steps: list[_Step], vocab_size: int) -> float | None:
    """Return c if the operations compute ``c tanh(logits / c)``, and leave a loss times CAPPED_LOSS_SCALE as it is.

    Tried in float32 and in bfloat16, with gradients. None for any other operations.
    """

    def compute(logits: Tensor) -> Tensor:
        results = [logits.clone()]
        for func, args, kwargs in steps:
            args, kwargs = tree_map_only(EllipsisType, lambda _: results[-1], (args, kwargs))
            results.append(func(*args, **kwargs))
        return results[-1]

    with _isolated_trial():
        try:
            # c tanh(inf) is c.
            softcap = compute(torch.full((1, 1, vocab_size), torch.inf, device="cpu")).max().item()
        except Exception:
            return None
        if not 0 < softcap < math.inf:
            return None
        row_sizes = softcap * torch.tensor(_ROW_SCALES, device="cpu")[:, None]
        logits = [row_sizes * torch.randn((batch, len(_ROW_SCALES), vocab_size), device="cpu") for batch in (1, 2)]
        losses = [CAPPED_LOSS_SCALE * torch.rand(shape, device="cpu") for shape in ((1, 1, 1), (2, 3, 1))]
        for dtype, trial in itertools.product(_TOLERANCES, logits):
            # A model may cap bfloat16 logits in float32.
            wide = compute(trial.to(dtype)).dtype
            if not _agrees(compute, lambda x, wide=wide: softcap * torch.tanh(x.to(wide) / softcap), [trial.to(dtype)]):
                return None
        return softcap if all(_agrees(compute, torch.clone, [loss]) for loss in losses) else None


def _computes(
    module: nn.Module,
    reference: Callable[..., Any],
    shapes: Mapping[str, tuple[int, ...]],
    scales: Sequence[float] = _ROW_SCALES,
) -> bool:
    """Return whether ``module(x)`` is ``reference(x, *weights)`` in values, dtype and gradients, in both modes.

    Tried with random weights in float32 and in bfloat16. A module with more arguments or with buffers is not.

    Args:
        shapes: of the weights, by their names in the module.
        scales: sizes of the rows of an input.
    """
    if not _takes_one_tensor(module) or any(True for _ in module.buffers(recurse=False)):
        return False

    def compute(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(shapes, values, strict=True)), (x,))

    with _isolated_trial(), _restored_modes(module):
        weights = [torch.randn(shape, device="cpu") for shape in shapes.values()]
        width = next(iter(shapes.values()))[-1] if shapes else _WIDTH  # The first weight multiplies x.
        rows = torch.tensor(scales, device="cpu")[:, None]
        inputs = [torch.randn((*leading, len(scales), width), device="cpu") * rows for leading in _LEADING_SHAPES]
        for mode, dtype in itertools.product((True, False), _TOLERANCES):
            module.train(mode)
            for x in inputs:
                trial = [tensor.to(dtype) for tensor in (x, *weights)]
                if not _agrees(compute, reference, trial, must_run=x is inputs[0]):  # Others it may refuse.
                    return False
    return True


def _takes_one_tensor(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = [parameter.kind for parameter in parameters]
    return kinds in ([inspect.Parameter.POSITIONAL_OR_KEYWORD], [inspect.Parameter.POSITIONAL_ONLY])


@contextlib.contextmanager
def _isolated_trial() -> Iterator[None]:
    """Compute with real tensors in their own dtypes, and restore the random state, which dropout advances."""
    with (
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
    ):
        torch.default_generator.manual_seed(0)  # The CPU's alone: torch.manual_seed would seed GPUs, too.
        yield


@contextlib.contextmanager
def _restored_modes(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _agrees(
    compute: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Tensor], *, must_run: bool = True
) -> bool:
    """Return whether both compute alike, and ``compute`` leaves its inputs as they are and returns new memory.

    Args:
        must_run: count an error of ``compute`` as a difference.
    """
    try:
        output, gradients, leaves = _differentiated(compute, inputs)
    except Exception:
        return not must_run
    expected, expected_gradients, _ = _differentiated(reference, inputs)
    if output.dtype != expected.dtype or not _is_close(output, expected, _TOLERANCES[expected.dtype]):
        return False
    if any(output.untyped_storage()._cdata == leaf.untyped_storage()._cdata for leaf in leaves):
        return False
    if not all(torch.equal(leaf, tensor) for leaf, tensor in zip(leaves, inputs, strict=True)):
        return False
    # Gradients in bfloat16, sums of rounded numbers, are not compared.
    return inputs[0].dtype != torch.float32 or all(
        _is_close(gradient, expected_gradient, _GRADIENT_TOLERANCE)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True)
    )


def _differentiated(
    compute: Callable[..., Any], inputs: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
    """Return the output, its gradients, and the copies of the inputs that it was computed from."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = compute(*leaves)
    return output, torch.autograd.grad(output, leaves, torch.ones_like(output)), leaves


def _is_close(output: Tensor, expected: Tensor, tolerance: float) -> bool:
    if output.shape != expected.shape:
        return False
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((output - expected).abs() <= tolerance * largest).all())
