"""Ranks that share every layer, or in two dimensions the batch, too, compute what one process computes."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM, CausalMultiHeadSelfAttention, SwiGLU, TransformerBlock, silu
from cs336_basics.nn_utils import cross_entropy
from on_ranks import on_ranks
from same_tensors import assert_same
from small_models import error_of, refusal_of, with_file_limit
from tensor_models import SIZES, assert_close, batch, gradients_of, model, run_pass, shared_model, whole_gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from cs336sys.parallel.collectives import gather_objects
from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.checkpoint import save_checkpoint as save_slices
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.parallel.tensor_parallel.checkpoint import load_checkpoint, save_checkpoint


def trained_alone(seeds=(0,), scales=(1,), **settings):
    """Loss and gradients of one process, whose passes have these seeds and count so much."""
    plain = model(**settings)
    for seed, scale in zip(seeds, scales, strict=True):
        inputs, targets = batch(seed)
        loss = cross_entropy(plain(inputs), targets)
        (loss * scale).backward()
    return loss.item(), gradients_of(plain)


@on_ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("settings", "half"),
    [
        ({}, False),
        ({}, True),
        *((settings, False) for settings in ({"tied": True}, {"repeated": "attn"}, {"repeated": ""})),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(settings, half, sequence_parallel):
    """The first rank's weights are everybody's. In bf16, products of parts are rounded before they are summed."""
    tolerance = 4e-2 if half else 1e-5
    with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
        expected_loss, expected = trained_alone(**settings)
        shared = TensorParallel(model(seed=dist.get_rank(), **settings), sequence_parallel=sequence_parallel)
        loss = run_pass(shared)
    shared.finish_gradient_synchronization()
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert_close(whole_gradients(shared), expected, tolerance)


@on_ranks(2)
def test_gradients_add_up_however_often_they_are_completed():
    """Norms of which each rank has a part were summed again by every further call."""

    def twice_each(shared):
        for seed in (0, 1):
            run_pass(shared, seed)
            for _ in range(2):
                shared.finish_gradient_synchronization()

    def scaled_in_between(shared):
        run_pass(shared, 0)
        shared.finish_gradient_synchronization()
        for parameter in shared.parameters():
            parameter.grad *= 3
        run_pass(shared, 1)
        shared.finish_gradient_synchronization()

    def after_a_zeroed_pass(shared):
        run_pass(shared, 2)
        shared.finish_gradient_synchronization()
        run_pass(shared, 3)
        shared.zero_grad(set_to_none=False)
        twice_each(shared)

    for run in (twice_each, scaled_in_between, after_a_zeroed_pass):
        shared = shared_model(sequence_parallel=True)
        run(shared)
        _, expected = trained_alone((0, 1), (3 if run is scaled_in_between else 1, 1))
        assert_close(whole_gradients(shared), expected)


@on_ranks(1, 2)
def test_module_on_meta_device_goes_to_device_of_process_group():
    def initialize(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.constant_(tensor, 0.5)

    with torch.device("meta"):
        plain = BasicsTransformerLM(**SIZES)
    shared, state = TensorParallel(plain, initialize=initialize), model(seed=2).state_dict()
    shared.load_full_state_dict(state)
    assert_same(shared.full_state_dict(), dict(state))
    with torch.device("meta"):
        plain = BasicsTransformerLM(**SIZES)
    plain.layers[0].ffn.__class__ = Normalized
    error = error_of(lambda: TensorParallel(plain, initialize=initialize))
    assert error is None if shared.group.size() == 1 else error[1].startswith("layers.0.ffn computes something")


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_integers_of_any_width_are_tokens(dtype):
    (inputs, targets), plain, shared = batch(), model(), shared_model()
    logits = shared(inputs.to(dtype))
    expected = cross_entropy(plain(inputs), targets).item()
    assert shared.loss(logits, targets.to(dtype)).item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(shared.gather_logits(logits), plain(inputs), rtol=1e-5, atol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("places", [[0, 5], slice(None)])
def test_targets_of_torchs_ignored_number_do_not_count(places):
    """Also where the one just before or behind a rank's part is a target, and where none has one."""
    (inputs, targets), plain, shared = batch(), model(), shared_model()
    targets = targets.clone()  # batch() returns two views of the same tokens.
    targets[:, places] = -100
    logits = plain(inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = shared.loss(shared(inputs), targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, nan_ok=True)
    loss.backward()
    expected.backward()
    assert_close(whole_gradients(shared), gradients_of(plain))


class Scaled(CausalMultiHeadSelfAttention):
    """Scores are scaled by the number of heads."""

    def forward(self, x):
        return super().forward(x * self.num_heads)


class Normalized(SwiGLU):
    """A root mean square over all inner features."""

    def forward(self, x):
        inner = silu(self.w1(x)) * self.w3(x)
        return self.w2(torch.nn.functional.rms_norm(inner, inner.shape[-1:]))


class Parallel(TransformerBlock):
    """It computes with layers of its attention outside of it."""

    def forward(self, x):
        return super().forward(x) + self.attn.output_proj(self.attn.v_proj(x))


class Centred(BasicsTransformerLM):
    """Logits less their mean over all tokens, and more."""

    def forward(self, token_ids):
        logits = super().forward(token_ids)
        return logits - logits.mean(-1, keepdim=True), token_ids


class TiedByHand(BasicsTransformerLM):
    def forward(self, token_ids):
        return self.ln_final(self.token_embeddings(token_ids)) @ self.token_embeddings.weight.T


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.1.attn", Scaled),
        ("layers.0.ffn", Normalized),
        ("layers.0", Parallel),
        ("the model", Centred),
        ("token_embeddings", TiedByHand),
        *(
            ("token_embeddings", options)
            for options in ({"padding_idx": 0}, {"scale_grad_by_freq": True}, {"max_norm": 1.0})
        ),
    ],
)
def test_computations_that_names_of_modules_do_not_show_are_refused(name, change):
    plain = model()
    if isinstance(change, dict):
        plain.token_embeddings = torch.nn.Embedding(SIZES["vocab_size"], SIZES["d_model"], **change)
    else:
        plain.get_submodule(name if name.startswith("layers") else "").__class__ = change
    rule = " computes something else where 2 tensor parallel ranks share its layers, in a trial with random weights: "
    kind, message = error_of(TensorParallel, plain)
    assert (kind, message.partition(rule)[0]) == ("UsageError", name)


@on_ranks(2)
def test_refusals_name_the_rule_and_the_choices():
    """Further models are in figures.txt."""
    biased, shared = model(), shared_model(sequence_parallel=True)
    biased.layers[1].ffn.w2.bias = torch.nn.Parameter(torch.zeros(16))
    without_network = model()
    without_network.layers[0].ffn = torch.nn.Module()
    for call, argument, message in (
        (
            TensorParallel,
            model(num_heads=1),
            "layers.0.attn: 1 attention head cannot be shared by 2 tensor parallel ranks: choose 1 rank",
        ),
        (
            TensorParallel,
            biased,
            "parameter layers.1.ffn.w2.bias: tensor parallelism can only cut parameters of cs336_basics, layers.N.*, "
            "token_embeddings.weight, ln_final.weight and lm_head.weight",
        ),
        (
            TensorParallel,
            without_network,
            "layers.0 (TransformerBlock) has no module ffn.w1, which cs336_basics has",
        ),
        (
            shared,
            batch(length=7)[0],
            "a sequence of 7 tokens cannot be shared by 2 ranks: choose a multiple of 2, or sequence_parallel=False",
        ),
        (
            shared.load_full_state_dict,
            model(d_ff=24).state_dict(),
            "the state dict belongs to another model: layers.0.ffn.w1.weight is (24, 16) there and (23, 16) here; "
            "layers.0.ffn.w2.weight is (16, 24) there and (16, 23) here; layers.0.ffn.w3.weight is (24, 16) there and "
            "(23, 16) here, and 3 more",
        ),
    ):
        assert error_of(call, argument) == ("UsageError", message)


class Dropping(SwiGLU):
    def forward(self, x):
        inner = torch.nn.functional.dropout(silu(self.w1(x)) * self.w3(x), 0.1, self.training)
        return torch.nn.functional.dropout(self.w2(inner), 0.1, self.training)


def compute_loss(inputs, targets, plain=None):
    shared = TensorParallel(plain or model())
    shared.loss(shared(inputs), targets)


def with_random_numbers(seed, d_ff=24):
    """Dropout; of 25 inner features one rank draws for more."""
    plain = model(d_ff=d_ff)
    plain.layers[0].ffn.__class__ = Dropping
    shared = TensorParallel(plain)
    torch.manual_seed(seed)
    inputs, targets = batch()
    shared.loss(shared(inputs), targets)


def on_a_mesh(of_inputs, of_targets):
    """Each rank gives others, to the wrapper for the other dimension of a mesh."""
    shared = shared_model()
    wrapped = BucketedDDP(shared.module, None, group=dist.new_subgroups(1)[0])
    shared.loss(wrapped(batch(of_inputs)[0]), batch(of_targets)[1])


@on_ranks(2)
def test_tokens_that_are_none_or_differ_between_ranks_are_refused():
    """Numbers outside of the vocabulary were nobody's, and counted as 0."""
    rank, (inputs, targets) = dist.get_rank(), batch()
    for number in (19, -1, -99, 2**62):
        wrong = targets.clone()
        wrong[0, 0] = number
        rule = "is not in the vocabulary of 19 tokens: choose 0 to 18, or -100 for a position that does not count"
        assert error_of(compute_loss, inputs, wrong) == ("UsageError", f"target {number} {rule}")
        wrong = inputs.clone()
        wrong[0, 0] = number
        kind, message = error_of(compute_loss, wrong, targets)
        assert (kind, message[:5]) == ("IndexError", "index")
    message = "targets are torch.float32: choose token ids, int64"
    assert error_of(compute_loss, inputs, targets.float()) == ("UsageError", message)
    for error, of_digest in (
        (error_of(shared_model(), batch(seed=rank)[0]), "tokens (4, 8) of digest"),
        (error_of(on_a_mesh, rank, 0), "tokens (4, 8) of digest"),
        (error_of(on_a_mesh, 0, rank), "targets (4, 8) of digest"),
        (error_of(with_random_numbers, rank), "random numbers from generator state "),
        (error_of(with_random_numbers, 0, d_ff=25), "random numbers from generator state "),
    ):
        assert error[0] == "UsageError"
        assert f"ranks differ in what they train: {of_digest}" in error[1]
    with_random_numbers(0)


@on_ranks(2)
def test_gradients_and_logits_of_parts_are_not_taken_for_whole_ones():
    def returned_gradients(take):
        shared, (inputs, targets) = shared_model(sequence_parallel=True), batch()
        take(shared.loss(shared(inputs), targets), shared.module)

    left_out = "torch.autograd.grad() and backward(inputs=...) would leave out"
    for call, sentence in (
        (
            lambda: shared_model()(batch()[0]).sum().backward(create_graph=True),
            "tensor parallel layers are differentiated once",
        ),
        (
            lambda: shared_model().module.generate(batch()[0], 1),
            "generate() of the module would take the logits of this rank's",
        ),
        (lambda: returned_gradients(lambda loss, module: loss.backward(inputs=[module.lm_head.weight])), left_out),
        (
            lambda: returned_gradients(lambda loss, module: torch.autograd.grad(loss, module.layers[0].ffn.w1.weight)),
            left_out,
        ),
        (lambda: returned_gradients(lambda loss, module: torch.autograd.grad(loss, module.ln_final.weight)), left_out),
        (
            lambda: returned_gradients(lambda loss, module: loss.backward() or SGD(module.parameters()).step()),
            "gradients lack those of other ranks: call finish_gradient_synchronization() of",
        ),
    ):
        assert refusal_of(call).startswith(sentence)


def trained_gradients(shared):
    """Of a pass that is finished twice; frozen parameters have none."""
    shared.zero_grad()
    run_pass(shared)
    for _ in range(2):
        shared.finish_gradient_synchronization()
    return whole_gradients(shared)


REFRESH = "after it was wrapped: call refresh() on every rank"
REPLACED = f"token_embeddings.weight was replaced (as load_state_dict() with assign=True does) {REFRESH}"
CLIPPED = "torch.nn.utils.clip_grad_norm_ would clip by the norm of this rank's share of the gradients"


@on_ranks(2)
def test_frozen_and_copied_modules_are_right_or_refused():
    _, expected = trained_alone()
    without_norm = {name: gradient for name, gradient in expected.items() if name != "ln_final.weight"}
    hooked, marked = model(), model()
    hooked.lm_head.weight.register_hook(lambda gradient: None)
    assert error_of(TensorParallel, hooked)[1] == (
        "lm_head.weight has a hook, which would be lost: register it on the parameter of the wrapped module, where it "
        "sees the gradient of this rank's part"
    )
    marked.lm_head.weight.no_decay = marked.ln_final.weight.no_decay = "kept"
    marked.ln_final.weight.requires_grad_(False)
    shared = TensorParallel(marked, sequence_parallel=True)
    assert_close(trained_gradients(shared), without_norm)
    copied = copy.deepcopy(shared)
    assert_close(trained_gradients(copied), without_norm)
    for wrapper in (shared, copied):
        assert wrapper.module.lm_head.weight.no_decay == wrapper.module.ln_final.weight.no_decay == "kept"
    assert error_of(clip_grad_norm_, copied.parameters(), 1.0)[1].startswith(CLIPPED)
    message = "a TensorParallel module cannot be pickled: save its full_state_dict()"
    assert error_of(pickle.dumps, shared)[1] == message
    shared.module.ln_final.weight.requires_grad_(True)
    assert error_of(shared, batch()[0])[1] == f"ln_final.weight was unfrozen {REFRESH}"
    shared.refresh()
    assert_close(trained_gradients(shared), expected)


@on_ranks(2)
def test_changed_modules_are_right_or_refused():
    shared, (inputs, targets) = shared_model(sequence_parallel=True), batch()
    for owner in list(shared.module.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(parameter.detach().clone()))
    with torch.no_grad():
        shared.module.ln_final.weight += dist.get_rank()
    assert error_of(shared, inputs)[1] == REPLACED
    shared.loss(shared.module(inputs), targets).backward()
    assert error_of(shared.finish_gradient_synchronization)[1] == REPLACED
    shared.refresh()
    assert_close(trained_gradients(shared), trained_alone()[1])
    assert error_of(clip_grad_norm_, shared.parameters(), 1.0)[1].startswith(CLIPPED)
    shared.module.layers[0].ffn.adapter = torch.nn.Linear(16, 16, bias=False)
    assert error_of(shared, inputs)[1] == f"layers.0.ffn.adapter.weight was added {REFRESH}"
    assert error_of(shared.refresh)[1] == (
        "layers.0.ffn.adapter.weight was added after ranks had shared out the module: change the module before it is "
        "wrapped"
    )


@on_ranks(2)
def test_modules_changed_within_fsdp_are_right_or_refused():
    within = model()
    within.ln_final.weight.requires_grad_(False)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("fsdp", "tp"))
    shared = TensorParallel(within, mesh["tp"], sequence_parallel=True)
    sharded = FSDP(shared.module, group=mesh["fsdp"])
    shared.module.ln_final.weight.requires_grad_(True)
    projection = shared.module.layers[0].ffn.w2
    projection.weight = torch.nn.Parameter(sharded.gather_full_params()["layers.0.ffn.w2.weight"].clone())
    assert error_of(sharded, batch()[0])[1].endswith(REFRESH)
    message = "FSDP holds slices of the parts: call refresh() of the FSDP module instead"
    assert error_of(shared.refresh)[1] == message
    sharded.refresh()
    run_pass(shared, 0, sharded)
    sharded.finish_gradient_synchronization()
    shared.finish_gradient_synchronization()
    parts = sharded.gather_full_params()
    for name, parameter in sharded.sharded_parameters.items():
        parts[name] = parameter.shard.grad.view(parts[name].shape)
    parts |= {name: parameter.grad for name, parameter in sharded.replicated_parameters.items()}
    assert_close(shared.full_state_dict(parts), trained_alone()[1])


MAX_NORM = 0.05
WRAPPERS = {
    "ddp": lambda module, mesh: BucketedDDP(module, 0.001, group=mesh["data"]),
    "fsdp": lambda module, mesh: FSDP(module, group=mesh["data"]),
}


@functools.cache
def steps_alone():
    """Norms of the gradients, and weights, of one process that clips."""
    plain, norms = model(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        cross_entropy(plain(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in plain.named_parameters()}


def train(data_ranks, tensor_ranks, outer, sequence_parallel, save=None, load=None):
    """Train two steps as one process does.

    Args:
        save: write a checkpoint after the first step.
        load: read one in place of the first step.
    """
    mesh = init_device_mesh("cpu", (data_ranks, tensor_ranks), mesh_dim_names=("data", "tp"))
    shared = TensorParallel(model(seed=0 if load is None else 1), mesh["tp"], sequence_parallel=sequence_parallel)
    wrapped = WRAPPERS[outer](shared.module, mesh) if outer else shared
    sharded = wrapped if outer == "fsdp" else None
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    share = slice(*(4 // data_ranks * (mesh.get_local_rank("data") + end) for end in (0, 1)))
    norms, weights = steps_alone()
    for step in range(2):
        if step == 0 and load is not None:
            assert load_checkpoint(load, shared, optimizer, sharded=sharded) == {"step": 1}
            continue
        optimizer.zero_grad()
        run_pass(shared, step, wrapped, share)
        for _ in range(2):
            # However often they are told.
            wrapped.finish_gradient_synchronization()
            shared.finish_gradient_synchronization()
        assert shared.clip_grad_norm_(MAX_NORM, sharded=sharded).item() == pytest.approx(norms[step], rel=1e-5)
        optimizer.step()
        if step == 0 and save is not None:
            save_checkpoint(save, shared, optimizer, sharded=sharded, extra={"step": 1})
    whole = shared.full_state_dict(None if sharded is None else sharded.gather_full_params())
    # AdamW divides by the root of a square: a gradient of rounding errors moves a weight as far as any.
    assert_same(whole, weights, rtol=1e-4, atol=1e-5)


def train_and_save(folder):
    train(2, 2, "ddp", False, save=f"{folder}/ddp")
    train(2, 2, "fsdp", True, save=f"{folder}/fsdp")


def test_meshes_train_as_one_process_and_read_each_others_checkpoints(ranks, tmp_path):
    ranks(4).run(train_and_save, tmp_path)
    ranks(4).run(train, 4, 1, "fsdp", False, None, f"{tmp_path}/ddp")
    ranks(2).run(train, 1, 2, "", True, None, f"{tmp_path}/fsdp")


class Counted(type(model().ln_final)):
    """A norm with statistics, which differ between ranks, and extra state."""

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def counted(seed, number, layers=2):
    """A tied model in bf16 with a buffer and extra state."""
    plain = model(seed, tied=True, num_layers=layers).bfloat16()
    plain.ln_final.__class__ = Counted
    plain.ln_final.count = number
    plain.ln_final.register_buffer("seen", torch.full((2,), float(number)))
    return plain


def optimizer_of(shared):
    """With a state in fp32 of parameters in bf16, a step of shape (1,), and a number."""
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    for parameter in shared.parameters():
        optimizer.state[parameter] = {"exact": parameter.detach().float() + 1e-4, "step": torch.ones(1), "count": 3}
    return optimizer


@on_ranks(2)
def test_everything_comes_back_and_one_process_reads_it(tmp_path):
    shared, loaded = TensorParallel(counted(0, 3)), TensorParallel(counted(1, 5))
    shared.module.ln_final.seen.add_(dist.get_rank())
    optimizer, other = optimizer_of(shared), torch.optim.SGD(loaded.parameters(), lr=0.5)
    save_checkpoint(tmp_path / "saved", shared, optimizer, extra=[None])
    load_checkpoint(tmp_path / "saved", loaded, other)
    expected, norm = shared.full_state_dict(), loaded.module.ln_final
    assert_same(loaded.full_state_dict(), expected)
    assert (norm.seen.tolist(), norm.count) == ([3.0, 3.0], 3)
    for state, loaded_state in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert loaded_state.pop("count") == state.pop("count") == 3
        assert_same(loaded_state, state)
    plain = counted(2, 0)
    del plain.ln_final.count
    plain.ln_final.__class__ = type(model().ln_final)
    plain.load_state_dict(torch.load(tmp_path / "saved", weights_only=True)["model"])
    alone = dict(plain.named_parameters(remove_duplicate=False))
    assert_same({name: alone[name].detach() for name in expected}, expected)


@on_ranks(2)
def test_refusals_leave_the_checkpoint_as_it_was(tmp_path):
    path = tmp_path / "saved"

    def require_error(kind, sentence, error):
        assert error[0] == kind
        assert sentence in error[1]

    shared = TensorParallel(counted(0, 3))
    save_checkpoint(path, shared)
    weights = shared.full_state_dict()
    error = with_file_limit(1000, save_checkpoint, path, shared)
    require_error("OSError", f"checkpoint {path} could not be written: ", error)
    error = error_of(save_checkpoint, path / "saved", shared)
    require_error("OSError", "saved/saved could not be written: ", error)
    error = error_of(save_checkpoint, path, shared, extra={"sizes": {1, 2}})
    require_error("UsageError", "extra['sizes'] is of type builtins.set: checkpoints hold tensors", error)
    error = error_of(load_checkpoint, path, TensorParallel(model().bfloat16()))
    sentence = "another model: ln_final.seen is (2,) there and missing here; extra state of"
    require_error("UsageError", sentence, error)
    optimizer = optimizer_of(shared)
    optimizer.state[shared.module.ln_final.weight]["history"] = {1, 2}
    sentence = "the optimizer's state['ln_final.weight']['history'] is of type builtins.set: "
    require_error("UsageError", sentence, error_of(save_checkpoint, path, shared, optimizer))
    optimizer.param_groups[0]["rules"] = {1}
    error = error_of(save_checkpoint, path, shared, optimizer)
    require_error("UsageError", "groups[0]['rules'] is of type builtins.set: ", error)
    shared.module.ln_final.count = {1}
    error = error_of(save_checkpoint, path, shared)
    require_error("UsageError", "extra state['ln_final']['count'] is of type builtins.set: ", error)
    load_checkpoint(path, shared)
    assert_same(shared.full_state_dict(), weights)
    if dist.get_rank() == 0:
        path.with_name("damaged").write_bytes(path.read_bytes()[:-100])
        torch.save([1], path.with_name("foreign"))
    dist.barrier()
    for name, sentence in (
        ("damaged", "damaged is damaged, or more than plain data: "),
        ("foreign", "foreign is no checkpoint of tensor parallel training"),
        ("nothing", f"there is no checkpoint {tmp_path / 'nothing'}"),
    ):
        require_error("UsageError", sentence, error_of(load_checkpoint, path.with_name(name), shared))
    assert gather_objects(sorted(file.name for file in tmp_path.iterdir()))[0] == ["damaged", "foreign", "saved"]
    sharded = FSDP(shared.module, group=dist.new_subgroups(1)[0])
    sentence = "this FSDP module has slices of tensor parallel parts: use save_checkpoint()"
    require_error("UsageError", sentence, error_of(save_slices, path, sharded))
    layers = TensorParallel(counted(0, 3, layers=3))
    layers.module.layers[1].ffn.w1.weight = torch.nn.Parameter(torch.ones(3, 3))
    sentence = "layers.1.ffn.w1.weight is (3, 3), and this rank's part of it was ("
    require_error("UsageError", sentence, error_of(save_checkpoint, path, layers))
