"""Where the time of a recorded step goes: every instant to one thing, and the parts add up to the step."""

import json
import math

import pytest
from profile_files import ChromeTrace, NsysReport

from cs336sys.capture.analysis import Analysis
from cs336sys.capture.operators import operator_work, roofline
from cs336sys.capture.reading import read_captures
from cs336sys.errors import UsageError


@pytest.fixture
def trace(tmp_path):
    return ChromeTrace(tmp_path / "trace.json")


def analysis_of(recorder, step=None) -> Analysis:
    (found,) = read_captures([recorder.write()], step).analyses
    return found


def in_ns(analysis, number=0):
    return {part: round(values[number] * 1e6) for part, values in analysis.parts.items()}


def work(trace, name, launched, start, stop, stream=7, category="kernel", **about):
    trace.kernel(name, launched, start, stop, category=category)
    trace.events[-1]["args"] |= {"stream": stream, **about}


def test_parts_of_a_step_add_up_and_no_instant_counts_twice(trace):
    trace.range("step", 0, 1000)
    work(trace, "gemm", 10, 100, 300)
    work(trace, "ncclDevKernel_AllReduce", 20, 250, 400, stream=20)
    work(trace, "elementwise", 30, 280, 320)
    work(trace, "Memcpy HtoD", 40, 390, 450, stream=21, category="gpu_memcpy", bytes=6000)
    work(trace, "gemm", 500, 520, 1000)
    found = analysis_of(trace)
    assert found.step_ms == (pytest.approx(1e-3),)
    assert in_ns(found) == {
        "computing": 220 + 480,
        "communication alone": 80,
        "copies alone": 50,
        # 0 to 100 for the first launch, and 450 to 520.
        "launching": 170,
    }
    assert sum(in_ns(found).values()) == 1000
    own = {kernel.name: round(sum(kernel.own_ms) * 1e6) for kernel in found.kernels}
    assert own == {"gemm": 680, "elementwise": 20, "ncclDevKernel_AllReduce": 80, "Memcpy HtoD": 50}
    assert found.totals["kernel_ms"] == pytest.approx((200 + 150 + 40 + 480) / 1e6)
    assert found.totals["busy_ms"] == pytest.approx(830 / 1e6)
    assert found.totals["communication_ms"] == pytest.approx(150 / 1e6)
    (copy,) = found.copies
    assert (copy.bytes, copy.count) == (6000, 1)


def test_idle_time_belongs_to_what_kept_the_next_kernel_from_beginning(trace):
    trace.range("step", 0, 2000)
    work(trace, "gemm", 0, 0, 100)
    # Launched late, after a call that waited for the GPU.
    trace.event("cuda_runtime", "cudaStreamSynchronize", 50, 110, 1)
    work(trace, "gemm", 150, 200, 300)
    # Launched late for no reason.
    work(trace, "gemm", 350, 400, 500)
    # Launched in time, on the same stream and on another.
    work(trace, "gemm", 360, 510, 600)
    work(trace, "gemm", 370, 630, 700, stream=8)
    # After the next batch.
    trace.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 650, 900)
    work(trace, "gemm", 950, 1000, 1100)
    trace.event("kernel", "gemm", 1200, 2000, "stream 7", 0, device=0, stream=7)
    assert in_ns(analysis_of(trace)) == {
        "computing": 100 + 100 + 100 + 90 + 70 + 100 + 800,
        "synchronising call": 100,
        "launching": 100 + 100,
        "data loader": 200,
        "another stream": 30,
        "between kernels": 10,
        "unknown": 100,
    }


def test_a_step_ends_when_its_work_has_run(trace):
    for number in range(3):
        trace.range(f"ProfilerStep#{number}", 100 * number, 100 * number + 99)
        work(trace, "gemm", 100 * number + 10, 300 * number + 50, 300 * number + 350)
    found = analysis_of(trace)
    assert [round(ms * 1e6) for ms in found.step_ms] == [350, 300, 300]
    assert found.steps_are == "those that torch.profiler was told of"
    assert [sum(kernel.count) for kernel in found.kernels] == [3]


def test_steps_are_found_by_the_repetition_of_kernels(trace):
    names = ["embed", *["qkv", "attend", "mlp"] * 4, "loss", *["grad_mlp", "grad_qkv"] * 4, "adam"]
    at = 0
    for _ in range(5):
        for name in names:
            work(trace, name, at, at + 10, at + 20)
            at += 20
    found = analysis_of(trace)
    assert (len(found.step_ms), found.has_steps) == (5, True)
    assert found.steps_are == f"by repetition, the same {len(names)} kernels 5 times"
    assert all(kernel.count == (len(kernel.count) and kernel.count[0],) * 5 for kernel in found.kernels)


def test_layers_of_one_step_are_no_steps(trace):
    for number, name in enumerate(["embed", *["qkv", "attend", "mlp", "norm"] * 40, "loss"]):
        work(trace, name, 20 * number, 20 * number + 10, 20 * number + 20)
    found = analysis_of(trace)
    assert (len(found.step_ms), found.has_steps) == (1, False)


def test_operators_are_known_by_the_number_that_kernels_carry(trace):
    trace.range("step", 0, 1000)
    about = {"External id": 3, "Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2}
    trace.event("cpu_op", "aten::mm", 5, 30, 1, **about)
    work(trace, "gemm", 10, 100, 200)
    (kernel,) = analysis_of(trace).kernels
    assert kernel.operator == "aten::mm"
    found = operator_work(kernel.operator, kernel.shape)
    assert (found.flops, found.bytes, found.precision) == (2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16), "bf16")


def test_attention_backward_writes_the_gradients_of_query_key_and_value():
    query, key = [2, 8, 128, 64], [2, 2, 1024, 64]  # Grouped: a key and a value for four heads of queries.
    forward = operator_work(
        "aten::_scaled_dot_product_flash_attention", json.dumps([[query, key, key], ["c10::BFloat16"] * 3])
    )
    assert forward.bytes == 2 * 2 * (math.prod(query) + math.prod(key))
    backward = operator_work(
        "aten::_scaled_dot_product_flash_attention_backward",
        json.dumps([[query, query, key, key, query], ["c10::BFloat16"] * 5]),
    )
    read, written = 3 * math.prod(query) + 2 * math.prod(key), math.prod(query) + 2 * math.prod(key)
    assert (backward.flops, backward.bytes) == (2.5 * forward.flops, 2 * (read + written))


def test_roofline_names_the_longer_of_both_times():
    size = 8192
    products = operator_work("aten::mm", json.dumps([[[size, size]] * 2, ["c10::BFloat16"] * 2]))
    line = roofline(products, 2 * size**3 / 494.7e12, "NVIDIA H100 80GB HBM3")
    assert (line.bound, line.percent) == ("FLOPs", pytest.approx(50))
    vector = operator_work("aten::mm", json.dumps([[[1, size], [size, size]], ["float"] * 2]))
    assert roofline(vector, 1.0, "NVIDIA H100 80GB HBM3").bound == "bytes"
    assert roofline(vector, 1.0, "a GPU of tomorrow").percent is None
    assert operator_work("aten::mm", "[[[]") is None
    assert operator_work("aten::frobnicate", json.dumps([[[2]], ["float"]])) is None


def test_reports_of_nsys_give_the_same_parts(tmp_path):
    report, trace = NsysReport(tmp_path / "report.sqlite"), ChromeTrace(tmp_path / "trace.json")
    for recorder in (report, trace):
        recorder.range("step", 0, 1000)
        recorder.kernel("gemm", 10, 100, 300)
        recorder.kernel("gemm", 20, 310, 400)
        recorder.kernel("elementwise", 500, 520, 1000)
    of_report, of_trace = analysis_of(report), analysis_of(trace)
    assert of_report.parts == of_trace.parts
    assert of_report.kernels == of_trace.kernels


def test_an_analysis_survives_a_results_file(trace):
    trace.range("step", 0, 1000)
    work(trace, "ncclDevKernel_AllReduce", 10, 100, 300)
    trace.event("cuda_runtime", "cudaDeviceSynchronize", 200, 310, 1)
    found = analysis_of(trace)
    assert Analysis.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_work_of_an_accelerator_that_is_not_known_is_no_capture_of_a_cpu(trace):
    trace.event("mtia_ccp_events", "fc", 0, 10, 1)
    trace.operation("aten::mm", 0, 10)
    with pytest.raises(UsageError, match=r"work of an accelerator \('mtia_ccp_events'\)"):
        analysis_of(trace)
