"""Where the time of a recorded step goes, of captures that no row of figures.txt has."""

import json

from profile_files import ChromeTrace, NsysReport
from test_capture_figures import read

from cs336sys.capture.analysis import Analysis
from cs336sys.capture.reading import read_captures


def analysis_of(names):
    """Return the analysis of kernels of these names, one after the other."""
    lines = (f"kernel {name} {20 * place} {20 * place + 10} {20 * place + 20}" for place, name in enumerate(names))
    (of_gpu,) = read(" | ".join(lines)).analyses
    return of_gpu


def test_steps_are_found_by_the_repetition_of_kernels():
    names = ["embed", *["qkv", "attend", "mlp"] * 4, "loss", *["grad_mlp", "grad_qkv"] * 4, "adam"]
    analysis = analysis_of(names * 5)
    assert (len(analysis.step_ms), analysis.has_steps) == (5, True)
    assert analysis.steps_are == f"by repetition, the same {len(names)} kernels 5 times"
    assert {kernel.name: kernel.count for kernel in analysis.kernels} == {
        name: (names.count(name),) * 5 for name in names
    }


def test_layers_of_one_step_are_no_steps():
    analysis = analysis_of(["embed", *["qkv", "attend", "mlp", "norm"] * 40, "loss"])
    assert (len(analysis.step_ms), analysis.has_steps) == (1, False)


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
