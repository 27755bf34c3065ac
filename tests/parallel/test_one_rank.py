"""Wrappers on the only rank of a group, in this process: what they do with inputs, changed modules and meta tensors."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cs336_basics.model import BasicsTransformerLM
from launches import on_start, on_wait
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336sys.errors import UsageError
from cs336sys.parallel import collectives, gradient_slices
from cs336sys.parallel.ddp import BucketedDDP
from cs336sys.parallel.fsdp import FSDP
from cs336sys.parallel.fsdp.gather_order import GatherTiming, GatherWatch
from cs336sys.parallel.gradient_slices import mark_unfinished
from cs336sys.parallel.sharded_optimizer import ShardedOptimizer, exchange, slices
from cs336sys.parallel.tensor_parallel import TensorParallel
from cs336sys.parity.collectives import CollectiveWatcher
from cs336sys.training.model import initialize_layer

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def transformer():
    return BasicsTransformerLM(
        vocab_size=11, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=12, rope_theta=1e4
    )


@pytest.fixture(scope="module", autouse=True)
def only_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sent(call, dtype="float32"):
    """Return how many elements of this dtype each collective of a call has."""
    watcher = CollectiveWatcher([], is_late=False)
    with watcher:
        call()
    return [launch.elements for launch in watcher.launches if launch.dtype == dtype]


class Takes(nn.Module):
    """A unit that keeps the dtypes of its inputs, changes one of them in place, and what two others hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dtypes = []

    def forward(self, x, *, scale, lists, named, mask):
        self.dtypes = [x.dtype, scale.dtype, self.linear.weight.dtype, lists[0].dtype, named["a"].dtype, mask.dtype]
        with torch.no_grad():
            scale.mul_(2)
        lists.append("added")
        named.pop("b")
        named["c"] = output = self.linear(x * scale)
        return output


def test_inputs_of_units_are_cast_and_their_changes_handed_back():
    takes = Takes()
    wrapped = FSDP(nn.ModuleList([takes]), BF16)
    scale, first, mask = torch.full((3,), 0.5), torch.ones(2), torch.ones(2, dtype=torch.int64)
    values, named = [first], {"a": first, "b": torch.ones(2)}
    output = wrapped.module[0](torch.ones(2, 3), scale=scale, lists=values, named=named, mask=mask)
    assert takes.dtypes == [BF16] * 5 + [torch.int64]
    assert output.dtype == BF16
    assert [*named] == ["a", "c"]
    assert named["a"] is values[0] is first
    assert named["c"] is output
    output.sum().backward()
    assert (scale.dtype, scale.tolist()) == (F32, [1, 1, 1])
    assert values[1:] == ["added"]


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(2))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x + self.bias


def test_parameters_may_not_become_cut_or_replicated():
    """Where its module lost or got a matrix, a vector would be in another tensor than optimizers have."""
    wrapped = FSDP(nn.ModuleList([Part()]))
    wrapped.module[0].matrix = None
    with pytest.raises(UsageError, match=r"^0\.bias was cut when it was wrapped, and would be replicated after "):
        wrapped.refresh()
    with pytest.raises(UsageError, match=r"^the module \(ModuleList\) is wrapped already: wrap the plain module$"):
        BucketedDDP(wrapped.module, None)
    plain = Part()
    plain.matrix = None
    wrapped = FSDP(nn.ModuleList([plain, nn.Linear(2, 2)]))
    wrapped.module[0].matrix = nn.Parameter(torch.eye(2))
    with pytest.raises(UsageError, match=r"^0\.bias was replicated when it was wrapped, and would be cut after "):
        wrapped.refresh()
    with pytest.raises(UsageError, match=r"^0\.matrix is not what was wrapped: save and load between two steps"):
        nn.ModuleList([wrapped]).load_state_dict({}, strict=False)


def test_averages_under_way_are_waited_for_before_other_parameters_are_taken_up(monkeypatch):
    """Else they would be written into gradients of the next step."""
    wrapped, waited, wait = BucketedDDP(nn.Linear(2, 3), None), [], collectives.MeanReduction.wait
    monkeypatch.setattr(collectives.MeanReduction, "wait", lambda mean: waited.append(mean.contents) or wait(mean))
    wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.refresh()
    assert waited == ["gradients of bias, weight"]


@pytest.mark.parametrize(("gradient_dtype", "sent"), [(None, 1.001), (BF16, 1.0)])
def test_gradients_are_sent_in_their_dtype_and_those_kept_are_added(gradient_dtype, sent):
    """Of passes that are sent ("s"), kept under no_sync() ("k"), or dropped with all that was kept ("d")."""
    wrapped = FSDP(nn.Linear(2, 2, bias=False), gradient_dtype=gradient_dtype)
    for passes, count in (("sks", 3), ("dks", 2), ("ks", 4)):
        for letter in passes:
            with contextlib.nullcontext() if letter == "s" else wrapped.no_sync():
                wrapped(torch.tensor([[1.0, 1.001]])).sum().backward()
            if letter == "d":
                wrapped.zero_grad()
        wrapped.finish_gradient_synchronization()
        torch.testing.assert_close(wrapped.module.weight.grad, torch.tensor([[1.0, sent]] * 2) * count)


def test_weights_gathered_ahead_can_be_waited_for(monkeypatch):
    wrapped = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    waited = []
    for unit in wrapped.units:
        monkeypatch.setattr(type(unit), "wait", lambda unit: waited.append(unit.name))
    wrapped.wait_for_gathers()
    assert waited == [unit.name for unit in wrapped.units] == ["0", "1"]


@pytest.mark.parametrize("wrap", [FSDP, TensorParallel])
def test_modules_on_the_meta_device_get_the_values_of_their_seed(wrap):
    torch.manual_seed(0)
    expected = transformer()
    with torch.device("meta"):
        module = transformer()
    torch.manual_seed(0)
    wrapped = wrap(module, initialize=initialize_layer, device=CPU)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(wrapped(tokens), expected(tokens))


def test_on_a_gpu_weights_are_late_by_the_time_between_two_events():
    gpu, watch = mock.Mock(), GatherWatch()
    stream = gpu.Stream.return_value
    gpu.Event.side_effect = gpu.needed, gpu.arrived
    gpu.needed.elapsed_time.return_value = 1.5
    gpu.unit.name, gpu.unit.device.type = "block", "cuda"
    with mock.patch.multiple(torch.cuda, Event=gpu.Event, Stream=gpu.Stream):
        watch.use(gpu.unit, is_backward=True)
    assert watch.timings() == [GatherTiming("block", is_backward=True, late_ms=1.5)]
    assert gpu.mock_calls == [
        *(mock.call.Stream(gpu.unit.device), mock.call.Event(enable_timing=True), mock.call.Event(enable_timing=True)),
        *(mock.call.needed.record(), mock.call.unit.record_arrival(gpu.arrived, stream), mock.call.unit.use()),
        *(mock.call.needed.synchronize(), mock.call.arrived.synchronize(), mock.call.needed.elapsed_time(gpu.arrived)),
    ]


class Keeps(nn.Module):
    """A block with a sparse tensor, which may keep a row of its weight."""

    def __init__(self, keeps):
        super().__init__()
        self.linear, self.keeps, self.mixing = nn.Linear(2, 2), keeps, torch.eye(2).to_sparse()

    def forward(self, x):
        if self.keeps:
            self.row = self.linear.weight[0]
        return self.linear(torch.sparse.mm(self.mixing, x))


class UsesWhatIsKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Keeps, (True, False, False)))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].row


def test_a_unit_stays_gathered_while_views_of_its_weights_are_used():
    """And is shown whole in the backward pass."""
    plain, shown = UsesWhatIsKept(), []
    wrapped = FSDP(copy.deepcopy(plain))
    for module in (wrapped, plain):
        output = module(torch.ones(2, 2))
        output.register_hook(lambda _: shown.append(type(wrapped.module.blocks[0].linear.weight)))
        gathered = [unit.is_gathered for unit in wrapped.units]
        output.sum().backward()
        assert module is plain or (gathered, shown) == ([True, False, False], [nn.Parameter])
    wrapped.finish_gradient_synchronization()
    for name, (parameter, _) in wrapped.held_parameters().items():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


class ReturnsRow(nn.Linear):
    def forward(self, x):
        return self.weight[0]


def test_a_unit_that_returns_a_view_of_a_weight_is_freed():
    """Only ranks that come there would keep it."""
    wrapped = FSDP(nn.Sequential(ReturnsRow(2, 3), nn.Linear(2, 2)))
    wrapped(torch.ones(2))
    assert not wrapped.units[0].is_gathered


def test_what_was_compiled_is_called():
    block, calls = nn.Linear(2, 2), []
    block._compiled_call_impl = lambda *args: calls.append("compiled") or block._call_impl(*args)
    wrapped = FSDP(nn.Sequential(block))
    for _ in range(2):
        wrapped(torch.ones(1, 2))
        wrapped.refresh()
    assert calls == ["compiled"] * 2


class ByHand(nn.Module):
    clears = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        self.is_trained = self.linear.weight.requires_grad
        if self.clears:
            nn.init.zeros_(self.linear.weight)
        return x @ self.linear.weight.T


def test_weights_used_by_hand_are_trained_or_frozen_and_may_not_change_in_a_pass_nor_before_the_next():
    wrapped = FSDP(ByHand())
    output = wrapped(torch.ones(1, 2))
    nn.init.zeros_(wrapped.module.linear.weight)
    with pytest.raises(UsageError, match=r"^linear\.weight was changed between the forward and the backward pass"):
        output.sum().backward()
    for frozen in (FSDP(ByHand().requires_grad_(False)), FSDP(ByHand()).requires_grad_(False)):
        frozen(torch.ones(1, 2))
        assert not frozen.module.is_trained
    wrapped.module.clears = True
    with pytest.raises(UsageError, match=r"^linear\.weight was changed in the forward pass, which is lost when its "):
        wrapped(torch.ones(1, 2))


class PartlyUsed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.unused, self.used = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.used.sum()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_gradients_left_in_a_nested_pass_are_sent_in_the_order_in_which_modules_began(order):
    """Whichever is finished first, which may differ between ranks. One gradient of the first never comes."""
    modules = {"a": BucketedDDP(nn.Linear(2, 3), None), "b": BucketedDDP(PartlyUsed(4), None)}
    x = torch.ones(1, 2, requires_grad=True)
    checkpoint(lambda x: modules["b"](modules["a"](x)), x, use_reentrant=True).sum().backward()
    assert sent(lambda: [modules[name].finish_gradient_synchronization() for name in order]) == [8, 9]


class Breaks(torch.autograd.Function):
    """A function whose backward pass fails while the switch is on."""

    is_on = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Breaks.is_on:
            raise ArithmeticError("broken")
        return grad


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.second(Breaks.apply(self.first(x))))


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_ends_though_its_backward_pass_has_failed(monkeypatch, ends):
    """And leaves no gradient of what was computed before the failure, nor gathered weights: it may also begin anew."""
    wrapped, plain = FSDP(Breaking()), Breaking()
    plain.load_state_dict(wrapped.gather_full_params())

    def backward():
        outputs.pop().sum().backward()

    outputs, forward = [], lambda: outputs.append(wrapped(torch.ones(1, 2)))
    for _ in range(2):
        forward()
        with pytest.raises(ArithmeticError, match="broken"):
            backward()
        if ends:
            wrapped.finish_gradient_synchronization()
            assert all(parameter.grad is None for parameter in wrapped.parameters())
            assert not any(unit.is_gathered for unit in wrapped.units)
    monkeypatch.setattr(Breaks, "is_on", False)
    # Bytes of weights and biases: each unit is gathered with the next, and the last two stay for the backward pass.
    assert sent(forward, "uint8") == [16, 8, 24, 12, 24, 8, 24, 12]
    assert [unit.is_gathered for unit in wrapped.units] == [False, True, True]
    assert sent(backward, "uint8") == [16, 8]
    plain(torch.ones(1, 2)).sum().backward()
    wrapped.finish_gradient_synchronization()
    for name, (_, cut) in wrapped.held_parameters().items():
        torch.testing.assert_close(cut.shard.grad.view_as(plain.get_parameter(name)), plain.get_parameter(name).grad)


def test_what_a_wrapper_in_a_cycle_leaves_can_be_wrapped_anew():
    """Nothing else refers to it, and Python's collector has not come by."""
    module = nn.Linear(2, 2)
    wrapped = BucketedDDP(module, None)
    wrapped.cycle = [wrapped]
    del wrapped
    BucketedDDP(module, None)


OF_SLICES = {"refuse_clipping_alone", "refuse_selected_gradients", "refuse_other_scalers", "_check_optimizers"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: FSDP(nn.Linear(2, 2)), OF_SLICES),
        (lambda: mark_unfinished(nn.Parameter(torch.ones(2)), nn.Identity().train), {"refuse_selected_gradients"}),
        (
            lambda: ShardedOptimizer([nn.Parameter(torch.ones(2))], torch.optim.SGD, flat=True, lr=0.5),
            {"refuse_clipping_alone", "refuse_other_scalers", "_drop_slices_in_zero_grad"},
        ),
    ],
)
def test_each_kind_of_slices_changes_what_torch_would_do_with_them(monkeypatch, make, expected):
    """Also where it is the first of a process."""
    called = set()
    for module in (gradient_slices, slices):
        for name in (OF_SLICES | expected) & vars(module).keys():
            monkeypatch.setattr(module, name, lambda name=name: called.add(name))
    make()
    assert called == expected


def test_state_dicts_of_torchs_wrappers_are_loaded_with_their_versions():
    """Whose names begin with "module.", those of the metadata, too."""
    wrapped, seen = BucketedDDP(nn.Sequential(nn.BatchNorm1d(2)), None), []
    wrapped.module[0].register_load_state_dict_pre_hook(
        lambda module, state, prefix, metadata, *_: seen.append(metadata)
    )
    state = nn.DataParallel(nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False))).state_dict()
    state["module.0.weight"] = torch.full((2,), 7.0)
    wrapped.load_state_dict(state)
    assert wrapped.module[0].weight.tolist() == [7, 7]
    assert [metadata["version"] for metadata in seen] == [2]


def test_gradients_of_passes_before_the_last_step_was_dropped_stay_apart():
    """Autograd leaves two in one memory, to which the second pass adds in place."""
    first, second, other = weights = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
    optimizer = ShardedOptimizer(weights, torch.optim.SGD, lr=1.0, flat=True)

    def loss():
        return ((first.view(8, 8) + second.view(8, 8)) * torch.ones(8, 8)).sum()

    (loss() + other.sum()).backward()
    optimizer.step()
    nn.ParameterList([first, second]).zero_grad()
    for _ in range(2):
        loss().backward()
    nn.ParameterList([other]).zero_grad()
    optimizer.step()
    optimizer.wait_for_parameters()
    assert [weight[0].item() for weight in weights] == [-3, -3, -1]


@pytest.mark.parametrize("is_captured", [False, True])
def test_only_gradients_under_way_are_averaged_before_they_are_dropped(monkeypatch, is_captured):
    """Complete ones, and those that the last step has used, are dropped at once; a capture must find a pass."""
    monkeypatch.setattr(slices, "is_stream_captured", lambda: is_captured)
    weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer = ShardedOptimizer(weights, torch.optim.SGD, lr=0.5, flat=True)

    def facts_asked_for_after(*calls):
        for call in calls:
            call()
        return sent(optimizer.zero_grad, "uint8")

    def backward():
        weights[0].square().sum().backward()

    assert facts_asked_for_after() == ([] if is_captured else [2])
    assert facts_asked_for_after(backward) == [2]
    assert facts_asked_for_after(backward, lambda: optimizer.clip_grad_norm_(1.0)) == []
    assert facts_asked_for_after(backward, optimizer.step, backward) == []
    assert facts_asked_for_after(backward) == [2]


def test_modules_of_a_part_that_is_never_called_wait_for_their_parameters(monkeypatch):
    """Of a model that calls a module of its child, and never the child, as OPT of transformers does."""
    module, waited = nn.Module(), []
    module.child = nn.Module()
    module.child.network = nn.Linear(2, 2)
    optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.5, module=module)
    monkeypatch.setattr(exchange.ExchangeBucket, "wait", lambda bucket: waited.extend(bucket.parameters))
    module.child.network(torch.ones(1, 2))
    assert set(waited) == {"child.network.weight", "child.network.bias"}
    del optimizer


def test_parameters_are_there_before_a_hook_of_the_module_computes_with_them(monkeypatch):
    """As that of weight_norm does, which was registered before the optimizer was built."""
    module, events = nn.Sequential(nn.Linear(2, 2)), []
    module[0].register_forward_pre_hook(lambda *_: events.append("hook"))
    optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.5, flat=True, module=module)
    monkeypatch.setattr(exchange.ExchangeBucket, "wait", lambda bucket: events.append("wait"))
    module(torch.ones(1, 2))
    assert events == ["wait", "hook"]
    del optimizer


def test_updates_under_way_are_waited_for_before_master_copies_that_are_loaded_are_sent():
    module, events = nn.Sequential(nn.Linear(8, 8)), []
    settings = {"flat": True, "master_dtype": torch.float64, "module": module}
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, **settings)
    module(torch.ones(1, 8)).sum().backward()
    noted_starts = on_start(lambda _, start: events.append("start") or start())
    with noted_starts, on_wait(lambda _, wait: events.append("wait") or wait()):
        optimizer.step()
        events.clear()
        optimizer.load_state_dict(optimizer.state_dict())
    assert events == ["wait", "start"]


def test_state_that_was_put_in_is_taken_up_in_slices_or_refused():
    weight, frozen = nn.Parameter(torch.ones(4, 16)), nn.Parameter(torch.ones(4, 16), requires_grad=False)
    parameters = {"weight": weight, "frozen": frozen}.items()
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.5, momentum=0.9, flat=True)
    optimizer.state[weight] = {"step": torch.ones(3), "momentum_buffer": torch.zeros(64)}
    optimizer.state[frozen] = {"momentum_buffer": torch.zeros(4, 16)}
    frozen.requires_grad_(True)
    optimizer.refresh()
    assert [optimizer.state[parameter]["momentum_buffer"].shape for _, parameter in parameters] == [(64,), (64,)]
    optimizer.state[weight] = {"momentum_buffer": torch.full((64,), 2.0)}
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight[0, 0].item() == pytest.approx(1 - 0.5 * (2.8 + 3.52))
    weight.sum().backward()
    with pytest.raises(UsageError, match=r"^gradients are under way: call step\(\) or zero_grad\(\) first$"):
        optimizer.refresh()
    optimizer.state[weight] = {"momentum_buffer": torch.zeros(4, 16)}
    refusal = r"^the state momentum_buffer of weight is \(4, 16\), and this rank updates 64 of its elements: load a "
    with pytest.raises(UsageError, match=refusal):
        optimizer.state_dict()


def test_gloo_sends_what_a_gpu_has_through_the_host(monkeypatch):
    monkeypatch.setattr(collectives, "through_host", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    received, tensor = torch.zeros(4), torch.arange(4.0)
    exchange = collectives.SliceExchange("rows")
    exchange.start(received, tensor, [4], [4])
    exchange.wait()
    assert received.tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(collectives, "all_gather_single", lambda whole, own, group: whole.copy_(own + 1))
    gather = collectives.SliceGather([tensor], "rows")
    gather.start()
    gather.wait()
    assert tensor.tolist() == [1, 2, 3, 4]
