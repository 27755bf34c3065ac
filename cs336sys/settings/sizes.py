"""The model sizes of both handouts, and custom ones. Plain data, no torch."""

from dataclasses import MISSING, dataclass, replace
from typing import Any

from cs336sys.errors import UsageError, require_known
from cs336sys.settings.fields import MODEL, Configured, setting

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PRECISIONS = tuple(ELEMENT_BYTES)


def _dimension(maximum: int, help: str, default: Any = MISSING, **description: Any) -> Any:
    """Declare a positive number of a size. No model comes near the maxima, beyond which other numbers overflow."""
    return setting(
        default, f"{help}. Default: by size.", minimum=1, maximum=maximum, panel=MODEL, is_by_size=True, **description
    )


@dataclass(frozen=True)
class ModelSize(Configured):
    """Shape of a ``BasicsTransformerLM`` with the batch that it is benchmarked on unless another is asked for.

    The handouts give vocabulary 10,000, batch 4 and context 512 to every size but the leaderboard's. ``precision`` is
    the default of a size, and no setting: a workload has its own.
    """

    name: str = setting(key="size", option="size", header=None)
    d_model: int = _dimension(10**6, "Model width", header=None)
    d_ff: int = _dimension(10**7, "Feed-forward width", header=None)
    num_layers: int = _dimension(1000, "Blocks", header=None)
    num_heads: int = _dimension(10**6, "Heads", header=None)
    vocab_size: int = _dimension(10**9, "Vocabulary size", 10_000, header="vocabulary", in_titles=True)
    context: int = _dimension(10**9, "Context lengths", 512, several=True, in_titles=True)
    batch_size: int = _dimension(10**12, "Batch size of all ranks", 4, several=True, header="batch", in_titles=True)
    precision: str = setting("fp32", key=None)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def tokens(self) -> int:
        return self.batch_size * self.context

    @property
    def stream(self) -> int:
        """Count the elements of the residual stream: ``T d``."""
        return self.tokens * self.d_model

    @property
    def inner(self) -> int:
        """Count the elements of a feed-forward layer's inner tensors: ``T f``."""
        return self.tokens * self.d_ff

    @property
    def queries(self) -> int:
        """Count the queries of a layer, of all heads."""
        return self.batch_size * self.num_heads * self.context

    @property
    def scores(self) -> int:
        """Count the attention scores of a layer: ``BHSS``."""
        return self.queries * self.context


SIZES = {
    size.name: size
    for size in (
        ModelSize("tiny", d_model=128, d_ff=512, num_layers=2, num_heads=4),
        ModelSize("small", d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        ModelSize("medium", d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
        ModelSize("large", d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
        ModelSize("xl", d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
        # The 2026 handout calls this shape "xl".
        ModelSize("2.7b", d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
        ModelSize("10b", d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
        # The 2026 leaderboard's model.
        ModelSize(
            "8b",
            d_model=4096,
            d_ff=11008,
            num_layers=34,
            num_heads=32,
            vocab_size=151_936,
            context=32_768,
            batch_size=2,
            precision="bf16",
        ),
    )
}

MOST_RANKS = 16_384  # Predictions deal tensors out to ranks one by one, which takes seconds for so many ranks.


def choose_size(name: str, **fields: int | None) -> ModelSize:
    """Return the named size with these fields replaced, except by None; another shape is named after its numbers.

    Raises:
        UsageError: the name is unknown, a number is out of range, or the heads do not divide ``d_model`` into an even
            head dimension, which rotary embeddings split into pairs.
    """
    require_known("size", name, SIZES)
    described = ModelSize.settings()
    size = replace(
        SIZES[name], **{field: described[field].checked(value) for field, value in fields.items() if value is not None}
    )
    if size.d_model % size.num_heads:
        raise UsageError(f"{size.num_heads} heads do not divide d_model {size.d_model}: choose a divisor of it")
    if size.head_dim % 2:
        raise UsageError(
            f"d_model {size.d_model} over {size.num_heads} heads gives head dimension {size.head_dim}: "
            "rotary embeddings need an even one"
        )
    shape = ("d_model", "d_ff", "num_layers", "num_heads")
    if any(getattr(size, field) != getattr(SIZES[name], field) for field in shape):
        size = replace(size, name=f"{size.d_model}/{size.d_ff}/{size.num_layers}/{size.num_heads}")
    return size
