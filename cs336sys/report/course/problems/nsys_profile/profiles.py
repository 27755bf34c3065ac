"""The profiles that the problem is answered from, and their tables' rows."""

from collections.abc import Callable, Sequence

from cs336sys.report.course.evidence import PLAIN, Evidence, Found
from cs336sys.report.course.problem import Answer
from cs336sys.report.course.target import Handout
from cs336sys.results import Cell

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
