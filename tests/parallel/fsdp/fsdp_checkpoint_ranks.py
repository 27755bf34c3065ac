"""What the ranks of test_fsdp_checkpoint run: functions that spawned processes can import."""

import os
import pickle
from collections import Counter, OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import OPTIMIZERS, batch, loss_of, network, on_cpu, on_rank
from small_models import PartlyUsed, error_of, share, with_file_limit
from torch import nn

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.checkpoint import _model_state, _sharded_optimizer_state, load_checkpoint, save_checkpoint


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
    state = _model_state(sharded) | {"extra": [None]} | _sharded_optimizer_state(sharded, optimizer)
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


class Hooked(nn.Sequential):
    """Its state dict has other names than it has; with extra state, and statistics that differ between ranks."""

    def __init__(self, seed, *, loads=True):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(4, 5), nn.LayerNorm(5), nn.BatchNorm1d(5))
        nn.init.uniform_(self[1].weight)
        self[2].running_mean.fill_(float(seed + dist.get_rank()))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
        self.count = seed
        self.register_state_dict_post_hook(rename)
        if loads:
            self.register_load_state_dict_pre_hook(rename_back)

    def get_extra_state(self):
        return {"count": self.count, "history": torch.full((3,), float(self.count))}

    def set_extra_state(self, state):
        self.count = state["count"]
        assert (state["history"] == self.count).all()


def rename(module, state, prefix, metadata):
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}core.{key.removeprefix(prefix)}"] = state.pop(key)


def rename_back(module, state, prefix, *_):
    for key in [key for key in state if key.startswith(f"{prefix}core.")]:
        state[prefix + key.removeprefix(f"{prefix}core.")] = state.pop(key)


def save_and_load_hooked(path):
    """Whether all weights come back; what else is loaded, on this rank; the error of loading without the hook."""
    saved, loaded = FSDP(Hooked(3)), FSDP(Hooked(5))
    expected = saved.gather_full_params()
    save_checkpoint(path, saved)
    load_checkpoint(path, loaded)
    found = loaded.gather_full_params()
    module = loaded.module
    error = error_of(load_checkpoint, path, FSDP(Hooked(5, loads=False)))
    same = all(torch.equal(found[name], expected[name]) for name in expected)
    return same, module[2].running_mean.tolist(), module.count, module.scratch.tolist(), error


def blocks(count, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(count)]), "norm": nn.LayerNorm(4)})


def save_changed_modules(path):
    """Where each weight comes from after a block was removed and two swapped; errors of what cannot be saved."""
    sharded = FSDP(blocks(4))
    before = sharded.gather_full_params()
    layers = sharded.module["layers"]
    sharded.module["layers"] = nn.ModuleList([layers[0], layers[3], layers[2]])
    removed = layers[1]
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    save_checkpoint(path, sharded, optimizer)
    loaded = FSDP(blocks(3, seed=1))
    load_checkpoint(path, loaded)
    sources = {}
    for module in (sharded, loaded):
        for name, weight in module.gather_full_params().items():
            sources.setdefault(name, []).append(next(key for key in before if torch.equal(before[key], weight)))
    optimizer.add_param_group({"params": removed.parameters()})
    errors = {"removed": error_of(save_checkpoint, path, sharded, optimizer)}
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    optimizer.state["steps"] = {"count": 3}
    errors["state of nothing"] = error_of(save_checkpoint, path, sharded, optimizer)
    hook = sharded.module.register_state_dict_post_hook(doubled)
    errors["made by a hook"] = error_of(save_checkpoint, path, sharded)
    hook.remove()
    sharded.module["adapter"] = nn.Linear(4, 4)
    errors["added"] = error_of(save_checkpoint, path, sharded)
    errors["gathered"] = error_of(sharded.gather_full_params)
    return sources, errors


def doubled(module, state, prefix, metadata):
    state["layers.0.weight"] = 2 * state["layers.0.weight"]


def save_on_groups(folder):
    """Whether each of two groups, of ranks 0 and 1 and of rank 2, gets its own weights back; the same path for both."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    own = int(dist.get_rank() == 2)
    sharded = FSDP(blocks(1, seed=own), group=groups[own])
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    for parameter in sharded.parameters():
        optimizer.state[parameter]["momentum_buffer"] = 2 * parameter.detach()
    expected = sharded.gather_full_params()
    save_checkpoint(folder / str(own), sharded, optimizer)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    load_checkpoint(folder / str(own), sharded, optimizer)
    same = all(torch.equal(weight, expected[name]) for name, weight in sharded.gather_full_params().items())
    same = same and all(
        torch.equal(optimizer.state[parameter]["momentum_buffer"], 2 * parameter) for parameter in sharded.parameters()
    )
    if own == 0:
        save_checkpoint(folder / "shared", sharded)
    dist.barrier()
    return same, error_of(save_checkpoint, folder / "shared", sharded) if own else None


def uneven(seed):
    """In bf16: rows that three ranks do not divide, fewer rows than ranks, tied and frozen ones, norms."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 1), nn.Linear(1, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    module[4].weight = module[0].weight
    module[2].requires_grad_(False)
    return module.bfloat16()


def whole_state(sharded, optimizer):
    """The optimizer's state of every parameter, put together, with its dtypes."""
    whole = {}
    for name, (own, one) in sharded.held_parameters().items():
        for key, value in optimizer.state.get(own, {}).items():
            cut = one is not None and value.dim() > 0 and key != "step"
            whole[f"{key} of {name}"] = one.gather_whole(value) if cut else value.clone()
    return whole


def save_uneven(path):
    """What was saved: weights, and state in fp32 beside that in bf16; a step of shape (1,)."""
    sharded = FSDP(uneven(0))
    optimizer = torch.optim.AdamW([one for one in sharded.parameters() if one.requires_grad], lr=0.01)
    sharded(torch.arange(7)).sum().backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        state["exact"] = parameter.detach().float() + 1e-4
        state["step"] = torch.full((1,), 3.0)
    save_checkpoint(path, sharded, optimizer)
    return on_cpu(sharded.gather_full_params()), on_cpu(whole_state(sharded, optimizer))


def load_uneven(path):
    sharded = FSDP(uneven(1))
    optimizer = torch.optim.AdamW([one for one in sharded.parameters() if one.requires_grad], lr=0.01)
    load_checkpoint(path, sharded, optimizer)
    loaded = on_cpu(sharded.gather_full_params()), on_cpu(whole_state(sharded, optimizer))
    # It goes on training.
    sharded(torch.arange(7)).sum().backward()
    sharded.finish_gradient_synchronization()
    for state in optimizer.state.values():
        state["step"] = state["step"].squeeze()
    optimizer.step()
    return loaded


def save_on_a_full_disk(path):
    """The error where rank 0 writes no file over 1 MB (the process group has a file, too); what is left."""
    sharded = FSDP(nn.Linear(200_000, 5))
    error = with_file_limit(10**6, save_checkpoint, path, sharded)
    return error, gather_objects(sorted(name.name for name in path.parent.iterdir()))[0]
