"""What the ranks of test_ddp_modules run: functions that spawned processes can import."""

import copy
import gc
import pickle

import torch
import torch.distributed as dist
from ddp_modes import MODES, by_mode, finish, gradients, recorded_launches
from small_models import PartlyUsed, error_of, network
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel.ddp import BucketedDDP, NaiveDDP


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, uses=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.use_reentrant, self.uses = use_reentrant, uses

    def forward(self, x):
        for layer in self.layers:
            for _ in range(self.uses):
                if self.use_reentrant is None:
                    x = torch.tanh(layer(x))
                else:
                    x = torch.tanh(checkpoint(layer, x, use_reentrant=self.use_reentrant))
        return x


@by_mode
def checkpointed(wrap, use_reentrant, uses=1):
    inputs = torch.linspace(-1, 1, 24).view(4, 6)[dist.get_rank() :].requires_grad_()
    wrapped = wrap(Checkpointed(use_reentrant, uses))
    error = error_of(wrapped(inputs).square().sum().backward)
    finish(wrapped)
    return error or gradients(wrapped.module)


class Buffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(rank)).t())
        self.frozen = nn.Parameter(torch.full((4,), rank, dtype=torch.int64), requires_grad=False)
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("row", torch.full((3, 1), float(rank)).expand(3, 4))
        self.register_buffer("column", torch.full((3, 4), float(rank))[:, 1])
        self.register_buffer("passing", torch.full((2,), float(rank)), persistent=False)
        self.register_buffer("empty", torch.empty(0))


def start_values():
    module = NaiveDDP(Buffers(dist.get_rank() + 1)).module
    return {name: value.tolist() for name, value in [*module.named_parameters(), *module.named_buffers()]}


@by_mode
def unfreeze(wrap):
    """The error of training a parameter that was frozen, and gradients before and after refresh()."""
    module = PartlyUsed()
    module.sometimes.requires_grad_(False)
    wrapped = wrap(module)
    rank_factor = 2.0 * (dist.get_rank() + 1)
    wrapped(rank_factor, True).backward()
    finish(wrapped)
    before = gradients(module)
    wrapped.zero_grad()
    module.sometimes.requires_grad_(True)
    error = error_of(wrapped, rank_factor, True)
    wrapped.refresh()
    wrapped(rank_factor, True).backward()
    finish(wrapped)
    return before, error, gradients(module)


def state_dicts():
    """Whether a wrapper saves as its module does and loads what was saved with and without a prefix, also nested."""
    module = network(0)
    module.add_module("batch_norm", nn.BatchNorm1d(2))
    wrapped = NaiveDDP(module)
    saved = wrapped.state_dict()
    nested = nn.ModuleDict({"model": NaiveDDP(network(0)), "head": nn.Linear(2, 2)})
    results = {
        "same names": list(saved) == list(module.state_dict()),
        "nested names": [name for name in nested.state_dict() if "module." in name],
    }
    changed = {name: value + 1 for name, value in saved.items()}
    for name, state in {
        "plain": changed,
        "prefixed": {f"module.{key}": value for key, value in changed.items()},
    }.items():
        wrapped.load_state_dict({key: torch.zeros_like(value) for key, value in saved.items()})
        wrapped.load_state_dict(state)
        results[name] = all(torch.equal(value, changed[key]) for key, value in module.state_dict().items())
    changed = {key: value + 1 for key, value in nested.state_dict().items()}
    nested.load_state_dict(changed)
    results["nested"] = all(torch.equal(value, changed[key]) for key, value in nested.state_dict().items())
    # A module whose own child is called "module".
    owner = NaiveDDP(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    owner.load_state_dict(owner.state_dict())
    results["own child"] = list(owner.state_dict()) == ["module.weight", "module.bias"]
    results["missing"] = error_of(wrapped.load_state_dict, {})[0]
    return results


def copies():
    """A deep copy, and a wrapper around a module whose former wrapper is gone: each averages once."""
    results = {}
    for mode, wrap in MODES.items():
        # In a group of its own, which cannot be copied.
        original = wrap(PartlyUsed(), group=dist.new_group())
        original(1.0, True).backward()
        finish(original)
        copied = copy.deepcopy(original)
        pickled = error_of(pickle.dumps, original)
        shares_nothing = pickled[0] == "UsageError" and all(
            a is not b for a, b in zip(original.parameters(), copied.parameters(), strict=True)
        )
        copied.zero_grad()
        copied(2.0 * (dist.get_rank() + 1), True).backward()
        finish(copied)
        module = original.module
        del original, copied.module.never
        gc.collect()
        wrapped = MODES[mode](module)
        wrapped.zero_grad()
        with recorded_launches() as launches:
            wrapped(2.0 * (dist.get_rank() + 1), True).backward()
            finish(wrapped)
        hooks = [len(parameter._post_accumulate_grad_hooks) for parameter in module.parameters()]
        averaged = [name for names, *_ in launches for name in names.split(", ")]
        results[mode] = shares_nothing, gradients(copied.module), gradients(module), hooks, sorted(averaged)
    return results


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def compiled(what):
    """By mode: launches before the first block's gradients were ready, and gradients of the second of two steps.

    Compiled is each block, the whole model, or what is ``around`` the wrapper; or nothing.
    """
    x = torch.linspace(-1, 1, 24).view(4, 6)[dist.get_rank() :]
    results = {}
    for mode, wrap in MODES.items():
        model = Blocks()
        if what == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager", dynamic=False)
        elif what == "model":
            model.compile(backend="aot_eager", dynamic=False)
        seen = []
        with recorded_launches() as launches:
            # Before the wrapper's own, so it is called before.
            model.blocks[0][0].bias.register_post_accumulate_grad_hook(
                lambda _, seen=seen, launches=launches: seen.append(len(launches))
            )
            wrapped = wrap(model)
            run = torch.compile(wrapped, backend="aot_eager", dynamic=False) if what == "around" else wrapped
            for _ in range(2):
                wrapped.zero_grad()
                launches.clear()
                run(x).square().sum().backward()
                finish(wrapped)
        results[mode] = seen[-1], gradients(model)
    torch.compiler.reset()
    return results


def nothing_to_train():
    module = nn.Linear(2, 2).requires_grad_(False)
    for wrap in MODES.values():
        wrapped = wrap(module)
        wrapped(torch.ones(1, 2))
        finish(wrapped)
    wrapped = BucketedDDP(nn.Identity(), 1.0)
    finish(wrapped)
