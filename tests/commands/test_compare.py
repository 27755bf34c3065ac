import json
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import run_commands
from run_commands import invoke

from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Run, Samples

H200 = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


def times(*measured):
    return Samples("ms", "cuda events", measured)


def around(median_ms):
    """Eight samples with this median."""
    return times(*(median_ms + offset / 10 for offset in (0, -4, 2, 0, 4, -1, 1, -2)))


def cell(size, precision="fp32", steps=8, status="ok", reason=None, **samples):
    d_model = {"tiny": 128, "small": 768, "medium": 1024}[size]
    configuration = {"size": size, "d_model": d_model, "context": 512, "precision": precision, "steps": steps}
    configuration["seed"] = 0
    return Cell("bench", configuration, status, samples, {}, reason, run_id="run")


@pytest.fixture
def save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def save(name, *cells, machine=H200, run_id="run", **environment):
        file = ResultsFile(tmp_path / name)
        file.append(Run(run_id, "2026-01-01T00:00:00+00:00", ("bench",), machine, environment))
        for one in cells:
            file.append(replace(one, run_id=run_id))
        file.close()

    return save


compare = partial(invoke, "compare")


def tables(*words):
    """The tables of a comparison that ends well, and their rows, in their order."""
    return [*run_commands.tables(compare(words, "--format json")).values()]


@pytest.fixture
def sweeps(save):
    """B is 10 % slower for small fp32, 20 % faster for small bf16, the same for medium fp32, broken for medium bf16."""
    save(
        "a.jsonl",
        cell("small", step=around(100)),
        cell("small", "bf16", step=around(50)),
        cell("medium", step=around(300)),
        cell("medium", "bf16", step=around(150)),
    )
    save(
        "b.jsonl",
        cell("small", step=around(110)),
        cell("small", "bf16", step=around(40)),
        cell("medium", step=around(300)),
        cell("medium", "bf16", status="oom", reason="CUDA out of memory"),
    )


def test_comparison_of_two_sweeps(sweeps):
    result = compare("a.jsonl b.jsonl")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "### compare: step_ms of B against A\n"
        "\n"
        "| size   | precision   |   A median, ms |   B median, ms |    B/A |   95 % from |     to |      p | "
        "verdict         |   A runs |   B runs |   A lag 1 |   B lag 1 |\n"
        "|:-------|:------------|---------------:|---------------:|--"
        "-----:|------------:|-------:|-------:|:----------------|---------:|---------:|----------:|----------:|\n"
        "| small  | fp32        |          100.0 |          110.0 | 1"
        ".100x |      1.097x | 1.103x | 0.0002 | differs: slower |        1 |        1 |     -0.54 |     -0.54 |\n"
        "| small  | bf16        |          50.00 |          40.00 | 0"
        ".800x |      0.795x | 0.805x | 0.0002 | differs: faster |        1 |        1 |     -0.54 |     -0.54 |\n"
        "| medium | fp32        |          300.0 |          300.0 | 1"
        ".000x |      1.000x | 1.000x |    1.0 | same within 0 % |        1 |        1 |     -0.54 |     -0.54 |\n"
        "\n"
        "- B/A: ratio of the medians with its 95 % interval, lower is better; p: of the rank-sum test; differs: "
        "p up to 0.05, or drifting samples that do not overlap; same: the interval is within 5 % of 1; runs: rounds "
        "count; lag 1: autocorrelation of samples\n"
        "- one run a side: what differs from run to run is not covered; take --rounds, or several files a side\n"
        "- every cell: command bench, context 512\n"
        "\n"
        "### compare: cells that are not ok in both files\n"
        "\n"
        "| size   | precision   | A   | B   | reason             |\n"
        "|:-------|:------------|:----|:----|:-------------------|\n"
        "| medium | bf16        | ok  | oom | CUDA out of memory |\n"
        "\n"
        "### compare: summary\n"
        "\n"
        "| metric   |   cells |   faster |   slower |   same |   undecided |   geometric mean of B/A |\n"
        "|:---------|--------:|---------:|---------:|-------:|------------:|------------------------:|\n"
        "| step_ms  |       3 |        1 |        1 |      1 |           0 |                  0.958x |\n"
    )


def test_fail_above_names_each_regression(sweeps):
    result = compare("a.jsonl b.jsonl --fail-above 5%")
    assert result.exit_code == 1
    assert result.stdout == compare("a.jsonl b.jsonl").stdout
    assert result.stderr == (
        "regression: size small, precision fp32: step_ms is 10.0 % slower\n"
        "regression: size medium, precision bf16: ok in A, oom in B\n"
    )


def test_a_regression_is_one_where_no_table_has_the_columns_asked_for(save):
    """It was a usage error: of a cell that no longer runs there is no ratio."""
    save("a.jsonl", cell("small", step=around(10)))
    save("b.jsonl", cell("small", status="oom", reason="out of memory"))
    result = compare("a.jsonl b.jsonl --fail-above 5 --columns ratio")
    assert result.exit_code == 1
    assert ": ok in A, oom in B\n" in result.stderr
    assert "error: --columns 'ratio': choose from" in result.stderr
    result = compare("a.jsonl b.jsonl --columns ratio")
    assert (result.exit_code, result.stdout) == (2, "")


def test_cells_that_differ_in_where_a_trace_went_and_how_long_ranks_waited_are_compared(save):
    one = cell("small", step=around(10))
    save("a.jsonl", replace(one, configuration=one.configuration | {"trace": None, "timeout_s": 120.0}))
    save("b.jsonl", replace(one, configuration=one.configuration | {"trace": "traces", "timeout_s": 60.0}))
    assert [row["ratio"] for row in tables("a.jsonl b.jsonl")[0]["rows"]] == [1.0]


def test_fail_above_passes_what_is_not_slower_by_so_much(save):
    save("a.jsonl", cell("small", step=around(100)))
    save("slower.jsonl", cell("small", step=around(110)))
    save("noisy.jsonl", cell("small", step=times(10, 20, 30, 120, 130, 140, 150, 160)))
    assert compare("a.jsonl slower.jsonl --fail-above 12").exit_code == 0
    assert compare("a.jsonl slower.jsonl --fail-above ' 9.5 %'").exit_code == 1
    assert compare("slower.jsonl a.jsonl --fail-above 0").exit_code == 0


def test_fail_above_fails_for_what_may_be_slower_by_so_much(save):
    """Without an end to its interval under the limit nothing is known to hold it."""
    save("a.jsonl", cell("small", step=around(100)))
    save("noisy.jsonl", cell("small", step=times(120, 10, 160, 20, 150, 30, 140, 130)))
    noisy = compare("a.jsonl noisy.jsonl --fail-above 5%")
    assert (noisy.exit_code, "1.250x" in noisy.stdout) == (1, True)
    assert noisy.stderr.startswith("undecided: the cell: step_ms may be slower by up to ")
    assert noisy.stderr.endswith(" %: take more --steps or --rounds\n")
    allowed = compare("a.jsonl noisy.jsonl --fail-above 5% --allow-undecided")
    assert (allowed.exit_code, allowed.stderr) == (0, noisy.stderr)
    assert compare("a.jsonl noisy.jsonl").exit_code == 0
    wide = compare("a.jsonl noisy.jsonl --fail-above 1000%")
    assert (wide.exit_code, wide.stderr) == (0, "")


def test_fail_above_fails_for_what_is_not_finite_or_missing(save):
    save("a.jsonl", cell("small", step=around(100)), cell("medium", step=around(300)), cell("tiny", status="oom"))
    save("nan.jsonl", cell("small", step=times(*[float("nan")] * 8)))
    result = compare("a.jsonl nan.jsonl --fail-above 5%")
    assert result.exit_code == 1
    assert "| undecided |" in result.stdout
    assert result.stderr == (
        "warning: not compared, because only A has them: 2 cells\n"
        "warning: undecided, 1 comparison of 1: samples are not finite: 8 of B\n"
        "undecided: size small: step_ms: samples are not finite: 8 of B\n"
        "undecided: size medium: only A has it\n"
    )
    assert compare("a.jsonl nan.jsonl --fail-above 5% --allow-undecided").exit_code == 0
    assert compare("a.jsonl nan.jsonl").exit_code == 0
    save("series.jsonl", cell("small", forward=around(100)), cell("medium", step=around(300)))
    result = compare("a.jsonl series.jsonl --fail-above 5%")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "undecided: size small: A or B lacks the series")


def test_nothing_measured_on_either_side_fails_and_says_so(save):
    """It was exit 0 of a check of nothing."""
    save("a.jsonl", cell("small", status="oom", reason="CUDA out of memory"))
    save("b.jsonl", cell("small", status="timeout", reason="no result after 60 s"))
    for arguments in (("b.jsonl",), ("a.jsonl",), ("b.jsonl", "--allow-undecided")):
        result = compare("a.jsonl", *arguments, "--fail-above 5%")
        status = "timeout" if arguments[0] == "b.jsonl" else "oom"
        assert (result.exit_code, result.stderr) == (1, f"regression: nothing was measured, in A or in B: {status}\n")
    assert compare("a.jsonl b.jsonl").exit_code == 0


def test_a_file_against_itself_passes(save):
    noisy = times(120, 10, 160, 20, 150, 30, 140, 130)
    save(
        "a.jsonl",
        cell("small", step=noisy),
        cell("small", "bf16", step=times(1, 2)),
        cell("medium", step=times(7)),
        cell("medium", "bf16", status="oom", reason="CUDA out of memory"),
    )
    result = compare("a.jsonl a.jsonl --fail-above 0%")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("| same within 0 % |") == 3


def test_a_regression_fails_whatever_is_allowed(sweeps):
    assert compare("a.jsonl b.jsonl --fail-above 5% --allow-undecided").exit_code == 1


def test_several_files_and_rounds_are_runs(save):
    """Four processes a side: the noise is what these differ by, and two samples of each are enough."""
    for number, level in enumerate((98, 100, 101, 102)):
        save(f"a{number}.jsonl", cell("small", step=times(level, level + 1)), run_id=f"a{number}")
        save(f"b{number}.jsonl", cell("small", step=times(1.2 * level, 1.2 * level + 1)), run_id=f"b{number}")
    a, b = (",".join(f"{name}{number}.jsonl" for number in range(4)) for name in "ab")
    result = compare(a, b, "--fail-above 5% --format json")
    (table, _) = json.loads(result.stdout)["tables"]
    (row,) = table["rows"]
    assert (row["verdict"], row["a_runs"], row["b_runs"]) == ("differs: slower", 4, 4)
    assert table["notes"][1] == (
        "the noise is the spread between runs of one side; compare in the documentation says how many it needs"
    )
    assert (result.exit_code, result.stderr) == (1, "regression: the cell: step_ms is 19.9 % slower\n")
    assert tables("a0.jsonl b0.jsonl")[0]["rows"][0]["verdict"] == "undecided"


def test_cell_that_runs_again_is_no_regression(save):
    save("a.jsonl", cell("small", status="oom", reason="CUDA out of memory"))
    save("b.jsonl", cell("small", step=around(100)))
    result = compare("a.jsonl b.jsonl --fail-above 5%")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "| oom | ok  | CUDA out of memory |" in result.stdout


def test_only_failed_cells_still_fail(save):
    save("a.jsonl", cell("small", step=around(100)))
    save("b.jsonl", cell("small", status="timeout", reason="no result after 60 s"))
    result = compare("a.jsonl b.jsonl --metric step_ms --fail-above 5%")
    assert (result.exit_code, result.stderr) == (1, "regression: the cell: ok in A, timeout in B\n")


def test_metrics_asked_for_have_a_table_each(save):
    save("a.jsonl", cell("small", forward=around(30), step=around(100)))
    save("b.jsonl", cell("small", forward=around(30), step=around(50)))
    found = tables("a.jsonl b.jsonl --metric forward,step_ms")[:2]
    ratios = [(table["name"], [row["ratio"] for row in table["rows"]]) for table in found]
    assert ratios == [("forward_ms", [1.0]), ("step_ms", [0.5])]


def test_warnings(save):
    slow = Samples("ms", "cpu clock", around(10).measured)
    save(
        "a.jsonl",
        cell("tiny", step=around(10)),
        cell("small", step=around(100)),
        cell("small", "bf16", step=around(100)),
        cell("medium", step=around(300)),
        cell("medium", "bf16", forward=around(10)),
    )
    save(
        "b.jsonl",
        cell("small", step=around(90)),
        cell("small", step=times(95, 96, 97), steps=3),
        cell("tiny", "bf16", step=around(10)),
        cell("medium", "fp16", step=around(10)),
        cell("medium", "bf16", wall=around(10)),
        cell("tiny", step=slow),
        machine=H200 | {"gpu": "NVIDIA A100"},
    )
    result = compare("a.jsonl b.jsonl")
    assert result.exit_code == 0
    assert result.stderr == (
        "warning: not compared, because only A has them: 2 cells\n"
        "warning: not compared, because only B has them: 2 cells\n"
        "warning: A and B were not measured under the same conditions, so the ratios are not the code's alone: "
        "gpu (NVIDIA H200 / NVIDIA A100)\n"
        "warning: not compared, because A or B lacks the series: 1 cell\n"
        "warning: samples were taken by cuda events in A and by cpu clock in B\n"
        "warning: undecided, 1 comparison of 2: 1 against 2 runs decide nothing at 5 %: 4 against 4 are the fewest\n"
    )


def test_runs_of_other_code_are_left_out_and_it_is_said(save, tmp_path):
    save("old.jsonl", cell("small", step=around(100)), run_id="old", source_digest="1")
    save("new.jsonl", cell("small", step=around(50)), run_id="new", source_digest="2")
    (tmp_path / "both.jsonl").write_bytes(
        b"".join((tmp_path / f"{name}.jsonl").read_bytes() for name in ("old", "new"))
    )
    result = compare("old.jsonl both.jsonl --format json")
    row = json.loads(result.stdout)["tables"][0]["rows"][0]
    assert (row["ratio"], row["b_runs"]) == (0.5, 1)
    assert result.stderr == "warning: B holds 1 cell of other code or another machine than its last: left out\n"


def test_files_without_a_configuration_in_common(save):
    save("a.jsonl", cell("small", step=around(100)))
    save("other.jsonl", cell("medium", "bf16", step=around(100)), cell("small", "bf16", step=around(100)))
    result = compare("a.jsonl other.jsonl")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: a.jsonl and other.jsonl have no configuration in common; those nearest to each other differ in "
        "precision (fp32 and bf16)\n",
    )


def test_the_base_installation_compares(sweeps, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert compare("a.jsonl b.jsonl").exit_code == 0


@pytest.mark.parametrize("value", ["0.0", "1e308", "5e-324", str(10**400), "-1.0", "[" * 5000])
def test_samples_that_are_no_times_cost_their_cell_and_never_pass(save, tmp_path, value):
    """Zeros were "differs: faster", and passed under --fail-above; the others were tracebacks."""
    for name in ("a.jsonl", "b.jsonl"):
        save(name, cell("small", step=around(10)), cell("medium", step=times(*[123.5] * 5)))
    text = (tmp_path / "b.jsonl").read_text()
    assert text.count("123.5") == 5
    (tmp_path / "b.jsonl").write_text(text.replace("123.5", value))
    result = compare("a.jsonl b.jsonl --fail-above 5%")
    assert result.exit_code == 1
    assert re.search(r"(?m)^warning: .*b\.jsonl: line 3 is .*, and passed over$", result.stderr)
    assert "size medium: only A has it" in result.stderr
    assert "small" in result.stdout


def test_cells_of_several_commands_are_told_apart(save):
    cells = (
        Cell("attn", {"sequence": 128, "head_dim": 64}, "ok", {"forward": around(5)}, run_id="run"),
        Cell("bench", {"size": "small", "head_dim": 64}, "ok", {"step": around(50)}, run_id="run"),
    )
    save("a.jsonl", *cells)
    forward, step, summary = tables("a.jsonl a.jsonl")
    of_commands = [(table["name"], table["rows"][0]["command"]) for table in (forward, step)]
    assert of_commands == [("forward_ms", "attn"), ("step_ms", "bench")]
    assert forward["notes"][-1] == "every cell: head_dim 64"
    assert [row["metric"] for row in summary["rows"]] == ["forward_ms", "step_ms"]
