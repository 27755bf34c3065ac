"""The write-ups: every problem is there, sentences follow the numbers, machines stay apart."""

import html.parser
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cs336sys.report.course.document import build_document, command_line
from cs336sys.report.course.evidence import evidence_of
from cs336sys.report.course.handouts import PROBLEMS
from cs336sys.report.course.target import HANDOUTS, Target
from cs336sys.report.course.writing import to_html, to_latex, to_markdown, to_typst
from cs336sys.results import Results, Samples, read_results

RESULTS = Path(__file__).parents[3] / "docs" / "results"

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


def saved(*names: str) -> list[Results]:
    return [read_results(RESULTS / f"{name}.jsonl.gz") for name in names]


def document(year: int, files: list[Results], *names: str):
    evidences, faults = evidence_of(files, {})
    problems = [problem for problem in PROBLEMS[year] if not names or problem.name in names]
    return build_document(problems, evidences, Target(HANDOUTS[year]), faults)


def answers(year: int, files: list[Results], name: str, letter: str = "") -> list:
    """The blocks of one part."""
    (of_problem,) = document(year, files, name).problems
    return next(section.blocks for section in of_problem[1] if section.letter == letter)


def words(blocks) -> str:
    return " ".join(sentence for block in blocks for sentence in block.sentences)


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
def test_the_saved_results_answer_without_a_fault_and_pages_hold_every_problem(year, everything):
    written = document(year, everything)
    assert written.faults == []
    parts, answered = written.counts
    assert parts >= sum(max(1, len(letters)) for letters in ASKED[year].values())
    assert answered / parts > 0.9
    page = to_html(written, lambda picture: f"<i>{picture.name}</i>")
    reader = _Page()
    reader.feed(page)
    assert set(ASKED[year]) <= reader.ids
    assert reader.loaded == []
    assert len(reader.open) == 0
    for text in (to_markdown(written, lambda picture: None), to_latex(written, lambda _: None)):
        assert all(name in text.replace(r"\_\allowbreak{}", "_") for name in ASKED[year])
    assert to_typst(written, lambda picture: None).count("\n== ") == len(PROBLEMS[year])


@pytest.mark.parametrize("year", [2025, 2026])
def test_the_page_of_the_course_names_every_part_in_order_and_commands_that_were_run(year, everything):
    text = (RESULTS.parent / "course.md").read_text().split(f"\n## {year}\n")[1].split("\n## ")[0]
    rows = re.findall(rf"^\| \[(\w+)\]\(results/report-{year}\.html#\1\)([^|]*)\|([^|]*)\|", text, re.MULTILINE)
    letters = {name: "" for name, _, _ in rows}
    for name, parts, answered_by in rows:
        letters[name] += "".join(re.findall(r"\((\w)\)", parts.strip() or answered_by))
    asked = {problem.name: "".join(part.letter for part in problem.parts) for problem in PROBLEMS[year]}
    assert list(letters.items()) == list(asked.items())
    measured = {command_line(run) for results in everything for run in results.runs.values()}
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


def changed(files: list[Results], choose, change) -> list[Results]:
    """The files with some cells changed."""
    return [Results(file.runs, tuple(change(cell) if choose(cell) else cell for cell in file.cells)) for file in files]


def scaled(cell, factor: float):
    samples = {
        name: Samples(one.unit, one.method, tuple(factor * value for value in one.measured))
        for name, one in cell.samples.items()
    }
    return replace(cell, samples=samples)


def test_timings_follow_the_samples():
    files = saved("bench-h200")
    before = words(answers(2025, files, "benchmarking_script", "b"))
    slower = changed(files, lambda cell: cell.configuration["size"] == "small", lambda cell: scaled(cell, 3))
    after = words(answers(2025, slower, "benchmarking_script", "b"))
    assert "small 19.08 ms and 33.97 ms" in before
    assert "small 57.24 ms and 101.9 ms" in after
    # Three times as slow, the smallest size is no longer left behind by the others as much.
    assert "the whole step grows 18.6x" in before
    assert "the whole step grows 6.21x" in after
    # Both years have the size, and call it otherwise.
    assert "2.7b (the handout's xl)" in words(answers(2026, files, "benchmarking_script", "b"))


def test_a_size_out_of_memory_is_part_of_the_answer():
    files = saved("bench-h200")
    oom = changed(
        files,
        lambda cell: cell.configuration["size"] == "2.7b",
        lambda cell: replace(cell, status="oom", samples={}, derived={}, reason="CUDA out of memory"),
    )
    blocks = answers(2026, oom, "benchmarking_script", "b")
    assert "2.7b (the handout's xl) ran out of memory (CUDA out of memory)." in words(blocks)
    assert any(
        "10b, of which plain fp32 training needs about 199.1 GiB" in line for block in blocks for line in block.missing
    )


def test_the_top_kernel_is_the_profiles_and_not_a_fixed_one():
    files = saved("nsys-h200")
    before = words(answers(2025, files, "nsys_profile", "b"))

    def renamed(cell):
        profile = cell.derived["profile"]
        kernels = [one | {"kernel": one["kernel"].replace("gemm", "slow_product")} for one in profile["kernels"]]
        return replace(cell, derived=cell.derived | {"profile": profile | {"kernels": kernels}})

    after = words(answers(2025, changed(files, lambda cell: cell.status == "ok", renamed), "nsys_profile", "b"))
    assert "gemm" in before
    assert "slow_product" in after
    assert "gemm" not in after


def test_overlap_is_claimed_only_where_the_trace_shows_it():
    files = saved("ddp-fp32-h200")
    before = words(answers(2025, files, "ddp_overlap_individual_parameters_benchmarking", "b"))

    def without_overlap(cell):
        timeline = cell.derived["timeline"] | {"overlap_ms": 0.0}
        return replace(cell, derived=cell.derived | {"timeline": timeline})

    flat = changed(files, lambda cell: cell.derived.get("timeline") is not None, without_overlap)
    after = words(answers(2025, flat, "ddp_overlap_individual_parameters_benchmarking", "b"))
    assert "the second implementation overlaps and the first does not" in before
    assert "no clear difference" in after


def test_differences_within_the_noise_are_no_differences():
    files = saved("shard-xl-h200")
    noisy = changed(
        files,
        lambda cell: cell.status == "ok",
        lambda cell: replace(
            cell, samples=cell.samples | {"step": replace(cell.samples["step"], measured=(100.0, 900.0) * 4)}
        ),
    )
    assert "within the noise" in words(answers(2025, noisy, "optimizer_state_sharding_accounting", "b"))


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


def test_a_compiled_model_is_compared_with_the_vanilla_model_of_its_own_run():
    """Another run, with more cells, has a vanilla model too."""
    (file,) = saved("bench-h200")
    off, block = (
        next(
            cell
            for cell in file.cells
            if cell.configuration["compile"] == how and cell.configuration["size"] == "small"
        )
        for how in ("off", "block")
    )
    whole = replace(scaled(block, 2), configuration=block.configuration | {"compile": "model"}, run_id="b")
    runs = {"b": replace(next(iter(file.runs.values())), run_id="b")}
    text = words(
        answers(2025, [file, Results(runs, (replace(scaled(off, 2), run_id="b"), whole))], "torch_compile", "b")
    )
    assert "small (fp32), with the model compiled: the forward 38.17 ms to 29.92 ms (1.28x as fast)" in text
    assert "each block" not in text


def test_a_half_precision_is_compared_with_the_fp32_of_its_own_run():
    """Another run, with more cells, has fp32, too."""
    (file,) = saved("bench-h200")
    full = next(cell for cell in file.cells if cell.configuration["size"] == "small")
    assert full.configuration["precision"] == "fp32"
    half = replace(full, configuration=full.configuration | {"precision": "fp16"}, run_id="b")
    runs = {"b": replace(next(iter(file.runs.values())), run_id="b")}
    other = Results(runs, (replace(scaled(full, 4), run_id="b"), half))
    text = words(answers(2025, [file, other], "benchmarking_mixed_precision", "c"))
    assert "The forward pass in fp16 against fp32: small 76.34 ms to 19.09 ms (4x as fast)." in text
    assert "The forward pass in bf16 against fp32: small 19.09 ms to 12.85 ms (1.49x as fast)" in text


def test_what_ranks_hold_in_their_first_step_is_preferred_to_what_a_run_of_more_strategies_recorded_later():
    (file,) = saved("shard-2.7b-h200")
    plain, sharded = (
        next(cell for cell in file.cells if cell.configuration["strategy"] == strategy)
        for strategy in ("none", "optimizer")
    )

    def in_first_step(cell):
        first = cell.derived["memory"][0] | {"moment": "before the first optimizer step", "gradients": 3 * 2**30}
        derived = cell.derived | {"memory": [*cell.derived["memory"], first]}
        return replace(cell, configuration=cell.configuration | {"attention": "reference"}, derived=derived, run_id="b")

    runs = {"b": replace(next(iter(file.runs.values())), run_id="b")}
    other = Results(runs, (in_first_step(plain), in_first_step(sharded)))
    name = "optimizer_state_sharding_accounting"
    (without,) = answers(2026, [file], name, "a")
    (with_first,) = answers(2026, [file, other], name, "a")
    assert any("moments of the first step" in one for one in without.missing)
    assert with_first.missing == []
    assert "15.75 GiB directly before the first optimizer step" in words([with_first])


def test_a_note_of_the_tables_of_several_runs_is_said_once_below_them():
    (block,) = answers(2025, saved("nsys-h200", "nsys-xl-h200"), "nsys_profile", "e")
    noted = [[note for note in table.notes if note.startswith("kernel time of all layers")] for table in block.tables]
    assert [len(notes) for notes in noted] == [0, 0, 1]


def test_the_best_checkpoints_are_those_that_were_measured_to_hold_the_least():
    def peaks(**gib):
        cells = [cell for cell in files[0].cells if cell.configuration["checkpointing"] == "block"]
        measured = [
            replace(
                cells[0],
                configuration=cells[0].configuration | {"checkpointing": name.replace("_", "=")},
                derived=cells[0].derived | {"peak_gib": peak},
            )
            for name, peak in gib.items()
        ]
        return words(answers(2026, [Results(files[0].runs, tuple(measured))], "gradient_checkpointing", "b"))

    files = saved("memprof-h200")
    alike = peaks(sublayer=59.4, block=59.4, every_2=63.6)
    assert "The least is that of groups of 1 block, as expected." in alike
    assert "The next smaller pieces, attention and feed-forward layers, need as much." in alike
    assert "The next larger pieces, groups of 2 blocks, need 4.200 GiB more." in alike
    smaller = peaks(sublayer=50.0, block=59.4, every_2=63.6)
    assert "that of attention and feed-forward layers, and not groups of 1 block as expected" in smaller


def test_forward_passes_with_their_graph_stand_beside_those_without_and_what_did_not_fit_is_predicted():
    files = saved("memprof-h200", "memprof-2048-h200")
    plain = next(
        cell
        for cell in files[0].cells
        if (cell.configuration["size"], cell.configuration["mode"], cell.configuration["precision"])
        == ("2.7b", "train", "fp32")
    )
    graph = replace(plain, configuration=plain.configuration | {"mode": "forward-backward"})
    kept = [Results(files[0].runs, (*files[0].cells, graph)), files[1]]
    assert "graph kept" not in words(answers(2026, files, "memory_profiling", "b"))
    text = words(answers(2026, kept, "memory_profiling", "b"))
    most = max(phase["allocated"] for phase in plain.derived["phases"] if phase["phase"] in ("forward", "loss"))
    assert f"with their graph kept they need {most / 2**30:.2f} GiB at context 128." in text
    assert "By the accounting it would need 243.8 GiB (train, context 2048)." in text


def test_formulas_come_after_what_their_symbols_stand_for():
    (block,) = answers(2026, [], "fsdp_tp_calcs", "c")
    formulas = [sentence.split(": ", 1)[1] for sentence in block.sentences[-3:]]
    assert [formula.split(" = ")[0] for formula in formulas] == ["b", "t", "N <= (1 + b) (1 + t)"]


def test_the_best_of_several_runs_of_the_board_is_the_answer():
    """With the same settings as a run before it, which has more cells."""
    (file,) = saved("board-h200")
    cell = next(cell for cell in file.cells if cell.status == "ok")
    again = replace(scaled(cell, 0.1), run_id="b")
    runs = {"b": replace(next(iter(file.runs.values())), run_id="b", arguments=("shard", "--board", "--steps", "9"))}
    (block,) = answers(2026, [file, Results(runs, (again,))], "leaderboard")
    assert f"takes {again.samples['wall'].median:.1f} ms (median)" in words([block])
    assert block.commands == ["cs336sys shard --board --steps 9"]


def test_what_has_no_data_names_the_command_that_gives_it():
    ((_, sections),) = document(2025, [], "nsys_profile").problems
    assert all(not section.blocks for section in sections)
    assert sections[0].absent == ["cs336sys nsys --size small,medium,large,xl,2.7b --context 128,256,512,1024"]


def test_cells_that_lack_what_an_answer_needs_are_named_and_lose_nothing_else():
    files = saved("bench-h200", "ddp-fp32-h200")
    broken = changed(files, lambda cell: cell.command == "bench", lambda cell: replace(cell, samples={}))
    written = document(2025, broken, "benchmarking_script", "naive_ddp_benchmarking")
    assert any("benchmarking_script (b)" in fault for fault in written.faults)
    assert written.problems[1][1][0].blocks


def test_commands_are_shown_without_where_their_results_went():
    (run,) = saved("ddp-fp32-h200")[0].runs.values()
    assert command_line(run) == (
        "cs336sys ddp --size xl --world-size 2 --optimizer fused --bucket-mb 1,10,100,1000 --precision fp32 --mode "
        "naive,flat,overlap,bucketed,torch --warmup 2 --steps 5"
    )
