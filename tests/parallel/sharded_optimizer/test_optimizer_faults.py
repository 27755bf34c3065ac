"""What cannot work is refused by name on every rank, and a lost rank is named."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from optimizer_models import each_mode, sharded
from small_models import PartlyUsed, error_of, refusal_of, wait_at_most
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.machine.lazy_dynamo import importing_no_compiler
from cs336sys.parallel.ddp import NaiveDDP
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer


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
    message = error_of(ShardedOptimizer, [parameter], torch.optim.LBFGS)[1]
    assert message.startswith("LBFGS cannot be sharded: choose a class that updates each parameter by it")
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


def test_optimizer_without_a_process_group_is_refused():
    with pytest.raises(UsageError, match="ShardedOptimizer needs a process group"):
        ShardedOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0)


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
