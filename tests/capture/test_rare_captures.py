"""Reports that nsys has to export, and what else no row of figures.txt has."""

import json

import pytest
from profile_files import ChromeTrace, NsysReport
from test_capture_figures import read

from cs336sys.capture import nsys, reading
from cs336sys.capture.analysis import Analysis
from cs336sys.capture.reading import read_captures
from cs336sys.errors import UsageError


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


def test_reports_of_nsys_give_the_same_parts(tmp_path):
    analyses = []
    for recorder in (NsysReport(tmp_path / "report.sqlite"), ChromeTrace(tmp_path / "trace.json")):
        recorder.range("step", 0, 1000)
        recorder.kernel("gemm", 10, 100, 300)
        recorder.kernel("gemm", 20, 310, 400)
        recorder.kernel("elementwise", 500, 520, 1000)
        analyses += read_captures([recorder.write()]).analyses
    of_report, of_trace = analyses
    assert (of_report.parts, of_report.kernels) == (of_trace.parts, of_trace.kernels)


def test_an_analysis_survives_a_results_file():
    (of_gpu,) = read(
        "range step 0 1000 | kernel ncclAllReduce 10 100 300 | call cudaDeviceSynchronize 200 310"
    ).analyses
    assert Analysis.from_json(json.loads(json.dumps(of_gpu.to_json()))) == of_gpu
