"""What one benchmark cell trains, and how. Plain data, no torch."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from cs336sys.accounting.activations import ATTENTION, block_activations
from cs336sys.accounting.checkpointing import (
    checkpointed_moments,
    kept_blocks,
    parse_checkpointing,
    recomputed_flops,
)
from cs336sys.accounting.flops import attention_flops, model_flops
from cs336sys.accounting.fused import FusedStep, fused_moments
from cs336sys.accounting.hardware import model_flops_utilization
from cs336sys.accounting.memory import PeakMemory
from cs336sys.accounting.parameters import count_parameters
from cs336sys.accounting.sharding.ideal import OWN_SHARDING_STRATEGIES
from cs336sys.accounting.sharding.kept_parts import KeptStep, flops_again
from cs336sys.accounting.sharding.step import FULLY_SHARDED
from cs336sys.errors import UsageError, choose_from
from cs336sys.results import Samples
from cs336sys.sizes import ELEMENT_BYTES, PRECISIONS, ModelSize
from cs336sys.user_code import is_user_code

PHASES_OF_MODE = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "train": ("forward", "backward", "optimizer"),
}
MODES = tuple(PHASES_OF_MODE)
COMPILE_MODES = ("off", "block", "model")
OPTIMIZERS = ("course", "fused", "adamw")
STATE_DTYPES = ("fp32", "bf16", "split")
MODEL_KERNELS = ("reference", "fused")
CUDA_GRAPH = ("off", "on")
DEVICES = ("auto", "cuda", "cpu")
SYNCHRONIZE = ("step", "none")

# What ``bench`` compares: one model trained in different ways.
COMPARED_SETTINGS = ("precision", "compile", "attention", "optimizer", "cuda_graph", "kernels", "state_dtype")

# A size's fields in a configuration, which calls its name "size"; its own default precision decides nothing.
_SHAPE = tuple(field.name for field in fields(ModelSize) if field.name not in ("name", "precision"))


@dataclass(frozen=True)
class Configured:
    """What a cell measures: its fields are the cell's configuration in the results, and come back from it."""

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


@dataclass(frozen=True)
class UserCode(Configured):
    """Functions of the user in the place of ours, as :mod:`cs336sys.user_code` names them; None is ours.

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
        """What is given: without any, a cell is the same as before there was any such choice."""
        return {name: value for name, value in super().configuration().items() if value is not None}


def _check_choices(workload: Configured, choices: Mapping[str, Collection[str]]) -> None:
    for field, names in choices.items():
        value = getattr(workload, field)
        if value not in names and not (field == "optimizer" and is_user_code(value)):
            raise UsageError(f"unknown {field} '{value}': {choose_from(value, names)}")


_CHOICES = {
    "mode": MODES,
    "precision": PRECISIONS,
    "compile": COMPILE_MODES,
    "attention": ATTENTION,
    "optimizer": OPTIMIZERS,
    "cuda_graph": CUDA_GRAPH,
    "kernels": MODEL_KERNELS,
    "state_dtype": STATE_DTYPES,
    "device": DEVICES,
    "synchronize": SYNCHRONIZE,
}


@dataclass(frozen=True)
class Workload(Configured):
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
        kernels: ``fused`` lets norms, rotations, gates and the loss run as ``cs336sys.kernels.fuse`` puts them in.
        state_dtype: of ``adamw``: moments in ``fp32``, or in ``bf16``; ``split`` keeps the blocks' weights as bf16 and
            what fp32 has beyond it. With fused kernels in half precision, the last two have gradients in it, too.
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
    device: str = "auto"
    tf32: bool = False
    synchronize: str = "step"
    warmup: int = 5
    steps: int = 10
    seed: int = 0
    user: UserCode = UserCode()

    def __post_init__(self) -> None:
        _check_choices(self, _CHOICES)
        if not self.is_ours and self.kernels == "fused":
            raise UsageError("--kernels fused takes the place of modules of cs336_basics: leave it out with --model")
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
        if self.warmup < 0:
            raise UsageError(f"--warmup {self.warmup}: must be at least 0")
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: must be at least 1")

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
        return FusedStep(self.size, self.mode, self.precision, self.attention, self.optimizer, self.state_dtype)

    def predicted_peak(self, checkpointing: str = "none") -> PeakMemory:
        """The widest of them."""
        return max(self.widest_moments(checkpointing), key=lambda moment: moment.total)

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.size.batch_size * self.size.context

    @property
    def is_ours(self) -> bool:
        """Whether the model is ``BasicsTransformerLM``, of which formulas know everything."""
        return self.user.model is None

    @property
    def parameters(self) -> int | None:
        """How many the model has, by the formula; None for a model of the user's."""
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
        parts += [*(["fused-kernels"] if self.kernels == "fused" else []), self.optimizer]
        parts += [self.state_dtype] if self.state_dtype != "fp32" else []
        parts += [*(["graph"] if self.cuda_graph == "on" else []), f"w{self.warmup}"]
        return re.sub(r"[^A-Za-z0-9_.-]", "-", "-".join(parts).replace("/", "x"))


# Kept by a cell of memprof: every allocation worth a look.
LARGEST_ALLOCATIONS = 40


@dataclass(frozen=True)
class MemoryWorkload(Configured):
    """A training workload whose memory is recorded.

    Attributes:
        checkpointing: a strategy of :mod:`cs336sys.accounting.checkpointing`.
        trace: also predict the step on fake tensors.
        snapshot: a directory for the recorded step's pictures and files.
    """

    training: Workload
    checkpointing: str = "none"
    trace: bool = True
    snapshot: str | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "checkpointing", parse_checkpointing(self.checkpointing))
        except UsageError as error:
            raise UsageError(f"--checkpoint '{self.checkpointing}': {error}") from error
        if self.checkpointing != "none" and self.training.compile == "model":
            raise UsageError("--checkpoint puts checkpoints around blocks: with --compile model there are none to see")

    @property
    def name(self) -> str:
        """A file name without its ending, different for workloads that differ in anything but steps and seed."""
        return f"{self.training.name}-{self.checkpointing}".replace("=", "")


@dataclass(frozen=True)
class LossWorkload(Configured):
    """A training workload whose loss is followed while it learns a text.

    Attributes:
        training: ``steps`` of it are taken, each on a batch of its own.
        text: files, separated by commas, whose bytes are the tokens.
        learning_rate, weight_decay: of the optimizer, constant.
    """

    training: Workload
    text: str
    learning_rate: float = 3e-4
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.training.mode != "train":
            raise UsageError(f"mode '{self.training.mode}': a model that learns can only train")
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"--learning-rate {self.learning_rate:g}: must be a positive number")


PROFILERS = ("auto", "nsys", "torch")


@dataclass(frozen=True)
class ProfileWorkload(Configured):
    """A training workload that is run under a profiler.

    Attributes:
        profiler: ``nsys``, ``torch`` (torch.profiler), or ``auto``: nsys for a GPU where it is installed.
        keep: a directory for the profiler's files.
    """

    training: Workload
    profiler: str = "auto"
    keep: str | None = None

    def __post_init__(self) -> None:
        _check_choices(self, {"profiler": PROFILERS})
        if self.profiler == "nsys" and self.training.device == "cpu":
            raise UsageError("profiler 'nsys' traces work on a GPU: with device cpu choose torch")


# How ranks train one model together, by the names that cs336sys.experiments.parallel knows; the last synchronizes
# nothing, and is what the others are compared with.
BUCKETED_STRATEGIES = ("bucketed", "bucketed-step")
DATA_PARALLEL_STRATEGIES = ("naive", "flat", "overlap", *BUCKETED_STRATEGIES, "torch")
SHARDING_STRATEGIES = (*OWN_SHARDING_STRATEGIES, "torch-zero", "torch-fsdp")
STRATEGIES = (*DATA_PARALLEL_STRATEGIES, *SHARDING_STRATEGIES, "unsynchronized")
BACKENDS = ("auto", "gloo", "nccl")
BLOCK_CHECKPOINTING = ("none", "block")

# In place of a bucket size: buckets of whole blocks.
WHOLE_BLOCKS = "block"


def bucket_name(bucket_mb: float | str) -> str:
    """What a bucket size is called: ``25 MB``, ``blocks``."""
    return f"{bucket_mb}s" if isinstance(bucket_mb, str) else f"{bucket_mb:g} MB"


@dataclass(frozen=True)
class ParallelWorkload(Configured):
    """A training workload that several ranks share, and how they do it.

    Attributes:
        training: its batch is that of all ranks together, each takes an equal part; its mode is ``train``.
        strategy: one of :data:`STRATEGIES`.
        backend: ``auto`` is NCCL on GPUs, one for each rank, and Gloo on CPUs.
        bucket_mb: the most gradients in one all-reduce, in megabytes (1e6 bytes), or ``block``: those of whole blocks;
            for :data:`BUCKETED_STRATEGIES`, else None.
        gradient_dtype: what gradients are sent and summed in; they are kept in fp32 whatever it is.
        high_priority: let NCCL's kernels go before others that wait for the GPU.
        trace: a directory for the Chrome trace of one more step on rank 0.
        timeout_s: how long a rank waits for the others.
        prefetch: how many units to gather ahead of use; for ``fsdp``, else None.
        checkpointing: ``block`` keeps the input of each Transformer block alone and computes the rest again;
            ``keep=N`` all that is expensive to compute again but gate and up, and these in the last N blocks.
    """

    training: Workload
    strategy: str
    world_size: int = 2
    backend: str = "auto"
    bucket_mb: float | str | None = None
    gradient_dtype: str = "fp32"
    high_priority: bool = False
    trace: str | None = None
    timeout_s: float = 120.0
    prefetch: int | None = None
    checkpointing: str = "none"

    def __post_init__(self) -> None:
        choices = {
            "strategy": STRATEGIES,
            "backend": BACKENDS,
            "gradient_dtype": PRECISIONS,
            "checkpointing": BLOCK_CHECKPOINTING,
        }
        if kept_blocks(self.checkpointing) is not None:
            del choices["checkpointing"]
            self._check_kept()
        _check_choices(self, choices)
        if self.backend == "nccl" and self.training.device == "cpu":
            raise UsageError("backend 'nccl' communicates between GPUs: choose gloo, or device cuda")
        if self.training.mode != "train":
            raise UsageError(f"mode '{self.training.mode}': ranks that share a batch can only train")
        if self.world_size < 1:
            raise UsageError(f"--world-size {self.world_size}: must be at least 1")
        if (self.bucket_mb is not None) != (self.strategy in BUCKETED_STRATEGIES):
            raise UsageError(
                f"bucket size {self.bucket_mb}: {' and '.join(BUCKETED_STRATEGIES)} need one, and others have none"
            )
        if isinstance(self.bucket_mb, str):
            if self.bucket_mb != WHOLE_BLOCKS:
                raise UsageError(f"--bucket-mb '{self.bucket_mb}': give '{WHOLE_BLOCKS}' or a number of megabytes")
        elif self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            raise UsageError(f"--bucket-mb {self.bucket_mb:g}: must be a positive number of megabytes")
        if self.checkpointing != "none" and self.training.compile == "model":
            raise UsageError("--checkpoint puts checkpoints around blocks: with --compile model there are none to see")
        if (self.prefetch is not None) != (self.strategy == "fsdp"):
            raise UsageError(f"prefetch {self.prefetch}: strategy 'fsdp' needs one, and others have none")
        if self.prefetch is not None and self.prefetch < 0:
            raise UsageError(f"--prefetch {self.prefetch}: must be at least 0")
        if self.training.size.batch_size % self.world_size:
            raise UsageError(
                f"--batch-size {self.training.size.batch_size}: {self.world_size} ranks cannot share it equally; "
                f"choose a multiple of {self.world_size}"
            )

    def _check_kept(self) -> None:
        training, blocks = self.training, kept_blocks(self.checkpointing)
        if not training.is_ours:
            raise UsageError(
                f"--checkpoint {self.checkpointing} knows the parts of this project's model alone: choose block"
            )
        if training.attention == "reference":
            raise UsageError(
                f"--checkpoint {self.checkpointing} keeps attention's output and logsumexp: --attention reference has "
                "no logsumexp; choose flash or sdpa"
            )
        if blocks is not None and blocks > training.size.num_layers:
            raise UsageError(f"--checkpoint {self.checkpointing}: the model has {training.size.num_layers} blocks")
        if training.size.d_ff == training.size.d_model and not self.writes_out_blocks:
            raise UsageError(
                f"--checkpoint {self.checkpointing} tells products apart by their widths: d_ff and d_model are both "
                f"{training.size.d_ff}"
            )

    @property
    def writes_out_blocks(self) -> bool:
        """Whether blocks that choose what to keep have a backward pass of their own: fused kernels without autocast."""
        training, is_kept = self.training, kept_blocks(self.checkpointing) is not None
        return is_kept and self.strategy == "fsdp" and training.kernels == "fused" and training.compile == "off"

    @property
    def share(self) -> int:
        """Sequences a rank."""
        return self.training.size.batch_size // self.world_size

    @property
    def uses_autocast(self) -> bool:
        """Whether half precision is autocast's; fully sharded models compute in the dtype that is gathered instead."""
        return self.strategy not in FULLY_SHARDED

    @property
    def computed_flops(self) -> int:
        """FLOPs a step of all ranks, with what is computed again: by checkpoints, and the scores in the backward pass
        of attention that keeps none of them.
        """
        training, size = self.training, self.training.size
        again = 0
        if training.attention != "reference":
            shape = size.batch_size, size.num_heads, size.context, size.context, size.head_dim
            again = size.num_layers * attention_flops(*shape, causal=True, backward=False) // 2
        if kept_blocks(self.checkpointing) is not None:
            return model_flops(size) + again + flops_again(self.kept_step)
        return model_flops(size) + again + recomputed_flops(size, self.checkpointing)

    @property
    def kept_step(self) -> KeptStep:
        """What accounting needs to know of a step whose blocks choose what to keep; of another, as if none kept gate
        and up.
        """
        training = self.training
        state_dtype = training.state_dtype if self.has_half_weights else "fp32"
        blocks, ahead = kept_blocks(self.checkpointing) or 0, 1 if self.prefetch is None else self.prefetch
        return KeptStep(training.size, self.world_size, training.precision, state_dtype, blocks, ahead)

    @property
    def has_half_weights(self) -> bool:
        """Whether slices of weights and their gradients are in half precision from step to step."""
        return self.strategy == "fsdp" and self.training.precision == "bf16" and self.training.state_dtype != "fp32"

    @property
    def unsynchronized(self) -> "ParallelWorkload":
        """The same steps without communication; blocks with a backward pass of their own are computed as plain ones."""
        return replace(
            self,
            strategy="unsynchronized",
            bucket_mb=None,
            gradient_dtype="fp32",
            trace=None,
            prefetch=None,
            checkpointing="none" if self.writes_out_blocks else self.checkpointing,
        )


# Bytes an element, by the name of the dtype.
COLLECTIVE_DTYPES = ELEMENT_BYTES | {"fp64": 8, "int32": 4}


@dataclass(frozen=True)
class CollectiveWorkload(Configured):
    """One collective on one size of message.

    Attributes:
        backend: ``nccl`` communicates GPU tensors, one GPU a rank, ``gloo`` CPU tensors.
        collective: one of :data:`~cs336sys.accounting.collectives.COLLECTIVES`.
        dtype: one of :data:`COLLECTIVE_DTYPES`.
        message_bytes: the whole array as asked for.
        warmup, iterations: calls in each of the two ways of timing.
        timeout_s: how long a rank waits for the others.
    """

    backend: str
    collective: str
    world_size: int
    dtype: str
    message_bytes: int
    warmup: int = 5
    iterations: int = 20
    timeout_s: float = 120.0

    @property
    def elements(self) -> int:
        """Elements of the whole array: as many as fit the message and all ranks can share equally.

        Raises:
            UsageError: there would be none.
        """
        element_bytes = COLLECTIVE_DTYPES[self.dtype]
        parts = self.world_size if self.collective in ("all_gather", "reduce_scatter") else 1
        count = self.message_bytes // element_bytes // parts * parts
        if count == 0:
            raise UsageError(
                f"message of {self.message_bytes} bytes: too small for {self.collective} of {self.dtype} over "
                f"{self.world_size} ranks; choose at least {parts * element_bytes} bytes"
            )
        return count

    @property
    def size_bytes(self) -> int:
        """The whole array as it is communicated; errors as of :attr:`elements`."""
        return self.elements * COLLECTIVE_DTYPES[self.dtype]


IMPLEMENTATIONS = (
    "auto",
    "triton",
    "hopper",
    "tiled",
    "eager",
    "compiled",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
    "fa4",
)


@dataclass(frozen=True)
class AttentionWorkload(Configured):
    """One call of one attention implementation on random queries, keys and values (batch, heads, context, head_dim).

    Attributes:
        implementation: one of :data:`IMPLEMENTATIONS`; ``auto`` is what ``flash_attention`` chooses, ``triton`` and
            ``hopper`` are our kernels, ``tiled`` is FlashAttention-2 in PyTorch, ``eager`` plain PyTorch with the
            scores in memory and ``compiled`` the same under torch.compile; ``fa4`` is the package flash-attn-4;
            ``attn`` also has ``model``, the model's own attention, whose softmax is made of single operations.
        heads: of queries.
        causal: a query sees the keys up to its own position.
        kv_heads: of keys and values, which so many heads of queries share; None for as many as of queries.
        window: how many keys a query sees, its own and those before it; None for all.
        warmup_ms, repetition_ms: how long calls are repeated before and while they are measured.
    """

    implementation: str
    batch_size: int
    heads: int
    context: int
    head_dim: int
    dtype: str = "bf16"
    causal: bool = True
    device: str = "auto"
    seed: int = 0
    warmup_ms: float = 25.0
    repetition_ms: float = 100.0
    kv_heads: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            choices = ", ".join(str(number) for number in range(1, self.heads + 1) if self.heads % number == 0)
            raise UsageError(f"--kv-heads {self.kv_heads}: must divide --num-heads {self.heads}, choose from {choices}")
        if self.window is not None and not self.causal:
            raise UsageError(f"--window {self.window}: counts keys back from the query's own, so it needs --causal")

    def configuration(self) -> dict[str, Any]:
        """As in general; heads of keys and a window only where there are any, so that earlier results are equal."""
        flat = super().configuration()
        return {name: value for name, value in flat.items() if name not in ("kv_heads", "window") or value is not None}

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def tflops(self, samples: Mapping[str, Samples]) -> dict[str, float]:
        """``forward_tflops`` and so on: FLOPs of each part (:func:`attention_flops`) over the median of its times."""
        shape = (self.batch_size, self.heads, self.context, self.context, self.head_dim)
        forward = attention_flops(*shape, causal=self.causal, window=self.window, backward=False)
        both = attention_flops(*shape, causal=self.causal, window=self.window, backward=True)
        flops = {"forward": forward, "backward": both - forward, "end_to_end": both}
        return {f"{part}_tflops": count / samples[part].median / 1e9 for part, count in flops.items()}


# The ops of ``kernels``, and which implementations there are of each.
KERNELS = {
    "rms-norm": ("ours", "eager", "compiled", "quack", "liger"),
    "add-rms-norm": ("ours", "eager", "compiled", "quack"),
    "rope": ("ours", "eager", "compiled"),
    "swiglu": ("ours", "eager", "compiled", "liger"),
    "linear-cross-entropy": ("ours", "eager", "compiled", "chunked", "liger"),
    "adamw": ("ours", "eager", "fused"),
    "weighted-sum": ("ours", "eager", "compiled"),
}
CLASSIFIER = "linear-cross-entropy"
KERNEL_IMPLEMENTATIONS = tuple(dict.fromkeys(name for names in KERNELS.values() for name in names))


@dataclass(frozen=True)
class KernelWorkload(Configured):
    """One call of one implementation of an op on random tensors of tokens x width elements.

    Attributes:
        op: one of :data:`KERNELS`.
        implementation: ``ours``, ``eager`` PyTorch, the same ``compiled``, torch's ``fused`` optimizer, logits
            ``chunked`` and recomputed, or that of a package.
        head_dim: of the heads into which ``rope`` splits the width; None for the others.
        vocab_size: of ``linear-cross-entropy``; None for the others.
        warmup_ms, repetition_ms: how long calls are repeated before and while they are measured.
    """

    op: str
    implementation: str
    tokens: int
    width: int
    dtype: str = "bf16"
    head_dim: int | None = None
    vocab_size: int | None = None
    device: str = "auto"
    seed: int = 0
    warmup_ms: float = 25.0
    repetition_ms: float = 100.0

    def __post_init__(self) -> None:
        _check_choices(self, {"op": KERNELS, "dtype": PRECISIONS, "device": DEVICES})
        _check_choices(self, {"implementation": KERNELS[self.op]})
        for name, value, op in (("head dim", self.head_dim, "rope"), ("vocab size", self.vocab_size, CLASSIFIER)):
            if (value is not None) != (self.op == op):
                raise UsageError(f"{name} {value}: op '{op}' needs one, and others have none")
        if self.head_dim is not None and (self.head_dim % 2 or self.width % self.head_dim):
            raise UsageError(f"--head-dim {self.head_dim}: must be even and divide the width, {self.width}")

    @property
    def elements(self) -> int:
        return self.tokens * self.width

    @property
    def tensor_bytes(self) -> int:
        """Bytes of a tensor of tokens x width elements."""
        return self.elements * ELEMENT_BYTES[self.dtype]
