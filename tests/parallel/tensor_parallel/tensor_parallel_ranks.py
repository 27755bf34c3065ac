"""What the ranks of test_tensor_parallel run: functions that spawned processes can import."""

import contextlib

import torch
from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy

from cs336sys.errors import UsageError
from cs336sys.parallel.tensor_parallel import TensorParallel

# Neither inner features nor tokens divide by 2 or 4.
SIZES = {"vocab_size": 19, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_ff": 23}


def model(seed=0, tied=False, **sizes):
    torch.manual_seed(seed)
    plain = BasicsTransformerLM(**SIZES | sizes)
    if tied:
        plain.lm_head.weight = plain.token_embeddings.weight
    for norm in (plain.ln_final, *(layer.ln1 for layer in plain.layers), *(layer.ln2 for layer in plain.layers)):
        # Else a norm whose weight were left out would be as good.
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return plain


def batch(seed=0, batch_size=4, length=8):
    seeded = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SIZES["vocab_size"], (batch_size, length + 1), generator=seeded)
    return tokens[:, :-1], tokens[:, 1:]


def precision(half):
    return torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()


def alone(half=False, **settings):
    """Loss and gradients of one process."""
    plain = model(**settings)
    inputs, targets = batch()
    with precision(half):
        loss = cross_entropy(plain(inputs), targets)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}


def gradients(half=False, sequence_parallel=False, compiled=False, group=None, **settings):
    """Loss and whole gradients of ranks that share every layer."""
    shared = TensorParallel(model(**settings), group, sequence_parallel=sequence_parallel)
    if compiled:
        for block in shared.module.layers:
            block.compile(dynamic=False)
    inputs, targets = batch()
    with precision(half):
        loss = shared.loss(shared(inputs), targets, compiles=compiled)
    loss.backward()
    shared.finish_gradient_synchronization()
    parts = {name: parameter.grad for name, parameter in shared.module.named_parameters(remove_duplicate=False)}
    return loss.item(), shared.full_state_dict(parts)


def gradients_of_all(variants):
    """:func:`gradients` of each variant."""
    return {name: gradients(**settings) for name, settings in variants.items()}


def round_trip(sequence_parallel):
    """A whole state dict loaded, and what comes out again."""
    shared = TensorParallel(model(seed=1), sequence_parallel=sequence_parallel)
    shared.load_full_state_dict(model(seed=2).state_dict())
    return shared.full_state_dict()


def refusals():
    """What ranks are told about models that they cannot share."""
    told = {}
    models = {"heads": model(num_heads=1), "tokens": model(vocab_size=1), "a bias": model(), "no heads": model()}
    models["a bias"].layers[1].ffn.w2.bias = torch.nn.Parameter(torch.zeros(16))
    del models["no heads"].layers[0].attn.num_heads
    models["another model"] = torch.nn.Sequential(torch.nn.Linear(2, 2))
    models["no feed-forward network"] = model()
    models["no feed-forward network"].layers[0].ffn = torch.nn.Module()
    for name, plain in models.items():
        try:
            TensorParallel(plain)
        except UsageError as error:
            told[name] = str(error)
    shared = TensorParallel(model(), sequence_parallel=True)
    try:
        shared(batch(length=7)[0])
    except UsageError as error:
        told["sequence"] = str(error)
    try:
        shared.load_full_state_dict(model(d_ff=24).state_dict())
    except UsageError as error:
        told["state dict"] = str(error)
    return told
