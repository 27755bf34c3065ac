"""What cannot work, also by its class, or differs between ranks is refused by name on every rank."""

import copy
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from optimizer_models import CLASSES, SwitchedNorm, each_mode, sharded
from small_models import PartlyUsed, error_of, refusal_of, wait_at_most
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.machine.late_imports import importing_no_compiler
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.gradient_slices import mark_slice, require_elementwise
from cs336sys.parallel.rank_consistency import digest_of
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer, groups
from cs336sys.parallel.sharded_optimizer.groups import StepAgreement


class ClipsAll(torch.optim.Optimizer):
    """Clips by the norm of all gradients, as LAMB of some packages does, and adds random numbers."""

    def __init__(self, params, lr, max_norm=1.0, noise=0.0):
        super().__init__(params, {"lr": lr, "max_norm": max_norm, "noise": noise})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], group["max_norm"])
            for parameter in group["params"]:
                noise = group["noise"] * torch.randn_like(parameter)
                parameter.sub_(parameter.grad + noise, alpha=group["lr"])


@on_ranks(2)
def test_arguments_that_torch_refuses_are_refused_in_its_words():
    parameter = nn.Parameter(torch.ones(4))
    for params, settings, sentence in (
        (["weight"], {"lr": 1.0}, "optimizer can only optimize Tensors, but one of the params is str"),
        (parameter, {"lr": 1.0}, "params argument given to the optimizer should be an iterable of Tensors"),
        ([], {"lr": 1.0}, "optimizer got an empty parameter list"),
        ([parameter * 2], {"lr": 1.0}, "can't optimize a non-leaf Tensor"),
        ([parameter], {"lr": -1.0}, "Invalid learning rate: -1.0"),
        ([parameter], {"lr": -1.0, "flat": True}, "Invalid learning rate: -1.0"),
        ([parameter], {"lr": 1.0, "speed": 2}, "unexpected keyword argument 'speed'"),
    ):
        assert sentence in error_of(ShardedOptimizer, params, torch.optim.SGD, **settings)[1]
    message = error_of(ShardedOptimizer, [parameter], ClipsAll, lr=1.0)[1]
    assert message.startswith("ClipsAll cannot be sharded, because what it does to a parameter depends on the others")
    ShardedOptimizer([parameter], ClipsAll, lr=1.0, max_norm=1e9)
    ShardedOptimizer([parameter], ClipsAll, lr=1.0, max_norm=1e9, noise=0.1)
    members = [nn.Parameter(torch.ones(8, 8)), parameter]  # The last rank updates the vector.
    message = error_of(ShardedOptimizer, members, torch.optim.Muon)[1]
    assert message.startswith("ranks differ in what they train: nothing on rank 0, ValueError: Muon only supports 2D")
    message = error_of(ShardedOptimizer, [parameter], torch.optim.LBFGS)[1]
    assert message.startswith("LBFGS cannot be sharded: choose one that updates parameters one by one")
    message = "optimizer_cls AdamW: must be a subclass of torch.optim.Optimizer"
    assert error_of(ShardedOptimizer, [parameter], "AdamW") == ("UsageError", message)


# What the last rank changes of the groups and the options, and the difference, of the lines in figures.txt.
DIFFERENCES = {
    "missing": (
        lambda params, options: (params[:-1], torch.optim.AdamW, options),
        "parameter 3 of group 0 float32 (4,) strides (1,) trained on rank 0, nothing on rank",
    ),
    "no tensor": (
        lambda params, options: ([params[0], None, *params[2:]], torch.optim.AdamW, options),
        "TypeError: optimizer can only optimize Tensors, but one of the params is NoneType on rank",
    ),
    "class and options": (
        lambda params, options: (params, torch.optim.Adam, options | {"bucket_size_mb": 1.0, "lr": 0.2}),
        "bucket_size_mb=250.0, master_dtype=None, lr=0.1 on rank 0, Adam with flat=",
    ),
}


@on_ranks(2, 3)
@each_mode
@pytest.mark.parametrize("name", DIFFERENCES)
def test_construction_that_differs_on_the_last_rank_is_named_on_every_rank(mode, name):
    change, difference = DIFFERENCES[name]
    params = list(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).parameters())
    arguments, last = (params, torch.optim.AdamW, {"lr": 0.1, "flat": mode == "flat"}), dist.get_world_size() - 1
    params, optimizer_cls, options = change(params, arguments[2]) if dist.get_rank() == last else arguments
    message = refusal_of(ShardedOptimizer, params, optimizer_cls, **options)
    assert message.startswith("ranks differ in what they train: ")
    assert difference in message
    assert message.endswith(f" on rank {last}")


@on_ranks(2)
@each_mode
def test_misuse_is_refused(mode):
    model = PartlyUsed()
    model.never.requires_grad_(False)
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.1)

    def require_error(sentence, call, *args, **options):
        assert sentence in refusal_of(call, *args, **options)

    require_error("cannot be copied or pickled: choose consolidated_state_dict()", copy.deepcopy, optimizer)
    model.never.requires_grad_(True)
    require_error("never was unfrozen after it was sharded: call refresh() on every rank", optimizer.step)
    model.never.requires_grad_(False)
    optimizer.zero_grad()
    if mode == "flat":
        model(1.0, True).backward()
        group = {"params": [("late", nn.Parameter(torch.ones(2)))]}
        require_error("gradients are under way: call step() or zero_grad() first", optimizer.add_param_group, group)
        optimizer.zero_grad()
        wrapper = NaiveDDP(PartlyUsed())
        named = wrapper.module.named_parameters()
        sentence = "used has its gradient averaged already, by a data parallel"
        require_error(sentence, ShardedOptimizer, named, torch.optim.SGD, flat=True)
    else:
        sentence = "no_sync() needs flat=True; otherwise call no_sync() of the data paral"
        require_error(sentence, lambda: optimizer.no_sync().__enter__())
        require_error("finish_gradient_synchronization() needs flat=True", optimizer.finish_gradient_synchronization)
    moved = "used was moved or converted after it was sharded: build the optimizer after changing the model"
    if dist.get_rank() == 1:
        model.used.data = model.used.data.clone()
    require_error("used was moved or converted", optimizer.clip_grad_norm_, 1.0)
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        model.used.data = model.used.data.clone()
    assert error_of(optimizer.step) == ("UsageError", moved)


class FailingSGD(torch.optim.SGD):
    """Raises in its steps, once that is switched on."""

    fails = False

    def step(self, *args, **kwargs):
        if self.fails:
            raise KeyError("sum")
        return super().step(*args, **kwargs)


@on_ranks(2)
@each_mode
def test_ranks_go_on_together_after_a_class_raised_in_its_step_on_some(mode):
    """Rank 1 updates nothing, so that the class is not called there."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([parameter], FailingSGD, flat=mode == "flat", lr=0.5)
    for error in (("KeyError", "'sum'"), None):
        parameter.sum().backward()
        FailingSGD.fails = error is not None
        assert error_of(optimizer.step) == (error if dist.get_rank() == 0 else None)
        dist.all_reduce(total := torch.ones(()))
        assert total == 2.0
        optimizer.zero_grad()
    assert parameter.tolist() == [0.5] * 4


def lost_peer(mode):
    """One rank does not come to a step."""
    # These ranks do nothing else: to import it would take as long as all the rest.
    for method in ("add_param_group", "zero_grad"):
        importing_no_compiler(getattr(torch.optim.Optimizer, method))
    model = PartlyUsed()
    _, optimizer = sharded(mode, model, params=model.named_parameters(), lr=0.1)
    if dist.get_rank() == 1:
        time.sleep(600)
    wait_at_most(0.5)
    if mode == "flat":
        model(1.0, True).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("mode", "waiting"),
    [("default", "in the comparison of steps"), ("flat", "in the reduce-scatter of gradients of ")],
)
def test_rank_that_hangs_in_a_step_is_named_with_what_waits_for_it(mode, waiting):
    with pytest.raises(RankError) as caught:
        launch.run(lost_peer, mode, world_size=2, backend="gloo")
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert waiting in heading
    assert mode == "default" or "used" in heading
    assert heading.endswith("still running: rank 1")
    assert "in lost_peer" in str(caught.value).split("rank 1 was here")[1]


CPU = torch.device("cpu")


def of_a_slice(optimizer_cls, **options):
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.ones(3, 4)
    mark_slice(parameter)
    return optimizer_cls([parameter], **options)


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Adafactor"])
def test_element_wise_class_is_found_to_be_one_and_steps_slices(name):
    optimizer_cls, options = CLASSES[name]
    require_elementwise(optimizer_cls, options, CPU, {})
    optimizer = of_a_slice(optimizer_cls, **options)
    for _ in range(2):
        optimizer.step()


class OfOneRate(torch.optim.Optimizer):
    """Keeps what it is made with to itself."""

    def __init__(self, params, rate):
        super().__init__(params, {})
        self.rate = rate

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=self.rate)


@pytest.mark.parametrize(
    ("optimizer_cls", "options", "sentence"),
    [
        (torch.optim.Muon, {}, "Muon, whose update is not computed element by element"),
        (torch.optim.SparseAdam, {}, "SparseAdam, which cannot step a slice"),
        (OfOneRate, {"rate": 0.1}, "OfOneRate, which cannot be tried on a small matrix .*: set updates_elementwise = "),
    ],
)
def test_other_classes_refuse_to_step_slices(optimizer_cls, options, sentence):
    optimizer, before = of_a_slice(optimizer_cls, **options), torch.random.get_rng_state()
    for _ in range(2):
        with pytest.raises(UsageError, match=f"slices of FSDP or TensorParallel cannot be updated by {sentence}"):
            optimizer.step()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3, 4))


def test_options_that_change_between_steps_are_tried():
    optimizer = of_a_slice(SwitchedNorm, lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["by_norm"] = True
    with pytest.raises(UsageError, match="SwitchedNorm, whose update is not computed element by element"):
        optimizer.step()


# On GPUs ranks compare what they step with, and read the answer in the next step: here with parts of a GPU replaced.


class Event:
    """Knows whether what was launched before it has been waited for."""

    def record(self):
        self.is_recorded = True

    def synchronize(self):
        assert self.is_recorded


@pytest.fixture
def sent(monkeypatch):
    """The digests that rank 0 of three has sent; ``sent.others`` are those of its peers, by default the same."""
    record = SimpleNamespace(digests=[], others=None)
    empty = torch.empty

    def gather(gathered, digest):
        record.digests.append(digest.tolist())
        rows = gathered.view(3, -1)
        rows[:] = digest
        if record.others is not None:
            rows[1:] = torch.stack([digest_of(lines) for lines in record.others])

    monkeypatch.setattr(groups, "group_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(groups, "all_gather_single", gather)
    monkeypatch.setattr(groups, "is_stream_captured", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *arguments, **settings: tensor)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **settings: empty(*shape, **settings))
    return record


def step(agreement, *lines, is_step=True):
    with agreement.compared(is_step=is_step) as collected:
        collected += lines


def test_same_lines_step_after_step(sent):
    agreement = StepAgreement()
    for lines in (["lr=1"], ["lr=2", "lr=3"], []):
        step(agreement, *lines)
    assert sent.digests == [digest_of(lines).tolist() for lines in (["lr=1"], ["lr=2", "lr=3"], [])]


@pytest.mark.parametrize(("others", "rank"), [([["lr=9"], ["lr=1"]], 1), ([["lr=1"], ["lr=9"]], 2)])
def test_other_lines_are_refused_in_the_next_step(sent, others, rank):
    agreement = StepAgreement()
    sent.others = others
    step(agreement, "lr=1")
    with pytest.raises(
        UsageError, match=rf"^ranks differ in what they train: in the last step, rank {rank} had other "
    ):
        step(agreement, "lr=1")
    # Which is said once.
    sent.others = None
    step(agreement, "lr=1")


def fail(agreement):
    with agreement.compared() as lines:
        lines.append("lr=1")
        raise UsageError("frozen")


def test_an_error_is_raised_here_at_once_and_compared_by_its_text(sent):
    agreement = StepAgreement()
    with pytest.raises(UsageError, match=r"^frozen$"):
        fail(agreement)
    assert sent.digests == [digest_of(["UsageError: frozen"]).tolist()]
    step(agreement, "lr=1")


def test_a_step_does_not_wait_for_the_answer_to_its_own_clipping(sent):
    agreement = StepAgreement()
    sent.others = [["clip"], ["other"]]
    step(agreement, "clip", is_step=False)
    sent.others = None
    step(agreement, "lr=1")
    with pytest.raises(UsageError, match="rank 2 had other options"):
        step(agreement, "lr=1")


def test_the_first_question_of_a_step_waits_for_the_last(sent):
    agreement = StepAgreement()
    sent.others = [["lr=1"], ["other"]]
    step(agreement, "lr=1")
    with pytest.raises(UsageError, match="rank 2 had other options"):
        step(agreement, "clip", is_step=False)


def test_nothing_is_compared_in_a_graph(sent, monkeypatch):
    monkeypatch.setattr(groups, "is_stream_captured", lambda: True)
    step(StepAgreement(), "lr=1")
    assert sent.digests == []
