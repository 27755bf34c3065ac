"""What the ranks of test_ddp and test_collectives run: functions that spawned processes can import."""

import contextlib
import copy
import gc
import random
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel import collectives
from cs336sys.parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

# 400 bytes hold two to four of the small tensors below and not the larger ones.
MODES = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlappedDDP,
    "bucketed": lambda module, **options: BucketedDDP(module, 0.0004, **options),
    "one bucket": lambda module, **options: BucketedDDP(module, None, **options),
}

TORCH_MODES = {
    "torch": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "torch, small buckets": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.0001),
}


def finish(wrapped):
    if not isinstance(wrapped, DistributedDataParallel):
        wrapped.finish_gradient_synchronization()


def gradients(module):
    return {
        name: None if parameter.grad is None else parameter.grad.detach().cpu().clone()
        for name, parameter in module.named_parameters()
    }


def weights(module):
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


class Network(nn.Module):
    """Odd sizes, tied weights, a frozen bias, a frozen parameter of its own and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 13)
        self.third = nn.Linear(13, 13, bias=False)
        self.third.weight = self.second.weight
        self.last = nn.Linear(13, 5)
        self.last.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x):
        x = torch.tanh(self.second(self.norm(torch.relu(self.first(x)))))
        return self.last(torch.tanh(self.third(x))) * self.scale[0] + self.offset


def network(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return Network().to(dtype)


def batch(step, dtype=torch.float32):
    """12 rows, which 1 to 4 ranks share out, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(12, 7, generator=generator, dtype=dtype),
        torch.randn(12, 5, generator=generator, dtype=dtype),
    )


def share(rows):
    """This rank's part of a batch, where its model is."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()].to(collectives.group_device())


def train_alone(dtype=torch.float32, steps=4):
    """The oracle: one process, the whole batch."""
    model = network(0, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = batch(step, dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def train(mode, dtype=torch.float32, steps=4, micro_batches=1):
    """Weights after training from rank 0's start; ``zero_grad`` in both modes in turn."""
    model = network(dist.get_rank(), dtype).to(collectives.group_device())
    wrapped = (MODES | TORCH_MODES)[mode](model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = batch(step, dtype)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        parts = list(zip(share(inputs).chunk(micro_batches), share(targets).chunk(micro_batches), strict=True))
        for part, (x, y) in enumerate(parts):
            with contextlib.nullcontext() if part == len(parts) - 1 else wrapped.no_sync():
                (nn.functional.mse_loss(wrapped(x), y) / micro_batches).backward()
        finish(wrapped)
        optimizer.step()
    return weights(model)


def train_all(modes, *args):
    return {mode: train(mode, *args) for mode in modes}


class Products(nn.Module):
    """The gradient of each parameter is a given tensor, so that sums are exact; shapes of 0 to 130 elements."""

    SHAPES = ((1,), (3, 1), (129,), (5, 26), (), (0, 3), (64,))

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in self.SHAPES])

    def forward(self, factors):
        return sum((part * factor).sum() for part, factor in zip(self.parts, factors, strict=True))


def factors(rank):
    """Integers that 1 to 4 ranks divide."""
    generator = torch.Generator().manual_seed(rank)
    return [12.0 * torch.randint(-999, 999, shape, generator=generator) for shape in Products.SHAPES]


def average_integers():
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(Products())
        wrapped(factors(dist.get_rank())).backward()
        finish(wrapped)
        results[mode] = [part.grad for part in wrapped.module.parts]
    return results


@contextlib.contextmanager
def recorded_launches(delay=None):
    """The names that each all-reduce of gradients averages, in launch order; ``delay()`` is called before each."""
    launches = []
    start = collectives.MeanReduction.start

    def record(reduction, tensors):
        if delay:
            delay()
        names = reduction.what.removeprefix("gradients of ")
        launches.append((names, [tensor.numel() for tensor in tensors], tensors[0].dtype))
        start(reduction, tensors)

    collectives.MeanReduction.start = record
    try:
        yield launches
    finally:
        collectives.MeanReduction.start = start


class Branches(nn.Module):
    """Independent branches, evaluated in a given order: autograd finishes the gradients of the last one first."""

    def __init__(self, count=4):
        super().__init__()
        self.branches = nn.ParameterList([torch.ones(3) for _ in range(count)])

    def forward(self, order, factor):
        outputs = {index: self.branches[index] * factor * (index + 1) for index in order}
        return sum(outputs[index].sum() for index in order)


def differently_ordered(order_of_rank):
    """By mode: gradients, the order in which they became ready, and the order of launches."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(Branches())
        ready = []
        for index, branch in enumerate(wrapped.module.branches):
            branch.register_post_accumulate_grad_hook(lambda _, ready=ready, index=index: ready.append(index))
        with recorded_launches() as launches:
            wrapped(order_of_rank[dist.get_rank()], dist.get_rank() + 1.0).backward()
            finish(wrapped)
        results[mode] = gradients(wrapped.module), ready, [names for names, *_ in launches]
    return results


def train_with_delays(seed):
    """Every rank comes late to other collectives than its peers; on GPUs both with launches and with gradients."""
    chance = random.Random(f"{seed} {dist.get_rank()}")

    def delay():
        time.sleep(chance.choice((0.0, 0.0, 0.005, 0.02)))
        if collectives.group_device().type == "cuda":
            # Cycles: up to 50 ms, in which a collective that did not wait for this stream would read old gradients.
            torch.cuda._sleep(chance.choice((0, 0, 100_000_000)))

    with recorded_launches(delay):
        return {mode: train(mode, torch.float32, 2) for mode in MODES}


def launches_in_time():
    """By mode: how many launches of how many happened before the last gradient was ready, and within the backward."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(network(0))
        first = wrapped.module.first.weight
        with recorded_launches() as launches:
            before_last = []
            first.register_hook(lambda _, seen=before_last, launches=launches: seen.append(len(launches)))
            inputs, _ = batch(0)
            wrapped(inputs).sum().backward()
            in_backward = len(launches)
            finish(wrapped)
        results[mode] = before_last[0], in_backward, launches
    return results


def gradient_memory():
    """By mode: whether gradients stayed where autograd put them, and whether they lie in one allocation, over steps."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(network(0))
        stayed, together = [], []
        for step in range(3):
            wrapped.zero_grad(set_to_none=step != 1)
            wrapped(batch(step)[0]).sum().backward()
            trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
            before = [parameter.grad.data_ptr() for parameter in trained]
            finish(wrapped)
            stayed.append(before == [parameter.grad.data_ptr() for parameter in trained])
            together.append(len({parameter.grad.untyped_storage().data_ptr() for parameter in trained}) == 1)
        results[mode] = stayed, together
    return results


def flat_buffer_is_dropped():
    """Whether the flat buffer is there after the synchronization, and whether it is after zero_grad."""
    wrapped = FlatDDP(network(0))
    wrapped(batch(0)[0]).sum().backward()
    finish(wrapped)
    buffer = weakref.ref(next(parameter.grad._base for parameter in wrapped.parameters() if parameter.requires_grad))
    before = buffer() is not None
    wrapped.zero_grad()
    # Gloo's thread holds what it communicated a moment longer.
    deadline = time.monotonic() + 20
    while buffer() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, buffer() is not None


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, factor, sometimes):
        return (self.used * factor).sum() + ((self.sometimes * factor).sum() if sometimes else 0.0)


def unused_on_some_ranks():
    """By mode: gradients of three steps: one parameter used on all ranks, then on rank 0 alone, then on none."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(PartlyUsed().to(collectives.group_device()))
        steps = []
        for used_on in (range(dist.get_world_size()), (0,), ()):
            wrapped.zero_grad()
            wrapped(12.0 * (dist.get_rank() + 1), dist.get_rank() in used_on).backward()
            finish(wrapped)
            steps.append(gradients(wrapped.module))
        results[mode] = steps
    return results


def no_backward_on_one_rank():
    """A rank whose share of the data is used up takes part all the same."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(PartlyUsed())
        if dist.get_rank() == 0:
            wrapped(8.0, True).backward()
        finish(wrapped)
        results[mode] = gradients(wrapped.module)
    return results


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return None


def none_gradients():
    """A backward function that returns None on rank 1 alone."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(PartlyUsed())
        through = WithoutGradient.apply if dist.get_rank() == 1 else torch.clone
        loss = (through(wrapped.module.sometimes) * 4.0).sum() + (wrapped.module.used * 2.0).sum()
        loss.backward()
        finish(wrapped)
        results[mode] = gradients(wrapped.module)
    return results


def second_backward():
    """By mode: the error of a second pass, that of one under no_sync after a synchronized one, then a good step."""
    results = {}
    for mode, wrap in MODES.items():
        errors = []
        wrapped = wrap(PartlyUsed())
        for context in (contextlib.nullcontext, wrapped.no_sync):
            wrapped(1.0, True).backward()
            with context():
                errors.append(error_of(wrapped(1.0, True).backward))
            finish(wrapped)
            wrapped.zero_grad()
        wrapped(2.0 * (dist.get_rank() + 1), True).backward()
        finish(wrapped)
        results[mode] = errors, gradients(wrapped.module)
    return results


def error_of(call, *args, **kwargs):
    """(type, message) of what a call raises; None if it returns."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def accumulate_without_the_last_pass():
    """Gradients of a step whose passes were all under no_sync; before it, an error that leaves the context.

    The first of the results is what a second backward pass then raises.
    """
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(PartlyUsed())
        with contextlib.suppress(KeyError), wrapped.no_sync():
            raise KeyError
        wrapped(1.0, True).backward()
        error = error_of(wrapped(1.0, True).backward)
        finish(wrapped)
        wrapped.zero_grad()
        wrapped(12.0 * (dist.get_rank() + 1), True).backward()
        finish(wrapped)
        once = gradients(wrapped.module)
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(12.0 * (dist.get_rank() + 1), True).backward()
            alone = gradients(wrapped.module)
        finish(wrapped)
        results[mode] = error, once, alone, gradients(wrapped.module)
    return results


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


def checkpointed(use_reentrant, uses=1):
    inputs = torch.linspace(-1, 1, 24).view(4, 6)[dist.get_rank() :].requires_grad_()
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(Checkpointed(use_reentrant, uses))
        error = error_of(wrapped(inputs).square().sum().backward)
        finish(wrapped)
        results[mode] = error or gradients(wrapped.module)
    return results


class MixedDtypes(nn.Module):
    DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.bfloat16)

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(3, dtype=dtype) for dtype in self.DTYPES])

    def forward(self, factor):
        return sum((part * factor).double().sum() for part in self.parts)


def mixed_dtypes(factor):
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(MixedDtypes())
        with recorded_launches() as launches:
            wrapped(factor * (dist.get_rank() + 1)).backward()
            finish(wrapped)
        results[mode] = [part.grad for part in wrapped.module.parts], [dtype for *_, dtype in launches]
    return results


class Permuted(nn.Module):
    """Parameters that are not contiguous: transposed, channels last, and every other column of a larger tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.randn(3, 8)[:, ::2])

    def forward(self, x):
        image = self.image(x.expand(1, 2, 5, 5).contiguous(memory_format=torch.channels_last))
        return (self.transposed.square() * x).sum() + image.square().sum() + (self.sliced * x).square().sum()


def permuted_parameters():
    """By mode: the averaged gradients, the local ones that every rank computed from rank 0's weights, the weights."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(Permuted())
        x = torch.tensor(dist.get_rank() + 1.0)
        alone = copy.deepcopy(wrapped.module)
        alone(x).backward()
        wrapped(x).backward()
        if dist.get_rank() == 1 and mode in ("naive", "flat"):
            # As a caller may leave it: the same numbers in another order in memory.
            parameter = wrapped.module.transposed
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
        finish(wrapped)
        results[mode] = gradients(wrapped.module), gradients(alone), weights(wrapped.module)
    return results


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


def differing_layout(what):
    """The error on this rank when rank 1 (or the last of 3) builds something else."""
    module, wrap = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), NaiveDDP
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "shape":
            module[1] = nn.Linear(4, 5)
        elif what == "name":
            module = nn.Sequential(module[0], nn.Identity(), module[1])
        elif what == "dtype":
            module[1].weight = nn.Parameter(module[1].weight.int(), requires_grad=False)
            module[1].weight.requires_grad_(False)
        elif what == "requires_grad":
            module[0].bias.requires_grad_(False)
        elif what == "strides":
            module[0].weight = nn.Parameter(module[0].weight.detach().t())
        elif what == "tie":
            module[1].weight = module[0].weight
        elif what == "missing":
            module = module[:1]
        elif what == "buffer":
            module.register_buffer("extra", torch.zeros(2))
        elif what == "mode":
            wrap = OverlappedDDP
    if what == "cap":
        return error_of(BucketedDDP, module, 1.0 + dist.get_rank())
    if what == "gradient_dtype":
        return error_of(NaiveDDP, module, gradient_dtype=(None, torch.bfloat16)[dist.get_rank()])
    return error_of(wrap, module)


def unfreeze():
    """The error of training a parameter that was frozen, and gradients before and after refresh()."""
    results = {}
    for mode, wrap in MODES.items():
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
        results[mode] = before, error, gradients(module)
    return results


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
        original = wrap(PartlyUsed())
        original(1.0, True).backward()
        finish(original)
        copied = copy.deepcopy(original)
        shares_nothing = all(a is not b for a, b in zip(original.parameters(), copied.parameters(), strict=True))
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


def smaller_traffic(gradient_dtype):
    """By mode: averaged gradients, local ones, and the dtypes and elements that were sent."""
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(network(0), gradient_dtype=gradient_dtype)
        inputs = batch(dist.get_rank())[0]
        alone = copy.deepcopy(wrapped.module)
        alone(inputs).sum().backward()
        with recorded_launches() as launches:
            for _ in range(2):
                wrapped.zero_grad()
                launches.clear()
                wrapped(inputs).sum().backward()
                finish(wrapped)
        results[mode] = gradients(wrapped.module), gradients(alone), launches
    return results


def not_a_number():
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(PartlyUsed())
        wrapped(float("nan") if dist.get_rank() == 1 else 1.0, True).backward()
        finish(wrapped)
        results[mode] = gradients(wrapped.module)
    return results


def sparse_gradient():
    results = {}
    for mode, wrap in MODES.items():
        wrapped = wrap(nn.Embedding(5, 3, sparse=True))

        def step(wrapped=wrapped):
            wrapped(torch.tensor([1, 2])).sum().backward()
            finish(wrapped)

        results[mode] = error_of(step)
    return results


def nothing_to_train():
    module = nn.Linear(2, 2).requires_grad_(False)
    for wrap in MODES.values():
        wrapped = wrap(module)
        wrapped(torch.ones(1, 2))
        finish(wrapped)
    wrapped = BucketedDDP(nn.Identity(), 1.0)
    finish(wrapped)


def wrong_arguments():
    return [error_of(BucketedDDP, nn.Linear(2, 2), size) for size in (0, -1.0, float("nan"))] + [
        error_of(NaiveDDP, nn.Linear(2, 2), gradient_dtype=torch.int32)
    ]


def peak_memory_mib():
    """By mode: most memory allocated in a training step of 8 layers with 4 MiB of fp32 weights each."""
    peaks = {}
    for mode in (*MODES, "torch"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
        wrapped = (MODES | TORCH_MODES)[mode](model)
        # Fused, because others need memory of their own.
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
        for step in range(4):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            wrapped(torch.ones(16, 1024, device="cuda")).sum().backward()
            finish(wrapped)
            optimizer.step()
        peaks[mode] = torch.cuda.max_memory_allocated() / 2**20
        del model, wrapped, optimizer
        gc.collect()
    return peaks


def lost_peer(how):
    """One rank does not come to the synchronization of a step."""
    wrapped = OverlappedDDP(PartlyUsed())
    wrapped(1.0, True).backward()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("out of data")
        time.sleep(600)
    finish(wrapped)
    wrapped.zero_grad()
    wrapped(1.0, True).backward()
    finish(wrapped)


def mean_of(tensors_of_rank, dtype):
    """Means of tensors that hold these numbers."""
    tensors = [torch.tensor(numbers, dtype=dtype) for numbers in tensors_of_rank[dist.get_rank()]]
    reduction = collectives.MeanReduction(dtype, tensors[0].device)
    reduction.start(tensors)
    reduction.wait()
    return [tensor.tolist() for tensor in tensors]


def gather_and_scatter():
    """Both spellings of the shims: all ranks' parts everywhere, and sums of the own parts."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    gathered = torch.zeros(2 * world_size)
    collectives.all_gather_single(gathered, torch.tensor([rank, 10.0 * rank]))
    scattered = torch.zeros(2)
    collectives.reduce_scatter_single(scattered, torch.arange(2.0 * world_size) + rank)
    return gathered.tolist(), scattered.tolist(), collectives.gather_objects({"rank": rank})


def any_rank(facts_of_rank):
    return collectives.AnyRank(facts_of_rank[dist.get_rank()], torch.device("cpu")).wait()


def warnings_of_the_shims():
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gather_and_scatter()
        mean_of([[[1.0], [2.0]]] * dist.get_world_size(), torch.float32)
    return [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]
