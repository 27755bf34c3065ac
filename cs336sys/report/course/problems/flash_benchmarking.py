"""``flash_benchmarking``, the worked example and 2025's leaderboard: our kernels against PyTorch's."""

from collections.abc import Mapping, Sequence

from cs336sys.report.course.evidence import Evidence, Found, plain_table
from cs336sys.report.course.problem import Answer, Command, Handout, Part, Problem, Target, pictures_of, runs_of, simple
from cs336sys.report.course.problems.pytorch_attention import shape_words
from cs336sys.report.course.words import failures, joined, ms, speed, times, trend
from cs336sys.report.registry import Presentation
from cs336sys.report.table import Column
from cs336sys.results.model import Cell

# What the handouts call our kernels' competitor.
_PYTORCH = "eager"
_OURS = ("auto", "triton", "hopper", "tiled")


def weighted_sum(evidence: Evidence, handout: Handout) -> Answer | None:
    found = evidence.find("kernels", op=("weighted-sum",))
    if not found:
        return None
    sentences, rows = [], {}
    for group in found:
        for cell in group.measured:
            rows[cell.configuration["implementation"]] = cell
    for name, cell in rows.items():
        parts = [f"{part.replace('_', ' ')} {ms(samples.median)}" for part, samples in cell.samples.items()]
        sentences.append(f"{'Our kernel' if name == 'ours' else name}: {joined(parts)}.")
    for other, called in (("eager", "PyTorch's own"), ("compiled", "the same compiled")):
        if {"ours", other} <= rows.keys():
            ratios = [
                f"{speed(rows[other].samples[part].median / samples.median)} ({part.replace('_', ' ')})"
                for part, samples in rows["ours"].samples.items()
                if part in rows[other].samples
            ]
            sentences.append(f"Against {called} our kernel is {joined(ratios)}.")
    tables = [table for group in found for table in group.table("kernels")]
    return Answer(sentences, tables, {}, runs_of(found))


def weighted_sum_commands(target: Target) -> list[Command]:
    grid = ("--tokens", "256", "--width", "128", "--implementation", "ours,eager") if target.is_small else ()
    return [simple(target, "kernels", "--op", "weighted-sum", *grid, seconds=20)]


def flash_benchmarking(evidence: Evidence, handout: Handout) -> Answer | None:
    grid = {
        "context": tuple(2**power for power in range(7, 17)),
        "head_dim": (16, 32, 64, 128),
        "causal": (True,),
    }
    found = evidence.find_each("flash", grid, batch_size=(1,), heads=(1,))
    rows, used, cells = [], [], []
    for group in found:
        chosen = [c for c in group.cells if c.configuration["implementation"] in (*_OURS, _PYTORCH, "compiled")]
        new = _flash_rows(Found(group.invocation, chosen))
        if new:
            cells += chosen
            rows += new
            used.append(group)
    if not rows:
        return None
    # The first invocation's, of those that measured both.
    rows.sort(key=lambda row: "end_to_end_ms" not in row)
    rows = list({(r["dtype"], r["head_dim"], r["context"]): r for r in reversed(rows)}.values())
    rows.sort(key=lambda row: (row["dtype"], row["head_dim"], row["context"]))
    sentences = [*_speedup_words(rows), *_length_words(rows)]
    sentences += failures(
        cells, lambda c: f"{c.configuration['implementation']} at {shape_words(c)}, {c.configuration['dtype']}"
    )
    sentences += [_error_words(cells)]
    columns = [Column("dtype", "dtype"), Column("head_dim", "head dim"), Column("context", "context")]
    for part in ("forward", "backward", "end_to_end"):
        name = part.replace("_", "-")
        columns += [Column(f"{part}_ours_ms", f"{name}, ours", "ms"), Column(f"{part}_ms", f"{name}, PyTorch", "ms")]
    columns.append(Column("end_to_end_speedup", "faster", "ratio"))
    pictures = pictures_of(used[:1])
    title = "FlashAttention against PyTorch's attention, batch 1, causal, medians"
    return Answer(sentences, plain_table("flash", title, columns, rows), pictures, runs_of(used), _missing(rows, cells))


def _speedup_words(rows: Sequence[dict]) -> list[str]:
    """In how many shapes our kernels are faster, and by how much, for each dtype and part."""
    sentences = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        for part in ("forward", "backward", "end_to_end"):
            compared = [row for row in of_dtype if row.get(f"{part}_speedup")]
            if not compared:
                continue
            best, worst = (choose(compared, key=lambda row: row[f"{part}_speedup"]) for choose in (max, min))
            faster = sum(row[f"{part}_speedup"] > 1 for row in compared)
            sentences.append(
                f"In {dtype}, {part.replace('_', '-')}: our kernels are faster than PyTorch's attention in {faster} of "
                f"{len(compared)} shapes, from {times(worst[f'{part}_speedup'])} (context {worst['context']}, head dim "
                f"{worst['head_dim']}) to {times(best[f'{part}_speedup'])} (context {best['context']}, head dim "
                f"{best['head_dim']})."
            )
    return sentences


def _length_words(rows: Sequence[dict]) -> list[str]:
    """How the gain of both passes together changes with the length."""
    sentences = []
    compared = [row for row in rows if row.get("end_to_end_speedup")]
    for dtype in dict.fromkeys(row["dtype"] for row in compared):
        of_dtype = [row for row in compared if row["dtype"] == dtype and row["head_dim"] == 64]
        if len(of_dtype) > 1:
            sentences.append(
                f"With the length (head dim 64, {dtype}) the gain "
                f"{trend([r['end_to_end_speedup'] for r in of_dtype])}, "
                f"from {times(of_dtype[0]['end_to_end_speedup'])} to {times(of_dtype[-1]['end_to_end_speedup'])}."
            )
    return sentences


def _missing(rows: Sequence[dict], cells: Sequence[Cell]) -> list[str]:
    """What of the grid was not measured; a cell that failed was."""
    there = {row["dtype"] for row in rows}
    missing = [f"the grid in {dtype}" for dtype in ("bf16", "fp32") if dtype not in there]
    failed = {
        tuple(c.configuration[name] for name in ("dtype", "head_dim", "context")) for c in cells if c.status != "ok"
    }
    missing += [
        f"PyTorch's attention at context {row['context']}, head dim {row['head_dim']} in {row['dtype']}"
        for row in rows
        if "end_to_end_ms" not in row and (row["dtype"], row["head_dim"], row["context"]) not in failed
    ]
    return missing


def _error_words(cells: Sequence[Cell]) -> str:
    checked = [cell for cell in cells if cell.configuration["implementation"] in _OURS and "out_error" in cell.derived]
    worst: Mapping[str, float] = {}
    for dtype in dict.fromkeys(cell.configuration["dtype"] for cell in checked):
        errors = [
            value
            for cell in checked
            if cell.configuration["dtype"] == dtype
            for name, value in cell.derived.items()
            if name.endswith("_error")
        ]
        worst = {**worst, dtype: max(errors)}
    listed = joined(f"{value:.1e} in {dtype}" for dtype, value in worst.items())
    return f"Before it was timed each was compared with float64; the largest relative error of ours is {listed}."


def _flash_rows(group: Found) -> list[dict]:
    rows = []
    for cell in group.measured:
        if cell.configuration["implementation"] not in _OURS[:1] + _OURS[3:]:
            continue
        names = ("context", "head_dim", "dtype")
        shape = {name: cell.configuration[name] for name in names}
        other = next(iter(group.of(implementation=_PYTORCH, **shape)), None)
        row: dict = dict(shape)
        for part in ("forward", "backward", "end_to_end"):
            row[f"{part}_ours_ms"] = cell.samples[part].median
            if other is not None:
                row[f"{part}_ms"] = other.samples[part].median
                row[f"{part}_speedup"] = other.samples[part].median / cell.samples[part].median
        rows.append(row)
    return rows if any("end_to_end_ms" in row for row in rows) else []


def flash_commands(target: Target) -> list[Command]:
    if target.is_small:
        grid = ("--context", "128,256", "--head-dim", "16", "--dtype", "fp32", "--repetition-ms", "20")
        names = ("--implementation", "auto,tiled,eager", "--batch-size", "1", "--num-heads", "1")
        return [simple(target, "flash", *names, *grid, seconds=10)]
    return [simple(target, "flash", "--grid", "course", seconds=600)]


def board(evidence: Evidence, handout: Handout) -> Answer | None:
    found = evidence.find(
        "flash", batch_size=(1,), heads=(16,), context=(16384,), head_dim=(64,), dtype=("bf16",), causal=(True,)
    )
    if not found:
        return None
    group = found[0]
    end = {cell.configuration["implementation"]: cell for cell in group.measured}
    ours = min((end[name] for name in _OURS if name in end), key=lambda c: c.samples["end_to_end"].median, default=None)
    sentences = []
    if ours is not None:
        samples = ours.samples
        sentences.append(
            f"Forward and backward together take {ms(samples['end_to_end'].median)} (batch 1, 16 heads, context 16384, "
            f"head dim 64, causal, bf16): forward {ms(samples['forward'].median)}, backward "
            f"{ms(samples['backward'].median)}, {ours.derived['end_to_end_tflops']:.0f} TFLOP/s."
        )
        others = [
            f"{name} {ms(cell.samples['end_to_end'].median)} "
            f"({times(cell.samples['end_to_end'].median / samples['end_to_end'].median)})"
            for name, cell in end.items()
            if name not in _OURS
        ]
        if others:
            sentences.append(f"In the same run: {joined(others)}.")
    sentences += failures(group.cells, lambda cell: cell.configuration["implementation"])
    keys = ("implementation", "forward_ms", "backward_ms", "end_to_end_ms", "end_to_end_tflops", "status")
    return Answer(sentences, group.table("flash", *keys, presentation=Presentation()), {}, runs_of([group]))


def board_commands(target: Target) -> list[Command]:
    if target.is_small:
        return []
    return [simple(target, "flash", "--grid", "board", seconds=60)]


WEIGHTED_SUM = Problem(
    "weighted_sum", "The worked example: weighted sum", (Part("", weighted_sum, weighted_sum_commands),)
)


FLASH_BENCHMARKING = Problem(
    "flash_benchmarking", "Benchmarking FlashAttention-2", (Part("a", flash_benchmarking, flash_commands),)
)


LEADERBOARD_2025 = Problem("leaderboard", "Leaderboard: FlashAttention-2", (Part("", board, board_commands),))
