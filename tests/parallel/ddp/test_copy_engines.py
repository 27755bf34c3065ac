"""Means that copy engines send: where tensors lie in a box, who writes which box when, and who is refused."""

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from cs336sys.parallel import copy_engines, ddp
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.copy_engines import CopiedMean, CopyEngines


class Group:
    """One of ``size`` ranks."""

    def __init__(self, rank, size=2):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


@pytest.mark.parametrize("dtype", copy_engines.DTYPES)
def test_means_are_exact_and_the_same_on_both_ranks(dtype):
    from cs336sys.parallel.mean_kernel import average_

    torch.manual_seed(0)
    # The last tile is not full.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first, second = (scale * torch.randn(4099, device=device) for scale in (1, 100))
    first, second = first.to(dtype), second.to(dtype)
    ours, theirs = first.clone(), second.clone()
    average_(ours, second)
    average_(theirs, first)
    expected = ((first.double() + second.double()) / 2).to(dtype)
    assert torch.equal(ours, theirs)
    # Triton's interpreter cuts off instead of rounding.
    torch.testing.assert_close(ours, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


class FakeStream:
    """Launches at once."""

    def __init__(self, *_):
        self.awaited, self.joined = [], []

    def wait_stream(self, other):
        self.joined.append(other)

    def wait_event(self, event):
        self.awaited.append(event)


class FakeEvent:
    is_recorded = False

    def record(self):
        self.is_recorded = True

    def wait(self):
        pass


@pytest.fixture
def two_ranks(monkeypatch):
    """The engines of two ranks, to be used by a thread each."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(copy_engines, "process_group", lambda group: group)
    monkeypatch.setattr(copy_engines, "gather_objects", lambda value, group: [value])
    boxes = [[torch.zeros(4096, dtype=torch.uint8) for _ in range(copy_engines._BOXES)] for _ in range(2)]
    meeting = threading.Barrier(2, timeout=60)

    class InThreads(CopyEngines):
        def _make_boxes(self, box_bytes, device):
            self.channels = []
            rank = self._group.rank()
            self._boxes = [(here, other, self) for here, other in zip(boxes[rank], boxes[1 - rank], strict=True)]

        def barrier(self, channel):
            self.channels.append(channel)
            meeting.wait()

    return [InThreads(Group(rank), 4096, torch.device("cpu")) for rank in range(2)]


def test_each_rank_averages_what_the_other_sent(two_ranks, monkeypatch):
    import cs336sys.parallel.mean_kernel as kernel

    monkeypatch.setattr(kernel, "average_", lambda own, other: own.copy_((own + other) / 2))
    # Ten buckets of two tensors go through four boxes, in two steps.
    given = [
        [[torch.full((size,), float(10 * number + rank + 1)) for size in (5, 33)] for number in range(10)]
        for rank in range(2)
    ]

    def run(rank):
        for _ in range(2):
            for number, bucket in enumerate(given[rank]):
                device, group = torch.device("cuda"), Group(rank)
                reduction = CopiedMean(two_ranks[rank], number, torch.float32, device, "tensors", group)
                reduction.start(bucket)
                reduction.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for number in range(10):
        for rank in range(2):
            for tensor in given[rank][number]:
                # The second step averages two equal means.
                assert tensor.tolist() == [10 * number + 1.5] * len(tensor), (number, rank)
    # What tells the other rank to fill a box again waits for the mean of what was in it: buckets 0 to 6 of ten, in the
    # barriers of buckets 3 to 9.
    for engines in two_ranks:
        assert engines._copy_stream.awaited[-7:] == engines._averaged_events[:7]
        assert len(engines._copy_stream.awaited) == 14
        assert engines.channels == 2 * [1, *10 * [0]]
        # What is sent was computed before, and what is averaged has arrived.
        assert len(engines._copy_stream.joined) == 20
        assert engines._average_stream.joined == [engines._copy_stream] * 20
        assert all(event.is_recorded for event in engines._averaged_events)


@pytest.fixture
def symmetric_memory(monkeypatch):
    """What torch is asked for, in place of memory that two GPUs can write."""
    asked = []

    def rendezvous(box, group):
        number = sum(call[0] == "rendezvous" for call in asked)
        asked.append(("rendezvous", tuple(box.shape), group.rank()))
        return SimpleNamespace(
            get_buffer=lambda rank, shape, dtype: asked.append(("buffer", rank, shape, dtype)) or f"of rank {rank}",
            number=number,
        )

    def empty(*shape, dtype, device):
        asked.append(("empty", shape, dtype, device.type))
        return torch.empty(*shape, dtype=dtype)

    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", empty)
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(copy_engines, "process_group", lambda group: group)
    monkeypatch.setattr(copy_engines, "gather_objects", lambda value, group: [None, value])
    return asked


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_four_boxes_and_writes_those_of_the_other(symmetric_memory, rank):
    engines = CopyEngines(Group(rank), 640, torch.device("cuda"))
    assert symmetric_memory == 4 * [
        ("empty", (640,), torch.uint8, "cuda"),
        ("rendezvous", (640,), rank),
        ("buffer", 1 - rank, (640,), torch.uint8),
    ]
    boxes, others, handles = zip(*engines._boxes, strict=True)
    assert [tuple(box.shape) for box in boxes] == 4 * [(640,)]
    assert list(others) == 4 * [f"of rank {1 - rank}"]
    assert [handle.number for handle in handles] == [0, 1, 2, 3]


def test_collectives_average_while_engines_are_switched_off(symmetric_memory, monkeypatch):
    engines = CopyEngines(Group(0), 640, torch.device("cuda"))
    started = []
    monkeypatch.setattr(copy_engines.MeanReduction, "start", lambda mean, tensors: started.append(tensors))
    monkeypatch.setattr(engines, "average", lambda tensors, number: (tensors, number))
    mean = CopiedMean(engines, 7, torch.float32, torch.device("cpu"), "tensors", Group(0))
    tensors = [torch.ones(2)]
    with engines.switched_off():
        mean.start(tensors)
    assert started == [tensors]
    mean.start(tensors)
    assert started == [tensors]
    assert mean._works == [(tensors, 7)]


def test_boxes_have_room_for_the_largest_bucket(monkeypatch):
    made = []

    class Engines:
        def __init__(self, group, box_bytes, device):
            made.append((group, box_bytes, device.type))

    monkeypatch.setattr(ddp, "require_copy_engines", lambda group, device, dtypes: made.append(dtypes))
    monkeypatch.setattr(ddp, "CopyEngines", Engines)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(40, 2), nn.Linear(2, 3), nn.Linear(3, 1))
        wrapped = ddp.BucketedDDP(model, 0.0001, gradient_dtype=torch.bfloat16, copy_engines=True)
        assert len(wrapped.buckets) == 2
        # The weight (2, 40) in bf16; others are smaller.
        assert made == [[torch.bfloat16] * len(wrapped.buckets), (None, 256, "cpu")]
        assert [bucket.reduction._number for bucket in wrapped.buckets] == list(range(len(wrapped.buckets)))
        assert all(bucket.reduction._engines is wrapped.copy_engines for bucket in wrapped.buckets)
    finally:
        dist.destroy_process_group()


class Branching(nn.Module):
    """Twelve layers of uneven sizes; one that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 + 3 * number, 67 + 3 * number) for number in range(12))
        self.sometimes = nn.Linear(100, 7)

    def forward(self, x, with_branch):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() + (self.sometimes(x).mean() if with_branch else 0.0)


@on_ranks(gpus=True)
@pytest.mark.parametrize("slow", [(0, "push"), (1, "push"), (0, "average"), (1, "average")])
@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
def test_gradients_are_those_of_collectives_whoever_is_slow(gradient_dtype, slow):
    """After steps with a rank that is late with what it sends, or with a mean."""
    from cs336sys.parallel import mean_kernel

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branching().cuda()
    # About a layer to a bucket: more buckets than boxes.
    by_collectives = ddp.BucketedDDP(copy.deepcopy(model), 0.02, gradient_dtype=gradient_dtype)
    by_copies = ddp.BucketedDDP(model, 0.02, gradient_dtype=gradient_dtype, copy_engines=True)
    assert len(by_copies.buckets) > copy_engines._BOXES
    average = mean_kernel.average_

    def late(own, other):
        torch.cuda._sleep(3_000_000)
        average(own, other)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if slow == (rank, "average"):
            monkeypatch.setattr(mean_kernel, "average_", late)
        for step in range(6):
            torch.manual_seed(100 * step + rank)
            x = torch.randn(16, 64, device="cuda")
            for wrapped in (by_collectives, by_copies):
                wrapped.zero_grad(set_to_none=step % 2 == 0)
                loss = wrapped(x, with_branch=rank == 0 or step % 3 > 0)
                if slow == (rank, "push"):
                    torch.cuda._sleep(30_000_000)
                loss.backward()
                wrapped.finish_gradient_synchronization()
            for expected, parameter in zip(by_collectives.parameters(), by_copies.parameters(), strict=True):
                difference = (parameter.grad - expected.grad).abs().max() / expected.grad.abs().max()
                assert difference < (1e-6 if gradient_dtype is None else 1e-2)
            first, second = gather_objects([parameter.grad.cpu() for parameter in by_copies.parameters()])
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
            with torch.no_grad():
                for parameter in [*by_collectives.parameters(), *by_copies.parameters()]:
                    parameter -= 0.1 * parameter.grad
