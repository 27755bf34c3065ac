"""Captures of thousands of kernels, reports that nsys has to export, and others that are seldom seen."""

import pytest
from profile_files import NsysReport
from test_capture_figures import read

from cs336sys.capture import analysis, nsys, reading
from cs336sys.errors import UsageError


def test_kernels_beyond_the_most_are_one_group(monkeypatch):
    """Of 250 ns, 60 and 30 in the first step, and 7 in the second."""
    monkeypatch.setattr(analysis, "_MOST_GROUPS", 1)
    kernels = (
        "kernel long 10 20 270 | kernel middle 280 300 360 | kernel short 380 400 430 | kernel short 1010 1020 1027"
    )
    (of_gpu,) = read(f"range step 0 1000 | range step 1000 2000 | {kernels}").analyses
    longest, others = of_gpu.kernels
    assert (longest.name, longest.count, longest.ms) == ("long", (1, 0), (250e-6, 0))
    assert (others.name, others.kind) == ("(others)", "unclassified")
    assert (others.module, others.operator, others.shape) == ("", "", "")
    assert (others.count, others.ms) == ((2, 1), pytest.approx((90e-6, 7e-6)))
    assert others.own_ms == pytest.approx((90e-6, 7e-6))
    monkeypatch.setattr(analysis, "_MOST_GROUPS", 3)
    (of_gpu,) = read(f"range step 0 1000 | range step 1000 2000 | {kernels}").analyses
    assert [group.name for group in of_gpu.kernels] == ["long", "middle", "short"]


def test_a_report_is_exported_and_read_under_its_own_name(tmp_path, monkeypatch):
    report, exported = tmp_path / "mine.nsys-rep", []
    report.write_bytes(b"a report")

    def export(profiler, path, database):
        exported.append((profiler, path, database.name))
        written = NsysReport(database)
        written.ran("gemm", 20, 30, written.call(10))
        written.write()

    monkeypatch.setattr(reading, "find_nsys", lambda: "nsys 2025.3")
    monkeypatch.setattr(reading, "export", export)
    capture = reading.open_capture(report)
    assert exported == [("nsys 2025.3", report, "report.sqlite")]
    assert capture.work.start.tolist() == [20]
    monkeypatch.setattr(reading, "export", lambda profiler, path, database: database.write_bytes(b"no database"))
    with pytest.raises(UsageError, match=r"mine\.nsys-rep"):
        reading.open_capture(report)


def test_ranges_without_text_are_refused(tmp_path):
    report = NsysReport(tmp_path / "report.sqlite")
    report.ran("gemm", 20, 30, report.call(10))
    report.database.execute(
        "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER)"
    )
    with pytest.raises(UsageError, match=r"^has no column text in its table NVTX_EVENTS: "):
        nsys.load_export(report.write())
