"""Modules of any model are recognized by their outputs, and train with fused kernels as without."""

import copy
from types import SimpleNamespace

import cs336_basics.model
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from cs336sys.errors import UsageError
from cs336sys.kernels.adamw import AdamW
from cs336sys.kernels.fuse import fuse
from cs336sys.kernels.recognition import Gate, find_head, gate_layers, is_linear, norm_epsilon

WIDTH, INNER, VOCABULARY = 16, 24, 23


class Norm(nn.Module):
    """As in Llama of transformers."""

    def __init__(self, width=WIDTH, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class Gated(Norm):
    """As in Mamba2: the gate is optional."""

    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))


class Counting(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


class Computing(Norm):
    """``function`` of (module, input)."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def _over_the_second_dimension(norm, x):
    return norm.weight * x * torch.rsqrt(x.square().mean(min(1, x.dim() - 1), keepdim=True) + 1e-5)


def _detached_mean(norm, x):
    return norm.weight * x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-5)


def _clamped_in_bf16(norm, x):
    y = Norm.forward(norm, x)
    return y.clamp(-1, 1) if y.dtype == torch.bfloat16 else y


class FeedForward(nn.Module):
    def __init__(self, activation=F.silu, bias=False, dropout=0.0):
        super().__init__()
        self.down_proj = nn.Linear(INNER, WIDTH, bias)
        self.up_proj = nn.Linear(WIDTH, INNER, bias)
        self.gate_proj = nn.Linear(WIDTH, INNER, bias)
        self.activation, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, hidden):
        return self.dropout(self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden)))


def _hooked_gate():
    layers = FeedForward()
    layers.up_proj.register_forward_hook(lambda *_: None)
    return layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.mlp_norm, self.mlp = Norm(), nn.RMSNorm(WIDTH, eps=1e-6), FeedForward()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.mix(self.input_norm(x)).cumsum(1)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A language model without any name of cs336_basics'."""

    def __init__(self, tied=False, output=lambda logits: SimpleNamespace(logits=logits)):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.unembed = Norm(eps=1e-4), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight
        self.output = output

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.unembed(self.norm(hidden)))


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    with device:
        return Model()


@pytest.mark.parametrize(
    ("norm", "eps"),
    [
        (Norm(), 1e-5),
        (nn.RMSNorm(WIDTH, eps=1e-6), 1e-6),
        (Computing(lambda norm, x: Norm.forward(norm, x) / norm.weight * (1 + norm.weight)), None),  # as in Gemma
        (Computing(lambda norm, x: norm.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5)), None),
        (Computing(lambda norm, x: Norm.forward(norm, x - x.mean(-1, keepdim=True))), None),
        (Gated(), None),
        (Counting(), None),
        (Computing(_detached_mean), None),
        (Computing(_over_the_second_dimension), None),
        (Computing(Norm.forward), 1e-5),
        (Computing(lambda norm, x: Norm.forward(norm, x).float()), None),
        (Computing(lambda norm, x: Norm.forward(norm, x.float())), None),
        (Computing(lambda norm, x: Norm.forward(norm, x.data.mul_(2))), None),
        (Computing(lambda norm, x: Norm.forward(norm, x) * (1 if norm.training else 2)), None),
        (Computing(_clamped_in_bf16), None),
        (nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False), None),
        (nn.RMSNorm(WIDTH), None),
        (nn.LayerNorm(WIDTH, bias=False), None),
        (nn.Linear(WIDTH, 1, bias=False), None),
    ],
)
def test_rms_norms_are_recognized(norm, eps):
    assert norm_epsilon(norm) == eps


def test_replaced_modules_take_their_input_by_name_and_keep_their_dtype(device):
    model = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), FeedForward()).to(device)
    x = torch.randn(2, 3, WIDTH, device=device)
    expected, mixed = model(x), model[0](x.bfloat16())
    fuse(model)
    torch.testing.assert_close(model[1](hidden=model[0](input=x)), expected)
    assert torch.equal(model[0](x.bfloat16()), mixed)


def test_layers_compute_with_their_weights_where_a_model_switches_autocast_off(model, device):
    tokens, _ = batches(1, device)[0]
    x = model.embed(tokens).detach()
    expected = model.blocks[0].mix(x), model.blocks[0].mlp(x)
    fuse(model).keep_copies(torch.bfloat16)
    found = model.blocks[0].mix(x), model.blocks[0].mlp(x)
    torch.testing.assert_close(found, expected)


def test_norm_with_another_epsilon_than_its_attribute_is_rejected():
    norm = nn.RMSNorm(WIDTH, eps=1e-6)
    norm.eps, norm.epsilon = 1e-6, 1e-3
    assert norm_epsilon(norm) == 1e-6
    norm.forward = lambda x: F.rms_norm(x, (WIDTH,), norm.weight, 1e-5)
    assert norm_epsilon(norm) is None


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (FeedForward(), Gate("gate_proj", "up_proj", "down_proj")),
        (FeedForward(dropout=0.5), None),
        (FeedForward(dropout=0.5).eval(), None),
        (FeedForward(lambda x: F.silu(x.clamp(max=7.0))), None),
        (FeedForward(F.gelu), None),
        (FeedForward(bias=True), None),
        (_hooked_gate(), None),
        (Block(), None),
    ],
)
def test_swiglus_are_recognized(layers, found):
    state, modes = torch.get_rng_state(), [part.training for part in layers.modules()]
    assert gate_layers(layers) == found
    assert [part.training for part in layers.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("place", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_modules_are_recognized_without_values(place):
    with place:
        assert norm_epsilon(Norm()) == 1e-5
        assert gate_layers(FeedForward()) is not None


def _double_by_a_hook():
    model = Model()
    model.unembed.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(3, 3, bias=False)),
        lambda: nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)),
        _double_by_a_hook,
    ],
    ids=["not of tokens", "bias", "hook"],
)
def test_head_is_left_alone_if_it_computes_something_else(build):
    assert find_head(build()) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda logits, training: 2 * logits if training else logits,
        lambda logits, training: logits if training else 2 * logits,
        lambda logits, training: cap(logits, 15 if training else 30),
    ],
    ids=["train", "eval", "cap"],
)
@pytest.mark.parametrize("mode", [True, False])
def test_head_is_left_alone_if_its_output_depends_on_the_mode(change, mode):
    model = Model().train(mode)
    model.output = lambda logits: change(logits, model.training)
    assert find_head(model) is None
    assert model.training == mode


def cap(logits, softcap=15):
    return softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize(
    ("output", "softcap"),
    [
        (cap, 15),
        (lambda logits: cap(logits[..., :VOCABULARY].float()), 15),
        (lambda logits: SimpleNamespace(logits=torch.tanh(logits * 2) * 0.5), 0.5),
        (lambda logits: logits.div_(50.3).tanh_().mul(50.3), pytest.approx(50.3)),
        (lambda logits: logits.tanh(), 1),
        (lambda logits: logits, None),
        (lambda logits: SimpleNamespace(logits=logits), None),
    ],
    ids=["gemma", "nanochat", "half", "in place", "one", "tensor", "object"],
)
@pytest.mark.parametrize("place", ["cpu", "meta", "fake"])
def test_head_and_its_cap_are_recognized(output, softcap, place):
    with FakeTensorMode() if place == "fake" else torch.device(place):
        model = Model(output=output)
        head = find_head(model)
    assert head is not None
    assert head.softcap == softcap
    assert all("forward" not in part.__dict__ for part in model.modules())


@pytest.mark.parametrize(
    "output",
    [
        lambda logits: 2 * cap(logits),
        lambda logits: cap(logits) + 0.01 * logits,
        lambda logits: cap(logits + 1),
        lambda logits: 30 * torch.sigmoid(logits / 7.5),
        lambda logits: 15 * (2 * torch.sigmoid(logits / 7.5) - 1),
        lambda logits: logits.clamp(-15, 15),
        lambda logits: 0.5 * logits,
        lambda logits: logits[:, -1],
        lambda logits: (logits,),
        lambda logits: cap(logits.detach()),
        lambda logits: cap(logits.bfloat16()).float(),
        lambda logits: cap(logits[..., : VOCABULARY - 1]),
        lambda logits: cap(logits.view(-1, 2, VOCABULARY)),
        lambda logits: (logits.exp(), cap(logits))[1],
        lambda logits: (lambda capped: (capped.exp(), capped)[1])(cap(logits)),
        lambda logits: 15 * (logits / 15).tanh_().exp().log(),
        lambda logits: logits.mul_(0.25),

        lambda logits: logits.masked_fill_(logits > 0, -1.0),
        lambda logits: (logits.detach().mul_(2), logits)[1],
        lambda logits: (logits.data.mul_(2), logits)[1],
        lambda logits: (torch._foreach_mul_([logits], 2), logits)[1],
        lambda logits: (logits.exp(), logits)[1],
    ],
    ids=["twice", "leaky", "shifted", "sigmoid", "by sigmoid", "clamp", "scaled", "last alone", "tuple", "detached",
         "rounded", "cut", "shape", "read", "read after", "negative", "mul_", "masked_fill_", "detach", "data",
         "foreach", "read alone"],
)  # fmt: skip
def test_head_is_left_alone_if_its_output_is_read_changed_in_place_or_capped_otherwise(output):
    assert find_head(Model(output=output)) is None


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_capped_model_has_the_losses_and_gradients_of_the_plain_one(softcap, reduction, device):
    torch.manual_seed(0)
    with device:
        model = Model(output=lambda logits: cap(logits, softcap) if softcap else logits)
    plain = copy.deepcopy(model)
    handle = fuse(model)
    assert handle.recognized["linear-cross-entropy"] == 1
    ((tokens, targets),) = batches(1, device)
    expected = F.cross_entropy(plain(tokens).mT, targets, reduction=reduction)
    loss = handle.loss(model, tokens, targets, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    grads, expected = ([parameter.grad for parameter in module.parameters()] for module in (model, plain))
    torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-5)
    if softcap is not None:
        with pytest.raises(UsageError, match=f"softcap 3.0: the model caps its logits at {softcap} itself; leave it"):
            handle.loss(model, tokens, targets, softcap=3.0)


def test_capped_model_is_compiled_and_keeps_copies(device):
    torch.manual_seed(0)
    with device:
        model = Model(output=cap)
    plain = copy.deepcopy(model)
    handle = fuse(model)
    ((tokens, targets),) = batches(1, device)
    expected = F.cross_entropy(plain(tokens).mT, targets)
    loss = handle.loss(torch.compile(model, backend="aot_eager", fullgraph=True), tokens, targets)
    torch.testing.assert_close(loss, expected)
    handle.keep_copies(torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(handle.loss(model, tokens, targets), expected, rtol=1e-2, atol=1e-2)


def batches(steps, device):
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (steps, 2, 9), device=device)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]


def train(model, loss, device, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens, targets in batches(3, device):
        optimizer.zero_grad()
        value = loss(tokens, targets)
        value.backward()
        optimizer.step()
        yield value.item()


def plain_loss(model):
    return lambda tokens, targets: F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("only", [None, ["rms-norm"], ["swiglu"], ["linear-cross-entropy"], ["rms-norm", "swiglu"]])
def test_fused_model_trains_like_the_plain_one(model, only, device, called):
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    handle = fuse(model, only=only)
    counts = {"rms-norm": 5, "swiglu": 2, "linear-cross-entropy": 1}
    assert handle.recognized == {name: times for name, times in counts.items() if only is None or name in only}
    loss = (lambda *batch: handle.loss(model, *batch)) if handle.computes_loss else plain_loss(model)
    assert list(train(model, loss, device)) == pytest.approx(list(train(plain, plain_loss(plain), device)), abs=1e-5)
    assert {name.replace("_", "-") for name in called} == set(handle.recognized)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-5)
    handle.undo()
    tokens, _ = batches(1, device)[0]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_every_layer_reads_its_copy(tied, device):
    torch.manual_seed(0)
    with device:
        model = Model(tied=tied)
    plain = copy.deepcopy(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    handle = fuse(model)
    handle.keep_copies(torch.bfloat16, optimizer)
    with_copies = {id(weight) for weight, _ in handle.copies}
    matrices = {name for name, parameter in model.named_parameters() if id(parameter) in with_copies}
    of_block = ("mix", "mlp.down_proj", "mlp.up_proj", "mlp.gate_proj")
    layers = {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in of_block}
    assert matrices == layers | (set() if tied else {"unembed.weight"})

    def in_bf16(loss):
        def run(tokens, targets):
            with torch.autocast(device.type, torch.bfloat16):
                return loss(tokens, targets)

        return run

    losses = list(train(model, in_bf16(lambda *batch: handle.loss(model, *batch)), device, optimizer))
    expected = train(plain, in_bf16(plain_loss(plain)), device, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    assert losses == pytest.approx(list(expected), rel=5e-3)
    # Nothing reads the weights themselves any more.
    tokens, targets = batches(1, device)[0]
    with torch.no_grad():
        before = in_bf16(lambda *batch: handle.loss(model, *batch))(tokens, targets)
        for name, parameter in model.named_parameters():
            if name in matrices:
                parameter.data = torch.full_like(parameter, torch.nan)
        assert torch.equal(in_bf16(lambda *batch: handle.loss(model, *batch))(tokens, targets), before)


def test_shared_weights_have_no_copies(device):
    with device:
        model = Model()
    model.blocks[1].mlp.up_proj.weight = model.blocks[0].mlp.up_proj.weight
    handle = fuse(model)
    handle.keep_copies(torch.bfloat16)
    copied = [weight for weight, _ in handle.copies]
    assert handle.recognized == {"rms-norm": 5, "linear-cross-entropy": 1}
    assert len({id(weight) for weight in copied}) == len(copied)
    assert all(weight is not model.blocks[0].mlp.up_proj.weight for weight in copied)


def test_compiled_layers_read_their_copies(model, device):
    handle = fuse(model)
    handle.keep_copies(torch.bfloat16)
    tokens, _ = batches(1, device)[0]
    block, x = model.blocks[0], model.embed(tokens).detach()
    block.mix.weight.data = torch.full_like(block.mix.weight, torch.nan)
    with torch.autocast(device.type, torch.bfloat16):
        assert not torch.compile(block.mix, backend="eager", fullgraph=True)(x).isnan().any()


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class CutLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-100, 100)


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (nn.Linear(WIDTH, 3, bias=False), True),
        (cs336_basics.model.Linear(WIDTH, 3), True),
        (nn.Linear(WIDTH, 3), False),
        (ScaledLinear(WIDTH, 3, bias=False), False),
        (CutLinear(WIDTH, 3, bias=False), False),
        (nn.Embedding(3, WIDTH), False),
        (nn.Bilinear(2, 2, 2, bias=False), False),
    ],
)
def test_linear_layers_are_recognized(layer, found):
    assert is_linear(layer) == found


def test_missing_modules_and_fusing_twice_are_refused(model):
    with pytest.raises(UsageError, match="Model has no module that rope can replace: in a model without"):
        fuse(model, only=["rope", "swiglu"])
    with pytest.raises(UsageError, match="Sequential has no module that rms-norm, rope, swiglu, linear"):
        fuse(nn.Sequential(nn.Linear(3, 3, bias=False)))
    assert all("forward" not in part.__dict__ for part in model.modules())
    fuse(model)
    with pytest.raises(UsageError, match="Model is fused already"):
        fuse(model)
