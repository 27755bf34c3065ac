"""``pytorch_attention`` and ``torch_compile``: plain attention over head dim and length, eager and compiled models."""

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.hardware import datasheet
from cs336sys.accounting.one_device import attention_answers
from cs336sys.report.course.answer import Answer, compared, comparison_table, facts_of
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, cells_of
from cs336sys.report.course.problem import Command, Target, measurement, sized, training_sweep

_PARTS = ("forward", "backward")
_GRID = {"context": (256, 1024, 4096, 8192, 16384), "head_dim": (16, 32, 64, 128), "dtype": ("fp32",)}
_LABEL = "{implementation} at context {context}, head dim {head_dim}"


def pytorch_attention(answer: Answer) -> None:
    selections = answer.find("attn", _GRID, implementation=("eager", "model"))
    if not selections:
        return
    keys = ("forward_ms", "backward_ms", "held_gib", "predicted_held_gib", "peak_gib", "status")
    answer.show(selections, "attn", *keys, medians=True, join=True)
    # Of one length there is nothing over which to draw.
    answer.draw(group for group in selections if len({cell.configuration["context"] for cell in group.measured}) > 1)
    cells = sorted(map(facts_of, cells_of(selections)), key=lambda cell: (cell["context"], cell["head_dim"]))
    run = selections[0].invocation.run
    sheet = datasheet(run.machine.get("gpu") or "") if run is not None else None
    shape, out = cells[-1], [cell for cell in cells if cell["status"] == "oom"]
    sequences, dtype = shape["batch_size"] * shape["heads"], shape["dtype"]
    settings = {"causal": shape["causal"], "implementation": "eager"}
    # The smallest shape that did not fit; where all did, the first that cannot.
    context, head_dim = (out or cells)[0 if out else -1]["context"], min(cell["head_dim"] for cell in out or cells)
    while (
        not out
        and sheet
        and attention_memory(sequences, context, head_dim, dtype, **settings).peak <= sheet.memory_bytes
    ):
        context *= 2
    memory = attention_memory(sequences, context, head_dim, dtype, **settings)
    if out or sheet:
        answers = attention_answers(sequences, context, head_dim, dtype, **settings)
        answer.derive(answers, "accounting", f"{sequences} x {context} x {head_dim} {dtype}, tensor by tensor")
    facts = {"out": out, "sheet": sheet, "context": context, "head_dim": head_dim, "memory": memory}
    answer.write("pytorch_attention.pytorch_attention", cells=cells, **facts)
    answer.write_failures(cells_of(selections), _LABEL)
    for name in dict.fromkeys(cell["implementation"] for cell in cells):
        shapes = {key: dict.fromkeys(cell[key] for cell in cells) for key in ("context", "head_dim")}
        answer.lack_unmeasured(_LABEL, cells, {"implementation": (name,), **shapes})


# One run for both problems.
_ATTENTION = "attn --implementation eager,compiled,model"
_SMALL_ATTENTION = f"{_ATTENTION} --context 64,128 --head-dim 16,32 --steps 10"
attention_commands = sized(measurement(_ATTENTION, 180), measurement(_SMALL_ATTENTION, 20))


def compiled_attention(answer: Answer) -> None:
    groups = answer.find("attn", _GRID, implementation=("eager", "compiled"))
    pairs = compared(groups, "implementation", "eager", _PARTS)
    if pairs:
        rows = sorted((row for row, _ in pairs), key=lambda row: (row["head_dim"], row["context"]))
        title = "compiled attention, and eager before it, medians of the same run"
        answer.tables.append(comparison_table("compiled", title, ("context", "head_dim"), _PARTS, rows))
        answer.measured_by(group for _, group in pairs)
        answer.write("pytorch_attention.compiled_attention", rows=rows, parts=_PARTS)
        answer.write_failures(cells_of(groups), _LABEL)


def compiled_model(answer: Answer) -> None:
    sizes = answer.handout.sizes
    plain = {name: values for name, values in PLAIN_OF_ANY_MODE.items() if name != "compile"}
    wanted = {"size": sizes, "context": (512,), "batch_size": (4,)}
    phases = ("forward", "backward", "optimizer", "step")
    pairs = compared(answer.find_each("bench", wanted, mode=("train", "forward"), **plain), "compile", "off", phases)
    # A compiled model is the answer, compiled blocks where there is none.
    whole = [pair for pair in pairs if pair[0]["compile"] == "model"]
    rows = [
        row
        for row, _ in sorted(whole or pairs, key=lambda pair: (pair[0]["precision"] != "fp32", pair[0]["parameters"]))
    ]
    if rows:
        title = "compiled model, and vanilla before it, medians of the same run"
        more = ("step_before_std_ms", "step_std_ms", "peak_before_gib", "peak_gib")
        settings = ("size", "precision", "compile")
        answer.tables.append(comparison_table("compile", title, settings, phases, rows, more))
        answer.measured_by(group for _, group in whole or pairs)
        absent = [size for size in sizes[:-1] if all(row["size"] != size for row in rows)]
        answer.write("pytorch_attention.compiled_model", rows=rows, absent=absent, is_whole=bool(whole))


def compiled_model_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes[:-1], compile=("off", "model"))]
