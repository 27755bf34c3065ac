"""A capture in two or three sentences: how much of a step is computing, what the rest waits for, what to try next."""

from collections import Counter
from collections.abc import Callable, Sequence

from cs336sys.measure.profile.analysis import Analysis
from cs336sys.measure.profile.breakdown import (
    BETWEEN_KERNELS,
    COMMUNICATION_PART,
    COMPUTING_PART,
    COPIES_PART,
    IDLE_PARTS,
    LAUNCHING,
    LOADING,
    OTHER_STREAM,
    SYNCHRONIZING_CALL,
    UNKNOWN,
    WAITING_PART,
)
from cs336sys.measure.profile.ranks import Straggler
from cs336sys.measure.profile.taxonomy import (
    ATTENTION_SOFTMAX,
    COMMUNICATION,
    ELEMENTWISE,
    MATMUL,
    NORMALIZATION,
    OPTIMIZER,
    REDUCTION,
)
from cs336sys.report.numbers import format_number

# A part of a step below this share is not spoken of, and one above it is worth a change.
_LEAST_SHARE = 0.03
# From here on faster kernels help more than fewer gaps.
_MOSTLY = 0.8
# Kernels shorter than this are launched no faster than they run.
_SHORT_US = 15.0


def verdict(analysis: Analysis, straggler: Straggler | None = None) -> list[str]:
    """The sentences, the most important first."""
    sentences = [_first(analysis)]
    if straggler is not None:
        sentences.append(_straggler(straggler))
    parts = sorted(
        (part for part in (*IDLE_PARTS, COMMUNICATION_PART, WAITING_PART, COPIES_PART) if part != UNKNOWN),
        key=lambda part: -analysis.share(part),
    )
    causes = [_describe(analysis, part) for part in parts if analysis.share(part) >= _LEAST_SHARE and part in _ABOUT]
    if not causes or analysis.share(COMPUTING_PART) >= _MOSTLY:
        causes.insert(0, _computing_sentence(analysis))
    sentences += causes[: 2 if straggler is None else 1]
    if analysis.share(UNKNOWN) >= 0.1:
        sentences.append(f"For {_percent(analysis, UNKNOWN)} the capture does not say what the GPU waited for.")
    return sentences


def _first(analysis: Analysis) -> str:
    duration_name = "the step" if analysis.has_steps else "the capture"
    who = "The GPU computes" if analysis.is_gpu else "The operators of the CPU compute"
    length = f"{format_number(analysis.mean_step_ms, 'ms')} ms"
    return f"{who} {_percent(analysis, COMPUTING_PART)} of {duration_name}, which takes {length}."


def _percent(analysis: Analysis, *parts: str) -> str:
    return f"{format_number(100 * analysis.share(*parts), 'percent')} %"


def _straggler(straggler: Straggler) -> str:
    did = f": {straggler.why}" if straggler.why else ""
    label = straggler.label[0].upper() + straggler.label[1:]
    return f"{label} holds the others up by {straggler.percent:.1f} % of a step ({straggler.ms:.3g} ms){did}."


def _count(analysis: Analysis) -> tuple[float, float]:
    """Kernels of a step without collectives, which last as long as they wait, and how long one runs in us."""
    kernels = [kernel for kernel in analysis.kernels if kernel.kind != COMMUNICATION]
    count = sum(sum(kernel.count) for kernel in kernels)
    total = sum(sum(kernel.ms) for kernel in kernels)
    return count / len(analysis.step_ms), 1e3 * total / count if count else 0.0


def _launching(analysis: Analysis) -> str:
    if not analysis.is_gpu:
        return f"{_percent(analysis, LAUNCHING)} pass between operators, in Python: compile, or use larger batches."
    count, mean_us = _count(analysis)
    advice = "`--cuda-graph on`, compiling, or larger batches" if mean_us < _SHORT_US else "see what Python does there"
    return (
        f"It waits {_percent(analysis, LAUNCHING)} for the CPU, which launches {count:,.0f} kernels of "
        f"{mean_us:.3g} us: {advice}."
    )


def _synchronizing(analysis: Analysis) -> str:
    name, (count, _) = max(analysis.waits.items(), key=lambda item: item[1][1], default=("a call", (0, 0.0)))
    calls = f"{name}, {count / len(analysis.step_ms):.3g} a step" if count else name
    return (
        f"{_percent(analysis, SYNCHRONIZING_CALL)} are lost after calls that wait for the GPU ({calls}): read losses "
        "and metrics less often, without .item(), .cpu() or print in the step."
    )


def _copy_sentence(analysis: Analysis) -> str:
    copy = analysis.copies[0].name if analysis.copies else "copies"
    return f"{_percent(analysis, COPIES_PART)} are copies alone (most: {copy}): pin memory and copy on another stream."


def _communication_sentence(analysis: Analysis) -> str:
    kinds: Counter[str] = Counter()
    for row in analysis.collectives:
        kinds[row.kind] += row.ms  # type: ignore[assignment]  # milliseconds
    most = f", most of it {kinds.most_common(1)[0][0]}" if kinds else ""
    return (
        f"{_percent(analysis, COMMUNICATION_PART)} are communication that nothing overlaps{most}: overlap it with the "
        "backward pass in buckets, or send less."
    )


def _between(analysis: Analysis) -> str:
    count, mean_us = _count(analysis)
    return (
        f"{_percent(analysis, BETWEEN_KERNELS)} pass between kernels that had been launched, {count:,.0f} of "
        f"{mean_us:.3g} us: fewer and larger ones, by compiling or fused kernels."
    )


# The sentence on each part of a step; of text the part's share is the beginning.
_ABOUT: dict[str, str | Callable[[Analysis], str]] = {
    LAUNCHING: _launching,
    SYNCHRONIZING_CALL: _synchronizing,
    LOADING: "are waited for the next batch: more workers of the data loader, pinned memory, or batches prepared "
    "beforehand.",
    COPIES_PART: _copy_sentence,
    COMMUNICATION_PART: _communication_sentence,
    WAITING_PART: "are spent in collectives that wait for another rank.",
    OTHER_STREAM: "pass while kernels that were launched wait for another stream.",
    BETWEEN_KERNELS: _between,
}


def _describe(analysis: Analysis, part: str) -> str:
    about = _ABOUT[part]
    return f"{_percent(analysis, part)} {about}" if isinstance(about, str) else about(analysis)


def _computing_sentence(analysis: Analysis) -> str:
    """Suggest what to try where nothing waits: the largest kind of kernel."""
    totals: Counter[str] = Counter()
    for kernel in analysis.kernels:
        totals[kernel.kind] += sum(kernel.ms)  # type: ignore[assignment]  # milliseconds
    total = sum(totals.values()) or 1.0
    moving = sum(totals[kind] for kind in (ELEMENTWISE, REDUCTION, NORMALIZATION)) / total
    kind, ms = totals.most_common(1)[0] if totals else (MATMUL, 0.0)
    share = f"{100 * ms / total:.3g} % of the kernels' time"
    if moving > max(0.35, totals[MATMUL] / total):
        return f"{100 * moving:.3g} % of the kernels' time moves memory element by element: compile, or fuse them."
    subject, advice = _KIND_ADVICE.get(kind, (f"{kind.capitalize()} takes", ", more than anything else."))
    return f"{subject} {share}{advice}"


_KIND_ADVICE = {
    MATMUL: ("Matrix products take", ": `--roofline` shows how near to the peak they are; else a lower precision."),
    ATTENTION_SOFTMAX: ("Attention takes", ": a fused kernel (`flash`), or shorter contexts."),
    OPTIMIZER: ("The optimizer takes", ": a fused one, or larger batches for each step."),
}


def several(analyses: Sequence[Analysis], straggler: Straggler | None) -> list[str]:
    """The verdict about several ranks: that of the rank whose step is the median, with the straggler."""
    middle = sorted(analyses, key=lambda analysis: analysis.mean_step_ms)[len(analyses) // 2]
    sentences = verdict(middle, straggler)
    if straggler is None and middle.has_steps:
        sentences.append(f"No rank of {len(analyses)} holds the others up by more than the noise of the steps.")
    return sentences
