"""How often ``compare`` calls measured runs of the same code different: 219 runs of one step on an H200.

``python -m pytest -n0 -s tests/results/test_equal_runs.py`` prints the table of docs/results/compare-h200.md.
"""

from itertools import pairwise
from pathlib import Path

from cs336sys.results.comparison import Measured, compare_samples
from cs336sys.results.model import read_results

RUNS = Path(__file__).resolve().parents[2] / "docs/results/validation/equal-runs-h200.jsonl.gz"


def compared(a, b):
    sides = (Measured((tuple(cell.samples["step"] for cell in side),)) for side in (a, b))
    return compare_samples(*sides)


def count(pairs):
    """How many pairs are called different, how many of these by more than 5 %, and how many are undecided."""
    found = [compared(a, b) for a, b in pairs]
    different = [one for one in found if one.verdict in ("faster", "slower")]
    large = [one for one in different if abs(one.slower_percent) > 5]
    return len(found), len(different), len(large), sum(one.verdict == "undecided" for one in found)


def test_single_runs_are_called_different_and_rounds_in_turn_are_not():
    by_graph = {}
    for cell in read_results(RUNS).cells:
        if cell.status == "ok":
            by_graph.setdefault(cell.configuration["cuda_graph"], []).append(cell)
    for graph, cells in by_graph.items():
        eights = [cells[start : start + 8] for start in range(0, len(cells) - 7, 8)]
        rows = {
            "one run a side, the next one": count(([a], [b]) for a, b in pairwise(cells)),
            "four rounds a side, in turn": count((eight[::2], eight[1::2]) for eight in eights),
            "four rounds a side, the next four": count((eight[:4], eight[4:]) for eight in eights),
        }
        for name, (pairs, different, large, undecided) in rows.items():
            words = f"{different} different, {large} of them by over 5 %, {undecided} undecided"
            print(f"\nCUDA graph {graph}, {name}: {pairs} pairs, {words}", end="")
        assert rows["four rounds a side, in turn"][1] == 0
        assert rows["one run a side, the next one"][1] > 0.15 * len(cells)
