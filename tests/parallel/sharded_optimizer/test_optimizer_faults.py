"""What cannot work is refused by name on every rank, and a lost rank is named."""

import optimizer_faults_ranks
import pytest
import torch
from optimizer_models import MODES
from torch import nn

from cs336sys.errors import UsageError
from cs336sys.parallel.ranks import launch
from cs336sys.parallel.ranks.spawned import RankError
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer

each_mode = pytest.mark.parametrize("mode", MODES)


def test_wrong_arguments_are_refused(ranks):
    for errors in ranks(2).run(optimizer_faults_ranks.wrong_arguments):
        messages = {what: error[1] for what, error in errors.items()}
        assert messages["no tensor"] == "optimizer can only optimize Tensors, but one of the params is str"
        assert messages["a tensor"].startswith(
            "params argument given to the optimizer should be an iterable of Tensors"
        )
        assert messages["nothing"] == "optimizer got an empty parameter list"
        assert messages["no leaf"] == "can't optimize a non-leaf Tensor"
        assert messages["no class"] == "optimizer_cls AdamW: must be a subclass of torch.optim.Optimizer"
        assert "must be a subclass of torch.optim.Optimizer" in messages["a module"]
        assert messages["LBFGS"].startswith("LBFGS cannot be sharded: choose a class that updates each parameter by it")
        assert messages["twice"] == "w is given twice: give a tied weight once"
        assert messages["rate"] == messages["flat rate"] == "Invalid learning rate: -1.0"
        assert "unexpected keyword argument 'speed'" in messages["option"]
        assert messages["bucket"] == "bucket size 0 MB: must be positive, or None for one bucket"
        assert messages["master"] == "master_dtype torch.float32: needs flat=True and a floating-point dtype"
        assert messages["master int"] == "master_dtype torch.int32: needs flat=True and a floating-point dtype"
        assert messages["module"] == "module model: must be a torch.nn.Module"
        assert messages["not element-wise"].startswith("flat=True cannot shard Adafactor, ")
        assert messages["complex"] == (
            "parameter 0 is torch.complex64: flat=True shards real floating-point parameters only"
        )


@each_mode
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        (
            "shape",
            "parameter 2 of group 0 float32 (4, 4) strides (4, 1) trained on rank 0, parameter 2 of group 0 float32",
        ),
        (
            "order",
            "parameter 0 of group 0 float32 (4, 4) strides (4, 1) trained on rank 0, parameter 0 of group 0 float32",
        ),
        ("missing", "parameter 3 of group 0 float32 (4,) strides (1,) trained on rank 0, nothing on rank"),
        ("groups", "trained on rank 0, group 1 with  on rank"),
        (
            "frozen",
            "parameter 1 of group 0 float32 (4,) strides (1,) trained on rank 0, parameter 1 of group 0 float32",
        ),
        ("no tensor", "TypeError: optimizer can only optimize Tensors, but one of the params is NoneType on rank"),
        ("class", "AdamW with flat="),
        ("option", "lr=0.1 on rank 0, AdamW with flat="),
        ("mode", "AdamW with flat="),
        ("bucket", "bucket_size_mb=250.0, master_dtype=None, lr=0.1 on rank 0, AdamW with flat="),
    ],
)
def test_construction_that_differs_is_named_on_every_rank(ranks, mode, what, difference):
    for kind, message in ranks(2).run(optimizer_faults_ranks.differing_construction, mode, what):
        assert kind == "UsageError"
        assert message.startswith("ranks differ in what they train: ")
        assert difference in message


@each_mode
def test_construction_that_differs_on_the_last_of_three_ranks(ranks, mode):
    for kind, message in ranks(3).run(optimizer_faults_ranks.differing_construction, mode, "missing"):
        assert (kind, message[-7:]) == ("UsageError", " rank 2")


@each_mode
def test_misuse_is_refused(ranks, mode):
    for errors in ranks(2).run(optimizer_faults_ranks.misuse, mode):
        assert {kind for kind, _ in errors.values()} == {"UsageError"}
        messages = {what: message for what, (_, message) in errors.items()}
        assert messages.pop("copy").endswith("cannot be copied or pickled: choose consolidated_state_dict()")
        assert messages.pop("unfrozen") == "never was unfrozen after it was sharded: call refresh() on every rank"
        assert messages.pop("moved") == (
            "used was moved or converted after it was sharded: build the optimizer after changing the model"
        )
        assert "used was moved or converted" in messages.pop("clipped, moved on one rank")
        if mode == "flat":
            assert messages.pop("under way") == "gradients are under way: call step() or zero_grad() first"
            assert messages.pop("wrapped").startswith("used has its gradient averaged already, by a data parallel")
        else:
            assert messages.pop("no_sync").startswith(
                "no_sync() needs flat=True; otherwise call no_sync() of the data paral"
            )
            assert messages.pop("finish").startswith("finish_gradient_synchronization() needs flat=True")
        assert not messages


@each_mode
def test_ranks_go_on_together_after_a_class_raised_in_its_step_on_some(ranks, mode):
    first, second = ranks(2).run(optimizer_faults_ranks.failing_class, mode)
    # Rank 1 updates nothing, so that the class is not called there.
    assert first == ([("KeyError", "'sum'"), None], 2.0, [0.5] * 4)
    assert second == ([None, None], 2.0, [0.5] * 4)


def test_optimizer_without_a_process_group_is_refused():
    with pytest.raises(UsageError, match="ShardedOptimizer needs a process group"):
        ShardedOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize(
    ("mode", "waiting"),
    [("default", "in the comparison of steps"), ("flat", "in the reduce-scatter of gradients of ")],
)
def test_rank_that_hangs_in_a_step_is_named_with_what_waits_for_it(mode, waiting):
    with pytest.raises(RankError) as caught:
        launch.run(optimizer_faults_ranks.lost_peer, mode, world_size=2, backend="gloo")
    heading = str(caught.value).split("\n")[0]
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert waiting in heading
    assert mode == "default" or "used" in heading
    assert heading.endswith("still running: rank 1")
    assert "in lost_peer" in str(caught.value).split("rank 1 was here")[1]
