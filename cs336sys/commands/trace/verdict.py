"""A capture in two or three sentences: how much of a step is computing, what the rest waits for, what to try next."""

from collections import Counter
from collections.abc import Iterable, Sequence

from cs336sys.capture.analysis import Analysis
from cs336sys.capture.breakdown import StepPart
from cs336sys.capture.capture import RECEIVE, SEND
from cs336sys.capture.ranks import RankAnswer, RankMatching, find_stragglers
from cs336sys.capture.taxonomy import Category
from cs336sys.tables.numbers import format_quantity

# The verdict names parts of a step from this share on, which are worth a change.
_LEAST_SHARE = 0.03
# From this share of computing on, faster kernels help more than fewer gaps.
_MOSTLY_COMPUTING = 0.8
# Kernels shorter than this are launched no faster than they run.
_SHORT_US = 15.0


def verdict(analyses: Sequence[Analysis], ranks: RankMatching | None = None) -> list[str]:
    """Return the sentences about a capture, the most important first.

    Of several ranks, who holds the others up, and the numbers of the rank whose step is of median length.
    """
    sentences = damage_sentences(analyses)
    if len(analyses) == 1:
        return [*sentences, *_step_sentences(analyses[0], most_parts=2)]
    answer = find_stragglers(analyses, ranks)
    if ranks is not None and ranks.missing:
        sentences.append(f"{capital(ranks.missing)}: waiting for ranks is a lower bound.")
    middle = sorted(analyses, key=lambda analysis: analysis.median_step_ms)[len(analyses) // 2]
    where, most_parts = f"on {middle.label} ({middle.file}) ", 1 if answer.stragglers else 2
    return [*sentences, _rank_sentence(len(analyses), answer), *_step_sentences(middle, most_parts, where)]


def damage_sentences(analyses: Sequence[Analysis]) -> list[str]:
    """Say what the captures lack or hold that cannot be; of several, whose."""
    labels_of: dict[str, list[str]] = {}
    for analysis in analyses:
        for sentence in analysis.damage:
            labels_of.setdefault(sentence, []).append(analysis.label)
    count = len(analyses)
    sentences = [
        sentence if len(labels) == count else f"{capital(_listed(labels))}: {sentence[0].lower()}{sentence[1:]}"
        for sentence, labels in labels_of.items()
    ]
    unknown = [analysis.label for analysis in analyses if not analysis.is_idle_known]
    if unknown:
        whose = "" if len(unknown) == count else f" of {_listed(unknown)}"
        sentences.append(f"Idle time{whose} cannot be told, and how much of a step the GPU computes.")
    return sentences


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _step_sentences(analysis: Analysis, most_parts: int, where: str = "") -> list[str]:
    """Say how much of a step is computing and what its largest other parts are; nothing where that is not known."""
    if not analysis.is_idle_known:
        return []

    def percent(part: StepPart) -> str:
        return format_quantity(100 * analysis.share(part), "percent")

    duration_name = "the step" if analysis.has_steps else "the capture"
    who = "the GPU computes" if analysis.is_gpu else "the operators of the CPU compute"
    length = format_quantity(analysis.median_step_ms, "ms")
    computing = f"{where}{who} {percent(StepPart.COMPUTING)} of {duration_name}, which takes {length}."
    templates = _PART_SENTENCES if analysis.is_gpu else _PART_SENTENCES | {StepPart.LAUNCHING: _LAUNCHING_ON_CPU}
    facts = _facts(analysis)
    causes = [
        templates[part].format(share=percent(part), **facts)
        for part in sorted(templates, key=lambda part: -analysis.share(part))
        if analysis.share(part) >= _LEAST_SHARE
    ]
    if not causes or analysis.share(StepPart.COMPUTING) >= _MOSTLY_COMPUTING:
        causes.insert(0, _kernel_advice(analysis))
    sentences = [capital(computing), *causes[:most_parts]]
    if analysis.share(StepPart.UNKNOWN) >= 0.1:
        sentences.append(f"For {percent(StepPart.UNKNOWN)} the capture does not say what the GPU waited for.")
    return sentences


# The sentence on each part of a step.
_PART_SENTENCES = {
    StepPart.LAUNCHING: "It waits {share} for the CPU, which launches {kernels}: {launch_advice}.",
    StepPart.SYNCHRONIZING_CALL: "{share} are lost after calls that wait for the GPU ({calls}): read losses and "
    "metrics less often, without .item(), .cpu() or print in the step.",
    StepPart.LOADING: "{share} are waited for the next batch: more workers of the data loader, pinned memory, or "
    "batches prepared beforehand.",
    StepPart.OTHER_STREAM: "{share} pass while kernels that were launched wait for another stream.",
    StepPart.BETWEEN_KERNELS: "{share} pass between kernels that had been launched, {launched}: fewer and larger "
    "ones, by torch.compile or fused kernels.",
    StepPart.COMMUNICATION: "{share} are communication that nothing overlaps{most}: {communication_advice}.",
    StepPart.WAITING: "{share} are lost to collectives that wait for another rank.",
    StepPart.COPIES: "{share} are copies alone (most: {copy}): pin memory and copy on another stream.",
}
_LAUNCHING_ON_CPU = "{share} pass between operators, in Python: torch.compile, or larger batches."


def _facts(analysis: Analysis) -> dict[str, str]:
    """Return the values, besides its share, that the sentence on a part of a step names."""
    steps = len(analysis.step_ms)
    # Without collectives, which last as long as they wait.
    kernels = [kernel for kernel in analysis.kernels if kernel.kind != Category.COMMUNICATION]
    count = sum(sum(kernel.count) for kernel in kernels)
    mean_us = 1e3 * sum(sum(kernel.ms) for kernel in kernels) / count if count else 0.0
    call, (calls, _) = max(analysis.waits.items(), key=lambda item: item[1][1], default=("a call", (0, 0.0)))
    kind = next(iter(_sum_by_name((row.kind, row.ms) for row in analysis.collectives)), "")
    return {
        "kernels": f"{count / steps:,.0f} kernels of {mean_us:.3g} us",
        "launched": f"{count / steps:,.0f} of {mean_us:.3g} us",
        "launch_advice": "torch.compile, CUDA graphs, or larger batches"
        if mean_us < _SHORT_US
        else "see what Python does there",
        "calls": f"{call}, {calls / steps:.3g} a step" if calls else call,
        "copy": analysis.copies[0].name if analysis.copies else "copies",
        "most": f", most of it {kind}" if kind else "",
        "communication_advice": "in a pipeline, more micro-batches, or stages of equal length"
        if kind in (SEND, RECEIVE)
        else "overlap it with the backward pass in buckets, or send less",
    }


def _sum_by_name(times_ms: Iterable[tuple[str, float]]) -> Counter[str]:
    """Add up times by name, in ns, the longest first."""
    totals: Counter[str] = Counter()
    for name, ms in times_ms:
        totals[name] += round(1e6 * ms)
    return Counter(dict(totals.most_common()))


def _kernel_advice(analysis: Analysis) -> str:
    """Suggest what to try where nothing waits, by the largest kind of kernel."""
    totals = _sum_by_name((kernel.kind, sum(kernel.ms)) for kernel in analysis.kernels)
    total = totals.total() or 1
    moving = sum(totals[kind] for kind in (Category.ELEMENTWISE, Category.REDUCTION, Category.NORMALIZATION)) / total
    kind = next(iter(totals), Category.MATMUL)
    if moving > max(0.35, totals[Category.MATMUL] / total):
        return f"{100 * moving:.3g} % of the kernels' time moves memory element by element: torch.compile fuses them."
    share = f"{100 * totals[kind] / total:.3g} % of the kernels' time"
    return _KIND_ADVICE.get(kind, f"{kind.capitalize()} takes {{share}}, more than anything else.").format(share=share)


_KIND_ADVICE: dict[str, str] = {
    Category.MATMUL: "Matrix products take {share}: a lower precision, unless they are far from the GPU's peak "
    "(trace --roofline).",
    Category.ATTENTION_SOFTMAX: "Attention takes {share}: torch's scaled_dot_product_attention, a fused kernel, or "
    "shorter contexts.",
    Category.OPTIMIZER: "The optimizer takes {share}: a fused one (fused=True), or larger batches for each step.",
}


def _rank_sentence(count: int, answer: RankAnswer) -> str:
    """Say which of ``count`` ranks hold the others up, that none does, or why nobody can tell."""
    if answer.why_unknown:
        return f"Cannot tell whether a rank holds the others up, because {answer.why_unknown}."
    if not answer.stragglers:
        longer = f"{answer.unseen_percent:.2g} % of a step longer"
        return f"No rank of {count} holds the others up: none computes or idles {longer}."
    first = answer.stragglers[0]
    named = " and ".join(f"{straggler.label} ({straggler.file})" for straggler in answer.stragglers)
    hold, up_to = ("holds", "") if len(answer.stragglers) == 1 else ("hold", "up to ")
    why = f": {first.why}" if first.why else ""
    return f"{capital(named)} {hold} the others up by {up_to}{first.percent:.1f} % of a step ({first.ms:.3g} ms){why}."
