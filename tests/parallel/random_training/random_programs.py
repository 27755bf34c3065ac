"""Random programs: models, and lists of what users do with them, as data.

A program is drawn in the test process from a seed and sent to every rank. Its ``repr`` is a literal, to be pasted into
``REGRESSIONS`` of ``test_random_training.py``. Any list of actions is a program: what makes no sense at its place is
skipped by all ranks and by the process that they are compared with, so that a list may be cut to what fails.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from random_models import DIM, LANGUAGE, LENGTH, PARTS, VOCABULARY, LanguageModel, RandomModel
from torch import Tensor

from cs336sys.accounting.sharding.partition import SequenceSplit

Action = tuple

DDP = ("naive", "flat", "overlap", "bucketed")
WRAPPERS = (*DDP, "naive+optimizer", "bucketed+optimizer", "optimizer-flat", "optimizer-flat", "fsdp", "fsdp", "fsdp")

# What ranks that work on the same sequences share: layers, layers and the sequence between them, or the sequence.
INNER = {"layers": ("layers", "sequence-parallel"), "sequence": ("ring", "all-to-all")}

# Each with the kind of what neighbouring ranks share; with one, the wrapper is drawn later.
_DRAWN = (*((wrapper, None) for wrapper in WRAPPERS), (None, "layers"), (None, "layers"), (None, "sequence"))

# A large eps: where a gradient is zero but for rounding, an ordinary one would make steps of the rounding.
_OPTIONS = {"lr": 0.01, "eps": 1e-2}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, _OPTIONS),
    "amsgrad": (torch.optim.AdamW, _OPTIONS | {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, _OPTIONS | {"weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, _OPTIONS),
    "nadam": (torch.optim.NAdam, _OPTIONS),
    "radam": (torch.optim.RAdam, _OPTIONS),
    "rmsprop": (torch.optim.RMSprop, _OPTIONS | {"momentum": 0.5}),
    "centered": (torch.optim.RMSprop, _OPTIONS | {"centered": True}),
    "adagrad": (torch.optim.Adagrad, _OPTIONS),
    "adadelta": (torch.optim.Adadelta, _OPTIONS | {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 1.0}),
}

# Parts of which a backward pass may reach no parameter. Nobody promises anything of several wrapped modules in one
# graph of which a rank's backward pass reaches only some.
MAY_BE_LEFT_OUT = ("Alternatives", "Skipped", "View")

# Parts that do more with a sequence than attention and the same with each token.
_OF_WHOLE_SEQUENCES = ("Positions", "AuxiliaryLoss")


_STATE_EDITS = ("clear", "reassign", "scale", "replace")
_CHANGES = ("add", "replace", "adapt", "remove", "swap", "tie", "untie", "freeze", "unfreeze")


@dataclass
class Leg:
    """The numbers of actions that one set of ranks does."""

    world_size: int
    actions: list[int]


@dataclass(frozen=True)
class Program:
    """A model, how it is wrapped, and what is done with it.

    Attributes:
        actions: each a name, which is a method of ``OneProcess``, and its arguments.
        towers: into how many modules the parts are divided, each wrapped and with an optimizer of its own.
        bucket_mb: of BucketedDDP and ShardedOptimizer.
        inner: what neighbouring ranks share, one of ``INNER``; empty: nothing.
        inner_ranks: how many share it, as far as they divide all ranks.
        length: tokens of a sequence.
    """

    wrapper: str
    actions: tuple[Action, ...] = ()
    world_size: int = 2
    seed: int = 0
    kinds: tuple[str, ...] = ("Dense",)
    towers: int = 1
    batch: int = 1
    side_by_side: tuple[bool, ...] = ()
    tied: tuple[int, int] | None = None
    frozen: int | None = None
    float32: tuple[int, ...] = ()
    head: int | None = None
    has_matrix: bool = False
    inputs_need_gradients: bool = True
    optimizer: str = "sgd"
    bucket_mb: float | None = None
    prefetch: int = 1
    keep_gathered: int = 0
    waits_in_module: bool = False
    inner: str = ""
    inner_ranks: int = 1
    length: int = LENGTH

    def __repr__(self) -> str:
        settings = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return f"Program({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    @property
    def shares_layers(self) -> bool:
        return self.inner in INNER["layers"]

    @property
    def shares_sequence(self) -> bool:
        return self.inner in INNER["sequence"]

    def mesh(self, world_size: int) -> tuple[int, int]:
        """Groups that share the batch, and ranks of a group."""
        # Without a wrapper nothing is averaged over groups.
        ranks = world_size if self.wrapper == "none" else math.gcd(self.inner_ranks, world_size)
        if self.inner == "all-to-all" and DIM % ranks:
            # They could not share the heads.
            ranks = 1
        return world_size // ranks, ranks

    def split(self, world_size: int) -> SequenceSplit:
        """The tokens of each rank of a group."""
        ranks = self.mesh(world_size)[1] if self.shares_sequence else 1
        return SequenceSplit(self.length, ranks, is_zigzag=self.inner == "ring")

    def models(self) -> list[RandomModel]:
        """The same on every rank."""
        torch.manual_seed(self.seed)
        size = -(-len(self.kinds) // self.towers)
        shares = [range(len(self.kinds))[start : start + size] for start in range(0, len(self.kinds), size)]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            if self.shares_layers:
                return [LanguageModel(len(self.kinds), self.tied is not None, self.frozen)]
            return [
                RandomModel(
                    [self.kinds[index] for index in share],
                    self.side_by_side[share.start : share.stop],
                    self.tied if self.towers == 1 else None,
                    self.frozen if number == 0 and self.frozen in share else None,
                    [index - share.start for index in self.float32 if index in share],
                    self.head if number == 0 else None,
                    self.has_matrix and number == 0,
                )
                for number, share in enumerate(shares)
            ]
        finally:
            torch.set_default_dtype(before)

    def data(self, seed: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, tokens and targets of a rank, or of the ranks that share them; x of a language model are tokens."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if self.shares_layers:
            shape = (2, self.batch, LANGUAGE["context_length"])
            tokens, targets = torch.randint(LANGUAGE["vocab_size"], shape, generator=generator)
            return tokens, tokens, targets
        shape = (self.batch, self.length, DIM)
        tokens = torch.randint(VOCABULARY, shape[:2], generator=generator)
        x, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return x.requires_grad_(self.inputs_need_gradients), tokens, targets

    @property
    def tolerance(self) -> float:
        """Of values of size 1: what rounding in the narrowest dtype leaves after the steps."""
        if self.float32:
            return 1e-3
        if any(name == "clip" and args[1:] == [0.5] for name, *args in self.actions):
            # The root of a gradient that is zero but for rounding is 1e-9, not 1e-18.
            return 1e-6
        return 1e-6 if self.shares_layers else 1e-9

    def legs(self) -> list["Leg"]:
        """The actions between restarts on another number of ranks."""
        legs = [Leg(self.world_size, [])]
        for number, (name, *args) in enumerate(self.actions):
            legs[-1].actions.append(number)
            if name == "restart" and args[0] != legs[-1].world_size:
                legs.append(Leg(args[0], []))
        return legs


def choices_of(seed: int, rank: int) -> list[int]:
    """What the parts do with the data of a rank in a pass: see ``RandomModel``."""
    rng = random.Random(1000 * seed + rank)
    return [rng.randint(0, 2) for _ in range(5)]


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    wrapper, shared = _DRAWN[seed % len(_DRAWN)]
    world_size = (2, 3, 2, 4, 3, 1)[seed // len(_DRAWN) % 6]
    if shared is not None:
        wrapper = rng.choice(("none", *DDP, "fsdp", "fsdp") if shared == "layers" else WRAPPERS)
    # FSDP refuses weights that change in a forward pass.
    common = [kind for kind in PARTS if wrapper != "fsdp" or kind != "Limited" or rng.random() < 0.1]
    kinds = tuple(rng.choice(common) for _ in range(rng.randint(1, 5)))
    if shared == "sequence":
        kinds = (*(kind for kind in kinds[1:] if kind not in _OF_WHOLE_SEQUENCES), "Attention")
    elif shared == "layers":
        # As many blocks of a language model.
        kinds = ("Dense",) * rng.choice((1, 1, 2))
    dense = [index for index, kind in enumerate(kinds) if kind in ("Dense", "Twice")]
    tied = tuple(sorted(rng.sample(dense, 2))) if len(dense) > 1 and rng.random() < 0.6 else None
    is_mixed = tied is None and rng.random() < 0.2
    may_be_divided = wrapper == "fsdp" or not any(kind in MAY_BE_LEFT_OUT for kind in kinds)
    program = Program(
        wrapper,
        world_size=world_size,
        seed=seed,
        kinds=kinds,
        towers=2 if len(kinds) > 1 and may_be_divided and tied is None and rng.random() < 0.2 else 1,
        batch=rng.choice((1, 1, 2)),
        side_by_side=tuple(rng.random() < 0.4 for _ in kinds) if rng.random() < 0.5 else (),
        tied=tied,
        frozen=rng.choice((None, None, rng.randrange(len(kinds)))),
        float32=tuple(index for index in range(len(kinds)) if is_mixed and rng.random() < 0.5),
        head=rng.choice((None, None, None, rng.randrange(len(kinds)))),
        has_matrix=rng.random() < 0.2,
        inputs_need_gradients=rng.random() < 0.5,
        optimizer=rng.choice(tuple(OPTIMIZERS)),
        bucket_mb=rng.choice((None, 1e-9, 1e-4, 3e-4)),
        prefetch=rng.choice((0, 1, 2)),
        keep_gathered=rng.choice((0, 0, 1, 2)),
        waits_in_module=rng.random() < 0.3,
    )
    if shared is not None:
        program = replace(
            program,
            inner=rng.choice(INNER[shared]),
            inner_ranks=rng.choice((2, 2, 3, 4)) if shared == "layers" or world_size != 3 else 3,
            length=rng.randint(4, 9),
            tied=(0, 1) if shared == "layers" and rng.random() < 0.5 else program.tied,
            towers=1,
            float32=(),
        )
        if shared == "layers":
            program = replace(program, side_by_side=(), head=None, has_matrix=False)
    actions = [action for _ in range(rng.randint(2, 7)) for action in _some(rng, program)]
    return replace(program, actions=tuple(actions))


def _some(rng: random.Random, program: Program) -> Iterator[Action]:
    """A few actions that often come together."""
    part = rng.randrange(5)
    draw = rng.random()
    if draw < 0.38:
        yield from _step(rng)
    elif draw < 0.58:
        yield _anything(rng)
    elif draw < 0.8:
        kind = rng.choice((*_CHANGES, "add", "freeze", *("unfreeze",) * (1 if program.frozen is None else 4)))
        if kind == "unfreeze" and program.frozen is not None and rng.random() < 0.7:
            part = program.frozen
        yield _change(rng, kind, part)
        if rng.random() < (0.4 if kind == "unfreeze" else 0.8):
            yield ("refresh",)
            if kind in ("add", "replace", "adapt", "untie") and rng.random() < 0.8:
                yield ("optimize_new",)
        elif rng.random() < 0.4:
            # Neither is the pass known to the wrapper.
            yield ("forward", rng.randrange(100), "inner")
            yield ("backward", "all", True)
        yield from _step(rng)
    elif draw < 0.87:
        yield ("keep_weights",)
        yield from _step(rng)
        assigns = rng.random() < 0.4
        yield ("restore_weights", assigns, rng.choice(("wrapper", "module")))
        if assigns and rng.random() < 0.8:
            yield ("refresh",)
            yield ("optimize_new",)
        yield from _step(rng)
    elif draw < 0.92:
        yield ("keep_optimizer",)
        yield from _step(rng)
        yield ("restore_optimizer",) if rng.random() < 0.4 else ("edit_state", rng.choice(_STATE_EDITS))
        if rng.random() < 0.3:
            yield ("restart", program.world_size)
        yield from _step(rng)
    else:
        if rng.random() < 0.4:
            # Not known to wrappers, but saved.
            yield ("swap", part, rng.randrange(5))
        yield ("restart", rng.choice((program.world_size, program.world_size, 1, 2, 3, 4)))
        yield from _step(rng)


def _step(rng: random.Random) -> Iterator[Action]:
    """A training step, with something unusual in it now and then."""

    def odd(chance: float = 0.1) -> list[Action]:
        return [_anything_in_a_step(rng)] if rng.random() < chance else []

    if rng.random() < 0.15:
        yield ("evaluate", rng.randrange(100), rng.choice(("no_grad", "inference_mode")))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        yield _forward(rng)
        yield from odd()
        yield ("backward", "all", rng.random() < 0.1)
    yield _forward(rng)
    yield from odd()
    if rng.random() < 0.1:
        yield _forward(rng)
        yield from odd()
        yield ("backward", rng.choice(("all", "first", "last")), True)
    else:
        yield ("backward", "all", True, *((rng.randrange(3),) if rng.random() < 0.05 else ()))
    if rng.random() < 0.2:
        yield ("sum_losses",)
    yield from odd()
    if rng.random() < 0.3:
        yield ("clip", rng.choice((0.05, 0.5, 100.0)), rng.choice((2.0, 2.0, 1.0, 0.5, 3.0, "inf")))
    yield from odd(0.05)
    yield ("step",)
    yield from odd(0.05)
    if rng.random() < 0.1:
        # As a generator's loss gives gradients to the discriminator, which drops them.
        yield _forward(rng)
        yield ("backward", "all", True)
    if rng.random() < 0.1:
        yield ("keep_gradients", rng.randrange(5))
    elif rng.random() < 0.95:
        yield ("zero_grad", rng.choice(("optimizer", "optimizer", "module", "wrapper")), rng.random() < 0.7)


def _forward(rng: random.Random) -> Action:
    seed = rng.randrange(100)
    draw = rng.random()
    if draw < 0.05:
        return ("forward", seed, "penalty", rng.randrange(3))
    if draw < 0.1:
        return ("forward", seed, "inner")
    if draw < 0.14:
        return ("forward", seed, "raises in forward", rng.randrange(3))
    if draw < 0.18:
        return ("forward", seed, "raises in backward", rng.randrange(3))
    return ("forward", seed)


def _anything_in_a_step(rng: random.Random) -> Action:
    return rng.choice(
        (
            ("zero_grad", rng.choice(("optimizer", "module", "wrapper")), rng.random() < 0.7),
            ("sum_losses",),
            ("sum_losses",),
            ("evaluate", rng.randrange(100), "no_grad"),
            ("finish",),
            ("step",),
            ("drop",),
            ("clip", 0.1),
            ("scale_weights", "data", rng.randrange(3)),
            ("scale_weights", "clamp", rng.randrange(3)),
            ("rebuild_optimizer",),
            ("keep_weights",),
        )
    )


def _change(rng: random.Random, kind: str, part: int) -> Action:
    simple = [name for name in PARTS if name not in (*MAY_BE_LEFT_OUT, *_OF_WHOLE_SEQUENCES, "Attention", "Limited")]
    if kind == "add":
        return ("add", rng.choice(simple), rng.randrange(100))
    if kind == "replace":
        return ("replace", part, rng.choice(simple), rng.randrange(100))
    if kind == "adapt":
        return ("adapt", part, rng.randrange(100))
    if kind in ("swap", "tie"):
        return (kind, part, rng.randrange(5))
    return (kind, part)


def _anything(rng: random.Random) -> Action:
    draw = rng.random()
    if draw < 0.3:
        return _anything_in_a_step(rng)
    if draw < 0.4:
        return _change(rng, rng.choice(_CHANGES), rng.randrange(5))
    return rng.choice(
        (
            ("refresh",),
            ("optimize_new",),
            ("edit_state", rng.choice(_STATE_EDITS)),
            ("set_rate", rng.choice((0.002, 0.03))),
            ("hook", rng.randrange(3)),
            ("rebuild_optimizer",),
            ("scale_weights", rng.choice(("data", "clamp", "multiply")), rng.randrange(3)),
            ("restore_weights", rng.random() < 0.4, rng.choice(("wrapper", "module"))),
        )
    )


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that fails, too: without actions and settings that it does not need."""
    size = len(program.actions)
    while size:
        start = 0
        while start < len(program.actions):
            kept = program.actions[:start] + program.actions[start + size :]
            if fails(fewer := replace(program, actions=kept)):
                program = fewer
            else:
                start += size
        size //= 2
    for one in fields(Program):
        if one.name in ("wrapper", "actions", "kinds", "world_size", "seed"):
            continue
        simpler = replace(program, **{one.name: one.default})
        if simpler != program and fails(simpler):
            program = simpler
    for index in reversed(range(len(program.kinds))):
        kinds = program.kinds[:index] + program.kinds[index + 1 :]
        if kinds and program.tied is None and program.frozen is None and not program.float32:
            fewer = replace(program, kinds=kinds)
            if fails(fewer):
                program = fewer
    for index in range(len(program.kinds)):
        plain = replace(program, kinds=(*program.kinds[:index], "Dense", *program.kinds[index + 1 :]))
        if plain != program and fails(plain):
            program = plain
    return program
