"""One model, its batch, and how its steps run; and what every workload is."""

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.accounting.fused import FusedStep, fused_moments
from cs336sys.accounting.hardware import model_flops_utilization
from cs336sys.accounting.memory import PeakMemory, widest_moments
from cs336sys.errors import UsageError, choose_from
from cs336sys.results.model import Samples
from cs336sys.settings.choices import ATTENTION, COMPILE_MODES, MODES, OPTIMIZERS, STATE_DTYPES, StepChoices
from cs336sys.settings.fields import MEASURING, MODEL, WHAT_RUNS, Configured, Needs, setting
from cs336sys.settings.sizes import ELEMENT_BYTES, PRECISIONS, ModelSize

UPDATES = ("step", "backward")
# Kernels of ``cs336sys.kernels.fuse`` that a model can have one without the others.
FUSED_KERNELS = ("rms-norm", "rope", "swiglu", "linear-cross-entropy")
_KERNEL_SETS = {"reference": (), "fused": FUSED_KERNELS}
_MODEL_KERNELS = (*_KERNEL_SETS, *FUSED_KERNELS)
CUDA_GRAPH = ("off", "on")

# File names have the settings of the first line always, those of the second never, and others that are not the default.
_NOT_OPTIONAL_IN_FILE_NAMES = (
    *("size", "user", "mode", "precision", "compile", "attention", "optimizer", "warmup"),
    *("steps", "device", "seed"),
)


def parse_kernels(text: str) -> str:
    """Return kernels as they are kept, ``rms-norm+rope`` in the order of FUSED_KERNELS, or raise a UsageError."""
    if text in _KERNEL_SETS:
        return text
    names = text.split("+")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is in it {names.count(name)} times")
        if name not in FUSED_KERNELS:
            raise UsageError(f"{choose_from(name, _MODEL_KERNELS)}; + joins several kernels, such as rms-norm+rope")
    return "+".join(name for name in FUSED_KERNELS if name in names)


@dataclass(frozen=True)
class UserCode(Configured):
    """Functions of the user instead of ours, as :mod:`cs336sys.settings.user_code` names them; None is ours.

    ``blocks`` are patterns of module names, separated by commas; ``code_digest`` is of all files, the optimizer's too.
    """

    model: str | None = setting(None, "Your model: FILE.py:NAME. Default: ours.", takes_code=True, panel=MODEL)
    loss: str | None = setting(None, "Your loss: function of (output, targets).", takes_code=True, panel=MODEL)
    batch: str | None = setting(
        None, "Your batches: function of (size, generator, device).", takes_code=True, panel=MODEL, header="batch by"
    )
    blocks: str | None = setting(None, "Your model's blocks: 'layers.*'. Default: detected.", panel=MODEL)
    code_digest: str | None = setting(None, header="code")

    def __post_init__(self) -> None:
        for field in ("batch", "blocks"):
            if self.model is None and getattr(self, field) is not None:
                raise UsageError(f"--{field} {getattr(self, field)}: is about a model of yours; give --model, too")

    def configuration(self) -> dict[str, Any]:
        """Return the settings that are not None, so that cells of our model match those of older files."""
        return {name: value for name, value in super().configuration().items() if value is not None}


def _variant(default: str, help: str = "", **description: Any) -> Any:
    """Declare a setting of what runs, of which a sweep compares several values and titles name each."""
    return setting(default, help, **{"several": True, "panel": WHAT_RUNS, "in_titles": True} | description)


_IN_ADAMW = Needs("optimizer", ("adamw",), "is a choice of adamw, and optimizer '{}' has none; choose adamw")
_STATE_NEEDS = (
    _IN_ADAMW,
    Needs("kernels", ("fused",), "keeps the weights that --kernels fused computes with; choose fused", ("split",)),
    Needs("precision", ("bf16",), "keeps weights in bf16, and precision '{}' has none; choose bf16", ("split",)),
)
# What settings need that put checkpoints around blocks.
BLOCK_NEEDS = (
    Needs("compile", ("off", "block"), "--compile {} leaves no blocks to put checkpoints around; choose block"),
)
_UPDATE_NEEDS = (
    Needs("mode", ("train",), "mode '{}' updates nothing; choose train"),
    _IN_ADAMW,
    Needs("precision", ("fp32", "bf16"), "{} looks at all gradients before it updates anything; choose bf16"),
)


@dataclass(frozen=True)
class Workload(Configured, StepChoices):
    """One model, its batch, and how its steps run; docs/bench.md explains the values.

    ``state_dtype`` and ``update`` are of optimizer ``adamw``: ``split`` keeps the blocks' weights as bf16 and what fp32
    has beyond it; an update in ``backward`` drops a block's gradients at once. ``fused`` kernels read adamw's copies.
    """

    size: ModelSize
    mode: str = _variant("train", choices=MODES)
    precision: str = _variant("fp32", choices=PRECISIONS, is_by_size=True)
    compile: str = _variant("off", "off, block (and the loss), model.", choices=COMPILE_MODES)
    attention: str = _variant("reference", choices=ATTENTION)
    kernels: str = _variant(
        "reference", "reference, fused, rope+swiglu.", choices=_MODEL_KERNELS, parse=parse_kernels, in_titles=False
    )
    optimizer: str = _variant("course", "course, fused, adamw, FILE.py:NAME", choices=OPTIMIZERS, takes_code=True)
    state_dtype: str = _variant(
        "fp32",
        "For adamw: fp32, bf16, split.",
        choices=STATE_DTYPES,
        header="state",
        in_titles=False,
        needs=_STATE_NEEDS,
    )
    update: str = _variant(
        "step", "For adamw: step, or within backward.", choices=UPDATES, in_titles=False, needs=_UPDATE_NEEDS
    )
    cuda_graph: str = _variant("off", "off, on: phases replayed from graphs.", choices=CUDA_GRAPH, header="CUDA graph")
    warmup: int = setting(
        5, "Warm-up steps; several are compared.", minimum=0, several=True, header="warm-up", in_titles=True
    )
    steps: int = setting(10, "Measured steps.", minimum=1, header=None)
    device: str = setting("auto", choices=("auto", "cuda", "cpu"), panel=MEASURING, header=None)
    seed: int = setting(0, "Seed of weights and batch.", minimum=0, maximum=2**63 - 1, panel=MEASURING)
    tf32: bool = setting(False, "Let fp32 matrix products use TF32.", panel=MEASURING, header="TF32")
    synchronize: str = setting("step", "step (wait for the GPU), none.", choices=("step", "none"), panel=MEASURING)
    user: UserCode = UserCode()

    def __post_init__(self) -> None:
        self.check_settings()
        if self.user.loss is not None and "linear-cross-entropy" in self.kernels:  # "fused" leaves it out.
            raise UsageError(
                f"--kernels {self.kernels}: linear-cross-entropy cannot compute --loss {self.user.loss}; "
                "leave one of them out"
            )
        if not self.is_ours and self.splits_weights:
            raise UsageError("--state-dtype split keeps weights of cs336_basics in bf16: choose another with --model")

    @property
    def fused_kernels(self) -> tuple[str, ...]:
        """Return the names of FUSED_KERNELS that the model has."""
        return _KERNEL_SETS[self.kernels] if self.kernels in _KERNEL_SETS else tuple(self.kernels.split("+"))

    @property
    def memory_is_known(self) -> bool:
        """Return whether formulas know a step's memory: our model with all fused kernels, or none and update step."""
        return self.is_ours and (self.is_fused or (self.is_default("kernels") and self.is_default("update")))

    def require_known_memory(self) -> None:
        """Raise a UsageError where our model has only some fused kernels, or is updated in the backward pass."""
        if self.is_ours and not self.memory_is_known:
            raise UsageError(
                f"--kernels {self.kernels} and --update {self.update}: memory is not predicted; choose fused, or "
                "reference and step"
            )

    def widest_moments(self, checkpointing: str = "none") -> list[PeakMemory]:
        """Return the moments that can be a step's peak, on paper, in eager mode, with a strategy of checkpointing."""
        if self.is_fused:
            return fused_moments(self._fused_step, checkpointing)
        moments = widest_moments(self.size, self.precision, self.mode, self.attention, checkpointing)
        state_bytes = ELEMENT_BYTES[self.state_dtype]  # Moments count the optimizer's state in fp32.
        return [
            replace(moment, optimizer_state=moment.optimizer_state * state_bytes // ELEMENT_BYTES["fp32"])
            for moment in moments
        ]

    @property
    def block_activations(self) -> int:
        """Return the bytes that a block saves for its backward pass."""
        if self.is_fused:
            return self._fused_step.block
        return block_activations(self.size, self.precision, self.attention).total

    @property
    def _fused_step(self) -> FusedStep:
        return FusedStep(
            self.size, self.mode, self.precision, self.attention, self.optimizer, self.state_dtype, self.update
        )

    def with_layers(self, most: int) -> "Workload":
        """Return the same workload with at most so many layers."""
        return replace(self, size=replace(self.size, num_layers=min(most, self.size.num_layers)))

    def predicted_peak(self, checkpointing: str = "none") -> PeakMemory:
        return max(self.widest_moments(checkpointing), key=lambda moment: moment.total)

    @property
    def predicted_gib(self) -> float | None:
        """Return the GiB that a step holds at its peak; None where formulas do not know."""
        return self.predicted_peak().total_gib if self.memory_is_known else None

    @property
    def tokens(self) -> int:
        return self.size.batch_size * self.size.context

    @property
    def is_compiled(self) -> bool:
        """Return whether torch.compile compiles the model, or its blocks."""
        return not self.is_default("compile")

    @property
    def uses_graphs(self) -> bool:
        """Return whether phases are captured in CUDA graphs, and replayed from them."""
        return self.cuda_graph == "on"

    @property
    def is_ours(self) -> bool:
        """Return whether the model is ``BasicsTransformerLM``, of which formulas know everything."""
        return self.user.model is None

    @property
    def parameters(self) -> int | None:
        """Count the model's parameters by the formula; None for a user's model."""
        return count_parameters(self.size) if self.is_ours else None

    @property
    def flops(self) -> int | None:
        """Return a step's model FLOPs without the optimizer's, which are few; None for a user's model."""
        return model_flops(self.size, backward=self.has_backward) if self.is_ours else None

    def rates(self, step: Samples, peak_tflops: float | None, flops: int | None = None) -> dict[str, float | None]:
        """Return :meth:`throughput`, ``tflops`` and ``mfu_percent`` of the mean step; without ``flops`` by formula."""
        seconds = step.mean / 1e3
        flops = self.flops if flops is None else flops
        utilization = None if flops is None else model_flops_utilization(flops, seconds, peak_tflops)
        return {
            **self.throughput(step),
            "tflops": None if flops is None else flops / seconds / 1e12,
            "mfu_percent": None if utilization is None else 100 * utilization,
        }

    def throughput(self, step: Samples) -> dict[str, float | None]:
        """Return ``tokens_per_s`` of the mean step (ms).

        A user's batch need not consist of tokens: its ``examples_per_s`` are counted along its first dimension.
        """
        seconds = step.mean / 1e3
        if self.user.batch is None:
            return {"tokens_per_s": self.tokens / seconds}
        return {"tokens_per_s": None, "examples_per_s": self.size.batch_size / seconds}

    @property
    def name(self) -> str:
        """Return a file name without ending: workloads that differ in more than device, steps and seed have others."""
        size = self.size
        parts = [] if self.user.model is None else [self.user.model]
        parts += [size.name, f"s{size.context}", f"b{size.batch_size}", f"v{size.vocab_size}"]
        parts += [self.mode, self.precision, f"compile-{self.compile}", self.attention, self.optimizer]
        for field in fields(self):
            if field.name not in _NOT_OPTIONAL_IN_FILE_NAMES and not self.is_default(field.name):
                value, text = getattr(self, field.name), field.name.replace("_", "-")
                parts.append(text if value is True else f"{text}-{value}")
        parts.append(f"w{self.warmup}")
        # 512/2048/4/8, the name of a shape without a name of its own, becomes 512x2048x4x8.
        return re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(parts).replace("/", "x"))


# What ``bench`` compares: one model trained in different ways, in all modes alike.
COMPARED_SETTINGS = Workload.in_panel(WHAT_RUNS)[1:]
