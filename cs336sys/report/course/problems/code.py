"""The problems whose answer is code: where it is, whether the course's tests pass, and what measured runs say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cs336sys.report.course.answer import Answer
from cs336sys.report.course.evidence import cells_of
from cs336sys.report.course.problem import measurement, sized
from cs336sys.report.course.problems.flash_benchmarking import flash_commands
from cs336sys.results.model import Cell, Samples


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
        passed, failed = ([name for name in outcomes if outcomes[name] == status] for status in ("passed", "failed"))
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
            keys = ("relative_difference_percent", "largest_difference")
            relative, largest = max(tuple(columns[key] for key in keys) for columns in derived)
            differences.append({"precision": precision, "relative": relative, "largest": largest})
        answer.say("compared", count=len(checked), once=len(checked) == 1, differences=differences)
    figures = [(name, value) for cell in measured for name, value in cell.derived.items()]
    errors = [value for name, value in figures if name.endswith("_error") and isinstance(value, float)]
    if errors:
        answer.say("error in float64", count=len(measured), most=max(errors))
    answer.say_failures([cell for cell in cells if cell.status == "wrong"], "size of the cell")


_ATTENTION, _DDP = "cs336sys.kernels.attention", "cs336sys.parallel.ddp"
_TRITON_NAME, _TRITON_SETTINGS = f"{_ATTENTION}.FlashAttentionTriton", {"implementation": ("triton",)}
_TILED_SETTINGS = {"implementation": ("tiled",)}
TILED = Code(f"{_ATTENTION}.FlashAttentionTorch", ("test_flash_forward_pass_pytorch",), "flash", _TILED_SETTINGS)
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


# A few shapes of all three, as the tests have them; of a small write-up flash_benchmarking's are enough.
_FEW_SHAPES = "--batch-size 1 --num-heads 4 --context 128,1024 --head-dim 64"
few_shapes = sized(measurement(f"flash --implementation triton,tiled,eager {_FEW_SHAPES}", 40), flash_commands)

_OVERLAP_TESTS = {
    2025: ("test_DistributedDataParallelIndividualParameters",),
    2026: ("test_DistributedDataParallel[",),
}
_BUCKET_TESTS = ("test_DistributedDataParallelCPU", "test_DistributedDataParallelBucketed")
_SHARDED, _FSDP = "cs336sys.parallel.sharded_optimizer.ShardedOptimizer", "cs336sys.parallel.fsdp.FSDP"
NAIVE = Code(f"{_DDP}.NaiveDDP", (), "ddp", {"strategy": ("naive",)})
OVERLAPPED = Code(f"{_DDP}.OverlappedDDP", _OVERLAP_TESTS, "ddp", {"strategy": ("overlap",)})
BUCKETED = Code(f"{_DDP}.BucketedDDP", _BUCKET_TESTS, "ddp", {"strategy": ("bucketed",)})
SHARDED_OPTIMIZER = Code(_SHARDED, ("test_sharded_optimizer",), "shard", {"strategy": ("optimizer",)})
FSDP = Code(_FSDP, ("test_fsdp",), "shard", {"strategy": ("fsdp",)}, explained=("test_fsdp_correctness[fp32]",))

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
    measured = [(_steps_of(cell), cell, group) for group in selections for cell in group.measured]
    if measured:
        by_protocol = [candidate for candidate in measured if sum(candidate[0].measured) >= _PROTOCOL_MS]
        best, cell, group = min(by_protocol or measured, key=lambda candidate: candidate[0].median)
        selections = [group]
        answer.say("whole step", cell.configuration, step=best.median)
        runs = group.of(checkpointing=cell.configuration["checkpointing"])
        if len(runs) > 1:
            answer.say("runs", times=[_steps_of(run).median for run in runs])
        steps, warmup = len(best.measured), cell.configuration["warmup"]
        # It divides by the time of a step, and takes whole ones.
        as_asked = (warmup, steps) == tuple(int(duration / best.median) for duration in _DO_BENCH_MS)
        facts = {"steps": steps, "warmup": warmup, "as_asked": as_asked}
        answer.say("measured for", facts, seconds=sum(best.measured) / 1e3)
        if not by_protocol:
            answer.lack("protocol")
        facts = {"step": best.median, "ratio": _NAIVE_BASELINE_MS / best.median, "baseline": _NAIVE_BASELINE_MS / 1e3}
        answer.say("baseline", facts)
    answer.say_failures(cells_of(selections), "board cell")
    keys = ("size", "world_size", "checkpointing", "state_dtype", "wall_ms", "median_ms", "step_ms", "mfu_percent")
    for group in selections:
        for name in ("board", "shard"):
            answer.show([group], name, *keys, "peaks", "status")
        answer.show([group], "shares")


def _steps_of(cell: Cell) -> Samples:
    return cell.samples.get("wall", cell.samples["step"])


training_step_commands = sized(measurement("shard --size 8b --board --world-size 2", 300, gpus=2))
