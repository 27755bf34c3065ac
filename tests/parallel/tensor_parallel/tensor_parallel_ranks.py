"""What the ranks of test_tensor_parallel run: functions that spawned processes can import."""

import contextlib
import copy
import pickle

import torch
import torch.distributed as dist
from cs336_basics.model import (
    BasicsTransformerLM,
    CausalMultiHeadSelfAttention,
    SwiGLU,
    TransformerBlock,
    silu,
)
from cs336_basics.nn_utils import cross_entropy
from small_models import error_of
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from cs336sys.errors import UsageError
from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.tensor_parallel import COMPILE_OPTIONS, TensorParallel
from cs336sys.parallel.tensor_parallel.checkpoint import load_checkpoint, save_checkpoint

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


def gradients(half=False, sequence_parallel=False, compiled=False, group=None, seeds=(0,), **settings):
    """Loss and whole gradients of ranks that share every layer.

    Args:
        seeds: of the ranks' models, the first of which counts.
    """
    plain = model(seeds[dist.get_rank() % len(seeds)], **settings)
    shared = TensorParallel(plain, group, sequence_parallel=sequence_parallel)
    if compiled:
        for block in shared.module.layers:
            block.compile(dynamic=False, options=COMPILE_OPTIONS)
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


def _pass(shared, seed, wrapped=None, share=slice(None)):
    inputs, targets = batch(seed)
    shared.loss((wrapped or shared)(inputs[share]), targets[share]).backward()


def accumulations():
    """Whole gradients after two passes, by when they were completed and what happened in between."""

    def once(shared, finish):
        _pass(shared, 0)
        _pass(shared, 1)
        finish()

    def twice_each(shared, finish):
        for seed in (0, 1):
            _pass(shared, seed)
            finish()
            finish()

    def scaled_in_between(shared, finish):
        _pass(shared, 0)
        finish()
        for parameter in shared.parameters():
            parameter.grad *= 3
        _pass(shared, 1)
        finish()

    def dropped_pass(shared, finish, set_to_none=True):
        _pass(shared, 2)
        finish()
        _pass(shared, 3)
        shared.zero_grad(set_to_none)
        once(shared, finish)

    orders = {
        "once": once,
        "twice after each": twice_each,
        "scaled in between": scaled_in_between,
        "after a dropped pass": dropped_pass,
        "after a zeroed pass": lambda shared, finish: dropped_pass(shared, finish, set_to_none=False),
    }
    found = {}
    for name, order in orders.items():
        shared = TensorParallel(model(), sequence_parallel=True)
        order(shared, shared.finish_gradient_synchronization)
        found[name] = _whole_gradients(shared)
    return found


def accumulations_on_mesh():
    """Whole gradients after two passes on a mesh of 2 x 2, by the outer wrapper; both are told to finish twice."""
    found = {}
    for outer in ("ddp", "fsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        shared = TensorParallel(model(), mesh["tp"], sequence_parallel=True)
        wrap = {"ddp": lambda plain, group: BucketedDDP(plain, 0.001, group=group), "fsdp": FSDP}[outer]
        wrapped = wrap(shared.module, group=mesh["data"])
        first = 2 * mesh.get_local_rank("data")
        for seed in (0, 1):
            _pass(shared, seed, wrapped, slice(first, first + 2))
            for _ in range(2):
                wrapped.finish_gradient_synchronization()
                shared.finish_gradient_synchronization()
        norms = wrapped.replicated_parameters if outer == "fsdp" else dict(shared.module.named_parameters())
        found[outer] = {name: norms[name].grad for name in NORMS}
    return found


NORMS = ("ln_final.weight", "layers.0.ln1.weight", "layers.1.ln2.weight")


def accumulated_alone(factor=1):
    """Gradients of two passes of one process, those of the first times ``factor``."""
    plain = model()
    for seed, scale in ((0, factor), (1, 1)):
        inputs, targets = batch(seed)
        (cross_entropy(plain(inputs), targets) * scale).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def penalized_norms(wraps):
    """Gradients of norms with a penalty on their weights: of ranks that share sequences, or of one process."""
    plain = model()
    shared = TensorParallel(plain, sequence_parallel=True) if wraps else None
    inputs, targets = batch()
    penalty = sum(0.1 * plain.get_parameter(name).square().sum() for name in NORMS)
    if shared is None:
        (cross_entropy(plain(inputs), targets) + penalty).backward()
    else:
        (shared.loss(shared(inputs), targets) + penalty / shared.group.size()).backward()
        shared.finish_gradient_synchronization()
    return {name: plain.get_parameter(name).grad for name in NORMS}


def _whole_gradients(shared):
    return shared.full_state_dict({name: one.grad for name, one in shared.module.named_parameters()})


def round_trip(sequence_parallel):
    """A whole state dict loaded, and what comes out again."""
    shared = TensorParallel(model(seed=1), sequence_parallel=sequence_parallel)
    shared.load_full_state_dict(model(seed=2).state_dict())
    return shared.full_state_dict()


def round_trip_from_meta_device():
    """The same of a model on the meta device, without a device to put it on."""

    def initialize(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.constant_(tensor, 0.5)

    with torch.device("meta"):
        plain = BasicsTransformerLM(**SIZES)
    shared = TensorParallel(plain, initialize=initialize)
    shared.load_full_state_dict(model(seed=2).state_dict())
    return shared.full_state_dict()


def _of_class(name, kind):
    def change(plain):
        plain.get_submodule(name).__class__ = kind

    return change


def _embedded(**options):
    def change(plain):
        plain.token_embeddings = torch.nn.Embedding(SIZES["vocab_size"], SIZES["d_model"], **options)

    return change


class Scaled(CausalMultiHeadSelfAttention):
    """Scores are scaled by the number of heads."""

    def forward(self, x):
        return super().forward(x * self.num_heads)


class Normalized(SwiGLU):
    """A root mean square over all inner features."""

    def forward(self, x):
        inner = silu(self.w1(x)) * self.w3(x)
        return self.w2(torch.nn.functional.rms_norm(inner, inner.shape[-1:]))


class Dropping(SwiGLU):
    def forward(self, x):
        inner = torch.nn.functional.dropout(silu(self.w1(x)) * self.w3(x), 0.1, self.training)
        return torch.nn.functional.dropout(self.w2(inner), 0.1, self.training)


class Parallel(TransformerBlock):
    """It computes with layers of its attention outside of it."""

    def forward(self, x):
        return super().forward(x) + self.attn.output_proj(self.attn.v_proj(x))


class Centred(BasicsTransformerLM):
    """Logits less their mean over all tokens."""

    def forward(self, token_ids):
        logits = super().forward(token_ids)
        return logits - logits.mean(-1, keepdim=True)


class TiedByHand(BasicsTransformerLM):
    def forward(self, token_ids):
        return self.ln_final(self.token_embeddings(token_ids)) @ self.token_embeddings.weight.T


# Computations that the names of modules do not show.
HIDDEN = {
    "scale": _of_class("layers.1.attn", Scaled),
    "norm": _of_class("layers.0.ffn", Normalized),
    "block": _of_class("layers.0", Parallel),
    "logits": _of_class("", Centred),
    "tied by hand": _of_class("", TiedByHand),
    "padding": _embedded(padding_idx=0),
    "frequency": _embedded(scale_grad_by_freq=True),
    "largest norm": _embedded(max_norm=1.0),
}


def _hidden(change):
    plain = model()
    change(plain)
    return plain


def refusals():
    """What ranks are told about models that they cannot share."""
    told = {}
    models = {"heads": model(num_heads=1), "tokens": model(vocab_size=1), "a bias": model(), "no heads": model()}
    models["a bias"].layers[1].ffn.w2.bias = torch.nn.Parameter(torch.zeros(16))
    del models["no heads"].layers[0].attn.num_heads
    models["another model"] = torch.nn.Sequential(torch.nn.Linear(2, 2))
    models["no feed-forward network"] = model()
    models["no feed-forward network"].layers[0].ffn = torch.nn.Module()
    models |= {name: _hidden(change) for name, change in HIDDEN.items()}
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


def _no_tokens(of_inputs, of_targets):
    """A forward pass and a loss with a number that is no token."""
    shared = TensorParallel(model())
    inputs, targets = (tensor.clone() for tensor in batch())
    for tensor, number in ((inputs, of_inputs), (targets, of_targets)):
        tensor[0, 0] = tensor[0, 0] if number is None else number
    shared.loss(shared(inputs), targets)


def _twice():
    """A gradient penalty."""
    shared = TensorParallel(model())
    shared(batch()[0]).sum().backward(create_graph=True)


def _returned_gradients(take):
    """Gradients that are taken by the parameters' names, of parts and of sums over sequences."""
    shared = TensorParallel(model(), sequence_parallel=True)
    inputs, targets = batch()
    take(shared.loss(shared(inputs), targets), shared.module)


def _take_targets(dtype):
    shared = TensorParallel(model())
    inputs, targets = batch()
    return shared.loss(shared(inputs.to(dtype) if not dtype.is_floating_point else inputs), targets.to(dtype)).item()


def losses_of_integers():
    """Losses by the dtype of tokens and targets, one process's, and whether gathered logits are those of all tokens."""
    inputs, targets = batch()
    plain = model()
    shared = TensorParallel(model())
    logits = shared.gather_logits(shared(inputs))
    losses = [_take_targets(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)]
    return losses, cross_entropy(plain(inputs), targets).item(), torch.allclose(logits, plain(inputs), atol=1e-5)


def _tokens_of_its_own():
    """Each rank gives another batch."""
    shared = TensorParallel(model())
    shared(batch(seed=dist.get_rank())[0])


def _on_a_mesh(of_inputs, of_targets):
    """Each rank gives others, to the wrapper for the other dimension of a mesh."""
    shared = TensorParallel(model())
    wrapped = BucketedDDP(shared.module, None, group=dist.new_subgroups(1)[0])
    shared.loss(wrapped(batch(of_inputs)[0]), batch(of_targets)[1])


def _random_numbers(seed, d_ff=24):
    """Dropout; of 25 inner features one rank draws for more."""
    plain = model(d_ff=d_ff)
    plain.layers[0].ffn.__class__ = Dropping
    shared = TensorParallel(plain)
    torch.manual_seed(seed)
    inputs, targets = batch()
    shared.loss(shared(inputs), targets)


def wrong_steps():
    """What ranks are told of steps that would be wrong; nothing where they are not told."""
    steps = {f"input {number}": lambda number=number: _no_tokens(number, None) for number in (19, -1)}
    steps |= {f"target {number}": lambda number=number: _no_tokens(None, number) for number in (19, -1, -100)}
    steps |= {"twice": _twice, "other tokens": _tokens_of_its_own}
    rank = dist.get_rank()
    steps |= {
        "other tokens on a mesh": lambda: _on_a_mesh(rank, 0),
        "other targets": lambda: _on_a_mesh(0, rank),
        "other seeds": lambda: _random_numbers(rank),
        "other shares": lambda: _random_numbers(0, d_ff=25),
        "same random numbers": lambda: _random_numbers(0),
        "float targets": lambda: _take_targets(torch.float32),
        "generate": lambda: TensorParallel(model()).module.generate(batch()[0], 1),
        "inputs": lambda: _returned_gradients(lambda loss, module: loss.backward(inputs=[module.lm_head.weight])),
        "grad": lambda: _returned_gradients(
            lambda loss, module: torch.autograd.grad(loss, module.layers[0].ffn.w1.weight)
        ),
        "grad of a sum": lambda: _returned_gradients(
            lambda loss, module: torch.autograd.grad(loss, module.ln_final.weight)
        ),
    }
    told = {}
    for name, step in steps.items():
        try:
            step()
        except (UsageError, IndexError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


MAX_NORM = 0.05


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def two_steps_alone():
    """Norms of the gradients, and weights, of one process that clips."""
    plain = model()
    optimizer = optimizer_of(plain.parameters())
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        cross_entropy(plain(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in plain.named_parameters()}


def two_steps_on_mesh(data_ranks, outer, sequence_parallel, save=None, load=None):
    """The same on a mesh.

    Args:
        save: write a checkpoint after the first step.
        load: read one in place of the first step.
    """
    tensor_ranks = dist.get_world_size() // data_ranks
    mesh = init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("data", "tp"))
    shared = TensorParallel(model(seed=0 if load is None else 1), mesh["tp"], sequence_parallel=sequence_parallel)
    wrapped = shared
    if outer == "ddp":
        wrapped = BucketedDDP(shared.module, 0.001, group=mesh["data"])
    elif outer == "fsdp":
        wrapped = FSDP(shared.module, group=mesh["data"])
    sharded = wrapped if outer == "fsdp" else None
    optimizer = optimizer_of(wrapped.parameters())
    share = slice(*(4 // data_ranks * (mesh.get_local_rank("data") + end) for end in (0, 1)))
    norms, extra = [], None
    for step in range(2):
        if step == 0 and load is not None:
            extra = load_checkpoint(load, shared, optimizer, sharded=sharded)
            continue
        optimizer.zero_grad()
        inputs, targets = batch(step)
        shared.loss(wrapped(inputs[share]), targets[share]).backward()
        wrapped.finish_gradient_synchronization()
        if wrapped is not shared:
            shared.finish_gradient_synchronization()
        norms.append(shared.clip_grad_norm_(MAX_NORM, sharded=sharded).item())
        optimizer.step()
        if step == 0 and save is not None:
            save_checkpoint(save, shared, optimizer, sharded=sharded, extra={"step": 1})
    return norms, shared.full_state_dict(None if sharded is None else sharded.gather_full_params()), extra


def two_steps_on_meshes(runs):
    """:func:`two_steps_on_mesh`, in turn."""
    return [two_steps_on_mesh(*arguments) for arguments in runs]


def _gradients_of(shared):
    """Whole gradients of a pass that is finished twice; frozen parameters have none."""
    shared.zero_grad()
    _pass(shared, 0)
    for _ in range(2):
        shared.finish_gradient_synchronization()
    grads = {name: one.grad for name, one in shared.module.named_parameters() if one.grad is not None}
    return shared.full_state_dict(grads)


def changed_modules():
    """Gradients after changes, and what ranks are told until refresh(), by what was changed."""
    told, found = {}, {}
    hooked = model()
    hooked.lm_head.weight.register_hook(lambda gradient: None)
    told["hook"] = error_of(TensorParallel, hooked)[1]

    marked = model()
    marked.lm_head.weight.no_decay = marked.ln_final.weight.no_decay = "kept"
    marked.ln_final.weight.requires_grad_(False)
    shared = TensorParallel(marked, sequence_parallel=True)
    found["frozen"] = _gradients_of(shared)
    copied = copy.deepcopy(shared)
    found["copied"] = _gradients_of(copied)
    for one in (shared, copied):
        assert one.module.lm_head.weight.no_decay == one.module.ln_final.weight.no_decay == "kept"
    told["copied"] = error_of(clip_grad_norm_, copied.parameters(), 1.0)[1]
    told["pickled"] = error_of(pickle.dumps, shared)[1]

    shared.module.ln_final.weight.requires_grad_(True)
    told["unfrozen"] = error_of(shared, batch()[0])[1]
    shared.refresh()
    found["unfrozen"] = _gradients_of(shared)

    for owner in list(shared.module.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(parameter.detach().clone()))
    with torch.no_grad():
        shared.module.ln_final.weight += dist.get_rank()
    told["assigned"] = error_of(shared, batch()[0])[1]
    inputs, targets = batch()
    shared.loss(shared.module(inputs), targets).backward()
    told["assigned, module called"] = error_of(shared.finish_gradient_synchronization)[1]
    shared.refresh()
    found["assigned"] = _gradients_of(shared)
    told["assigned, clipped"] = error_of(clip_grad_norm_, shared.parameters(), 1.0)[1]

    shared.module.layers[0].ffn.adapter = torch.nn.Linear(16, 16, bias=False)
    told["adapter"] = error_of(shared, batch()[0])[1]
    told["adapter, refreshed"] = error_of(shared.refresh)[1]

    within = model()
    within.ln_final.weight.requires_grad_(False)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("fsdp", "tp"))
    shared = TensorParallel(within, mesh["tp"], sequence_parallel=True)
    sharded = FSDP(shared.module, group=mesh["fsdp"])
    shared.module.ln_final.weight.requires_grad_(True)
    projection = shared.module.layers[0].ffn.w2
    projection.weight = torch.nn.Parameter(sharded.gather_full_params()["layers.0.ffn.w2.weight"].clone())
    told["within FSDP"] = error_of(sharded, batch()[0])[1]
    told["within FSDP, refreshed"] = error_of(shared.refresh)[1]
    sharded.refresh()
    inputs, targets = batch()
    shared.loss(sharded(inputs), targets).backward()
    sharded.finish_gradient_synchronization()
    shared.finish_gradient_synchronization()
    parts = sharded.gather_full_params()
    for name, parameter in sharded.sharded_parameters.items():
        parts[name] = parameter.shard.grad.view(parts[name].shape)
    parts |= {name: parameter.grad for name, parameter in sharded.replicated_parameters.items()}
    found["within FSDP"] = shared.full_state_dict(parts)
    return told, found
