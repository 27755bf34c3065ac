"""(b) and (c): the kernels that take most of the time."""

from collections.abc import Sequence

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
from cs336sys.report.course.words import joined, percent
from cs336sys.report.tables import Column

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
