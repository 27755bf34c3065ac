"""``nsys`` as a user runs it: on its own, under nsys, and on a report; with bad input."""

import shutil

import pytest
import torch
from profile_files import NsysReport, train_step
from run_commands import imported_by, invoke, tables

from cs336sys.capture.range_names import run_name
from cs336sys.settings.sizes import SIZES
from cs336sys.settings.training import Workload

pytestmark = pytest.mark.usefixtures("kept_workers")

TINY = "nsys --size tiny --device cpu --batch-size 2 --context 24 --steps 2"


def read(path, *words):
    """The tables of ``nsys --from``."""
    return tables(invoke("nsys --from", path, words, "--format json"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """fp32 and bf16, compared, with cells that cannot fit any machine."""
    folder = tmp_path_factory.mktemp("nsys")
    options = "--warmup 1 --compare-precision --batch-size 1000000000000 --force"
    files = ("--keep", folder / "kept", "--save", folder / "r.jsonl", "--plot", folder / "r.png")
    arguments = (TINY, options, files, "--format json")
    return invoke(arguments), folder, arguments


def test_a_sweep_shows_every_cell(sweep):
    assert (sweep[1] / "r.png").read_bytes().startswith(b"\x89PNG")
    found = tables(sweep[0])
    assert list(found) == ["phases", "top kernel", "kernels", "other kernels", "shares", "attention", "precisions"]
    rows = found["phases"]["rows"]
    names = ["forward", "loss", "backward", "optimizer", "step"]
    ok = [(row["precision"], row["phase"]) for row in rows if row["status"] == "ok"]
    assert ok == [(precision, name) for precision in ("fp32", "bf16") for name in names]
    failed = [row for row in rows if row["status"] != "ok"]
    assert [(row["status"], row["precision"]) for row in failed] == [("oom", "fp32"), ("oom", "bf16")]
    assert all(row[key] is None for row in failed for key in ("busy_ms", "kernels", "unprofiled_ms_mean"))
    for precision in ("fp32", "bf16"):
        cell = {row["phase"]: row for row in rows if row["precision"] == precision and row["status"] == "ok"}
        parts = sum(cell[name]["kernel_ms"] for name in names[:-1])
        assert parts == pytest.approx(cell["step"]["kernel_ms"], rel=0.05)
        assert cell["backward"]["kernels"] > cell["forward"]["kernels"]
        assert all(row["launch_bound"] is None for row in cell.values())
    notes = found["phases"]["notes"]
    assert any(note.startswith("no GPU: CPU operations replace kernels") for note in notes)
    assert "profiled by torch.profiler" in notes
    assert any(note.startswith("oom: out of memory at building the model") for note in notes)


def test_kernels_and_their_kinds(sweep):
    found = tables(sweep[0])
    forward = [row for row in found["kernels"]["rows"] if row["phase"] == "forward" and row["precision"] == "fp32"]
    assert len(forward) == 5
    assert [row["total_ms"] for row in forward] == sorted((row["total_ms"] for row in forward), reverse=True)
    assert "aten::mm" in {row["kernel"] for row in forward}
    assert "matmul" not in {row["category"] for row in found["other kernels"]["rows"]}
    for row in found["shares"]["rows"]:
        assert sum(row[key] or 0 for key in row if key.endswith("_percent")) == pytest.approx(100)
    compared = {row["phase"]: row for row in found["precisions"]["rows"]}
    assert {"forward", "step", "computing attention scores"} <= set(compared)
    assert all(
        row["busy_speedup"] == pytest.approx(row["fp32_busy_ms"] / row["bf16_busy_ms"]) for row in compared.values()
    )


def test_a_kept_trace_gives_the_same_tables(sweep):
    result, folder, _ = sweep
    (path,) = (folder / "kept").glob("*fp32*.trace.json.gz")
    found = read(path, "--plot", folder / "shares.png")
    assert (folder / "shares.png").read_bytes().startswith(b"\x89PNG")
    of_sweep = tables(result)
    for name in ("kernels", "shares", "attention"):
        for row, other in zip(found[name]["rows"], of_sweep[name]["rows"], strict=False):
            assert {key: row[key] for key in row if key in other} == {key: other[key] for key in row if key in other}
    assert found["phases"]["title"] == f"nsys: {path.name}, made by torch.profiler"


@pytest.fixture
def report(tmp_path):
    """Two steps of ``tiny``, as our own run under nsys leaves them."""
    recorder = NsysReport(tmp_path / "report.sqlite")
    workload = Workload(SIZES["tiny"], precision="bf16")
    recorder.range(run_name(workload.configuration()), 0, 4000)
    for start in (0, 2000):
        train_step(recorder, start)
        recorder.range("computing attention scores", start + 5, start + 15, kind=59)
        recorder.range("computing softmax", start + 15, start + 30, kind=59)
        recorder.range("final matmul", start + 30, start + 40, kind=59)
    return recorder.write()


def test_a_report_of_our_own_says_what_was_run(report):
    found = read(report)
    rows = {row["phase"]: row for row in found["phases"]["rows"]}
    assert {(row["size"], row["context"], row["precision"]) for row in rows.values()} == {("tiny", 512, "bf16")}
    assert [rows[name]["kernels"] for name in ("forward", "loss", "backward", "optimizer", "step")] == [2, 1, 3, 1, 7]
    forward = rows["forward"]
    assert (forward["wall_ms"], forward["busy_ms"]) == (pytest.approx(285e-6), pytest.approx(160e-6))
    assert (forward["idle_percent"], forward["launch_bound"]) == (pytest.approx(100 * (1 - 160 / 285)), "yes")
    (attention,) = found["attention"]["rows"]
    assert (attention["scores_ms"], attention["softmax_ms"]) == (pytest.approx(100e-6), pytest.approx(110e-6))
    shares = {row["phase"]: row for row in found["shares"]["rows"]}
    # 100 and 80 of 380 ns; the optimizer's kernel, 80 ns, is elementwise by its name.
    assert shares["step"]["matmul_percent"] == pytest.approx(100 * 180 / 380)
    assert shares["step"]["optimizer_percent"] == pytest.approx(100 * 80 / 380)
    assert shares["optimizer"]["elementwise_percent"] == 100
    (top,) = found["top kernel"]["rows"]
    assert (top["first_kernel"], top["first_instances"]) == ("triton_poi_fused_add_0", 1)
    assert (top["both_kernel"], top["both_instances"]) == ("triton_poi_fused_add_0", 1)


def test_reading_a_report_needs_no_torch(report):
    assert "torch" not in imported_by(f"nsys --from {report}")


def test_a_folder_of_one_report_is_read_and_one_of_two_is_refused(report):
    folder = report.parent
    (folder / "config.json").write_text("{}")
    assert "phases" in read(folder)
    shutil.copyfile(report, folder / "other.sqlite")
    refused = invoke("nsys", "--from", folder)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "one report is read at a time, not " in refused.stderr


def test_ranges_of_another_program(tmp_path):
    recorder = NsysReport(tmp_path / "other.sqlite")
    long_name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, X>(int)"
    for start in (0, 100):
        recorder.range("prefill, layer 0", start, start + 50)
        recorder.range("decode", start + 50, start + 90)
        recorder.range("wait", start + 90, start + 95)
        recorder.kernel(long_name, start + 10, start + 20, start + 30)
        recorder.kernel("nvjet", start + 60, start + 70, start + 72)
        recorder.kernel("nvjet", start + 62, start + 72, start + 74)
    path = recorder.write()
    ranges = "--range 'prefill, layer 0' --range decode"
    found = read(path, ranges)
    expected = [("prefill, layer 0", 1), ("decode", 2)]
    assert [(row["phase"], row["kernels"]) for row in found["phases"]["rows"]] == expected
    assert "size" not in found["phases"]["rows"][0]
    assert found["kernels"]["rows"][0]["kernel"] == "vectorized_elementwise add<fp32>"
    assert found["kernels"]["rows"][1]["instances"] == 2
    full = read(path, ranges, "--full-names --top 1")
    assert [row["kernel"] for row in full["kernels"]["rows"]] == [long_name, "nvjet"]
    assert "attention" not in found
    note = "phases: the program's own annotations, the outermost; others are chosen with --range"
    assert read(path)["phases"]["notes"][0] == note
    result = invoke("nsys", "--from", path, "--range", "decoder")
    assert (result.exit_code, result.stdout) == (2, "")
    assert ": --range 'decoder': the capture has no range of this name; it has 'decode', 'prefill" in result.stderr
    listed = read(path, "--range decode,wait")["phases"]["rows"]
    assert [row["phase"] for row in listed] == ["decode", "wait"]


def test_different_kernels_of_one_short_name_are_numbered(tmp_path):
    recorder = NsysReport(tmp_path / "r.sqlite")
    recorder.range("forward", 0, 100)
    for number, dtype in enumerate(("int, float", "long, float")):
        recorder.kernel(f"void cub::Kernel3<{dtype}>({dtype})", 10 + number, 20, 30 + number)
    found = read(recorder.write())
    assert [row["kernel"] for row in found["kernels"]["rows"]] == ["Kernel3", "Kernel3 (2)"]
    assert "unclassified: Kernel3" in found["shares"]["notes"]


PROFILED = {"NSYS_PROFILING_SESSION_ID": "1"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_under_nsys_the_steps_run_in_this_process():
    result = invoke(TINY, env=PROFILED)
    sentence = "error: nsys traces GPU work, and this machine has no GPU: run without nsys, with --device cpu"
    assert (result.exit_code, result.stderr.strip()) == (3, sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--size tiny,small", "one report can hold one run, not 2: give each list option one value"),
        ("--save r.jsonl", "--save: this process runs under nsys, which writes a report for --from to read"),
        ("--profiler torch", "--profiler torch: this process runs under nsys"),
    ],
)
def test_under_nsys_what_makes_no_sense_is_refused(arguments, sentence):
    result = invoke("nsys", arguments, env=PROFILED)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
