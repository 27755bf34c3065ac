"""``torch_compile``: attention and the whole model, vanilla and compiled."""

from cs336sys.report.course.evidence import PLAIN, Evidence, Found, plain_table
from cs336sys.report.course.problem import Answer, Part, Problem, runs_of
from cs336sys.report.course.problems.pytorch_attention import attention_commands, compiled_attention
from cs336sys.report.course.target import Command, Handout, Sweep, Target
from cs336sys.report.course.words import joined, ms, speed, spread
from cs336sys.report.tables import Column


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
