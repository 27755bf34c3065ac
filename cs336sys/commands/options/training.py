"""The options that say which model is trained and how, shared by every command that trains one.

A command has whole groups of them: each class below is a group, and a command's parameter of that class stands for all
of its options (see :func:`cs336sys.commands.options.reading.with_read_options`).
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated, Any, ClassVar

from cs336sys import workload
from cs336sys.accounting.flops import count_parameters
from cs336sys.commands.options.effects import runs_code, setting
from cs336sys.commands.options.reading import MEASURING, MODEL, WHAT_RUNS, choice, name_or_code
from cs336sys.errors import DEBUG_VARIABLE, UsageError
from cs336sys.sizes import PRECISIONS, SIZES, ModelSize, choose_size
from cs336sys.user_code import digest, is_user_code, source_file
from cs336sys.workload.course_package import course_package, set_aside_others

_OWN = "Default: by size."


def _rounded_size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


_SIZES = ", ".join(f"{name} {_rounded_size(count_parameters(size))}" for name, size in SIZES.items())

ModesOption = Annotated[list[str], choice(workload.MODES, rich_help_panel=WHAT_RUNS)]
DeviceOption = Annotated[str, choice(workload.DEVICES)]
SeedOption = Annotated[int, setting(help="Seed of weights and batch.", min=0, max=2**63 - 1)]
ModelOption = Annotated[str | None, runs_code(help="Yours: FILE.py:NAME (docs/your_model.md).")]
LossOption = Annotated[str | None, runs_code(help="Yours: (output, targets) -> scalar.")]
BatchOption = Annotated[str | None, runs_code(help="Yours: (size, generator, device) -> (inputs, targets).")]
BlocksOption = Annotated[str | None, setting(help="Its blocks: 'layers.*'. Default: found.")]
DebugOption = Annotated[bool, setting("--debug", help="Show tracebacks: your code, lost ranks.")]
DryRunOption = Annotated[
    bool, setting("--dry-run", help="Print cells and predicted memory alone.", rich_help_panel=MEASURING)
]


@dataclass(frozen=True)
class SizeOptions:
    """Options for the Transformer's sizes, and their batches."""

    panel: ClassVar = MODEL
    size: Annotated[Sequence[str], choice(SIZES, f"{_SIZES}.")] = ()
    context: Annotated[Sequence[int], setting(help=f"Context lengths. {_OWN}", min=1)] = ()
    batch_size: Annotated[Sequence[int], setting(help=f"Batch sizes. {_OWN}", min=1)] = ()
    vocab_size: Annotated[int | None, setting(help=f"Vocabulary. {_OWN}")] = None
    d_model: Annotated[int | None, setting(help=f"Model width. {_OWN}")] = None
    d_ff: Annotated[int | None, setting(help=f"Feed-forward width. {_OWN}")] = None
    num_layers: Annotated[int | None, setting(help=f"Blocks. {_OWN}")] = None
    num_heads: Annotated[int | None, setting(help=f"Heads. {_OWN}")] = None

    def sizes(self) -> list[ModelSize]:
        """Every combination of sizes, contexts and batch sizes, in their order.

        Raises:
            UsageError: a size cannot be.
        """
        shape = {name: getattr(self, name) for name in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")}
        return [
            choose_size(name, context=context, batch_size=batch_size, **shape)
            for name, context, batch_size in product(self.size, self.context or (None,), self.batch_size or (None,))
        ]


@dataclass(frozen=True)
class SharedSizeOptions(SizeOptions):
    """Options for sizes, and batches that the ranks share."""

    batch_size: Annotated[Sequence[int], setting(help="Batches of all ranks. Default: by size.", min=1)] = ()


@dataclass(frozen=True)
class ModelOptions(SizeOptions):
    """Options for models, sizes or a user's, and their batches."""

    model: ModelOption = None
    loss: LossOption = None
    batch: BatchOption = None
    blocks: BlocksOption = None
    debug: DebugOption = False


@dataclass(frozen=True)
class TrainedModelOptions(ModelOptions):
    """Options for models that are trained here."""

    size: Annotated[Sequence[str], choice(SIZES, f"{_SIZES}. Default: small; CPU: tiny.")] = ()


@dataclass(frozen=True)
class SharedModelOptions(TrainedModelOptions):
    """Options for models, and batches that the ranks share."""

    batch_size: Annotated[Sequence[int], setting(help="Sequences of all ranks. Default: by size.", min=1)] = ()


@dataclass(frozen=True)
class PrecisionOptions:
    """Options for precisions."""

    panel: ClassVar = WHAT_RUNS
    precision: Annotated[
        Sequence[str], choice(PRECISIONS, f"{', '.join(PRECISIONS)} (autocast). {_OWN}", show_default=False)
    ] = ()
    bf16: Annotated[bool, setting("--bf16", help="Short for --precision bf16.")] = False
    fp16: Annotated[bool, setting("--fp16", help="Short for --precision fp16.")] = False

    def precisions(self) -> Sequence[str] | Sequence[None]:
        """Those that were asked for, else None: the size's own.

        Raises:
            UsageError: more than one option was given.
        """
        if bool(self.precision) + self.bf16 + self.fp16 > 1:
            raise UsageError("--precision, --bf16 and --fp16: give one of them (--precision bf16,fp16 runs both)")
        return ["bf16"] if self.bf16 else ["fp16"] if self.fp16 else self.precision or [None]


@dataclass(frozen=True)
class ImplementationOptions:
    """Options for implementations of the same computation."""

    panel: ClassVar = WHAT_RUNS
    compile: Annotated[Sequence[str], choice(workload.COMPILE_MODES, "off, block (and the loss), model.")] = ("off",)
    attention: Annotated[Sequence[str], choice(workload.ATTENTION)] = ("reference",)
    kernels: Annotated[
        Sequence[str], choice(workload.MODEL_KERNELS, "reference, fused, rope+swiglu.", parser=workload.parse_kernels)
    ] = ("reference",)
    optimizer: Annotated[Sequence[str], name_or_code(workload.OPTIMIZERS, "course, fused, adamw, FILE.py:NAME")] = (
        "course",
    )
    state_dtype: Annotated[Sequence[str], choice(workload.STATE_DTYPES, "Of adamw: fp32, bf16, split.")] = ("fp32",)
    update: Annotated[Sequence[str], choice(workload.UPDATES, "Of adamw: step, or within backward.")] = ("step",)
    cuda_graph: Annotated[Sequence[str], choice(workload.CUDA_GRAPH, "off, on: phases replayed from graphs.")] = (
        "off",
    )

    def optimizers(self) -> list[tuple[str, str, str]]:
        """Optimizers with the dtypes of their states and when they update; only ``adamw`` has several."""
        chosen: list[tuple[str, str, str]] = []
        for name in self.optimizer:
            # Without adamw, the workload says that nothing has the others.
            is_choice = name == "adamw" or "adamw" not in self.optimizer
            chosen += product([name], self.state_dtype, self.update) if is_choice else [(name, "fp32", "step")]
        return chosen

    def combinations(self) -> list[dict[str, Any]]:
        """Every combination, in the order of the lists, as settings of a workload."""
        lists = self.compile, self.attention, self.kernels, self.optimizers(), self.cuda_graph
        names = ("compile", "attention", "kernels", "optimizer", "state_dtype", "update", "cuda_graph")
        return [
            dict(zip(names, (*ways, *optimizer, cuda_graph), strict=True))
            for *ways, optimizer, cuda_graph in product(*lists)
        ]


@dataclass(frozen=True)
class StepsOptions:
    """Options for the number of steps."""

    panel: ClassVar = MEASURING
    warmup: Annotated[Sequence[int], setting(help="Warm-up steps, or several.", min=0)]
    steps: Annotated[int, setting(help="Measured steps.")]


@dataclass(frozen=True)
class RunOptions:
    """The device, and settings of the whole process."""

    panel: ClassVar = MEASURING
    device: DeviceOption = "auto"
    seed: SeedOption = 0
    tf32: Annotated[bool, setting("--tf32/--no-tf32", help="Let fp32 matrix products use TF32.")] = False
    synchronize: Annotated[str, choice(workload.SYNCHRONIZE, "step (waits), none.")] = "step"


def _user_code(model: ModelOptions, optimizers: list[tuple[str, str, str]]) -> workload.UserCode:
    """Collect the user's code, with the digest of its files: one for all cells, which differ in what they name."""
    references = {"model": model.model, "loss": model.loss, "batch": model.batch}
    for option, reference in references.items():
        if reference is not None:
            try:
                source_file(reference)
            except UsageError as error:
                raise UsageError(f"--{option} {error}") from error
    named = [name for name in (*references.values(), *(name for name, *_ in optimizers)) if name and is_user_code(name)]
    return workload.UserCode(**references, blocks=model.blocks, code_digest=digest(named) if named else None)


def _default_size(device: str) -> str:
    """The model where none is asked for: ``small``, or ``tiny`` without a GPU."""
    return "tiny" if device == "cpu" or shutil.which("nvidia-smi") is None else "small"


def expand_workloads(
    model: ModelOptions,
    modes: Sequence[str],
    precision: PrecisionOptions,
    implementation: ImplementationOptions,
    steps: StepsOptions,
    run: RunOptions,
) -> list[workload.Workload]:
    """Every combination of the list options, in their order.

    Raises:
        UsageError: settings do not go together, or a size cannot be.
    """
    if model.model is not None:
        set_aside_others()
    course_package().require_needed()
    if model.debug:
        # Read by the processes that measure.
        os.environ[DEBUG_VARIABLE] = "1"
    precisions = precision.precisions()
    sizes = (model if model.size else replace(model, size=[_default_size(run.device)])).sizes()
    user = _user_code(model, implementation.optimizers())
    return [
        workload.Workload(
            size, mode, chosen or size.precision, **settings, warmup=warmup, steps=steps.steps, user=user, **asdict(run)
        )
        for size, mode, chosen, settings, warmup in product(
            sizes, modes, precisions, implementation.combinations(), steps.warmup
        )
        # Fused kernels alone compute with split weights; without any, the workload says so.
        if settings["state_dtype"] != "split" or settings["kernels"] == "fused" or "fused" not in implementation.kernels
    ]
