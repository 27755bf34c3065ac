"""``show`` as a user runs it: every saved result, without torch, and bad input."""

import csv
import gzip
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import cs336sys
from cs336sys.cli import COMMANDS, app, module_of
from cs336sys.commands.registry import invocations, saved_commands, saved_pictures, saved_tables, shown_cells
from cs336sys.results.model import configuration_key, read_results
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.tables.render import render
from cs336sys.tables.saved import Presentation
from cs336sys.tables.table import Column, Table
from cs336sys.tables.terminal import print_tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Measured once and removed since: show passes its cells over with a warning.
REMOVED_STRATEGY = "bucketed-step"
BENCH, BOARD, DDP = (RESULTS / f"{name}-h200.jsonl.gz" for name in ("bench", "flash-board", "ddp"))

# Where it is not named after the command, and has no row for each cell.
FIRST_TABLES = {"nsys": "phases", "precision": "accumulation"}

PICTURES = {name: {name} for name in ("bench", "losses", "attn", "flash", "kernels", "allreduce")}
PICTURES |= {"nsys": {"shares"}, "ddp": {"timelines", "buckets"}, "shard": {"memory"}}

# Runs the command with torch and triton out of reach.
WITHOUT_TORCH = """
import sys

class OutOfReach:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"{name} is out of reach")

sys.meta_path.insert(0, OutOfReach())
from cs336sys.cli import main

main()
"""


def show(*arguments):
    return CliRunner().invoke(app, ["show", *map(str, arguments)], auto_envvar_prefix="CS336SYS")


def tables(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["tables"]


def test_every_command_that_saves_can_be_shown():
    saving = []
    for name in COMMANDS:
        command = getattr(importlib.import_module(module_of(name)), name)
        if callable(command) and {"save", "sweeping"} & inspect.signature(command).parameters.keys():
            saving.append(name)
    assert sorted(saving) == saved_commands()


def test_every_saved_result_of_the_project_is_shown_with_all_its_cells():
    paths = sorted(RESULTS.glob("*.jsonl.gz"))
    assert len(paths) > 20
    assert not list(RESULTS.glob("*.jsonl")), "results stay in the history: compress them"
    for path in paths:
        results = read_results(path)
        assert results.passed_over == ()
        found = invocations([results])
        # Of a cell that a resumed run has measured again one is shown.
        keys = [(one.command, key) for one in found for key in one.cells]
        assert set(keys) == {(cell.command, configuration_key(cell.configuration)) for cell in results.cells}
        for one in found:
            cells = [cell for cell in shown_cells(one) if cell.configuration.get("strategy") != REMOVED_STRATEGY]
            assert not any("round" in cell.configuration for cell in cells), "rounds are pooled"
            shown = saved_tables(one, cells, Presentation(compare_precision=one.command == "nsys"))
            is_board = any(cell.configuration.get("board") for cell in cells)
            assert shown[0].name == ("board" if is_board else FIRST_TABLES.get(one.command, one.command))
            machine = one.run.machine
            device = machine["gpu"] or machine["cpu"]
            assert any(device in table.title and machine["torch"] in table.title for table in shown)
            if one.command not in FIRST_TABLES:
                assert len(shown[0].rows) >= len(cells)
            assert render(shown, "markdown").count("\n| ") > len(cells)
            # Where nothing fitted there is nothing to draw.
            is_drawn = not is_board and any(cell.status == "ok" for cell in cells)
            pictures = PICTURES.get(one.command, set()) if is_drawn else set()
            if one.command == "memprof":
                pictures = {
                    MemoryWorkload.from_configuration(cell.configuration).name for cell in cells if cell.status == "ok"
                }
            if not any(cell.configuration.get("strategy", "").startswith("bucketed") for cell in cells):
                pictures = pictures - {"buckets"}
            if is_drawn and any(cell.status == "ok" and cell.derived.get("gathers") for cell in cells):
                pictures = pictures | {"timelines"}
            assert set(saved_pictures(one, cells)) == pictures


def test_neither_torch_nor_triton_is_needed(tmp_path):
    """The measured cells of eight commands, shown in one process."""
    names = ("bench", "flash-board", "ddp", "nsys-torch", "attn", "allreduce", "shard-10b", "memprof")
    files = [str(RESULTS / f"{name}-h200.jsonl.gz") for name in names]
    arguments = ["--status", "ok", "--format", "json", "--output", str(tmp_path / "o.json")]
    command = [sys.executable, "-c", WITHOUT_TORCH, "show", *files, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    shown = json.loads((tmp_path / "o.json").read_text())["tables"]
    names = {table["name"] for table in shown}
    assert names >= {"bench", "speedup", "flash", "ddp", "phases", "buckets", "kernels", "attn", "allreduce", "memprof"}
    # Runs of one command are told apart by their titles.
    assert sum("(run " in table["title"] for table in shown if table["name"] == "bench") == 0, "one is alone"
    memprof = [table["title"] for table in shown if table["name"] == "memprof"]
    assert len(memprof) == len(set(memprof)) == 3
    assert all(title.endswith("+00:00)") for title in memprof)


def test_options_of_the_measuring_command_hold_for_its_saved_cells(monkeypatch):
    monkeypatch.setenv("CS336SYS_FLASH_BASELINE", "eager")
    (board,) = tables(show(BOARD, "--format", "json"))
    cudnn = next(row for row in board["rows"] if row["implementation"] == "sdpa-cudnn")
    assert cudnn["end_to_end_speedup"] == 1.0, "it was measured with --baseline sdpa-cudnn"
    names = [table["name"] for table in tables(show(RESULTS / "nsys-h200.jsonl.gz", "--format", "json"))]
    assert "precisions" in names, "it was measured with --compare-precision"


def test_pictures_of_bench_keep_its_saved_baseline(tmp_path, monkeypatch):
    """They were drawn over the defaults, next to tables over the baseline."""
    path, drawn = tmp_path / "saved.jsonl", []
    arguments = b'"arguments": ["bench", "--baseline", "compile=block"]'
    path.write_bytes(re.sub(rb'"arguments": \[.*?\]', arguments, gzip.decompress(BENCH.read_bytes())))
    monkeypatch.setattr(
        "cs336sys.commands.bench.tables.plot_bench", lambda cells, path, baseline: drawn.append(baseline)
    )
    assert show(path, "--plot", tmp_path / "bench.png", "--output", tmp_path / "bench.md").exit_code == 0
    cs336sys.read(path).plot(tmp_path / "bench.png")
    assert drawn == ["compile=block"] * 2


def test_parts_of_the_tables_in_another_order():
    result = show(BENCH, DDP, "--command", "bench", "--sort", "-tokens_per_s", "--columns", "size,step_ms", "--status")
    assert result.exit_code == 2, "an option without its value"
    options = ("--command", "bench", "--table", "bench", "--sort", "-tokens_per_s", "--columns", "size,step_ms")
    (table,) = tables(show(BENCH, DDP, *options, "--status", "ok,oom", "--format", "json"))
    assert list(table["rows"][0]) == ["size", "step_ms_mean", "step_ms_std", "step_ms_median"]
    rates = [cell.derived["tokens_per_s"] for cell in read_results(BENCH).cells if cell.status == "ok"]
    assert len(table["rows"]) == len(rates)
    fastest = max(read_results(BENCH).cells, key=lambda cell: cell.derived["tokens_per_s"])
    assert table["rows"][0]["step_ms_mean"] == fastest.samples["step"].mean


def test_several_pictures_get_names_of_their_own(tmp_path):
    other_board = RESULTS / "flash-course-fp32-long-h200.jsonl.gz"
    plot = tmp_path / "p" / "new.png"
    plot.parent.mkdir()
    forward = RESULTS / "forward-h200.jsonl.gz"
    result = show(BOARD, other_board, forward, "--plot", plot, "--output", tmp_path / "o.md")
    assert result.exit_code == 0, result.output
    names = ["new-flash-1.png", "new-flash-2.png", "new-bench.png"]
    assert {path.name for path in plot.parent.iterdir()} == set(names)
    assert result.stderr == "".join(f"drew {plot.with_name(name)}\n" for name in names)
    # One alone has the name that was asked for.
    assert show(BOARD, "--plot", tmp_path / "board.png").exit_code == 0
    assert (tmp_path / "board.png").exists()


def test_a_page_holds_the_tables_and_pictures_of_each_invocation(tmp_path):
    """Without torch, too."""
    page = tmp_path / "new" / "page.html"
    arguments = ["show", str(BENCH), str(BOARD), str(BENCH), "--columns", "size,context,status", "--html", str(page)]
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True)
    # Where drawing takes long, it says how far it is.
    assert (result.returncode, result.stdout) == (0, "")
    assert [line for line in result.stderr.splitlines() if not line.endswith("pictures are done")] == [f"wrote {page}"]
    text = page.read_text()
    assert "<title>bench-h200.jsonl.gz, flash-board-h200.jsonl.gz</title>" in text
    assert "<pre>cs336sys flash --grid board --implementation auto,hopper" in text
    assert re.findall(r"<h2>(\w+), run", text) == ["bench", "flash"]
    assert text.count('<th>size</th><th class="number">context</th><th>precision</th>') == 0
    assert text.count('<tr><td>2.7b</td><td class="number">512</td><td>ok</td></tr>') == 4
    assert re.findall(r'src="data:image/png;base64,.{9}.*?" alt="(.*?)"', text) == ["bench: bench", "flash: flash"]
    both = show(BOARD, "--html", page, "--output", tmp_path / "o.md")
    assert both.exit_code == 0
    assert (tmp_path / "o.md").read_text().startswith("### flash:")


def test_a_cut_file_shows_what_is_whole_and_says_so(tmp_path):
    lines = gzip.decompress(BENCH.read_bytes()).splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:100])
    result = show(tmp_path / "cut.jsonl", "--format", "json")
    assert len(tables(result)[0]["rows"]) == 3
    sentence = "line 5 is cut, or no record of results, and passed over"
    assert result.stderr == f"warning: {tmp_path / 'cut.jsonl'}: {sentence}\n"
    (tmp_path / "cut.jsonl").write_bytes(lines[0])
    assert f"{tmp_path / 'cut.jsonl'}: no cell was measured" in show(tmp_path / "cut.jsonl").stderr


@pytest.mark.parametrize(
    "arguments", ['["flash", "--baseline", "eager", "--gone", "1"]', "[]", '["a script", "flash"]']
)
def test_arguments_that_are_no_longer_known_are_passed_over(tmp_path, arguments):
    saved = b'"arguments": ' + json.dumps(read_results(BOARD).runs.popitem()[1].arguments).encode()
    content = gzip.decompress(BOARD.read_bytes())
    assert saved in content
    (tmp_path / "old.jsonl").write_bytes(content.replace(saved, b'"arguments": ' + arguments.encode()))
    (table,) = tables(show(tmp_path / "old.jsonl", "--format", "json"))
    eager = next(row for row in table["rows"] if row["implementation"] == "eager")
    assert eager["end_to_end_speedup"] == 1.0, "the default"


def changed(tmp_path, name, change, count=4):
    """A saved file of the project of which a stranger has changed the second line and what follows."""
    lines = gzip.decompress((RESULTS / f"{name}-h200.jsonl.gz").read_bytes()).splitlines()[:count]
    records = [json.loads(line) for line in lines]
    for number, record in enumerate(records):
        change(number, record)
    path = tmp_path / "strange.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


HOSTILE = (
    "=HYPERLINK(1) $\\frac{x$ \x1b]0;title\x07 \x9b2J \u202egnp ![i](http://x/i.png) [l](http://x) <img src=x> "
    "\\input{x} #eval(1) a|b `c` \ud800"
)


def name_strangely(number, record):
    if record["kind"] == "run":
        record["machine"]["gpu"] = HOSTILE
        record["arguments"] = ["losses", HOSTILE]
    else:
        record["configuration"]["optimizer"] = f"{HOSTILE} {number}"
        record["configuration"][HOSTILE] = number
    if number == 3:
        record |= {"status": "error", "reason": HOSTILE, "samples": {}, "derived": {}}


def test_names_of_strangers_are_neutral_in_every_format(tmp_path):
    """Escape sequences reached the terminal, pictures and links other people's pages, formulas spreadsheets."""
    path = changed(tmp_path, "losses", name_strangely)
    commands = ("\x1b", "\x07", "\x9b", "\u202e", "\ud800")
    for format in ("table", "markdown", "latex", "typst", "csv", "json"):
        result = show(path, "--format", format)
        assert (result.exit_code, result.stderr) == (0, "")
        assert not [one for one in commands if one in result.stdout]
        if format != "json":
            assert "x1b" in result.stdout, "spelled out"
        if format == "markdown":
            assert not re.search(r"(?<!\\)\[|(?<!\\)<|(?<!\\)`", result.stdout)
        elif format == "latex":
            assert "\\input" not in result.stdout
            assert not re.search(r"(?<![\\])\$(?!\\pm\$)(?<!\\pm\$)", result.stdout)
        elif format == "csv":
            fields = [field for row in csv.reader(result.stdout.splitlines()) for field in row]
            assert any(field.startswith("'=HYPERLINK(1)") for field in fields)
            assert not [field for field in fields if field.startswith(("=", "+", "@"))]
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    result = show(path, "--html", page, "--plot", picture)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "<img src=x>" not in text
    assert not [one for one in commands if one in text + picture.read_text() + result.stderr]


def test_a_terminal_is_sent_no_commands_of_strangers(capsys):
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    column = Column("a\x1b]0;t\x07", "a\x1b]0;t\x07")
    for values in (["\x1b[2J"], ["\x1b[2J" * 40, "b"]):
        rows = [{column.key: value, "other": 1.0} for value in values]
        table = Table("t", "\x1b]52;c;aGk=\x07", (column, Column("other", "other", "ms")), rows, notes=("\x9bm",))
        print_tables([table], console)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert not re.search(r"[\x1b\x07\x9b]", drawn)


def first_cell(change):
    def apply(number, record):
        if number == 1:
            for name, value in change.items():
                record[name] = record[name] | value if isinstance(value, dict) else value or {}

    return apply


@pytest.mark.parametrize(
    ("name", "change", "shown"),
    [
        ("memprof-2048", {"derived": {"timeline": 5}}, "drawn"),
        ("memprof-2048", {"derived": {"timeline": {"position": []}}}, "drawn"),
        ("memprof-2048", {"derived": {"regions": [{"start": 1}]}}, "drawn"),
        ("ddp", {"derived": {"timeline": [[1]]}}, "left out"),
        ("losses", {"samples": None}, "left out"),
    ],
)
def test_a_malformed_timeline_region_or_loss_is_one_sentence(tmp_path, name, change, shown):
    """Tables were guarded, and pictures ended in tracebacks."""
    path = changed(tmp_path, name, first_cell(change))
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    result = show(path, "--html", page)
    assert result.exit_code == 0, result.output
    (said, wrote) = result.stderr.splitlines()
    assert wrote == f"wrote {page}"
    assert said.startswith(f"warning: {name.partition('-')[0]}, run ")
    assert ("cannot be drawn as the picture" if shown == "drawn" else "and it is left out") in said
    assert page.read_text().count("<tr>") >= 3
    result = show(path, "--plot", picture)
    assert result.exit_code == (2 if shown == "drawn" else 0)
    assert isinstance(result.exception, SystemExit | None)
    assert "| " in result.stdout, "the tables are shown"


def test_cells_of_an_unknown_command_do_not_hide_the_others(tmp_path):
    result = show(changed(tmp_path, "losses", first_cell({"command": "pretrain"})))
    assert result.exit_code == 1
    assert result.stdout.count("| ") > 5
    assert result.stderr.startswith(
        "error: cells of 'pretrain' cannot be shown by this cs336sys: choose from allreduce"
    )


def test_characters_beyond_ascii_become_question_marks(tmp_path):
    """LANG=C and PYTHONIOENCODING: report --format markdown ended in a UnicodeEncodeError."""
    arguments = f"report --year 2025 --from {BENCH} --only benchmarking_script --format markdown".split()
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    result = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, b"Traceback" in result.stderr) == (0, False)
    assert b" ? " in result.stdout


def test_cells_of_a_removed_strategy_are_passed_over_with_a_warning():
    result = show(RESULTS / "ddp-graph-sizes-h200.jsonl.gz")
    assert result.exit_code == 0
    assert REMOVED_STRATEGY in result.stderr
    assert REMOVED_STRATEGY not in result.stdout
