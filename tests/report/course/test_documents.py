"""The write-ups: every problem is there in the handout's order, machines stay apart, and pages are whole."""

import html.parser
import importlib
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Formatter

import pytest
from course_answers import RESULTS, answers, changed, document, saved, scaled, words
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.report.course import problems
from cs336sys.report.course.answer import FORMATS, LIST_FORMATS, Prose, as_long, change, speed
from cs336sys.report.course.document import typed_command
from cs336sys.report.course.evidence import machine_name
from cs336sys.report.course.handouts import PROBLEMS
from cs336sys.report.course.writing import document_text
from cs336sys.results.model import Results

# Names and letters as the handouts have them, 2025 (1.0.5) and 2026 (26.1): "Problem (name)", then "(a)", "(b)", ...
ASKED = {
    2025: {
        "benchmarking_script": "abc",
        "nsys_profile": "abcde",
        "mixed_precision_accumulation": "",
        "benchmarking_mixed_precision": "abc",
        "memory_profiling": "abcde",
        "pytorch_attention": "a",
        "torch_compile": "ab",
        "flash_forward": "abc",
        "flash_backward": "",
        "flash_benchmarking": "a",
        "distributed_communication_single_node": "",
        "naive_ddp": "",
        "naive_ddp_benchmarking": "",
        "minimal_ddp_flat_benchmarking": "",
        "ddp_overlap_individual_parameters": "",
        "ddp_overlap_individual_parameters_benchmarking": "ab",
        "ddp_overlap_bucketed": "",
        "ddp_bucketed_benchmarking": "ab",
        "communication_accounting": "abcd",
        "optimizer_state_sharding": "",
        "optimizer_state_sharding_accounting": "abc",
    },
    2026: {
        "benchmarking_script": "abc",
        "nsys_profile": "abcde",
        "mixed_precision_accumulation": "",
        "benchmarking_mixed_precision": "abc",
        "memory_profiling": "abcdef",
        "gradient_checkpointing": "ab",
        "pytorch_attention": "a",
        "torch_compile": "ab",
        "flash_forward": "abc",
        "flash_backward": "",
        "flash_benchmarking": "a",
        "distributed_communication_single_node": "",
        "naive_ddp": "",
        "naive_ddp_benchmarking": "",
        "minimal_ddp_flat_benchmarking": "",
        "ddp_overlap_individual_parameters": "",
        "ddp_overlap_individual_parameters_benchmarking": "ab",
        "optimizer_state_sharding": "",
        "optimizer_state_sharding_accounting": "abc",
        "fsdp": "",
        "fsdp_accounting": "ab",
        "alternate_ring_all_reduce": "",
        "data_parallel_calcs": "abc",
        "fsdp_calcs": "abc",
        "tp_calcs": "abcd",
        "fsdp_tp_calcs": "abcd",
        "leaderboard": "",
    },
}

# Beside the handouts' problems: the worked example, and 2025's leaderboard, which is none of its problems.
BESIDE = {2025: ["weighted_sum", "leaderboard"], 2026: ["weighted_sum"]}


@pytest.fixture(scope="module")
def everything():
    return saved(*sorted(path.name.removesuffix(".jsonl.gz") for path in RESULTS.glob("*.jsonl.gz")))


@pytest.mark.parametrize("year", [2025, 2026])
def test_every_problem_of_the_handout_is_there_in_its_order(year):
    of_handout = [problem for problem in PROBLEMS[year] if problem.name not in BESIDE[year]]
    found = {problem.name: "".join(part.letter for part in problem.parts) for problem in of_handout}
    assert list(found.items()) == list(ASKED[year].items())
    assert {problem.name for problem in PROBLEMS[year]} - set(found) == set(BESIDE[year])


@pytest.mark.parametrize("year", [2025, 2026])
def test_named_commands_give_the_missing_data(year, everything, monkeypatch):
    """ "gloo with 4 ranks ... comes from `--world-size 2`": what a command would measure is what is missing."""
    runs = {run.run_id: run for file in everything for run in file.runs.values()}
    blocks = [(problem.name, block) for problem, block in _blocks(document(year, everything)) if block.missing]
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
            module = importlib.import_module(f"cs336sys.commands.{command}")
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
    return [(problem, one) for problem, sections in written.problems for part in sections for one in part.blocks]


def _note(asked, command, measure, configurations, *rest, **more):
    asked.extend(configurations)
    raise KeyboardInterrupt


def _like(cells, settings):
    """A measured cell of these settings: the saved one that has most of them."""

    def alike(cell):
        return sum(cell.configuration.get(name) == value for name, value in settings.items())

    return replace(max(cells, key=alike), configuration=settings)


@pytest.mark.parametrize("year", [2025, 2026])
def test_the_saved_results_answer_without_a_fault_and_pages_hold_every_problem(year, everything):
    written = document(year, everything)
    assert written.faults == []
    parts, answered, partly = written.counts
    assert f"{answered} of {parts} parts answered, {partly} of them in part" == written.count_words
    assert parts >= sum(max(1, len(letters)) for letters in ASKED[year].values())
    assert answered / parts > 0.9
    page = document_text(written, "html", lambda picture: f"<i>{picture.name}</i>")
    reader = _Page()
    reader.feed(page)
    assert set(ASKED[year]) <= reader.ids
    assert reader.loaded == []
    assert len(reader.open) == 0
    for text in (document_text(written, format, lambda picture: None) for format in ("markdown", "latex")):
        assert all(name in text.replace(r"\_\allowbreak{}", "_") for name in ASKED[year])
    assert document_text(written, "typst", lambda picture: None).count("\n== ") == len(PROBLEMS[year])
    # Tables stay where they are in the text.
    latex = document_text(written, "latex", lambda picture: None)
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
    measured = {typed_command(run) for results in everything for run in results.runs.values()}
    named = {line for _, _, cell in rows for line in re.findall(r"`(cs336sys [^`]+)`", cell)}
    arithmetic = {line for line in named if line.startswith("cs336sys account ") or line.endswith(" --help")}
    assert named - arithmetic <= measured
    # The model that a handout calls xl alone, and not the other year's.
    assert not any(year == 2026 and "--size xl " in f"{line} " for line in named)


class _Page(html.parser.HTMLParser):
    """Ids, what would be loaded from elsewhere, and elements that are not closed."""

    def __init__(self):
        super().__init__()
        self.ids, self.loaded, self.open = set(), [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id"))
        self.loaded += [
            values[name] for name in ("src", "href") if not (values.get(name) or "#").startswith(("#", "data:"))
        ]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_cells_of_two_machines_are_kept_apart():
    files = saved("bench-h200")
    other = [
        Results(
            {
                f"b{key}": replace(run, run_id=f"b{key}", machine=run.machine | {"gpu": "NVIDIA B200"})
                for key, run in file.runs.items()
            },
            tuple(replace(scaled(cell, 0.5), run_id=f"b{cell.run_id}") for cell in file.cells),
        )
        for file in files
    ]
    blocks = answers(2025, [*files, *other], "benchmarking_script", "b")
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
    assert len(usage.blocks) == 1
    assert "The results here hold 20 cells of it" in words(usage.blocks)


def test_a_note_of_the_tables_of_several_runs_is_said_once_below_them():
    (block,) = answers(2025, saved("nsys-h200", "nsys-xl-h200"), "nsys_profile", "e")
    noted = [[note for note in table.notes if note.startswith("kernel time of all layers")] for table in block.tables]
    assert [len(notes) for notes in noted] == [0, 0, 1]


def test_problem_without_data_names_its_command():
    ((_, sections),) = document(2025, [], "nsys_profile").problems
    assert all(not section.blocks for section in sections)
    assert sections[0].absent == [
        "cs336sys nsys --size small,medium,large,xl,2.7b --context 128,256,512,1024 --mode train,forward"
    ]


def test_cells_that_lack_what_an_answer_needs_are_named_and_lose_nothing_else():
    files = saved("bench-h200", "ddp-fp32-h200")
    broken = changed(files, lambda cell: cell.command == "bench", lambda cell: replace(cell, samples={}))
    written = document(2025, broken, "benchmarking_script", "naive_ddp_benchmarking")
    assert any("benchmarking_script (b)" in fault for fault in written.faults)
    assert written.problems[1][1][0].blocks


@pytest.mark.parametrize("path", sorted(Path(problems.__path__[0]).glob("*.md")), ids=lambda path: path.stem)
def test_templates_have_known_formats_and_no_sentence_that_nobody_says(path):
    prose = Prose((path.parent / "common.md").read_text(), path.read_text())
    fields = [field for one in prose.sentences.values() for field in Formatter().parse(one) if field[1]]
    specs = {spec for _, _, spec, _ in fields if "|" not in spec}
    known = prose.sentences.keys() | FORMATS.keys() | LIST_FORMATS.keys() | {"", "called", "pieces"}
    assert all(re.fullmatch(r",|g|\.\d[efg]", spec) for spec in specs - known)
    sources = "".join(one.read_text() for one in path.parents[1].rglob("*.py"))
    # The names that are put together: "peaks of {mode}".
    beginnings = tuple(re.findall(r'f"([^"{]+ (?:of|with) |against |times of ){', sources))
    own = set(re.findall(r"^\[(.+?)\] ", path.read_text(), re.MULTILINE))
    assert not [one for one in own - specs if f'"{one}"' not in sources and not one.startswith(beginnings)]


def test_commands_are_shown_without_where_their_results_went():
    (run,) = saved("ddp-fp32-h200")[0].runs.values()
    assert typed_command(run) == (
        "cs336sys ddp --size xl --world-size 2 --optimizer fused --bucket-mb 1,10,100,1000 --precision fp32 --mode "
        "naive,flat,overlap,bucketed,torch --warmup 2 --steps 5"
    )


def test_ratios_in_words():
    ratios = 2.5, 1.0, 0.5
    assert [speed(ratio) for ratio in ratios] == ["2.50x as fast", "as fast within 5 %", "2x slower"]
    assert [change(ratio) for ratio in ratios] == ["grows 2.50x", "stays within 5 %", "falls to 0.500x"]
    assert [as_long(ratio) for ratio in ratios] == ["2.50x as long as", "as long as", "0.500x as long as"]
