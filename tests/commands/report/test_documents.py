"""The write-ups: every problem is there in the handout's order, machines stay apart, and pages are whole."""

import importlib
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from course_answers import RESULTS, answers, changed, document, of_run, saved, scaled, words, written
from typer.testing import CliRunner

from cs336sys.cli import app, module_of
from cs336sys.commands.report import problems
from cs336sys.commands.report.answer import templates
from cs336sys.commands.report.document import document_text, typed_command
from cs336sys.commands.report.evidence import machine_name
from cs336sys.commands.report.handouts import PROBLEMS
from cs336sys.errors import CapabilityError
from cs336sys.results.model import Results
from cs336sys.tables.page import find_browser, print_page
from cs336sys.tables.table import grid_of


@pytest.fixture(scope="module")
def everything():
    return saved(*sorted(path.name.removesuffix(".jsonl.gz") for path in RESULTS.glob("*.jsonl.gz")))


@pytest.mark.parametrize("year", [2025, 2026])
def test_named_commands_give_the_missing_data(year, everything, monkeypatch):
    """ "gloo with 4 ranks ... comes from `--world-size 2`": what a command would measure is what is missing."""
    runs = {run.run_id: run for file in everything for run in file.runs.values()}
    without_tests = document(year, everything)
    assert re.fullmatch(r"(\d+) of \1 parts answered, \d of them in part", without_tests.count_words)
    blocks = [(problem.name, block) for problem, block in _blocks(without_tests) if block.missing]
    assert blocks
    for problem, block in blocks:
        # Neither what earlier versions did not record nor more steps are in a saved cell.
        longer = ("the first step", "protocol")
        missing = [one for one in block.missing if "`cs336sys" in one and not any(word in one for word in longer)]
        measured = []
        for line in re.findall("`cs336sys (.*?)`", " ".join(block.missing)):
            command, *options = line.split()
            assert CliRunner().invoke(app, [command, *options, "--dry-run"]).exit_code == 0, line
            asked = []
            module = importlib.import_module(module_of(command))
            monkeypatch.setattr(module, "run_sweep", partial(_note, asked))
            CliRunner().invoke(app, [command, *options])
            assert asked, line
            here = [
                cell
                for file in everything
                for cell in file.cells
                if (cell.command, cell.status, machine_name(runs.get(cell.run_id))) == (command, "ok", block.machine)
            ]
            measured += [_like(here, settings) for settings in asked]
        later = document(year, [*everything, Results(runs, tuple(measured))], problem)
        assert not {one for _, block in _blocks(later) for one in block.missing} & set(missing)


def _blocks(written):
    return [(problem, one) for problem, sections in written.problems for part in sections for one in part.answers]


def _note(asked, command, measure, configurations, *rest, **more):
    asked.extend(configurations)
    raise KeyboardInterrupt


def _like(cells, settings):
    """A measured cell of these settings: the saved one that has most of them."""

    def alike(cell):
        return sum(cell.configuration.get(name) == value for name, value in settings.items())

    return replace(max(cells, key=alike), configuration=settings)


@pytest.mark.parametrize("year", [2025, 2026])
def test_the_pages_of_the_site_are_what_is_written_today(year):
    """Every sentence, number, command and caption of the two write-ups."""
    of_all = written(year)
    assert of_all.faults == []
    page = re.sub(r'<figure>.*?alt="(.*?)".*?</figure>', r"<i>\1</i>", (RESULTS / f"report-{year}.html").read_text())
    today = document_text(of_all, "html", lambda name, draw: f"<i>{name}</i>")
    update = f"cs336sys report --year {year} --from docs/results --output docs/results/report-{year}.html"
    assert today.splitlines() == page.splitlines(), update
    for text in (document_text(of_all, format, lambda name, draw: None) for format in ("markdown", "latex")):
        assert all(problem.name in text.replace(r"\_\allowbreak{}", "_") for problem in PROBLEMS[year])
    typst = document_text(of_all, "typst", lambda name, draw: None)
    assert typst.count("\n== ") == len(PROBLEMS[year])
    # Between text and code Typst would print a space more than they have.
    assert not re.search(r"^#text.* #raw", typst, re.M)
    # Tables stay where they are in the text.
    latex = document_text(of_all, "latex", lambda name, draw: None)
    assert latex.count(r"\begin{table}[H]") == latex.count(r"\begin{table}") > 0


@pytest.mark.parametrize("year", [2025, 2026])
def test_the_page_of_the_course_names_every_part_in_order_and_commands_that_were_run(year, everything):
    text = (RESULTS.parent / "course.md").read_text().split(f"\n## {year}\n")[1].split("\n## ")[0]
    rows = re.findall(rf"^\| \[(\w+)\]\(results/report-{year}\.html#\1\)([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    letters = {name: "" for name, _, _ in rows}
    for name, parts, answered_by in rows:
        letters[name] += "".join(re.findall(r"\((\w)\)", parts.strip() or answered_by))
    asked = {problem.name: "".join(part.letter for part in problem.parts) for problem in PROBLEMS[year]}
    assert list(letters.items()) == list(asked.items())
    typed = {typed_command(run) for results in everything for run in results.runs.values()}
    measured = {line.replace("--no-predict --no-predict", "--no-predict") for line in typed}
    named = {line for _, _, cell in rows for line in re.findall(r"`(cs336sys [^`]+)`", cell)}
    arithmetic = {line for line in named if line.startswith("cs336sys account ") or line.endswith(" --help")}
    assert named - arithmetic <= measured
    # The model that a handout calls xl alone, and not the other year's.
    assert not any(year == 2026 and "--size xl " in f"{line} " for line in named)


def test_cells_of_two_machines_are_kept_apart():
    (file,) = saved("bench-h200")
    machine = next(iter(file.runs.values())).machine | {"gpu": "NVIDIA B200"}
    other = of_run("b", file, *(scaled(cell, 0.5) for cell in file.cells), machine=machine)
    blocks = answers(2025, [file, other], "benchmarking_script", "b")
    assert [block.machine.split(",")[0] for block in blocks] == ["NVIDIA H200", "NVIDIA B200"]
    assert "small 19.08 ms" in blocks[0].sentences[0]
    assert "small 9.540 ms" in blocks[1].sentences[0]


def test_the_machine_that_most_was_measured_on_comes_first_and_says_alone_what_needs_no_cells():
    """Whatever the order of the files: one CPU with a single command among results of a GPU."""
    (other,) = saved("precision-h200")
    (key, run) = next(iter(other.runs.items()))
    cpu = Results({key: replace(run, machine=run.machine | {"gpu": None, "cpu": "Some CPU"})}, other.cells)
    written = document(2025, [cpu, *saved("bench-h200")])
    assert [machine.split(",")[0] for machine in written.machines] == ["NVIDIA H200", "Some CPU"]
    ((_, (usage, *_)), *_) = written.problems
    assert len(usage.answers) == 1
    assert "The script is `cs336sys bench`" in words(usage.answers)


def test_cells_that_lack_what_an_answer_needs_are_named_and_lose_nothing_else():
    files = saved("bench-h200", "ddp-fp32-h200")
    broken = changed(files, lambda cell: cell.command == "bench", lambda cell: replace(cell, samples={}))
    written = document(2025, broken, "benchmarking_script", "naive_ddp_benchmarking")
    assert any("benchmarking_script (b)" in fault for fault in written.faults)
    assert written.problems[1][1][0].answers


def test_every_block_of_the_templates_is_written_and_names_known_filters():
    """A block that nobody writes, or a filter that does not exist, would show only in a write-up that needs it."""
    environment = templates()
    sources = "".join(path.read_text() for path in Path(problems.__path__[0]).parent.rglob("*.py"))
    for name in environment.list_templates(extensions=["jinja"]):
        blocks = environment.get_template(name).blocks
        # The parts of a series are named by their blocks alone.
        assert not [
            block for block in blocks if not re.search(rf'"({name.removesuffix(".jinja")}\.)?{block}"', sources)
        ]


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="needs pdftotext")
def test_printed_page_has_every_sentence_column_and_command(tmp_path):
    """Printed, 85 of 102 items of a page were closed, or cut at the right."""
    try:
        browser = find_browser("--output")
    except CapabilityError as error:
        pytest.skip(str(error))
    files = saved("nsys-h200", "memprof-h200", "bench-h200", "ddp-2.7b-fp32-h200", "shard-2.7b-fp32-h200")
    names = ("nsys_profile", "memory_profiling", "torch_compile", "naive_ddp_benchmarking")
    written = document(2026, files, *names, "optimizer_state_sharding_accounting")
    path = tmp_path / "writeup.pdf"
    path.write_bytes(print_page(document_text(written, "html", lambda name, draw: None), browser))
    text, boxes = (
        subprocess.run(["pdftotext", option, path, "-"], capture_output=True, text=True, check=True).stdout
        for option in ("-raw", "-bbox")
    )
    printed = re.sub(r"\s", "", text)
    expected = []
    for _, block in _blocks(written):
        expected += [line.replace("`", "") for line in (*block.sentences, *block.missing, *block.commands)]
        for table in block.tables:
            grid = grid_of(table)
            expected += [table.title, *table.all_notes, *(word for header in grid.headers for word in header.split())]
            expected += [word for row in grid.rows for cell in row for word in cell.split()]
    assert len(expected) > 500
    assert [line for line in expected if re.sub(r"\s", "", line) not in printed] == []
    (width,) = set(re.findall(r'<page width="([\d.]+)"', boxes))
    assert max(map(float, re.findall(r'xMax="([\d.]+)"', boxes))) < float(width)


def test_pdf_without_a_browser_says_how_to_print_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = CliRunner().invoke(app, ["report", "--year", "2026", "--run", "--output", str(tmp_path / "writeup.pdf")])
    assert result.exit_code == 3
    assert "write a page with a name in .html, open it in any browser and print it to a PDF" in result.stderr
