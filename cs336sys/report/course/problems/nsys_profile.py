"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from cs336sys.report.course.answer import ALIKE, Answer, of_medians, trend
from cs336sys.report.course.evidence import PLAIN, PLAIN_OF_ANY_MODE, Selection, cells_of, measured_of
from cs336sys.report.course.problem import Command, Target, TrainingSweep
from cs336sys.report.profile.tables import LAUNCH_BOUND_IDLE_PERCENT

# Kernels of less than this share of a pass are not worth a word.
TRIVIAL_PERCENT = 2.0

# Of the kernels other than products, those that a sentence names; the table has more.
_NAMED_KERNELS = 3


def _profiles(answer: Answer, mode: str = "train") -> list[Selection]:
    """Plain steps in fp32 of the handout's sizes and contexts, by ``nsys``; none where no profile worked."""
    handout = answer.handout
    contexts = handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096, 8192)
    wanted = {"size": handout.profile_sizes, "context": contexts, "precision": ("fp32",)}
    selections = answer.find("nsys", wanted, **PLAIN_OF_ANY_MODE, mode=(mode,))
    return selections if measured_of(selections) else []


def _rows(selections: Sequence[Selection], table: str, phase: str | None = None) -> list[dict]:
    """The rows of one of the command's tables, of one phase or of all."""
    rows = [row for group in selections for shown_table in group.table(table) for row in shown_table.rows]
    return [dict(row) for row in rows if phase is None or row.get("phase") == phase]


def _shape(row: dict) -> tuple[str, int]:
    return row["size"], row["context"]


def _of_longest_contexts(rows: Sequence[dict]) -> list[dict]:
    """For each size the row of its longest context."""
    longest: dict[str, dict] = {}
    for row in rows:
        if row["size"] not in longest or row["context"] > longest[row["size"]]["context"]:
            longest[row["size"]] = row
    return list(longest.values())


def _shares(row: dict) -> dict[str, float]:
    """Shares of the kinds of kernels other than matrix products, the largest first."""
    shares = {
        key.removesuffix("_percent").replace("attention_softmax", "softmax"): value
        for key, value in row.items()
        if key.endswith("_percent") and key != "matmul_percent" and value
    }
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def _show_rows(answer: Answer, selections: Sequence[Selection], name: str, wanted, columns: Sequence[str] = ()) -> None:
    """The command's table with the wanted rows alone."""
    for group in selections:
        for table in group.table(name, *columns):
            rows = [row for row in table.rows if wanted(row)]
            notes = [note for note in table.notes if "without profiler" in note]
            answer.tables += [of_medians(replace(table, rows=rows, notes=notes, steadier=""))] if rows else []
    answer.measured_by(selections)


# (a): how long a forward pass takes, with and without a profiler.


def forward_time(answer: Answer) -> None:
    selections = _profiles(answer)
    if not selections:
        return
    rows = _rows(selections, "phases", "forward")
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
    _show_rows(answer, selections, "phases", lambda row: row.get("phase") in ("forward", None), keys)
    answer.draw(selections)
    measured_shapes = set(map(_shape, (cell.configuration for cell in cells_of(selections))))
    for size in answer.handout.profile_sizes:
        contexts = [context for context in answer.handout.profile_contexts if (size, context) not in measured_shapes]
        if contexts:
            answer.lack("contexts", size=size, contexts=contexts)


def _say_disagreement(answer: Answer, rows: Sequence[dict]) -> None:
    """Return why passes take another time under the profiler than without it."""
    longer = [row for row in rows if row["ratio"] > 1 + 2 * ALIKE]
    shorter = [row for row in rows if row["ratio"] < 1 - 2 * ALIKE]
    for name, chosen in (("longer", longer), ("shorter", shorter)):
        if not chosen:
            continue
        busy = [100 * row["busy_ms"] / row["span_ms"] for row in chosen]
        idle = [row["idle_percent"] for row in chosen]
        answer.say(
            name,
            which=answer.fill("that" if len(chosen) == 1 else "some", chosen[0], count=len(chosen)),
            ratios=[row["ratio"] for row in chosen],
            busy=busy,
            # Of a CPU nothing is said of launches.
            waits=max(busy) < 90 and all(row["launch_bound"] is not None for row in chosen),
            idle=idle,
            was_idle=name == "shorter" and min(idle) > LAUNCH_BOUND_IDLE_PERCENT,
        )


def _say_profiler(answer: Answer, selections: Sequence[Selection]) -> None:
    """Say which profiles Nsight Systems did not make, and how to open those that it makes."""
    profilers: dict[str, set[str]] = {}
    for cell in measured_of(selections):
        profilers.setdefault(cell.configuration["size"], set()).add(cell.configuration["profiler"])
    by_torch = [size for size, of_size in profilers.items() if "nsys" not in of_size]
    if by_torch:
        answer.say("by torch", sizes=by_torch)
    answer.say("report file")


def _say_bench(answer: Answer, rows: Sequence[dict]) -> None:
    """Report what ``bench`` measured of the same."""
    selections = answer.find("bench", {"warmup": (5,)}, precision=("fp32",), batch_size=(4,), **PLAIN)
    benched = {_shape(cell.configuration): cell.samples["forward"].median for cell in measured_of(selections)}
    pairs = [row | {"benched": benched[_shape(row)]} for row in rows if _shape(row) in benched]
    if pairs:
        answer.say("bench", times=pairs, ratios=[row["unprofiled_ms"].median / row["benched"] for row in pairs])


def _say_longest_fitting(answer: Answer, selections: Sequence[Selection]) -> None:
    cells = cells_of(selections)
    for size in dict.fromkeys(cell.configuration["size"] for cell in cells):
        of_size = [cell for cell in cells if cell.configuration["size"] == size]
        fits = [cell.configuration["context"] for cell in of_size if cell.status == "ok"]
        oom = [cell.configuration["context"] for cell in of_size if cell.status == "oom"]
        if fits:
            name = "longest that fits" if oom else "longest that was tried"
            answer.say(name, size=size, longest=max(fits), shortest=min(oom, default=None))


# (b) and (c): the kernels that take most of the time.


def top_kernel(answer: Answer) -> None:
    selections = _profiles(answer)
    rows = _rows(selections, "top kernel")
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
    forward = _of_longest_contexts(_rows(selections, "shares", "forward"))
    every = _rows(selections, "other kernels", "forward")
    for row in forward:
        shares = [{"kind": kind, "share": share} for kind, share in _shares(row).items() if share >= TRIVIAL_PERCENT]
        kinds = [answer.fill("products", share=row.get("matmul_percent") or 0.0)]
        kinds += [answer.fill("kind of kernel", share) for share in shares]
        kernels = [kernel for kernel in every if _shape(kernel) == _shape(row)][:_NAMED_KERNELS]
        answer.say("kernels", row, kinds=kinds, longest={"kernels": kernels} if kernels else None)
    shapes = set(map(_shape, forward))
    _show_rows(answer, selections, "other kernels", lambda row: row["phase"] == "forward" and _shape(row) in shapes)
    for number, table in enumerate(answer.tables):
        answer.tables[number] = replace(table, columns=[column for column in table.columns if column.key != "phase"])


# (d) and (e): products in inference and in a whole step, and next to the softmax.


def whole_step(answer: Answer) -> None:
    selections, forward_selections = _profiles(answer), _profiles(answer, "forward")
    forward, steps = ({_shape(row): row for row in _rows(selections, "shares", phase)} for phase in ("forward", "step"))
    # Inference as a run of its own stands before the forward pass of a training step.
    inferred = {_shape(row): row for row in _rows(forward_selections, "shares", "forward") if _shape(row) in steps}
    forward |= inferred
    pairs = {shape: (forward[shape], row) for shape, row in steps.items() if shape in forward}
    if not pairs:
        return
    _say_change(answer, list(pairs.values()))
    for row in _of_longest_contexts([step for _, step in pairs.values()]):
        inference = pairs[_shape(row)][0]
        before, after = (phase_row.get("matmul_percent", 0.0) for phase_row in (inference, row))
        verb = "rises" if after > before + 1 else "falls" if after < before - 1 else "hardly moves,"
        shares = _shares(inference)
        others = [
            {"kind": kind, "before": shares.get(kind, 0.0), "after": share}
            for kind, share in _shares(row).items()
            if kind != "optimizer" and share >= TRIVIAL_PERCENT
        ]
        optimizer = row.get("optimizer_percent")
        answer.say(
            "share of products", row, verb=verb, before=before, after=after, is_alone=_shape(row) in inferred,
            optimizer={"share": optimizer} if optimizer else None, others={"kinds": others} if others else None,
        )  # fmt: skip
    _show_rows(answer, forward_selections, "shares", lambda row: row["phase"] == "forward" and _shape(row) in inferred)
    _show_rows(
        answer,
        selections,
        "shares",
        lambda row: row["phase"] == "step" or (row["phase"] == "forward" and _shape(row) not in inferred),
    )


def _say_change(answer: Answer, pairs: Sequence[tuple[dict, dict]]) -> None:
    """Count the profiles in which products weigh less in the step than in inference, and name AdamW's share."""
    larger = [step for before, step in pairs if step.get("matmul_percent", 0) >= before.get("matmul_percent", 0)]
    answer.say(
        "smaller in the step",
        count=len(pairs) - len(larger),
        of=len(pairs),
        larger={"profiles": larger} if larger else None,
    )
    shares = sorted((step for _, step in pairs if step.get("optimizer_percent")), key=itemgetter("optimizer_percent"))
    if shares:
        least, most = shares[0], shares[-1]
        percents = {"least": least["optimizer_percent"], "most": most["optimizer_percent"]}
        answer.say("added by AdamW", percents, least_of=[least], most_of=[most])


def softmax(answer: Answer) -> None:
    selections = _profiles(answer)
    rows = [row for row in _rows(selections, "attention") if row.get("time_ratio")]
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
    if changes:
        answer.say("with the context", changes=[{"how": how, "sizes": sizes} for how, sizes in changes.items()])
    columns = ("size", "context", "scores_ms", "final_ms", "softmax_ms", "other_ms", "time_ratio", "flops_ratio")
    answer.show(selections, "attention", *columns, "bytes_ratio", "matmul_tflops", "softmax_gbps")


def profile_commands(target: Target) -> list[Command]:
    handout = target.handout
    contexts = target.contexts(handout.profile_contexts)[-2 if target.is_small else 0 :]
    # The profile itself and the steps without a profiler; nsys writes and exports its report.
    options = {"mode": ("train", "forward")}
    return [TrainingSweep("nsys", target.sizes(handout.profile_sizes), contexts, options, steps=25).on(target)]
