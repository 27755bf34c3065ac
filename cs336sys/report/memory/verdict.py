"""Say in sentences what filled a device, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.measure.allocations.diagnosis import Longer, MemoryDiagnosis, longer_batch
from cs336sys.report.numbers import format_quantity

_LISTED = 3


@dataclass(frozen=True)
class Cause:
    """A mistake, or a waste.

    Attributes:
        name: in a word or two: ``leak``.
        size: bytes that it holds.
        why: one clause.
        advice: what to do.
    """

    name: str
    size: int
    why: str
    advice: str

    @property
    def sentence(self) -> str:
        return f"{self.why}: {self.advice}"


def size_words(size: float) -> str:
    return format_quantity(size, "bytes")


def causes(one: MemoryDiagnosis, longer: Longer | None = None) -> list[Cause]:
    """The mistakes that a snapshot proves, in the order in which to mend them."""
    found = []
    free, failure = one.free, one.failure
    if one.twice is not None:
        found.append(
            Cause(
                "optimizer state twice",
                one.twice.held,
                f"the optimizer's state exists twice, {size_words(one.twice.held)} more than once, made at "
                f"{one.twice.code}",
                "step one optimizer alone, and drop the old one before its state is loaded into another",
            )
        )
    if one.leak is not None:
        leak = one.leak
        grows = f"grows by {size_words(leak.step_bytes)} a step from {leak.code or 'code without a stack'}"
        if leak.is_graph:
            cause = Cause(
                "graph kept",
                leak.held,
                f"memory {grows}: {leak.steps} steps have left the activations of a whole forward pass behind",
                "something keeps a tensor with its graph, such as a loss in a list; keep loss.item(), or compute it "
                "under torch.no_grad()",
            )
        else:
            cause = Cause(
                "leak",
                leak.held,
                f"memory {grows}, {size_words(leak.held)} after {leak.steps} steps",
                "something, such as a list, keeps the tensors that this line makes; keep a number, or .detach().cpu()",
            )
        found.append(cause)
    if longer is not None and longer.name == one.name:
        found.append(
            Cause(
                "longer batch",
                max(0, longer.difference),
                f"its activations are {longer.ratio:.3g} times those of the other ranks by the same lines",
                "its batch is longer; pad or pack batches to one length on all ranks, or bound tokens a rank",
            )
        )
    if free.is_cause and failure is not None:
        expand = "" if free.is_expandable else "; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        found.append(
            Cause(
                "fragmentation",
                free.usable,
                f"{size_words(free.usable)} free in pieces of at most {size_words(free.largest)}, and "
                f"{size_words(failure.size)} were asked for",
                f"fragmentation{expand}",
            )
        )
    if one.logits is not None:
        found.append(
            Cause(
                "fp32 logits",
                one.logits.held,
                f"fp32 copies of half-precision logits take {size_words(one.logits.held)} ({one.logits.code})",
                "compute the loss in chunks, or with a fused cross entropy that holds no logits",
            )
        )
    return found


def verdicts(diagnoses: Sequence[MemoryDiagnosis]) -> list[tuple[MemoryDiagnosis, str, list[Cause]]]:
    """The sentences on each snapshot, the one that failed first: what is held, and why."""
    longer = longer_batch(diagnoses)
    ordered = sorted(diagnoses, key=lambda one: (not one.is_failed, -one.held))
    return [(one, _verdict(one, found), found) for one in ordered for found in [causes(one, longer)]]


def _verdict(one: MemoryDiagnosis, found: Sequence[Cause]) -> str:
    held = [(size, category) for category, size in one.by_category.items() if size]
    held.sort(reverse=True)
    parts = ", ".join(f"{category} {size_words(size)}" for size, category in held[:_LISTED])
    if one.failure is not None:
        where = f" at {one.failed_at}" if one.failed_at else " in the backward pass" if one.has_stacks else ""
        what = f"An allocation of {size_words(one.failure.size)}{where} failed with {size_words(one.held)} held"
    else:
        what = f"Nothing failed: the record holds {size_words(one.held)} at its peak"
    first = f"{what}: {parts}." if parts else f"{what}."
    if found:
        words = "; also, ".join(cause.sentence for cause in found)
        return f"{first} {words[0].upper()}{words[1:]}."
    if not one.kinds:
        return first
    kind = one.kinds[0]
    made = f" from {kind.code}" if kind.code else ""
    return (
        f"{first} No leak, no copy and no fragmentation is proved; the largest kind is {kind.count} x "
        f"{size_words(kind.size)} of {kind.category}{made}."
    )
