"""One operation by itself: a collective, attention, or what a kernel of ours computes."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from cs336sys.accounting.flops import attention_flops
from cs336sys.errors import UsageError, require_known
from cs336sys.results.model import Samples
from cs336sys.settings.fields import Configured, Needs, same_setting, setting
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES, PRECISIONS
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import is_user_code

BACKEND_DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # The tensors of each backend are on one kind of device.

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

COLLECTIVE_DTYPES = ELEMENT_BYTES | {"fp64": 8, "int32": 4}  # Bytes an element, by the name of the dtype.


@dataclass(frozen=True)
class CollectiveWorkload(Configured):
    """One collective on one size of message, timed in two ways.

    ``nccl`` sends GPU tensors, one GPU a rank, ``gloo`` CPU tensors; ``message_bytes`` are the array's, as requested.
    """

    backend: str = setting(
        help="gloo (tensors on the CPU), nccl (on GPUs). Default: the device's.", choices=BACKEND_DEVICES, several=True
    )
    collective: str = setting(choices=COLLECTIVES, several=True)
    world_size: int = same_setting(ParallelWorkload, "world_size", MISSING)
    dtype: str = setting(choices=COLLECTIVE_DTYPES, several=True)
    message_bytes: int = setting(minimum=1, several=True)
    warmup: int = setting(5, "Warm-up calls in each way of timing.", minimum=0)
    iterations: int = setting(20, "Measured calls, back to back and synchronized.", minimum=1, option="steps")
    timeout_s: float = same_setting(ParallelWorkload, "timeout_s")

    def __post_init__(self) -> None:
        self.check_settings()

    @property
    def elements(self) -> int:
        """Return the elements of the whole array: as many as fit the message and ranks can share; a UsageError at 0."""
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
        """Return the bytes of the whole array as it is communicated, with the errors of :attr:`elements`."""
        return self.elements * COLLECTIVE_DTYPES[self.dtype]


FLASH_ATTENTION_4 = ("fa4", "fa4-deterministic")
IMPLEMENTATIONS = (
    *("auto", "triton", "hopper", "deterministic", "tiled", "eager", "compiled"),
    *("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", *FLASH_ATTENTION_4),
)

PLAIN_ATTENTION = ("eager", "compiled", "model")  # The implementations of ``attn``.


def _varied(default: Any = MISSING, help: str = "", **description: Any) -> Any:
    """Declare a setting of one operation, of which a sweep has several values; titles name each that it cannot lack."""
    return setting(default, help, **{"several": True, "in_titles": default is not None, "minimum": 1} | description)


@dataclass(frozen=True)
class AttentionWorkload(Configured):
    """One call of one attention implementation on random queries, keys and values (batch, heads, context, head_dim).

    Attributes:
        implementation: one of :data:`IMPLEMENTATIONS` or :data:`PLAIN_ATTENTION`, or ``FILE.py:NAME`` of the user's.
            ``auto`` is what ``flash_attention`` chooses, ``triton`` and ``hopper`` are our kernels, ``deterministic``
            is ``auto`` with gradients that repeat to the last bit, ``tiled`` FlashAttention-2 in PyTorch, ``eager``
            plain PyTorch with the scores in memory, ``compiled`` the same under torch.compile, ``fa4`` the package
            flash-attn-4, ``fa4-deterministic`` the same with gradients that repeat, ``model`` the model's own
            attention, whose softmax is made of single operations.
        kv_heads: heads of keys and values, which heads of queries share; None for as many as of queries.
        window: how many keys a query sees, the last of them its own; None for all.
        queries: of each sequence, over its ``context`` keys; None for as many. Causal ones are the last of them.
    """

    implementation: str = setting(several=True, header=None)
    batch_size: int = _varied(1, "Batch sizes.", header="batch")
    heads: int = _varied(16, "Numbers of heads.", option="num_heads")
    context: int = _varied(1024, "Sequence lengths.")
    head_dim: int = _varied(64, "Head dimensions.")
    dtype: str = _varied("bf16", choices=PRECISIONS, minimum=None)
    causal: bool = setting(True, "Causal mask, or none.", off="--full", in_titles=True)
    device: str = same_setting(Workload, "device")
    seed: int = same_setting(Workload, "seed")
    warmup_ms: float = setting(25.0, "Warm-up of each measurement.", minimum=0, header=None)
    repetition_ms: float = setting(100.0, "Duration of each measurement.", minimum=1, header=None)
    kv_heads: int | None = _varied(
        None, "Heads of keys and values, divisors of --num-heads.", shown_default="all", header="KV heads"
    )
    window: int | None = _varied(
        None,
        "Sliding window: the last keys that a query sees.",
        shown_default="all",
        needs=(Needs("causal", (True,), "counts keys back from the query's own, so it needs --causal"),),
    )
    queries: int | None = _varied(None, "Queries, at the end of --context keys if causal.", shown_default="--context")

    def __post_init__(self) -> None:
        self.check_settings()
        if self.kv_heads is not None and self.heads % self.kv_heads:
            choices = ", ".join(str(number) for number in range(1, self.heads + 1) if self.heads % number == 0)
            raise UsageError(f"--kv-heads {self.kv_heads}: must divide --num-heads {self.heads}, choose from {choices}")
        if self.causal and self.num_queries > self.context:
            raise UsageError(f"--queries {self.queries}: causal, so at most --context, {self.context}; or add --full")

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def num_queries(self) -> int:
        return self.context if self.queries is None else self.queries

    @property
    def diagonal(self) -> int:
        """Return the keys in front of the first query's position: 0 but for causal queries at the end of more keys."""
        return self.context - self.num_queries if self.causal else 0

    @property
    def flops(self) -> dict[str, int]:
        """Return FLOPs by part as :func:`attention_flops` counts them."""
        shape = (self.batch_size, self.heads, self.num_queries, self.context, self.head_dim)
        mask: dict[str, Any] = {"causal": self.causal, "window": self.window, "aligned_at_end": self.diagonal > 0}
        forward, total = (attention_flops(*shape, backward=backward, **mask) for backward in (False, True))
        return {"forward": forward, "backward": total - forward, "end_to_end": total}

    def tflops(self, samples: Mapping[str, Samples]) -> dict[str, float]:
        """Return ``forward_tflops`` and so on: FLOPs of each part over the median of its times (ms)."""
        return {f"{part}_tflops": self.flops[part] / times.median / 1e9 for part, times in samples.items()}


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
_WITH_HEADS = tuple(name for name, op in KERNELS.items() if op.has_heads)
_WITH_VOCABULARY = tuple(name for name, op in KERNELS.items() if op.has_vocabulary)
KERNEL_IMPLEMENTATIONS = tuple(dict.fromkeys(name for op in KERNELS.values() for name in op.implementations))


@dataclass(frozen=True)
class KernelWorkload(Configured):
    """One call of one implementation of an op on random tensors of tokens x width elements.

    Attributes:
        implementation: ``FILE.py:NAME`` of the user's, ``ours``, ``eager`` PyTorch, the same ``compiled``, torch's
            ``fused`` optimizer, logits ``chunked`` and recomputed, or that of a package.
        head_dim, vocab_size: None for ops that have none.
    """

    op: str = _varied(help=f"Any of {', '.join(KERNELS)}.", choices=KERNELS, minimum=None, shown_default="all")
    implementation: str = setting(several=True, header=None)
    tokens: int = _varied(help="Numbers of rows.", shown_default="32768, on a CPU 32")
    width: int = _varied(help="Lengths of a row.", shown_default="4096, on a CPU 128")
    dtype: str = same_setting(AttentionWorkload, "dtype")
    head_dim: int | None = setting(
        None,
        "Head dimensions of rope.",
        minimum=2,
        option_default=64,
        needs=(Needs("op", _WITH_HEADS, "only affects rope; add it to --op, or leave it out"),),
        is_required=True,
    )
    vocab_size: int | None = _varied(
        None,
        "Vocabularies of linear-cross-entropy.",
        minimum=2,
        shown_default="151936, on a CPU 97",
        header="vocabulary",
        needs=(Needs("op", _WITH_VOCABULARY, "only affects linear-cross-entropy; add it to --op, or leave it out"),),
        is_required=True,
    )
    device: str = same_setting(Workload, "device")
    seed: int = same_setting(Workload, "seed")
    warmup_ms: float = same_setting(AttentionWorkload, "warmup_ms")
    repetition_ms: float = same_setting(AttentionWorkload, "repetition_ms")

    def __post_init__(self) -> None:
        self.check_settings()
        if not is_user_code(self.implementation):
            require_known("implementation", self.implementation, KERNELS[self.op].implementations)
        if self.head_dim is not None and (self.head_dim % 2 or self.width % self.head_dim):
            raise UsageError(f"--head-dim {self.head_dim}: must be even and divide the width, {self.width}")

    @property
    def elements(self) -> int:
        return self.tokens * self.width

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of a tensor of tokens x width elements."""
        return self.elements * ELEMENT_BYTES[self.dtype]
