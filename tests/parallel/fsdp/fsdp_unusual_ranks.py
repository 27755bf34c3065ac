"""What the ranks of test_fsdp_unusual run: functions that spawned processes can import."""

import contextlib

import torch
import torch.distributed as dist
from fsdp_models import gathered_units, whole_gradients
from small_models import error_of, share
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cs336sys.parallel.fsdp import FSDP

WIDTH, VOCABULARY = 6, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return x + self.change(x)

    def change(self, x):
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks, a norm and a head, in fp64; other classes use them in other ways."""

    block = Block

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
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


class TiedByHand(Model):
    def add_parts(self):
        del self.head

    def forward(self, tokens):
        return self.body(tokens) @ self.embedding.weight.T


class TiedInACheckpoint(TiedByHand):
    def forward(self, tokens):
        return checkpoint(lambda x: x @ self.embedding.weight.T, self.body(tokens), use_reentrant=False)


class PenaltyOnAll(Model):
    def forward(self, tokens):
        return super().forward(tokens), sum(parameter.square().sum() for parameter in self.parameters())


class PenaltyOnABlock(Model):
    def forward(self, tokens):
        return super().forward(tokens), self.blocks[1].up.weight.abs().sum()


class Probe(Model):
    def forward(self, tokens):
        with torch.no_grad():
            self.seen = self.head.weight.norm().item()
        return super().forward(tokens)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, count):
        return self.weight[:count]


class LayerReturnsAView(Model):
    def add_parts(self):
        self.positions = Positions()

    def body(self, tokens):
        x = self.embedding(tokens) + self.positions(tokens.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class AllPositions(Positions):
    def forward(self, count):
        return self.weight


class LayerReturnsItsWeight(LayerReturnsAView):
    def add_parts(self):
        self.positions = AllPositions()

    def body(self, tokens):
        return super().body(tokens.repeat(1, 2)[:, :9])[:, : tokens.shape[1]]


class SometimesSkipped(Block):
    """Stochastic depth: it may return what it was given."""

    skips = False

    def forward(self, x):
        return x if self.skips else super().forward(x)


class BlockReturnsItsInput(Model):
    block = SometimesSkipped

    def add_parts(self):
        self.blocks[1].skips = True


class RanksSkipOtherBlocks(Model):
    block = SometimesSkipped

    def body(self, tokens):
        rank = int(tokens[0, 0]) % 2
        for index, block in enumerate(self.blocks):
            block.skips = index == 1 + rank
        return super().body(tokens)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        x = x @ self.weight
        for block in self.blocks:
            x = block(x)
        return x


class UnitReturnsOutputOfAnother(Model):
    def add_parts(self):
        self.inner = Inner()

    def body(self, tokens):
        return self.norm(self.inner(self.embedding(tokens)))


class ChangesInPlace(Block):
    def forward(self, x):
        x += self.change(x.clone())


class BlockChangesItsInput(Model):
    block = ChangesInPlace

    def body(self, tokens):
        x = self.embedding(tokens) * 1.0
        for block in self.blocks:
            block(x)
        return self.norm(x)


class AddsALoss(Block):
    def forward(self, x, loss):
        loss += self.up(x).square().mean()
        return super().forward(x)


class BlockAddsALoss(Model):
    block = AddsALoss

    def forward(self, tokens):
        x, loss = self.embedding(tokens), torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            x = block(x, loss)
        return self.head(self.norm(x)), loss


class WeightsInAList(Model):
    def add_parts(self):
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])

    def body(self, tokens):
        x = super().body(tokens)
        for weight in self.weights:
            x = x @ weight
        return x


class HeadBiasHeldTwice(Model):
    """As BERT's head holds its bias."""

    def add_parts(self):
        self.outer = nn.Module()
        self.outer.decoder, self.outer.bias = self.head, self.head.bias


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class WeightGivenToAFunction(Model):
    def forward(self, tokens):
        return Product.apply(self.body(tokens), self.head.weight)


class Parametrized(Model):
    def add_parts(self):
        nn.utils.parametrizations.weight_norm(self.head)
        nn.utils.parametrizations.orthogonal(self.blocks[0].up)


class LongShortTermMemory(Model):
    """Its class has a __setattr__ of its own, and a list of its weights."""

    def add_parts(self):
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def body(self, tokens):
        return self.norm(self.memory(self.embedding(tokens))[0])


class EncoderLayerAlone(Model):
    def add_parts(self):
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def body(self, tokens):
        return self.norm(self.layer(self.embedding(tokens)))


class BackwardWithinForward(Model):
    """As models of forces have it: a backward pass through a part of the module while another computes."""

    def forward(self, tokens):
        with torch.enable_grad():
            x = self.embedding(tokens).detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](x).sum(), x)
        return self.head(self.body(tokens) + slope)


MODELS = {model.__name__: model for model in [Model, *Model.__subclasses__(), TiedInACheckpoint, LayerReturnsItsWeight]}
SETTINGS = {"keep_gathered": {"keep_gathered": 2}, "prefetch": {"prefetch": 0}}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(VOCABULARY, (12, 5), generator=generator) for _ in range(2))
    # By its first token a rank knows itself.
    tokens[:, 0] = torch.tensor([0, 1]).repeat_interleave(6)
    return tokens, targets


def loss_of(model, tokens, targets):
    output = model(tokens)
    logits, *others = output if isinstance(output, tuple) else (output,)
    return functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()) + 0.1 * sum(others)


def gradients_alone(model):
    """Of both halves of the batch, as ranks have them, by one process."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def passes(sharded, alone, steps=2, run=loss_of):
    """Whole gradients of the last of some steps, of both."""
    for step in range(steps):
        tokens, targets = batch(step)
        sharded.zero_grad()
        alone.zero_grad()
        run(sharded, share(tokens), share(targets)).backward()
        sharded.finish_gradient_synchronization()
        # What a rank computes may depend on its half of the batch.
        for half in range(2):
            run(alone, tokens.chunk(2)[half], targets.chunk(2)[half]).backward()
        for parameter in alone.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
    return whole_gradients(sharded), gradients_alone(alone)


def unusual_models():
    """By model: gradients, sharded and alone; units that still have memory; types and shapes of parameters after."""
    results = {}
    for name, model in MODELS.items():
        for variant, settings in {"": {}, **(SETTINGS if model in (TiedByHand, PenaltyOnAll) else {})}.items():
            sharded = FSDP(model(), **settings)
            before = {key: id(parameter) for key, parameter in sharded.named_parameters()}
            found = passes(sharded, model())
            after = {key: id(parameter) for key, parameter in sharded.named_parameters()}
            results[f"{name} {variant}".strip()] = found, gathered_units(sharded), before == after
    return results


def evaluated():
    """By model: the largest difference of outputs in evaluation, by the wrapper and by the module itself."""
    results = {}
    tokens, _ = batch(0)
    for model in (TiedByHand, LayerReturnsAView, WeightsInAList, EncoderLayerAlone, LongShortTermMemory):
        sharded, alone = FSDP(model()).eval(), model().eval()
        with torch.no_grad():
            outputs = [run(tokens) for run in (sharded, sharded.module, alone)]
        results[model.__name__] = *(float((out - outputs[-1]).abs().max()) for out in outputs), gathered_units(sharded)
    return results


def several_passes_through_lent_weights():
    """Gradients of two forward passes, of which one goes backward twice."""

    def run(model, tokens, targets):
        first, second = loss_of(model, tokens, targets), loss_of(model, tokens, targets)
        second.backward(retain_graph=True)
        second.backward()
        return first

    return passes(FSDP(TiedByHand()), TiedByHand(), run=run)


def under_autocast():
    """Gradients of three passes in one autocast context."""

    def run(model, tokens, targets):
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, tokens, targets).backward()
            loss_of(model, tokens, targets).backward()
            return loss_of(model, tokens, targets)

    sharded, alone = FSDP(Model().float()), Model().float()
    return passes(sharded, alone, steps=1, run=run)


def bias_held_twice_in_half_precision():
    sharded = FSDP(HeadBiasHeldTwice().float(), torch.bfloat16)
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    return {name: parameter.grad is not None for name, parameter in sharded.named_parameters()}


def inputs_changed_in_place_in_half_precision():
    """Gradients with inputs that are converted and changed in place."""
    sharded = FSDP(BlockChangesItsInput().float(), torch.bfloat16)
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.finish_gradient_synchronization()
    alone = BlockChangesItsInput()
    loss_of(alone, *batch(0)).backward()
    return whole_gradients(sharded), gradients_alone(alone)


class TwoModules(nn.Module):
    def __init__(self, wrap, in_a_row):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(2)]
        self.first, self.second = map(wrap, layers)
        self.in_a_row = in_a_row

    def forward(self, x):
        if self.in_a_row:
            return self.second(self.first(x)).square().mean()
        return (self.first(x) * self.second(x)).mean() + self.first(self.second(x)).mean()


def two_modules_in_one_graph():
    """Gradients of two wrapped modules, one after the other and side by side."""
    results = []
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for in_a_row in (True, False):
        sharded, alone = TwoModules(FSDP, in_a_row), TwoModules(lambda module: module, in_a_row)
        for _ in range(2):
            sharded.zero_grad()
            alone.zero_grad()
            sharded(share(inputs)).backward()
            for part in (sharded.first, sharded.second):
                part.finish_gradient_synchronization()
            alone(inputs).backward()
        for part, plain in ((sharded.first, alone.first), (sharded.second, alone.second)):
            results.append((whole_gradients(part), gradients_alone(plain)))
    return results


def gradients_kept_and_dropped():
    """By who drops them: gradients of a pass after one under no_sync, and those of one process."""
    results = {}
    for how in ("wrapper", "module", "optimizer", "zeros", "nobody"):
        sharded, alone = FSDP(Model()), Model()
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        with sharded.no_sync():
            loss_of(sharded, *map(share, batch(0))).backward()
        match how:
            case "wrapper":
                sharded.zero_grad()
            case "module":
                sharded.module.zero_grad()
            case "optimizer":
                optimizer.zero_grad()
            case "zeros":
                sharded.zero_grad(set_to_none=False)
            case "nobody":
                loss_of(alone, *batch(0)).backward()
        loss_of(sharded, *map(share, batch(1))).backward()
        sharded.finish_gradient_synchronization()
        loss_of(alone, *batch(1)).backward()
        results[how] = whole_gradients(sharded), gradients_alone(alone)
    return results


def layers_called_alone(keep_gathered):
    """What layers compute after a forward pass and a change of slices; and gradients through them and that pass."""
    sharded, alone = FSDP(Model(), keep_gathered=keep_gathered), Model()
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    results = []
    for how in ("data", "in place"):
        for model in (sharded, alone):
            loss_of(model, *batch(0))
            with torch.no_grad():
                for parameter in model.parameters():
                    (parameter.data if how == "data" else parameter).mul_(1.1)
        with torch.no_grad():
            computed = [(one.blocks[0](x), one.blocks[2](x), one.head(x)) for one in (sharded.module, alone)]
        results += [(found, expected) for found, expected in zip(*computed, strict=True)]
    for model, plain in ((sharded, sharded.module), (alone, alone)):
        (loss_of(model, *batch(1)) + plain.blocks[2](x).square().sum()).backward()
    sharded.finish_gradient_synchronization()
    return results, whole_gradients(sharded), gradients_alone(alone)


def refreshed_after_dropping():
    """By who has dropped gradients of a pass under no_sync: the error of refresh(), and the gradients afterwards."""
    results = {}
    for how in ("none", "zeros", "on one rank", "nobody"):
        sharded, alone = FSDP(Model()), Model()
        with sharded.no_sync():
            loss_of(sharded, *map(share, batch(0))).backward()
        if how in ("none", "zeros") or (how == "on one rank" and dist.get_rank() == 0):
            sharded.zero_grad(set_to_none=how != "zeros")
        error = error_of(sharded.refresh)
        if error is None:
            loss_of(sharded, *map(share, batch(1))).backward()
            sharded.finish_gradient_synchronization()
            loss_of(alone, *batch(1)).backward()
            results[how] = error, whole_gradients(sharded), gradients_alone(alone)
        else:
            results[how] = error, {}, {}
    return results


def gradients_dropped_between():
    """Gradients where they were set to None between a forward and a backward pass, with those of a step before."""
    results = []
    for drop in (lambda model: model.zero_grad(), lambda model: getattr(model, "module", model).zero_grad()):
        sharded, alone = FSDP(Model(), keep_gathered=1), Model()
        for model in (sharded, alone):
            for step in range(2):
                tokens, targets = batch(step)
                loss = loss_of(model, *((share(tokens), share(targets)) if model is sharded else (tokens, targets)))
                drop(model)
                loss.backward()
                if model is sharded:
                    model.finish_gradient_synchronization()
        results.append((whole_gradients(sharded), gradients_alone(alone)))
    return results


class WithSpare(Model):
    uses_spare = True

    def add_parts(self):
        self.spare = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.body(tokens)
        return self.head(x) + (self.spare(x) if self.uses_spare else 0)


def discarded_pass():
    """The gradient of a layer that only a discarded pass used; of a discriminator that is frozen meanwhile."""
    sharded = FSDP(WithSpare())
    loss_of(sharded, *map(share, batch(0))).backward()
    sharded.zero_grad()
    sharded.module.uses_spare = False
    loss_of(sharded, *map(share, batch(1))).backward()
    sharded.finish_gradient_synchronization()
    generator, discriminator = FSDP(nn.Linear(3, 4)), FSDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    trained = []
    for _ in range(2):
        made = generator(torch.ones(2, 3))
        discriminator.requires_grad_(True)
        discriminator(made.detach()).sum().backward()
        discriminator.finish_gradient_synchronization()
        trained.append([parameter.grad is not None for parameter in discriminator.parameters()])
        discriminator.zero_grad()
        discriminator.requires_grad_(False)
        discriminator(made).sum().backward()
        for part in (generator, discriminator):
            part.finish_gradient_synchronization()
        trained.append([parameter.grad is not None for parameter in discriminator.parameters()])
    return sharded.module.spare.weight.grad, trained


def second_loss_after_a_failed_backward_pass():
    """What modules hold after the failure, and gradients of the other loss."""
    shapes, found = [], []
    sharded, alone = FSDP(Model()), Model()
    before = {name: id(parameter) for name, parameter in sharded.named_parameters()}
    for model, root in ((sharded, sharded.module), (alone, alone)):
        tokens, targets = batch(0)
        inputs = (share(tokens), share(targets)) if model is sharded else (tokens, targets)
        good = loss_of(model, *inputs)
        handle = root.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
        bad = loss_of(model, *inputs)
        with contextlib.suppress(ZeroDivisionError):
            bad.backward()
        shapes.append(before == {name: id(parameter) for name, parameter in sharded.named_parameters()})
        handle.remove()
        model.zero_grad()
        good.backward()
        if model is sharded:
            model.finish_gradient_synchronization()
        found.append(whole_gradients(sharded) if model is sharded else gradients_alone(alone))
    return shapes, found


def buffers_of_all_kinds():
    """Values on this rank of buffers that had the rank's number, by dtype; the error of a sparse one."""
    values = {}
    dtypes = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.bfloat16)
    for dtype in dtypes:
        module = nn.Linear(2, 2)
        module.register_buffer("numbers", torch.full((3, 2), 1 + dist.get_rank()).to(dtype))
        module.register_buffer("columns", torch.full((2, 3), 1 + dist.get_rank()).to(dtype).t()[:, :1])
        module.register_buffer("number", torch.tensor(1 + dist.get_rank()).to(dtype))
        FSDP(module)
        values[str(dtype)] = [
            value for buffer in module.buffers() for value in buffer.to(torch.complex64).view(-1).tolist()
        ]
    module = nn.Linear(2, 2)
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    return values, error_of(FSDP, module)
