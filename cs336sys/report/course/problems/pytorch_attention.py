"""``pytorch_attention`` and ``torch_compile`` (a): plain attention over head dim and length, eager and compiled."""

from collections.abc import Sequence
from itertools import pairwise

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.hardware import memory_bytes
from cs336sys.accounting.one_device import attention_answers
from cs336sys.report.account.answers import answers_table
from cs336sys.report.course.evidence import PLAIN, Evidence, Found, plain_table
from cs336sys.report.course.problem import (
    GIB,
    Answer,
    Command,
    Handout,
    Part,
    Problem,
    Sweep,
    Target,
    pictures_of,
    runs_of,
    simple,
)
from cs336sys.report.course.words import ALIKE, failures, gib, joined, ms, speed, spread, times, trend
from cs336sys.report.table import Column, Table
from cs336sys.results.model import Cell

_PARTS = ("forward", "backward")
_GRID = {"context": (256, 1024, 4096, 8192, 16384), "head_dim": (16, 32, 64, 128), "dtype": ("fp32",)}


def _shape(cell: Cell) -> tuple[int, int]:
    return cell.configuration["context"], cell.configuration["head_dim"]


def shape_words(cell: Cell) -> str:
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
        "What removes the cost is not to keep the probabilities: FlashAttention computes them again, tile by tile, "
        "from one logsumexp a query, so that what is held grows with the length and not with its square.",
    ]
    keys = (
        *("implementation", "context", "head_dim", "forward_ms", "backward_ms", "held_gib", "predicted_held_gib"),
        *("peak_gib", "status"),
    )
    shown = [table for group in found for table in group.table("attn", *keys)]
    # Of one length there is nothing over which to draw.
    pictures = pictures_of([group for group in found if len({_shape(cell)[0] for cell in group.measured}) > 1])
    every = {_shape(cell): cell for cell in cells}
    missing = [
        f"{_CALLED.get(name, name)} at {shape_words(cell)}"
        for name in dict.fromkeys(cell.configuration["implementation"] for cell in cells)
        for shape, cell in sorted(every.items())
        if all(_shape(one) != shape for one in cells if one.configuration["implementation"] == name)
    ]
    return Answer(sentences, [*shown, *tables], pictures, runs_of(found), missing)


_CALLED = {"model": "the model's own attention", "eager": "plain attention with torch.softmax"}


def _attention_words(name: str, cells: Sequence[Cell]) -> list[str]:
    measured = sorted((cell for cell in cells if cell.status == "ok"), key=_shape)
    words = _CALLED.get(name, name)
    sentences = []
    if measured:
        first, last = measured[0], measured[-1]
        for part in _PARTS:
            sentences.append(
                f"{words[:1].upper()}{words[1:]}: {part} from {ms(first.samples[part].mean)} "
                f"({shape_words(first)}) to "
                f"{ms(last.samples[part].mean)} ({shape_words(last)})."
            )
    return [*sentences, *failures(cells, lambda cell: f"{words} at {shape_words(cell)}")]


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
            f"The memory saved for backward {trend([cell.derived['held_gib'] for cell in series])} with the context, "
            f"at head dim {head_dim} {joined(steps)}: towards its square, as the probabilities do."
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
        sentences = [f"The smallest configuration out of memory is {shape_words(least)}."]
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
        f"It holds {gib(needed.held / GIB)} before the backward pass and {gib(needed.peak / GIB)} at its peak, of "
        f"which the probabilities are {gib(needed.probabilities / GIB)}."
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
            group.cells, lambda cell: f"{cell.configuration['implementation']} at {shape_words(cell)}"
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


PYTORCH_ATTENTION = Problem(
    "pytorch_attention", "Benchmarking PyTorch attention", (Part("a", pytorch_attention, attention_commands),)
)

# ``torch_compile``: attention and the whole model, vanilla and compiled.


def compiled_model(evidence: Evidence, handout: Handout) -> Answer | None:
    plain = {name: values for name, values in PLAIN.items() if name not in ("compile", "mode")}
    found: dict[tuple, tuple[dict, Found]] = {}
    for group in evidence.find_each(
        "bench", {"size": handout.sizes, "context": (512,), "batch_size": (4,)}, mode=("train", "forward"), **plain
    ):
        for row in _compiled_rows(group):
            found.setdefault((row["size"], row["precision"], row["compile"]), (row, group))
    # A compiled model is the answer, compiled blocks where there is none.
    whole = [one for one in found.values() if one[0]["compile"] == "model"]
    chosen = sorted(whole or found.values(), key=lambda one: (one[0]["precision"] != "fp32", one[0]["parameters"]))
    if not chosen:
        return None
    rows = [row for row, _ in chosen]
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
    absent = [handout.called(size) for size in handout.sizes[:-1] if all(row["size"] != size for row in rows)]
    missing = [f"the whole model compiled of {joined(absent)}"] if absent else []
    if not whole:
        missing = ["the whole model compiled, with vanilla in the same run"]
    title = "vanilla and compiled model, medians of the same run"
    return Answer(
        sentences, plain_table("compile", title, columns, rows), {}, runs_of([group for _, group in chosen]), missing
    )


def _compiled_rows(group: Found) -> list[dict]:
    rows = []
    for cell in group.measured:
        names = cell.configuration
        alike = {name: names[name] for name in ("size", "precision", "mode", "context")}
        vanilla = next(iter(group.of(compile="off", **alike)), None)
        if names["compile"] == "off" or vanilla is None:
            continue
        row: dict = {name: names[name] for name in ("size", "precision", "compile")}
        row["parameters"] = cell.derived["parameters"]
        for part in cell.samples.keys() & {"forward", "backward", "optimizer", "step"}:
            before, after = vanilla.samples[part].median, cell.samples[part].median
            row |= {f"{part}_off_ms": before, f"{part}_ms": after, f"{part}_speedup": before / after}
        rows.append(row)
    return rows


def compiled_model_commands(target: Target) -> list[Command]:
    sizes = target.sizes(target.handout.sizes[:-1])
    return [Sweep("bench", sizes, options={"compile": ("off", "model")}).on(target)]


TORCH_COMPILE = Problem(
    "torch_compile",
    "torch.compile",
    (
        Part("a", compiled_attention, attention_commands),
        Part("b", compiled_model, compiled_model_commands),
    ),
)
