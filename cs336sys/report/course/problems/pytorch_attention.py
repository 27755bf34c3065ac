"""``pytorch_attention`` and ``torch_compile``: plain attention over head dim and length, eager and compiled models."""

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.hardware import datasheet
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.one_device import attention_answers
from cs336sys.report.attention import predicted_eager_memory
from cs336sys.report.course.answer import ALIKE, Answer, compared, compared_headers, extremes
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection, cells_of
from cs336sys.report.course.problem import Command, Target, measurement, sized, training_sweep
from cs336sys.results.model import Cell

_PARTS = ("forward", "backward")
_GRID = {"context": (256, 1024, 4096, 8192, 16384), "head_dim": (16, 32, 64, 128), "dtype": ("fp32",)}


def _context_and_head_dim(cell: Cell) -> tuple[int, int]:
    return cell.configuration["context"], cell.configuration["head_dim"]


def pytorch_attention(answer: Answer) -> None:
    selections = answer.find("attn", _GRID, implementation=("eager", "model"))
    if not selections:
        return
    keys = ("implementation", "context", "head_dim", "forward_ms", "backward_ms", "held_gib", "predicted_held_gib")
    answer.show(selections, "attn", *keys, "peak_gib", "status", medians=True)
    cells = cells_of(selections)
    shapes = sorted(set(map(_context_and_head_dim, cells)))
    for name in dict.fromkeys(cell.configuration["implementation"] for cell in cells):
        mine = [cell for cell in cells if cell.configuration["implementation"] == name]
        measured = sorted((cell for cell in mine if cell.status == "ok"), key=_context_and_head_dim)
        for part in _PARTS if measured else ():
            rows = [cell.configuration | {"median": cell.samples[part].median} for cell in measured]
            answer.say(f"times of {name}", extremes(rows, "median"), part=part)
        answer.say_failures(mine, f"attention of {name}")
        for context, head_dim in shapes:
            if (context, head_dim) not in map(_context_and_head_dim, mine):
                answer.lack(f"attention of {name}", context=context, head_dim=head_dim)
        _say_workspace(answer, measured)
    _say_growth(answer, cells)
    _say_first_out_of_memory(answer, cells, selections)
    answer.say("what removes the cost")
    # Of one length there is nothing over which to draw.
    answer.draw(group for group in selections if len({_context_and_head_dim(cell)[0] for cell in group.measured}) > 1)


def _say_growth(answer: Answer, cells: Sequence[Cell]) -> None:
    """Report how memory saved for the backward pass grows with the context, at the largest head dim."""
    largest = max(cell.configuration["head_dim"] for cell in cells)
    saved = [cell.configuration | cell.derived for cell in _with_memory(cells)]
    saved = sorted((row for row in saved if row["head_dim"] == largest), key=itemgetter("context"))
    series = [(row["context"], row["held_gib"]) for row in saved if row["implementation"] == saved[0]["implementation"]]
    if len(series) > 1:
        steps = [{"grown": after[1] / before[1], "longer": after[0] / before[0]} for before, after in pairwise(series)]
        squared = steps[-1]["grown"] > steps[-1]["longer"] * (1 + ALIKE)
        name = "held with the square" if squared else "held with the context"
        answer.say(name, saved[0], steps=steps, held=[gib for _, gib in series])


def _with_memory(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status == "ok" and cell.derived.get("held_gib") is not None]


def _say_workspace(answer: Answer, measured: Sequence[Cell]) -> None:
    """Say that the first shape holds more than its tensors, which bends the curve of short contexts."""
    cells = _with_memory(measured[:2])
    surplus = [cell.derived["held_gib"] - predicted_eager_memory(cell).held / GIB for cell in cells]
    # More than 30 MiB besides the attention's tensors is no rounding: cuBLAS has 32 MiB or more.
    if len(surplus) == 2 and surplus[0] - surplus[1] > 30 / 1024:
        more = surplus[0] - surplus[1]
        answer.say("workspace", cells[0].configuration, held=cells[0].derived["held_gib"], more=more)


def _say_first_out_of_memory(answer: Answer, cells: Sequence[Cell], selections: Sequence[Selection]) -> None:
    """The smallest shape that did not fit, tensor by tensor; where all did, the first that cannot."""
    run = selections[0].invocation.run
    shape = cells[0].configuration
    sequences, dtype = shape["batch_size"] * shape["heads"], shape["dtype"]
    settings = {"causal": shape["causal"], "implementation": "eager"}

    def needed(context: int, head_dim: int):
        return attention_memory(sequences, context, head_dim, dtype, **settings)

    failed = [_context_and_head_dim(cell) for cell in cells if cell.status == "oom"]
    sheet = datasheet(run.machine.get("gpu") or "") if run is not None else None
    if failed:
        context, head_dim = min(failed, key=lambda shape: needed(*shape).peak)
        answer.say("out of memory", context=context, head_dim=head_dim)
    elif sheet is None:
        answer.say("nothing out of memory")
        return
    else:
        contexts, head_dims = zip(*map(_context_and_head_dim, cells), strict=True)
        context, head_dim = max(contexts), min(head_dims)
        while needed(context, head_dim).peak <= sheet.memory_bytes:
            context *= 2
        answer.say("no shape out of memory", capacity=sheet.memory_bytes / GIB, context=context, head_dim=head_dim)
    memory = needed(context, head_dim)
    answer.say("memory held", held=memory.held / GIB, peak=memory.peak / GIB, probabilities=memory.probabilities / GIB)
    answers = attention_answers(sequences, context, head_dim, dtype, **settings)
    answer.derive(answers, "accounting", f"{sequences} x {context} x {head_dim} {dtype}, tensor by tensor")


# One run for both problems.
_ATTENTION = "attn --implementation eager,compiled,model"
_SMALL_ATTENTION = f"{_ATTENTION} --context 64,128 --head-dim 16,32 --steps 10"
attention_commands = sized(measurement(_ATTENTION, 180), measurement(_SMALL_ATTENTION, 20))


def compiled_attention(answer: Answer) -> None:
    rows = []
    groups = answer.find("attn", _GRID, implementation=("eager", "compiled"))
    for group in groups:
        eager = {_context_and_head_dim(cell): cell for cell in group.of(implementation="eager")}
        compiled = group.of(implementation="compiled")
        pairs = [(eager[shape], cell) for cell in compiled if (shape := _context_and_head_dim(cell)) in eager]
        answer.measured_by([group] if pairs else [])
        rows += [after.configuration | compared(before, after, _PARTS) for before, after in pairs]
    if not rows:
        return
    rows.sort(key=lambda row: (row["head_dim"], row["context"]))
    for part in _PARTS:
        shapes = [row | row[part] for row in rows]
        count = sum(row["speedup"] > 1 + ALIKE for row in shapes)
        answer.say("compiled", extremes(shapes, "speedup"), part=part, count=count, of=len(rows))
    for group in groups:
        answer.say_failures(group.cells, "attention shape")
    headers = {"context": "context", "head_dim": "head dim", **compared_headers(_PARTS, ", eager", ", compiled")}
    answer.add_table("compiled", "compiled attention against eager, medians of the same run", headers, rows)


def compiled_model(answer: Answer) -> None:
    sizes = answer.handout.sizes
    plain = {name: values for name, values in PLAIN_OF_ANY_MODE.items() if name != "compile"}
    wanted = {"size": sizes, "context": (512,), "batch_size": (4,)}
    by_setting: dict[tuple, dict[str, Any]] = {}
    for group in answer.find_each("bench", wanted, mode=("train", "forward"), **plain):
        for row in _compiled_rows(group):
            by_setting.setdefault((row["size"], row["precision"], row["compile"]), row | {"group": group})
    # A compiled model is the answer, compiled blocks where there is none.
    whole = [row for row in by_setting.values() if row["compile"] == "model"]
    rows = sorted(whole or by_setting.values(), key=lambda row: (row["precision"] != "fp32", row["parameters"]))
    if not rows:
        return
    for row in rows:
        answer.say("compiled model", row, is_whole=row["compile"] == "model")
    if len(rows) > 1:
        forwards, steps = ([row[f"{phase}_speedup"] for row in rows] for phase in ("forward", "step"))
        answer.say("altogether", forwards=forwards, steps=steps)
    headers = {name: name for name in ("size", "precision", "compile")}
    headers |= compared_headers(("forward", "backward", "optimizer", "step"), ", vanilla", ", compiled")
    answer.add_table("compile", "vanilla and compiled model, medians of the same run", headers, rows)
    answer.measured_by(row["group"] for row in rows)
    absent = [size for size in sizes[:-1] if all(row["size"] != size for row in rows)]
    if not whole:
        answer.lack("whole model")
    elif absent:
        answer.lack("whole model of", sizes=absent)


def _compiled_rows(group: Selection) -> list[dict]:
    rows = []
    for cell in group.measured:
        names = cell.configuration
        alike = {name: names[name] for name in ("size", "precision", "mode", "context")}
        vanilla = group.first(compile="off", **alike)
        if names["compile"] == "off" or vanilla is None:
            continue
        phases = cell.samples.keys() & {"forward", "backward", "optimizer", "step"}
        rows.append({**names, "parameters": cell.derived["parameters"], **compared(vanilla, cell, phases)})
    return rows


def compiled_model_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes[:-1], compile=("off", "model"))]
