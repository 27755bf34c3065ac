"""What the ranks of test_all_classes run: functions that spawned processes can import."""

import copy
import pickle

import torch
import torch._dynamo.compiled_autograd as compiled_autograd
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from small_models import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cs336sys.commands.rank_training.communication import recorded_communication
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer
from cs336sys.parallel.tensor_parallel import TensorParallel


def _optimizer(flat, with_module):
    def build(module):
        parameters = list(module.parameters())
        return ShardedOptimizer(
            parameters, torch.optim.AdamW, lr=0.1, flat=flat, module=module if with_module else None
        )

    return build


DDP = {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": OverlappedDDP, "bucketed": lambda one: BucketedDDP(one, 1e-4)}
CLASSES = DDP | {
    "fsdp": FSDP,
    "optimizer": _optimizer(False, False),
    "optimizer of a module": _optimizer(False, True),
    "flat optimizer": _optimizer(True, False),
    "flat optimizer of a module": _optimizer(True, True),
}


class Extended(nn.Module):
    """A layer, and a parameter that it does not use."""

    def __init__(self, added):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.added = nn.Parameter(added, requires_grad=added.is_floating_point())

    def forward(self, x):
        return self.layer(x) + self.added.to(x.dtype).sum()


class Chain(nn.Module):
    """A layer, and blocks in a list."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


UNUSABLE = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)),
    "coordinates": lambda: Extended(torch.eye(4).to_sparse()),
    "compressed rows": lambda: Extended(torch.eye(4).to_sparse_csr()),
    "meta": lambda: Extended(torch.ones(4, device="meta")),
}


def unusable_parameters():
    """By kind and class, the error of wrapping; by class, that of adding a lazy parameter and calling refresh()."""
    errors = {
        (kind, name): error_of(wrap, build())
        for kind, build in UNUSABLE.items()
        for name, wrap in CLASSES.items()
        if (kind, name) != ("meta", "fsdp")
    }
    for name in ("bucketed", "fsdp"):
        module = Chain()
        wrapped = CLASSES[name](module)
        module.added = nn.Parameter(torch.eye(4).to_sparse())
        errors["refresh", name] = error_of(wrapped.refresh)
    return errors


def _pickled(value):
    return pickle.loads(pickle.dumps(value))


def _is_arriving(bucket):
    return bool(bucket._versions)


def copies():
    """How far copies of DDP wrappers, and of a model with a sharded optimizer, are from the original; and errors."""
    off, errors = {}, {}
    inputs = torch.ones(2, 4) + dist.get_rank()
    for way, make in {"copied": copy.deepcopy, "pickled": _pickled}.items():
        for name, wrap in DDP.items():
            wrapped = wrap(Chain())
            copied = make(wrapped)
            for one in (wrapped, copied):
                one(inputs).sum().backward()
                one.finish_gradient_synchronization()
            off[name, way] = (copied.module.first.weight.grad - wrapped.module.first.weight.grad).abs().max().item()
            errors[name] = error_of(copy.copy, wrapped)
        for flat in (False, True):
            module = Chain()
            optimizer = _optimizer(flat, True)(module)
            if not flat:
                module = NaiveDDP(module)
            for _ in range(2):
                module(inputs).sum().backward()
                if not flat:
                    module.finish_gradient_synchronization()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait_for_parameters()
            copied = make(make(module))
            off[f"optimizer {flat}", way] = (copied(inputs) - module(inputs)).abs().max().item()
            before = copied(inputs)
            module(inputs).sum().backward()
            if not flat:
                module.finish_gradient_synchronization()
            optimizer.step()
            pending = list(map(_is_arriving, optimizer._partition.exchange._buckets))
            assert any(pending)
            copied(inputs).sum().backward()
            copied.state_dict()
            assert pending == list(map(_is_arriving, optimizer._partition.exchange._buckets)), "the copy waited"
            off[f"optimizer {flat} later", way] = (copied(inputs) - before).abs().max().item()
            errors["optimizer"] = error_of(make, optimizer)
        errors["fsdp"] = error_of(make, FSDP(Chain()))
    return off, errors


def norms_without_rows():
    """(norm, dtype) by class and norm type where some ranks have nothing, and errors of other norm types."""
    norms, errors = {}, {}
    inputs = torch.ones(4, 3, dtype=torch.float64)
    module = nn.Linear(3, 1).double()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, flat=True)
    module(inputs).sum().backward()
    norms["flat"] = optimizer.clip_grad_norm_(1.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("fsdp", "tp"))
    model = BasicsTransformerLM(
        vocab_size=1, context_length=4, d_model=8, num_layers=1, num_heads=2, d_ff=16, rope_theta=10000.0
    ).double()
    shared = TensorParallel(model, mesh["tp"])
    tokens = torch.zeros(1, 4, dtype=torch.long)
    sharded = FSDP(nn.Linear(3, 1).double())
    around = FSDP(shared.module, group=mesh["fsdp"])
    for norm_type in (2.0, 1.0, float("inf"), 0.0, -1.0):
        sharded(inputs).sum().backward()
        sharded.finish_gradient_synchronization()
        around(tokens).square().sum().backward()
        around.finish_gradient_synchronization()
        for name, clip in {
            "fsdp": sharded.clip_grad_norm_,
            "tensor": lambda *args: shared.clip_grad_norm_(*args, sharded=around),
        }.items():
            if norm_type > 0:
                norms[name, norm_type] = clip(1.0, norm_type)
            else:
                errors[name, norm_type] = error_of(clip, 1.0, norm_type)
        sharded.zero_grad()
        around.zero_grad()
    return {key: (norm.item(), norm.dtype) for key, norm in norms.items()}, errors


def whole_norms():
    """The first of :func:`norms_without_rows` in one process: the gradients do not depend on the weights but one."""
    module = nn.Linear(3, 1).double()
    module(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    gradient = torch.cat([one.grad.flatten() for one in module.parameters()])
    return {norm_type: torch.linalg.vector_norm(gradient, norm_type).item() for norm_type in (2.0, 1.0, float("inf"))}


def steps_of_slices():
    """Errors of stepping optimizers of slices, by class."""
    sharded = FSDP(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)))
    errors = {}
    for optimizer_cls in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.AdamW):
        sharded(torch.ones(2, 6)).sum().backward()
        sharded.finish_gradient_synchronization()
        optimizer = optimizer_cls(sharded.parameters(), lr=0.01)
        arguments = [lambda: 0.0] if optimizer_cls is torch.optim.LBFGS else []
        errors[optimizer_cls.__name__] = error_of(optimizer.step, *arguments)
        sharded.zero_grad()
    return errors


def integers():
    """How far the output of FSDP with frozen integers is from the module's, and names and dtypes when gathered."""
    off, gathered = [], []
    for added in (torch.arange(20, dtype=torch.uint8).view(5, 4), torch.ones(3, 4, dtype=torch.bool)):
        module = Extended(added)
        module.tied = module.layer
        inputs = torch.ones(2, 4)
        dist.broadcast(module.layer.weight.data, 0)
        dist.broadcast(module.layer.bias.data, 0)
        expected = module(inputs)
        sharded = FSDP(module)
        output = sharded(inputs)
        output.sum().backward()
        sharded.finish_gradient_synchronization()
        off.append((output - expected).abs().max().item())
        gathered.append({name: value.dtype for name, value in sharded.gather_full_params().items()})
    return off, gathered


def _step(called, optimizer, dtype):
    output = called(torch.ones(2, 4, dtype=dtype))
    output.sum().backward()
    if hasattr(called, "finish_gradient_synchronization"):
        called.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    assert output.dtype == dtype


def remedies():
    """By class and dtype: the error of a step after converting the module, and that of its remedy and a step then."""
    errors = {}
    for dtype in (torch.bfloat16, torch.float64):
        for name in ("bucketed", "fsdp"):
            wrapped = CLASSES[name](Chain())
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            _step(wrapped, optimizer, torch.float32)
            wrapped.module.to(dtype)
            refusal = error_of(_step, wrapped, optimizer, dtype)
            errors[name, dtype] = refusal, error_of(wrapped.refresh), error_of(_step, wrapped, optimizer, dtype)
        for flat in (False, True):
            module = Chain()
            optimizer = _optimizer(flat, True)(module)
            _step(module, optimizer, torch.float32)
            module.to(dtype)
            refusal = error_of(_step, module, optimizer, dtype)
            refresh = error_of(optimizer.refresh)
            del optimizer
            module.zero_grad()
            optimizer = _optimizer(flat, True)(module)
            errors[f"optimizer {flat}", dtype] = refusal, refresh, error_of(_step, module, optimizer, dtype)
    return errors


def compiled_passes():
    """By class: the error of a backward pass that compiled autograd runs, and how far its gradients are off."""
    inputs, results = torch.ones(2, 4) + dist.get_rank(), {}
    for name in ("naive", "flat", "overlapped", "bucketed", "fsdp", "flat optimizer"):
        module = Chain()
        wrapper = CLASSES[name](module)
        called = module if isinstance(wrapper, torch.optim.Optimizer) else wrapper
        loss = called(inputs).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            error = error_of(loss.backward)
        wrapper.finish_gradient_synchronization()
        gradient, off = module.first.weight.grad, None
        if error is None:
            wrapper.zero_grad()
            called(inputs).sum().backward()
            wrapper.finish_gradient_synchronization()
            off = (module.first.weight.grad - gradient).abs().max().item()
        results[name] = error, off
    return results


def sent_bytes():
    """The bytes that a step sends on this rank, by class, and those of all parameters and of the last one."""
    sent = {}
    for name, wrap in CLASSES.items():
        module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        wrapper = wrap(module)
        is_optimizer = isinstance(wrapper, ShardedOptimizer)
        called = module if is_optimizer else wrapper
        for _ in range(2):
            with recorded_communication() as communications:
                called(torch.ones(2, 64)).sum().backward()
                if is_optimizer:
                    wrapper.step()
                    wrapper.wait_for_parameters()
                else:
                    wrapper.finish_gradient_synchronization()
                wrapper.zero_grad()
        sent[name] = sum(launch.sent_bytes for launch in communications if not launch.is_flags)
    sizes = [parameter.nbytes for parameter in module.parameters()]
    return sent, sum(sizes), sizes[-1]
