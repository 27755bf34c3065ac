"""AdamW's kernels against torch.optim.AdamW and float64, on the CPU through Triton's interpreter."""

import copy
import gc
import io
import itertools
import math
import weakref

import pytest
import torch

from cs336sys.kernels.adamw import AdamW, kernels, tables

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ON_GPU = torch.cuda.is_available()
# Two whole chunks and the rest of one: see small_chunks.
LENGTH = 9000 if ON_GPU else 600
SHAPES = [(3, 5), (), (7, 1, 9), (0, 4), (LENGTH,)] + ([(3, 100_003), (4096, 257)] if ON_GPU else [])
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}


def make_tensors(shapes=SHAPES, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def parameters_of(tensors):
    return [torch.nn.Parameter(tensor.clone()) for tensor in tensors]


def give_gradients(parameters, seed, scale=1.0):
    gradients = make_tensors([parameter.shape for parameter in parameters], seed=100 + seed)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = (scale * gradient).to(parameter.device, parameter.dtype)


def assert_states_match(optimizer, expected_optimizer, rtol=2e-6, atol=1e-7):
    """Parameters and moments by name; both optimizers' parameters are in the same order."""

    def numbers(of_optimizer):
        for parameter in (parameter for group in of_optimizer.param_groups for parameter in group["params"]):
            state = of_optimizer.state[parameter]
            moments = {name: state[name].double().cpu() for name in ("step", "exp_avg", "exp_avg_sq") if state}
            yield moments | {"parameter": parameter.detach().double().cpu()}

    ours, theirs = list(numbers(optimizer)), list(numbers(expected_optimizer))
    # Names the first that differs.
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)


def assert_rounded(copied, weight):
    if ON_GPU or copied.dtype != torch.bfloat16:
        assert torch.equal(copied, weight.to(copied.dtype))
    else:
        # The interpreter cuts bfloat16 off.
        assert torch.equal(copied.view(torch.int16), (weight.view(torch.int32) >> 16).to(torch.int16))


@pytest.fixture
def small_chunks(monkeypatch):
    """Whole chunks, which are read 128 bits at a time, and the rest of each tensor with masks; a GPU's are as small."""
    if not ON_GPU:
        monkeypatch.setattr(kernels, "CHUNK", 256)


def test_steps_of_two_groups_with_gradients_missing_now_and_then(device, small_chunks):
    """And a learning rate that changes between steps, as a tensor and as a number."""
    ours, theirs = (parameters_of(make_tensors(device=device)) for _ in range(2))
    double = [torch.nn.Parameter(parameter.detach().double()) for parameter in theirs]
    optimizer, expected = (
        make([{"params": parameters[:2]}, {"params": parameters[2:], **SETTINGS}])
        for make, parameters in ((AdamW, ours), (torch.optim.AdamW, double))
    )
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device=device)
    for step, lr in enumerate((1e-3, 1e-2, 1e-1, 1e-3)):
        give_gradients(ours, step)
        give_gradients(double, step)
        if step != 2:
            ours[2].grad = double[2].grad = None
        if step:
            ours[0].grad = double[0].grad = None
        expected.param_groups[0]["lr"] = lr
        if step < 3:
            rate.fill_(lr)
        else:
            optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        expected.step()
    assert_states_match(optimizer, expected)
    assert optimizer.state[ours[2]]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_parameters_and_gradients(dtype, grad_dtype, device):
    """Weights of half types are computed in float32, and the parameter is their copy."""
    (ours,) = parameters_of(make_tensors([(300,)], dtype, device))
    (theirs,) = parameters_of([ours.detach().double()])
    optimizer, expected = AdamW([ours], **SETTINGS), torch.optim.AdamW([theirs], **SETTINGS)
    if grad_dtype != dtype:
        ours.grad_dtype = grad_dtype
    for step in range(3):
        give_gradients([theirs], step)
        ours.grad = theirs.grad.to(grad_dtype)
        theirs.grad = ours.grad.double()
        optimizer.step()
        expected.step()
    weight = ours.detach() if dtype == torch.float32 else optimizer.state[ours]["master"]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.double(), theirs.detach(), rtol=2e-6, atol=1e-7)
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[ours][name].dtype == torch.float32
        torch.testing.assert_close(
            optimizer.state[ours][name].double(), expected.state[theirs][name], rtol=2e-6, atol=1e-7
        )
    assert_rounded(ours.detach(), weight)


def test_one_launch_for_parameters_of_one_dtype_and_tables_made_once(device, monkeypatch):
    parameters = parameters_of(make_tensors([(7,)] * 8, device=device))
    described = []
    describe = tables.ParameterSet.describe
    monkeypatch.setattr(tables.ParameterSet, "describe", lambda *inputs: described.append(1) or describe(*inputs))
    optimizer = AdamW(parameters)
    give_gradients(parameters, 0)
    for _ in range(4):
        optimizer.step()
    assert len(optimizer._updated_by_step._chunks.launches) == 1
    # The first step makes the states.
    assert len(described) == 2
    give_gradients(parameters, 1)
    optimizer.step()
    parameters[3].grad = None
    optimizer.step()
    assert len(described) == 4


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_clipping_is_torchs(scale, device, small_chunks):
    ours, theirs = (parameters_of(make_tensors(device=device)) for _ in range(2))
    optimizer, expected = AdamW(ours, max_grad_norm=0.5), torch.optim.AdamW(theirs)
    for step in range(2):
        give_gradients(ours, step, scale)
        give_gradients(theirs, step, scale)
        before = [parameter.grad.clone() for parameter in ours]
        optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        expected.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(ours, before, strict=True))
    assert_states_match(optimizer, expected, rtol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e15, 1e30, 1e-30])
def test_nan_infinity_and_huge_gradients_as_torch(value, max_grad_norm, device):
    ours, theirs = (parameters_of(make_tensors([(6,), (4,)], device=device)) for _ in range(2))
    optimizer, expected = AdamW(ours, max_grad_norm=max_grad_norm), torch.optim.AdamW(theirs)
    for parameters in (ours, theirs):
        give_gradients(parameters, 0)
        parameters[0].grad[2] = value
    optimizer.step()
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm)
    expected.step()
    assert_states_match(optimizer, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attached_copy_is_the_parameter_rounded(dtype, device, small_chunks):
    parameters = parameters_of(make_tensors([(LENGTH,), (5,)], device=device))
    optimizer = AdamW(parameters, lr=0.1)
    give_gradients(parameters, 0)
    for _ in range(2):
        optimizer.step()
    given = torch.empty(LENGTH, dtype=dtype, device=device)
    optimizer.attach_copy(parameters[0], given)
    assert torch.equal(given, parameters[0].to(dtype))
    for _ in range(2):
        optimizer.step()
    assert_rounded(given, parameters[0].detach())
    with torch.no_grad():
        parameters[0].zero_()
    optimizer.refresh_copies()
    assert not given.any()


def split_weight(parameter, low_bits):
    return ((parameter.detach().view(torch.int16).int() << 16) + low_bits.int()).view(torch.float32)


def test_split_weight_is_exactly_the_float32_one(device, small_chunks):
    starts = make_tensors([(LENGTH,), (3, 5)], torch.bfloat16, device)
    split, whole = parameters_of(starts), parameters_of([start.float() for start in starts])
    optimizer, expected = AdamW(split, state_dtype="split", **SETTINGS), AdamW(whole, **SETTINGS)
    for step in range(3):
        give_gradients(split, step)
        for parameter, other in zip(split, whole, strict=True):
            other.grad = parameter.grad.float()
        optimizer.step()
        expected.step()
        for parameter, other in zip(split, whole, strict=True):
            weight = split_weight(parameter, optimizer.state[parameter]["low_bits"])
            assert torch.equal(weight, other)
            distance = (parameter.detach().double() - weight.double()).abs()
            spacing = 2.0 ** (weight.double().abs().log2().floor() - 7)
            assert (distance <= spacing / 2).all()


def test_split_weight_between_two_parameters_stays_where_it_is(device):
    """Half way, what the parameter lacks is 2^15 of its last places: -2^15 still fits in 16 bits."""
    (parameter,) = parameters_of(make_tensors([(20,)], torch.bfloat16, device))
    optimizer = AdamW([parameter], lr=0.0, state_dtype="split")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = parameter.detach().clone()
    low_bits = optimizer.state[parameter]["low_bits"].fill_(-(2**15))
    optimizer.step()
    assert torch.equal(parameter, before)
    assert (low_bits == -(2**15)).all()


def test_split_weight_of_nan_is_nan(device):
    (parameter,) = parameters_of(make_tensors([(4,)], torch.bfloat16, device))
    optimizer = AdamW([parameter], state_dtype="split")
    parameter.grad = torch.tensor([0.0, math.nan, 1.0, 2.0], device=device, dtype=torch.bfloat16)
    optimizer.step()
    for weight in (parameter, split_weight(parameter, optimizer.state[parameter]["low_bits"])):
        assert weight.isnan().tolist() == [False, True, False, False]


def rounded_steps(num_steps, device, dtype=torch.bfloat16, length=4096):
    """All elements are alike, and so differ by how they were rounded only."""
    parameter = torch.nn.Parameter(torch.full((length,), 1.0, dtype=dtype, device=device))
    optimizer = AdamW([parameter], state_dtype="bf16", lr=1e-3, weight_decay=0.0)
    for _ in range(num_steps):
        parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def test_stochastic_rounding_has_no_bias(device):
    parameter, state = rounded_steps(1, device)
    gradient = torch.tensor(0.3, dtype=torch.bfloat16).item()
    # After the first step the update is the learning rate: 1 - 0.001 lies between 0.99609375 and 1.
    for tensor, exact in (
        (parameter, 1 - 1e-3),
        (state["exp_avg"], 0.1 * gradient),
        (state["exp_avg_sq"], 1e-3 * gradient**2),
    ):
        assert tensor.dtype == torch.bfloat16
        low, high = tensor.double().unique().tolist()
        assert low < exact < high
        share = (exact - low) / (high - low)
        deviation = math.sqrt(share * (1 - share) / tensor.numel())
        assert abs((tensor.double() == high).double().mean().item() - share) < 4 * deviation
    # Each is rounded by bits of its own.
    ups = [(tensor.double() == tensor.double().max()).double() for tensor in (parameter, *list(state.values())[1:3])]
    for one, other in itertools.combinations(ups, 2):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 4 / math.sqrt(len(one))


def test_stochastic_rounding_is_repeatable_and_new_in_every_step(device):
    (first, first_state), (second, second_state) = (rounded_steps(3, device, length=512) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(first_state[name], second_state[name]) for name in first_state)
    # With the same bits in every step all elements would have taken one of two ways, or few more.
    assert len(torch.stack([first, first_state["exp_avg"], first_state["exp_avg_sq"]]).unique(dim=1).T) > 16


def test_bits_are_others_for_another_parameter_or_step(device):
    parameters = [torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16, device=device)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer = AdamW(parameters, state_dtype="bf16")
    optimizer.step()
    moment, other_moment = (optimizer.state[parameter]["exp_avg"] for parameter in parameters)
    first_moment, other_moment = moment.clone(), other_moment.clone()
    moment.zero_()
    optimizer.step()
    for rounded_otherwise in (other_moment, moment):
        assert 0.2 < (first_moment == rounded_otherwise).double().mean().item() < 0.95


def test_bfloat16_states_of_a_float32_parameter_do_not_round_it(device):
    parameter, state = rounded_steps(1, device, torch.float32, 64)
    assert state["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(parameter, torch.full_like(parameter, 1 - 1e-3), rtol=1e-6, atol=0)


LAYOUTS = {
    "transposed parameter": lambda x: x.T.contiguous().T,
    "not 16-byte aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides(layout, device, small_chunks):
    ours, theirs = (torch.nn.Parameter(layout(make_tensors([(30, 20)], device=device)[0])) for _ in range(2))
    optimizer, expected = AdamW([ours]), torch.optim.AdamW([theirs])
    for step in range(2):
        # Contiguous first, as the transposed parameter is not, and then of no memory of its own.
        give_gradients([ours], step)
        if step == 1:
            ours.grad = ours.grad[:1].expand(30, 20)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
    assert_states_match(optimizer, expected)


def trained(make, tensors, num_steps=2):
    parameters = parameters_of(tensors)
    optimizer = make([{"params": parameters[:1], "lr": 3e-3}, {"params": parameters[1:]}])
    for step in range(num_steps):
        give_gradients(parameters, step)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_state_dict_goes_to_torch_and_back(state_dtype, device):
    tensors = make_tensors([(3, 5), (40,)], device=device)

    def make(groups):
        return AdamW(groups, state_dtype=state_dtype)

    for source, target in ((make, torch.optim.AdamW), (torch.optim.AdamW, make)):
        parameters, optimizer = trained(source, tensors)
        others, other = trained(target, [parameter.detach() for parameter in parameters], 0)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        other.load_state_dict(torch.load(saved))
        assert other.param_groups[0]["lr"] == 3e-3
        give_gradients(parameters, 7)
        give_gradients(others, 7)
        optimizer.step()
        other.step()
        rounding = 2**-6 if state_dtype == "bf16" else 0
        assert_states_match(other, optimizer, rtol=2e-6 + rounding, atol=1e-7 + 0.1 * rounding)
        assert all(other.state[parameter]["step"] == 3 for parameter in others)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "split"])
def test_resumed_training_is_bitwise_the_same(state_dtype, device):
    def make(groups):
        return AdamW(groups, state_dtype=state_dtype)

    parameters, optimizer = trained(make, make_tensors([(3, 5), (40,)], torch.bfloat16, device))
    others, other = trained(make, [parameter.detach() for parameter in parameters], 0)
    other.load_state_dict(optimizer.state_dict())
    resumed = [(others, other), copy.deepcopy((parameters, optimizer))]
    for one_parameters, one in ((parameters, optimizer), *resumed):
        give_gradients(one_parameters, 7)
        one.step()
    for its_parameters, its_optimizer in resumed:
        torch.testing.assert_close(its_parameters, parameters, rtol=0, atol=0)
        states = (list(of_optimizer.state.values()) for of_optimizer in (its_optimizer, optimizer))
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_updates_in_the_backward_pass(device):
    """Bit for bit those of step(), with the gradients of one group at a time; the rest is left to step()."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4, device=device) for _ in range(4)])
    unused = torch.nn.Parameter(torch.ones(2, device=device))
    same = copy.deepcopy(layers)
    # The last group is never complete.
    groups = [list(layers[1].parameters()), list(layers[2].parameters()), [*layers[3].parameters(), unused]]
    optimizer = AdamW([*layers.parameters(), unused], lr=0.1, state_dtype="bf16")
    expected = AdamW(same.parameters(), lr=0.1, state_dtype="bf16")
    left = []
    layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: left.append([layer.weight.grad is not None for layer in layers])
    )

    def train(steps):
        for x in torch.randn(steps, 3, 4, device=device):
            layers(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            same(x).square().sum().backward()
            expected.step()
            expected.zero_grad()

    end = optimizer.update_in_backward(groups)
    train(3)
    assert left == [[True, False, False, True]] * 3
    end()
    train(1)
    assert left[3:] == [[True] * 4]
    for parameter, other in zip(layers.parameters(), same.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], expected.state[other]["exp_avg_sq"])
    assert unused not in optimizer.state


def test_updates_in_the_backward_pass_keep_nothing_alive(device):
    layer = torch.nn.Linear(4, 4, device=device)
    optimizer = AdamW(layer.parameters())
    optimizer.update_in_backward([list(layer.parameters())])
    layer(torch.ones(2, 4, device=device)).sum().backward()
    freed = weakref.ref(layer.weight), weakref.ref(optimizer)
    del layer, optimizer
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


def test_closure_and_steps_without_gradients(device):
    (parameter,) = parameters_of(make_tensors([(3,)], device=device))
    optimizer = AdamW([parameter])
    assert optimizer.step() is None
    assert not optimizer.state

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "split"])
def test_in_a_cuda_graph(state_dtype):
    """Gradients are made inside the graph, where they have other addresses than before."""
    dtype = torch.float32 if state_dtype == "fp32" else torch.bfloat16
    tensors = make_tensors([(300, 20), (70,)], dtype, "cuda")
    inputs = make_tensors([(20, 300)] * 6, dtype, "cuda", seed=1)

    def make():
        parameters = parameters_of(tensors)
        rate = torch.tensor(1e-2, device="cuda")
        return parameters, rate, AdamW(parameters, lr=rate, max_grad_norm=0.3, state_dtype=state_dtype)

    def train(parameters, optimizer, x):
        optimizer.zero_grad()
        ((x @ parameters[0]).square().mean() + parameters[1].square().sum()).backward()
        optimizer.step()

    eager_parameters, eager_rate, eager = make()
    parameters, rate, optimizer = make()
    x = inputs[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(parameters, optimizer, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(parameters, optimizer, x)
    for step, values in enumerate(inputs):
        for one in (rate, eager_rate):
            one.fill_(1e-2 / (step + 1))
        train(eager_parameters, eager, values)
        if step == 0:
            continue  # taken before the capture
        x.copy_(values)
        # The fourth is taken outside of the graph.
        train(parameters, optimizer, x) if step == 3 else graph.replay()
        for parameter, expected in zip(parameters, eager_parameters, strict=True):
            assert torch.equal(parameter, expected), step
    torch.testing.assert_close(optimizer.grad_norm, eager.grad_norm)


@pytest.mark.gpu
def test_first_step_cannot_be_captured():
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    parameter.grad = torch.ones(4, device="cuda")
    with (
        pytest.raises(RuntimeError, match="take a step before one is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        AdamW([parameter]).step()


@pytest.mark.gpu
def test_more_than_2_31_elements():
    parameter = torch.nn.Parameter(torch.zeros(2**31 + 100, dtype=torch.bfloat16, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    AdamW([parameter], lr=0.5, weight_decay=0.0, state_dtype="bf16").step()
    for part in parameter.detach().split(2**28):
        assert (part == -0.5).all()
