"""What the ranks of test_wrapped_state run: functions that spawned processes can import."""

import gc
import io
import weakref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cs336_basics.model import BasicsTransformerLM
from small_models import error_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel

WRAPPERS = {"fsdp": FSDP, "ddp": NaiveDDP, "tensor": TensorParallel}


class Scale(nn.Module):
    """A layer whose weights were stored as their inverses in version 1."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 1 / state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(self, x):
        return x * self.weight


def part(kind, seed):
    torch.manual_seed(seed)
    if kind == "tensor":
        return TensorParallel(BasicsTransformerLM(8, 8, d_model=8, num_layers=1, num_heads=2, d_ff=8))
    return WRAPPERS[kind](nn.Sequential(nn.Linear(3, 4), Scale() if kind != "plain" else nn.Identity()))


def around(kind, seed):
    return nn.ModuleDict({"body": part(kind, seed), "head": nn.Linear(2, 2)})


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def state_dicts(kind):
    """Whether a state dict goes around, alone and in a module around it, and the errors of what is refused."""
    saved = part(kind, 0)
    state = through_file(saved.state_dict())
    results = {"names": list(state) == list(saved.module.state_dict())}
    prefixed = {f"module.{key}": value for key, value in state.items()}
    for name, one in {"alone": state, "with module.": prefixed, "as a dict": dict(state)}.items():
        if name != "alone" and kind != "tensor":
            # A plain dictionary knows no versions.
            one = {key: 1 / value if key.endswith("1.weight") else value for key, value in one.items()}
        loaded = part(kind, 1)
        loaded.load_state_dict(one)
        results[name] = equal(saved, loaded)
    outer = around(kind, 2)
    state = through_file(outer.state_dict())
    results["names around"] = not any("module" in name for name in state)
    for strict in (True, False):
        loaded = around(kind, 3)
        results[f"around, strict={strict}"] = str(loaded.load_state_dict(state, strict=strict)), equal(outer, loaded)
    results["moved nowhere"] = error_of(loaded.to, "cpu")
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def layer_of(wrapper):
        return wrapper.module.layers[0] if kind == "tensor" else wrapper.module[0]

    states = [state, saved.state_dict(), saved.module.state_dict(), layer_of(saved).state_dict()]
    others = gather_objects(states)[(rank + 1) % world_size]
    modules = loaded, part(kind, 1), part(kind, 1).module, layer_of(part(kind, 1))
    errors = [error_of(module.load_state_dict, one) for module, one in zip(modules, others, strict=True)]
    state = saved.state_dict()
    errors.append(error_of(saved.load_state_dict, state, assign=True))
    errors.append(error_of(saved.load_state_dict, state))
    return results, errors


def distributed_checkpoint(kind, path):
    """What torch.distributed.checkpoint makes of state dicts, and refusals: of a file of rank 0 and of gathering."""
    saved, loaded = part(kind, 0), part(kind, 1)
    checkpoint.save({"model": saved.state_dict()}, checkpoint_id=path)
    state = {"model": loaded.state_dict()}
    checkpoint.load(state, checkpoint_id=path)
    loaded.load_state_dict(state["model"])
    whole = {name: value.full_tensor() for name, value in saved.state_dict().items() if hasattr(value, "full_tensor")}
    expected = saved.full_state_dict() if kind == "tensor" else saved.gather_full_params()
    others, wrapped = part(kind, 1), around(kind, 1)
    first = gather_objects((saved.state_dict(), {f"body.{name}": one for name, one in saved.state_dict().items()}))[0]
    return {
        "loaded": equal(saved, loaded),
        "whole": bool(whole) and all(torch.equal(value, expected[name]) for name, value in whole.items()),
        "parameters themselves": all(one is saved.get_parameter(f"module.{name}") for name, one in kept(saved).items()),
    }, [
        error_of(others.load_state_dict, first[0]),
        error_of(others.load_state_dict, dict(first[0])),
        error_of(wrapped.load_state_dict, first[1], strict=False),
        error_of(get_model_state_dict, saved),
        error_of(get_model_state_dict, saved.module),
    ]


def kept(wrapper):
    return wrapper.state_dict(keep_vars=True)


def cut_as_no_dtensor():
    """Errors of state dicts of 5 rows on 4 ranks, and of slices of parts."""
    few = TensorParallel(BasicsTransformerLM(5, 8, d_model=8, num_layers=1, num_heads=4, d_ff=8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    shared = TensorParallel(BasicsTransformerLM(8, 8, d_model=8, num_layers=1, num_heads=2, d_ff=8), mesh["tp"])
    sharded = FSDP(shared.module, group=mesh["fsdp"])
    return [error_of(one.state_dict) for one in (few, sharded, shared)]


def state_dict_within_a_forward_pass():
    """The errors of saving and loading where a unit is gathered."""
    sharded = FSDP(nn.Sequential(nn.Linear(3, 3)))
    state = sharded.state_dict()
    errors = []

    def save(*_):
        errors.extend((error_of(sharded.state_dict), error_of(sharded.load_state_dict, state)))

    sharded.module[0].register_forward_hook(save)
    sharded(torch.ones(2, 3))
    return errors


TRAININGS = {
    **{wrapper.__name__: (wrapper, torch.optim.AdamW) for wrapper in (NaiveDDP, FlatDDP, OverlappedDDP)},
    "BucketedDDP": (lambda model: BucketedDDP(model, 1.0), torch.optim.AdamW),
    "FSDP": (FSDP, torch.optim.AdamW),
    "TensorParallel": (TensorParallel, torch.optim.AdamW),
    "ShardedOptimizer": (nn.Identity, lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW)),
    "ShardedOptimizer, flat": (
        nn.Identity,
        lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW, flat=True),
    ),
}


def survivors(name):
    """How many parameters are in memory after a training that nobody holds: at once, and once Python has collected."""
    # The first step of a process leaves a cycle of torch's.
    trained_parameters(nn.Identity, torch.optim.AdamW)
    gc.collect()
    gc.disable()
    try:
        parameters = trained_parameters(*TRAININGS[name])
        at_once = sum(parameter() is not None for parameter in parameters)
        gc.collect()
        return at_once, sum(parameter() is not None for parameter in parameters)
    finally:
        gc.enable()


def trained_parameters(wrap, make_optimizer):
    model = BasicsTransformerLM(8, 8, d_model=8, num_layers=1, num_heads=2, d_ff=8)
    wrapped = model if wrap is nn.Identity else wrap(model)
    parameters = list(wrapped.parameters())
    optimizer = make_optimizer(parameters)
    for _ in range(2):
        wrapped(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
        if wrapped is not model:
            wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return [weakref.ref(parameter) for parameter in parameters]
