"""The problems on data parallel training that are measured: naive, flat, overlapped and in buckets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cs336sys.accounting.communication import bucket_answers
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import GIB, training_state
from cs336sys.report.course.answer import ALIKE, Answer, faster
from cs336sys.report.course.evidence import Selection
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.report.ddp import bucket_sweeps, link_of
from cs336sys.results.model import Samples
from cs336sys.results.statistics import Interval, ratio
from cs336sys.sizes import SIZES

STEP_COLUMNS = (
    *("size", "precision", "compile", "strategy", "bucket_mb", "step_ms", "unsynchronized_ms", "exposed_ms"),
    *("speedup", "calls", "relative_difference_percent", "status"),
)

# A smaller share of a profiled step is a matter of its clock.
_LEAST_PERCENT = 0.1

Row = Mapping[str, Any]


def _ddp_steps(answer: Answer, *, graphs: bool) -> list[Selection]:
    """The plain steps of the handout's xl on two ranks.

    Args:
        graphs: those from CUDA graphs, too, where launched ones are fewer: they have no phases and timelines.
    """
    captured = ("off", "on") if graphs else ("off",)
    plain = {"compile": ("off",), "precision": ("fp32",), "attention": ("reference",), "cuda_graph": captured}
    wanted = {"gradient_dtype": ("fp32",), "batch_size": (4,), "context": (512,)}
    selections = answer.find("ddp", {"size": (answer.handout.xl,), "world_size": (2,), **plain, **wanted})

    def lacking_steps(group: Selection) -> int:
        fewest = min((len(cell.samples["step"].measured) for cell in group.measured), default=0)
        # The handouts ask for 10.
        return max(10 - fewest, 0)

    return sorted(selections, key=lambda group: (lacking_steps(group), group.setting("cuda_graph") == "on"))


def rows_of(group: Selection, command: str) -> list[dict[str, Any]]:
    """The rows of the table of steps, of cells that were measured."""
    return [row for row in group.rows(command) if row["status"] == "ok"]


def say_setup(answer: Answer, *groups: Selection) -> None:
    """Say what was trained and how, each setup once."""
    for group in groups:
        precisions = list(dict.fromkeys(cell.configuration["precision"] for cell in group.cells))
        setup = answer.fill("setup", (group.measured or group.cells)[0].configuration, precisions=precisions)
        answer.sentences += [setup] * (setup not in answer.sentences)


def lack_xl(answer: Answer, group: Selection) -> None:
    """Say what is missing where another size stands in for the handout's xl."""
    size = group.setting("size")
    if size != answer.handout.xl:
        answer.lack("other size", xl=answer.handout.xl, size=size)


def _with(answer: Answer, *strategies: str, graphs: bool = True) -> tuple[Selection | None, dict[str, Row]]:
    """The first invocation that measured all of these strategies, which the answer names, and its rows."""
    for group in _ddp_steps(answer, graphs=graphs):
        if set(strategies) <= group.by("strategy").keys():
            chosen = group.only(lambda cell: cell.configuration["strategy"] in strategies)
            answer.measured_by([chosen])
            lack_xl(answer, chosen)
            rows: dict[str, Row] = {}
            for row in rows_of(chosen, "ddp"):
                rows.setdefault(row["strategy"], row)
            return chosen, rows
    return None, {}


def naive(answer: Answer) -> None:
    group, rows = _with(answer, "naive")
    if group is not None:
        say_setup(answer, group)
        answer.say("step", step=_step_facts(rows["naive"]))
        answer.show([group], "ddp", *STEP_COLUMNS, medians=True)


def _step_facts(row: Row) -> Row:
    """A step's facts: how long it and its communication take."""
    step, waiting, exposed = row["step_ms"], row.get("synchronize_ms"), row.get("exposed_ms")
    of_step = isinstance(waiting, Samples) and {"share": 100 * waiting.median / step.median}
    return {"timeline": None, **row, "of_step": of_step, "cost": isinstance(exposed, Interval)}


def flat(answer: Answer) -> None:
    group, rows = _with(answer, "naive", "flat")
    if group is not None:
        answer.say("flat step", step=_step_facts(rows["flat"]))
        _compare(answer, "one call of all gradients", rows["flat"], f"{rows['naive']['calls']} calls", rows["naive"])
        flat_timeline, naive_timeline = (rows[name].get("timeline") for name in ("flat", "naive"))
        if flat_timeline and naive_timeline:
            answer.say("calls alone", one=flat_timeline["communication_ms"], many=naive_timeline["communication_ms"])
        answer.show([group], "ddp", *STEP_COLUMNS, medians=True)


def _compare(answer: Answer, name: str, row: Row, other: str, theirs: Row) -> None:
    """Compare the speed of a row's steps with another's."""
    steps = {"before": theirs["step_ms"], "after": row["step_ms"]}
    answer.say("compared", steps, name=name, other=other, faster=faster(*steps.values()))


def overlapped(answer: Answer) -> None:
    group, rows = _with(answer, "naive", "flat", "overlap")
    if group is None:
        group, rows = _with(answer, "naive", "overlap")
    if group is None:
        return
    answer.show([group], "ddp", *STEP_COLUMNS, medians=True)
    answer.say("steps", steps=[answer.fill(f"step of {row['strategy']}", row) for row in rows.values()])
    mine = rows["overlap"]
    for name in ("naive", "flat"):
        if name in rows:
            _compare(answer, "overlapping", mine, name, rows[name])
    after, beside = (row.get("exposed_ms") for row in (rows["naive"], mine))
    if isinstance(after, Interval) and isinstance(beside, Interval):
        saved = after.estimate - beside.estimate
        name = "hides" if saved > 0 and not after.is_noise else "costs"
        answer.say(name, after=after, beside=beside, saved=saved, share=100 * saved / (after.estimate or 1.0))
    # Why communication alongside computing does not save all of its time.
    alone, overlapping = rows["naive"].get("timeline"), mine.get("timeline")
    if alone and overlapping:
        longer = overlapping["communication_ms"] / alone["communication_ms"] > 1 + ALIKE
        share = 100 * overlapping["overlap_ms"] / overlapping["communication_ms"]
        answer.say("beside computing", overlapping, share=share, alone=alone["communication_ms"], longer=longer)


def traces(answer: Answer) -> None:
    group, rows = _with(answer, "naive", "overlap", graphs=False)
    if group is None or any(cell.derived.get("timeline") is None for cell in group.measured):
        return
    shares = {}
    for name in ("naive", "overlap"):
        timeline = rows[name]["timeline"]
        shares[name] = 100 * timeline["overlap_ms"] / timeline["communication_ms"]
        share = {"share": max(shares[name], _LEAST_PERCENT), "is_less": shares[name] < _LEAST_PERCENT}
        answer.say("trace", timeline, name=name, **share)
    answer.say("overlaps" if shares["overlap"] > max(2 * shares["naive"], 10) else "no clear difference")
    answer.draw([group], "timelines")


def xl_command(target: Target, command: str, *flags: str, cells: int, **options: Any) -> Command:
    """A sweep of so many cells of the handout's xl on two ranks, and what a rank must hold for it."""
    sizes = target.sizes((target.handout.xl,))
    # As many as the handouts ask for are the commands' own.
    warm = ("--warmup", "1", "--steps", "4") if target.is_small else ()
    flags = (*flags[:2], "--world-size", "2", *warm, *flags[2:])
    planned = training_sweep(target, command, sizes, flags=flags, steps=20 * cells, ranks=2, **options)
    need = max(planned.memory_gib or 0.0, training_state(SIZES[sizes[0]], "fp32").total / GIB)
    return replace(planned, seconds=planned.seconds + 15 * cells, memory_gib=need)


def ddp_commands(target: Target) -> list[Command]:
    """One sweep answers all of these problems: only cells of one run are compared."""
    if target.handout.year == 2026:
        return [xl_command(target, "ddp", "--mode", "naive,flat,overlap", cells=3)]
    sizes = "0.05,0.1,1" if target.is_small else "1,10,100,1000"
    flags = ("--mode", "naive,flat,overlap,bucketed", "--bucket-mb", sizes)
    return [xl_command(target, "ddp", *flags, cells=4)]


def _swept(answer: Answer) -> Selection | None:
    return next((group for group in _ddp_steps(answer, graphs=False) if bucket_sweeps(group.measured)), None)


def buckets(answer: Answer) -> None:
    group = _swept(answer)
    if group is None:
        return
    rows = [row for row in rows_of(group, "ddp") if row["strategy"] == "bucketed"]
    answer.say("buckets", rows=rows)
    best = min(rows, key=lambda row: row["step_ms"].median)
    _say_expected(answer, group, rows, best)
    answer.say("fastest", best)
    for row in rows_of(group, "ddp"):
        if row["strategy"] in ("naive", "flat", "overlap"):
            _compare(answer, "that", best, row["strategy"], row)
            slower = [other for other in rows if ratio(other["step_ms"], row["step_ms"]).low > 1]
            if slower:
                answer.say("slower than", row, sizes=slower)
    say_setup(answer, group)
    link = link_of(bucket_sweeps(group.measured)[0][0])
    if link.has_bandwidth:
        answer.say("link", latency=1e6 * link.latency_s, rate=link.bytes_per_s / 1e9)
    answer.say_failures(group.cells, "strategy")
    answer.show([group], "ddp", *STEP_COLUMNS, medians=True)
    answer.show([group], "buckets", medians=True)
    answer.draw([group], "buckets")
    lack_xl(answer, group)


def _say_expected(answer: Answer, group: Selection, rows: Sequence[Row], best: Row) -> None:
    """Compare what was measured with the equation, and say what the equation leaves out."""
    slowest = max(rows, key=lambda row: row["step_ms"].median)
    step_ratio = ratio(slowest["step_ms"], best["step_ms"])
    name = "alike" if step_ratio.is_noise else "apart"
    answer.say("expected", found=answer.fill(name, ratio=step_ratio, best=best, slowest=slowest))
    table = [row for row in group.rows("buckets") if row["predicted_ms"] is not None]
    if len(table) > 1:
        predicted = sorted(table, key=lambda row: row["predicted_ms"])
        measured = sorted(table, key=lambda row: row["exposed_ms"].estimate)
        order = [[row["bucket_mb"] for row in ordered] for ordered in (predicted, measured)]
        answer.say("aligned" if order[0] == order[1] else "not aligned", parts=_order_parts(group, rows, order))
        answer.say("predicted", rows=[row | {"exposed": row["exposed_ms"].estimate} for row in table])
    same = [row for row in rows if row["calls"] == rows[0]["calls"]]
    if len(same) > 1:
        answer.say("same buckets", sizes=same, calls=rows[0]["calls"])


def _order_parts(group: Selection, rows: Sequence[Row], order: Sequence[Sequence[float]]) -> Row | None:
    """Split what each size adds to a step: in the backward pass, and after it; None without a pass to compare with.

    Args:
        order: sizes as predicted and as measured, best first.
    """
    naive = group.first(strategy="naive")
    if naive is None:
        return None
    alone = naive.samples["backward"].median
    parts = {}
    for row in rows:
        (cell,) = group.of(strategy="bucketed", bucket_mb=row["bucket_mb"])
        backward, tail = (cell.samples[phase].median for phase in ("backward", "synchronize"))
        parts[row["bucket_mb"]] = {"bucket_mb": row["bucket_mb"], "slower": backward - alone, "tail": tail}
    predicted, best = (parts[sizes[0]] for sizes in order)
    differences = {key: predicted[key] - best[key] for key in ("slower", "tail")}
    other = predicted is not best and {"predicted": predicted["bucket_mb"], "best": best["bucket_mb"], **differences}
    return {"alone": alone, "rows": list(parts.values()), "other": other}


def bucket_equation(answer: Answer) -> None:
    group = _swept(answer)
    setting = (4 * count_parameters(SIZES["xl"]), 100, 200e9, 20e-6)
    if group is not None:
        cell = bucket_sweeps(group.measured)[0][0]
        link, derived = link_of(cell), cell.derived
        if link.has_bandwidth:
            setting = (derived["communicated_bytes"], derived["gradient_calls"], link.bytes_per_s, link.latency_s)
            answer.measured_by([group])
    answer.say("equation", is_measured=bool(answer.runs))
    if setting[3] == 0:
        answer.say("free calls")
    else:
        answers = bucket_answers(*setting)
        answer.derive(answers, "formulas", "bucket sizes by the equation", say=answers)
