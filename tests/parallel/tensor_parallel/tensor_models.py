"""Models and steps that tests of tensor parallel training share."""

import torch
from cs336_basics.model import BasicsTransformerLM

from cs336sys.parallel.tensor_parallel import TensorParallel

# Neither inner features nor tokens divide by 2 or 4.
SIZES = {"vocab_size": 19, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 23}


def model(seed=0, tied=False, repeated=None, **sizes):
    """With a part of the first block in the second, too, if ``repeated`` names it; "" is the whole block."""
    torch.manual_seed(seed)
    plain = BasicsTransformerLM(**SIZES | sizes)
    if tied:
        plain.lm_head.weight = plain.token_embeddings.weight
    if repeated is not None:
        plain.set_submodule(f"layers.1.{repeated}".rstrip("."), plain.layers[0].get_submodule(repeated))
    for norm in (plain.ln_final, *(layer.ln1 for layer in plain.layers), *(layer.ln2 for layer in plain.layers)):
        # Else a norm whose weight were left out would be as good.
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return plain


def batch(seed=0, batch_size=4, length=8):
    seeded = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SIZES["vocab_size"], (batch_size, length + 1), generator=seeded)
    return tokens[:, :-1], tokens[:, 1:]


def shared_model(**settings):
    return TensorParallel(model(), **settings)


def run_pass(shared, seed=0, wrapped=None, share=slice(None)):
    inputs, targets = batch(seed)
    loss = shared.loss((wrapped or shared)(inputs[share]), targets[share])
    loss.backward()
    return loss.item()


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}


def whole_gradients(shared):
    """Of the layers that ranks share, put together."""
    return shared.full_state_dict(gradients_of(shared.module))


def assert_close(gradients, expected, tolerance=1e-5):
    """Norms of differences are small beside those of gradients."""
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm(), name
