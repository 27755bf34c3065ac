"""Another attention instead of ``torch.nn.functional.scaled_dot_product_attention``, and dropout taken out."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336sys.settings.choices import ATTENTION

torch_attention = F.scaled_dot_product_attention  # torch's own, whatever stands in its place.

_flash_attention: Callable[..., Tensor] | None = None  # Imported once a model asks for it.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def replace_attention(name: str) -> None:
    """Let all models of the process that call torch's attention compute it this way, by a name of ``ATTENTION``.

    ``reference`` and ``sdpa`` leave them as they are. Dropout is left out unless ``_drops``: :func:`nothing_dropped`.
    """
    global _flash_attention
    attention: Callable[..., Tensor] = torch_attention
    if ATTENTION[name].is_ours:
        _flash_attention = _flash_attention or ATTENTION[name].load()
        attention = our_attention
    F.scaled_dot_product_attention = attention if _drops else _without_dropout(attention)


class AttentionCall(NamedTuple):
    """The arguments of a call of ``torch.nn.functional.scaled_dot_product_attention``, by name."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def by(self, attention: Callable[..., Tensor]) -> Tensor:
        """Compute this call by torch's attention or one in its place."""
        call = self._replace(attn_mask=self.mask) if attention is torch_attention else self
        return attention(**call._asdict())

    @property
    def mask(self) -> Tensor | None:
        """Return the mask as a tensor: a ``CausalBias`` fails where torch.nn.functional has another attention."""
        mask: Any = self.attn_mask
        return mask._materialize(self.query.device) if is_causal_bias(mask) else mask

    def why_not_ours(self) -> str | None:
        """Return why our kernels cannot compute this call, so that it goes to torch's attention; None if they can."""
        query, key, value = self.query, self.key, self.value
        if self.attn_mask is not None and not is_causal_bias(self.attn_mask):
            return "with a mask, which our kernels have none of but the causal one"
        if self.dropout_p > 0:
            return f"with dropout {self.dropout_p:g}, which our kernels have none of"
        if query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
            return f"of head dimensions {query.shape[-1]} and {value.shape[-1]}: ours are equal and at most 256"
        if query.dtype not in _DTYPES:
            return f"of {query.dtype}, which our kernels do not compute in"
        has_other_heads = key.shape[-3:-2] != query.shape[-3:-2] and not self.enable_gqa
        if key.shape[:-3] != query.shape[:-3] or has_other_heads or key.shape[:-1] != value.shape[:-1]:
            return "whose query, key and value have other batches or heads"
        return None


# Why calls went to torch's attention, of all models of this process since its cell began.
left_to_torch: set[str] = set()


def _note_left_to_torch(reason: str) -> None:
    left_to_torch.add(reason)


# Marked so, the compiler runs it while it traces, and does not compile again because the set has changed.
# ``torch.compiler.assume_constant_result`` sets the same mark, but imports the compiler.
_note_left_to_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_causal_bias(mask: Tensor | None) -> bool:
    """Return whether a mask is torch's ``causal_upper_left`` or ``causal_lower_right``."""
    return type(mask).__name__ == "CausalBias"  # By its name: the module of the class imports the compiler.


def our_attention(*arguments: Any, **named: Any) -> Tensor:
    """Compute this project's attention in the signature of torch's; what it cannot do, torch's does."""
    call = AttentionCall(*arguments, **named)
    reason = call.why_not_ours()
    if reason is not None:
        _note_left_to_torch(reason)
        return call.by(torch_attention)
    mask = cast("Any", call.attn_mask)
    is_causal = call.is_causal or mask is not None  # Masks that reach this line are torch's causal ones.
    alignment = "end" if mask is not None and mask.variant.name == "LOWER_RIGHT" else "start"
    assert _flash_attention is not None, "replace_attention() loads it: the compiler could not"
    return _flash_attention(call.query, call.key, call.value, is_causal, scale=call.scale, causal_alignment=alignment)


@contextlib.contextmanager
def watched_attention(attend: Callable[[AttentionCall, Callable[..., Tensor]], Tensor]) -> Iterator[None]:
    """Let ``attend`` compute each call of attention within this; its second argument is the attention that would."""
    attention = F.scaled_dot_product_attention

    def watch(*arguments: Any, **named: Any) -> Tensor:
        call = AttentionCall(*arguments, **named)
        return attend(call if _drops else call._replace(dropout_p=0.0), attention)  # As replace_attention().

    with mock.patch.object(F, "scaled_dot_product_attention", watch):
        yield


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

_drops = True


def without_dropout() -> None:
    """Let no model of this process drop anything from now on: what is checked must be the same twice."""
    global _drops
    _drops = False
    for name in _DROPOUTS:
        setattr(F, name, _drop_nothing)


@contextlib.contextmanager
def nothing_dropped() -> Iterator[None]:
    """Turn dropout off in this context; build models in it, too, because replaced attention reads then what to drop."""
    functions: dict[str, Any] = dict.fromkeys(_DROPOUTS, _drop_nothing)
    with mock.patch.multiple(F, **functions), mock.patch(f"{__name__}._drops", False):
        yield


def _drop_nothing(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # The compiler reads the name of what it is, which no partial has.
    return lambda *arguments, **named: AttentionCall(*arguments, **named)._replace(dropout_p=0.0).by(attention)
