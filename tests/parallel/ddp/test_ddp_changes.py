"""What differs between ranks or changes after wrapping is refused until refresh(), which takes it up."""

import pytest
import torch
import torch.distributed as dist
from ddp_modes import finish
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, refusal_of, weights
from torch import nn

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from cs336sys.parallel.gradient_slices import mark_slice


class Adaptable(nn.Module):
    """Has a tied bias, a frozen bias and places for adapters."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.bias = self.second.bias
        self.last = nn.Linear(6, 5)
        self.last.bias.requires_grad_(False)
        self.adapters = nn.ModuleList()
        self.double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for adapter in self.adapters:
            x = x + adapter(x)
        return self.last(torch.tanh(self.third(torch.tanh(self.second(x)))))


def add(model):
    model.adapters.append(nn.Linear(6, 6).double())
    model.adapters.append(nn.Linear(6, 6).double().requires_grad_(False))
    model.register_buffer("added", torch.rand(3))


def assign(model):
    state = {"weight": torch.randn(6, 6).double(), "bias": torch.randn(6).double()}
    model.second.load_state_dict(state, assign=True)


# Further changes are those of HeldParameters, and of random programs, which train after them.
REFUSALS = {
    add: "adapters.0.weight was added",
    assign: "second.weight was replaced (as load_state_dict() with assign=True does)",
}


@on_ranks(2)
@pytest.mark.parametrize("change", REFUSALS)
def test_changed_module_is_refused_until_refresh_makes_it_that_of_the_first_rank(change):
    wrapped, x = NaiveDDP(Adaptable(0)), torch.ones(2, 7).double()
    torch.manual_seed(dist.get_rank())
    change(wrapped.module)
    refusal = ("UsageError", f"{REFUSALS[change]} after it was wrapped: call refresh() on every rank")
    assert error_of(wrapped, x) == error_of(finish, wrapped) == refusal
    with torch.no_grad():
        # Without gradients, functional_call() may have given the module other values.
        assert error_of(wrapped, x) == (None if change == assign else refusal)
    wrapped.refresh()
    assert error_of(wrapped, x) is None
    # Buffers and frozen parameters that were added, too.
    assert_same(weights(wrapped.module), gather_objects(weights(wrapped.module))[0])


@on_ranks(2)
def test_refresh_is_refused_on_every_rank_if_they_changed_differently():
    for change, new in ((add, "adapters.0.weight, adapters.0.bias"), (assign, "second.weight, second.bias")):
        wrapped = NaiveDDP(Adaptable(0))
        if dist.get_rank() == 1:
            change(wrapped.module)
        message = refusal_of(wrapped.refresh)
        assert message.startswith(f"ranks differ in what they train: new: nothing on rank 0, new: {new}")
    wrapped = NaiveDDP(Adaptable(0))
    wrapped.head = nn.Linear(2, 2)
    refusal = ("UsageError", "head.weight was added to the wrapper: add it to the module in it")
    assert error_of(wrapped.refresh) == refusal


@on_ranks(2)
def test_refresh_refuses_an_added_layer_whose_gradients_are_averaged_already():
    other = OverlappedDDP(nn.Linear(6, 6))
    for layer, sentence in ((other, "is wrapped already"), (other.module, "has its gradient averaged already")):
        wrapped = NaiveDDP(Adaptable(0))
        wrapped.module.adapters.append(layer)
        assert sentence in refusal_of(wrapped.refresh)


@on_ranks(2)
def test_parameters_that_ranks_do_not_have_in_common_are_refused():
    for ranks in (None, range(dist.get_world_size()), [dist.get_rank()]):
        module = nn.Linear(2, 2)
        mark_slice(module.weight, ranks)
        refusal = (
            "UsageError",
            "weight is a slice, and other ranks hold other slices of it: wrap a module whose parameters are whole, or "
            "give a group of ranks that hold the same slice",
        )
        assert error_of(NaiveDDP, module) == (None if ranks == [dist.get_rank()] else refusal)
    assert error_of(NaiveDDP, nn.Sequential(nn.Embedding(3, 2, max_norm=1.0))) == (
        "UsageError",
        "0 (Embedding) has max_norm=1.0, by which each rank would shorten other rows in its forward pass: choose "
        "max_norm=None, and shorten rows after each step",
    )


def two_layers(outputs=4):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, outputs))


# What rank 0 builds, what the last rank does, and the difference, of the lines in figures.txt.
DIFFERENCES = {
    "shape": (
        lambda: NaiveDDP(two_layers()),
        lambda: NaiveDDP(two_layers(outputs=5)),
        "parameter 1.weight float32 (4, 4) strides (4, 1) trained on rank 0, parameter 1.weight float32 (5, ",
    ),
    "mode": (
        lambda: NaiveDDP(two_layers()),
        lambda: OverlappedDDP(two_layers()),
        "NaiveDDP with cap_bytes=0.0, gradient_dtype=None on rank 0, OverlappedDDP with",
    ),
    "cap and gradient_dtype": (
        lambda: BucketedDDP(two_layers(), 1.0),
        lambda: BucketedDDP(two_layers(), 2.0, gradient_dtype=torch.bfloat16),
        "cap_bytes=1000000.0, gradient_dtype=None on rank 0, BucketedDDP with cap_bytes=2000000.0, gradient_dtype=t",
    ),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_layout_that_differs_on_the_last_rank_is_named_on_every_rank(name):
    first, last, difference = DIFFERENCES[name]
    last_rank = dist.get_world_size() - 1
    message = refusal_of(last if dist.get_rank() == last_rank else first)
    assert message.startswith("ranks differ in what they train: ")
    assert difference in message
    assert message.endswith(f" on rank {last_rank}")


@on_ranks(1)
def test_wrong_arguments_are_refused():
    for size in (0, -1.0, float("nan")):
        message = f"bucket size {size}: choose megabytes, 'block', or None for one bucket"
        assert error_of(BucketedDDP, nn.Linear(2, 2), size) == ("UsageError", message)
    floats = "torch.float64, torch.float32, torch.bfloat16 or torch.float16"
    for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn, "bf16"):
        error = error_of(NaiveDDP, nn.Linear(2, 2), gradient_dtype=dtype)
        assert error == ("UsageError", f"gradient_dtype {dtype}: choose {floats}")
