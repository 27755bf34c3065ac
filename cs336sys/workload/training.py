"""One model, its batch, and how its steps run; and what every workload is."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.checkpointing import checkpointed_moments
from cs336sys.accounting.flops import count_parameters, model_flops
from cs336sys.accounting.fused import FusedStep, fused_moments
from cs336sys.accounting.hardware import model_flops_utilization
from cs336sys.accounting.memory import PeakMemory
from cs336sys.choices import ATTENTION, COMPILE_MODES, MODES, OPTIMIZERS, STATE_DTYPES, StepChoices
from cs336sys.errors import UsageError, choose_from, require_known
from cs336sys.results.model import Samples
from cs336sys.sizes import PRECISIONS, ModelSize
from cs336sys.user_code import is_user_code

# A size's fields in a configuration, which calls its name "size"; its own default precision decides nothing.
_SHAPE = tuple(field.name for field in fields(ModelSize) if field.name not in ("name", "precision"))


@dataclass(frozen=True)
class Configured:
    """A cell's settings: its fields are the cell's configuration in the results, and come back from it."""

    def configuration(self) -> dict[str, Any]:
        """All fields as one flat dictionary of JSON scalars; of a size or of another workload, their fields."""
        flat: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, ModelSize):
                flat |= {"size": value.name} | {name: getattr(value, name) for name in _SHAPE}
            else:
                flat |= value.configuration() if isinstance(value, Configured) else {field.name: value}
        return flat

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """The names of all settings that a :meth:`configuration` can have, in their order."""
        names: list[str] = []
        for field in fields(cls):
            if field.type is ModelSize:
                names += ["size", *_SHAPE]
            elif isinstance(field.type, type) and issubclass(field.type, Configured):
                names += field.type.setting_names()
            else:
                names.append(field.name)
        return tuple(names)

    @classmethod
    def from_configuration(cls, configuration: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`configuration`; what is no field, like the number of a round, is passed over."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.type is ModelSize:
                shape = {name: configuration[name] for name in _SHAPE if name in configuration}
                values[field.name] = ModelSize(configuration["size"], **shape)
            elif isinstance(field.type, type) and issubclass(field.type, Configured):
                values[field.name] = field.type.from_configuration(configuration)
            elif field.name in configuration:
                values[field.name] = configuration[field.name]
        return cls(**values)


def check_choices(workload: Configured, choices: Mapping[str, Collection[str]]) -> None:
    for field, names in choices.items():
        value = getattr(workload, field)
        if not (field == "optimizer" and is_user_code(value)):
            require_known(field, value, names)


DEVICES = ("auto", "cuda", "cpu")

UPDATES = ("step", "backward")
# Kernels of ``cs336sys.kernels.fuse`` that a model can have one without the others.
FUSED_KERNELS = ("rms-norm", "rope", "swiglu", "linear-cross-entropy")
MODEL_KERNELS = ("reference", "fused", *FUSED_KERNELS)
CUDA_GRAPH = ("off", "on")
SYNCHRONIZE = ("step", "none")

# What ``bench`` compares: one model trained in different ways.
COMPARED_SETTINGS = ("precision", "compile", "attention", "optimizer", "cuda_graph", "kernels", "state_dtype", "update")


def parse_kernels(text: str) -> str:
    """A choice of the model's kernels as it is kept: names of FUSED_KERNELS in their order.

    Raises:
        UsageError: it is none.
    """
    if text in ("reference", "fused"):
        return text
    names = text.split("+")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is in it {names.count(name)} times")
        if name not in FUSED_KERNELS:
            raise UsageError(f"{choose_from(name, MODEL_KERNELS)}; + joins several kernels, such as rms-norm+rope")
    return "+".join(name for name in FUSED_KERNELS if name in names)


@dataclass(frozen=True)
class UserCode(Configured):
    """Functions of the user instead of ours, as :mod:`cs336sys.user_code` names them; None is ours.

    Attributes:
        model: a size -> a module.
        loss: what the module returns, and the targets -> a scalar.
        batch: a size, a ``torch.Generator`` and a device -> inputs and targets.
        blocks: patterns of the names of the model's blocks, separated by commas: ``encoder.layers.*``.
        code_digest: of their files, and of the optimizer's.
    """

    model: str | None = None
    loss: str | None = None
    batch: str | None = None
    blocks: str | None = None
    code_digest: str | None = None

    def __post_init__(self) -> None:
        for field in ("batch", "blocks"):
            if self.model is None and getattr(self, field) is not None:
                raise UsageError(f"--{field} {getattr(self, field)}: is about a model of yours; give --model, too")

    def configuration(self) -> dict[str, Any]:
        """Return the settings that were given: without any, a cell is the same as before there was any such choice."""
        return {name: value for name, value in super().configuration().items() if value is not None}


_CHOICES = {
    "mode": MODES,
    "precision": PRECISIONS,
    "compile": COMPILE_MODES,
    "attention": ATTENTION,
    "optimizer": OPTIMIZERS,
    "cuda_graph": CUDA_GRAPH,
    "state_dtype": STATE_DTYPES,
    "update": UPDATES,
    "device": DEVICES,
    "synchronize": SYNCHRONIZE,
}


@dataclass(frozen=True)
class Workload(Configured, StepChoices):
    """One model, its batch, and how its steps run.

    Attributes:
        mode: the phases of a step: ``forward`` (without gradients), ``forward-backward``, or ``train``.
        precision: ``fp32``, or autocast to ``bf16`` or ``fp16`` over forward and loss (fp16 scales the loss).
        compile: ``off``; ``block`` compiles one Transformer block, which all blocks reuse, and the loss; ``model``
            compiles the whole model and the loss.
        attention: which implementation takes the place of the model's ``scaled_dot_product_attention``.
        optimizer: ``course`` is ``cs336_basics.optimizer.AdamW``, ``fused`` torch's fused AdamW, ``adamw`` that of
            ``cs336sys.kernels.adamw``, or a function of
            the user that makes one of parameters.
        cuda_graph: ``on`` captures each phase of the step in a CUDA graph, and replays them.
        kernels: ``fused`` lets norms, rotations, gates and the loss run as ``cs336sys.kernels.fuse`` puts them in, and
            with ``adamw`` reads the copies of the weights that it writes; names of FUSED_KERNELS joined by ``+`` put
            these in alone.
        state_dtype: of ``adamw``: moments in ``fp32``, or in ``bf16``; ``split`` keeps the blocks' weights as bf16 and
            what fp32 has beyond it.
        update: of ``adamw``: by a ``step`` after the backward pass, or in ``backward``: each block as soon as it has
            its gradients, which are dropped then.
        tf32: whether fp32 matrix products may use TF32.
        synchronize: ``step`` waits for the device after every step, as the handout asks; ``none`` only at the end.
        user: what of it is the user's.
    """

    size: ModelSize
    mode: str = "train"
    precision: str = "fp32"
    compile: str = "off"
    attention: str = "reference"
    optimizer: str = "course"
    cuda_graph: str = "off"
    kernels: str = "reference"
    state_dtype: str = "fp32"
    update: str = "step"
    device: str = "auto"
    tf32: bool = False
    synchronize: str = "step"
    warmup: int = 5
    steps: int = 10
    seed: int = 0
    user: UserCode = UserCode()

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        try:
            object.__setattr__(self, "kernels", parse_kernels(self.kernels))
        except UsageError as error:
            raise UsageError(f"--kernels '{self.kernels}': {error}") from error
        if self.user.loss is not None and "linear-cross-entropy" in self.kernels:
            raise UsageError(
                f"--kernels {self.kernels}: linear-cross-entropy cannot compute --loss {self.user.loss}; "
                "leave one of them out"
            )
        if not self.is_ours and self.state_dtype == "split":
            raise UsageError("--state-dtype split keeps weights of cs336_basics in bf16: choose another with --model")
        if self.state_dtype != "fp32" and self.optimizer != "adamw":
            raise UsageError(f"--state-dtype {self.state_dtype}: optimizer '{self.optimizer}' has none; choose adamw")
        if self.state_dtype == "split" and self.kernels != "fused":
            raise UsageError("--state-dtype split keeps the weights that --kernels fused computes with: choose fused")
        if self.state_dtype == "split" and self.precision != "bf16":
            raise UsageError(
                f"--state-dtype split keeps weights in bf16: precision '{self.precision}' has none; choose bf16"
            )
        if self.update == "backward" and self.mode != "train":
            raise UsageError(f"--update backward: mode '{self.mode}' updates nothing; choose train")
        if self.update == "backward" and self.optimizer != "adamw":
            raise UsageError(f"--update backward: optimizer '{self.optimizer}' cannot; choose adamw")
        if self.update == "backward" and self.precision == "fp16":
            raise UsageError("--update backward: fp16 looks at all gradients before it updates anything; choose bf16")
        if self.warmup < 0:
            raise UsageError(f"--warmup {self.warmup}: must be at least 0")
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: must be at least 1")

    @property
    def fused_kernels(self) -> tuple[str, ...]:
        """Those of FUSED_KERNELS that the model has."""
        if self.kernels in ("reference", "fused"):
            return FUSED_KERNELS if self.kernels == "fused" else ()
        return tuple(self.kernels.split("+"))

    @property
    def memory_is_known(self) -> bool:
        """Return whether formulas know a step's memory: our model with all fused kernels, or none and update step."""
        return self.is_ours and (self.kernels == "fused" or (self.kernels, self.update) == ("reference", "step"))

    def require_known_memory(self) -> None:
        """Refuse a way to train our model that formulas of memory do not know.

        Raises:
            UsageError: it has some of the fused kernels, or is updated in the backward pass.
        """
        if self.is_ours and not self.memory_is_known:
            raise UsageError(
                f"--kernels {self.kernels} and --update {self.update}: memory is not predicted; choose fused, or "
                "reference and step"
            )

    def widest_moments(self, checkpointing: str = "none") -> list[PeakMemory]:
        """The moments of a step that can be its peak, on paper; the same for compiled workloads, which need less.

        Args:
            checkpointing: a strategy of :mod:`cs336sys.accounting.checkpointing`.
        """
        if self.kernels == "fused":
            return fused_moments(self._fused_step, checkpointing)
        moments = checkpointed_moments(self.size, self.precision, self.mode, self.attention, checkpointing)
        if self.state_dtype == "bf16":
            return [replace(moment, optimizer_state=moment.optimizer_state // 2) for moment in moments]
        return moments

    @property
    def block_activations(self) -> int:
        """Bytes that a block saves for its backward pass."""
        if self.kernels == "fused":
            return self._fused_step.block
        return block_activations(self.size, self.precision, self.attention).total

    @property
    def _fused_step(self) -> FusedStep:
        return FusedStep(
            self.size, self.mode, self.precision, self.attention, self.optimizer, self.state_dtype, self.update
        )

    def predicted_peak(self, checkpointing: str = "none") -> PeakMemory:
        """The widest of them."""
        return max(self.widest_moments(checkpointing), key=lambda moment: moment.total)

    @property
    def predicted_gib(self) -> float | None:
        """GiB that a step holds at its peak; None where formulas do not know."""
        return self.predicted_peak().total_gib if self.memory_is_known else None

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.size.batch_size * self.size.context

    @property
    def is_compiled(self) -> bool:
        """Return whether torch.compile compiles the model, or its blocks."""
        return self.compile != "off"

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
        """Model FLOPs a step, of the mode's phases: the optimizer's are negligible and not counted.

        None for a model of the user's, whose operations are counted.
        """
        return model_flops(self.size, backward=self.mode != "forward") if self.is_ours else None

    def rates(self, step: Samples, peak_tflops: float | None, flops: int | None = None) -> dict[str, float | None]:
        """:meth:`throughput`, ``tflops`` and ``mfu_percent`` of the mean step (ms); no MFU where no peak is known.

        Args:
            flops: a step's, where they were counted.
        """
        seconds = step.mean / 1e3
        flops = self.flops if flops is None else flops
        utilization = None if flops is None else model_flops_utilization(flops, seconds, peak_tflops)
        return {
            **self.throughput(step),
            "tflops": None if flops is None else flops / seconds / 1e12,
            "mfu_percent": None if utilization is None else 100 * utilization,
        }

    def throughput(self, step: Samples) -> dict[str, float | None]:
        """``tokens_per_s`` of the mean step (ms).

        A batch of the user's need not consist of tokens: ``examples_per_s`` counts what lies along its first dimension.
        """
        seconds = step.mean / 1e3
        if self.user.batch is None:
            return {"tokens_per_s": self.tokens / seconds}
        return {"tokens_per_s": None, "examples_per_s": self.size.batch_size / seconds}

    @property
    def name(self) -> str:
        """A file name without its ending, different for workloads that differ in more than device, steps and seed."""
        size = self.size
        parts = [] if self.user.model is None else [self.user.model]
        parts += [size.name, f"s{size.context}", f"b{size.batch_size}", f"v{size.vocab_size}", self.mode]
        parts += [self.precision + ("-tf32" if self.tf32 else ""), f"compile-{self.compile}", self.attention]
        parts += [*([] if self.kernels == "reference" else [f"{self.kernels}-kernels"]), self.optimizer]
        parts += [self.state_dtype] if self.state_dtype != "fp32" else []
        parts += ["update-in-backward"] if self.update == "backward" else []
        parts += [*(["graph"] if self.cuda_graph == "on" else []), f"w{self.warmup}"]
        return re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(parts).replace("/", "x"))
