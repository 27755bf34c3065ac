"""``nsys_profile``: which kernels take the time, and how the passes, the step and attention differ in them."""

from collections.abc import Callable, Sequence

from cs336sys.report.course.evidence import PLAIN, Evidence, Found, plain_table
from cs336sys.report.course.problem import Answer, Command, Handout, Part, Problem, Sweep, Target, pictures_of, runs_of
from cs336sys.report.course.words import ALIKE, failures, joined, ms, percent, spread, times, trend
from cs336sys.report.profile.tables import LAUNCH_BOUND_IDLE_PERCENT
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell

# The profiles that the problem is answered from, and their tables' rows.


# Kernels of less than this share of a pass are not worth a word.
TRIVIAL_PERCENT = 2.0


def profiles(evidence: Evidence, handout: Handout) -> list[Found]:
    """Plain steps in fp32 of the handout's sizes and contexts, by ``nsys``."""
    return evidence.find(
        "nsys",
        {
            "size": handout.profile_sizes,
            "context": handout.profile_contexts if handout.year == 2025 else (256, 512, 1024, 2048, 4096),
            "precision": ("fp32",),
        },
        **PLAIN,
    )


def profile_name(cell: Cell, handout: Handout) -> str:
    return f"{handout.called(cell.configuration['size'])} at context {cell.configuration['context']}"


def profile_rows(found: Sequence[Found], table: str, phase: str | None = None) -> list[dict]:
    """The rows of one of the command's tables, of one phase or of all."""
    rows = [row for group in found for one in group.table(table) for row in one.rows]
    return [dict(row) for row in rows if phase is None or row["phase"] == phase]


def of_longest_contexts(rows: Sequence[dict]) -> list[dict]:
    """For each size the row of its longest context."""
    longest: dict[str, dict] = {}
    for row in rows:
        if row["size"] not in longest or row["context"] > longest[row["size"]]["context"]:
            longest[row["size"]] = row
    return list(longest.values())


def answered_from_profiles(
    answer: Callable[[list[Found], Evidence, Handout], Answer | None],
) -> Callable[[Evidence, Handout], Answer | None]:
    """The answer from profiles, if there are any that worked."""

    def answered(evidence: Evidence, handout: Handout) -> Answer | None:
        found = profiles(evidence, handout)
        return answer(found, evidence, handout) if any(group.measured for group in found) else None

    return answered


def shares_of(row: dict) -> list[tuple[str, float]]:
    """Shares of the kinds of kernels beside matrix products, the largest first."""
    shares = [
        (key.removesuffix("_percent").replace("attention_softmax", "softmax"), value)
        for key, value in row.items()
        if key.endswith("_percent") and key != "matmul_percent" and value
    ]
    return sorted(shares, key=lambda share: -share[1])


# (a): how long a forward pass takes, with and without a profiler.


_PHASE_KEYS = ("size", "context", "phase", "unprofiled_ms", "wall_ms", "span_ms", "busy_ms", "idle_percent", "status")

_SHOWN_PHASES = ("forward", "backward", "optimizer", None)


@answered_from_profiles
def forward_time(found: list[Found], evidence: Evidence, handout: Handout) -> Answer:
    rows = [row for row in profile_rows(found, "phases") if row.get("phase") == "forward"]
    spans = [
        f"{ms(row['span_ms'])} for {handout.called(row['size'])} at context {row['context']}"
        for row in of_longest_contexts(rows)
    ]
    sentences = [f"Under the profiler the kernels of a forward pass span {joined(spans)}."]
    ratios = [row["span_ms"] / row["unprofiled_ms"].median for row in rows if row["unprofiled_ms"]]
    agreeing = sum(abs(ratio - 1) <= 2 * ALIKE for ratio in ratios)
    if ratios:
        sentences.append(
            f"The same pass without a profiler takes {spread([1 / ratio for ratio in ratios])} that: the two agree "
            f"within {percent(200 * ALIKE)} in {agreeing} of {len(ratios)} profiles."
        )
        sentences += _disagreeing([row for row in rows if row["unprofiled_ms"]], handout)
    sentences += _beside_bench(rows, evidence)
    sentences += failures([cell for group in found for cell in group.cells], lambda cell: profile_name(cell, handout))
    if handout.year == 2026:
        sentences += _longest_fitting(found, handout)
    every = [table for group in found for table in group.table("phases", *_PHASE_KEYS)]
    tables = [
        Table(table.name, table.title, table.columns, [row for row in table.rows if row.get("phase") in _SHOWN_PHASES])
        for table in every
    ]
    pictures = pictures_of(found)
    return Answer(sentences, tables, pictures, runs_of(found), _missing(found, handout))


def _disagreeing(rows: Sequence[dict], handout: Handout) -> list[str]:
    """Why passes take another time under the profiler than without it."""
    ratios = [(row, row["span_ms"] / row["unprofiled_ms"].median) for row in rows]
    longer = [(row, ratio) for row, ratio in ratios if ratio > 1 + 2 * ALIKE]
    shorter = [(row, ratio) for row, ratio in ratios if ratio < 1 - 2 * ALIKE]
    sentences = []
    if longer:
        busy = [100 * row["busy_ms"] / row["span_ms"] for row, _ in longer]
        # Of a CPU nothing is said of launches.
        waits = max(busy) < 90 and all(row["launch_bound"] is not None for row, _ in longer)
        sentences.append(
            f"In {_these(longer, handout)} it is longer under the profiler, {spread([ratio for _, ratio in longer])}, "
            f"with kernels running in {spread(busy, percent)} of it"
            + (": the profiler slows down the CPU's launches, which the GPU waits for." if waits else ".")
        )
    if shorter:
        idle = [row["idle_percent"] for row, _ in shorter]
        sentences.append(
            f"In {_these(shorter, handout)} it is shorter under the profiler, {spread([ratio for _, ratio in shorter])}"
            + (
                f": without it the GPU was idle for {spread(idle, percent)}, so that the CPU's speed decided, which "
                "varied between the two."
                if min(idle) > LAUNCH_BOUND_IDLE_PERCENT
                else "."
            )
        )
    return sentences


def _these(rows: Sequence[tuple[dict, float]], handout: Handout) -> str:
    if len(rows) == 1:
        row = rows[0][0]
        return f"that of {handout.called(row['size'])} at context {row['context']}"
    return f"{len(rows)} of them"


def _missing(found: Sequence[Found], handout: Handout) -> list[str]:
    there = {(cell.configuration["size"], cell.configuration["context"]) for group in found for cell in group.cells}
    missing = []
    for size in handout.profile_sizes:
        contexts = [context for context in handout.profile_contexts if (size, context) not in there]
        if contexts:
            missing.append(f"{handout.called(size)} at context {joined(map(str, contexts))}")
    return missing


def _beside_bench(rows: Sequence[dict], evidence: Evidence) -> list[str]:
    """What ``bench`` measured of the same."""
    benched = {
        (cell.configuration["size"], cell.configuration["context"]): cell.samples["forward"].median
        for group in evidence.find("bench", precision=("fp32",), batch_size=(4,), **PLAIN)
        for cell in group.measured
    }
    pairs = [
        (row, benched[row["size"], row["context"]])
        for row in rows
        if row["unprofiled_ms"] and (row["size"], row["context"]) in benched
    ]
    if not pairs:
        return []
    words = [f"{ms(theirs)} ({row['size']}, context {row['context']})" for row, theirs in pairs]
    ratios = [row["unprofiled_ms"].median / theirs for row, theirs in pairs]
    return [f"`bench` measured {joined(words)}, in runs of their own; here it is {spread(ratios)} that."]


def _longest_fitting(found: Sequence[Found], handout: Handout) -> list[str]:
    sentences = []
    for size in dict.fromkeys(cell.configuration["size"] for group in found for cell in group.cells):
        cells = [cell for group in found for cell in group.cells if cell.configuration["size"] == size]
        fits = [cell.configuration["context"] for cell in cells if cell.status == "ok"]
        oom = [cell.configuration["context"] for cell in cells if cell.status == "oom"]
        if fits and oom:
            sentences.append(
                f"{handout.called(size)} fits at context {max(fits)} and no longer at {min(oom)}: {max(fits)} is the "
                "longest power of two."
            )
        elif fits:
            sentences.append(
                f"{handout.called(size)} was profiled up to context {max(fits)}, where it still fits; a longer one "
                "was not tried."
            )
    return sentences


# (b) and (c): the kernels that take most of the time.


# Of the kernels beside products, those that a sentence names; the table has more.
_NAMED_KERNELS = 3


@answered_from_profiles
def top_kernel(found: list[Found], evidence: Evidence, handout: Handout) -> Answer:
    rows = profile_rows(found, "top kernel")
    sentences = []
    for row in of_longest_contexts(rows):
        sentence = (
            f"{handout.called(row['size'])}, context {row['context']}: `{row['first_kernel']}` takes the most time in "
            f"the forward pass, {percent(row['first_percent'])} of that of all kernels, in "
            f"{_calls(row['first_instances'])}"
        )
        if row.get("both_kernel"):
            same = row["both_kernel"] == row["first_kernel"]
            sentence += (
                f"; over forward and backward together it is {'the same' if same else 'another'}"
                + ("" if same else f", `{row['both_kernel']}`")
                + f" ({percent(row['both_percent'])}, {_calls(row['both_instances'])} a step)"
            )
        sentences.append(sentence + ".")
    both = [row for row in rows if row.get("both_kernel")]
    same_count = sum(row["both_kernel"] == row["first_kernel"] for row in both)
    if len(both) > 1:
        sentences.append(f"In {same_count} of {len(both)} profiles it is the same kernel for both.")
    tables = [table for group in found for table in group.table("top kernel")]
    return Answer(sentences, tables, {}, runs_of(found))


def _calls(count: float) -> str:
    number = f"{count:g}"
    return f"{number} call{'s' * (number != '1')}"


@answered_from_profiles
def other_kernels(found: list[Found], evidence: Evidence, handout: Handout) -> Answer:
    forward = of_longest_contexts(profile_rows(found, "shares", "forward"))
    sentences = []
    for row in forward:
        others = shares_of(row)
        matmul = row.get("matmul_percent") or 0.0
        listed = [f"{name} kernels {percent(share)}" for name, share in others if share >= TRIVIAL_PERCENT]
        kinds = joined([f"matrix products take {percent(matmul)} of the kernel time", *listed])
        kernels = [
            f"`{kernel['kernel']}` ({percent(kernel['share_percent'])} in {_calls(kernel['instances'])})"
            for kernel in profile_rows(found, "other kernels", "forward")
            if (kernel["size"], kernel["context"]) == (row["size"], row["context"])
        ]
        longest = f"; beside products the longest are {joined(kernels[:_NAMED_KERNELS])}" if kernels else ""
        sentences.append(
            f"In the forward pass of {handout.called(row['size'])} at context {row['context']}, {kinds}{longest}."
        )
    tables = []
    for group in found:
        for table in group.table("other kernels"):
            contexts = {(row["size"], row["context"]) for row in forward}
            rows = [
                row for row in table.rows if row["phase"] == "forward" and (row["size"], row["context"]) in contexts
            ]
            tables += plain_table(table.name, table.title, _without(table.columns, "phase"), rows)
    return Answer(sentences, tables, {}, runs_of(found))


def _without(columns: Sequence[Column], *keys: str) -> list[Column]:
    return [column for column in columns if column.key not in keys]


# (d) and (e): products in inference and in a whole step, and beside the softmax.


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


def profile_commands(target: Target) -> list[Command]:
    handout = target.handout
    contexts = target.contexts(handout.profile_contexts)[-2 if target.is_small else 0 :]
    sizes = target.sizes(handout.profile_sizes)
    # The profile itself and the steps without a profiler; nsys writes and exports its report.
    return [Sweep("nsys", sizes, contexts, steps=25).on(target)]


NSYS_PROFILE = Problem(
    "nsys_profile",
    "Nsight Systems profiling",
    tuple(
        Part(letter, answer, profile_commands)
        for letter, answer in zip("abcde", (forward_time, top_kernel, other_kernels, whole_step, softmax), strict=True)
    ),
)
