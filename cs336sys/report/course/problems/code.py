"""The problems whose answer is code: where it is, whether the course's tests pass, and what measured runs say of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cs336sys.report.course.evidence import Evidence
from cs336sys.report.course.problem import Answer, Command, Handout, Part, Problem, Target, runs_of, simple
from cs336sys.report.course.problems.flash_benchmarking import flash_commands
from cs336sys.report.course.words import failures, joined, ms, times
from cs336sys.results.model import Cell


@dataclass(frozen=True)
class Code:
    """What was written for a problem.

    Attributes:
        name: of the class, as it is imported.
        tests: of the course, beginnings of their names; of one year's alone, where each year names its own.
        command, settings: whose cells were checked with this code.
        explained: of tests that may fail, why they do.
    """

    name: str
    tests: tuple[str, ...] | Mapping[int, tuple[str, ...]]
    command: str = ""
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()
    explained: Mapping[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> Callable[[Evidence, Handout], Answer]:
        def written(evidence: Evidence, handout: Handout) -> Answer:
            sentences = [f"`{self.name}`."]
            tests = self.tests_of(handout)
            outcomes = {name: outcome for name, outcome in evidence.tests.items() if name.startswith(tests)}
            passed = [name for name, outcome in outcomes.items() if outcome == "passed"]
            failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
            if passed or failed:
                named = f" ({joined(passed)})" if passed else ""
                fails = f", not {joined(failed)}" if failed else ""
                sentences.append(
                    f"The course's tests: {len(passed)} of {len(passed) + len(failed)} pass{named}{fails}."
                )
                sentences += [self.explained[name] for name in failed if name in self.explained]
            found = evidence.find(self.command, **dict(self.settings)) if self.command else []
            cells = [cell for group in found for cell in group.cells]
            sentences += _check_words(cells)
            missing = (
                []
                if passed or failed or not tests
                else [
                    f"the course's tests; the file of `python -m pytest tests -k '{' or '.join(tests)}' --junitxml "
                    "course-tests.xml` among `--from` says"
                ]
            )
            return Answer(sentences, (), {}, runs_of([group for group in found if group.measured][:1]), missing)

        return written

    def tests_of(self, handout: Handout) -> tuple[str, ...]:
        return self.tests if isinstance(self.tests, tuple) else self.tests[handout.year]


def _check_words(cells: Sequence[Cell]) -> list[str]:
    """What comparing with a single process, or with float64, has found before anything was timed."""
    checked = [
        cell for cell in cells if cell.status == "ok" and cell.derived.get("relative_difference_percent") is not None
    ]
    sentences = []
    if checked:
        most = {
            precision: max(
                (cell.derived["relative_difference_percent"], cell.derived["largest_difference"])
                for cell in checked
                if cell.configuration["precision"] == precision
            )
            for precision in sorted({cell.configuration["precision"] for cell in checked}, reverse=True)
        }
        listed = [
            f"{largest:.1e} in {precision} ({relative:.2g} % of the way that the parameter went)"
            for precision, (relative, largest) in most.items()
        ]
        sentences.append(
            f"Its weights were compared with those of training in one process {_count(len(checked))}; after 5 steps "
            f"they differ, where they differ most, by {joined(listed)}."
        )
    errors = [
        value
        for cell in cells
        if cell.status == "ok"
        for name, value in cell.derived.items()
        if name.endswith("_error") and isinstance(value, float)
    ]
    if errors:
        sentences.append(
            f"Compared with float64 in {sum(cell.status == 'ok' for cell in cells)} cells, the largest relative error "
            f"of output and gradients is {max(errors):.1e}."
        )
    return sentences + failures(
        [cell for cell in cells if cell.status == "wrong"], lambda cell: cell.configuration["size"]
    )


def _count(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _flash(implementation: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (("implementation", (implementation,)),)


_ATTENTION = "cs336sys.kernels.attention"
_TILED = Code(f"{_ATTENTION}.FlashAttentionTorch", ("test_flash_forward_pass_pytorch",), "flash", _flash("tiled"))
_TRITON = Code(f"{_ATTENTION}.FlashAttentionTriton", ("test_flash_forward_pass_triton",), "flash", _flash("triton"))
# Its backward pass is the formulas in PyTorch, compiled, as asked; nothing of `flash` is measured with it.
_COMPILED = Code(f"{_ATTENTION}.tiled.FlashAttentionCompiledBackward", ("test_flash_backward_pytorch",))
_TRITON_BACKWARD = Code(
    f"{_ATTENTION}.FlashAttentionTriton", ("test_flash_backward_triton",), "flash", _flash("triton")
)


def _small(target: Target) -> list[Command]:
    """A few shapes of all three, as the tests have them; of a small write-up flash_benchmarking's are enough."""
    if target.is_small:
        return flash_commands(target)
    shape = ("--batch-size", "1", "--num-heads", "4", "--context", "128,1024", "--head-dim", "64")
    return [simple(target, "flash", "--implementation", "triton,tiled,eager", *shape, seconds=40)]


FLASH_FORWARD = Problem(
    "flash_forward",
    "FlashAttention-2 forward pass",
    (
        Part("a", _TILED.answer, _small),
        Part("b", _TRITON.answer, _small),
        Part("c", _TRITON.answer, _small),
    ),
)


def _backward(evidence: Evidence, handout: Handout) -> Answer:
    """What is asked, and beside it the backward pass in Triton."""
    asked, besides = (code.answer(evidence, handout) for code in (_COMPILED, _TRITON_BACKWARD))
    sentences = [*asked.sentences, "Besides, with a backward pass in Triton:", *besides.sentences]
    return Answer(sentences, (), {}, besides.runs, [*asked.missing, *besides.missing])


FLASH_BACKWARD = Problem("flash_backward", "FlashAttention-2 backward pass", (Part("", _backward, _small),))


def _trained(name: str, title: str, code: Code) -> Problem:
    return Problem(name, title, (Part("", code.answer),))


def _strategy(strategy: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (("strategy", (strategy,)),)


_DDP = "cs336sys.parallel.ddp"
NAIVE_DDP = _trained("naive_ddp", "Naive DDP", Code(f"{_DDP}.NaiveDDP", (), "ddp", _strategy("naive")))
DDP_OVERLAP = _trained(
    "ddp_overlap_individual_parameters",
    "DDP that overlaps individual parameters",
    Code(
        f"{_DDP}.OverlappedDDP",
        {2025: ("test_DistributedDataParallelIndividualParameters",), 2026: ("test_DistributedDataParallel[",)},
        "ddp",
        _strategy("overlap"),
    ),
)
DDP_BUCKETED = _trained(
    "ddp_overlap_bucketed",
    "DDP that overlaps buckets",
    Code(
        f"{_DDP}.BucketedDDP",
        ("test_DistributedDataParallelCPU", "test_DistributedDataParallelBucketed"),
        "ddp",
        _strategy("bucketed"),
    ),
)
OPTIMIZER_STATE_SHARDING = _trained(
    "optimizer_state_sharding",
    "Optimizer state sharding",
    Code(
        "cs336sys.parallel.sharded_optimizer.ShardedOptimizer",
        ("test_sharded_optimizer",),
        "shard",
        _strategy("optimizer"),
    ),
)
FSDP = _trained(
    "fsdp",
    "Fully sharded data parallel",
    Code(
        "cs336sys.parallel.fsdp.FSDP",
        ("test_fsdp",),
        "shard",
        _strategy("fsdp"),
        {
            "test_fsdp_correctness[fp32]": "test_fsdp_correctness[fp32] asks for weights that are bitwise those of "
            "training on the whole batch; the products round a sum over a batch otherwise than two sums over its "
            "halves, by a last digit."
        },
    ),
)


# What the handout calls the naive baseline, ms.
_NAIVE_BASELINE_MS = 10_000.0


def training_step(evidence: Evidence, handout: Handout) -> Answer | None:
    """The leaderboard of 2026: a whole step of the 8B model."""
    every = evidence.find_each("shard", size=("8b",), board=(True,)) or evidence.find_each("shard", size=("8b",))
    if not every:
        return None
    # A later version is measured again with the same settings: the run with the best step is what counts.
    measured = [(cell, group) for group in every for cell in group.measured]
    found = [min(measured, key=lambda one: _step_ms(one[0]))[1]] if measured else every
    cells = [cell for group in found for cell in group.cells]
    sentences = []
    if measured:
        best = min(found[0].measured, key=_step_ms)
        names = best.configuration
        sentences += [
            f"A whole step of the 8B model takes {ms(_step_ms(best))} (median) on {names['world_size']} ranks of this "
            f"machine: batch {names['batch_size']}, context {names['context']}, {names['precision']}, checkpointing "
            f"{names['checkpointing']}.",
            f"That is {times(_NAIVE_BASELINE_MS / _step_ms(best))} the speed of the naive baseline of "
            f"{_NAIVE_BASELINE_MS / 1e3:g} s, which is for two B200.",
        ]
    sentences += failures(cells, lambda cell: f"8b with checkpointing {cell.configuration['checkpointing']}")
    keys = ("size", "world_size", "checkpointing", "state_dtype", "wall_ms", "median_ms", "step_ms", "mfu_percent")
    tables = []
    for group in found:
        for name in ("board", "shard"):
            tables += group.table(name, *keys, "peaks", "status")
        tables += group.table("shares")
    return Answer(sentences, tables, {}, runs_of(found))


def _step_ms(cell: Cell) -> float:
    return cell.samples["wall" if "wall" in cell.samples else "step"].median


def training_step_commands(target: Target) -> list[Command]:
    if target.is_small:
        return []
    return [simple(target, "shard", "--size", "8b", "--board", "--world-size", "2", seconds=300, gpus=2)]


LEADERBOARD_2026 = Problem(
    "leaderboard", "Leaderboard: fastest training step", (Part("", training_step, training_step_commands),)
)
