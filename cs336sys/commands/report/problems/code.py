"""The problems whose answer is code: where it is, whether the course's tests pass, and what measured runs say of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cs336sys.commands.report.answer import Answer, facts_of
from cs336sys.commands.report.evidence import cells_of
from cs336sys.commands.report.problem import measurement, sized
from cs336sys.commands.report.problems.speed import flash_commands


@dataclass(frozen=True)
class Code:
    """The code written for a problem."""

    name: str  # Of the class, as it is imported.
    tests: tuple[str, ...]  # Of the course, beginnings of their names.
    command: str = ""  # Whose cells, of these settings, were checked with this code; empty where none runs it.
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __call__(self, answer: Answer) -> None:
        """Answer with the outcomes of the tests, and with the errors that one run of the command measured."""
        tests = {name: outcome for name, outcome in answer.evidence.tests.items() if name.startswith(self.tests)}
        passed, failed = ([name for name in tests if tests[name] == outcome] for outcome in ("passed", "failed"))
        # One run, whose command stands above the answer: in the model's own precision, fp32, if there is such a run.
        selections = answer.find(self.command, {"precision": ("fp32",)}, **self.settings)[:1]
        answer.measured_by(selections)
        cells = [facts_of(cell) for selection in selections for cell in selection.measured]
        facts = [fact for cell in cells for fact in cell.items()]
        errors = [value for name, value in facts if name.endswith("_error") and isinstance(value, float)]
        # ddp and shard compare a trained parameter with one process; the other commands have errors.
        checked = [cell for cell in cells if cell.get("relative_difference_percent") is not None]
        outcomes = {"tests": self.tests, "passed": passed, "failed": failed}
        answer.write("code.code", name=self.name, cells=cells, errors=errors, checked=checked, **outcomes)
        answer.write_failures([cell for cell in cells_of(selections) if cell.status == "wrong"], "{size}")


_ATTENTION, _DDP = "cs336sys.kernels.attention", "cs336sys.parallel.ddp"
_TRITON, _BY_TRITON = f"{_ATTENTION}.FlashAttentionTriton", {"implementation": ("triton",)}
_TILED, _BY_TILED = f"{_ATTENTION}.FlashAttentionTorch", {"implementation": ("tiled",)}
TILED = Code(_TILED, ("test_flash_forward_pass_pytorch",), "flash", _BY_TILED)
TRITON = Code(_TRITON, ("test_flash_forward_pass_triton",), "flash", _BY_TRITON)
# Its backward pass is the formulas in PyTorch, compiled, as asked; nothing of `flash` is measured with it.
_COMPILED = Code(f"{_ATTENTION}.reference.FlashAttentionCompiledBackward", ("test_flash_backward_pytorch",))
_TRITON_BACKWARD = Code(_TRITON, ("test_flash_backward_triton",), "flash", _BY_TRITON)


def causal_forward(answer: Answer) -> None:
    """Answer with the code, and what its flag does."""
    TRITON(answer)
    answer.write("code.flag")


def flash_backward(answer: Answer) -> None:
    """Answer with the code that is asked for, and the backward pass in Triton after it."""
    _COMPILED(answer)
    _TRITON_BACKWARD(answer)


# A few shapes of all three, as the tests have them; of a small write-up flash_benchmarking's are enough.
_FEW_SHAPES = "--batch-size 1 --num-heads 4 --context 128,1024 --head-dim 64"
few_shapes = sized(measurement(f"flash --implementation triton,tiled,eager {_FEW_SHAPES}", seconds=40), flash_commands)

# Each year's name.
_OVERLAP_TESTS = ("test_DistributedDataParallelIndividualParameters", "test_DistributedDataParallel[")
_BUCKET_TESTS = ("test_DistributedDataParallelCPU", "test_DistributedDataParallelBucketed")
_SHARDED, _FSDP = "cs336sys.parallel.sharded_optimizer.ShardedOptimizer", "cs336sys.parallel.fsdp.FSDP"
NAIVE = Code(f"{_DDP}.NaiveDDP", (), "ddp", {"strategy": ("naive",)})
OVERLAPPED = Code(f"{_DDP}.OverlappedDDP", _OVERLAP_TESTS, "ddp", {"strategy": ("overlap",)})
BUCKETED = Code(f"{_DDP}.BucketedDDP", _BUCKET_TESTS, "ddp", {"strategy": ("bucketed",)})
SHARDED_OPTIMIZER = Code(_SHARDED, ("test_sharded_optimizer",), "shard", {"strategy": ("optimizer",)})
FSDP = Code(_FSDP, ("test_fsdp",), "shard", {"strategy": ("fsdp",)})

# The handout's benchmark, Triton's do_bench, warms up and repeats steps for so long.
_WARMUP_MS, _REPETITION_MS = 10_000, 30_000
_PROTOCOL_MS = 25_000.0  # It makes whole steps, which may last less than that by one step.


def training_step(answer: Answer) -> None:
    """Answer the leaderboard of 2026 with the fastest whole step of the 8B model."""
    # Of shard --board, or else of other steps of shard.
    selections = answer.find_each("shard", size=("8b",), board=(True,)) or answer.find_each("shard", size=("8b",))
    # A later version is measured again with the same settings: the run with the best step counts, of those that follow
    # the handout's protocol if there are any.
    measured = [
        (cell.samples.get("wall", cell.samples["step"]), cell, group) for group in selections for cell in group.measured
    ]
    by_protocol = [(steps, cell, group) for steps, cell, group in measured if sum(steps.measured) >= _PROTOCOL_MS]
    keys = ("size", "world_size", "checkpointing", "state_dtype", "wall_ms", "median_ms", "step_ms", "mfu_percent")
    if measured:
        best, cell, group = min(by_protocol or measured, key=lambda steps_cell_group: steps_cell_group[0].median)
        # So many steps of warm-up and measured ones do_bench takes: its times over that of a step, rounded down.
        counts = (cell.configuration["warmup"], len(best.measured))
        as_asked = counts == (int(_WARMUP_MS / best.median), int(_REPETITION_MS / best.median))
        for name in ("board", "shard"):  # The cell has one of these tables, which shows those of the keys that it has.
            answer.show([group], name, *keys, "peaks", "status")
        answer.show([group], "shares")
        facts = {"best": best, "cell": facts_of(cell), "as_asked": as_asked}
        answer.write("code.training_step", is_by_protocol=bool(by_protocol), **facts)


training_step_commands = sized(measurement("shard --size 8b --board --world-size 2", seconds=300, gpus=2))
