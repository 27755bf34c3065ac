"""Models, batches and optimizers that the rank programs of this room share, and what tests see of them."""

import contextlib

import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import AdamW
from launches import on_start, on_wait
from small_models import on_cpu, share
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel import collectives
from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.fsdp import FSDP

WIDTH, VOCABULARY = 6, 11


class Block(nn.Module):
    """Odd shapes, biases, a norm."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 15), nn.LayerNorm(15), nn.Linear(15, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head, in fp64; other classes use them in other ways."""

    block = Block

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.add_parts()
        self.double()

    def add_parts(self):
        pass

    def body(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.head(self.body(tokens))


class Network(Model):
    """Tied weights, a block used twice, frozen parameters, parameters of its own, a buffer."""

    checkpoints = False

    def add_parts(self):
        self.head.weight = self.embedding.weight
        self.narrow, self.wide = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.wide.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]), requires_grad=False)
        self.register_buffer("offset", torch.randn(WIDTH))

    def body(self, tokens):
        x = self.embedding(tokens) * self.scale[0] + self.offset
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.norm(x + self.wide(torch.tanh(self.frozen(self.narrow(x))))) * self.gain


def on_rank(model):
    """The model where this rank computes; in a process that is no rank, and on the meta device, where it is."""
    if not dist.is_initialized() or next(model.parameters()).is_meta:
        return model
    return model.to(collectives.group_device())


def network(seed, dtype=torch.float64):
    return on_rank(Network(seed).to(dtype))


def transformer(seed=0, vocab_size=30, layers=3):
    torch.manual_seed(seed)
    return on_rank(BasicsTransformerLM(vocab_size, 8, d_model=24, num_layers=layers, num_heads=2, d_ff=40))


def batch(step, vocab_size=VOCABULARY):
    """12 sequences, which 1 to 4 ranks share out, the same on every rank."""
    tokens = torch.randint(vocab_size, (12, 6), generator=torch.Generator().manual_seed(100 + step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model, tokens, targets):
    """Of the logits, and of what else the model returns."""
    output = model(tokens)
    logits, *others = output if isinstance(output, tuple) else (output,)
    return cross_entropy(logits.double(), targets) + 0.1 * sum(others)


OPTIMIZERS = {
    "course": lambda parameters: AdamW(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def train(optimizer="adamw", steps=4, dtype=torch.float64, micro_batches=1, checkpoints=False, **settings):
    """Whole weights after training from rank 0's start; ``zero_grad`` in both modes in turn."""
    model = network(dist.get_rank(), dtype)
    model.checkpoints = checkpoints
    sharded = FSDP(model, **settings)
    stepper = OPTIMIZERS[optimizer](sharded.parameters())
    for step in range(steps):
        inputs, targets = map(share, batch(step))
        stepper.zero_grad(set_to_none=step % 2 == 0)
        parts = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for part, (x, y) in enumerate(parts):
            with contextlib.nullcontext() if part == len(parts) - 1 else sharded.no_sync():
                (loss_of(sharded, x, y) / micro_batches).backward()
        sharded.finish_gradient_synchronization()
        stepper.step()
    return on_cpu(sharded.gather_full_params())


def whole_gradients(sharded):
    """The slices of all ranks put together: what an optimizer on one rank would see."""
    whole = {}
    for name, parameter in sharded.sharded_parameters.items():
        gradient = parameter.shard.grad
        whole[name] = None if gradient is None else torch.cat(gather_objects(gradient.cpu()))
    for name, parameter in sharded.replicated_parameters.items():
        whole[name] = parameter.grad
    return on_cpu(whole)


@contextlib.contextmanager
def recorded(log, delay=lambda: None):
    """Log every launch of a collective of FSDP; ``delay()`` is called before each launch and each wait."""

    def record(operation, start, *args):
        delay()
        log.append((operation._collective, operation.contents.partition(" of ")[2]))
        start(*args)

    with on_start(record), on_wait(lambda _, wait: (delay(), wait())):
        yield log


def gathered_units(sharded):
    """Units that have memory, by what their tensors really have."""
    held = {}
    for unit in sharded.units:
        storages = {parameter.full.untyped_storage().data_ptr(): parameter.full for parameter in unit.parameters}
        bytes_held = {full.untyped_storage().nbytes() for full in storages.values()}
        assert bytes_held <= {0, unit.gathered_bytes}
        if bytes_held != {0}:
            held[unit.name] = unit.gathered_bytes
    return held
