"""A cell of ``nsys``: which profiler is used, what becomes of failures, and what is kept."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_nsys import put_nsys
from profile_files import NsysReport, train_step

from cs336sys.capture.range_names import run_name
from cs336sys.capture.summary import Profile
from cs336sys.commands.nsys import measure as profiling
from cs336sys.errors import CapabilityError
from cs336sys.machine.diagnosis.software import Profiler
from cs336sys.settings.profiling import ProfileWorkload
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import Workload

TINY = Workload(choose_size("tiny", context=8, batch_size=1), warmup=1, steps=2)


def silent(stage):
    pass


@pytest.fixture
def use_nsys(tmp_path, monkeypatch):
    """Let a cell on the CPU use a fake nsys whose reports hold one step."""
    report = NsysReport(tmp_path / "report.sqlite")
    train_step(report)
    database = report.write()

    def use(**settings):
        nsys = Profiler(put_nsys(tmp_path / "nsys", database, **settings), "2025.3.1.0")
        monkeypatch.setattr(profiling, "_choose_nsys", lambda profiler, device: (nsys, None))

    return use


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_a_cell_on_the_cpu(mode):
    workload = ProfileWorkload(replace(TINY, mode=mode, device="cpu"))
    outcome = profiling.measure_profile(workload.configuration(), silent)
    assert outcome.status == "ok"
    profile = Profile.from_json(json.loads(json.dumps(outcome.derived["profile"])))
    expected = ["forward", "loss", *(["backward", "optimizer"] if mode == "train" else [])]
    assert [row.name for row in profile.phases] == expected
    assert list(outcome.samples) == [*expected, "step", "wall", "annotated"]
    assert {row.count for row in (*profile.phases, profile.step)} == {2}
    assert {part.name: part.count for part in profile.parts} == {
        "computing attention scores": 4,
        "computing softmax": 4,
        "final matmul": 4,
    }
    assert profile.configuration == workload.training.configuration()
    assert (outcome.derived["profiler"], outcome.derived["profiler_reason"]) == ("torch.profiler", None)
    assert sum(row.kernel_ns for row in profile.phases) >= 0.9 * profile.step.kernel_ns
    matmuls = [k for k in profile.kernels if k.kernel == "aten::mm" and k.range == "forward"]
    # Seven weights in each of two layers, and the output head; two steps.
    assert [k.count for k in matmuls] == [2 * (7 * 2 + 1)]


def test_a_cell_under_nsys_is_read_from_its_report(use_nsys, tmp_path):
    use_nsys()
    workload = ProfileWorkload(TINY, "nsys", keep=str(tmp_path / "kept"))
    outcome = profiling.measure_profile(workload.configuration(), silent)
    profile = Profile.from_json(outcome.derived["profile"])
    assert outcome.derived["profiler"] == "Nsight Systems 2025.3.1.0"
    assert [row.kernels for row in profile.phases] == [2, 1, 3, 1]
    assert "step" in outcome.samples, "timed without a profiler too"
    name = TINY.name
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {f"{name}.nsys-rep", f"{name}.sqlite"}
    options = json.loads((tmp_path / "nsys" / "options.json").read_text())
    assert {"--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--cuda-graph-trace=node"} <= set(options)
    program, configuration = options[options.index("-c") + 1 : options.index("-c") + 3]
    assert "run_module('cs336sys.commands.nsys.measure'" in program
    assert Workload.from_configuration(json.loads(configuration)) == TINY


def test_message_of_the_profiled_process_is_the_outcome(use_nsys):
    use_nsys(outcome='{"status": "oom", "reason": "out of memory at warm-up: no room"}', leaves_report=False)
    outcome = profiling.measure_profile(ProfileWorkload(TINY, "auto").configuration(), silent)
    assert (outcome.status, outcome.reason) == ("oom", "out of memory at warm-up: no room")


def test_a_profiled_process_that_dies_is_an_error(use_nsys):
    use_nsys(outcome="")
    outcome = profiling.measure_profile(ProfileWorkload(TINY, "nsys").configuration(), silent)
    assert (outcome.status, outcome.reason) == ("error", "the profiled process ended before its steps were done")


def test_an_nsys_that_leaves_no_report_is_refused_or_replaced(use_nsys):
    use_nsys(leaves_report=False)
    sentence = "nsys 2025.3.1.0 left no report: Importer error status: libdw.so.1 cannot be loaded"
    with pytest.raises(CapabilityError, match=sentence):
        profiling.measure_profile(ProfileWorkload(TINY, "nsys").configuration(), silent)
    outcome = profiling.measure_profile(ProfileWorkload(TINY, "auto").configuration(), silent)
    assert outcome.status == "ok"
    assert outcome.derived["profiler"] == "torch.profiler"
    assert outcome.derived["profiler_reason"].startswith(sentence)


def test_the_window_holds_the_measured_steps_and_not_the_warm_up():
    events = []

    def start(name):
        events.append(f"+{name}")
        return lambda: events.append(f"-{name}")

    @contextlib.contextmanager
    def window():
        end = start("capture")
        yield
        end()

    marks = SimpleNamespace(start=start, range=lambda name: contextlib.nullcontext())
    workload = replace(TINY, device="cpu", mode="forward-backward", steps=1)
    profiling._run_annotated(workload, torch.device("cpu"), marks, window(), silent)
    run = run_name(workload.configuration())
    step = [f"{sign}{name}" for name in ("forward", "loss", "backward") for sign in "+-"]
    phases = [event for event in events if not event.endswith(" backward")]
    assert phases == [
        *("+warm-up", "-warm-up", "+capture", f"+{run}", "+warm-up", "-warm-up", "+step", *step, "-step"),
        *(f"-{run}", "-capture"),
    ]
    in_backward = events[events.index("+backward") : events.index("-backward")]
    assert "+block 1 backward" in in_backward


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_no_kernels_seen_on_a_gpu_is_never_a_profile(monkeypatch, tmp_path):
    """Where CUPTI fails, torch.profiler's trace holds the CPU's operations alone."""
    real_step = profiling.TrainStep
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(profiling, "TrainStep", lambda workload, device: real_step(workload, torch.device("cpu")))
    with pytest.raises(CapabilityError, match=r"torch\.profiler saw no work on the GPU"):
        profiling._profile_under_torch(ProfileWorkload(TINY), torch.device("cuda"), tmp_path, silent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_profiled_process_writes_its_outcome(tmp_path):
    configuration = json.dumps(TINY.configuration())
    profiling._main(configuration, str(tmp_path / "outcome.json"))
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["status"] == "unsupported"
    assert outcome["reason"].startswith("nsys traces GPU work, and this machine has no GPU")


@pytest.mark.gpu
def test_steps_on_a_gpu_by_torch_profiler():
    workload = ProfileWorkload(replace(TINY, device="cuda"), "torch")
    outcome = profiling.measure_profile(workload.configuration(), silent)
    profile = Profile.from_json(outcome.derived["profile"])
    assert profile.is_gpu
    assert profile.attributed_percent > 99
    assert sum(row.kernel_ns for row in profile.phases) == pytest.approx(profile.step.kernel_ns, rel=0.01)
    assert {part.name for part in profile.parts if part.kernels}
