"""(a): what holds memory over one step."""

from cs336sys.report.course.evidence import Evidence, Found
from cs336sys.report.course.problem import Answer, runs_of
from cs336sys.report.course.problems.memory_profiling.cells import cells_of, context_of, recorded, step_words
from cs336sys.report.course.target import GIB, Handout
from cs336sys.report.course.words import ALIKE, failures, gib, joined, percent
from cs336sys.results import Cell


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
