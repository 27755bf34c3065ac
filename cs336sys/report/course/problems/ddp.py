"""The problems on data parallel training that are measured: naive, flat, overlapped and in buckets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cs336sys.accounting.communication import bucket_answers
from cs336sys.accounting.flops import count_parameters
from cs336sys.accounting.memory import GIB, training_state
from cs336sys.report.course.answer import Answer, where
from cs336sys.report.course.evidence import Selection, cells_of
from cs336sys.report.course.problem import Command, Target, training_sweep
from cs336sys.report.ddp import bucket_sweeps, link_of
from cs336sys.results.statistics import ratio
from cs336sys.sizes import SIZES

_STEP_COLUMNS = ("strategy", "bucket_mb", "step_ms", "unsynchronized_ms", "exposed_ms", "calls")

_OPTIONAL: dict[str, Any] = {"timeline": None, "exposed_ms": None, "synchronize_ms": None}

# What tells one setup from another.
_SETUP = ("precision", "compile", "attention", "optimizer", "cuda_graph", "steps", "warmup")


def write_setup(answer: Answer, *groups: Selection) -> None:
    """Say what was trained and how, each setup once, and where another size stands in for the handout's xl."""
    settings = [cell.configuration for cell in cells_of(groups)]
    distinct = {tuple(setting[name] for name in _SETUP): setting for setting in reversed(settings)}
    answer.write("common.setup", settings=[*reversed(distinct.values())], size=settings[0]["size"])


def _series(answer: Answer) -> Selection | None:
    """The invocation that all problems of the series take.

    It is the one with most of the strategies that the handout names, with the 10 steps that it asks for, launched
    rather than in CUDA graphs.
    """
    plain = {"compile": ("off",), "precision": ("fp32",), "attention": ("reference",)}
    wanted = {"size": (answer.handout.xl,), "world_size": (2,), "batch_size": (4,), "context": (512,)}
    strategies = {"naive", "flat", "overlap"} | ({"bucketed"} if answer.handout.year == 2025 else set())

    def lacking(group: Selection) -> tuple[int, int, bool]:
        fewest = min((len(cell.samples["step"].measured) for cell in group.measured), default=0)
        return len(strategies - group.by("strategy").keys()), max(10 - fewest, 0), group.setting("cuda_graph") == "on"

    return min(answer.find_each("ddp", {**wanted, **plain, "gradient_dtype": ("fp32",)}), key=lacking, default=None)


def _steps(block: str, *strategies: str, draws: bool = False) -> Callable[[Answer], None]:
    """Answer with the series' steps of these strategies, the first of which are needed."""

    def answered(answer: Answer) -> None:
        series = _series(answer)
        group = series and series.only(lambda cell: cell.configuration["strategy"] in strategies)
        if group is None or not {"naive", strategies[-1]} <= group.by("strategy").keys():
            return
        measured = [{**_OPTIONAL, **row} for row in where(group.rows("ddp"), status="ok")]
        if draws and not all(row["timeline"] for row in measured):
            return
        answer.draw([group] if draws else (), "timelines")
        answer.show([group], "ddp", *_STEP_COLUMNS, medians=True)
        write_setup(answer, group)
        answer.write(f"ddp.{block}", rows={row["strategy"]: row for row in measured})

    return answered


naive = _steps("naive", "naive")
flat = _steps("flat", "naive", "flat")
overlapped = _steps("overlapped", "naive", "flat", "overlap")
traces = _steps("traces", "naive", "overlap", draws=True)


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
    sizes = "0.05,0.1,1" if target.size == "tiny" else "1,10,100,1000"
    flags = ("--mode", "naive,flat,overlap,bucketed", "--bucket-mb", sizes)
    return [xl_command(target, "ddp", *flags, cells=4)]


def buckets(answer: Answer) -> None:
    group = _series(answer)
    if group is None or not bucket_sweeps(group.measured):
        return
    answer.show([group], "ddp", *_STEP_COLUMNS, medians=True)
    answer.show([group], "buckets", medians=True)
    answer.draw([group], "buckets")
    rows = where(group.rows("ddp"), status="ok")
    sizes = where(rows, strategy="bucketed")
    others = [row for row in rows if row["strategy"] in ("naive", "flat", "overlap")]
    slower = {row["strategy"]: _slower_sizes(sizes, row["step_ms"]) for row in others}
    predicted = [row for row in group.rows("buckets") if row["predicted_ms"] is not None]
    by_exposed = sorted(predicted, key=lambda row: row["exposed_ms"].estimate)
    facts: dict[str, Any] = {"is_aligned": by_exposed == sorted(predicted, key=lambda row: row["predicted_ms"])}
    # The backward pass without communication next to it, and what its gradients need on the link that was fitted.
    naive_cell, first = group.first(strategy="naive"), bucket_sweeps(group.measured)[0][0]
    backward = {
        cell.configuration["bucket_mb"]: cell.samples["backward"].median for cell in group.of(strategy="bucketed")
    }
    facts |= {"without_ms": naive_cell and naive_cell.samples["backward"].median, "backward": backward}
    facts["travel_ms"] = 1e3 * first.derived["communicated_bytes"] / link_of(first).bytes_per_s
    write_setup(answer, group)
    answer.write("ddp.buckets", sizes=sizes, others=others, slower=slower, **facts)


def _slower_sizes(sizes: Sequence[Any], steps: Any) -> list[Any]:
    """The bucket sizes whose steps are slower than others; of sizes with the same calls all or none."""
    not_slower = {row["calls"] for row in sizes if ratio(row["step_ms"], steps).low <= 1}
    return [row for row in sizes if row["calls"] not in not_slower]


def bucket_equation(answer: Answer) -> None:
    group = _series(answer)
    setting = (4 * count_parameters(SIZES["xl"]), 100, 200e9, 20e-6)
    if group is not None and (sweeps := bucket_sweeps(group.measured)):
        link, derived = link_of(sweeps[0][0]), sweeps[0][0].derived
        if link.has_bandwidth:
            setting = (derived["communicated_bytes"], derived["gradient_calls"], link.bytes_per_s, link.latency_s)
            answer.measured_by([group])
    answer.write("ddp.bucket_equation", is_measured=bool(answer.runs), calls_are_free=setting[3] == 0)
    if setting[3]:
        answer.derive(bucket_answers(*setting), "formulas", "bucket sizes by the equation")
