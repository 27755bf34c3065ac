"""``doctor`` as a user runs it, and what it measures of a GPU."""

import json
from functools import partial

import pytest
import torch
from run_commands import invoke, tables

from cs336sys.accounting.hardware import Ceilings, read_ceilings
from cs336sys.commands.doctor import measure as measuring
from cs336sys.commands.doctor.options import ceilings_table
from cs336sys.errors import UsageError
from cs336sys.results.model import Samples

doctor = partial(invoke, "doctor")


def test_this_machine_is_described():
    (table,) = tables(doctor("--format json")).values()
    rows = {row["name"]: row for row in table["rows"]}
    assert {"Python", "torch", "GPU", "C compiler", "nsys", "ncu", "RAM"} <= set(rows)
    for row in rows.values():
        assert row["verdict"] in ("ok", "warn")
        assert (row["fix"] is None) == (row["verdict"] == "ok"), row
        assert row["fix"] is None or "`" in row["fix"], f"no command to type: {row}"


def test_ceilings_are_those_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = doctor("--ceilings", tmp_path / "c.json")
    assert result.exit_code == 3
    assert "torch sees no CUDA GPU here" in result.output


# What a GPU reaches at most: measured, written, read, and used for the roofline of trace.
H200 = Ceilings("NVIDIA H200", {"fp32": 50.0, "tf32": 400.0, "bf16": 766.0, "fp16": 770.0}, 4260.0, 4.5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps(H200.to_json() | {"copy_gbps": 0}),
        json.dumps(H200.to_json() | {"tflops": {"bf16": 700}}),
        json.dumps(H200.to_json() | {"launch_us": "4"}),
        json.dumps(H200.to_json() | {"launch_us": float("nan")}),
        json.dumps(H200.to_json() | {"copy_gbps": float("inf")}),
        json.dumps(H200.to_json() | {"link_gbps": 0.0}),
        json.dumps(H200.to_json() | {"gpu": ""}),
        "[" * 100_000,
    ],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"holds no ceilings; write them by doctor --ceilings"):
        read_ceilings(path)


def test_rates_come_from_sizes_and_medians(monkeypatch):
    """Every call is said to take 1 ms: products of 64, copies of 4 KB, 200 launches."""
    monkeypatch.setattr(measuring, "_SIDES", (32, 64))
    monkeypatch.setattr(measuring, "_COPY_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    called = []

    def take_a_millisecond(call, device, warmup_ms, repetition_ms):
        called.append(call())
        return Samples("ms", "test", (9.0, 1.0, 1.0))

    for name in ("time_calls", "time_queued_calls"):
        monkeypatch.setattr(measuring, name, take_a_millisecond)
    found = measuring.measure_ceilings(torch.device("cpu"))
    assert found.tflops == dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), pytest.approx(2 * 64**3 / 1e-3 / 1e12))
    assert found.copy_gbps == pytest.approx(2 * 4096 / 1e-3 / 1e9)
    assert found.launch_us == pytest.approx(1e3 / 200)
    assert found.link_gbps is None
    assert [one.dtype for one in called[:8:2]] == [torch.float32, torch.float32, torch.bfloat16, torch.float16]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_no_gpu_exceeds_its_datasheet():
    found = measuring.measure_ceilings(torch.device("cuda", 0))
    parts = [row["datasheet_percent"] for row in ceilings_table(found).rows if row.get("datasheet_percent")]
    assert all(25 < part <= 102 for part in parts), found
    assert 0.5 < found.launch_us < 100
