import json
import math
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.utils.benchmark

from cs336sys.timing import calls, phases
from cs336sys.timing.calls import time_calls
from cs336sys.timing.phases import TorchProfiler, covered, time_phases
from cs336sys.timing.relative_error import ROW_TOLERANCE, error_columns, relative_error, relative_errors, why_wrong

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """The CPU's clock as ``timing`` reads it: only ``pass_ms`` moves it on."""
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)

    def pass_ms(duration_ms):
        clock.now_s += duration_ms / 1e3

    clock.pass_ms = pass_ms
    for module in (calls, phases):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_phases_run_in_order_and_are_charged_with_their_own_time(clock):
    calls = []
    phases = {
        "short": lambda: (calls.append("short"), clock.pass_ms(2)),
        "long": lambda: (calls.append("long"), clock.pass_ms(20)),
    }
    stages = []
    samples = time_phases(phases, warmup=1, steps=2, device=CPU, progress=stages.append)
    assert calls == ["short", "long"] * 3
    assert stages == ["warm-up 1/1", "step 1/2", "step 2/2"]
    assert samples["short"].measured == pytest.approx([2, 2])
    assert samples["long"].measured == pytest.approx([20, 20])
    assert samples["step"].measured == samples["wall"].measured == pytest.approx([22, 22])
    assert (samples["step"].unit, samples["step"].method) == ("ms", "cpu clock")
    assert [len(samples["step"].warmup), len(samples["step"].measured)] == [1, 2]


def test_phases_add_up_to_the_step_where_events_are_rounded(clock, monkeypatch):
    """CUDA rounds what passes between two events to half a microsecond."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_s = clock.now_s

        def elapsed_time(self, end):
            return round(2e3 * (1e3 * (end.at_s - self.at_s))) / 2e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    phases = {name: lambda: clock.pass_ms(1.00026) for name in ("forward", "backward", "optimizer")}
    samples = time_phases(phases, warmup=1, steps=2, device=torch.device("cuda"))
    assert samples["step"].measured == tuple(map(sum, zip(*(samples[name].measured for name in phases), strict=True)))


@pytest.mark.parametrize(("warmup_ms", "warm_calls"), [(39, 16), (0, 0)])
def test_calls_on_a_cpu_are_warmed_up_for_as_long_as_asked_for(clock, monkeypatch, warmup_ms, warm_calls):
    calls, calls_before = [], []
    timer = torch.utils.benchmark.Timer

    def started(*arguments, **options):
        calls_before.append(len(calls))
        return timer(*arguments, **options)

    def call():
        calls.append(None)
        clock.pass_ms(2.5)
        time.sleep(0.002)

    monkeypatch.setattr(torch.utils.benchmark, "Timer", started)
    samples = time_calls(call, CPU, warmup_ms, repetition_ms=1)
    assert calls_before == [warm_calls]
    assert len(calls) > warm_calls
    assert samples.median >= 2


def test_without_synchronisation_wall_spans_from_start_to_start():
    samples = time_phases({"only": lambda: None}, warmup=0, steps=3, device=CPU, synchronize_steps=False)
    assert len(samples["wall"].measured) == 3
    assert all(wall >= step for wall, step in zip(samples["wall"].measured, samples["step"].measured, strict=True))


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 5), (7, 9)], 7),
        ([(7, 9), (0, 5), (3, 8)], 9),
        ([(0, 10), (2, 3), (9, 11)], 11),
        ([(0, 5), (5, 6)], 6),
    ],
)
def test_covered_counts_overlap_once(intervals, length):
    assert covered(intervals) == length


@pytest.mark.gpu
def test_events_see_the_gpus_time_and_not_the_launch():
    device = torch.device("cuda")
    cycles = 100_000_000
    samples = time_phases({"sleep": lambda: torch.cuda._sleep(cycles)}, warmup=1, steps=3, device=device)
    assert samples["sleep"].method == "cuda events"
    assert min(samples["sleep"].measured) > 20
    # A busy CPU may take longer than the GPU, and never less.
    assert samples["wall"].median > 0.95 * samples["step"].median


@pytest.mark.gpu
def test_idle_gpu_is_not_busy():
    from cs336sys.timing.phases import gpu_busy_ms

    def step():
        torch.cuda._sleep(20_000_000)
        torch.cuda.synchronize()
        time.sleep(0.1)
        torch.cuda._sleep(20_000_000)

    started = time.perf_counter()
    busy_ms = gpu_busy_ms(step)
    assert 10 < busy_ms < (time.perf_counter() - started) * 1e3 - 90


def test_events_are_read_from_kineto_and_no_python_object_is_made_of_each(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profiler = TorchProfiler([torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        with profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
    assert profiler.profiler._function_events is None
    assert "aten::mm" in {event.name() for event in profiler.profiler.kineto_results.events()}
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::mm" in {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}


def results(seed=0, shape=(2, 4096, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_error_of_a_whole_is_the_ratio_of_norms():
    expected = results()
    found = expected + 1e-3 * results(1)
    error = relative_error(found.float(), expected)
    assert error.whole == pytest.approx((torch.dist(found, expected) / expected.norm()).item(), rel=1e-4)
    assert error.whole < error.row < 10 * error.whole


@pytest.mark.parametrize("row", [(0, 0), (1, 4095)])
def test_a_row_that_is_left_out_is_wrong_among_thousands(row):
    expected = results()
    found = expected.clone()
    found[row] = 0
    error = relative_error(found, expected)
    tolerance = 2e-2
    assert error.whole < tolerance < ROW_TOLERANCE * tolerance < error.row <= 1
    reason = why_wrong({"out": error}, tolerance)
    assert reason == f"relative error of a row over 0.2: out by {error.row:.1e}"
    assert why_wrong({"out": relative_error(expected, expected)}, tolerance) is None


def test_small_rows_are_held_against_usual_ones_and_large_ones_against_themselves():
    expected = torch.ones(100, 4, dtype=torch.float64)
    expected[0], expected[1] = 1e-6, 100
    usual = expected.norm(dim=-1).square().mean().sqrt()
    off_small, off_large = expected.clone(), expected.clone()
    off_small[0] += 0.01
    off_large[1] += 0.01
    assert relative_error(off_small, expected).row == pytest.approx(0.02 / usual.item())
    assert relative_error(off_large, expected).row == pytest.approx(0.01 / 100)


def test_elements_of_one_dimension_are_rows():
    expected = torch.ones(10_000, dtype=torch.float64)
    found = expected.clone()
    found[7] = 0
    assert relative_error(found, expected) == (0.01, 1)


def test_zeros_but_for_rounding_are_compared_with_the_inputs():
    expected = 1e-17 * results()
    assert relative_error(expected + 1e-8, expected).whole == pytest.approx(1e-8)
    assert relative_error(torch.full_like(expected, 0.5), expected).whole == pytest.approx(0.5)


def test_nan_is_wrong_and_kept():
    found = {"out": results(), "dq": torch.full((4, 4), math.nan)}
    errors = relative_errors(found, {"out": results(), "dq": torch.ones(4, 4, dtype=torch.float64)})
    assert why_wrong(errors, 1.0) == "relative error over 1: dq by nan"
    columns = error_columns(errors)
    assert columns["out_error"] == 0
    assert math.isnan(columns["dq_error"])
    assert math.isnan(columns["error_of_a_row"])
