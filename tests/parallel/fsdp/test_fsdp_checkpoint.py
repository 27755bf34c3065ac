"""Checkpoints of fully sharded training: any number of ranks goes on where another stopped; nothing whole is lost."""

import io
import os
import pickle
from collections import Counter, OrderedDict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import OPTIMIZERS, batch, loss_of, network
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import Scale, error_of, on_cpu, refusal_of, share
from torch import nn
from torch.distributed.checkpoint import metadata

from cs336sys.errors import UsageError
from cs336sys.parallel import safe_unpickle
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.checkpoint import _model_state, _sharded_optimizer_state, load_checkpoint, save_checkpoint


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def build(optimizer, seed=0):
    sharded = FSDP(network(seed))
    stepper = OPTIMIZERS[optimizer](sharded.parameters())
    return sharded, stepper, torch.optim.lr_scheduler.StepLR(stepper, step_size=1, gamma=0.5)


def run_steps(sharded, optimizer, scheduler, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(sharded, *map(share, batch(step))).backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()
        scheduler.step()


@on_ranks(2)
@pytest.mark.parametrize("optimizer", ["adamw", "course", "fused", "sgd"])
def test_training_goes_on_bitwise_on_as_many_ranks(tmp_path, optimizer):
    """Into another start. Random programs go on with other numbers of ranks."""
    (whole, *others), (saved, stepper, scheduler) = build(optimizer), build(optimizer)
    run_steps(whole, *others, range(4))
    run_steps(saved, stepper, scheduler, range(2))
    saved.module.offset.fill_(3.0)
    save_checkpoint(tmp_path / "saved", saved, stepper, {"step": 2, "scheduler": scheduler.state_dict()})
    loaded, stepper, scheduler = build(optimizer, seed=5)
    extra = load_checkpoint(tmp_path / "saved", loaded, stepper)
    assert (loaded.module.offset == 3.0).all()
    # As it was in the run that saved, until it saved.
    loaded.module.offset.copy_(whole.module.offset)
    scheduler.load_state_dict(extra["scheduler"])
    assert stepper.param_groups[0]["lr"] == (0.025 if optimizer == "sgd" else 0.0025)
    run_steps(loaded, stepper, scheduler, range(extra["step"], 4))
    assert_same(loaded.gather_full_params(), whole.gather_full_params())
    assert names_in(tmp_path) == ["saved"]


def layer(value=None):
    """A sharded layer, whose parameters all have one value."""
    sharded = FSDP(nn.Linear(3, 5))
    for parameter in sharded.parameters() if value is not None else ():
        nn.init.constant_(parameter, value)
    return sharded


def save_layers(path, *values):
    for value in values:
        save_checkpoint(path, layer(value), extra=value)


def loaded_value(path):
    sharded = layer()
    value = load_checkpoint(path, sharded)
    assert (sharded.gather_full_params()["weight"] == value).all()
    return value


def refusal(path, sharded, optimizer=None):
    """Of a checkpoint that leaves weights as they are."""
    before = sharded.gather_full_params()
    message = refusal_of(load_checkpoint, path, sharded, optimizer)
    assert_same(sharded.gather_full_params(), before)
    return message


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("file", "__1_0.distcp has"),
        ("metadata", "its .metadata cannot be read"),
        ("no file", "__1_0.distcp has 0 of"),
        ("no metadata", "its .metadata cannot be read"),
        ("folder", "there is no checkpoint"),
    ],
)
def test_checkpoint_that_is_not_whole_is_refused_and_the_one_before_is_named(tmp_path, what, reason):
    path = tmp_path / "saved"
    save_layers(path, 1.0, 2.0)
    file = path / (".metadata" if "metadata" in what else "__1_0.distcp")
    dist.barrier()
    if dist.get_rank() == 0:
        if what == "folder":
            path.rename(tmp_path / "elsewhere")
        elif what.startswith("no "):
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-7])
    dist.barrier()
    message = refusal(path, layer())
    assert reason in message
    assert message.endswith(f"; the one before it is {path}.previous")
    assert loaded_value(tmp_path / "saved.previous") == 1.0


def no_space(self, plan, planner):
    raise OSError("no space left on device")


@on_ranks(2)
def test_failure_while_saving_is_an_error_on_every_rank_and_what_was_there_is_whole(tmp_path):
    path = tmp_path / "saved"
    save_layers(path, 1.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            monkeypatch.setattr(dcp.FileSystemWriter, "write_data", no_space)
        kind, message = error_of(save_checkpoint, path, layer())
    assert kind == "OSError"
    assert "no space left on device" in message
    assert loaded_value(path) == 1.0
    save_layers(path, 2.0, 3.0)
    assert names_in(tmp_path) == ["saved", "saved.previous"]
    assert loaded_value(tmp_path / "saved.previous") == 2.0
    dist.barrier()
    (tmp_path / "file").write_text("in the way")
    for other in ("file/saved", "file", ""):
        assert error_of(save_checkpoint, tmp_path / other, layer())[0] in ("NotADirectoryError", "UsageError")


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.1, **settings)


@on_ranks(2)
def test_checkpoints_of_other_models_and_optimizers_are_refused(tmp_path):
    """In the words of figures.txt."""
    path, sharded = tmp_path / "saved", layer()
    optimizer = sgd(sharded.parameters(), momentum=0.9)
    save_checkpoint(path, sharded)
    assert "has no optimizer: load it without one" in refusal(path, sharded, optimizer)
    sharded(torch.ones(2, 3)).sum().backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()
    save_checkpoint(path, sharded, optimizer)
    part = "belongs to another model: weight is (5, 3) there and (6, 3) here; bias is (5,) there and (6,) here"
    assert part in refusal(path, FSDP(nn.Linear(3, 6)))
    optimizer.state[sharded.module.weight]["rows"] = torch.zeros(7)
    assert "rows of weight is (7,) where the slice is (" in refusal_of(save_checkpoint, path, sharded, optimizer)
    sharded = layer()
    groups = sgd([{"params": [parameter]} for parameter in sharded.parameters()])
    assert "groups of [2] parameters, this one has [1, 1]" in refusal(path, sharded, groups)
    assert "build it over" in refusal(path, sharded, sgd(nn.Linear(3, 5).parameters()))


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


@on_ranks(2)
def test_plain_data_beside_the_model_comes_back_as_it_was(tmp_path):
    for value in (PLAIN, torch.ones(3), None):
        sharded = layer()
        optimizer = torch.optim.SGD(sharded.parameters(), lr=torch.tensor(0.25))
        save_checkpoint(tmp_path / "saved", sharded, optimizer, value)
        optimizer.param_groups[0]["lr"].fill_(0.0)
        assert repr(load_checkpoint(tmp_path / "saved", sharded, optimizer)) == repr(value)
        assert optimizer.param_groups[0]["lr"] == 0.25


@on_ranks(2)
def test_objects_are_refused_when_saving(tmp_path):
    """More of them are in figures.txt."""
    path, sharded = tmp_path / "folder" / "saved", layer()
    named = sgd([{"params": sharded.parameters(), "name": RunsCode("")}])
    with_state = sgd(sharded.parameters())
    with_state.state[sharded.module.bias]["seen"] = {1}
    code = f"is of type {__name__}.RunsCode: "
    for beginning, optimizer, extra in (
        (f"extra {code}", None, RunsCode("")),
        (f"optimizer_groups[0]['name'] {code}", named, None),
        ("seen of bias is of type builtins.set: ", with_state, None),
    ):
        assert error_of(save_checkpoint, path, sharded, optimizer, extra) == (
            "UsageError",
            f"{beginning}checkpoints hold tensors, numbers, strings, bools, None, and lists, tuples and dicts of these"
            ", because loading anything else may run code",
        )
    assert names_in(tmp_path) == [] or names_in(path.parent) == []


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (
            "metadata",
            "the checkpoint's .metadata asks for posix.mkdir, which could run code and is in no list that tor",
        ),
        ("extra", "extra is more than plain data, and loading it could run code: do not trust it"),
        ("optimizer_groups", "optimizer_groups is more than plain data"),
        ("optimizer/step/weight", "optimizer/step/weight is more than plain data"),
        ("model/weight", "belongs to another model: weight is missing there"),
        ("everything pickled", "has no extra: choose one that save_checkpoint wrote"),
    ],
)
def test_loading_runs_no_code(tmp_path, what, reason):
    path, value, sharded = tmp_path / "saved", RunsCode(tmp_path / "ran"), layer()
    optimizer = sgd(sharded.parameters(), momentum=0.9)
    optimizer.state[sharded.module.weight]["momentum_buffer"] = torch.ones_like(sharded.module.weight)
    state = _model_state(sharded) | {"extra": [None]} | _sharded_optimizer_state(sharded, optimizer)
    if what == "everything pickled":
        state |= {"optimizer_groups": pickle.dumps(state["optimizer_groups"]), "extra": pickle.dumps(value)}
    elif what != "metadata":
        state[what] = value
    whole = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, checkpoint_id=path, planner=whole)
    if what == "metadata" and dist.get_rank() == 0:
        (path / ".metadata").write_bytes(pickle.dumps(value))
    dist.barrier()
    optimizer.param_groups[0]["lr"] = 0.0
    assert reason in refusal_of(load_checkpoint, path, sharded, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert not (tmp_path / "ran").exists()


class Hooked(nn.Sequential):
    """Its state dict has other names, and lacks a count; with extra state, and statistics that differ between ranks."""

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
    del state[f"{prefix}2.num_batches_tracked"]
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}core.{key.removeprefix(prefix)}"] = state.pop(key)


def rename_back(module, state, prefix, *_):
    for key in [key for key in state if key.startswith(f"{prefix}core.")]:
        state[prefix + key.removeprefix(f"{prefix}core.")] = state.pop(key)


@on_ranks(2)
def test_hooks_extra_state_and_buffers_of_the_first_rank_come_back_on_every_rank(tmp_path):
    saved, loaded = FSDP(Hooked(3)), FSDP(Hooked(5))
    save_checkpoint(tmp_path / "saved", saved)
    load_checkpoint(tmp_path / "saved", loaded)
    assert_same(loaded.gather_full_params(), saved.gather_full_params())
    module = loaded.module
    assert (module[2].running_mean.tolist(), module.count, module.scratch.tolist()) == ([3.0] * 5, 3, [5.0, 5.0])
    assert "the module does not load" in refusal_of(load_checkpoint, tmp_path / "saved", FSDP(Hooked(5, loads=False)))
    saved.module.count = b"3"
    assert "core._extra_state['count'] is of type " in refusal_of(save_checkpoint, tmp_path / "saved", saved)
    plain = FSDP(nn.Sequential(nn.Linear(4, 5)))
    assert "core._extra_state is data there and missing here" in refusal_of(load_checkpoint, tmp_path / "saved", plain)


@on_ranks(2)
def test_modules_are_told_the_version_that_was_saved(tmp_path):
    with mock.patch.object(Scale, "_version", 1):
        save_checkpoint(tmp_path / "new" / "saved", FSDP(nn.Sequential(nn.Linear(3, 3), Scale())))
    loaded = FSDP(nn.Sequential(nn.Linear(3, 3), Scale(), nn.Dropout()))
    load_checkpoint(tmp_path / "new" / "saved", loaded)
    assert loaded.module[1].weight.tolist() == [0.5] * 3


def blocks(count, seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(count)]), "norm": nn.LayerNorm(4)})


def doubled(module, state, prefix, metadata):
    state["layers.0.weight"] = 2 * state["layers.0.weight"]


@on_ranks(2)
def test_changed_module_is_saved_under_its_present_names_or_refused(tmp_path):
    sharded, path = FSDP(blocks(4)), tmp_path / "saved"
    before, layers = sharded.gather_full_params(), sharded.module["layers"]
    sharded.module["layers"] = nn.ModuleList([layers[0], layers[3], layers[2]])
    optimizer = sgd(sharded.parameters())
    save_checkpoint(path, sharded, optimizer)
    loaded = FSDP(blocks(3, seed=1))
    load_checkpoint(path, loaded)
    for module in (sharded, loaded):
        whole = module.gather_full_params()
        for now, place in {0: 0, 1: 3, 2: 2}.items():
            for name in ("weight", "bias"):
                assert torch.equal(whole[f"layers.{now}.{name}"], before[f"layers.{place}.{name}"])

    def require_error(part, call, *args):
        assert part in refusal_of(call, *args)

    optimizer.add_param_group({"params": layers[1].parameters()})
    part = "that the module lacks (by now): build it over parameters()"
    require_error(part, save_checkpoint, path, sharded, optimizer)
    optimizer = sgd(sharded.parameters())
    optimizer.state["steps"] = {"count": 3}
    part = "the optimizer keeps state of 'steps', which is no parameter of the module"
    require_error(part, save_checkpoint, path, sharded, optimizer)
    hook = sharded.module.register_state_dict_post_hook(doubled)
    part = "layers.0.weight of the state dict is no parameter or buffer of Linear, but made by a "
    require_error(part, save_checkpoint, path, sharded)
    hook.remove()
    sharded.module["adapter"] = nn.Linear(4, 4)
    part = "adapter.weight is not what was wrapped: save and load between two steps, and call refresh() on"
    require_error(part, save_checkpoint, path, sharded)
    require_error("adapter.weight is not what was wrapped", sharded.gather_full_params)


@on_ranks(3)
def test_each_group_has_checkpoints_of_its_own(tmp_path):
    """Of ranks 0 and 1, and of rank 2; the same path for both is refused."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    own = int(dist.get_rank() == 2)
    sharded = FSDP(blocks(1, seed=own), group=groups[own])
    optimizer = sgd(sharded.parameters(), momentum=0.9)
    for parameter in sharded.parameters():
        optimizer.state[parameter]["momentum_buffer"] = 2 * parameter.detach()
    expected = sharded.gather_full_params()
    save_checkpoint(tmp_path / str(own), sharded, optimizer)
    for parameter in sharded.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint(tmp_path / str(own), sharded, optimizer)
    assert_same(sharded.gather_full_params(), expected)
    for parameter in sharded.parameters():
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], 2 * parameter)
    if own == 0:
        save_checkpoint(tmp_path / "shared", sharded)
    dist.barrier()
    if own == 1:
        message = refusal_of(save_checkpoint, tmp_path / "shared", sharded)
        assert "shared belongs to ranks [0, 1], and ranks [2] have slices of their own: save on one group" in message
    dist.barrier()
    assert names_in(tmp_path) == ["0", "1", "shared"]


def uneven(seed):
    """In bf16: rows that three ranks do not divide, fewer rows than ranks, tied and frozen ones, norms."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 1), nn.Linear(1, 4), nn.LayerNorm(4), nn.Linear(4, 7))
    module[4].weight = module[0].weight
    module[2].requires_grad_(False)
    sharded = FSDP(module.bfloat16())
    return sharded, sgd([parameter for parameter in sharded.parameters() if parameter.requires_grad])


def whole_state(sharded, optimizer):
    """Weights, and the optimizer's state of every parameter, put together, with its dtypes."""
    whole = {}
    for name, (own, cut) in sharded.held_parameters().items():
        for key, value in optimizer.state.get(own, {}).items():
            is_cut = cut is not None and value.dim() > 0 and key != "step"
            whole[f"{key} of {name}"] = cut.gather_whole(value) if is_cut else value.clone()
    return on_cpu(sharded.gather_full_params() | whole)


def save_uneven(path):
    """What was saved: weights, and state in fp32 beside that in bf16; a step of shape (1,)."""
    sharded, optimizer = uneven(0)
    for parameter in optimizer.param_groups[0]["params"]:
        exact, narrow = parameter.detach().float() + 1e-4, torch.ones_like(parameter)
        optimizer.state[parameter] = {"exact": exact, "narrow": narrow, "step": torch.full((1,), 3.0)}
    save_checkpoint(path, sharded, optimizer)
    return whole_state(sharded, optimizer)


def load_uneven(path):
    sharded, optimizer = uneven(1)
    load_checkpoint(path, sharded, optimizer)
    return whole_state(sharded, optimizer)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_uneven_tied_frozen_and_exact_state_moves_between_numbers_of_ranks(ranks, tmp_path, before, after):
    saved = ranks(before).run(save_uneven, tmp_path / "saved")[0]
    assert saved["exact of 0.weight"].dtype == torch.float32
    for loaded in ranks(after).run(load_uneven, tmp_path / "saved"):
        assert_same(loaded, saved)


class AskedByGetattr:
    """Pickles as Python 3.11.2 pickles a member of an enumeration, or as an attacker anything else."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


def test_metadata_may_ask_for_members_of_enumerations_alone():
    def load(owner, name):
        return safe_unpickle._MetadataUnpickler(io.BytesIO(pickle.dumps(AskedByGetattr(owner, name)))).load()

    encoding = metadata._MEM_FORMAT_ENCODING
    member = next(iter(encoding))
    assert load(encoding, member.name) is member
    for owner, name in ((encoding, "__subclasses__"), (torch.Size, "__reduce__"), ("text", "upper")):
        with pytest.raises(UsageError, match="could run code: do not trust it"):
            load(owner, name)
