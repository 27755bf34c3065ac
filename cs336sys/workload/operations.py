"""One operation by itself: a collective, attention, or what a kernel of ours computes."""

from collections.abc import Mapping
from dataclasses import dataclass

from cs336sys.accounting.flops import attention_flops
from cs336sys.errors import UsageError
from cs336sys.results.model import Samples
from cs336sys.sizes import ELEMENT_BYTES, PRECISIONS
from cs336sys.user_code import is_user_code
from cs336sys.workload.training import DEVICES, Configured, check_choices

# Bytes an element, by the name of the dtype.
COLLECTIVE_DTYPES = ELEMENT_BYTES | {"fp64": 8, "int32": 4}


@dataclass(frozen=True)
class CollectiveWorkload(Configured):
    """One collective on one size of message.

    Attributes:
        backend: ``nccl`` communicates GPU tensors, one GPU a rank, ``gloo`` CPU tensors.
        collective: one of :data:`~cs336sys.accounting.communication.COLLECTIVES`.
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
    "deterministic",
    "tiled",
    "eager",
    "compiled",
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-efficient",
    "flex",
    "fa4",
    "fa4-deterministic",
)
FLASH_ATTENTION_4 = ("fa4", "fa4-deterministic")

# Of ``attn``: the last is the model's own, whose softmax is made of single operations.
PLAIN_ATTENTION = ("eager", "compiled", "model")


@dataclass(frozen=True)
class AttentionWorkload(Configured):
    """One call of one attention implementation on random queries, keys and values (batch, heads, context, head_dim).

    Attributes:
        implementation: one of :data:`IMPLEMENTATIONS`, or ``FILE.py:NAME`` of the user's;
            ``auto`` is what ``flash_attention`` chooses, ``triton`` and
            ``hopper`` are our kernels, ``deterministic`` is ``auto`` with gradients that repeat to the last bit,
            ``tiled`` FlashAttention-2 in PyTorch, ``eager`` plain PyTorch with the scores in memory and ``compiled``
            the same under torch.compile; ``fa4`` is the package flash-attn-4, ``fa4-deterministic``
            the same with gradients that repeat;
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

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs by part (:func:`attention_flops`)."""
        shape = (self.batch_size, self.heads, self.context, self.context, self.head_dim)
        forward = attention_flops(*shape, causal=self.causal, window=self.window, backward=False)
        both = attention_flops(*shape, causal=self.causal, window=self.window, backward=True)
        return {"forward": forward, "backward": both - forward, "end_to_end": both}

    def tflops(self, samples: Mapping[str, Samples]) -> dict[str, float]:
        """``forward_tflops`` and so on: FLOPs of each part over the median of its times."""
        flops = self.flops
        return {f"{part}_tflops": flops[part] / times.median / 1e9 for part, times in samples.items()}


@dataclass(frozen=True)
class FusedOperation:
    """An op of ``kernels``: who computes it, and whether it has heads or a vocabulary of a size."""

    implementations: tuple[str, ...] = ("ours", "eager", "compiled")
    has_heads: bool = False
    has_vocabulary: bool = False


KERNELS = {
    "rms-norm": FusedOperation(("ours", "eager", "compiled", "quack", "liger")),
    "add-rms-norm": FusedOperation(("ours", "eager", "compiled", "quack")),
    "rope": FusedOperation(has_heads=True),
    "swiglu": FusedOperation(("ours", "eager", "compiled", "liger")),
    "linear-cross-entropy": FusedOperation(("ours", "eager", "compiled", "chunked", "liger"), has_vocabulary=True),
    "adamw": FusedOperation(("ours", "eager", "fused")),
    "weighted-sum": FusedOperation(),
}
KERNEL_IMPLEMENTATIONS = tuple(dict.fromkeys(name for op in KERNELS.values() for name in op.implementations))


@dataclass(frozen=True)
class KernelWorkload(Configured):
    """One call of one implementation of an op on random tensors of tokens x width elements.

    Attributes:
        op: one of :data:`KERNELS`.
        implementation: ``FILE.py:NAME`` of the user's, ``ours``, ``eager`` PyTorch, the same ``compiled``, torch's
            ``fused`` optimizer, logits ``chunked`` and recomputed, or that of a package.
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
        check_choices(self, {"op": KERNELS, "dtype": PRECISIONS, "device": DEVICES})
        if not is_user_code(self.implementation):
            check_choices(self, {"implementation": KERNELS[self.op].implementations})
        op, sizes = KERNELS[self.op], {"head dim": self.head_dim, "vocab size": self.vocab_size}
        for (name, value), is_needed in zip(sizes.items(), (op.has_heads, op.has_vocabulary), strict=True):
            if (value is not None) != is_needed:
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
