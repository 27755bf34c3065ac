"""A step in graphs: by a recorder that replays torch's operators on a CPU, and by CUDA's where there is a GPU."""

import gc

import pytest
import torch
import torch.nn.functional as F
from cs336_basics.optimizer import AdamW
from fake_cuda_graph import OperatorRecorder
from torch import nn

from cs336sys.errors import CapabilityError, CaptureError, UsageError
from cs336sys.training.cuda_graphs import CudaRecorder, GraphedStep

ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def recorder_on(device):
    return OperatorRecorder() if device == "cpu" else CudaRecorder(torch.device("cuda"))


class Training:
    """A small model, its data in place, and the three phases of its step."""

    def __init__(self, device="cpu", optimizer=AdamW, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
        self.optimizer = optimizer(self.model.parameters(), **({"capturable": True} | settings))
        self.x, self.y = torch.zeros(3, 8, device=device), torch.zeros(3, 4, device=device)
        self.loss = None
        self.phases = {"forward": self.forward, "backward": self.backward, "optimizer": self.update}

    def forward(self):
        self.loss = F.mse_loss(self.model(self.x), self.y)
        return self.loss

    def backward(self):
        self.loss.backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def launch(self, x, y):
        self.x.copy_(x)
        self.y.copy_(y)
        for run in self.phases.values():
            run()
        return self.loss.detach().clone()

    @property
    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def sgd_without_a_count(parameters, **_):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(count, device):
    torch.manual_seed(1)
    return [(torch.randn(3, 8).to(device), torch.randn(3, 4).to(device)) for _ in range(count)]


def graphed(training, **settings):
    device = training.x.device.type
    settings = {"optimizers": [training.optimizer], "recorder": recorder_on(device)} | settings
    return GraphedStep(training.phases, (training.x, training.y), **settings)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    ("optimizer", "settings"), [(AdamW, {}), (torch.optim.AdamW, {"fused": True}), (sgd_without_a_count, {})]
)
def test_replays_train_as_launches_do_bit_by_bit(device, optimizer, settings):
    launched, replayed = Training(device, optimizer, **settings), Training(device, optimizer, **settings)
    for _ in range(3):
        launched.launch(launched.x.clone(), launched.y.clone())
    step = graphed(replayed, warmup=3)
    assert all(map(torch.equal, launched.weights, replayed.weights)), "capturing must not train"
    for batch in batches(5, device):
        assert torch.equal(step(*batch), launched.launch(*batch))
    assert torch.equal(step(), launched.launch(*batch)), "the last batch again"
    assert all(map(torch.equal, launched.weights, replayed.weights))
    assert all(parameter.grad is None for parameter in replayed.model.parameters())
    assert list(step.phases) == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(2, 8), torch.zeros(3, 4)), r"input 0 is \(2, 8\) of torch.float32, and the step was captured"),
        ((torch.zeros(3, 8), torch.zeros(3, 4).double()), r"input 1 is \(3, 4\) of torch.float64, .* torch.float32"),
        ((torch.zeros(3, 8),), "1 inputs: the step was captured with 2"),
    ],
)
def test_data_of_another_shape_is_refused_before_anything_is_copied(inputs, message):
    training = Training()
    step = graphed(training)
    training.x.fill_(7)
    with pytest.raises(UsageError, match=message):
        step(*inputs)
    assert (training.x == 7).all()


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    "synchronizes", [lambda loss: loss.item(), lambda loss: loss[loss > 0]], ids=["item", "mask as an index"]
)
def test_waiting_for_the_gpu_inside_is_one_sentence(device, synchronizes):
    training = Training(device)
    forward = training.forward
    training.phases["forward"] = lambda: synchronizes(forward())
    with pytest.raises(
        CaptureError, match=r"^phase 'forward' cannot be captured in a CUDA graph: it waits for the GPU"
    ):
        graphed(training)


@pytest.mark.gpu
def test_a_process_goes_on_after_a_failed_capture():
    training = Training("cuda")
    training.phases["optimizer"] = lambda: training.model[0].weight.sum().item()
    before = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match=r"^phase 'optimizer' cannot"):
        graphed(training)
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(8, device="cuda").max() > 0  # torch's generator has left the capture, too.
    step = graphed(Training("cuda"))
    assert torch.isfinite(step(*step.inputs))


class CountsInAGroup(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["steps_done"] = self.param_groups[0].get("steps_done", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        (AdamW, {"capturable": False}, "^AdamW keeps its state 't' on the CPU, so a graph would repeat"),
        (CountsInAGroup, {}, "^CountsInAGroup changed its 'steps_done' on the CPU in a step"),
    ],
)
def test_optimizers_that_count_on_the_cpu_are_refused_before_the_capture(optimizer, settings, message):
    build = optimizer if settings else lambda parameters, **_: optimizer(parameters)
    with pytest.raises(CapabilityError, match=message) as refused:
        graphed(Training(optimizer=build, **settings), recorder=failing_recorder(AssertionError("captured")))
    assert not isinstance(refused.value, CaptureError)


def failing_recorder(error, cause=None):
    def record(run):
        raise error from cause

    recorder = OperatorRecorder()
    recorder.record = record
    return recorder


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("CUDA error: operation not permitted when stream is capturing", "it waits for the GPU"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless", "it copies between CPU and GPU"),
        ("CUDA error: capture has unjoined work\nmore", "it leaves work on another stream that it does not wait for"),
        ("Something else went wrong.\nmore", "Something else went wrong$"),
    ],
)
def test_errors_of_torch_are_explained(said, means):
    with pytest.raises(CaptureError, match=f"^phase 'forward' cannot be captured in a CUDA graph: {means}"):
        graphed(Training(), recorder=failing_recorder(RuntimeError(said)))


def test_running_out_of_memory_stays_what_it_is():
    error = RuntimeError("compiled code failed")
    with pytest.raises(RuntimeError, match="compiled code failed"):
        graphed(Training(), recorder=failing_recorder(error, torch.OutOfMemoryError("CUDA out of memory")))


def test_misuse_is_refused():
    for phases, settings, message in (
        ({"forward": print}, {"warmup": 0}, "warmup 0: one-time work must not be captured"),
        ({}, {}, "needs at least one phase and one input"),
    ):
        with pytest.raises(UsageError, match=message):
            GraphedStep(phases, (torch.zeros(1),), recorder=OperatorRecorder(), **settings)


@pytest.mark.gpu
def test_replays_take_no_memory_and_the_pool_is_counted():
    training = Training("cuda")
    step = graphed(training)
    assert step.pool_bytes >= training.x.nbytes
    held = torch.cuda.memory_allocated()
    for batch in batches(3, "cuda"):
        step(*batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - held <= 3 * 2 * 512
    pool = tuple(step.recorder._pool)
    # The loss is memory of the graphs.
    del step, training
    gc.collect()
    torch.cuda.empty_cache()
    assert all(tuple(segment["segment_pool_id"]) != pool for segment in torch.cuda.memory_snapshot())


def test_code_that_asks_sees_a_capture_in_the_last_warm_up_step(monkeypatch):
    """As transformers does, whose compiled blocks would be compiled anew within the capture."""
    answer, asked = lambda: False, []
    # A torch without CUDA has no answer.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)

    def forward():
        asked.append(torch.cuda.is_current_stream_capturing())
        if asked == [False, True]:
            raise ZeroDivisionError

    def capture(warmup):
        GraphedStep({"forward": forward}, (torch.zeros(1),), recorder=OperatorRecorder(), warmup=warmup)

    capture(3)
    assert asked[:3] == [False, False, True]
    assert torch.cuda.is_current_stream_capturing is answer
    asked.clear()
    with pytest.raises(ZeroDivisionError):
        capture(2)
    assert torch.cuda.is_current_stream_capturing is answer


def test_optimizer_that_refuses_a_capture_itself_is_refused_in_our_words(monkeypatch):
    """As torch's do that count on the CPU, once a step tells them of a capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Refusing(torch.optim.AdamW):
        def step(self, closure=None):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("capturable is False")
            for state in self.state.values():
                state["count"] = 1
            return super().step(closure)

    with pytest.raises(CapabilityError, match=r"^Refusing keeps its state 'count' on the CPU"):
        graphed(Training(optimizer=lambda parameters, **_: Refusing(parameters)))
