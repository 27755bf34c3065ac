"""The profiler of the library: what is read of it is there, and what would take long is not made."""

import json
import warnings

import torch

from cs336sys.timing.phases import TorchProfiler


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
