"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs336sys.report.course.answer import ALIKE, Answer, longest, trend, where
from cs336sys.report.course.evidence import PLAIN, PLAIN_OF_ANY_MODE, Selection, cells_of, joined_selection, measured_of
from cs336sys.report.course.problem import Command, Target, training_sweep

_LABEL = "{called} at context {context}"

Row = Mapping[str, Any]


def _profiles(answer: Answer, mode: str = "train") -> list[Selection]:
    """Plain steps in fp32 of the handout's sizes and contexts, by ``nsys``; none where no profile worked."""
    handout = answer.handout
    contexts = handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096, 8192)
    wanted = {"size": handout.profile_sizes, "context": contexts, "precision": ("fp32",)}
    selections = answer.find("nsys", wanted, **PLAIN_OF_ANY_MODE, mode=(mode,))
    return selections if measured_of(selections) else []


def _rows(selections: Sequence[Selection], table: str, **settings: Any) -> list[Row]:
    return where(joined_selection(selections).rows(table), **settings) if selections else []


def _shape(row: Row) -> tuple[str, int]:
    return row["size"], row["context"]


def forward_time(answer: Answer) -> None:
    selections = _profiles(answer)
    if not selections:
        return
    keys = ("phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")
    answer.show(
        selections, "phases", *keys, medians=True, join=True, keep=lambda row: row.get("phase") in ("forward", None)
    )
    answer.draw(selections)
    bench = answer.find("bench", {"warmup": (5,)}, precision=("fp32",), batch_size=(4,), **PLAIN)
    benched = {_shape(cell.configuration): cell.samples["forward"].median for cell in measured_of(bench)}
    forward = _rows(selections, "phases", phase="forward")
    rows = [
        {**row, "ratio": row["span_ms"] / row["unprofiled_ms"].median, "benched": benched.get(_shape(row))}
        for row in forward
        if row["unprofiled_ms"]
    ]
    shapes = {_shape(row) for row in rows}
    answer.measured_by(group for group in bench if shapes & {_shape(cell.configuration) for cell in group.measured})
    answer.write("nsys_profile.forward_time", forward=forward, rows=rows, near=2 * ALIKE, cells=cells_of(selections))
    answer.write_failures(cells_of(selections), _LABEL)
    grid = {"size": answer.handout.profile_sizes, "context": answer.handout.profile_contexts}
    answer.lack_unmeasured(_LABEL, [cell.configuration for cell in cells_of(selections)], grid)


def top_kernel(answer: Answer) -> None:
    selections = _profiles(answer)
    if rows := _rows(selections, "top kernel"):
        answer.show(selections, "top kernel", join=True)
        answer.write("nsys_profile.top_kernel", rows=rows)


def other_kernels(answer: Answer) -> None:
    selections = _profiles(answer)
    rows = longest(_rows(selections, "shares", phase="forward"))
    kernels = [row for row in _rows(selections, "other kernels", phase="forward") if _shape(row) in map(_shape, rows)]
    if kernels:
        answer.show(selections, "other kernels", join=True, keep=lambda row: row in kernels)
        answer.write("nsys_profile.other_kernels", rows=rows, kernels=kernels)


def whole_step(answer: Answer) -> None:
    selections = _profiles(answer)
    by_phase = {
        phase: {_shape(row): row for row in _rows(selections, "shares", phase=phase)}
        for phase in ("forward", "backward", "step")
    }
    # Inference as a run of its own stands before the forward pass of a training step.
    inference = _profiles(answer, "forward")
    inferred = {_shape(row): row for row in _rows(inference, "shares", phase="forward")}
    pairs = [
        {"before": inferred.get(shape) or by_phase["forward"][shape], "after": row, "is_inferred": shape in inferred}
        | {"size": row["size"], "context": row["context"], "backward": by_phase["backward"].get(shape)}
        for shape, row in by_phase["step"].items()
        if shape in by_phase["forward"]
    ]
    if pairs:
        phases = ("forward", "backward", "step")
        answer.show([*inference, *selections], "shares", join=True, keep=lambda row: row["phase"] in phases)
        answer.write("nsys_profile.whole_step", pairs=pairs)


def softmax(answer: Answer) -> None:
    selections = _profiles(answer)
    rows = [row for row in _rows(selections, "attention") if row.get("time_ratio")]
    if not rows:
        return
    columns = ("scores_ms", "final_ms", "softmax_ms", "other_ms", "time_ratio", "flops_ratio", "bytes_ratio")
    answer.show(selections, "attention", *columns, "matmul_tflops", "softmax_gbps", join=True)
    series: dict[str, list[Sequence[Row]]] = {}
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = sorted(where(rows, size=size), key=_shape)
        series.setdefault(trend([row["time_ratio"] for row in of_size]), []).append(of_size)
    answer.write("nsys_profile.softmax", rows=rows, series=series)


def profile_commands(target: Target) -> list[Command]:
    contexts = target.handout.profile_contexts[-2 if target.is_small else 0 :]
    # The profile itself and the steps without a profiler; nsys writes and exports its report.
    sizes = target.handout.profile_sizes
    return [training_sweep(target, "nsys", sizes, contexts, steps=25, mode=("train", "forward"))]
