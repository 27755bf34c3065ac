"""Checkpoints of tensor parallel training: everything that the module holds, or one sentence on every rank."""

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, with_file_limit
from tensor_models import model

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.checkpoint import save_checkpoint as save_slices
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.parallel.tensor_parallel.checkpoint import load_checkpoint, save_checkpoint


class Counted(type(model().ln_final)):
    """A norm with statistics, which differ between ranks, and extra state."""

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def counted(seed, number, layers=2):
    """A tied model in bf16 with a buffer and extra state."""
    plain = model(seed, tied=True, num_layers=layers).bfloat16()
    plain.ln_final.__class__ = Counted
    plain.ln_final.count = number
    plain.ln_final.register_buffer("seen", torch.full((2,), float(number)))
    return plain


def optimizer_of(shared):
    """With a state in fp32 of parameters in bf16, a step of shape (1,), and a number."""
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    for parameter in shared.parameters():
        optimizer.state[parameter] = {"exact": parameter.detach().float() + 1e-4, "step": torch.ones(1), "count": 3}
    return optimizer


@on_ranks(2)
def test_everything_comes_back_and_one_process_reads_it(tmp_path):
    shared, loaded = TensorParallel(counted(0, 3)), TensorParallel(counted(1, 5))
    shared.module.ln_final.seen.add_(dist.get_rank())
    optimizer, other = optimizer_of(shared), torch.optim.SGD(loaded.parameters(), lr=0.5)
    save_checkpoint(tmp_path / "saved", shared, optimizer, extra=[None])
    load_checkpoint(tmp_path / "saved", loaded, other)
    expected, norm = shared.full_state_dict(), loaded.module.ln_final
    assert_same(loaded.full_state_dict(), expected)
    assert (norm.seen.tolist(), norm.count) == ([3.0, 3.0], 3)
    for state, loaded_state in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert loaded_state.pop("count") == state.pop("count") == 3
        assert_same(loaded_state, state)
    plain = counted(2, 0)
    del plain.ln_final.count
    plain.ln_final.__class__ = type(model().ln_final)
    plain.load_state_dict(torch.load(tmp_path / "saved", weights_only=True)["model"])
    alone = dict(plain.named_parameters(remove_duplicate=False))
    assert_same({name: alone[name].detach() for name in expected}, expected)


@on_ranks(2)
def test_refusals_leave_the_checkpoint_as_it_was(tmp_path):
    path = tmp_path / "saved"

    def require_error(kind, sentence, error):
        assert error[0] == kind
        assert sentence in error[1]

    shared = TensorParallel(counted(0, 3))
    save_checkpoint(path, shared)
    weights = shared.full_state_dict()
    error = with_file_limit(1000, save_checkpoint, path, shared)
    require_error("OSError", f"checkpoint {path} could not be written: ", error)
    error = error_of(save_checkpoint, tmp_path / "nowhere" / "saved", shared)
    require_error("OSError", "nowhere/saved could not be written: ", error)
    error = error_of(save_checkpoint, path, shared, extra={"sizes": {1, 2}})
    require_error("UsageError", "extra['sizes'] is of type builtins.set: checkpoints hold tensors", error)
    error = error_of(load_checkpoint, path, TensorParallel(model().bfloat16()))
    sentence = "another model: ln_final.seen is (2,) there and missing here; extra state of"
    require_error("UsageError", sentence, error)
    optimizer = optimizer_of(shared)
    optimizer.state[shared.module.ln_final.weight]["history"] = {1, 2}
    sentence = "the optimizer's state['ln_final.weight']['history'] is of type builtins.set: "
    require_error("UsageError", sentence, error_of(save_checkpoint, path, shared, optimizer))
    optimizer.param_groups[0]["rules"] = {1}
    error = error_of(save_checkpoint, path, shared, optimizer)
    require_error("UsageError", "groups[0]['rules'] is of type builtins.set: ", error)
    shared.module.ln_final.count = {1}
    error = error_of(save_checkpoint, path, shared)
    require_error("UsageError", "extra state['ln_final']['count'] is of type builtins.set: ", error)
    load_checkpoint(path, shared)
    assert_same(shared.full_state_dict(), weights)
    if dist.get_rank() == 0:
        path.with_name("damaged").write_bytes(path.read_bytes()[:-100])
        torch.save([1], path.with_name("foreign"))
    dist.barrier()
    for name, sentence in (
        ("damaged", "damaged is damaged, or more than plain data: "),
        ("foreign", "foreign is no checkpoint of tensor parallel training"),
        ("nothing", f"there is no checkpoint {tmp_path / 'nothing'}"),
    ):
        require_error("UsageError", sentence, error_of(load_checkpoint, path.with_name(name), shared))
    assert gather_objects(sorted(file.name for file in tmp_path.iterdir()))[0] == ["damaged", "foreign", "saved"]
    sharded = FSDP(shared.module, group=dist.new_subgroups(1)[0])
    sentence = "this FSDP module has slices of tensor parallel parts: use save_checkpoint()"
    require_error("UsageError", sentence, error_of(save_slices, path, sharded))
    layers = TensorParallel(counted(0, 3, layers=3))
    layers.module.layers[1].ffn.w1.weight = torch.nn.Parameter(torch.ones(3, 3))
    sentence = "layers.1.ffn.w1.weight is (3, 3), and this rank's part of it was ("
    require_error("UsageError", sentence, error_of(save_checkpoint, path, layers))
