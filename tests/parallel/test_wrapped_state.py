"""State dicts of wrappers: as those of the plain module, alone and within a module around them; whose slices."""

import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cs336_basics.model import BasicsTransformerLM
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import Scale, error_of, refusal_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel


def transformer(vocab_size=8, heads=2):
    return BasicsTransformerLM(vocab_size, 8, d_model=8, num_layers=1, num_heads=heads, d_ff=8)


def part(kind, seed):
    torch.manual_seed(seed)
    if kind == "tensor":
        return TensorParallel(transformer())
    return {"fsdp": FSDP, "ddp": NaiveDDP}[kind](nn.Sequential(nn.Linear(3, 4), Scale()))


def around(kind, seed):
    return nn.ModuleDict({"body": part(kind, seed), "head": nn.Linear(2, 2)})


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(left, right):
    assert_same(dict(left.named_parameters()), dict(right.named_parameters()))


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tensor"])
def test_state_dict_loads_alone_and_around_but_not_on_another_rank(kind):
    saved, rank = part(kind, 0), dist.get_rank()
    state = through_file(saved.state_dict())
    assert list(state) == list(saved.module.state_dict())
    # A plain dictionary knows no versions.
    is_stored_inversely = {key: key.endswith("1.weight") and kind != "tensor" for key in state}
    old = {key: 1 / value if is_stored_inversely[key] else value for key, value in state.items()}
    for loaded_state in (state, {f"module.{key}": value for key, value in old.items()}, old):
        loaded = part(kind, 1)
        loaded.load_state_dict(loaded_state)
        assert_equal(loaded, saved)
    outer = around(kind, 2)
    state = through_file(outer.state_dict())
    assert not any("module" in name for name in state)
    for strict in (True, False):
        loaded = around(kind, 3)
        assert str(loaded.load_state_dict(state, strict=strict)) == "<All keys matched successfully>"
        assert_equal(loaded, outer)
    assert error_of(loaded.to, "cpu") is None

    def states_of(wrapper):
        layer = wrapper.module.layers[0] if kind == "tensor" else wrapper.module[0]
        return wrapper, wrapper.module, layer

    states = [state, *(module.state_dict() for module in states_of(saved))]
    for module, other in zip((loaded, *states_of(part(kind, 1))), gather_objects(states)[1 - rank], strict=True):
        error = error_of(module.load_state_dict, other)
        if kind == "ddp":
            assert error is None
            assert "does not know NaiveDDP: give it the wrapped" in refusal_of(get_model_state_dict, around(kind, 0))
        else:
            assert error[0] == "UsageError"
            assert f"holds the slices of rank {1 - rank} of 2, this is rank {rank} of 2" in error[1]
            for name, value in other.items():
                other[name] = value.to_local() if hasattr(value, "to_local") else value
            assert error_of(module.load_state_dict, other) == error, "the metadata say whose slices they are, too"
    if kind != "ddp":
        message = refusal_of(saved.load_state_dict, saved.state_dict(), assign=True)
        assert message.startswith("assign=True would replace the slices")
    saved.load_state_dict(saved.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_slices_are_dtensors_that_other_ranks_refuse(kind, tmp_path):
    """torch.distributed.checkpoint gave every rank the slices of one, and a file of rank 0 let rank 0 go on alone."""
    saved, loaded = part(kind, 0), part(kind, 1)
    checkpoint.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "saved")
    state = {"model": loaded.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "saved")
    loaded.load_state_dict(state["model"])
    assert_equal(loaded, saved)
    whole = {name: value.full_tensor() for name, value in saved.state_dict().items() if hasattr(value, "full_tensor")}
    expected = saved.full_state_dict() if kind == "tensor" else saved.gather_full_params()
    assert whole
    assert " is whole, of shape (" in error_of(loaded.load_state_dict, whole)[1]
    assert_same(whole, {name: expected[name] for name in whole})
    for name, parameter in saved.state_dict(keep_vars=True).items():
        assert parameter is saved.get_parameter(f"module.{name}")

    others, wrapped, ddp = part(kind, 1), around(kind, 1), nn.parallel.DistributedDataParallel
    named = {f"body.{name}": value for name, value in saved.state_dict().items()}
    first, first_named = gather_objects((saved.state_dict(), named))[0]
    for message in (
        refusal_of(others.load_state_dict, first),
        refusal_of(others.load_state_dict, dict(first)),
        refusal_of(wrapped.load_state_dict, first_named, strict=False),
    ):
        assert "the state dict holds the slices of rank 0 of 2, this is rank 1 of 2: load the one of this" in message
    for module in (saved, saved.module):
        assert "checkpoint.state_dict does not know the slices of optim" in refusal_of(get_model_state_dict, module)
        assert "is a slice, and other ranks hold other slices of it: wrap" in refusal_of(ddp, nn.ModuleList([module]))
    ddp._set_params_and_buffers_to_ignore_for_model(wrapped, [name for name, _ in wrapped.named_parameters()][:-2])
    ddp(wrapped)  # It leaves slices alone.


@on_ranks(4)
def test_slices_that_no_dtensor_can_be_do_not_leave():
    """Of 5 rows on 4 ranks, and of parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    shared = TensorParallel(transformer(), mesh["tp"])
    sharded = FSDP(shared.module, group=mesh["fsdp"])
    for module in (TensorParallel(transformer(vocab_size=5, heads=4)), sharded, shared):
        assert "is cut as no DTensor can be, by two wrappers or into very few rows" in refusal_of(module.state_dict)


@on_ranks(2)
def test_state_dict_within_a_forward_pass_is_refused():
    """Where a unit is gathered."""
    sharded, errors = FSDP(nn.Sequential(nn.Linear(3, 3))), []
    state = sharded.state_dict()

    def save(*_):
        errors.extend((error_of(sharded.state_dict), error_of(sharded.load_state_dict, state)))

    sharded.module[0].register_forward_hook(save)
    sharded(torch.ones(2, 3))
    assert len(errors) == 2
    for kind, message in errors:
        assert kind == "UsageError"
        assert message.startswith("0.weight is not what was wrapped: save and load between two steps, and call ")


TRAININGS = {
    **{wrapper.__name__: (wrapper, torch.optim.AdamW) for wrapper in (NaiveDDP, FlatDDP, OverlappedDDP)},
    "BucketedDDP": (lambda model: BucketedDDP(model, 1.0), torch.optim.AdamW),
    "FSDP": (FSDP, torch.optim.AdamW),
    "TensorParallel": (TensorParallel, torch.optim.AdamW),
    "ShardedOptimizer": (None, lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW)),
    "ShardedOptimizer, flat": (None, lambda parameters: ShardedOptimizer(parameters, torch.optim.AdamW, flat=True)),
}


def trained_parameters(wrap, make_optimizer):
    model = transformer()
    wrapped = model if wrap is None else wrap(model)
    parameters = list(wrapped.parameters())
    optimizer = make_optimizer(parameters)
    for _ in range(2):
        wrapped(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
        if wrap is not None:
            wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return [weakref.ref(parameter) for parameter in parameters]


@on_ranks(2)
@pytest.mark.parametrize("name", TRAININGS)
def test_deleted_wrapper_frees_its_parameters(name):
    """A hook that torch holds and that refers to its own tensor is a cycle that Python's collector does not see."""
    # The first step of a process leaves a cycle of torch's.
    trained_parameters(None, torch.optim.AdamW)
    gc.collect()
    gc.disable()
    try:
        parameters = trained_parameters(*TRAININGS[name])
        if name not in ("FSDP", "TensorParallel"):
            assert not any(parameter() is not None for parameter in parameters)
        gc.collect()
        assert not any(parameter() is not None for parameter in parameters)
    finally:
        gc.enable()
