"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cs336sys.report.course.answer import ALIKE, Answer, extremes, of_medians, trend
from cs336sys.report.course.evidence import PLAIN, PLAIN_OF_ANY_MODE, Selection, cells_of, measured_of
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.report.profile.tables import LAUNCH_BOUND_IDLE_PERCENT

# Kernels of less than this share of a pass are not worth a word.
TRIVIAL_PERCENT = 2.0


def _profiles(answer: Answer, mode: str = "train") -> list[Selection]:
    """Plain steps in fp32 of the handout's sizes and contexts, by ``nsys``; none where no profile worked."""
    handout = answer.handout
    contexts = handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096, 8192)
    wanted = {"size": handout.profile_sizes, "context": contexts, "precision": ("fp32",)}
    selections = answer.find("nsys", wanted, **PLAIN_OF_ANY_MODE, mode=(mode,))
    return selections if measured_of(selections) else []


def _table_rows(selections: Sequence[Selection], table: str, phase: str | None = None) -> list[dict[str, Any]]:
    """The rows of one of the command's tables, of one phase or of all."""
    return [row for group in selections for row in group.rows(table) if phase is None or row.get("phase") == phase]


def _profiled_shape(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["size"], row["context"]


def _by_shape(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {_profiled_shape(row): row for row in rows}


def _of_longest_contexts(rows: Sequence[dict]) -> list[dict]:
    """For each size the row of its longest context."""
    sizes = dict.fromkeys(row["size"] for row in rows)
    return [max((row for row in rows if row["size"] == size), key=lambda row: row["context"]) for size in sizes]


def _shares(row: dict) -> dict[str, float]:
    """Shares of the kinds of kernels other than matrix products, the largest first."""
    shares = {
        key.removesuffix("_percent").replace("attention_softmax", "softmax"): value
        for key, value in row.items()
        if key.endswith("_percent") and key != "matmul_percent" and value
    }
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def _show_rows(
    answer: Answer, selections: Sequence[Selection], name: str, is_wanted: Callable[[Any], bool], *columns: str
) -> None:
    """The command's table with the wanted rows alone."""
    for table, _ in [tables for group in selections for tables in group.tables(name, *columns)]:
        rows = list(filter(is_wanted, table.rows))
        notes = [note for note in table.notes if "without profiler" in note]
        answer.tables += [of_medians(replace(table, rows=rows, notes=notes, steadier=""))] if rows else []
    answer.measured_by(selections)


def forward_time(answer: Answer) -> None:
    selections = _profiles(answer)
    if not selections:
        return
    rows = _table_rows(selections, "phases", "forward")
    answer.say("spans", spans=_of_longest_contexts(rows))
    # Longer under the profiler than without it, by so much.
    rows = [row | {"ratio": row["span_ms"] / row["unprofiled_ms"].median} for row in rows if row["unprofiled_ms"]]
    if rows:
        agreeing = sum(abs(row["ratio"] - 1) <= 2 * ALIKE for row in rows)
        inverse = [1 / row["ratio"] for row in rows]
        answer.say("agreement", ratios=inverse, within=200 * ALIKE, agreeing=agreeing, of=len(rows))
    _say_disagreement(answer, rows)
    _say_bench(answer, rows)
    answer.say_failures(cells_of(selections), "profile")
    answer.say("idle")
    _say_profiler(answer, selections)
    if answer.handout.year == 2026:
        _say_longest_fitting(answer, selections)
    keys = ("size", "context", "phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")
    _show_rows(answer, selections, "phases", lambda row: row.get("phase") in ("forward", None), *keys)
    answer.draw(selections)
    shapes = [_profiled_shape(cell.configuration) for cell in cells_of(selections)]
    for size in answer.handout.profile_sizes:
        contexts = [context for context in answer.handout.profile_contexts if (size, context) not in shapes]
        if contexts:
            answer.lack("contexts", size=size, contexts=contexts)


def _say_disagreement(answer: Answer, rows: Sequence[dict]) -> None:
    """Say why passes take another time under the profiler than without it."""
    longer = [row for row in rows if row["ratio"] > 1 + 2 * ALIKE]
    if longer:
        busy = [100 * row["busy_ms"] / row["span_ms"] for row in longer]
        # Of a CPU nothing is said of launches.
        waits = max(busy) < 90 and all(row["launch_bound"] is not None for row in longer)
        answer.say("longer", _ratios(answer, longer), busy=busy, waits=waits)
    shorter = [row for row in rows if row["ratio"] < 1 - 2 * ALIKE]
    if shorter:
        idle = [row["idle_percent"] for row in shorter]
        answer.say("shorter", _ratios(answer, shorter), idle=idle, was_idle=min(idle) > LAUNCH_BOUND_IDLE_PERCENT)


def _ratios(answer: Answer, rows: Sequence[dict]) -> dict[str, Any]:
    which = answer.fill("that" if len(rows) == 1 else "some", rows[0], count=len(rows))
    return {"which": which, "ratios": [row["ratio"] for row in rows]}


def _say_profiler(answer: Answer, selections: Sequence[Selection]) -> None:
    """Say which profiles Nsight Systems did not make, and how to open those that it makes."""
    settings = [cell.configuration for cell in measured_of(selections)]
    by_nsys = {names["size"] for names in settings if names["profiler"] == "nsys"}
    others = dict.fromkeys(names["size"] for names in settings if names["size"] not in by_nsys)
    answer.say_any("by torch", sizes=list(others))
    answer.say("report file")


def _say_bench(answer: Answer, rows: Sequence[dict]) -> None:
    """Report what ``bench`` measured of the same."""
    selections = answer.find("bench", {"warmup": (5,)}, precision=("fp32",), batch_size=(4,), **PLAIN)
    benched = {_profiled_shape(cell.configuration): cell.samples["forward"].median for cell in measured_of(selections)}
    pairs = [row | {"benched": benched[shape]} for row in rows if (shape := _profiled_shape(row)) in benched]
    answer.say_any("bench", times=pairs, ratios=[row["unprofiled_ms"].median / row["benched"] for row in pairs])


def _say_longest_fitting(answer: Answer, selections: Sequence[Selection]) -> None:
    contexts: dict[str, dict[str, list[int]]] = {}
    for cell in cells_of(selections):
        size, context = _profiled_shape(cell.configuration)
        contexts.setdefault(size, {}).setdefault(cell.status, []).append(context)
    for size, by_status in contexts.items():
        if "ok" in by_status:
            name = "longest that fits" if "oom" in by_status else "longest that was tried"
            answer.say(name, size=size, longest=max(by_status["ok"]), shortest=min(by_status.get("oom", [0])))


def top_kernel(answer: Answer) -> None:
    selections = _profiles(answer)
    rows = _table_rows(selections, "top kernel")
    for row in _of_longest_contexts(rows):
        both = row.get("both_kernel")
        name = "same kernel" if both == row["first_kernel"] else "other kernel"
        answer.say("top kernel", row, of_both=answer.fill(name, row) if both else "")
    both = [row for row in rows if row.get("both_kernel")]
    if len(both) > 1:
        answer.say("same in", count=sum(row["both_kernel"] == row["first_kernel"] for row in both), of=len(both))
    answer.show(selections, "top kernel")


def other_kernels(answer: Answer) -> None:
    selections = _profiles(answer)
    forward = _of_longest_contexts(_table_rows(selections, "shares", "forward"))
    every = _table_rows(selections, "other kernels", "forward")
    for row in forward:
        # A sentence names three kernels other than products; the table has more.
        kernels = [kernel for kernel in every if _profiled_shape(kernel) == _profiled_shape(row)][:3]
        shares = {kind: share for kind, share in _shares(row).items() if share >= TRIVIAL_PERCENT}
        kinds = [answer.fill("products", share=row.get("matmul_percent") or 0.0)]
        kinds += [answer.fill("kind of kernel", kind=kind, share=share) for kind, share in shares.items()]
        answer.say("kernels", row, kinds=kinds, has_others=bool(kernels), kernels=kernels)
    shapes = set(map(_profiled_shape, forward))

    def is_wanted(row: Mapping[str, Any]) -> bool:
        return row["phase"] == "forward" and _profiled_shape(row) in shapes

    _show_rows(answer, selections, "other kernels", is_wanted)
    tables = [(table, [column for column in table.columns if column.key != "phase"]) for table in answer.tables]
    answer.tables = [replace(table, columns=columns) for table, columns in tables]


def whole_step(answer: Answer) -> None:
    selections, forward_selections = _profiles(answer), _profiles(answer, "forward")
    forward, steps = (_by_shape(_table_rows(selections, "shares", phase)) for phase in ("forward", "step"))
    # Inference as a run of its own stands before the forward pass of a training step.
    alone = _by_shape(_table_rows(forward_selections, "shares", "forward"))
    inferred = {shape: row for shape, row in alone.items() if shape in steps}
    forward |= inferred
    pairs = {shape: (forward[shape], row) for shape, row in steps.items() if shape in forward}
    if not pairs:
        return
    _say_change(answer, list(pairs.values()))
    for row in _of_longest_contexts([step for _, step in pairs.values()]):
        inference = pairs[_profiled_shape(row)][0]
        before, after = (phase_row.get("matmul_percent", 0.0) for phase_row in (inference, row))
        verb = "rises" if after > before + 1 else "falls" if after < before - 1 else "hardly moves,"
        facts = {**row, "verb": verb, "before": before, "after": after, "is_alone": _profiled_shape(row) in inferred}
        shares = _shares(inference)
        others = [
            {"kind": kind, "before": shares.get(kind, 0.0), "after": share}
            for kind, share in _shares(row).items()
            if kind != "optimizer" and share >= TRIVIAL_PERCENT
        ]
        facts |= {"optimizer": row.get("optimizer_percent"), "has_others": bool(others), "others": others}
        answer.say("share of products", facts)

    def is_inferred(row: Mapping[str, Any]) -> bool:
        return row["phase"] == "forward" and _profiled_shape(row) in inferred

    _show_rows(answer, forward_selections, "shares", is_inferred)
    _show_rows(answer, selections, "shares", lambda row: row["phase"] in ("forward", "step") and not is_inferred(row))


def _say_change(answer: Answer, pairs: Sequence[tuple[dict, dict]]) -> None:
    """Count the profiles in which products weigh less in the step than in inference, and name AdamW's share."""
    larger = [step for before, step in pairs if step.get("matmul_percent", 0) >= before.get("matmul_percent", 0)]
    count = len(pairs) - len(larger)
    answer.say("smaller in the step", count=count, of=len(pairs), is_larger=bool(larger), larger=larger)
    shares = [step for _, step in pairs if step.get("optimizer_percent")]
    if shares:
        answer.say("added by AdamW", extremes(shares, "optimizer_percent"))


def softmax(answer: Answer) -> None:
    selections = _profiles(answer)
    rows = [row for row in _table_rows(selections, "attention") if row.get("time_ratio")]
    if not rows:
        return
    for row in _of_longest_contexts(rows):
        products, ratio = row["scores_ms"] + row["final_ms"], row["time_ratio"]
        answer.say("softmax", row, products=products, per_flop=ratio / row["flops_ratio"], is_longer=ratio > 1)
    changes: dict[str, list[dict]] = {}
    for size in dict.fromkeys(row["size"] for row in rows):
        series = sorted((row for row in rows if row["size"] == size), key=lambda row: row["context"])
        if len(series) > 1:
            how = trend([row["time_ratio"] for row in series])
            changes.setdefault(how, []).append({"size": size, "ratios": series})
    answer.say_any("with the context", changes=[{"how": how, "sizes": sizes} for how, sizes in changes.items()])
    columns = ("size", "context", "scores_ms", "final_ms", "softmax_ms", "other_ms", "time_ratio", "flops_ratio")
    answer.show(selections, "attention", *columns, "bytes_ratio", "matmul_tflops", "softmax_gbps")


def profile_commands(target: Target) -> list[Command]:
    contexts = target.handout.profile_contexts[-2 if target.is_small else 0 :]
    # The profile itself and the steps without a profiler; nsys writes and exports its report.
    sizes = target.handout.profile_sizes
    return [training_sweep(target, "nsys", sizes, contexts, steps=25, mode=("train", "forward"))]
