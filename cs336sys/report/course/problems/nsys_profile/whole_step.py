"""(d) and (e): products in inference and in a whole step, and beside the softmax."""

from cs336sys.report.course.evidence import Evidence, Found, plain_table
from cs336sys.report.course.problem import Answer, runs_of
from cs336sys.report.course.problems.nsys_profile.profiles import (
    TRIVIAL_PERCENT,
    answered_from_profiles,
    of_longest_contexts,
    profile_rows,
    shares_of,
)
from cs336sys.report.course.target import Handout
from cs336sys.report.course.words import joined, ms, percent, times, trend


@answered_from_profiles
def whole_step(found: list[Found], evidence: Evidence, handout: Handout) -> Answer | None:
    rows = profile_rows(found, "shares")
    forward = {(row["size"], row["context"]): row for row in rows if row["phase"] == "forward"}
    steps = {(row["size"], row["context"]): row for row in rows if row["phase"] == "step"}
    keys = [key for key in steps if key in forward]
    if not keys:
        return None
    sentences = []
    for row in of_longest_contexts([steps[key] for key in keys]):
        before, after = forward[row["size"], row["context"]].get("matmul_percent", 0.0), row.get("matmul_percent", 0.0)
        verb = "rises" if after > before + 1 else "falls" if after < before - 1 else "hardly moves,"
        optimizer = row.get("optimizer_percent")
        sentences.append(
            f"{handout.called(row['size'])}, context {row['context']}: the share of matrix products {verb} from "
            f"{percent(before)} in inference to {percent(after)} in the whole step"
            + (f", in which all that AdamW launches takes {percent(optimizer)}" if optimizer else "")
            + "."
        )
        shares_before = dict(shares_of(forward[row["size"], row["context"]]))
        moved = [
            f"{name} {percent(shares_before.get(name, 0.0))} to {percent(share)}"
            for name, share in shares_of(row)
            if name != "optimizer" and share >= TRIVIAL_PERCENT
        ]
        if moved:
            sentences[-1] += f" Other kernels: {joined(moved)}."
    falling = sum(steps[key].get("matmul_percent", 0) < forward[key].get("matmul_percent", 0) for key in keys)
    sentences.append(
        f"The share of products is smaller in the step than in the forward pass in {falling} of {len(keys)} profiles."
    )
    tables = []
    for group in found:
        for table in group.table("shares"):
            shown = [row for row in table.rows if row["phase"] in ("forward", "step")]
            tables += plain_table(table.name, table.title, table.columns, shown)
    return Answer(sentences, tables, {}, runs_of(found))


@answered_from_profiles
def softmax(found: list[Found], evidence: Evidence, handout: Handout) -> Answer | None:
    rows = [row for row in profile_rows(found, "attention") if row.get("time_ratio")]
    if not rows:
        return None
    sentences = []
    for row in of_longest_contexts(rows):
        faster = "longer" if row["time_ratio"] > 1 else "less time"
        sentences.append(
            f"{handout.called(row['size'])}, context {row['context']}: softmax takes {ms(row['softmax_ms'])}, "
            f"{times(row['time_ratio'])} the {ms(row['scores_ms'] + row['final_ms'])} of the two products, with "
            f"{times(row['flops_ratio'])} their FLOPs: per FLOP {times(row['time_ratio'] / row['flops_ratio'])} as "
            f"long, {'and' if row['time_ratio'] > 1 else 'though'} {faster} altogether."
        )
    by_size = {
        size: sorted((row for row in rows if row["size"] == size), key=lambda row: row["context"])
        for size in dict.fromkeys(row["size"] for row in rows)
    }
    changes: dict[str, list[str]] = {}
    for size, series in by_size.items():
        if len(series) > 1:
            listed = joined(f"{times(row['time_ratio'])} at {row['context']}" for row in series)
            changes.setdefault(trend([row["time_ratio"] for row in series]), []).append(f"{size} ({listed})")
    if changes:
        words = joined(f"{how} in {joined(sizes)}" for how, sizes in changes.items())
        sentences.append(f"With the context the ratio of times {words}, while that of FLOPs does not depend on it.")
    columns = (
        *("size", "context", "scores_ms", "final_ms", "softmax_ms", "other_ms", "time_ratio", "flops_ratio"),
        *("bytes_ratio", "matmul_tflops", "softmax_gbps"),
    )
    tables = [table for group in found for table in group.table("attention", *columns)]
    return Answer(sentences, tables, {}, runs_of(found))
