"""What one benchmark cell trains, and how. Plain data, no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS, ModelSize

PHASES = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "train": ("forward", "backward", "optimizer"),
}
MODES = tuple(PHASES)
COMPILE_MODES = ("off", "block", "model")
ATTENTION = ("reference", "sdpa", "flash")
OPTIMIZERS = ("course", "fused")
DEVICES = ("auto", "cuda", "cpu")
SYNCHRONIZE = ("step", "none")

_CHOICES = {
    "mode": MODES,
    "precision": PRECISIONS,
    "compile": COMPILE_MODES,
    "attention": ATTENTION,
    "optimizer": OPTIMIZERS,
    "device": DEVICES,
    "synchronize": SYNCHRONIZE,
}


@dataclass(frozen=True)
class Workload:
    """One model, its batch, and how its steps run.

    Attributes:
        mode: the phases of a step: ``forward`` (without gradients), ``forward-backward``, or ``train``.
        precision: ``fp32``, or autocast to ``bf16`` or ``fp16`` over forward and loss (fp16 scales the loss).
        compile: ``off``; ``block`` compiles one Transformer block, which all blocks reuse, and the loss; ``model``
            compiles the whole model and the loss.
        attention: which implementation takes the place of the model's ``scaled_dot_product_attention``.
        optimizer: ``course`` is ``cs336_basics.optimizer.AdamW``, ``fused`` torch's fused AdamW.
        tf32: whether fp32 matrix products may use TF32.
        synchronize: ``step`` waits for the device after every step, as the handout asks; ``none`` only at the end.
    """

    size: ModelSize
    mode: str = "train"
    precision: str = "fp32"
    compile: str = "off"
    attention: str = "reference"
    optimizer: str = "course"
    device: str = "auto"
    tf32: bool = False
    synchronize: str = "step"
    warmup: int = 5
    steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise UsageError(f"unknown {field} '{getattr(self, field)}': choose from {', '.join(choices)}")
        if self.warmup < 0:
            raise UsageError(f"--warmup {self.warmup}: must be at least 0")
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: must be at least 1")

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.size.batch_size * self.size.context

    def configuration(self) -> dict[str, Any]:
        """All fields as one flat dictionary of JSON scalars: a cell's configuration in the results."""
        size = asdict(self.size)
        # The size's own default precision decides nothing: the workload's does.
        del size["precision"]
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "size"}
        return {"size": size.pop("name")} | size | own

    @classmethod
    def from_configuration(cls, configuration: Mapping[str, Any]) -> "Workload":
        """The inverse of :meth:`configuration`."""
        own = {field.name for field in fields(cls)} - {"size"}
        shape = {name: value for name, value in configuration.items() if name not in own and name != "size"}
        size = ModelSize(name=configuration["size"], **shape)
        return cls(size=size, **{name: configuration[name] for name in own})


IMPLEMENTATIONS = (
    "triton",
    "tiled",
    "eager",
    "compiled",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
)


@dataclass(frozen=True)
class AttentionWorkload:
    """One call of one attention implementation on random queries, keys and values (batch, heads, context, head_dim).

    Attributes:
        implementation: one of :data:`IMPLEMENTATIONS`; ``eager`` is plain PyTorch with the scores in memory,
            ``compiled`` the same under torch.compile, ``tiled`` FlashAttention-2 in PyTorch, ``triton`` our kernels.
        causal: a query sees the keys up to its own position.
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

    def configuration(self) -> dict[str, Any]:
        """All fields: a cell's configuration in the results."""
        return asdict(self)
