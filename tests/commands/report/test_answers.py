"""The sentences of the write-ups: they answer what is asked, and follow the numbers, as ``figures.txt`` has them.

What the site's pages say is in test_documents; here each expression changes a figure of the saved results, and below it
stands what is said then (tests/written_figures.py).
"""

# Further names are used in figures.txt.
# ruff: noqa: F401

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from course_answers import (
    answers,
    changed,
    having,
    kept,
    of_run,
    saved,
    scaled,
    told,
    with_derived,
    with_measured,
    words,
)
from written_figures import read_figures, rows_of, write_figures

from cs336sys.commands.report.answer import compare_speed
from cs336sys.commands.report.document import build_document, typed_command
from cs336sys.commands.report.evidence import evidence_of
from cs336sys.commands.report.handouts import PROBLEMS
from cs336sys.commands.report.problem import HANDOUTS, Target
from cs336sys.commands.report.problems import code
from cs336sys.results.model import Results, Samples

PATH = Path(__file__).with_name("figures.txt")
OVERLAP = "ddp_overlap_individual_parameters_benchmarking"
STEADY = [10.0 + number * 7 % 10 / 1000 for number in range(10)]


def about(part, year, files, name, letter="", tests=None):
    """Return the sentences of an answer that have this part."""
    return [
        sentence
        for block in answers(year, files, name, letter, tests)
        for sentence in block.sentences
        if part in sentence
    ]


def times(*measured):
    return Samples("ms", "cpu clock", measured)


def missing(year, files, name, letter=""):
    return [block.missing for block in answers(year, files, name, letter)]


def ok(cell):
    return cell.status == "ok"


def failed(cell):
    return replace(cell, status="oom", samples={}, derived={}, reason="CUDA out of memory")


def configured(cell, **settings):
    return replace(cell, configuration=cell.configuration | settings)


def of_contexts(**step_ms):
    """Return one size at several contexts, each with its steps."""
    (file,) = kept(saved("bench-h200"), having(size="small", precision="fp32"))
    cells = [
        configured(with_measured(file.cells[0], "step", *steps), context=int(name.removeprefix("of_")))
        for name, steps in step_ms.items()
    ]
    return [Results(file.runs, tuple(cells))]


def stalled_at_first(cell):
    first, *others = cell.samples["step"].measured
    return with_measured(cell, "step", 2 * first, *others)


def stalled_once(cell):
    return with_measured(with_measured(cell, "synchronize", 1.0, 1.0, 1.0, 4.0), "step", 10.0, 10.0, 10.0, 16.0)


def noisy_step(series, *changes_ms):
    """Return a change of a cell's steps to the median of a series, more or less so many milliseconds."""
    return lambda cell: with_measured(cell, "step", *(cell.samples[series].median + change for change in changes_ms))


def with_kernels(rename):
    """The profiles of nsys, with other names of kernels."""

    def renamed(cell):
        kernels = [kernel | {"kernel": rename(kernel)} for kernel in cell.derived["profile"]["kernels"]]
        return with_derived(cell, profile=cell.derived["profile"] | {"kernels": kernels})

    return changed(saved("nsys-h200"), ok, renamed)


def other_products_backward(kernel):
    is_product = "xmma" in kernel["kernel"] and kernel["range"] == "backward"
    return f"elementwise_{hash(kernel['kernel'])}" if is_product else kernel["kernel"]


def without_overlap(cell):
    return with_derived(cell, timeline=cell.derived["timeline"] | {"overlap_ms": 0.0})


def beside_another_run(*settings_of_cells):
    """Return the saved run, and another with cells of these settings, times a factor, in other settings."""
    (file,) = saved("bench-h200")
    cells = [
        configured(scaled(next(filter(having(size="small", **settings), file.cells)), factor), **others)
        for settings, factor, others in settings_of_cells
    ]
    return [file, of_run("b", file, *cells)]


def forward_times(block):
    """Return those of the rows of small: before, and now."""
    rows = [row for row in block.tables[0].rows if row.get("size", "small") == "small"]
    return [(row.get("precision"), round(row["forward_before_ms"], 2), round(row["forward_ms"], 2)) for row in rows]


def peaks(**gib):
    """Return checkpoints that were measured to hold so much."""
    (file,) = kept(saved("memprof-h200"), having(checkpointing="block"))
    cells = [
        configured(with_derived(file.cells[0], peak_gib=peak), checkpointing=name.replace("_", "="))
        for name, peak in gib.items()
    ]
    return [Results(file.runs, tuple(cells))]


def faster_board():
    """Return the board's saved run, and one of a cell with the same settings that took a tenth of the time."""
    (file,) = saved("board-h200")
    again = scaled(next(filter(ok, file.cells)), 0.1)
    return [file, of_run("b", file, again, arguments=("shard", "--board", "--steps", "9"))]


def one_larger(cell):
    """The second of the largest allocations has a MiB more."""
    largest = [
        kind | {"size": kind["size"] + 2**20 * (number == 1)} for number, kind in enumerate(cell.derived["largest"])
    ]
    return with_derived(cell, largest=sorted(largest, key=lambda kind: -kind["size"]))


def without_reserved(cell):
    return with_derived(cell, phases=[phase | {"reserved": None} for phase in cell.derived["phases"]])


def norms_in(**dtypes):
    """Return cells of the toy model whose layer norms have these dtypes, by precision."""
    return changed(
        saved("precision-h200"),
        lambda cell: "loss_function" in cell.configuration,
        lambda cell: with_derived(cell, layer_norm=dtypes[cell.configuration["precision"]]),
    )


def on_cpu(files):
    """Return the files as those of a machine without a GPU."""
    machine = next(iter(files[0].runs.values())).machine | {"gpu": None, "cpu": "Some CPU"}
    return [of_run("cpu", file, *file.cells, machine=machine) for file in files]


def outcomes_of_fsdp(correctness):
    return {"test_fsdp_correctness[fp32]": correctness, "test_fsdp_gradient_sync[fp32]": "passed"}


def commands_of_size(size):
    """Return what the first problem's parts lack and measure with, of another size than its results."""
    target = Target(HANDOUTS[2025], size, "cpu")
    document = build_document(PROBLEMS[2025][:1], evidence_of(saved("bench-fp16-h200"), {})[0], target)
    by_letter = {section.letter: section for section in document.problems[0][1]}
    return [*by_letter["b"].answers[0].missing, *by_letter["c"].measuring_lines]


@pytest.mark.parametrize(("expression", "rows"), list(read_figures(PATH)), ids=lambda value: str(value)[:60])
def test_answers_follow_the_numbers(expression, rows):
    assert rows_of(expression, globals()) == rows


@pytest.mark.parametrize("name", sorted({one.name for one in vars(code).values() if isinstance(one, code.Code)}))
def test_code_is_where_an_answer_says(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


if __name__ == "__main__":
    write_figures(PATH, globals())
