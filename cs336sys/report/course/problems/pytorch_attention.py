"""``pytorch_attention`` and ``torch_compile``: plain attention over head dim and length, eager and compiled models."""

from typing import Any

from cs336sys.accounting.activations import attention_memory
from cs336sys.accounting.hardware import datasheet
from cs336sys.accounting.one_device import attention_answers
from cs336sys.report.course.answer import Answer, compared, facts_of, measured, where
from cs336sys.report.course.evidence import PLAIN_OF_ANY_MODE, Selection, cells_of
from cs336sys.report.course.problem import Command, Target, measurement, sized, training_sweep
from cs336sys.report.course.problems.benchmarking_script import needed_gib

_GRID = {"context": (256, 1024, 4096, 8192, 16384), "head_dim": (16, 32, 64, 128), "dtype": ("fp32",)}


def _too_large(answer: Answer, groups: list[Selection]) -> dict[str, Any]:
    """The smallest shape that did not fit, or where all did the first that cannot, and what attention holds there."""
    # Of one length there is nothing over which to draw.
    answer.draw(group for group in groups if len({cell.configuration["context"] for cell in group.measured}) > 1)
    cells = sorted(map(facts_of, cells_of(groups)), key=lambda cell: (cell["context"], cell["head_dim"]))
    run = groups[0].invocation.run
    sheet = datasheet(run.machine.get("gpu") or "") if run is not None else None
    out = where(cells, status="oom")
    shape = out[0] if out else {**cells[-1], "head_dim": min(cell["head_dim"] for cell in cells)}
    setting = [shape["batch_size"] * shape["heads"], shape["context"], shape["head_dim"], shape["dtype"]]
    eager = {"causal": shape["causal"], "implementation": "eager"}
    while not out and sheet and attention_memory(*setting, **eager).peak <= sheet.memory_bytes:
        setting[1] *= 2
    if out or sheet:
        answers = attention_answers(*setting, **eager)
        answer.derive(answers, "accounting", "{} x {} x {} {}, tensor by tensor".format(*setting))
    facts = {"out": out, "sheet": sheet, "context": setting[1], "head_dim": shape["head_dim"]}
    return {**facts, "memory": attention_memory(*setting, **eager)}


pytorch_attention = measured(
    *("attn", "pytorch_attention.pytorch_attention"),
    {"attn": ("forward_ms", "backward_ms", "held_gib", "predicted_held_gib", "peak_gib", "status")},
    wanted=lambda handout: _GRID,
    required={"implementation": ("eager", "model")},
    medians=True,
    facts=_too_large,
)

# One run for both problems.
_ATTENTION = "attn --implementation eager,compiled,model"
_SMALL_ATTENTION = f"{_ATTENTION} --context 64,128 --head-dim 16,32 --steps 10"
attention_commands = sized(measurement(_ATTENTION, 180), measurement(_SMALL_ATTENTION, 20))


def compiled_attention(answer: Answer) -> None:
    groups = answer.find("attn", _GRID, implementation=("eager", "compiled"))
    parts = ("forward", "backward")
    if rows := compared(groups, "implementation", "eager", parts, "head_dim", "context"):
        title = "compiled attention, and eager before it, medians of the same run"
        answer.show_compared(rows, "compiled", title, ("context", "head_dim"), parts)
        answer.write("pytorch_attention.compiled_attention", rows=rows)
        answer.write_failures(cells_of(groups), "{implementation} at context {context}, head dim {head_dim}")


def compiled_model(answer: Answer) -> None:
    sizes = answer.handout.sizes
    plain = {name: values for name, values in PLAIN_OF_ANY_MODE.items() if name != "compile"}
    wanted = {"size": sizes, "context": (512,), "batch_size": (4,), "precision": ("fp32",)}
    phases = ("forward", "backward", "optimizer", "step")
    groups = answer.find_each("bench", wanted, mode=("train", "forward"), **plain)
    rows = compared(groups, "compile", "off", phases, "parameters")
    # A compiled model is the answer, compiled blocks where there is none.
    whole: list[Any] = where(rows, compile="model")
    if rows := whole or rows:
        title = "compiled model, and vanilla before it, medians of the same run"
        more = ("step_before_std_ms", "step_std_ms", "peak_before_gib", "peak_gib")
        answer.show_compared(rows, "compile", title, ("size", "precision", "compile"), phases, *more)
        # The plan leaves the largest out: a plain step of it may not fit.
        *_, last_compiled, largest = sizes
        is_left_out = where(rows, size=last_compiled) and not where(rows, size=largest)
        left_out = [(largest, needed_gib(largest, 512))] if is_left_out else []
        answer.write("pytorch_attention.compiled_model", rows=rows, is_whole=bool(whole), left_out=left_out)
        answer.lack_unmeasured("the whole model compiled of {called}", whole, {"size": sizes[:-1]})


def compiled_model_commands(target: Target) -> list[Command]:
    return [training_sweep(target, "bench", target.handout.sizes[:-1], compile=("off", "model"))]
