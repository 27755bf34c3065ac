"""Random models, and random histories of training them: the same on every rank from a seed.

A model adds up small parts, each with a habit that has broken, or could break, a wrapper: gradients that share memory,
tied, reused, frozen and strided parameters, and parameters that some steps or some ranks do not use.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DIM, LENGTH, VOCABULARY = 4, 3, 5


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class Dense(nn.Module):
    """A linear layer, frozen at first if asked for."""

    def __init__(self, frozen: bool = False):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return self.linear(x)


class SumOfViews(nn.Module):
    """Both gradients are views of one tensor, all of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _weights(DIM * DIM, 1), _weights(DIM * DIM, 1)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ (self.first.view(DIM, DIM) + self.second.view(DIM, DIM))


class Concatenated(nn.Module):
    """Gradients are different slices of one tensor."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = _weights(1, DIM), _weights(DIM - 1, DIM)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ torch.cat((self.upper, self.lower))


class Positions(nn.Module):
    """With one sequence a rank the gradient is a view of what the backward pass goes on with."""

    def __init__(self):
        super().__init__()
        self.weight = _weights(LENGTH, DIM)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x + self.weight.unsqueeze(0)


class Packed(nn.Module):
    """One parameter for three products, one of which a choice leaves out."""

    def __init__(self):
        super().__init__()
        self.weight = _weights(3 * DIM, DIM)

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


class Alternatives(nn.Module):
    """The choice, which may differ between ranks and passes, says which of two parameters is used, if any."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _weights(DIM, DIM), _weights(DIM, DIM)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        # Depends on x whatever the choice is, for a backward pass that always passes here.
        return x * 0.5 if choice == 0 else x @ (self.first if choice == 1 else self.second)


class Unused(nn.Module):
    """Has one parameter that nothing ever uses."""

    def __init__(self):
        super().__init__()
        self.used, self.never = _weights(DIM, DIM), _weights(DIM, DIM)

    def forward(self, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        return x @ self.used


class Twice(nn.Module):
    """One layer used twice in a pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

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


PARTS = (
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
)


class RandomModel(nn.Module):
    """Parts in a row, each a residual; some run side by side, in an order that the caller chooses.

    ``forward(x, tokens, choices, reverse)``: x (batch, LENGTH, DIM), tokens (batch, LENGTH); a choice for each part;
    whether parts side by side run, and so come in the backward pass, in reverse.
    """

    def __init__(
        self,
        kinds: Sequence[type[nn.Module]],
        side_by_side: Sequence[bool],
        tied: tuple[int, int] | None,
        frozen: int | None,
        half: Sequence[bool],
    ):
        super().__init__()
        self.parts = nn.ModuleList(kind(frozen=True) if index == frozen else kind() for index, kind in enumerate(kinds))
        self._side_by_side = side_by_side
        if tied is not None:
            first, second = (self.parts[index].linear for index in tied)
            second.weight = first.weight
        for part, is_float32 in zip(self.parts, half, strict=True):
            part.float() if is_float32 else part.double()

    def forward(self, x: Tensor, tokens: Tensor, choices: Sequence[int], reverse: bool = False) -> Tensor:
        pending: list[int] = []
        for index in range(len(self.parts)):
            pending.append(index)
            if index + 1 < len(self.parts) and self._side_by_side[index]:
                continue
            order = pending[::-1] if reverse else pending
            results = {one: self._run(one, x, tokens, choices[one]) for one in order}
            # Added up in one order everywhere, to round alike.
            for one in pending:
                x = x + results[one]
            pending = []
        return x

    def _run(self, index: int, x: Tensor, tokens: Tensor, choice: int) -> Tensor:
        part = self.parts[index]
        dtype = next(part.parameters()).dtype
        return torch.tanh(part(x.to(dtype), tokens, choice)).double()


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: ``choices[rank][part]``."""

    choices: tuple[tuple[int, ...], ...]
    seed: int


@dataclass(frozen=True)
class Step:
    """Passes that add up, then an optimizer step.

    Attributes:
        toggled: before it, the part whose parameters are frozen or unfrozen.
        set_to_none: how gradients are dropped before it.
        evaluated: run a forward pass without gradients before it.
    """

    passes: tuple[Pass, ...]
    toggled: int | None
    set_to_none: bool
    evaluated: bool


@dataclass(frozen=True)
class Case:
    """A model, its data and its history, all from the seed."""

    seed: int
    world_size: int
    batch: int
    kinds: tuple[type[nn.Module], ...]
    side_by_side: tuple[bool, ...]
    tied: tuple[int, int] | None
    frozen: int | None
    float32: tuple[bool, ...]
    inputs_need_gradients: bool
    optimizer: str
    cap_mb: float | None
    prefetch: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        parts = ", ".join(kind.__name__ for kind in self.kinds)
        return (
            f"seed {self.seed}: {parts}; tied {self.tied}, frozen {self.frozen}, {self.optimizer}, batch {self.batch}"
        )

    def model(self) -> RandomModel:
        torch.manual_seed(self.seed)
        return RandomModel(self.kinds, self.side_by_side, self.tied, self.frozen, self.float32)

    def data(self, one: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, tokens and targets of all ranks, rank after rank."""
        generator = torch.Generator().manual_seed(one.seed)
        shape = (self.world_size * self.batch, LENGTH, DIM)
        tokens = torch.randint(VOCABULARY, shape[:2], generator=generator)
        x, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return x.requires_grad_(self.inputs_need_gradients), tokens, targets

    @property
    def tolerance(self) -> float:
        """Of parameters of size 1: what rounding in the narrowest dtype leaves after the steps."""
        return 2e-4 if any(self.float32) else 1e-9


def random_case(seed: int, world_size: int) -> Case:
    rng = random.Random(seed)
    kinds = tuple(rng.choice(PARTS) for _ in range(rng.randint(1, 5)))
    dense = [index for index, kind in enumerate(kinds) if kind is Dense]
    twins = [index for index, kind in enumerate(kinds) if kind in (Dense, Twice)]
    frozen = rng.choice(dense) if dense and rng.random() < 0.4 else None
    may_tie = [index for index in twins if index != frozen]
    tied = tuple(sorted(rng.sample(may_tie, 2))) if len(may_tie) > 1 and rng.random() < 0.6 else None
    mixed = rng.random() < 0.3 and tied is None
    toggleable = [index for index in range(len(kinds)) if tied is None or index not in tied]

    def one_pass() -> Pass:
        return Pass(
            tuple(tuple(rng.randint(0, 2) for _ in kinds) for _ in range(world_size)), seed=rng.randrange(2**31)
        )

    steps = tuple(
        Step(
            passes=tuple(one_pass() for _ in range(rng.choice((1, 1, 2, 3)))),
            toggled=rng.choice(toggleable) if toggleable and number > 0 and rng.random() < 0.25 else None,
            set_to_none=rng.random() < 0.6,
            evaluated=rng.random() < 0.2,
        )
        for number in range(rng.randint(2, 4))
    )
    return Case(
        seed=seed,
        world_size=world_size,
        batch=rng.choice((1, 1, 2)),
        kinds=kinds,
        side_by_side=tuple(rng.random() < 0.4 for _ in kinds),
        tied=tied,
        frozen=frozen,
        float32=tuple(mixed and rng.random() < 0.5 for _ in kinds),
        # Fully sharded, every rank's backward pass must come through the same parts.
        inputs_need_gradients=Alternatives in kinds or rng.random() < 0.5,
        optimizer=rng.choice(("sgd", "adamw")),
        cap_mb=rng.choice((None, 1e-9, 1e-4, 3e-4)),
        prefetch=rng.choice((0, 1, 2)),
        steps=steps,
    )
