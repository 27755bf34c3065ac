"""The problems whose answer is code: where it is, whether the course's tests pass, and what measured runs say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cs336sys.report.course.answer import Answer
from cs336sys.report.course.evidence import cells_of
from cs336sys.report.course.problem import Command, Target, simple
from cs336sys.report.course.problems.flash_benchmarking import flash_commands
from cs336sys.results.model import Cell


@dataclass(frozen=True)
class Code:
    """The code written for a problem.

    Attributes:
        name: of the class, as it is imported.
        tests: of the course, beginnings of their names; of one year's alone, where each year names its own.
        command, settings: whose cells were checked with this code.
        explained: of tests that may fail, the sentence that says why they do.
    """

    name: str
    tests: tuple[str, ...] | Mapping[int, tuple[str, ...]]
    command: str = ""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    explained: tuple[str, ...] = ()

    def __call__(self, answer: Answer) -> None:
        answer.say("code", name=self.name)
        tests = self.tests if isinstance(self.tests, tuple) else self.tests[answer.handout.year]
        outcomes = {name: outcome for name, outcome in answer.evidence.tests.items() if name.startswith(tests)}
        passed, failed = (
            [name for name, outcome in outcomes.items() if outcome == wanted] for wanted in ("passed", "failed")
        )
        if passed or failed:
            named, fails = ({"names": names} if names else None for names in (passed, failed))
            answer.say("tests", count=len(passed), of=len(passed) + len(failed), passed=named, failed=fails)
            for name in failed:
                if name in self.explained:
                    answer.say(name)
        elif tests:
            answer.lack("no tests", tests=" or ".join(tests))
        selections = answer.find(self.command, **self.settings) if self.command else []
        _say_checks(answer, cells_of(selections))
        answer.measured_by([group for group in selections if group.measured][:1])


def _say_checks(answer: Answer, cells: Sequence[Cell]) -> None:
    """Report the comparisons with a single process, or with float64, that ran before anything was timed."""
    measured = [cell for cell in cells if cell.status == "ok"]
    checked = [cell for cell in measured if cell.derived.get("relative_difference_percent") is not None]
    if checked:
        differences = []
        for precision in sorted({cell.configuration["precision"] for cell in checked}, reverse=True):
            derived = [cell.derived for cell in checked if cell.configuration["precision"] == precision]
            relative, largest = max(
                (columns["relative_difference_percent"], columns["largest_difference"]) for columns in derived
            )
            differences.append({"precision": precision, "relative": relative, "largest": largest})
        answer.say("compared", count=len(checked), once=len(checked) == 1, differences=differences)
    errors = [
        value
        for cell in measured
        for name, value in cell.derived.items()
        if name.endswith("_error") and isinstance(value, float)
    ]
    if errors:
        answer.say("error in float64", count=len(measured), most=max(errors))
    answer.say_failures([cell for cell in cells if cell.status == "wrong"], "size of the cell")


_ATTENTION, _DDP = "cs336sys.kernels.attention", "cs336sys.parallel.ddp"
_TRITON_NAME, _TRITON_SETTINGS = f"{_ATTENTION}.FlashAttentionTriton", {"implementation": ("triton",)}
TILED = Code(
    f"{_ATTENTION}.FlashAttentionTorch", ("test_flash_forward_pass_pytorch",), "flash", {"implementation": ("tiled",)}
)
TRITON = Code(_TRITON_NAME, ("test_flash_forward_pass_triton",), "flash", _TRITON_SETTINGS)
# Its backward pass is the formulas in PyTorch, compiled, as asked; nothing of `flash` is measured with it.
_COMPILED = Code(f"{_ATTENTION}.reference.FlashAttentionCompiledBackward", ("test_flash_backward_pytorch",))
_TRITON_BACKWARD = Code(_TRITON_NAME, ("test_flash_backward_triton",), "flash", _TRITON_SETTINGS)


def causal_forward(answer: Answer) -> None:
    """Answer with the code, and what its flag does."""
    TRITON(answer)
    answer.say("flag")


def flash_backward(answer: Answer) -> None:
    """Answer with the code that is asked for, and the backward pass in Triton after it."""
    _COMPILED(answer)
    answer.say("besides")
    _TRITON_BACKWARD(answer)


def few_shapes(target: Target) -> list[Command]:
    """A few shapes of all three, as the tests have them; of a small write-up flash_benchmarking's are enough."""
    if target.is_small:
        return flash_commands(target)
    shape = ("--batch-size", "1", "--num-heads", "4", "--context", "128,1024", "--head-dim", "64")
    return [simple(target, "flash", "--implementation", "triton,tiled,eager", *shape, seconds=40)]


NAIVE = Code(f"{_DDP}.NaiveDDP", (), "ddp", {"strategy": ("naive",)})
OVERLAPPED = Code(
    f"{_DDP}.OverlappedDDP",
    {2025: ("test_DistributedDataParallelIndividualParameters",), 2026: ("test_DistributedDataParallel[",)},
    "ddp",
    {"strategy": ("overlap",)},
)
BUCKETED = Code(
    f"{_DDP}.BucketedDDP",
    ("test_DistributedDataParallelCPU", "test_DistributedDataParallelBucketed"),
    "ddp",
    {"strategy": ("bucketed",)},
)
SHARDED_OPTIMIZER = Code(
    "cs336sys.parallel.sharded_optimizer.ShardedOptimizer",
    ("test_sharded_optimizer",),
    "shard",
    {"strategy": ("optimizer",)},
)
FSDP = Code(
    "cs336sys.parallel.fsdp.FSDP",
    ("test_fsdp",),
    "shard",
    {"strategy": ("fsdp",)},
    explained=("test_fsdp_correctness[fp32]",),
)

# The handout's benchmark repeats steps for so long: less by no more than a step.
_PROTOCOL_MS = 25_000.0

# Warm-up and repetition of the handout's do_bench.
_DO_BENCH_MS = 10_000, 30_000

# What the handout calls the naive baseline, ms.
_NAIVE_BASELINE_MS = 10_000.0


def training_step(answer: Answer) -> None:
    """The leaderboard of 2026: a whole step of the 8B model."""
    selections = answer.find_each("shard", size=("8b",), board=(True,)) or answer.find_each("shard", size=("8b",))
    # A later version is measured again with the same settings: the run with the best step counts, of those that follow
    # the handout's protocol if there are any.
    measured = [(cell, group) for group in selections for cell in group.measured]
    if measured:
        by_protocol = [cell_and_group for cell_and_group in measured if sum(_times(cell_and_group[0])) >= _PROTOCOL_MS]
        best, group = min(by_protocol or measured, key=lambda cell_and_group: _step_ms(cell_and_group[0]))
        selections = [group]
        answer.say("whole step", best.configuration, step=_step_ms(best))
        runs = [
            cell
            for cell in group.measured
            if cell.configuration["checkpointing"] == best.configuration["checkpointing"]
        ]
        if len(runs) > 1:
            answer.say("runs", times=[_step_ms(cell) for cell in runs])
        steps, warmup = len(_times(best)), best.configuration["warmup"]
        # It divides by the time of a step, and takes whole ones.
        as_asked = (warmup, steps) == tuple(int(duration / _step_ms(best)) for duration in _DO_BENCH_MS)
        facts = {"steps": steps, "warmup": warmup, "as_asked": as_asked}
        answer.say("measured for", facts, seconds=sum(_times(best)) / 1e3)
        if not by_protocol:
            answer.lack("protocol")
        answer.say(
            "baseline",
            step=_step_ms(best),
            ratio=_NAIVE_BASELINE_MS / _step_ms(best),
            baseline=_NAIVE_BASELINE_MS / 1e3,
        )
    answer.say_failures(cells_of(selections), "board cell")
    keys = ("size", "world_size", "checkpointing", "state_dtype", "wall_ms", "median_ms", "step_ms", "mfu_percent")
    for group in selections:
        for name in ("board", "shard"):
            answer.show([group], name, *keys, "peaks", "status")
        answer.show([group], "shares")


def _times(cell: Cell) -> Sequence[float]:
    return cell.samples.get("wall", cell.samples["step"]).measured


def _step_ms(cell: Cell) -> float:
    return cell.samples.get("wall", cell.samples["step"]).median


def training_step_commands(target: Target) -> list[Command]:
    if target.is_small:
        return []
    return [simple(target, "shard", "--size", "8b", "--board", "--world-size", "2", seconds=300, gpus=2)]
