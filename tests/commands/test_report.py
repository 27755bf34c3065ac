"""``cs336sys report`` as a user runs it."""

import gzip
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app
from cs336sys.commands.report import handouts
from cs336sys.commands.report.problem import HANDOUTS

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def report(*arguments: str):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_writes_the_format_of_the_files_name_and_pictures_beside_it(tmp_path):
    page = tmp_path / "write-up.md"
    names = "ddp_overlap_individual_parameters_benchmarking,communication_accounting"
    result = report("--year", "2025", "--from", RESULTS / "ddp-fp32*", "--only", names, "--output", page)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("# CS336 Assignment 2: Systems, 2025")
    assert "![when rank 0 computes and when it communicates in one step](write-up-01.png)" in text
    assert (tmp_path / "write-up-01.png").read_bytes().startswith(b"\x89PNG")
    assert "## communication_accounting" in text
    assert "## nsys_profile" not in text


def test_the_courses_tests_are_read_from_pytests_file(tmp_path):
    cases = (
        '<testcase name="test_sharded_optimizer[a]"/><testcase name="test_sharded_optimizer[b]"><failure/></testcase>'
    )
    outcomes = tmp_path / "tests.xml"
    outcomes.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    result = report("--year", "2026", "--from", outcomes, "--only", "optimizer_state_sharding")
    sentence = r"The course's tests: 1 of 2 pass (test_sharded_optimizer\[a\]), not test_sharded_optimizer\[b\]."
    assert sentence in result.stdout


def test_outcomes_that_contradict_each_other_are_named(tmp_path):
    for name, outcome in {"first": "<failure/>", "second": ""}.items():
        case = f'<testcase name="test_sharded_optimizer">{outcome}</testcase>'
        (tmp_path / f"{name}.xml").write_text(f"<testsuites>{case}</testsuites>")
    sources = ["--from", tmp_path / "first.xml", "--from", tmp_path / "second.xml"]
    result = report("--year", "2026", *sources, "--only", "optimizer_state_sharding")
    assert "second.xml: contradicts an earlier file about test_sharded_optimizer" in result.stderr
    assert "report: 1 problem, 1 of 1 parts answered" in result.stderr


def test_files_that_cannot_be_read_are_named_and_the_rest_is_written_up(tmp_path):
    good = tmp_path / "warmup.jsonl.gz"
    good.write_bytes((RESULTS / "warmup-h200.jsonl.gz").read_bytes())
    foreign = {
        "damaged.jsonl.gz": gzip.compress(gzip.decompress(good.read_bytes()))[:200] + bytes(300),
        "newer.jsonl": b'{"schema_version": 99, "kind": "run"}\n',
        "notes.jsonl": b"notes of today\n",
        "pom.xml": b"<project/>",
        "laughs.xml": b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
        + b"".join(b'<!ENTITY %c "%s">' % (letter, b"&%c;" % (letter - 1) * 10) for letter in b"bcdefghij")
        + b"]><x>&j;</x>",
        "odd.xml": b'<?xml version="1.0" encoding="none"?><x/>',
    }
    for name, written in foreign.items():
        (tmp_path / name).write_bytes(written)
    (tmp_path / "folder.jsonl").mkdir()
    result = report("--year", "2025", "--from", tmp_path, "--only", "benchmarking_script")
    assert result.exit_code == 0
    for name in (*foreign, "folder.jsonl"):
        assert re.search(f"(?m)^warning: .*{re.escape(name)}.*; the report is written without it$", result.stderr), name
    assert "Without warm-up the first measured step takes" in result.stdout
    named = tmp_path / "notes.jsonl"
    result = report("--year", "2025", "--from", tmp_path, "--from", named, "--only", "benchmarking_script")
    assert result.exit_code == 1
    assert re.findall(r"(?m)^error: .*(notes|newer)\.jsonl", result.stderr) == ["notes"]
    assert "Without warm-up the first measured step takes" in result.stdout
    good.unlink()
    result = report("--year", "2025", "--from", tmp_path, "--only", "benchmarking_script")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "; and 2 more\n" in result.stderr


def test_plan_of_another_gpu_leaves_out_nothing_that_ranks_of_the_cpu_can_do(monkeypatch):
    """With one GPU what needs ranks was left out: "needs 2 GPUs, here is 1"."""
    monkeypatch.setattr("cs336sys.commands.report.handouts.memory_gib", lambda: (64.0, 32.0))
    result = report("--year", "2026", "--run", "--dry-run", "--gpu", "rtx5090", "--memory", "32GiB")
    assert result.exit_code == 0
    rows = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("| cs336sys")]
    assert [row[0].split("--board")[0].strip() for row in rows if row[4].strip() == "needs 2 GPUs, here is 1"] == [
        "cs336sys shard --size 8b"
    ]
    on_cpu = [row[0] for row in rows if "on Gloo ranks of the CPU: what the handout asks needs 2 GPUs" in row[4]]
    assert [line.split()[1] for line in on_cpu] == ["allreduce", "ddp", "shard", "shard"]
    assert all("--device cpu" in line and ("--size small" in line or "allreduce" in line) for line in on_cpu)
    large = next(row for row in rows if "--precision fp32,bf16" in row[0] and " bench " in row[0])
    assert large[4].strip() == "what does not fit becomes a result"
    roomy = report(
        "--year", "2026", "--dry-run", "--gpu", "b200", "--memory", "500GiB", "--only", "benchmarking_script"
    )
    assert "what does not fit" not in roomy.stdout


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("-1", 0), ("", 0), ("MIG-0f3c", 1)])
def test_the_plan_is_for_the_gpus_that_are_visible(monkeypatch, visible, count):
    gpus = [SimpleNamespace(index=i, uuid=f"GPU-{i}", name="NVIDIA H200", memory_total_gib=140.0) for i in range(2)]
    monkeypatch.setattr(handouts, "read_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert handouts.target_of(HANDOUTS[2026], size=None, device="auto").gpus == count


def test_the_plan_says_that_the_peak_of_a_gpu_is_not_known(monkeypatch):
    for name, is_told in (("NVIDIA L4", True), ("NVIDIA H200", False)):
        gpus = [SimpleNamespace(index=0, uuid="GPU-1", name=name, memory_total_gib=22.5)]
        monkeypatch.setattr(handouts, "read_gpus", lambda gpus=gpus: gpus)
        output = report("--year", "2026", "--run", "--dry-run", "--only", "benchmarking_script").stdout
        assert (f"Times are those of 20 TFLOP/s in fp32: the peak of {name} is not known" in output) is is_told


def test_run_measures_what_its_lines_say_and_a_second_run_goes_on(tmp_path, monkeypatch):
    # Neither is read by what it runs: these could not be.
    (tmp_path / "pyproject.toml").write_text('[tool.cs336sys.flash]\nsteps = "some"\n')
    monkeypatch.setenv("CS336SYS_FLASH_WARMUP", "many")
    monkeypatch.chdir(tmp_path)
    folder, page = tmp_path / "results", tmp_path / "report.html"
    options = ["--year", "2025", "--run", "--folder", folder, "--size", "tiny", "--device", "cpu", "--output", page]
    first = report(*options, "--only", "flash_forward")
    assert first.exit_code == 0, first.stderr
    assert "cs336sys.kernels.attention.FlashAttentionTorch</code>" in page.read_text()
    (saved,) = folder.glob("flash-*.jsonl.gz")
    size = saved.stat().st_size
    second = report(*options, "--only", "flash_forward")
    assert second.exit_code == 0
    assert saved.stat().st_size == size
