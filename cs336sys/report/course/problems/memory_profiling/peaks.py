"""(b) and (c): the most memory held, by context and by precision."""

from cs336sys.report.course.evidence import Evidence, plain_table
from cs336sys.report.course.problem import Answer, runs_of
from cs336sys.report.course.problems.memory_profiling.cells import cells_of, context_of, recorded, step_words
from cs336sys.report.course.target import GIB, Handout
from cs336sys.report.course.words import ALIKE, failures, gib, joined, times
from cs336sys.report.tables import Column
from cs336sys.results import Cell
from cs336sys.workload import MemoryWorkload


def peaks(evidence: Evidence, handout: Handout) -> Answer | None:
    found = recorded(evidence, handout, precision=("fp32",), mode=("forward", "forward-backward", "train"))
    every = cells_of(found)
    cells = [cell for cell in every if cell.configuration["mode"] != "forward-backward"]
    if not cells:
        return None
    rows = _peak_rows(cells, "mode")
    kept = {context_of(cell): _forward_gib(cell) for cell in every if cell.configuration["mode"] == "forward-backward"}
    for row in rows:
        row["kept_gib"] = kept.get(row["context"])
    sentences = _of_contexts(cells)
    listed = [
        f"{gib(need)} at context {context}" for context, need in sorted(kept.items()) if not isinstance(need, str)
    ]
    if listed:
        sentences.append(
            f"These forward passes keep nothing for a backward pass; with their graph kept they need {joined(listed)}."
        )
    sentences += [*failures(every, step_words), *_needs(every)]
    columns = (
        Column("size", "size"),
        Column("context", "context"),
        Column("forward_gib", "forward", "gib"),
        *([Column("kept_gib", "forward, graph kept", "gib")] if kept else []),
        Column("train_gib", "training step", "gib"),
    )
    return Answer(
        sentences,
        plain_table("peaks", "peak memory by context, fp32", columns, rows),
        {},
        runs_of(found),
        _missing_contexts(cells, handout),
    )


def _of_contexts(cells: list[Cell]) -> list[str]:
    """What a forward pass and a training step need, and how that grows with the context."""
    sentences = []
    for mode, called in (("forward", "a forward pass"), ("train", "a training step")):
        of_mode = sorted((c for c in cells if c.configuration["mode"] == mode and c.status == "ok"), key=context_of)
        if not of_mode:
            continue
        listed = [f"{gib(cell.derived['peak_gib'])} at context {context_of(cell)}" for cell in of_mode]
        sentences.append(f"{called.capitalize()} needs {joined(listed)}.")
        first, last = of_mode[0], of_mode[-1]
        if first is not last:
            grown = last.derived["peak_gib"] / first.derived["peak_gib"]
            hardly = "hardly depends on the context" if grown < 1 + 2 * ALIKE else f"grows {times(grown)}"
            sentences.append(
                f"Its peak {hardly} from {context_of(first)} to {context_of(last)} (the context grows "
                f"{times(context_of(last) / context_of(first))})."
            )
    return sentences


def _needs(cells: list[Cell]) -> list[str]:
    """What is predicted of the cells that ran out of memory."""
    listed = [
        f"{gib(training.predicted_peak().total_gib)} ({training.mode}, context {training.size.context})"
        for cell in cells
        if cell.status == "oom" and (training := MemoryWorkload.from_configuration(cell.configuration).training).is_ours
    ]
    return [f"By the accounting {'it' if len(listed) == 1 else 'they'} would need {joined(listed)}."] if listed else []


def _forward_gib(cell: Cell) -> float | str:
    """What the forward pass itself and the loss hold at most of a step; the status of what was not measured."""
    if cell.status != "ok":
        return cell.status
    passes = [phase["allocated"] for phase in cell.derived["phases"] if phase["phase"] in ("forward", "loss")]
    return max(passes) / GIB


def _missing_contexts(cells: list[Cell], handout: Handout) -> list[str]:
    there = {(context_of(cell), cell.configuration["mode"]) for cell in cells}
    return [
        f"{mode} at context {context}"
        for context in sorted(handout.memory_contexts)
        for mode in ("forward", "train")
        if (context, mode) not in there
    ]


def _peak_rows(cells: list[Cell], across: str) -> list[dict]:
    """Peaks in a column for each value of a setting; what did not fit stands as its predicted need."""
    rows: dict[tuple, dict] = {}
    for cell in sorted(cells, key=context_of):
        names = cell.configuration
        key = (names["size"], names["context"], "" if across == "mode" else names["mode"])
        row = rows.setdefault(key, {"size": key[0], "context": key[1], "mode": key[2]})
        value = cell.derived.get("peak_gib")
        row[f"{names[across]}_gib"] = value if cell.status == "ok" else cell.status
    return list(rows.values())


def mixed_precision(evidence: Evidence, handout: Handout) -> Answer | None:
    found = recorded(evidence, handout, precision=("fp32", "bf16"), mode=("forward", "train"))
    rows = [row for row in _peak_rows(cells_of(found), "precision") if {"fp32_gib", "bf16_gib"} <= row.keys()]
    measured = [row for row in rows if not isinstance(row["fp32_gib"], str) and not isinstance(row["bf16_gib"], str)]
    if not measured:
        return None
    sentences = []
    for mode, called in (("forward", "inference"), ("train", "a training step")):
        of_mode = [row for row in measured if row["mode"] == mode]
        if not of_mode:
            continue
        listed = [
            f"{gib(row['fp32_gib'])} in fp32 and {gib(row['bf16_gib'])} in bf16 (context {row['context']})"
            for row in of_mode
        ]
        ratios = [row["bf16_gib"] / row["fp32_gib"] for row in of_mode]
        verdict = (
            "no significant difference"
            if all(abs(ratio - 1) <= 2 * ALIKE for ratio in ratios)
            else "more, not less"
            if min(ratios) > 1
            else "less"
            if max(ratios) < 1
            else "more in some and less in others"
        )
        listed_ratios = joined(times(ratio) for ratio in ratios)
        sentences.append(f"For {called} the peak is {joined(listed)}: {verdict} ({listed_ratios}).")
    if any(row["bf16_gib"] > row["fp32_gib"] for row in measured):
        sentences.append(
            "Autocast keeps parameters, gradients and optimizer state in fp32 and adds bf16 copies of the weights; "
            "only activations shrink, so it saves memory where these are most of it."
        )
    else:
        sentences.append(
            "Autocast keeps parameters, gradients and optimizer state in fp32: what shrinks are the activations."
        )
    columns = (
        Column("size", "size"),
        Column("context", "context"),
        Column("mode", "mode"),
        Column("fp32_gib", "fp32", "gib"),
        Column("bf16_gib", "bf16", "gib"),
    )
    return Answer(sentences, plain_table("peaks", "peak memory by precision", columns, rows), {}, runs_of(found))
