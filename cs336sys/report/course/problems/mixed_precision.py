"""``mixed_precision_accumulation`` and ``benchmarking_mixed_precision``: what low precision does, and what it gains."""

from collections.abc import Sequence

from cs336sys.report.course.evidence import PLAIN, Evidence, Found, plain_table
from cs336sys.report.course.problem import Answer, Command, Handout, Part, Problem, Target, runs_of, simple
from cs336sys.report.course.problems.benchmarking_script import timing_commands
from cs336sys.report.course.words import failures, joined, ms, percent, speed, spread, times, trend
from cs336sys.report.table import Column
from cs336sys.results.model import Cell
from cs336sys.workload import Workload

_PARTS = {
    "parameters": "the parameters inside autocast",
    "fc1": "the output of fc1",
    "layer_norm": "the output of layer norm",
    "logits": "the logits",
    "loss": "the loss",
    "gradients": "the gradients",
}


def _precision(evidence: Evidence, setting: str) -> list[Found]:
    """Cells that name this setting, of a GPU rather than of a CPU."""
    groups = evidence.find("precision", {"device": ("cuda",)})
    named = [Found(group.invocation, [c for c in group.cells if setting in c.configuration]) for group in groups]
    return [group for group in named if group.cells]


def accumulation(evidence: Evidence, handout: Handout) -> Answer | None:
    found = _precision(evidence, "accumulation")
    if not found:
        return None
    sums = {cell.configuration["accumulation"]: cell.derived for cell in found[0].measured}
    listed = [
        f"{name} gives {sum_['sum']:.6g} (off by {percent(abs(sum_['relative_error_percent']))})"
        for name, sum_ in sums.items()
    ]
    sentences = [f"1000 times 0.01 is 10: {joined(listed)}."]
    worst = max(sums, key=lambda name: abs(sums[name]["relative_error_percent"]))
    best = min(sums, key=lambda name: abs(sums[name]["relative_error_percent"]))
    sentences.append(
        f"The worst is {worst}, the best {best}: "
        f"{times(abs(sums[worst]['relative_error_percent'] / (sums[best]['relative_error_percent'] or 1e-12)))} "
        "the error."
    )
    mixed = [abs(sum_["relative_error_percent"]) for name, sum_ in sums.items() if "fp32 +=" in name and "16" in name]
    low = [abs(sum_["relative_error_percent"]) for name, sum_ in sums.items() if name.startswith("fp16 +=")]
    if mixed and low and max(mixed) < min(low):
        sentences.append(
            f"What counts is the dtype of the sum: fp16 terms in an fp32 sum are off by {percent(max(mixed))}, the "
            "error of 0.01 itself in fp16, while an fp16 sum rounds again at every step."
        )
    return Answer(sentences, found[0].table("accumulation"), {}, runs_of(found[:1]))


def dtypes(evidence: Evidence, handout: Handout) -> Answer | None:
    found = _precision(evidence, "loss_function")
    if not found:
        return None
    cells = [cell for cell in found[0].measured if cell.configuration["loss_function"] == "cross-entropy"]
    sentences = []
    for cell in sorted(cells, key=lambda cell: cell.configuration["precision"] != "fp16"):
        of_part = ", ".join(f"{words} {cell.derived[name]}" for name, words in _PARTS.items())
        sentences.append(f"Autocast to {cell.configuration['precision']}: {of_part}.")
    sentences += _of_cpu(found[0].cells)
    sentences += failures(found[0].cells, lambda cell: f"autocast to {cell.configuration['precision']}")
    return Answer(sentences, found[0].table("autocast"), {}, runs_of(found[:1]))


def _of_cpu(cells: list[Cell]) -> list[str]:
    if all(cell.configuration.get("device") == "cuda" for cell in cells):
        return []
    return ["This is a CPU's answer, and not the one asked for: on a GPU autocast keeps layer norm in fp32."]


def layer_norm(evidence: Evidence, handout: Handout) -> Answer | None:
    found = _precision(evidence, "loss_function")
    cells = [cell for group in found[:1] for cell in group.measured]
    if not cells:
        return None
    kept = {cell.configuration["precision"]: cell.derived["layer_norm"] for cell in cells}
    words = joined(f"{dtype} under {precision} autocast" for precision, dtype in kept.items())
    same = len(set(kept.values())) == 1 or all(precision == dtype for precision, dtype in kept.items())
    sentences = [
        f"Layer norm's output is {words}, while fc1's is {joined(dict.fromkeys(c.derived['fc1'] for c in cells))}.",
        "Sensitive are its statistics: mean and variance are sums over many elements, and squares overflow fp16 above "
        "256 and vanish below 0.0002, as does a variance that the reciprocal root then divides by.",
        "bf16 has the range of fp32, so nothing overflows, but with 7 mantissa bits its sums are coarser still: the "
        + (
            "statistics still want fp32, and autocast treats both alike."
            if same
            else "statistics still want fp32, yet autocast treats the two differently here."
        ),
    ]
    norms = {cell.configuration["precision"]: cell.derived.get("rms_norm") for cell in cells}
    sentences.append(
        f"RMSNorm in its place gives {joined(f'{dtype} ({name})' for name, dtype in norms.items() if dtype)}."
    )
    return Answer([*sentences, *_of_cpu(cells)], (), {}, runs_of(found[:1]))


def precision_commands(target: Target) -> list[Command]:
    return [simple(target, "precision", seconds=5)]


def by_size(evidence: Evidence, handout: Handout) -> Answer | None:
    wanted = {"size": handout.sizes, "context": (512,), "batch_size": (4,), "warmup": (5,)}
    settings = {"precision": ("fp32", "bf16", "fp16"), **PLAIN}
    # A half precision is compared with the fp32 of its own run, which another run may have measured, too.
    pairs: dict[tuple[str, str], tuple[dict, Found]] = {}
    for group in evidence.find_each("bench", wanted, **settings):
        for row in _pairs(group):
            pairs.setdefault((row["size"], row["precision"]), (row, group))
    if not pairs:
        return None
    sentences = []
    rows = sorted((row for row, _ in pairs.values()), key=lambda row: (row["flops"], row["precision"]))
    found = evidence.find("bench", wanted, **settings)
    for precision in sorted({row["precision"] for row in rows}):
        sentences += _gain_words(precision, [row for row in rows if row["precision"] == precision], handout)
    every = [cell for group in found for cell in group.cells]
    sentences += failures(every, lambda cell: f"{cell.configuration['size']} in {cell.configuration['precision']}")
    columns = (
        Column("size", "size"),
        Column("precision", "precision"),
        *(
            column
            for phase in ("forward", "backward", "step")
            for column in (
                Column(f"{phase}_fp32_ms", f"{phase} in fp32", "ms"),
                Column(f"{phase}_ms", phase, "ms"),
                Column(f"{phase}_speedup", "faster", "ratio"),
            )
        ),
    )
    there = {row["size"] for row in rows} | {cell.configuration["size"] for cell in every if cell.status != "ok"}
    missing = [f"{handout.called(size)} in fp32 and bf16" for size in handout.sizes if size not in there]
    title = "full against mixed precision, medians of the same run"
    groups = [group for _, group in pairs.values()] + [group for group in found if not group.measured]
    return Answer(sentences, plain_table("precisions", title, columns, rows), {}, runs_of(groups), missing)


def _gain_words(precision: str, of_precision: Sequence[dict], handout: Handout) -> list[str]:
    """What each pass and the whole step gain, how that changes with the size, and where the CPU limits it."""
    sentences = []
    for phase in ("forward", "backward"):
        words = [
            f"{handout.called(row['size'])} {ms(row[f'{phase}_fp32_ms'])} to {ms(row[f'{phase}_ms'])} "
            f"({speed(row[f'{phase}_speedup'])})"
            for row in of_precision
        ]
        sentences.append(f"The {phase} pass in {precision} against fp32: {joined(words)}.")
    ratios = [row["step_speedup"] for row in of_precision]
    if len(ratios) > 1:
        sentences.append(
            f"Over the sizes the gain of the whole step {trend(ratios)}, {spread(ratios)}: "
            f"from {times(ratios[0])} ({of_precision[0]['size']}) to {times(ratios[-1])} "
            f"({of_precision[-1]['size']})."
        )
    idle = [row["size"] for row in of_precision if row["idle_percent"] is not None and row["idle_percent"] > 20]
    if idle:
        sentences.append(
            f"In {precision} the GPU waits for the CPU's launches in {joined(idle)}, so that {_those(idle)} cannot "
            "gain more by computing faster."
        )
    return sentences


def _those(names: list[str]) -> str:
    return "it" if len(names) == 1 else "they"


def _pairs(group: Found) -> list[dict]:
    """Each half precision beside fp32, of the same run."""
    rows = []
    for size in dict.fromkeys(cell.configuration["size"] for cell in group.measured):
        full = next(iter(group.of(size=size, precision="fp32")), None)
        for cell in group.of(size=size):
            precision = cell.configuration["precision"]
            if full is None or precision == "fp32":
                continue
            step, busy = cell.samples["step"].median, cell.derived.get("gpu_busy_ms")
            row = {"size": size, "precision": precision, "idle_percent": busy and 100 * (1 - busy / step)}
            row["flops"] = Workload.from_configuration(cell.configuration).flops
            for phase in ("forward", "backward", "step"):
                before, after = full.samples[phase].median, cell.samples[phase].median
                row |= {f"{phase}_fp32_ms": before, f"{phase}_ms": after, f"{phase}_speedup": before / after}
            rows.append(row)
    return rows


MIXED_PRECISION_ACCUMULATION = Problem(
    "mixed_precision_accumulation", "Mixed-precision accumulation", (Part("", accumulation, precision_commands),)
)
BENCHMARKING_MIXED_PRECISION = Problem(
    "benchmarking_mixed_precision",
    "Benchmarking mixed precision",
    (
        Part("a", dtypes, precision_commands),
        Part("b", layer_norm, precision_commands),
        Part("c", by_size, timing_commands),
    ),
)
