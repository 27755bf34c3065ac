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


def test_pictures_name_what_differs(tmp_path):
    arguments = "--size small,medium --world-size 1,2 --strategy none,fsdp"
    for name, path in (("memory", tmp_path / "memory.svg"), ("parallel", tmp_path / "parallel.png")):
        options = arguments if name == "memory" else ""
        assert account(name, options, "--plot", path, "--output", tmp_path / "t.md").exit_code == 0
    text = (tmp_path / "memory.svg").read_text()
    assert all(f"<!-- {word}" in text for word in ("fsdp", "medium", "2 ranks", "optimizer state"))
    assert (tmp_path / "parallel.png").read_bytes().startswith(b"\x89PNG")


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
