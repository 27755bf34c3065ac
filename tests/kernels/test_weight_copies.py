"""Copies of weights: what is computed with them, what their weights get, and that they are never stale."""

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM
from torch.nn.functional import linear

from cs336sys.errors import UsageError
from cs336sys.kernels.adamw import AdamW
from cs336sys.kernels.fuse import fuse
from cs336sys.kernels.linear import WeightCopies, linear_of_copy
from cs336sys.kernels.swiglu import reference_swiglu, swiglu_linear_of_copy

TOKENS = torch.arange(6)[None]


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    with device:
        return BasicsTransformerLM(17, context_length=6, d_model=8, num_layers=1, num_heads=2, d_ff=16)


def loss_of(handle, model):
    device = model.lm_head.weight.device
    with torch.autocast(device.type, torch.bfloat16):
        return handle.loss(model, TOKENS.to(device), TOKENS.to(device) + 1)


def stale(copies):
    return [number for number, (_, off) in enumerate(copies.differences()) if off.any()]


def test_products_of_copies(device):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(rows, 8, device=device, requires_grad=True) for rows in (16, 16)]
    down = torch.randn(4, 16, device=device, requires_grad=True)
    copy = torch.cat([weight.detach() for weight in weights]).bfloat16()
    gate_up = linear_of_copy(x, copy, *weights)
    assert gate_up.dtype == torch.bfloat16
    swiglu_linear_of_copy(gate_up, down.detach().bfloat16(), down).float().square().sum().backward()

    wide = x.detach().double().requires_grad_()
    parts = [weight.detach().bfloat16().double().requires_grad_() for weight in (*weights, down)]
    product = reference_swiglu(linear(wide, parts[0]), linear(wide, parts[1]))
    linear(product, parts[2]).square().sum().backward()
    for name, found, expected in zip(["x", "gate", "up", "down"], (x, *weights, down), (wide, *parts), strict=True):
        assert found.grad.dtype == found.dtype
        norm = torch.linalg.vector_norm
        assert norm(found.grad.double() - expected.grad) < 0.02 * norm(expected.grad), name


def test_a_step_writes_the_copies_that_the_next_reads(model):
    handle = fuse(model)
    optimizer = AdamW(model.parameters(), lr=0.1)
    tokens = TOKENS.to(model.lm_head.weight.device)
    in_float32 = model(tokens)
    with pytest.raises(UsageError, match=r"in torch.int32: choose from torch.float32, torch.float16"):
        handle.keep_copies(torch.int32)
    handle.keep_copies(torch.bfloat16, optimizer)
    assert torch.equal(model(tokens), in_float32), "without autocast nothing reads copies"
    before = loss_of(handle, model)
    before.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    optimizer.step()
    assert stale(handle.copies) == []
    after = loss_of(handle, model)
    assert after < before - 0.1

    with torch.no_grad():
        model.layers[0].ffn.w1.weight.add_(1)
        model.lm_head.weight.add_(1)
    assert stale(handle.copies) == [4, 7]
    assert loss_of(handle, model) != after
    assert stale(handle.copies) == []
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert stale(handle.copies) == []


def test_a_stale_copy_is_seen():
    weight = torch.randn(4, 3)
    copy = torch.empty(4, 3, dtype=torch.bfloat16)
    copies = WeightCopies(are_separate=True)
    copies.add([weight], copy)
    copies.refresh()
    weight.data[2, 1] *= 1.1  # unseen by PyTorch, as what a kernel writes
    copies.refresh_changed()
    ((_, off),) = copies.differences()
    assert off.nonzero().tolist() == [[2, 1]]


def test_split_weights_are_what_is_computed_with(model):
    handle = fuse(model)
    handle.stack_weights(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=0.1, state_dtype="split")
    keys = list(model.state_dict())
    loss_of(handle, model).backward()
    weight = model.layers[0].attn.k_proj.weight
    assert weight.grad.dtype == torch.bfloat16
    optimizer.step()
    exact = optimizer.float32_weight(weight)
    assert exact.dtype == torch.float32
    assert torch.equal(exact.bfloat16(), weight)
    assert not torch.equal(exact, weight.float())
    assert torch.equal(model.layers[0].attn.qkv_copy[8:16], weight)
    assert list(model.state_dict()) == keys
    norm = model.ln_final.weight
    assert optimizer.float32_weight(norm).data_ptr() == norm.data_ptr()
