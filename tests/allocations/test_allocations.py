"""Timelines from each source: CUDA's history (a fake one), the CPU, fake tensors; and what autograd saves."""

import gc
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from fake_cuda_allocator import DEVICE, FakeCudaAllocator
from test_allocations_figures import STEP, step
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.cuda import _memory_viz

from cs336sys.allocations.dump import as_snapshot, write_snapshot
from cs336sys.allocations.history import CpuHistory, CudaHistory, FakeHistory
from cs336sys.allocations.recorder import StepRecorder, saved_tensors
from cs336sys.allocations.timeline import RECOMPUTATION, Origin, Region, Span, build_timeline
from cs336sys.allocations.without_values import WithoutValues
from cs336sys.errors import UsageError

pytestmark = pytest.mark.usefixtures("own_attention")


@pytest.fixture
def allocator(monkeypatch):
    return FakeCudaAllocator(monkeypatch)


def record_cuda(allocator, max_entries=100):
    """A step between a call before the recording and one after it."""
    allocator.alloc(90, 512)
    history = CudaHistory(DEVICE, max_entries)
    with history:
        marks = [history.mark()]
        allocator.alloc(10, 1024)
        allocator.alloc(11, 100)
        marks.append(history.mark())
        allocator.free(11, 100)
        allocator.free(90, 512)
        marks.append(history.mark())
    allocator.alloc(12, 4096)
    return history, [history.position(mark) for mark in marks]


def test_cuda_history_is_read_by_count(allocator):
    history, positions = record_cuda(allocator)
    assert [(event.address, event.size) for event in history.events] == [(10, 1024), (11, 100), (11, -100), (90, -512)]
    assert positions == [0, 2, 4]
    assert history.lost_events == 0
    assert history.events[0].code == "cs336_basics/model.py:51 forward"
    assert allocator.settings == {"context": "alloc", "stacks": "python", "max_entries": 100, "clear_history": True}
    assert allocator.max_entries is None, "the recording was switched off"


def test_entries_of_an_earlier_recording_are_left_out(allocator):
    """Should the history not be cleared."""
    allocator.max_entries = 100
    allocator.alloc(1, 7)
    history, positions = record_cuda(allocator)
    assert [event.address for event in history.events] == [10, 11, 11, 90]
    assert positions == [0, 2, 4]


def test_a_full_history_says_how_much_it_lost(allocator):
    """Of 8 entries the last 5 are kept: one of the allocation of 11, and two of each free."""
    history, positions = record_cuda(allocator, max_entries=5)
    assert [(event.address, event.size) for event in history.events] == [(11, 100), (11, -100), (90, -512)]
    assert history.lost_events == 1
    assert positions == [0, 1, 3]
    timeline = build_timeline(history.events, regions=[], lost_events=history.lost_events)
    assert timeline.lost_events == 1


class Double(nn.Module):
    """Two layers in a row, with a temporary between them: (3, 16) -> (3, 16)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32, bias=False)
        self.second = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x) * 2))


def record_double(history_of, freeze=lambda model: None):
    model = Double()
    freeze(model)
    x = torch.randn(3, 16)
    names = {module: name for name, module in model.named_modules()}
    history = history_of([x, *model.parameters()])
    recorder = StepRecorder(history, names, follow_operations=True)
    with recorder:
        with recorder.region("forward"):
            loss = model(x).sum()
        with recorder.region("backward"):
            loss.backward()
        del loss
    held = {"parameters": list(model.parameters()), "other": [x]}
    return recorder.timeline(live_tensors=held, held_size=None, optimizer_state=[])


def record_on_cpu():
    return record_double(lambda held: CpuHistory())


def record_on_fake_tensors():
    with FakeTensorMode():
        return record_double(FakeHistory)


@pytest.mark.parametrize("record", [record_on_cpu, record_on_fake_tensors])
def test_recorded_step(record):
    """3 x 32 numbers: the product (freed when it is doubled), twice it (freed when tanh is done), tanh (saved)."""
    timeline = record()
    made = [a for a in timeline.allocations if a.start > 0 and a.size > 8]
    forward = [(a.size, a.category, a.origin.module, a.origin.operation) for a in made if a.phase == "forward"]
    assert forward == [
        (384, "temporary", "first", "mm"),
        (384, "temporary", "", "mul"),
        (384, "activations", "", "tanh"),
        (192, "temporary", "second", "mm"),
    ]
    # A CPU's matrix product copies the expanded gradient of the sum, 192 bytes.
    made = [a for a in made[4:] if a.size != 192]
    backward = {(a.size, a.category, a.parameter, a.origin.module, a.origin.operation) for a in made}
    assert backward == {
        (2048, "gradients", "second.weight", "second", "MmBackward0"),
        (384, "temporary", "", "second", "MmBackward0"),
        (384, "temporary", "", "", "TanhBackward0"),
        (384, "temporary", "", "", "MulBackward0"),
        (2048, "gradients", "first.weight", "first", "MmBackward0"),
    }
    (gradient,) = (a for a in made if a.parameter == "first.weight")
    assert gradient.origin.code.endswith(f"allocations/test_allocations.py:{_line_of('first(x)')} forward")
    totals = timeline.totals()
    assert totals[0] == 4 * (2 * 16 * 32 + 3 * 16)
    assert totals[-1] == totals[0] + 2 * 2048
    assert [region.name for region in timeline.regions] == ["forward", "backward"]


def test_frozen_parameters_have_no_gradients():
    with FakeTensorMode():
        timeline = record_double(FakeHistory, lambda model: model.first.weight.requires_grad_(False))
    assert {a.parameter for a in timeline.allocations if a.category == "gradients"} == {"second.weight"}


def _line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_cpu_history_restores_onednn():
    before = torch.backends.mkldnn.enabled
    with CpuHistory():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_nested_recomputations_count_once():
    history = FakeHistory([])
    recorder = StepRecorder(history, {}, follow_operations=False)
    with FakeTensorMode(), recorder, recorder.region("backward"):
        for _ in range(2):
            with recorder.region(RECOMPUTATION):
                torch.ones(1)
                with recorder.region(RECOMPUTATION):
                    torch.ones(1)
    timeline = recorder.timeline(live_tensors={}, held_size=None, optimizer_state=[])
    assert timeline.regions == [Region(RECOMPUTATION, 0, 4), Region(RECOMPUTATION, 4, 8), Region("backward", 0, 8)]


def test_fake_numbers_read_as_zero():
    with FakeTensorMode(), WithoutValues():
        assert not (torch.ones(2) > 0).any()
        assert torch.ones(2).sum().item() == 0.0
        assert torch.ones(2, dtype=torch.int64).sum().item() == 0


def test_snapshot_opens_in_torchs_own_tools(tmp_path):
    """What was there before, every event, and what is left."""
    spans = [Span(0, 1, Origin("layers.0.attn", "bmm", "cs336_basics/model.py:178 forward"))]
    timeline = step(STEP[:9], spans=spans)
    path = tmp_path / "deep" / "s.pickle"
    write_snapshot(as_snapshot(timeline), path)
    snapshot = pickle.loads(path.read_bytes())
    (segment,) = snapshot["segments"]
    left = {b["frames"][0]["filename"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert left == {"parameters": 100, "optimizer state": 200, "gradients": 100}
    (trace,) = snapshot["device_traces"]
    actions = [entry["action"] for entry in trace]
    assert (actions.count("alloc"), actions.count("free_requested"), actions.count("free_completed")) == (5, 4, 4)
    assert trace[0]["frames"][1] == {"filename": "cs336_basics/model.py", "line": 178, "name": "forward"}
    assert trace[0]["frames"][2] == {"filename": "forward", "line": 0, "name": ""}
    assert "layers.0.attn bmm" in trace[0]["frames"][0]["name"]
    assert "13 entries" in _memory_viz.trace(snapshot)
    assert f"total_allocated: {_memory_viz.Bytes(400)}" in _memory_viz.segsum(snapshot)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    flames = io.StringIO()
    _memory_viz.memory(snapshot, format_flamegraph=lambda lines: flames.write(lines))
    assert "parameters" in flames.getvalue()


def test_snapshot_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(UsageError, match="cannot write the snapshot /proc/no/s"):
        write_snapshot({}, Path("/proc/no/s.pickle"))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        write_snapshot({"segments": [0] * 100_000, "device_traces": lambda: None}, tmp_path / "s.pickle")
    assert list(tmp_path.iterdir()) == []


class HandoutNorm(nn.Module):
    """RMSNorm as the handout's section 3.1 writes it."""

    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return self.weight * x


def test_handouts_norm():
    """The handout's hooks see six: x twice, rms twice, x * rms, and the weight, which is there anyway."""
    model = nn.Sequential(HandoutNorm(10))
    x = torch.randn(4, 5, 10, requires_grad=True)
    names = {module: name for name, module in model.named_modules()}
    found = saved_tensors(lambda: model(x), model.parameters(), names)
    assert [(t.shape, t.size, t.operation, t.module) for t in found] == [
        ((4, 5, 10), 800, "input", "0"),
        ((4, 5, 10), 800, "Mul", "0"),
        ((4, 5, 1), 80, "Rsqrt", "0"),
    ]
    assert all(t.dtype == "float32" and " forward" in t.code for t in found)
    assert "allocations/test_allocations.py:" in found[0].code


def test_nothing_stays_alive():
    """A node that saves its own result, as exp does, must not be kept alive by it."""
    made = []

    def run():
        result = torch.ones(3, requires_grad=True).exp()
        made.append(weakref.ref(result.untyped_storage()))
        return result

    assert len(saved_tensors(run, [])) == 1
    gc.collect()
    assert made[0]() is None


def test_views_of_parameters_do_not_count_and_other_views_count_whole():
    """A transposed weight is the parameter's own storage; of a slice the whole storage lives on."""
    weight = nn.Parameter(torch.randn(6, 4))
    x = torch.randn(5, 6, requires_grad=True)
    assert [t.shape for t in saved_tensors(lambda: x @ weight.T.T, [weight])] == [(5, 6)]
    (found,) = saved_tensors(lambda: x.exp()[:2].sin(), [])
    assert (found.shape, found.size, found.operation) in {((5, 6), 120, "Exp"), ((2, 6), 120, "Exp")}


def test_operation_is_found_behind_views():
    x = torch.randn(8, 3, requires_grad=True)
    (found,) = saved_tensors(lambda: (x * 2).view(4, 6).T.sin(), [])
    assert (found.shape, found.operation) == ((6, 4), "Mul")
