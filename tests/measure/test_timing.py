import time

import pytest
import torch

from cs336sys.measure.timing import covered, time_calls, time_phases

CPU = torch.device("cpu")


def test_phases_run_in_order_and_are_charged_with_their_own_time():
    calls = []
    phases = {
        "short": lambda: (calls.append("short"), time.sleep(0.002)),
        "long": lambda: (calls.append("long"), time.sleep(0.02)),
    }
    stages = []
    samples = time_phases(phases, warmup=1, steps=2, device=CPU, progress=stages.append)
    assert calls == ["short", "long"] * 3
    assert stages == ["warm-up 1/1", "step 1/2", "step 2/2"]
    assert all(2 <= duration < 15 for duration in samples["short"].measured)
    assert all(20 <= duration < 60 for duration in samples["long"].measured)
    assert (samples["step"].unit, samples["step"].method) == ("ms", "cpu clock")
    assert [len(samples["step"].warmup), len(samples["step"].measured)] == [1, 2]


def test_calls_on_a_cpu_are_warmed_up_for_as_long_as_asked_for():
    called_at = []

    def call():
        called_at.append(time.perf_counter())
        time.sleep(0.002)

    samples = time_calls(call, CPU, warmup_ms=40, repetition_ms=1)
    assert samples.median >= 2
    warm = len(called_at)
    called_at.clear()
    time_calls(call, CPU, warmup_ms=0, repetition_ms=1)
    assert warm - len(called_at) >= 5


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
    assert samples["wall"].median == pytest.approx(samples["step"].median, rel=0.05)


@pytest.mark.gpu
def test_idle_gpu_is_not_busy():
    from cs336sys.measure.timing import gpu_busy_ms

    def step():
        torch.cuda._sleep(20_000_000)
        torch.cuda.synchronize()
        time.sleep(0.1)
        torch.cuda._sleep(20_000_000)

    started = time.perf_counter()
    busy_ms = gpu_busy_ms(step)
    assert 10 < busy_ms < (time.perf_counter() - started) * 1e3 - 90
