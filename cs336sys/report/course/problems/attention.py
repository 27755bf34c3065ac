"""``pytorch_attention``, ``torch_compile``, ``flash_benchmarking`` and 2025's leaderboard: what attention costs."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.answers.model import attention_answers
from cs336sys.accounting.hardware import memory_bytes
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import PLAIN, Evidence, Found, plain_table
from cs336sys.report.course.problem import Answer, Part, Problem, pictures_of, runs_of
from cs336sys.report.course.target import GIB, Command, Handout, Sweep, Target, simple
from cs336sys.report.course.words import ALIKE, failures, gib, joined, ms, speed, spread, times, trend
from cs336sys.report.saved import Presentation
from cs336sys.report.tables import Column, Table
from cs336sys.results import Cell

_PARTS = ("forward", "backward")
_GRID = {"context": (256, 1024, 4096, 8192, 16384), "head_dim": (16, 32, 64, 128), "dtype": ("fp32",)}
# What the handouts call our kernels' competitor.
_PYTORCH = "eager"
_OURS = ("auto", "triton", "hopper", "tiled")


def _shape(cell: Cell) -> tuple[int, int]:
    return cell.configuration["context"], cell.configuration["head_dim"]


def _shape_words(cell: Cell) -> str:
    return f"context {cell.configuration['context']}, head dim {cell.configuration['head_dim']}"


def pytorch_attention(evidence: Evidence, handout: Handout) -> Answer | None:
    found = evidence.find("attn", _GRID, implementation=("eager", "model"))
    if not found:
        return None
    cells = [cell for group in found for cell in group.cells]
    sentences = []
    for name in dict.fromkeys(cell.configuration["implementation"] for cell in cells):
        sentences += _attention_words(name, [cell for cell in cells if cell.configuration["implementation"] == name])
    sentences += _growth_words(cells)
    worked, tables = _first_out_of_memory(cells, found)
    sentences += [
        *worked,
        "What removes the cost is not to keep the probabilities: FlashAttention computes them again, tile by "
        "tile, from "
        "one logsumexp a query, so that what is held grows with the length and not with its square.",
    ]
    keys = (
        *("implementation", "context", "head_dim", "forward_ms", "backward_ms", "held_gib", "predicted_held_gib"),
        *("peak_gib", "status"),
    )
    shown = [table for group in found for table in group.table("attn", *keys)]
    pictures = pictures_of(found)
    return Answer(sentences, [*shown, *tables], pictures, runs_of(found))


def _attention_words(name: str, cells: Sequence[Cell]) -> list[str]:
    measured = sorted((cell for cell in cells if cell.status == "ok"), key=_shape)
    words = {"model": "the model's own attention", "eager": "plain attention with torch.softmax"}.get(name, name)
    sentences = []
    if measured:
        first, last = measured[0], measured[-1]
        for part in _PARTS:
            sentences.append(
                f"{words[:1].upper()}{words[1:]}: {part} from {ms(first.samples[part].mean)} "
                f"({_shape_words(first)}) to "
                f"{ms(last.samples[part].mean)} ({_shape_words(last)})."
            )
    return [*sentences, *failures(cells, lambda cell: f"{words} at {_shape_words(cell)}")]


def _growth_words(cells: Sequence[Cell]) -> list[str]:
    sentences = []
    for head_dim in sorted({cell.configuration["head_dim"] for cell in cells})[-1:]:
        series = sorted(
            (
                c
                for c in cells
                if c.status == "ok"
                and c.configuration["head_dim"] == head_dim
                and c.derived.get("held_gib") is not None
            ),
            key=_shape,
        )
        first = series[:1] and series[0].configuration["implementation"]
        series = [cell for cell in series if cell.configuration["implementation"] == first]
        if len(series) < 2:
            continue
        steps = [
            f"{times(after.derived['held_gib'] / before.derived['held_gib'])} where the context grows "
            f"{times(after.configuration['context'] / before.configuration['context'])}"
            for before, after in pairwise(series)
        ]
        sentences.append(
            f"The memory saved for backward {trend([cell.derived['held_gib'] for cell in series])} with the "
            "context, at "
            f"head dim {head_dim} {joined(steps)}: towards its square, as the probabilities do."
            if series[-1].derived["held_gib"] / series[-2].derived["held_gib"]
            > series[-1].configuration["context"] / series[-2].configuration["context"] * (1 + ALIKE)
            else f"The memory saved for backward, at head dim {head_dim} {joined(steps)}: with the context itself."
        )
    return sentences


def _first_out_of_memory(cells: Sequence[Cell], found: Sequence[Found]) -> tuple[list[str], list[Table]]:
    """The smallest shape that did not fit, tensor by tensor; where all did, the first that cannot."""
    failed = [cell for cell in cells if cell.status == "oom"]
    run = found[0].run
    shape = cells[0].configuration
    sequences = shape["batch_size"] * shape["heads"]
    settings = {"causal": shape["causal"], "implementation": "eager"}
    if failed:
        least = min(
            failed, key=lambda cell: attention_memory(sequences, *_shape(cell), shape["dtype"], **settings).peak
        )
        context, head_dim = _shape(least)
        sentences = [f"The smallest configuration out of memory is {_shape_words(least)}."]
    else:
        capacity = memory_bytes(run.machine.get("gpu") or "") if run is not None else None
        if capacity is None:
            return ["No configuration ran out of memory."], []
        context, head_dim = (
            max(cell.configuration["context"] for cell in cells),
            min(cell.configuration["head_dim"] for cell in cells),
        )
        while attention_memory(sequences, context, head_dim, shape["dtype"], **settings).peak <= capacity:
            context *= 2
        sentences = [
            f"No configuration of the grid ran out of this GPU's {gib(capacity / GIB)}; by the accounting the first "
            f"length that does is {context}, at head dim {head_dim}."
        ]
    needed = attention_memory(sequences, context, head_dim, shape["dtype"], **settings)
    sentences.append(
        f"It holds {gib(needed.held / GIB)} before the backward pass and {gib(needed.peak / GIB)} at its peak, "
        "of which "
        f"the probabilities are {gib(needed.probabilities / GIB)}."
    )
    answers = attention_answers(sequences, context, head_dim, shape["dtype"], **settings)
    title = f"{sequences} x {context} x {head_dim} {shape['dtype']}, tensor by tensor"
    return sentences, [answers_table("accounting", title, answers)]


def attention_commands(target: Target) -> list[Command]:
    """One run for both problems."""
    grid = ("--context", "64,128", "--head-dim", "16,32", "--steps", "10") if target.is_small else ()
    names = ("--implementation", "eager,compiled,model")
    return [simple(target, "attn", *names, *grid, seconds=20 if target.is_small else 180)]


def compiled_attention(evidence: Evidence, handout: Handout) -> Answer | None:
    rows, used, sentences = [], [], []
    for group in evidence.find("attn", _GRID, implementation=("eager", "compiled")):
        eager = {_shape(cell): cell for cell in group.of(implementation="eager")}
        pairs = [(eager[_shape(cell)], cell) for cell in group.of(implementation="compiled") if _shape(cell) in eager]
        if pairs:
            used.append(group)
        for before, after in pairs:
            row: dict = dict(zip(("context", "head_dim"), _shape(after), strict=True))
            for part in _PARTS:
                row |= {f"{part}_eager_ms": before.samples[part].mean, f"{part}_ms": after.samples[part].mean}
                row[f"{part}_speedup"] = before.samples[part].median / after.samples[part].median
            rows.append(row)
        sentences += failures(
            group.cells, lambda cell: f"{cell.configuration['implementation']} at {_shape_words(cell)}"
        )
    if not rows:
        return None
    rows.sort(key=lambda row: (row["head_dim"], row["context"]))
    said = []
    for part in _PARTS:
        ratios = [row[f"{part}_speedup"] for row in rows]
        best, worst = (choose(rows, key=lambda row: row[f"{part}_speedup"]) for choose in (max, min))
        faster = sum(ratio > 1 + ALIKE for ratio in ratios)
        said.append(
            f"Compiled, the {part} pass is faster in {faster} of {len(rows)} shapes: from "
            f"{speed(worst[f'{part}_speedup'])} "
            f"(context {worst['context']}, head dim {worst['head_dim']}) to {speed(best[f'{part}_speedup'])} (context "
            f"{best['context']}, head dim {best['head_dim']})."
        )
    columns = (
        Column("context", "context"),
        Column("head_dim", "head dim"),
        *(
            column
            for part in _PARTS
            for column in (
                Column(f"{part}_eager_ms", f"{part}, eager", "ms"),
                Column(f"{part}_ms", f"{part}, compiled", "ms"),
                Column(f"{part}_speedup", "faster", "ratio"),
            )
        ),
    )
    table = plain_table("compiled", "compiled attention against eager, of the same run", columns, rows)
    return Answer([*said, *sentences], table, {}, runs_of(used))


def compiled_model(evidence: Evidence, handout: Handout) -> Answer | None:
    plain = {name: values for name, values in PLAIN.items() if name not in ("compile", "mode")}
    rows, used = [], []
    for group in evidence.find(
        "bench", {"size": handout.sizes, "context": (512,), "batch_size": (4,)}, mode=("train", "forward"), **plain
    ):
        new = _compiled_rows(group)
        rows += new
        used += [group] if new else []
    # A compiled model is the answer, compiled blocks where there is none.
    whole = [row for row in rows if row["compile"] == "model"]
    rows = whole or rows
    if not rows:
        return None
    sentences = []
    for row in rows:
        how = "the model" if row["compile"] == "model" else "each block"
        name = f"{handout.called(row['size'])} ({row['precision']})"
        changes = [
            f"the {part} {ms(row[f'{part}_off_ms'])} to {ms(row[f'{part}_ms'])} ({speed(row[f'{part}_speedup'])})"
            for part in ("forward", "step")
        ]
        sentences.append(f"{name}, with {how} compiled: {joined(changes)}.")
    steps = [row["step_speedup"] for row in rows]
    forwards = [row["forward_speedup"] for row in rows]
    if len(rows) > 1:
        sentences.append(
            f"Altogether the forward pass becomes {spread(forwards)} as fast, the whole step {spread(steps)}."
        )
    columns = [Column("size", "size"), Column("precision", "precision"), Column("compile", "compile")]
    for part in ("forward", "backward", "optimizer", "step"):
        columns += [
            Column(f"{part}_off_ms", f"{part}, vanilla", "ms"),
            Column(f"{part}_ms", f"{part}, compiled", "ms"),
            Column(f"{part}_speedup", "faster", "ratio"),
        ]
    missing = [] if whole else ["the whole model compiled, with vanilla in the same run"]
    title = "vanilla and compiled model, medians of the same run"
    return Answer(sentences, plain_table("compile", title, columns, rows), {}, runs_of(used), missing)


def _compiled_rows(group: Found) -> list[dict]:
    rows = []
    for cell in group.measured:
        names = cell.configuration
        alike = {name: names[name] for name in ("size", "precision", "mode", "context")}
        vanilla = next(iter(group.of(compile="off", **alike)), None)
        if names["compile"] == "off" or vanilla is None:
            continue
        row: dict = {name: names[name] for name in ("size", "precision", "compile")}
        for part in cell.samples.keys() & {"forward", "backward", "optimizer", "step"}:
            before, after = vanilla.samples[part].median, cell.samples[part].median
            row |= {f"{part}_off_ms": before, f"{part}_ms": after, f"{part}_speedup": before / after}
        rows.append(row)
    return rows


def compiled_model_commands(target: Target) -> list[Command]:
    sizes = target.sizes(target.handout.sizes[:-1])
    return [Sweep("bench", sizes, options={"compile": ("off", "model")}).on(target)]


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
    found = evidence.find("flash", grid, batch_size=(1,), heads=(1,))
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
    rows = list({(r["dtype"], r["head_dim"], r["context"]): r for r in reversed(rows)}.values())
    rows.sort(key=lambda row: (row["dtype"], row["head_dim"], row["context"]))
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
    compared = [row for row in rows if row.get("end_to_end_speedup")]
    for dtype in dict.fromkeys(row["dtype"] for row in compared):
        of_dtype = [row for row in compared if row["dtype"] == dtype and row["head_dim"] == 64]
        if len(of_dtype) > 1:
            sentences.append(
                f"With the length (head dim 64, {dtype}) the gain "
                f"{trend([r['end_to_end_speedup'] for r in of_dtype])}, "
                f"from {times(of_dtype[0]['end_to_end_speedup'])} to {times(of_dtype[-1]['end_to_end_speedup'])}."
            )
    sentences += failures(
        cells, lambda c: f"{c.configuration['implementation']} at {_shape_words(c)}, {c.configuration['dtype']}"
    )
    sentences += [_error_words(cells)]
    columns = [Column("dtype", "dtype"), Column("head_dim", "head dim"), Column("context", "context")]
    for part in ("forward", "backward", "end_to_end"):
        name = part.replace("_", "-")
        columns += [Column(f"{part}_ours_ms", f"{name}, ours", "ms"), Column(f"{part}_ms", f"{name}, PyTorch", "ms")]
    columns.append(Column("end_to_end_speedup", "faster", "ratio"))
    pictures = pictures_of(used[:1])
    there = {row["dtype"] for row in rows}
    missing = [f"the grid in {dtype}" for dtype in ("bf16", "fp32") if dtype not in there]
    title = "FlashAttention against PyTorch's attention, batch 1, causal, medians"
    return Answer(sentences, plain_table("flash", title, columns, rows), pictures, runs_of(used), missing)


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


PYTORCH_ATTENTION = Problem(
    "pytorch_attention", "Benchmarking PyTorch attention", (Part("a", pytorch_attention, attention_commands),)
)
TORCH_COMPILE = Problem(
    "torch_compile",
    "torch.compile",
    (
        Part("a", compiled_attention, attention_commands),
        Part("b", compiled_model, compiled_model_commands),
    ),
)
WEIGHTED_SUM = Problem(
    "weighted_sum", "The worked example: weighted sum", (Part("", weighted_sum, weighted_sum_commands),)
)
FLASH_BENCHMARKING = Problem(
    "flash_benchmarking", "Benchmarking FlashAttention-2", (Part("a", flash_benchmarking, flash_commands),)
)
LEADERBOARD_2025 = Problem("leaderboard", "Leaderboard: FlashAttention-2", (Part("", board, board_commands),))
