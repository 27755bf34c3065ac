"""What the ranks of test_fsdp_checkpoint run: functions that spawned processes can import."""

import os
import pickle
from collections import Counter, OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import OPTIMIZERS, batch, loss_of, network, on_cpu, on_rank
from small_models import PartlyUsed, error_of, share
from torch import nn

from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.checkpoint import _model_state, _optimizer_state, load_checkpoint, save_checkpoint


def build(optimizer="adamw", seed=0, **settings):
    sharded = FSDP(network(seed), **settings)
    stepper = OPTIMIZERS[optimizer](sharded.parameters())
    return sharded, stepper, torch.optim.lr_scheduler.StepLR(stepper, step_size=1, gamma=0.5)


def run_steps(sharded, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(sharded, *map(share, batch(step)))
        loss.backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()
        scheduler.step()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append((mean / dist.get_world_size()).item())
    return losses


def uninterrupted(optimizer):
    """Losses and whole weights after four steps."""
    trained = build(optimizer)
    return run_steps(*trained, range(4)), on_cpu(trained[0].gather_full_params())


def save_after_two_steps(path, optimizer):
    sharded, stepper, scheduler = build(optimizer)
    losses = run_steps(sharded, stepper, scheduler, range(2))
    sharded.module.offset.fill_(3.0)
    save_checkpoint(path, sharded, stepper, {"step": 2, "scheduler": scheduler.state_dict()})
    return losses


def resume(path, optimizer):
    """Losses and whole weights of two more steps, after loading into another start; the buffer; hyperparameters."""
    sharded, stepper, scheduler = build(optimizer, seed=5)
    extra = load_checkpoint(path, sharded, stepper)
    offset = sharded.module.offset.clone()
    # As it was in the run that saved, until it saved.
    sharded.module.offset.copy_(network(0).offset)
    scheduler.load_state_dict(extra["scheduler"])
    rate = stepper.param_groups[0]["lr"]
    losses = run_steps(sharded, stepper, scheduler, range(extra["step"], 4))
    return losses, on_cpu(sharded.gather_full_params()), offset, rate


def save_model(path, value):
    """A checkpoint of parameters that all have one value."""
    sharded = FSDP(nn.Linear(3, 5))
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.fill_(value)
    save_checkpoint(path, sharded, extra=value)


def load_model(path):
    """What was saved beside the model, the weights, and the error, if any, after which weights are as before."""
    sharded = FSDP(nn.Linear(3, 5))
    before = sharded.gather_full_params()
    extra = None

    def load():
        nonlocal extra
        extra = load_checkpoint(path, sharded)

    error = error_of(load)
    after = sharded.gather_full_params()
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return extra, after["weight"], error, unchanged


def fail_to_save(path, how):
    """Errors of saving, when a rank cannot write, or when the first rank cannot rename."""
    sharded = FSDP(nn.Linear(3, 5))
    write_data = dcp.FileSystemWriter.write_data

    def broken(self, plan, planner):
        raise OSError("no space left on device")

    try:
        if how == "write" and dist.get_rank() == 1:
            dcp.FileSystemWriter.write_data = broken
        return error_of(save_checkpoint, path, sharded)
    finally:
        dcp.FileSystemWriter.write_data = write_data


def load_into_another(path, what):
    """The error of loading into another model or optimizer."""
    module = {"shape": nn.Linear(3, 6), "names": nn.Sequential(nn.Linear(3, 5))}.get(what, nn.Linear(3, 5))
    sharded = FSDP(module)
    before = sharded.gather_full_params()
    optimizer = None
    if what == "optimizer":
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    elif what == "groups":
        optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in sharded.parameters()], lr=0.1)
    elif what == "foreign":
        optimizer = torch.optim.SGD(nn.Linear(3, 5).parameters(), lr=0.1)
    error = error_of(load_checkpoint, path, sharded, optimizer)
    after = sharded.gather_full_params()
    return error, all(torch.equal(before[name], after[name]) for name in before)


def save_with_momentum(path):
    sharded = FSDP(nn.Linear(3, 5))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    sharded(torch.ones(2, 3)).sum().backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()
    save_checkpoint(path, sharded, optimizer)
    optimizer.state[sharded.module.weight]["rows"] = torch.zeros(7)
    return error_of(save_checkpoint, path, sharded, optimizer)


def save_before_the_first_step_and_in_an_accumulation(path):
    """Whether an optimizer without state is saved and loaded, and whether kept gradients survive a save."""
    sharded, optimizer, _ = build()
    save_checkpoint(path, sharded, optimizer)
    load_checkpoint(path, sharded, optimizer)
    empty = len(optimizer.state) == 0
    results = []
    for saves in (False, True):
        sharded.zero_grad()
        with sharded.no_sync():
            loss_of(sharded, *map(share, batch(0))).backward()
        if saves:
            save_checkpoint(path, sharded, optimizer)
        loss_of(sharded, *map(share, batch(1))).backward()
        sharded.finish_gradient_synchronization()
        results.append(on_cpu({name: parameter.grad for name, parameter in sharded.module.named_parameters()}))
    return empty, results


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


PLAIN = {
    "step": 2,
    "scheduler": {"last_lr": [0.1, 1e-3], "milestones": Counter({3: 1}), "best": None, "mode": "min", ("a", 1): True},
    "random": (torch.arange(5, dtype=torch.uint8), 2**70, complex(1, -1)),
    "averages": OrderedDict(weight=torch.ones(2, 3, dtype=torch.bfloat16)),
}

NOT_PLAIN = {
    "extra['sizes'] is of type builtins.set: ": {"sizes": {1, 2}},
    "extra[1]['run'][0] is of type small_models.PartlyUsed: ": [0, {"run": (PartlyUsed(),)}],
    "a key of extra is of type torch.dtype: ": {torch.float32: 1},
    "extra is of type fsdp_checkpoint_ranks.RunsCode: ": RunsCode(""),
}


def save_and_load(path, value):
    """What is loaded of ``extra``, and what a learning rate that is a tensor becomes."""
    sharded = FSDP(on_rank(nn.Linear(3, 5)))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=torch.tensor(0.25))
    save_checkpoint(path, sharded, optimizer, value)
    optimizer.param_groups[0]["lr"].fill_(0.0)
    return load_checkpoint(path, sharded, optimizer), optimizer.param_groups[0]["lr"]


def refuse_to_save(path):
    """By the beginning of the expected message, the error of saving what is not plain data; what is on the disk."""
    sharded = FSDP(nn.Linear(3, 5))
    errors = {message: error_of(save_checkpoint, path, sharded, None, value) for message, value in NOT_PLAIN.items()}
    optimizer = torch.optim.SGD([{"params": sharded.parameters(), "name": RunsCode("")}], lr=0.1)
    message = "optimizer_groups[0]['name'] is of type fsdp_checkpoint_ranks.RunsCode: "
    errors[message] = error_of(save_checkpoint, path, sharded, optimizer)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    optimizer.state[sharded.module.bias]["seen"] = {1}
    errors["seen of bias is of type builtins.set: "] = error_of(save_checkpoint, path, sharded, optimizer)
    return errors, path.parent.exists() and sorted(path.parent.iterdir())


def load_what_others_wrote(path, what, value=None):
    """The error of loading a checkpoint that holds ``value`` in place of plain data; ``extra``; the learning rate.

    None stands for what makes the folder ``ran`` beside the checkpoint, if code in it runs.
    """
    value = RunsCode(path.parent / "ran") if value is None else value
    sharded = FSDP(nn.Linear(3, 5))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.25, momentum=0.9)
    optimizer.state[sharded.module.weight]["momentum_buffer"] = torch.ones_like(sharded.module.weight)
    state = _model_state(sharded) | {"extra": [None]} | _optimizer_state(sharded, optimizer)
    if what == "everything pickled":
        state |= {key: pickle.dumps(state[key]) for key in ("optimizer_groups",)} | {"extra": pickle.dumps(value)}
    elif what != "metadata":
        state[what] = value
    whole = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, checkpoint_id=path, planner=whole)
    if what == "metadata" and dist.get_rank() == 0:
        (path / ".metadata").write_bytes(pickle.dumps(value))
    dist.barrier()
    optimizer.param_groups[0]["lr"] = 0.0
    extra = None

    def load():
        nonlocal extra
        extra = load_checkpoint(path, sharded, optimizer)

    return error_of(load), extra, optimizer.param_groups[0]["lr"]
