"""A capture in two or three sentences: how much of a step is computing, what the rest waits for, what to try next."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from cs336sys.capture.analysis import IDLE_PARTS, Analysis, StepPart
from cs336sys.capture.capture import RECEIVE, SEND
from cs336sys.capture.ranks import RankMatching, find_stragglers
from cs336sys.capture.taxonomy import Category
from cs336sys.findings import Finding, sentence
from cs336sys.tables.numbers import format_quantity

say_trace = partial(sentence, __package__, quantity=format_quantity)  # Renders a block of ``sentences.jinja``.

_LEAST_SHARE = 0.03  # The verdict names parts of a step from this share on, which are worth a change.
_MUCH_UNKNOWN = 0.1  # From this share on a sentence says that the cause of idling is unknown.
_MOSTLY_COMPUTING = 0.8  # From this share of computing on, faster kernels help more than fewer gaps.
_SHORT_US = 15.0  # Kernels shorter than this are launched no faster than they run.


def verdict(analyses: Sequence[Analysis], ranks: RankMatching | None = None) -> list[str]:
    """Return the sentences about a capture, the most important first.

    Of several ranks: which of them holds the others up, then the step of the rank whose step is of median length.
    """
    sentences = damage_sentences(analyses)
    if len(analyses) == 1:
        return [*sentences, *_step_sentences(analyses[0], most_parts=2)]
    findings = find_stragglers(analyses, ranks)
    if ranks is not None and ranks.missing:
        sentences.append(f"{capital(ranks.missing)}: waiting for ranks is a lower bound.")
    middle = sorted(analyses, key=lambda analysis: analysis.median_step_ms)[len(analyses) // 2]
    # A rank that holds the others up is worth more attention than the second cause of idling.
    where, most_parts = f"on {middle.label} ({middle.file}) ", 1 if findings[0].cause == "straggler" else 2
    return [*sentences, rank_sentence(len(analyses), findings), *_step_sentences(middle, most_parts, where)]


def damage_sentences(analyses: Sequence[Analysis]) -> list[str]:
    """Say what the captures lack or hold that cannot be; of several, whose."""
    labels_of: dict[str, list[str]] = {}
    for analysis in analyses:
        for fault in analysis.damage:
            labels_of.setdefault(fault, []).append(analysis.label)
    count = len(analyses)
    sentences = [
        fault if len(labels) == count else f"{capital(_listed(labels))}: {fault[0].lower()}{fault[1:]}"
        for fault, labels in labels_of.items()
    ]
    unknown = [analysis.label for analysis in analyses if not analysis.is_idle_known]
    if unknown:
        whose = "" if len(unknown) == count else _listed(unknown)
        sentences.append(say_trace("unknown idle time", labels=whose))
    return sentences


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _step_sentences(analysis: Analysis, most_parts: int, where: str = "") -> list[str]:
    """Say how much of a step is computing and what its largest other parts are; nothing where that is not known."""
    if not analysis.is_idle_known:
        return []
    facts = _facts(analysis) | {
        "analysis": analysis,
        "where": where,
        "share": lambda part: format_quantity(100 * analysis.share(part), "percent"),
    }
    parts = sorted(_EXPLAINED_PARTS, key=lambda part: -analysis.share(part))
    causes = [say_trace(part, **facts) for part in parts if analysis.share(part) >= _LEAST_SHARE]
    if not causes or analysis.share(StepPart.COMPUTING) >= _MOSTLY_COMPUTING:  # Faster kernels are what helps most.
        causes.insert(0, _kernel_advice(analysis))
    sentences = [capital(say_trace("computing", **facts)), *causes[:most_parts]]
    if analysis.share(StepPart.UNKNOWN) >= _MUCH_UNKNOWN:
        sentences.append(say_trace("unknown", **facts))
    return sentences


# Parts of a step that have a sentence; of equal ones the first is named first.
_IDLE_PARTS = [part for part in IDLE_PARTS if part != StepPart.UNKNOWN]
_EXPLAINED_PARTS = (*_IDLE_PARTS, StepPart.COMMUNICATION, StepPart.WAITING, StepPart.COPIES)


def _facts(analysis: Analysis) -> dict[str, Any]:
    """Return the values, besides shares, that the sentences on the parts of a step name."""
    steps = len(analysis.step_ms)
    # Without collectives, which last as long as they wait for other ranks.
    kernels = [kernel for kernel in analysis.kernels if kernel.kind != Category.COMMUNICATION]
    count = sum(sum(kernel.count) for kernel in kernels)  # A kernel has a count, and ms, of each step.
    mean_us = 1e3 * sum(sum(kernel.ms) for kernel in kernels) / count if count else 0.0
    # The call that waited longest, and how often it was made: waits are (times, ms) by the call's name.
    call, (calls, _) = max(analysis.waits.items(), key=lambda item: item[1][1], default=("a call", (0, 0.0)))
    longest_collective = next(iter(_sum_by_name((row.kind, row.ms) for row in analysis.collectives)), "")
    return {
        "count": count / steps,
        "mean_us": mean_us,
        "is_short": mean_us < _SHORT_US,
        "call": call,
        "calls": calls / steps,
        "collective": longest_collective,
        "is_pipeline": longest_collective in (SEND, RECEIVE),
    }


def _sum_by_name(times_ms: Iterable[tuple[str, float]]) -> Counter[str]:
    """Add up times by name, as whole ns, which a Counter holds, and order names by their sums, the longest first."""
    totals_ns: Counter[str] = Counter()
    for name, ms in times_ms:
        totals_ns[name] += round(1e6 * ms)
    return Counter(dict(totals_ns.most_common()))


def _kernel_advice(analysis: Analysis) -> str:
    """Suggest what to try where nothing waits, by the largest kind of kernel."""
    totals_ns = _sum_by_name((kernel.kind, sum(kernel.ms)) for kernel in analysis.kernels)
    total_ns = totals_ns.total() or 1  # No division by 0 where all kernels are shorter than a ns.
    shares = {kind: ns / total_ns for kind, ns in totals_ns.items()} or {Category.MATMUL: 0.0}  # Without any kernel.
    moving = sum(shares.get(kind, 0) for kind in (Category.ELEMENTWISE, Category.REDUCTION, Category.NORMALIZATION))
    kind, share = next(iter(shares.items()))  # The largest comes first.
    # Together they may be the largest, though none of them is; under about a third of the time they are no advice.
    if moving > max(0.35, shares.get(Category.MATMUL, 0)):
        kind, share = "moving memory", moving
    return say_trace("kernels", kind=kind, percent=100 * share)


def rank_sentence(count: int, findings: Sequence[Finding]) -> str:
    """Say which of ``count`` ranks hold the others up, that none does, or why nobody can tell."""
    first = findings[0]
    name = first.certainty if first.certainty == "cannot tell" else first.cause
    return capital(say_trace(name, first, count=count, findings=findings))
