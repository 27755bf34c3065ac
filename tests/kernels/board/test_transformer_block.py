"""A block that chooses what to keep computes what the plain one computes, and keeps what the accounting says."""

import copy

import pytest
import torch
from cs336_basics.model import BasicsTransformerLM
from torch import nn

from cs336sys.accounting.sharding.selective_checkpointing import kept_block_bytes
from cs336sys.accounting.sharding.step import ShardedStep
from cs336sys.board.transformer_block import BlockSettings, choose_kept, transformer_block
from cs336sys.errors import UsageError
from cs336sys.kernels.fuse import fuse
from cs336sys.settings.sizes import ModelSize

SIZE = ModelSize("odd", d_model=24, d_ff=40, num_layers=2, num_heads=2, vocab_size=23, context=5, batch_size=2)


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    with device:
        model = BasicsTransformerLM(23, context_length=5, d_model=24, num_layers=2, num_heads=2, d_ff=40)
    for layer in model.layers:
        # Gains of one would hide a forgotten one.
        nn.init.uniform_(layer.ln1.weight, 0.5, 1.5)
        nn.init.uniform_(layer.ln2.weight, 0.5, 1.5)
    return model


def trained(model):
    """The output, all gradients by name, that of the blocks' input, and the bytes that the blocks keep."""
    kept = {}

    def keep(tensor):
        # A weight is kept as a part of the model; views of one tensor are one.
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    torch.manual_seed(1)
    device = next(model.parameters()).device
    x = torch.randn(2, 5, 24, device=device, requires_grad=True)
    y = x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in model.layers:
            y = layer(y)
    (y * torch.linspace(-1, 1, y.numel(), device=device).view_as(y)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return y, gradients | {"x": x.grad}, sum(kept.values())


def test_whatever_is_kept_results_are_the_same(model):
    expected, expected_gradients, _ = trained(copy.deepcopy(model))
    first = None
    for blocks in (0, 1, 2):
        chosen = copy.deepcopy(model)
        fuse(chosen)
        choose_kept(chosen, blocks)
        output, gradients, kept_bytes = trained(chosen)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)
        step = ShardedStep("fsdp", SIZE, 1, "fp32", "flash", f"keep={blocks}")
        blocks_bytes = [kept_block_bytes(step, gate_and_up=block >= 2 - blocks) for block in range(2)]
        assert kept_bytes == sum(blocks_bytes)
        first = first or (output, gradients)
        torch.testing.assert_close((output, gradients), first, rtol=0, atol=0)


def test_saved_tensors_are_freed_in_the_backward_pass_while_the_loss_lives(model):
    fuse(model)
    choose_kept(model, 2)
    y = torch.randn(2, 5, 24, device=next(model.parameters()).device, requires_grad=True)
    y = model.layers[0](y)
    node = y.grad_fn
    y.sum().backward(retain_graph=True)
    parameters = list(model.layers[0].parameters())
    doubled = [2 * parameter.grad for parameter in parameters]
    assert node.attention is not None
    y.sum().backward()
    assert node.attention is None
    torch.testing.assert_close([parameter.grad for parameter in parameters], doubled, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_frozen_weights_and_no_gradients(model):
    fuse(model)
    choose_kept(model, 1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("w3" in name or "k_proj" in name)
    _, gradients, _ = trained(model)
    assert {name.split(".", 2)[-1] for name in gradients} == {"ffn.w3.weight", "attn.k_proj.weight", "x"}
    with torch.no_grad():
        assert not model.layers[0](torch.ones(1, 11, 24, device=next(model.parameters()).device)).requires_grad


def test_refusals(model):
    with pytest.raises(UsageError, match="call fuse"):
        choose_kept(model, 1)
    handle = fuse(model)
    with pytest.raises(UsageError, match="3 blocks to keep gate and up in: the model has 2"):
        choose_kept(model, 3)
    choose_kept(model, 2)
    x = torch.ones(1, 4, 24, device=next(model.parameters()).device)
    with torch.autocast(x.device.type, torch.bfloat16), pytest.raises(UsageError, match="switch autocast off"):
        model.layers[0](x)
    weights = tuple(parameter.to(torch.bfloat16) for parameter in model.layers[0].parameters())
    with pytest.raises(TypeError, match="computes in one dtype"):
        transformer_block(x, weights, BlockSettings(2))
    handle.undo()
    assert "forward" not in model.layers[0].__dict__
