"""``account`` as a user runs it: every sub-command, the documented output, formats, pictures and bad input."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from run_commands import imported_by, invoke

from cs336sys.results.model import read_results

PAGE = Path(__file__).parents[2] / "docs" / "account.md"

SUB_COMMANDS = ("memory", "activations", "attention", "flops", "buckets", "parallel", "scaling", "step", "xxl")

# A command alone in its block, with its output below it up to the next section.
DOCUMENTED = re.compile(r"```sh\n(cs336sys account [^\n]*)\n```\n\n((?:(?!## ).*\n)*)", re.MULTILINE)


account = partial(invoke, "account")


def tables(*arguments):
    result = account(arguments, "--format json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["tables"]


def rows(*arguments):
    """Rows of all tables of derived values, by quantity."""
    found = [row for table in tables(arguments) for row in table["rows"] if "derivation" in row]
    return {row["quantity"]: row for row in found}


def output(command: str) -> str:
    result = invoke(command.removeprefix("cs336sys "))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_documented_outputs_are_what_the_commands_print():
    """``CS336SYS_WRITE_DOCS=1 pytest tests/commands/test_account.py`` writes them into the page."""
    text = PAGE.read_text() + "\n"
    if os.environ.get("CS336SYS_WRITE_DOCS"):
        text = DOCUMENTED.sub(lambda found: f"```sh\n{found[1]}\n```\n\n{output(found[1])}\n", text)
        PAGE.write_text(text.rstrip("\n") + "\n")
    documented = DOCUMENTED.findall(text)
    assert {command.split()[2] for command, _ in documented} == set(SUB_COMMANDS)
    for command, shown in documented:
        assert shown.strip() == output(command).strip(), command


def test_every_question_on_the_page_is_answered():
    """Every part of a problem that the page lists is named by a row or a title that the listed commands print."""
    listing = PAGE.read_text().split("## Every question and its command")[1].split("\n## ")[0]
    outputs = "".join(output(command) for command in re.findall(r"`(cs336sys account [^`]+)`", listing))
    listed = {
        f"{name} {part}".strip()
        for name, parts in re.findall(r"^\| ([a-z]+_[a-z_]+)([^|]*)\|", listing, re.MULTILINE)
        for part in expanded(parts)
    }
    assert len(listed) == 31
    # Predicted peaks are a column of a table of their own.
    listed -= {"memory_profiling (b)", "memory_profiling (c)"}
    answered = set(re.findall(r"[a-z]+_[a-z_]+ \([a-f]\)", outputs))
    assert listed - answered == set()


def expanded(parts: str) -> list[str]:
    """``(a) to (c), 2026`` as (a), (b), (c); a problem without parts as one empty part."""
    letters = re.findall(r"\(([a-f])\)", parts)
    if " to " in parts:
        letters = [chr(code) for code in range(ord(letters[0]), ord(letters[-1]) + 1)]
    return [f"({letter})" for letter in letters] or [""]


def test_nothing_that_is_slow_is_imported():
    assert imported_by(*(f"account {name}" for name in SUB_COMMANDS)) == []


def test_alone_it_shows_help():
    result = account()
    shown = result.stdout + result.stderr
    for name in SUB_COMMANDS:
        assert re.search(rf"\b{name}\b", shown)
    assert "Usage: " in shown


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_sub_command_has_help_with_an_example(name):
    result = account(name, "-h")
    assert result.exit_code == 0
    assert f"cs336sys account {name}" in " ".join(result.stdout.split())


def test_options_of_xxl_change_what_they_name():
    found = rows("xxl --tokens 320 --gpu-gb 141 --device-gb 80 --y 8 --weight-copies")
    assert found["saved for backward"]["value"] == pytest.approx(320 * 17_547_264e-9 + 439.697276928)
    assert found["GPUs that hold the states alone"]["value"] == 25  # 3517.6 / 141
    assert found["per-device batch, axes overlapped"]["value"] == pytest.approx(319.4444444 / 2)
    small = rows("xxl --d-model 2 --d-ff 3 --num-blocks 5 --x 2 --y 1 --m-x 1 --devices 2")
    assert small["parameters"]["value"] == 60
    half = rows("xxl --flops 2.3e14 --bandwidth 3.6e11 --m-y 3")
    assert half["FLOPs a byte of communication"]["value"] == pytest.approx(23_000 / 36)
    assert half["most TP"]["value"] == pytest.approx(3 * 53248 * 36 / 23_000)


def test_the_mesh_can_be_chosen():
    title = tables("parallel --strategy fsdp-tp --mesh 2x4 --devices 8")[0]["title"]
    assert title.endswith("2 x 4 devices")


def test_memory_table_and_its_settings():
    """The numbers are in tests/accounting."""
    first, *states = tables(
        "memory --size small --world-size 1,2 --strategy none,fsdp --mode forward,train --precision bf16"
    )
    assert len(first["rows"]) == 8
    train = {(row["world_size"], row["strategy"]): row for row in first["rows"] if row["mode"] == "train"}
    assert train[2, "fsdp"]["optimizer_state_gib"] == pytest.approx(
        train[1, "none"]["optimizer_state_gib"] / 2, rel=1e-3
    )
    forward = next(row for row in first["rows"] if row["mode"] == "forward")
    assert forward["gradients_gib"] is None
    assert forward["peak_gib"] < train[1, "none"]["peak_gib"]
    assert [table["name"] for table in states] == ["state", "state"]
    (masters, *_) = tables("memory --size small --strategy optimizer-flat --parameter-dtype bf16")[0]["rows"]
    assert masters["master_parameters_gib"] == pytest.approx(2 * masters["parameters"] / 2**30, rel=1e-3)


def test_activations_of_every_size_and_setting():
    found = tables("activations --size 2.7b --context 128,512 --precision bf16 --attention flash")
    assert [table["name"] for table in found] == ["tensors", "block"] * 2
    assert "context 512, bf16, flash attention" in found[3]["title"]
    residual = rows("activations")["tensor of the residual stream"]
    assert (residual["value"], residual["unit"]) == (20, "MiB")


def test_attention_grid_growth_and_the_shape_that_does_not_fit():
    grid, eager, flash = tables("attention --head-dim 64 --capacity-gib 24")
    last = [row for row in grid["rows"] if row["context"] == 16384]
    assert [(row["implementation"], row["fits"]) for row in last] == [("eager", False), ("flash", True)]
    assert last[0]["held_ratio"] == pytest.approx(4, rel=0.03)
    assert last[1]["held_ratio"] == last[1]["context_ratio"] == 2
    assert "context 16384, head dim 64, in the grid" in eager["title"]
    assert "beyond the grid" in flash["title"]
    assert eager["rows"][-1]["quantity"] == "peak"
    # 32.2 GiB fit into 33 GiB, not into 33e9 bytes.
    (last,) = tables("attention --head-dim 64 --context 16384 --implementation eager --capacity-gib 33")[0]["rows"]
    assert last["fits"]


def test_buckets_of_gradients():
    formulas, overheads = tables("buckets --gradients 9GB --bandwidth 1e11 --call-us 1 --bucket-mb 900,30")
    assert formulas["rows"][0]["quantity"] == "overhead of 10 buckets"
    assert formulas["rows"][1]["value"] == pytest.approx(30)
    assert [row["overhead_ms"] for row in overheads["rows"]] == [pytest.approx(9.01), pytest.approx(0.6)]
    assert rows("buckets --size tiny --gradient-dtype bf16")["bucket size with the least overhead"][
        "derivation"
    ].endswith("min(6.16986e6, sqrt(6.16986e6 x 3.2e11 x 2e-5))")


@pytest.mark.parametrize(("name", "ending"), [("parallel", "png"), ("memory", "svg")])
def test_pictures(name, ending, tmp_path):
    path = tmp_path / f"picture.{ending}"
    result = account(name, "--plot", path, "--output", tmp_path / "table.md")
    assert result.exit_code == 0, result.output
    head = path.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<svg" in head or b"<?xml" in head


def test_pictures_name_what_differs(tmp_path):
    path = tmp_path / "memory.svg"
    arguments = "--size small,medium --world-size 1,2 --strategy none,fsdp"
    assert account("memory", arguments, "--plot", path, "--output", tmp_path / "t.md").exit_code == 0
    text = path.read_text()
    for word in ("fsdp", "medium", "2 ranks", "optimizer state"):
        assert f"<!-- {word}" in text


def test_swept_sizes_and_precisions_of_a_predicted_step_are_columns():
    """Rows of all sizes were equal, under the title of the first."""
    result = account("step --size small,xl --precision fp32,bf16")
    assert result.exit_code == 0
    assert "### Predicted steps: context 512, H200\n" in result.stdout
    names = re.findall(r"^\| (\w+) +\| (fp32|bf16) +\| batch 4", result.stdout, re.MULTILINE)
    assert names == [("small", "fp32"), ("small", "bf16"), ("xl", "fp32"), ("xl", "bf16")]
    titles = re.findall("### Terms of a step: (.*), batch 4", result.stdout)
    assert titles == [", ".join(pair) for pair in names]


def test_a_simulation_of_one_kind_of_mesh():
    found = tables("scaling --size xl --devices 2,4 --scaling weak --mesh ddp,fsdp")
    assert [row["mesh"] for row in found[0]["rows"]] == ["ddp=2", "ddp=4", "fsdp=2", "fsdp=4"]
    assert "bf16, ddp's gradients in fp32, state in fp32" in found[0]["title"]


RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.mark.parametrize(
    ("ranks", "gradients", "file"),
    [(2, "fp32", "ddp-graph-fused"), (2, "bf16", "ddp-graph-fused"), (4, "bf16", "ddp-x4")],
)
def test_a_simulated_step_is_within_10_percent_of_the_measured_one(ranks, gradients, file):
    """xl in CUDA graphs on H200s, two sequences a rank: with the dtypes of what was measured."""
    (measured,) = [
        cell.samples["step"].median
        for cell in read_results(RESULTS / f"{file}-h200.jsonl.gz").cells
        if (cell.configuration["size"], cell.configuration["gradient_dtype"]) == ("xl", gradients)
        and cell.configuration["strategy"] == "bucketed"
    ]
    rates = [RESULTS / f"{name}-h200.jsonl.gz" for name in ("bench-fused", "allreduce-x4", "ddp-graph-fused")]
    arguments = [f"--size xl --devices {ranks} --scaling weak --device-batch-size 2 --mesh ddp"]
    arguments += ["--gradient-dtype", gradients, *(word for path in rates for word in ("--measured", f"{path}"))]
    (row,) = tables("scaling", arguments)[0]["rows"]
    assert row["step_ms"] == pytest.approx(measured, rel=0.1)
