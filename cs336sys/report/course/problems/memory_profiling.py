"""``memory_profiling``: where memory goes in inference and in a training step."""

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.one_device import tensor_answers
from cs336sys.report.course.evidence import PLAIN, Evidence, Found, plain_table
from cs336sys.report.course.problem import (
    GIB,
    Answer,
    Command,
    Handout,
    Part,
    Problem,
    Sweep,
    Target,
    arithmetic,
    runs_of,
)
from cs336sys.report.course.words import ALIKE, derived_sentence, failures, gib, joined, percent, times
from cs336sys.report.numbers import format_quantity
from cs336sys.report.table import Column
from cs336sys.results.model import Cell
from cs336sys.sizes import SIZES
from cs336sys.workload import MemoryWorkload

# Which cells the problem is answered from, and what they are called.


# The model that both handouts ask about.
SIZE = "2.7b"

_WITHOUT_MODE = {name: values for name, values in PLAIN.items() if name != "mode"}


def recorded(evidence: Evidence, handout: Handout, **settings) -> list[Found]:
    """Plain steps of the model at the handout's contexts, by ``memprof``."""
    # Where the longest that a handout asks for does not fit, shorter ones say what does.
    wanted = {"size": (SIZE,), "context": {*handout.memory_contexts, 128, 256, 512}}
    return evidence.find("memprof", wanted, **_WITHOUT_MODE, **{"checkpointing": ("none",), **settings})


def cells_of(found: list[Found]) -> list[Cell]:
    return [cell for group in found for cell in group.cells]


def context_of(cell: Cell) -> int:
    return cell.configuration["context"]


def step_words(cell: Cell) -> str:
    """``a training step of 2.7b at context 2048 in fp32``."""
    names = cell.configuration
    mode = {"forward": "a forward pass", "train": "a training step"}.get(names["mode"], names["mode"])
    return f"{mode} of {names['size']} at context {names['context']} in {names['precision']}"


# (b) and (c): the most memory held, by context and by precision.


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


# (a): what holds memory over one step.


def timelines(evidence: Evidence, handout: Handout) -> Answer | None:
    found = recorded(evidence, handout, precision=("fp32",))
    chosen: dict[str, Found] = {}
    sentences = []
    for mode, called in (("forward", "inference"), ("train", "a training step")):
        of_mode = [
            Found(group.invocation, [cell])
            for group in found
            for cell in group.measured
            if cell.configuration["mode"] == mode
        ]
        if not of_mode:
            continue
        wanted = [one for one in of_mode if context_of(one.cells[0]) in handout.memory_contexts[:1]]
        one = (wanted or sorted(of_mode, key=lambda one: context_of(one.cells[0])))[-1 if not wanted else 0]
        chosen[f"{called} at context {context_of(one.cells[0])} in fp32"] = one
        sentences += _timeline_words(one.cells[0], called)
    if not chosen:
        return None
    pictures = {name: draw for name, group in chosen.items() for draw in group.pictures().values()}
    tables = [
        table
        for group in chosen.values()
        for table in group.table(
            "phases",
            *("context", "mode", "phase", "allocated_gib", "parameters_gib", "gradients_gib", "optimizer_state_gib"),
            *("activations_gib", "temporary_gib", "other_gib"),
        )
    ]
    asked = [cell for cell in cells_of(found) if context_of(cell) == handout.memory_contexts[0]]
    sentences += failures(asked, step_words)
    modes = {group.cells[0].configuration["mode"] for group in chosen.values()}
    missing = [f"a timeline of {mode}" for mode in ("forward", "train") if mode not in modes]
    return Answer(sentences, tables, pictures, runs_of(list(chosen.values())), missing)


def _timeline_words(cell: Cell, called: str) -> list[str]:
    phases = cell.derived["phases"]
    parts = [f"{gib(phase['allocated'] / GIB)} in {phase['phase']}" for phase in phases]
    sentence = f"In {called} at context {context_of(cell)} the most held is {joined(parts)}"
    top = max(phases, key=lambda phase: phase["allocated"])
    kinds = {
        name: top[name] for name in ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")
    }
    largest = sorted(kinds.items(), key=lambda kind: -kind[1])[:2]
    sentences = [
        f"{sentence}; at the peak, in {top['phase']}, the largest parts are "
        + joined(f"{name} ({gib(size / GIB)})" for name, size in largest if size)
        + "."
    ]
    forward = next((phase for phase in phases if phase["phase"] == "forward"), None)
    if cell.configuration["mode"] != "forward" and forward is not None:
        if forward["activations"] > ALIKE * forward["allocated"]:
            sentences.append(
                "The stages show: memory climbs block by block through the forward pass as "
                f"{gib(forward['activations'] / GIB)} of activations are saved, and in the backward pass it "
                "falls as these are freed, while gradients come."
            )
        else:
            sentences.append(
                f"The stages hardly show: the forward pass saves only {gib(forward['activations'] / GIB)} of "
                "activations beside what is there already."
            )
    elif forward is not None:
        above = forward["allocated"] - forward["parameters"]
        kept = forward["activations"]
        sentences.append(
            (f"For a backward pass {gib(kept / GIB)} are kept" if kept else "Nothing is kept for a backward pass")
            + f": above the {gib(forward['parameters'] / GIB)} of parameters peaks of up to "
            f"{gib(above / GIB)} come and go, "
            f"{percent(100 * above / forward['parameters'])} of these."
        )
    return sentences


# (d), (e) and (f): the residual stream, the largest allocations, and what one block saves and produces.


def residual_stream(evidence: Evidence, handout: Handout) -> Answer:
    return Answer([derived_sentence(tensor_answers(SIZES[SIZE], "fp32")[0])])


def largest_allocations(evidence: Evidence, handout: Handout) -> Answer | None:
    found = [
        Found(group.invocation, group.measured)
        for group in recorded(evidence, handout, precision=("fp32",), mode=("forward",))
        if group.measured
    ]
    if not found:
        return None
    sentences = []
    for cell in sorted((cell for group in found for cell in group.cells), key=context_of):
        top = cell.derived["largest"][0]
        alike = [kind for kind in cell.derived["largest"] if kind["size"] == top["size"]]
        sentences.append(
            f"At context {context_of(cell)} the largest allocations of the forward pass have "
            f"{format_quantity(top['size'], 'bytes')} each: {joined(map(_kind_words, alike))}."
        )
    keys = ("context", "size_bytes", "count", "phase", "category", "module", "operation", "code")
    tables = [table for group in found for table in group.table("allocations", *keys)]
    return Answer(sentences, tables, {}, runs_of(found))


def _kind_words(kind: dict) -> str:
    """``32 by `mm` in `layers.*.ffn.w1` (cs336_basics/model.py:34 forward)``."""
    where = f" in `{kind['module']}`" if kind.get("module") else ""
    return f"{kind['count']} by `{kind['operation']}`{where}" + (f" ({kind['code']})" if kind.get("code") else "")


def block(evidence: Evidence, handout: Handout) -> Answer | None:
    found = [
        Found(group.invocation, kept)
        for group in recorded(evidence, handout, precision=("fp32",), mode=("train",))
        if (kept := [cell for cell in group.measured if cell.derived.get("saved_tensors")])
    ]
    if not found:
        return None
    sentences = []
    for cell in sorted((cell for group in found for cell in group.cells), key=context_of):
        tensors = cell.derived["saved_tensors"]
        total = sum(tensor["size"] for tensor in tensors)
        predicted = block_activations(
            MemoryWorkload.from_configuration(cell.configuration).training.size, "fp32", "reference"
        )
        as_derived = (
            "as the formula has it"
            if abs(total / predicted.total - 1) < 0.01
            else f"{times(total / predicted.total)} the formula's"
        )
        five = tensors[:5]
        listed = [f"{_saved_by(tensor)} {percent(100 * tensor['size'] / total)}" for tensor in five]
        sentences.append(
            f"At context {context_of(cell)} one block saves {format_quantity(total, 'bytes')} for the backward pass "
            f"({as_derived}), of which the five largest tensors, {joined(listed)}, are "
            f"{percent(100 * sum(tensor['size'] for tensor in five) / total)}."
        )
        sentences += _gradient_words(cell)
    tables = []
    for group in found:
        tables += group.table(
            "block",
            *("context", "saved_bytes", "saved_predicted_bytes", "forward_growth_bytes", "backward_change_bytes"),
            *("gradients_by_difference_bytes", "gradients_bytes", "gradients_expected_bytes"),
        )
        last = Found(group.invocation, sorted(group.cells, key=context_of)[-1:])
        tables += last.table(
            "saved_tensors", "context", "tensor", "shape", "size_bytes", "share_percent", "operation", "code"
        )
    return Answer(sentences, tables, {}, runs_of(found))


def _saved_by(tensor: dict) -> str:
    """``Exp of softmax``: the operation, and the function that called it, of a ``forward`` its line."""
    place, _, function = (tensor.get("code") or "").rpartition(" ")
    caller = place.rpartition("/")[2] if function == "forward" else function
    return (tensor.get("operation") or "an input") + (f" of {caller}" if caller else "")


def _gradient_words(cell: Cell) -> list[str]:
    changes = cell.derived.get("block")
    if not changes or changes.get("backward_change") is None:
        return []
    produced = changes["backward_change"] + changes["forward_growth"]
    size = MemoryWorkload.from_configuration(cell.configuration).training.size
    expected = 4 * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff + 2 * size.d_model)
    agrees = abs(produced / expected - 1) <= ALIKE
    return [
        f"Its backward pass changes what is held by {format_quantity(changes['backward_change'], 'bytes')} where the "
        f"forward pass added {format_quantity(changes['forward_growth'], 'bytes')}, so it produces "
        f"{format_quantity(produced, 'bytes')} of gradients; 4 bytes for each of its parameters are "
        f"{format_quantity(expected, 'bytes')}: {'as expected' if agrees else 'not as expected'}."
    ]


def memory_commands(target: Target) -> list[Command]:
    options = {"mode": ("forward", "forward-backward", "train"), "precision": ("fp32", "bf16")}
    contexts = target.contexts(sorted(target.handout.memory_contexts))
    return [
        Sweep("memprof", target.sizes((SIZE,)), contexts, options, ("--no-predict", "--steps", "1"), steps=4).on(target)
    ]


_PARTS = (
    Part("a", timelines, memory_commands),
    Part("b", peaks, memory_commands),
    Part("c", mixed_precision, memory_commands),
    Part("d", residual_stream, lambda target: arithmetic("account", "activations", "--size", SIZE)),
    Part("e", largest_allocations, memory_commands),
)
MEMORY_PROFILING_2025 = Problem("memory_profiling", "Memory profiling", _PARTS)
MEMORY_PROFILING_2026 = Problem("memory_profiling", "Memory profiling", (*_PARTS, Part("f", block, memory_commands)))
