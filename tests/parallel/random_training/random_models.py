"""Models that add up small parts, each with a habit that has broken, or could break, a wrapper.

Such habits are gradients that share memory, tied, reused, frozen and strided parameters, parameters that some steps or
some ranks do not use, weights that change or are used where no layer is called, and blocks that change their inputs.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from cs336_basics.model import BasicsTransformerLM
from torch import Tensor, nn

DIM, LENGTH, VOCABULARY = 4, 3, 5

# 1 to 4 ranks divide the heads and the longest sequence, and neither inner features nor tokens.
LANGUAGE = {"vocab_size": 19, "context_length": 12, "d_model": 24, "num_heads": 12, "d_ff": 23}


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class Weighted(nn.Module):
    """Has parameters of these shapes."""

    SHAPES: ClassVar[dict[str, tuple[int, int]]] = {"weight": (DIM, DIM)}

    def __init__(self):
        super().__init__()
        for name, shape in self.SHAPES.items():
            self.register_parameter(name, _weights(*shape))


class Dense(nn.Module):
    """A linear layer."""

    has_bias = True

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=self.has_bias)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return self.linear(x)


class SumOfViews(Weighted):
    """Both gradients are views of one tensor, all of it."""

    SHAPES: ClassVar = {"first": (DIM * DIM, 1), "second": (DIM * DIM, 1)}

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ (self.first.view(DIM, DIM) + self.second.view(DIM, DIM))


class Concatenated(Weighted):
    """Gradients are different slices of one tensor."""

    SHAPES: ClassVar = {"upper": (1, DIM), "lower": (DIM - 1, DIM)}

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ torch.cat((self.upper, self.lower))


class Positions(Weighted):
    """With one sequence a rank the gradient is a view of what the backward pass goes on with."""

    SHAPES: ClassVar = {"weight": (LENGTH, DIM)}

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x + self.weight.unsqueeze(0)


class Packed(Weighted):
    """One parameter for three products, one of which a choice leaves out."""

    SHAPES: ClassVar = {"weight": (3 * DIM, DIM)}

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        query, key, value = self.weight.chunk(3)
        return (x @ query.T) * (x @ key.T) if choice % 2 else x @ value.T


class Transposed(nn.Module):
    """A parameter whose columns lie in memory one after another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM).t() / 2)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ self.weight


class Strided(nn.Module):
    """A parameter with gaps between its elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(DIM, 2 * DIM) / 2)[:, ::2])

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ self.weight


class Alternatives(Weighted):
    """The choice, which may differ between ranks and passes, says which of two parameters is used, if any."""

    SHAPES: ClassVar = {"first": (DIM, DIM), "second": (DIM, DIM)}

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        # Depends on x whatever the choice is, for a backward pass that always passes here.
        return x * 0.5 if choice == 0 else x @ (self.first if choice == 1 else self.second)


class Unused(Weighted):
    """Has one parameter that nothing ever uses."""

    SHAPES: ClassVar = {"used": (DIM, DIM), "never": (DIM, DIM)}

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ self.used


class Twice(Dense):
    """One layer used twice in a pass."""

    has_bias = False

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Vectors(nn.Module):
    """Parameters of one dimension, one element and none, which fully sharded training replicates."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return self.norm(x) * self.scale + self.shift.expand(DIM)


class Tokens(nn.Module):
    """An embedding, whose gradient is mostly zeros."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return self.embedding(tokens)


class Skipped(Dense):
    """A block of stochastic depth: where the choice is 0 it returns its input itself."""

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x if choice == 0 else self.linear(x)


class InPlace(Dense):
    """Changes its input in place."""

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        # Of what is saved for the backward pass nothing is changed.
        x += torch.sigmoid(self.linear.weight).sum(0) + self.linear.bias
        return x


class Counted(Dense):
    """A buffer counts the passes in training mode, and changes what they compute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        if self.training:
            self.passes += 1
        return self.linear(x) / (1 + 0.1 * self.passes)


LIMIT = 0.4


class Limited(Weighted):
    """The weight is brought within bounds by the forward pass, as ``max_norm`` of an embedding does."""

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        with torch.no_grad():
            # Where there is nothing to do the version must stay: other passes may have saved it.
            if (self.weight.abs() > LIMIT).any():
                self.weight.clamp_(-LIMIT, LIMIT)
        return x @ self.weight


class View(Weighted):
    """Returns a view of its weight, but where the choice is 0."""

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ self.weight if choice == 0 else self.weight.view(DIM, DIM)[0]


class AuxiliaryLoss(Dense):
    """Keeps a loss as an attribute, which the caller adds."""

    loss: Tensor | None = None

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        x = self.linear(x)
        self.loss = x.double().square().mean()
        return x


class Attention(nn.Module):
    """Causal attention with a head for each number of a token.

    Attributes:
        attend: of queries, keys and values (batch, heads, S, 1) of this rank's tokens; None: of whole sequences.
    """

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(DIM, 3 * DIM)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        query, key, value = self.projection(x).unflatten(-1, (3, DIM, 1)).movedim(-3, 0).transpose(-3, -2)
        attend = self.attend or whole_attention
        return attend(query, key, value).transpose(-3, -2).flatten(-2)


def whole_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Adapted(nn.Module):
    """A part that was trained before, frozen, and an adapter of rank 1 beside it."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = _weights(DIM, 1), _weights(1, DIM)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        adapter = x @ self.down @ self.up
        # The base may change its input, which the adapter's backward pass needs.
        return self.base(x.clone(), tokens, choice) + adapter


class Raised(RuntimeError):
    """What a pass raises that was asked to."""


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise Raised("in the backward pass")


PARTS = {
    kind.__name__: kind
    for kind in (
        Dense,
        SumOfViews,
        Concatenated,
        Positions,
        Packed,
        Transposed,
        Strided,
        Alternatives,
        Unused,
        Twice,
        Vectors,
        Tokens,
        Skipped,
        InPlace,
        Counted,
        Limited,
        View,
        AuxiliaryLoss,
        Attention,
    )
}


class RandomModel(nn.Module):
    """Parts in a row, each a residual; some run side by side, in an order that the caller chooses.

    ``forward(x, tokens, choices, reverse)``: x (batch, LENGTH, DIM), tokens (batch, LENGTH); a choice for each part;
    whether parts side by side run, and so come in the backward pass, in reverse.

    Attributes:
        parts: may be changed between passes.
        head: the part whose matrix is used once more, by the model itself, as a tied head is written; None: of none.
        raises: before which part the next pass raises: ``("forward", index)`` or ``("backward", index)``.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        side_by_side: Sequence[bool] = (),
        tied: tuple[int, int] | None = None,
        frozen: int | None = None,
        float32: Sequence[int] = (),
        head: int | None = None,
        has_matrix: bool = False,
    ):
        super().__init__()
        self.matrix = _weights(DIM, DIM) if has_matrix else None
        self.parts = nn.ModuleList(PARTS[kind]() for kind in kinds)
        self._side_by_side = side_by_side
        if frozen is not None:
            self.parts[frozen].requires_grad_(False)
        if tied is not None:
            first, second = (self.parts[index].linear for index in tied)
            second.weight = first.weight
        for index in float32:
            self.parts[index].float()
        self.head = head
        self.raises: tuple[str, int] | None = None

    def forward(self, x: Tensor, tokens: Tensor, choices: Sequence[int], reverse: bool = False) -> Tensor:
        pending: list[int] = []
        if self.matrix is not None:
            x = x + x @ self.matrix
        for index in range(len(self.parts)):
            if self.raises == ("forward", index):
                raise Raised("in the forward pass")
            if self.raises == ("backward", index):
                x = _RaisesInBackward.apply(x)
            pending.append(index)
            is_last = index + 1 == len(self.parts)
            if not is_last and index < len(self._side_by_side) and self._side_by_side[index]:
                continue
            order = pending[::-1] if reverse else pending
            results = {one: self._run(one, x, tokens, choices[one % len(choices)]) for one in order}
            # Added up in one order everywhere, to round alike.
            for one in pending:
                x = x + results[one]
            pending = []
        if self.head is not None and self.head < len(self.parts):
            matrix = matrix_of(self.parts[self.head])
            if matrix is not None:
                x = x + (x.to(matrix.dtype) @ matrix.T).double()
        return x

    def _run(self, index: int, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        part = self.parts[index]
        dtype = next(part.parameters()).dtype
        x = x.clone() if any(isinstance(one, InPlace) for one in part.modules()) else x
        return torch.tanh(part(x.to(dtype), tokens, choice)).double()

    def auxiliary_loss(self) -> Tensor | float:
        """What the parts have kept of the last pass; they keep it no longer."""
        loss: Tensor | float = 0.0
        for part in self.modules():
            if isinstance(part, AuxiliaryLoss) and part.loss is not None:
                loss, part.loss = loss + part.loss, None
        return loss


class LanguageModel(BasicsTransformerLM):
    """A model whose layers ranks can share, with the attributes of :class:`RandomModel`."""

    def __init__(self, blocks: int, is_tied: bool, frozen: int | None):
        super().__init__(**LANGUAGE, num_layers=blocks)
        if is_tied:
            self.lm_head.weight = self.token_embeddings.weight
        for name, parameter in self.named_parameters():
            # Else a norm whose weight were left out would be as good.
            if ".ln" in name or name.startswith("ln_"):
                nn.init.uniform_(parameter, 0.5, 1.5)
        self.raises: tuple[str, int] | None = None
        if frozen is not None:
            self.parts[frozen % len(self.parts)].requires_grad_(False)

    @property
    def parts(self) -> list[nn.Module]:
        return [*self.layers, self.ln_final, self.lm_head, self.token_embeddings]

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if self.raises is not None and self.raises[0] == "forward":
            raise Raised("in the forward pass")
        return logits if self.raises is None else _RaisesInBackward.apply(logits)

    def auxiliary_loss(self) -> float:
        return 0.0


def matrix_of(part: nn.Module) -> nn.Parameter | None:
    """The weight of its linear layer; None if it has no such layer."""
    linear = getattr(part, "linear", None)
    return None if linear is None else linear.weight
