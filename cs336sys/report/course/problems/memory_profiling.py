"""``memory_profiling``: where memory goes in inference and in a training step."""

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

from cs336sys.accounting.activations import block_activations
from cs336sys.accounting.checkpointing import predicted_peak
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.one_device import tensor_answers
from cs336sys.report.course.answer import ALIKE, Answer, derived_sentence, percent
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection, cells_of
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.results.model import Cell
from cs336sys.sizes import SIZES, choose_size
from cs336sys.workload import MemoryWorkload

# The model that both handouts ask about.
SIZE = "2.7b"

# What the sentences call a mode.
_CALLED = {"forward": "inference", "train": "a training step"}


def _recorded_runs(answer: Answer, **settings: Collection[Any]) -> list[Selection]:
    """Plain steps of the model at the handout's contexts, by ``memprof``."""
    # Where the longest that a handout asks for does not fit, shorter ones say what does.
    wanted = {"size": (SIZE,), "context": {*answer.handout.memory_contexts, 128, 256, 512}}
    return answer.find("memprof", wanted, **PLAIN_OF_ANY_MODE, **{"checkpointing": ("none",), **settings})


def _context(cell: Cell) -> int:
    return cell.configuration["context"]


def _mode(cell: Cell) -> str:
    return cell.configuration["mode"]


def _step_name(cell: Cell) -> str:
    return f"step of {_mode(cell)}"


def peaks(answer: Answer) -> None:
    selections = _recorded_runs(answer, precision=("fp32",), mode=("forward", "forward-backward", "train"))
    every = cells_of(selections)
    cells = [cell for cell in every if _mode(cell) in _CALLED]
    if not cells:
        return
    rows = _peak_rows(cells, "mode")
    kept = {_context(cell): _forward_gib(cell) for cell in every if _mode(cell) == "forward-backward"}
    for row in rows:
        row["kept_gib"] = kept.get(row["context"])
    for mode in _CALLED:
        _say_peaks(answer, mode, sorted((c for c in cells if _mode(c) == mode and c.status == "ok"), key=_context))
    needs = [{"context": context, "gib": need} for context, need in sorted(kept.items()) if not isinstance(need, str)]
    answer.say_any("graph kept", peaks=needs)
    answer.say_failures(every, _step_name)
    _say_needs(answer, every)
    headers = {"size": "size", "context": "context", "forward_gib": "forward"}
    headers |= {"kept_gib": "forward, graph kept"} if kept else {}
    answer.add_table("peaks", "peak memory by context, fp32", headers | {"train_gib": "training step"}, rows)
    answer.measured_by(selections)
    measured = [cell.configuration for cell in cells]
    answer.lack_unmeasured("mode at context", measured, context=sorted(answer.handout.memory_contexts), mode=_CALLED)


def _say_peaks(answer: Answer, mode: str, cells: Sequence[Cell]) -> None:
    """Report the needs of a forward pass or a training step, and their growth with the context."""
    peaks_by_context = [{"context": _context(cell), "gib": cell.derived["peak_gib"]} for cell in cells]
    answer.say_any(f"peaks of {mode}", peaks=peaks_by_context)
    if mode == "train":
        tops = [(_context(cell), max(cell.derived["phases"], key=itemgetter("allocated"))) for cell in cells]
        answer.say_any("peak of the optimizer", contexts=[at for at, top in tops if top["phase"] == "optimizer"])
    if len(peaks_by_context) > 1:
        first, last = peaks_by_context[0], peaks_by_context[-1]
        grown, longer = (last[name] / first[name] for name in ("gib", "context"))
        name = "hardly depends" if grown < 1 + 2 * ALIKE else "grows"
        answer.say(name, called=_CALLED[mode], first=first, last=last, grown=grown, longer=longer)


def _say_needs(answer: Answer, cells: Sequence[Cell]) -> None:
    """Predict the needs of the cells that ran out of memory."""
    needs = [
        cell.configuration | {"need": training.predicted_peak().total_gib}
        for cell in cells
        if cell.status == "oom" and (training := MemoryWorkload.from_configuration(cell.configuration).training).is_ours
    ]
    answer.say_any("needs", needs=needs)


def _forward_gib(cell: Cell) -> float | str:
    """Return the most that the forward pass and the loss hold during a step; the status of what was not measured."""
    phases = cell.derived["phases"] if cell.status == "ok" else ()
    passes = [phase["allocated"] / GIB for phase in phases if phase["phase"] in ("forward", "loss")]
    return max(passes, default=cell.status)


def _peak_rows(cells: list[Cell], across: str) -> list[dict]:
    """Peaks in a column for each value of a setting; what did not fit stands as its predicted need."""
    rows: dict[tuple, dict] = {}
    for cell in sorted(cells, key=_context):
        names = cell.configuration
        key = (names["size"], names["context"], "" if across == "mode" else names["mode"])
        row = rows.setdefault(key, {"size": key[0], "context": key[1], "mode": key[2]})
        row[f"{names[across]}_gib"] = cell.derived.get("peak_gib") if cell.status == "ok" else cell.status
    return list(rows.values())


def mixed_precision(answer: Answer) -> None:
    selections = _recorded_runs(answer, precision=("fp32", "bf16"), mode=("forward", "train"))
    rows = [row for row in _peak_rows(cells_of(selections), "precision") if {"fp32_gib", "bf16_gib"} <= row.keys()]
    measured = [row for row in rows if not isinstance(row["fp32_gib"], str) and not isinstance(row["bf16_gib"], str)]
    if not measured:
        return
    for mode, called in _CALLED.items():
        of_mode = [row for row in measured if row["mode"] == mode]
        longest = max((row["context"] for row in of_mode), default=0)
        if of_mode:
            ratios = [row["bf16_gib"] / row["fp32_gib"] for row in of_mode]
            facts = {"rows": of_mode, "verdict": _precision_verdict(ratios), "ratios": ratios, "longest": longest}
            answer.say("precisions", facts, Called=called[0].upper() + called[1:])
        for context in answer.handout.memory_contexts:
            if context > longest:
                size = choose_size(SIZE, context=context)
                needs = {name: predicted_peak(size, name, mode, "reference").total_gib for name in ("fp32", "bf16")}
                ratio = needs["bf16"] / needs["fp32"]
                facts = {**needs, "called": called, "context": context, "ratio": ratio, "is_less": ratio < 1 - ALIKE}
                answer.say("predicted precisions", facts)
    more = any(row["bf16_gib"] > row["fp32_gib"] for row in measured)
    answer.say("copies" if more else "no copies")
    headers = {"size": "size", "context": "context", "mode": "mode", "fp32_gib": "fp32", "bf16_gib": "bf16"}
    answer.add_table("peaks", "peak memory by precision", headers, rows)
    answer.measured_by(selections)


def _precision_verdict(ratios: Sequence[float]) -> str:
    # Allocations are the same in every run: what differs by more than the caching allocator's blocks is a difference.
    largest = max(abs(ratio - 1) for ratio in ratios)
    if largest <= 0.02:
        return f"no significant difference (at most {percent(100 * largest)})"
    if min(ratios) > 1:
        return "mixed precision takes more, not less"
    if max(ratios) < 1:
        return "mixed precision takes less"
    return "mixed precision takes more at some contexts and less at others"


def timelines(answer: Answer) -> None:
    selections = _recorded_runs(answer, precision=("fp32",))
    first_context = answer.handout.memory_contexts[0]
    # The training step first: it shows the stages that are asked for.
    for mode, called in reversed(_CALLED.items()):
        of_mode = [Selection(group.invocation, [cell]) for group in selections for cell in group.of(mode=mode)]
        if not of_mode:
            answer.lack("timeline", mode=mode)
            continue
        of_mode.sort(key=lambda selection: selection.setting("context"))
        wanted = [selection for selection in of_mode if selection.setting("context") == first_context]
        chosen = (wanted or of_mode[-1:])[0]
        _say_timeline(answer, chosen.cells[0], called)
        for draw in chosen.pictures().values():
            answer.pictures[f"{called} at context {chosen.setting('context')} in fp32"] = draw
        keys = ("context", "mode", "phase", "allocated_gib", "parameters_gib", "gradients_gib", "optimizer_state_gib")
        answer.show([chosen], "phases", *keys, "activations_gib", "temporary_gib", "other_gib")
    if answer.sentences:
        failed = [cell for cell in cells_of(selections) if _context(cell) == first_context]
        answer.say_failures(failed, _step_name)
        answer.say("snapshot file")


def _say_timeline(answer: Answer, cell: Cell, called: str) -> None:
    phases = {phase["phase"]: phase for phase in cell.derived["phases"]}
    top = max(phases.values(), key=lambda phase: phase["allocated"])
    kinds = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")
    largest = sorted(kinds, key=lambda kind: -top[kind])[:2]
    facts = {"called": called, "context": _context(cell), "phase": top["phase"]}
    facts["phases"] = [{"phase": name, "gib": phase["allocated"] / GIB} for name, phase in phases.items()]
    facts["largest"] = [{"kind": kind, "gib": top[kind] / GIB} for kind in largest if top[kind]]
    answer.say("timeline of", facts)
    forward = phases.get("forward")
    if forward is None:
        return
    sizes = {kind: forward[kind] / GIB for kind in ("activations", "parameters", "temporary", "other")}
    if _mode(cell) != "forward":
        is_visible = forward["activations"] > ALIKE * forward["allocated"]
        answer.say("stages" if is_visible else "hardly any stages", sizes)
    else:
        kept = answer.fill("kept for backward" if sizes["activations"] else "nothing kept", sizes)
        share = 100 * forward["temporary"] / forward["parameters"]
        answer.say("above parameters", sizes, kept=kept, share=share)


def residual_stream(answer: Answer) -> None:
    answer.sentences.append(derived_sentence(tensor_answers(SIZES[SIZE], "fp32")[0]))


def largest_allocations(answer: Answer) -> None:
    runs = _recorded_runs(answer, precision=("fp32",), mode=("forward",))
    selections = [Selection(group.invocation, group.measured) for group in runs if group.measured]
    for cell in sorted(cells_of(selections), key=_context):
        largest = cell.derived["largest"]
        size = largest[0]["size"]
        kinds = [{"module": None, "code": None, **kind} for kind in largest if kind["size"] == size]
        answer.say("largest", context=_context(cell), size=size, kinds=kinds)
    keys = ("context", "size_bytes", "count", "phase", "category", "module", "operation", "code")
    answer.show(selections, "allocations", *keys)


def block(answer: Answer) -> None:
    runs = _recorded_runs(answer, precision=("fp32",), mode=("train",))
    recorded = [group.only(lambda cell: cell.status == "ok" and cell.derived.get("saved_tensors")) for group in runs]
    selections = [group for group in recorded if group.cells]
    for cell in sorted(cells_of(selections), key=_context):
        size = MemoryWorkload.from_configuration(cell.configuration).training.size
        tensors = cell.derived["saved_tensors"]
        total = sum(tensor["size"] for tensor in tensors)
        ratio = total / block_activations(size, "fp32", "reference").total
        derived = answer.fill("by the formula" if abs(ratio - 1) < 0.01 else "not by the formula", ratio=ratio)
        five = [{"saved": _saved_by(tensor), "share": 100 * tensor["size"] / total} for tensor in tensors[:5]]
        facts = {"context": _context(cell), "total": total, "derived": derived, "five": five}
        answer.say("saved tensors", facts, of_five=100 * sum(tensor["size"] for tensor in tensors[:5]) / total)
        changes = cell.derived.get("block")
        if changes and changes.get("backward_change") is not None:
            produced = changes["backward_change"] + changes["forward_growth"]
            expected = 4 * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff + 2 * size.d_model)
            as_expected = abs(produced / expected - 1) <= ALIKE
            answer.say("gradients", changes, produced=produced, expected=expected, as_expected=as_expected)
    keys = ("context", "saved_bytes", "saved_predicted_bytes", "forward_growth_bytes", "backward_change_bytes")
    gradients = ("gradients_by_difference_bytes", "gradients_bytes", "gradients_expected_bytes")
    for group in selections:
        answer.show([group], "block", *keys, *gradients)
        last = Selection(group.invocation, sorted(group.cells, key=_context)[-1:])
        columns = ("context", "tensor", "shape", "size_bytes", "share_percent", "operation", "code")
        answer.show([last], "saved_tensors", *columns)


def _saved_by(tensor: dict[str, Any]) -> str:
    """``Exp of softmax``: the operation, and the function that called it, of a ``forward`` its line."""
    place, _, function = (tensor.get("code") or "").rpartition(" ")
    caller = place.rpartition("/")[2] if function == "forward" else function
    return (tensor.get("operation") or "an input") + (f" of {caller}" if caller else "")


def memory_commands(target: Target) -> list[Command]:
    options: dict[str, Any] = {"mode": ("forward", "forward-backward", "train"), "precision": ("fp32", "bf16")}
    contexts = sorted(target.handout.memory_contexts)
    flags = ("--no-predict", "--steps", "1")
    return [training_sweep(target, "memprof", (SIZE,), contexts, flags, steps=4, **options)]
