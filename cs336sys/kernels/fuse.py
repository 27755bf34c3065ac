"""Put the fused kernels into a model with the names of ``cs336_basics`` or any other, and take them out again."""

import functools
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs336sys.errors import UsageError, choose_from
from cs336sys.kernels import recognition
from cs336sys.kernels.linear import WeightCopies, linear_of_copy
from cs336sys.kernels.linear_cross_entropy import linear_cross_entropy
from cs336sys.kernels.operators import DTYPES
from cs336sys.kernels.recognition import CAPPED_LOSS_SCALE, Gate, Head
from cs336sys.kernels.rms_norm import rms_norm
from cs336sys.kernels.rope import rope, rope_qkv
from cs336sys.kernels.swiglu import swiglu, swiglu_linear_of_copy

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _norm_forward(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """Replace the forward pass of the course's RMSNorm; only :func:`_block_forward` gives more than ``x``."""
    return rms_norm(x, norm.weight, norm.eps, residual)


def _block_forward(block: Any, x: Tensor) -> Tensor:
    normalized, x = block.ln2(block.attn(block.ln1(x)), residual=x)
    return x + block.ffn(normalized)


# Functions that return forward passes are cached: modules that compute alike share one, and with it compiled code.
# A module's only argument may be given by its name, which differs from model to model.


@functools.cache
def gate_forward(layers: Gate) -> Callable:
    """Return the forward pass of a SwiGLU whose layers have these names.

    It multiplies by copies of their weights where the module has any, and else calls the layers. ``gate_up_copy`` has
    the weights of gate and up below each other, ``down_copy`` those of down.
    """

    def forward(ffn: Any, *inputs: Tensor, **named_inputs: Tensor) -> Tensor:
        (x,) = (*inputs, *named_inputs.values())
        gate, up, down = (getattr(ffn, name) for name in layers)
        if not _reads_copy(ffn.gate_up_copy, x):
            return down(swiglu(gate(x), up(x)))
        gradient_dtype = ffn.gradient_dtype
        gate_up = linear_of_copy(x, ffn.gate_up_copy, gate.weight, up.weight, gradient_dtype=gradient_dtype)
        return swiglu_linear_of_copy(gate_up, ffn.down_copy, down.weight, gradient_dtype)

    return forward


@functools.cache
def norm_forward(eps: float) -> Callable:
    """Return the forward pass of an RMSNorm outside our blocks, without a residual."""

    def forward(norm: Any, *inputs: Tensor, **named_inputs: Tensor) -> Any:
        (x,) = (*inputs, *named_inputs.values())
        if x.dtype != norm.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            # Models differ in which of the two dtypes their RMSNorms return here.
            return type(norm).forward(norm, x)
        return rms_norm(x, norm.weight, eps)

    return forward


def _reads_copy(copy: Tensor | None, x: Tensor) -> bool:
    """Return whether a layer computes x with a copy of its weight: not where a model switches autocast off."""
    return copy is not None and (x.dtype == copy.dtype or torch.is_autocast_enabled(x.device.type))


def _linear_forward(linear: Any, *inputs: Tensor, **named_inputs: Tensor) -> Tensor:
    (x,) = (*inputs, *named_inputs.values())
    if not _reads_copy(linear.weight_copy, x):
        return type(linear).forward(linear, x)
    return linear_of_copy(x, linear.weight_copy, linear.weight, gradient_dtype=linear.gradient_dtype)


@functools.cache
def rotation_forward(theta: float) -> Callable:
    """Return the forward pass of a rotation with this base."""

    def forward(rotation: Any, x: Tensor, pos_ids: Tensor | None = None) -> Tensor:
        return rope(x, pos_ids, theta=theta)

    return forward


@functools.cache
def attention_forward(theta: float | None, attention: Attention) -> Callable:
    """Return the forward pass of causal self-attention by copies of weights; ``theta`` is None without rotations."""

    def forward(attn: Any, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        if not _reads_copy(attn.qkv_copy, x):  # Without copies the module computes as its class does.
            return type(attn).forward(attn, x, token_positions)
        gradient_dtype, weights = attn.gradient_dtype, (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        qkv = linear_of_copy(x, attn.qkv_copy, *weights, gradient_dtype=gradient_dtype)
        if theta is None:
            # (..., S, 3 H D) to three of (..., H, S, D).
            query, key, value = qkv.unflatten(-1, (3, attn.num_heads, -1)).transpose(-4, -2).unbind(-3)
        else:
            query, key, value = rope_qkv(qkv, attn.num_heads, positions=token_positions, theta=theta)
        heads = attention(query, key, value).transpose(-3, -2).flatten(-2)
        return linear_of_copy(heads, attn.output_copy, attn.output_proj.weight, gradient_dtype=gradient_dtype)

    return forward


@functools.cache
def attention_of(module: types.ModuleType) -> Attention:
    """Return causal attention by the function that the model's module has at the time of a call: it may be replaced."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        index = torch.arange(query.shape[-2], device=query.device)
        return module.scaled_dot_product_attention(Q=query, K=key, V=value, mask=index[:, None] >= index)

    return attention


def _is_rms_norm(norm: Any) -> bool:
    return type(norm).__name__ == "RMSNorm" and recognition.norm_epsilon(norm) == norm.eps


def head_forward(head: Any, hidden: Tensor) -> Tensor:
    """Return logits, or the loss where there are targets."""
    if head.targets is None:
        return type(head).forward(head, hidden)
    options = {"copy": head.copy, "gradient_dtype": head.gradient_dtype, "softcap": head.softcap, **head.loss_options}
    loss: Any = linear_cross_entropy(hidden, head.weight, head.targets, **options)
    # A model that caps takes the loss for logits, so it gets their three dimensions: (B, S, 1), or (1, 1, 1) if it is a
    # single number. Scaled down, it passes the cap unchanged. Fused.loss scales it back.
    return loss if head.softcap is None else CAPPED_LOSS_SCALE * loss.reshape(*(loss.shape or (1, 1)), 1)


def rotation_base(model: nn.Module, path: str, rotation: nn.Module) -> float:
    """Return the base of a rotation's angles: its own ``theta``, or the model's ``config["rope_theta"]``.

    Raises:
        UsageError: neither has one; ``path`` names the rotation.
    """
    theta = getattr(rotation, "theta", None)
    if theta is None:
        theta = getattr(model, "config", {}).get("rope_theta")
    if not isinstance(theta, int | float):
        raise UsageError(
            f"{path} (RotaryEmbedding) has no theta, and {type(model).__name__} no config['rope_theta']: "
            "fused kernels need the base of the angles"
        )
    return theta


# By the name of a module's class: the attributes that its fused forward pass reads.
ATTRIBUTES = {
    "RMSNorm": ("weight", "eps"),
    "SwiGLU": ("w1", "w2", "w3"),
    "CausalMultiHeadSelfAttention": ("q_proj", "k_proj", "v_proj", "output_proj", "num_heads", "positional_encoder"),
    "TransformerBlock": ("ln1", "attn", "ln2", "ffn"),
}

_COURSE_GATE = Gate("w1", "w3", "w2")
HEAD = "lm_head"  # The model's last layer, by its name in the model.

KERNELS = ("rms-norm", "rope", "swiglu", "linear-cross-entropy")

# The attributes of a fused last layer; targets and options of the loss have values within Fused.loss alone.
_HEAD_STATE: dict[str, Any] = dict.fromkeys(("targets", "copy", "gradient_dtype", "softcap")) | {"loss_options": {}}

_HANDLE = "fused_kernels"  # Where a fused model keeps its handle.


class Replacement(NamedTuple):
    """The computation of a fused module."""

    forward: Callable  # Replaces the forward pass of its class.
    # Layers whose weights lie side by side in one copy, by the name of the copy.
    stacks: Mapping[str, tuple[nn.Module, ...]] = {}


class Fused:
    """A model whose modules call fused kernels, until :meth:`undo`.

    Attributes:
        copies: of the blocks' weights, after :meth:`keep_copies` or :meth:`stack_weights`.
        recognized: how many modules each kernel replaces, if modules were recognized by their outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        replacements: Mapping[nn.Module, Replacement],
        kernels: Collection[str],
        head: Head | None,
        recognized: Mapping[str, int],
    ):
        """Put each module's replacement in; ``kernels``: names of :data:`KERNELS` that were asked for."""
        self.copies: WeightCopies | None = None
        self.recognized = recognized
        self._model = model
        self._replacements = dict(replacements)
        self._missing_kernels = [name for name in KERNELS if name not in kernels]
        for module, (forward, stacks) in replacements.items():
            # An attribute of the instance goes before the class's own forward pass, which stays as it is.
            module.__dict__["forward"] = types.MethodType(forward, module)
            for name in stacks:  # Forward passes read None until _stack() and keep_copies() set them.
                module.__dict__[name] = module.__dict__["gradient_dtype"] = None
        self._head: Any = None if head is None else head.layer
        if head is not None:
            head.layer.__dict__.update(_HEAD_STATE, softcap=head.softcap)
        model.__dict__[_HANDLE] = self

    @property
    def computes_loss(self) -> bool:
        """Return whether :meth:`loss` works: the model has its kernel, and returns what a last layer computes."""
        return self._head is not None

    def loss(self, model: Callable[[Any], Any], tokens: Any, targets: Tensor, **options: Any) -> Tensor:
        """Return the mean cross-entropy of the next tokens, without their logits: last layer and loss are one kernel.

        Args:
            model: the fused model or a wrapper; returns logits, or an object with ``.logits``.
            tokens: int64 (batch, sequence).
            targets: int64 (batch, sequence).
            options: of :func:`linear_cross_entropy`: ``ignore_index``, ``label_smoothing``, ``z_loss``, ``reduction``,
                ``softcap`` (not for a model that caps its logits itself), ``class_weight``.

        Raises:
            UsageError: no last layer without a bias computes what the model returns, this kernel was left out, the
                logits would be capped twice, or the model is no longer fused.
        """
        if self._model.__dict__.get(_HANDLE) is not self:
            raise UsageError(f"{type(self._model).__name__} is no longer fused: fuse it again")
        if "linear-cross-entropy" in self._missing_kernels:
            raise UsageError("the loss without logits is linear-cross-entropy: the model was fused without it")
        if not self.computes_loss:
            name = type(self._model).__name__
            raise UsageError(
                f"the loss without logits needs a last layer without a bias, whose output the model returns unchanged "
                f"or capped ({HEAD} in models of cs336_basics): {name} has none"
            )
        softcap = self._head.softcap
        if softcap is not None and options.get("softcap") is not None:
            raise UsageError(
                f"softcap {options['softcap']}: the model caps its logits at {softcap:g} itself; leave it out"
            )
        if self.copies is not None:
            # A compiled model does not do so itself: see _refresh_changed_copies.
            self.copies.refresh_changed()
        self._head.__dict__.update(targets=targets, loss_options=options)
        try:
            output = model(tokens)
            loss = getattr(output, "logits", output)
            if softcap is None:  # Else head_forward() has scaled it, in the shape of logits, for the model to cap it.
                return loss
            return loss.view(targets.shape if options.get("reduction") == "none" else ()) / CAPPED_LOSS_SCALE
        finally:
            self._head.__dict__["targets"] = None

    def keep_copies(
        self, dtype: torch.dtype, optimizer: Any = None, gradient_dtype: torch.dtype = torch.float32
    ) -> None:
        """Let blocks and loss compute in ``dtype`` with copies of float32 weights, in place of casts in every pass.

        Query, key and value projections, and gate and up projections, become one product each, and gradients come out
        of the products, which sum in float32, in ``gradient_dtype``. :class:`cs336sys.kernels.adamw.AdamW` writes the
        copies in the pass that writes the weights. What PyTorch writes into weights, such as another optimizer or
        ``load_state_dict``, is noticed before the next forward pass; call ``copies.refresh()`` after anything else.

        Args:
            dtype: float16 or bfloat16; run the model under ``torch.autocast`` to it.
            optimizer: of these weights, with ``attach_copy``; None for weights that nothing but PyTorch writes.
            gradient_dtype: float32, or ``dtype`` for an optimizer that takes gradients of another dtype than weights'.

        Raises:
            UsageError: the model was fused with some of the kernels only, or it is none of these dtypes.
        """
        copies = self._stack(dtype, are_separate=True)  # The weights stay where they are.
        for module, replacement in self._replacements.items():
            if replacement.stacks or module is self._head:  # Those that multiply by copies: forward reads it.
                module.__dict__["gradient_dtype"] = gradient_dtype
        if gradient_dtype != torch.float32:  # float32 is the dtype of these weights' gradients anyway.
            for weight, _ in copies:
                weight.grad_dtype = gradient_dtype
        copies.refresh()
        if optimizer is not None:
            for weight, copy in copies:
                optimizer.attach_copy(weight, copy)

    def stack_weights(self, dtype: torch.dtype) -> None:
        """Keep the blocks' weights themselves in ``dtype``, side by side. Call it before making an optimizer.

        A deep copy of the model afterwards has weights apart from what it computes with: make it before.

        Raises:
            UsageError: the model was fused with some of the kernels only.
        """
        for weight, copy in self._stack(dtype, are_separate=False):
            copy.copy_(weight.detach())
            weight.data = copy

    def _stack(self, dtype: torch.dtype, *, are_separate: bool) -> WeightCopies:
        """Allocate copies, layers with one input below each other, which forward passes keep fresh."""
        if dtype not in DTYPES:
            raise UsageError(f"copies of weights in {dtype}: choose from {', '.join(map(str, DTYPES))}")
        if self._missing_kernels:
            missing = ", ".join(self._missing_kernels)
            raise UsageError(f"copies of weights need all fused kernels: {missing} is left out")
        self.copies = WeightCopies(are_separate=are_separate)  # If not, the caller moves the weights into them.
        for module, replacement in self._replacements.items():
            for name, layers in replacement.stacks.items():
                weights = [layer.get_parameter("weight") for layer in layers]
                shape = sum(map(len, weights)), weights[0].shape[1]
                copy = module.__dict__[name] = torch.empty(shape, dtype=dtype, device=weights[0].device)
                self.copies.add(weights, copy)
        # stack_weights() moves the weights of blocks alone, so the head has a copy only for keep_copies(). An optimizer
        # writes one copy of a weight: what an embedding shares with the head gets none.
        if are_separate and self._head is not None and _count_owners(self._model)[self._head.weight] == 1:
            self._head.__dict__["copy"] = torch.empty_like(self._head.weight, dtype=dtype, requires_grad=False)
            self.copies.add([self._head.weight], self._head.copy)
        self._model.register_load_state_dict_post_hook(_refresh_copies)
        self._model.register_forward_pre_hook(_refresh_changed_copies)
        return self.copies

    def undo(self) -> None:
        """Let the model compute as before; a second call does nothing."""
        for module, replacement in self._replacements.items():
            module.__dict__.pop("forward", None)
            for name in (*replacement.stacks, "gradient_dtype"):
                module.__dict__.pop(name, None)
        if self._head is not None:
            for name in _HEAD_STATE:
                self._head.__dict__.pop(name, None)
        self._model.__dict__.pop(_HANDLE, None)  # Without a handle the hooks of _stack(), which stay, do nothing.
        self._replacements = {}
        self.copies = None


def fused_kernels(model: nn.Module) -> Fused | None:
    """Return the handle of a model that is fused or wraps one that is; None for others."""
    return next((module.__dict__[_HANDLE] for module in model.modules() if _HANDLE in module.__dict__), None)


def _count_owners(model: nn.Module) -> Counter[nn.Parameter | None]:
    """Count the modules that own each parameter."""
    return Counter(parameter for module in model.modules() for parameter in module._parameters.values())


def _refresh_copies(model: nn.Module, _: object) -> None:
    handle = fused_kernels(model)
    if handle is not None and handle.copies is not None:
        handle.copies.refresh()


def _refresh_changed_copies(model: nn.Module, _: object) -> None:
    # torch.compile cannot decide by the versions of weights.
    handle = None if torch.compiler.is_compiling() else model.__dict__.get(_HANDLE)
    if handle is not None and handle.copies is not None:
        handle.copies.refresh_changed()


def fuse(model: nn.Module, attention: Attention | None = None, only: Collection[str] | None = None) -> Fused:
    """Let a Transformer's norms, rotations, gates, residual additions and loss run as fused kernels.

    In a model with the names of classes and attributes of ``cs336_basics.model``, modules are known by these names, and
    left alone where they compute something else: ``RMSNorm``, ``SwiGLU``, ``RotaryEmbedding`` (with its own ``theta``
    or the model's ``config["rope_theta"]``), ``TransformerBlock``, which adds attention's output in the kernel of its
    second norm, and, once the handle keeps copies of the weights, ``CausalMultiHeadSelfAttention``. ``lm_head`` is
    ``linear_cross_entropy`` where the handle's ``loss`` calls the model.

    In any other model, modules are recognized by their outputs (:mod:`~cs336sys.kernels.recognition`): RMSNorms,
    SwiGLUs, a last layer whose output the model returns unchanged or as ``cap * tanh(output / cap)`` (Gemma 2) and does
    not read, and, once the handle keeps copies of the weights, every linear layer without a bias. Rotations and
    residual additions stay as they are.

    Parameters, their names and the state dict stay as they are. Fuse before ``torch.compile`` compiles.

    Args:
        attention: causal attention of query, key and value, each (..., heads, S, D), where there are copies of weights;
            None stands for ``scaled_dot_product_attention`` of the model's module, as without copies. Only for a model
            with the names of ``cs336_basics``.
        only: names of ``KERNELS``: ``rms-norm`` (with the block's addition), ``rope``, ``swiglu``,
            ``linear-cross-entropy``. None stands for all that the model has; copies of weights need them all.

    Returns:
        A handle with ``undo()``, ``loss()``, ``keep_copies()`` and ``stack_weights()``.

    Raises:
        UsageError: an attribute is missing, nothing can be replaced, ``only`` has a name that does not exist or that
            nothing in the model computes, or the model is fused already; the model is as it was.
    """
    kernels = KERNELS if only is None else tuple(only) or ("",)  # None at all is refused as one without a name.
    for name in kernels:
        if name not in KERNELS:
            raise UsageError(f"kernel '{name}': {choose_from(name, KERNELS)}")
    is_course = {type(module).__name__ for module in model.modules()}.issuperset(ATTRIBUTES)
    if is_course:
        _check_course_modules(model)
    elif fused_kernels(model) is not None:
        raise UsageError(f"{type(model).__name__} is fused already: undo that first")
    head = recognition.find_head(model) if "linear-cross-entropy" in kernels else None
    if is_course and head is not None and head.layer is not getattr(model, HEAD, None):
        head = None  # In this model modules are known by their names.
    replacements, counts = _find_replacements(model, is_course, attention, kernels, head)
    if is_course and not replacements:
        raise UsageError(
            f"{type(model).__name__} has the class names of cs336_basics, but none of its modules computes what "
            f"{', '.join(kernels)} would compute in its place"
        )
    # Of all kernels a model need not have each; those that were chosen by name it must have.
    missing = [kernel for kernel in kernels if kernel not in counts]
    if not is_course and (not counts or (missing and set(kernels) != set(KERNELS))):
        raise UsageError(
            f"{type(model).__name__} has no module that {', '.join(missing)} can replace: in a model without the "
            f"classes {', '.join(ATTRIBUTES)}, fused kernels replace RMSNorms, SwiGLUs of three linear layers without "
            "biases, and such a layer at the end whose output the model returns or caps"
        )
    recognized = {} if is_course else {kernel: counts[kernel] for kernel in KERNELS if kernel in counts}
    return Fused(model, replacements, kernels, head, recognized)


def _check_course_modules(model: nn.Module) -> None:
    """Refuse modules with names of ``cs336_basics`` that lack an attribute, or have a forward pass of their own."""
    for path, module in model.named_modules():
        name = type(module).__name__
        if name not in {*ATTRIBUTES, "RotaryEmbedding"}:  # A model need not have rotations.
            continue
        _refuse_own_forward(path, module)
        missing = [attribute for attribute in ATTRIBUTES.get(name, ()) if not hasattr(module, attribute)]
        if missing:
            raise UsageError(
                f"{path} ({name}) has no {' and no '.join(missing)}: fused kernels need {', '.join(ATTRIBUTES[name])}"
            )


def _find_replacements(
    model: nn.Module, is_course: bool, attention: Attention | None, kernels: Collection[str], head: Head | None
) -> tuple[dict[nn.Module, Replacement], Counter[str]]:
    """Return what replaces each module, by its name or what it computes, and how many modules each kernel replaces.

    Of a model that ``is_course`` no modules but the head are counted.
    """
    replacements: dict[nn.Module, Replacement] = {}
    counts: Counter[str] = Counter()
    owners = _count_owners(model)
    stacked_layers: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in stacked_layers:
            continue  # Its SwiGLU computes it.
        kernel, replacement = None, None
        if head is not None and module is head.layer:
            kernel, replacement = "linear-cross-entropy", Replacement(head_forward)
        elif is_course:
            replacement = _course_replacement(model, path, module, attention, kernels)
        else:
            kernel, replacement = _recognize(module, kernels, owners)
        if replacement is None:
            continue
        _refuse_own_forward(path, module)
        replacements[module] = replacement
        stacked_layers.update(itertools.chain.from_iterable(replacement.stacks.values()))
        if kernel is not None:
            counts[kernel] += 1
    return replacements, counts


def _course_replacement(
    model: nn.Module, path: str, module: Any, attention: Attention | None, kernels: Collection[str]
) -> Replacement | None:
    """Return what replaces a module with a name of ``cs336_basics``, or None if nothing does or it computes otherwise.

    Attention's fused forward pass differs only with copies of the weights, which need all kernels.
    """
    match type(module).__name__:
        case "RMSNorm" if "rms-norm" in kernels and _is_rms_norm(module):
            return Replacement(_norm_forward)
        case "TransformerBlock" if "rms-norm" in kernels and recognition.is_prenorm_block(module):
            # It calls the norms with the residual.
            return Replacement(_block_forward) if _is_rms_norm(module.ln1) and _is_rms_norm(module.ln2) else None
        case "SwiGLU" if "swiglu" in kernels and recognition.gate_layers(module) == _COURSE_GATE:
            return _gate_replacement(module, _COURSE_GATE)
        case "RotaryEmbedding" if "rope" in kernels:
            base = rotation_base(model, path, module)
            attn: Any = next(part for part in model.modules() if type(part).__name__ == "CausalMultiHeadSelfAttention")
            head_dim = len(attn.q_proj.weight) // attn.num_heads
            return Replacement(rotation_forward(base)) if recognition.is_rotation(module, base, head_dim) else None
        case "CausalMultiHeadSelfAttention" if set(kernels) == set(KERNELS) and len(list(module.parameters())) == 4:
            # With more parameters than the projections' it has biases, or norms of queries and keys.
            rotation: Any = module.positional_encoder
            theta = None if rotation is None else rotation_base(model, path, rotation)
            forward = attention_forward(theta, attention or attention_of(sys.modules[type(module).__module__]))
            projections = module.q_proj, module.k_proj, module.v_proj
            return Replacement(forward, {"qkv_copy": projections, "output_copy": (module.output_proj,)})
    return None


def _gate_replacement(module: nn.Module, gate: Gate) -> Replacement:
    layers = tuple(module.get_submodule(name) for name in gate)
    return Replacement(gate_forward(gate), {"gate_up_copy": layers[:2], "down_copy": layers[2:]})


def _recognize(
    module: nn.Module, kernels: Collection[str], owners: Mapping[nn.Parameter | None, int]
) -> tuple[str | None, Replacement | None]:
    """Return the name of the kernel that can replace a module, and what replaces it; twice None if nothing can.

    A linear layer gets a replacement that multiplies by a copy of its weight, and no kernel's name. Copies need all
    kernels: where one is left out, linear layers stay as they are. Weights with several ``owners`` would have several
    copies, of which an optimizer writes one: they get none.
    """
    eps = recognition.norm_epsilon(module) if "rms-norm" in kernels else None
    if eps is not None:
        return "rms-norm", Replacement(norm_forward(eps))
    gate = recognition.gate_layers(module) if "swiglu" in kernels else None
    if gate is not None and all(owners[module.get_parameter(f"{name}.weight")] == 1 for name in gate):
        return "swiglu", _gate_replacement(module, gate)
    if set(kernels) == set(KERNELS) and recognition.is_linear(module) and owners[module.get_parameter("weight")] == 1:
        return None, Replacement(_linear_forward, {"weight_copy": (module,)})
    return None, None


def _refuse_own_forward(path: str, module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise UsageError(
            f"{path} ({type(module).__name__}) has a forward pass of its own already: undo what put it there first"
        )
