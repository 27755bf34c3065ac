"""What the ranks of test_tensor_checkpoint run: functions that spawned processes can import."""

import torch
import torch.distributed as dist
from small_models import error_of, with_file_limit
from tensor_parallel_ranks import model

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


def save_and_load(path):
    """Whether everything comes back, and what one process makes of the file."""
    shared = TensorParallel(counted(0, 3))
    shared.module.ln_final.seen.add_(dist.get_rank())
    expected = shared.full_state_dict()
    optimizer = optimizer_of(shared)
    save_checkpoint(path, shared, optimizer, extra=[None])
    loaded = TensorParallel(counted(1, 5))
    other = torch.optim.SGD(loaded.parameters(), lr=0.5)
    load_checkpoint(path, loaded, other)
    found = loaded.full_state_dict()
    norm = loaded.module.ln_final
    states = zip(optimizer.state.values(), other.state.values(), strict=True)
    same = [
        torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for a, b in states for key in ("exact", "step")
    ]
    plain = counted(2, 0)
    del plain.ln_final.count
    plain.ln_final.__class__ = type(model().ln_final)
    plain.load_state_dict(torch.load(path, weights_only=True)["model"])
    alone = dict(plain.named_parameters(remove_duplicate=False))
    return {
        "weights": all(torch.equal(found[name], expected[name]) for name in expected),
        "state": all(same) and {state["count"] for state in other.state.values()} == {3},
        "buffer and extra state": (norm.seen.tolist(), norm.count) == ([3.0, 3.0], 3),
        "one process": all(torch.equal(alone[name], expected[name]) for name in expected),
    }


def refusals(path):
    """Errors by what is wrong; what is left in the folder."""
    shared = TensorParallel(counted(0, 3))
    save_checkpoint(path, shared)
    errors = {
        "full disk": with_file_limit(1000, save_checkpoint, path, shared),
        "no folder": error_of(save_checkpoint, path.parent / "nowhere" / "saved", shared),
        "extra": error_of(save_checkpoint, path, shared, extra={"sizes": {1, 2}}),
        "without extra state": error_of(load_checkpoint, path, TensorParallel(model().bfloat16())),
    }
    optimizer = optimizer_of(shared)
    optimizer.state[shared.module.ln_final.weight]["history"] = {1, 2}
    errors["state"] = error_of(save_checkpoint, path, shared, optimizer)
    weights = shared.full_state_dict()
    load_checkpoint(path, shared)
    errors["weights"] = None if all(map(torch.equal, shared.full_state_dict().values(), weights.values())) else "differ"
    if dist.get_rank() == 0:
        damaged = path.with_name("damaged")
        damaged.write_bytes(path.read_bytes()[:-100])
        torch.save([1], path.with_name("foreign"))
    dist.barrier()
    for name in ("damaged", "foreign", "nothing"):
        errors[name] = error_of(load_checkpoint, path.with_name(name), shared)
    left = gather_objects(sorted(one.name for one in path.parent.iterdir()))[0]
    sharded = FSDP(shared.module, group=dist.new_subgroups(1)[0])
    errors["slices alone"] = error_of(save_slices, path, sharded)
    layers = TensorParallel(counted(0, 3, layers=3))
    layers.module.layers[1].ffn.w1.weight = torch.nn.Parameter(torch.ones(3, 3))
    errors["changed"] = error_of(save_checkpoint, path, layers)
    return errors, left
