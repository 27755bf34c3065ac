"""What the ranks of test_fsdp_kept run: functions that spawned processes can import."""

import dataclasses

import torch
from fsdp_models import gathered_units, whole_gradients
from small_models import error_of, share
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel import collectives
from cs336sys.parallel.fsdp import FSDP


@dataclasses.dataclass
class Kept:
    losses: tuple[Tensor, ...]


class Block(nn.Module):
    """Computes an auxiliary loss after its output, with its own weights, and keeps it in a way to be chosen."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.all_losses = []
        self.register_buffer("buffered", None)

    def forward(self, x, losses):
        y = x + self.second(torch.tanh(self.first(x)))
        loss = self.second(torch.relu(self.first(x))).square().mean()
        match self.kind:
            case "attribute" | "checkpointed":
                self.loss = loss
            case "of a submodule":
                self.second.loss = loss
            case "list":
                # Never emptied.
                self.all_losses.append(loss)
            case "dict":
                self.losses = {"balance": [loss], "count": 1}
            case "dataclass":
                self.kept = Kept((loss, loss))
            case "buffer":
                self.buffered = loss
            case "view":
                self.losses = torch.stack([loss, loss]).view(1, 2)
                self.losses *= 2
            case "list of the caller":
                losses.append(loss)
            case "of the input too":
                self.loss, self.inputs = loss, x
        return y

    def auxiliary(self):
        match self.kind:
            case "attribute" | "checkpointed" | "of the input too":
                return self.loss
            case "of a submodule":
                return self.second.loss
            case "list":
                return self.all_losses[-1]
            case "dict":
                return self.losses["balance"][0]
            case "dataclass":
                return self.kept.losses[1]
            case "buffer":
                return self.buffered
            case "view":
                return self.losses.sum() / 4


KINDS = (
    "attribute",
    "of a submodule",
    "list",
    "dict",
    "dataclass",
    "buffer",
    "view",
    "list of the caller",
    "of the input too",
    "checkpointed",
)


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(3)])
        self.to(collectives.group_device(), torch.float64)

    def forward(self, x):
        self.losses = []
        for block in self.blocks:
            if block.kind == "checkpointed":
                x = checkpoint(block, x, self.losses, use_reentrant=False)
            else:
                x = block(x, self.losses)
        return x.square().mean()

    def auxiliary(self):
        return sum(self.losses or [block.auxiliary() for block in self.blocks])


def auxiliary_losses(kinds=KINDS):
    """By kind and loss: whole gradients after a third step, those of one process, and units that still have memory."""
    inputs = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)
    results = {}
    for kind in kinds:
        for which in ("both", "auxiliary alone", "two passes forward") if kind in ("attribute", "view") else ("both",):
            sharded, alone = FSDP(Blocks(kind)), Blocks(kind)
            for model, plain, x in ((sharded, sharded.module, share(inputs)), (alone, alone, inputs)):
                for _ in range(3):
                    model.zero_grad()
                    loss = model(x.to(collectives.group_device()))
                    loss = (loss.detach() if which == "auxiliary alone" else loss) + plain.auxiliary()
                    if which == "two passes forward":
                        loss = loss + model(2 * x.to(collectives.group_device())) + plain.auxiliary()
                    loss.backward()
                    if model is sharded:
                        model.finish_gradient_synchronization()
            expected = {name: parameter.grad.cpu() for name, parameter in alone.named_parameters()}
            hooked = {len(block.all_losses[-1]._backward_hooks) for block in sharded.module.blocks if block.all_losses}
            ahead = [unit.calls_ahead for unit in sharded.units]
            results[kind, which] = whole_gradients(sharded), expected, gathered_units(sharded), hooked, ahead
    return results


class Changes(nn.Module):
    """A block that adds to, replaces in and removes from what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, numbers, *, named):
        y = self.linear(x)
        # In fp32: the next block gets a list that has to be converted.
        numbers.append(y.float().sum())
        named["last"] = y.float()
        named.pop("dtype", None)
        named["dtypes"] = [number.dtype for number in numbers]
        return y


def containers_under_bf16():
    """What the caller finds in a list and a dictionary that three blocks were given, and whether the sum trains."""
    model = nn.Module()
    model.blocks = nn.ModuleList([Changes() for _ in range(3)])

    def forward(x, numbers, named):
        for block in model.blocks:
            x = block(x, numbers, named=named)
        return x

    model.forward = forward
    sharded = FSDP(model.to(collectives.group_device()), torch.bfloat16)
    first = torch.ones(2, device=collectives.group_device())
    numbers, named = [first], {"dtype": "any", "first": first}
    sharded(torch.ones(2, 3, device=collectives.group_device()), numbers, named)
    sum(numbers[1:]).backward()
    sharded.finish_gradient_synchronization()
    trained = [bool(gradient.any()) for gradient in whole_gradients(sharded).values()]
    return (
        [(number.dtype, number is first) for number in numbers],
        [(key, part is first) for key, part in named.items()],
        named["dtypes"],
        trained,
    )


def gradient_penalty():
    """Errors of backward passes that make a graph, and whole gradients of the good step after them."""
    inputs = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)
    sharded = FSDP(Blocks("attribute"))
    norms = FSDP(nn.LayerNorm(5, dtype=torch.float64))
    x = share(inputs).requires_grad_()
    errors = {
        "of the inputs": error_of(lambda: torch.autograd.grad(sharded(x), x, create_graph=True)),
        "backward": error_of(lambda: sharded(x).backward(create_graph=True)),
    }
    gathered = gathered_units(sharded)
    norms(x).square().sum().backward(create_graph=True)
    errors["replicated"] = error_of(norms.finish_gradient_synchronization)
    sharded.zero_grad()
    sharded(share(inputs)).backward()
    sharded.finish_gradient_synchronization()
    alone = Blocks("attribute")
    alone(inputs).backward()
    expected = {name: parameter.grad.cpu() for name, parameter in alone.named_parameters()}
    return errors, gathered, whole_gradients(sharded), expected
