"""The C++ of native_call on the CPU: it launches "kernels" of this file, through a function in the driver's place."""

import ctypes
import gc
import inspect
import itertools
import os
import shutil
import signal
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.backends.nvidia import driver as triton_driver

from cs336sys.kernels.attention import flash_attention, native_call, native_probe
from cs336sys.kernels.attention.plan import Descriptors, Scratch

SHAPE = (2, 3, 8, 16)
# As the attention kernels': the tests' plans are for the fifth.
ALL_OPTIONS = tuple(itertools.product((False, True), ("tf32x3", "ieee"), (False, True), ("auto", "triton")))
OPTIONS = 5


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of whose value, 64 bytes, the first number is read."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(LaunchConfig), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint32)] * 2,
    *[ctypes.c_int] * 4,
)


def floats_at(parameter: int, count: int) -> torch.Tensor:
    """The memory whose address a launch was given, as (count,) float32 that can be written."""
    address = ctypes.cast(parameter, ctypes.POINTER(ctypes.c_uint64))[0]
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Driver:
    """In the place of the CUDA driver: ``kernels`` by their number are called with the parameters' addresses."""

    def __init__(self):
        self.kernels = {}
        self.launches = []  # (grid, threads, shared bytes, stream)
        self.attributes = []  # of each launch, (number, value)
        self.encoded = []  # what each TMA descriptor was made of
        self.error = 0
        self._launch, self._encode = _LAUNCH(self.launch), _ENCODE(self.encode)

    def addresses(self) -> tuple[int, int]:
        return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in (self._launch, self._encode))

    def launch(self, pointer, function, parameters, _) -> int:
        config = pointer.contents
        self.launches.append((tuple(config.grid), tuple(config.threads), config.shared_bytes, config.stream))
        attributes = config.attributes[: config.num_attributes]
        self.attributes.append([(attribute.id, attribute.value[0]) for attribute in attributes])
        if not self.error:
            self.kernels[function](parameters)
        return self.error

    def encode(self, descriptor, dtype, rank, address, shape, strides, box, element_strides, *modes) -> int:
        self.encoded.append(
            (dtype, address, shape[:rank], strides[: rank - 1], box[:rank], element_strides[:rank], modes)
        )
        ctypes.memset(descriptor, len(self.encoded), 128)
        return self.error


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A copy, so that what these tests set is not set for attention on a GPU."""
    if native_call.compiler() is None:
        pytest.skip("no C++ compiler")
    native_call.Library().wait()
    copy = shutil.copy(native_call.library_path(), tmp_path_factory.mktemp("native"))
    module = native_call.import_from(copy, package="tests")
    assert module is not native_call.import_from(str(native_call.library_path()))
    return module


@pytest.fixture
def driver(native):
    driver = Driver()
    native.use_driver(*driver.addresses())
    return driver


def inputs(**options) -> list[torch.Tensor]:
    return [torch.randn(SHAPE, requires_grad=True, **options) for _ in range(3)]


COUNT = torch.Size(SHAPE).numel()


def write_out(parameters) -> None:
    """Out = 2 q + 3 k - v and a logsumexp of ones: no attention, but every tensor counts."""
    query, key, value, out = (floats_at(parameters[i], COUNT) for i in range(4))
    out.copy_(2 * query + 3 * key - value)
    floats_at(parameters[4], COUNT // SHAPE[-1]).fill_(1)


def write_gradients(parameters) -> None:
    """Right only if the forward's results, and the output's gradient, are in their slots."""
    query, key, value, out = (floats_at(parameters[i], COUNT) for i in range(4))
    grad_out, *grads = (floats_at(parameters[i], COUNT) for i in (5, 6, 7, 8))
    logsumexp = floats_at(parameters[4], COUNT // SHAPE[-1])
    assert torch.equal(out, 2 * query + 3 * key - value)
    for grad, factor in zip(grads, (2, 3, -1), strict=True):
        grad.copy_(factor * grad_out * logsumexp.repeat_interleave(SHAPE[-1]))


def plan_of_forward(native):
    results = [native.Layout(shape, torch.empty(shape).stride(), torch.float32) for shape in (SHAPE, SHAPE[:-1])]
    return native.Plan(results, [], [native.Launch(1, 7, 128, 0, False, list(range(5)))])


@pytest.fixture
def known(native, driver):
    """The module with a plan for float32 inputs of SHAPE, forward and backward, under OPTIONS."""
    tensors = [tensor.detach() for tensor in inputs()]
    driver.kernels |= {1: write_out, 2: write_gradients}
    native.add_forward(tensors, OPTIONS, plan_of_forward(native))
    launch = native.Launch(2, 9, 256, 1000, True, list(range(9)))
    given = [*tensors, tensors[0], torch.empty(SHAPE[:-1]), tensors[0]]
    grads = [native.Layout(one.shape, one.stride(), one.dtype) for one in tensors]
    native.add_backward(given, OPTIONS, native.Plan(grads, [], [launch]))
    native.use_options(ALL_OPTIONS)
    return native


def expected_gradients(grad_out: torch.Tensor) -> list[torch.Tensor]:
    return [2 * grad_out, 3 * grad_out, -grad_out]


def test_a_known_call_launches_forward_and_backward(known, driver):
    query, key, value = tensors = inputs()
    out = known.attend(*tensors, OPTIONS)
    torch.testing.assert_close(out, 2 * query + 3 * key - value)
    assert "FlashAttentionTriton" in out.grad_fn.name()
    grad_out = torch.randn(SHAPE)
    torch.testing.assert_close(list(torch.autograd.grad(out, tensors, grad_out)), expected_gradients(grad_out))
    assert driver.launches == [((7, 1, 1), (128, 1, 1), 0, None), ((9, 1, 1), (256, 1, 1), 1000, None)]
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, of the launch that may begin early.
    assert driver.attributes == [[], [(6, 1)]]


def test_only_what_is_needed_is_differentiated(known, driver):
    query, key, value = (tensor.detach() for tensor in inputs())
    assert known.attend(query, key, value, OPTIONS).grad_fn is None
    with torch.no_grad():
        assert known.attend(query, key, value.requires_grad_(), OPTIONS).grad_fn is None
    out = known.attend(query, key, value, OPTIONS)
    out.backward(torch.ones(SHAPE))
    torch.testing.assert_close(value.grad, -torch.ones(SHAPE))
    assert query.grad is None


class Subclass(torch.Tensor):
    pass


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(COUNT + 1)[1:].view(SHAPE).copy_(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor[:, :, :7],
        lambda tensor: tensor.mT.contiguous().mT,
        lambda tensor: tensor.bfloat16(),
        lambda tensor: tensor[None],
        lambda tensor: tensor.to("meta"),
        lambda tensor: tensor.as_subclass(Subclass),
        lambda tensor: torch._neg_view(tensor),
        misaligned,
        lambda tensor: None,
    ],
    ids=["shape", "strides", "dtype", "dim", "device", "subclass", "negated", "alignment", "none"],
)
def test_other_tensors_are_left_to_python(known, driver, change):
    tensors = [tensor.detach() for tensor in inputs()]
    for index in range(3):
        changed = [change(tensor) if position == index else tensor for position, tensor in enumerate(tensors)]
        assert known.attend(*changed, OPTIONS) is None
    assert known.attend(*tensors, OPTIONS + 1) is None
    assert not driver.launches


def test_forgotten_plans_are_unknown(known):
    tensors = inputs()
    known.forget_plans()
    assert known.attend(*tensors, OPTIONS) is None
    assert known.backward([*tensors, tensors[0], torch.empty(SHAPE[:-1]), tensors[0]], OPTIONS) is None


def test_threads_do_not_mix_their_tensors(known):
    """Python goes on during a launch, and another thread may launch the same kernel."""

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            query, key, value = tensors = [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(3)]
            out = known.attend(*tensors, OPTIONS)
            assert torch.equal(out, 2 * query + 3 * key - value)
            grad_out = torch.randn(SHAPE, generator=generator)
            grads = torch.autograd.grad(out, tensors, grad_out)
            assert all(map(torch.equal, grads, expected_gradients(grad_out)))

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(train, range(4)):
            pass


def test_modes_and_transforms_see_python(known, driver):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    tensors = [tensor.detach() for tensor in inputs()]
    with Mode():
        assert known.attend(*tensors, OPTIONS) is None
    stacked = torch.stack([tensors[0]] * 2)
    seen = []
    torch.func.vmap(lambda query: (seen.append(known.attend(query, *tensors[1:], OPTIONS)), query)[1])(stacked)
    assert seen == [None]
    assert not driver.launches


def python_backward(known, compute):
    """Tensors, the output and a gradient of strides that no plan is for, so that ``compute`` is called for its pass."""
    known.use_python(unexpected, unexpected, compute)
    tensors = inputs()
    return tensors, known.attend(*tensors, OPTIONS), torch.randn(SHAPE).mT.contiguous().mT


def test_python_computes_an_unknown_backward(known):
    calls = []

    def compute(*arguments):
        calls.append(arguments)
        return [torch.full(SHAPE, factor) for factor in (1.0, 2.0, 3.0)]

    tensors, out, grad_out = python_backward(known, compute)
    grads = torch.autograd.grad(out, tensors, grad_out)
    assert [grad.mean().item() for grad in grads] == [1, 2, 3]
    ((*given, given_grad), options) = calls[0][:6], calls[0][6:]
    assert all(map(torch.equal, given, (*tensors, out, torch.ones(SHAPE[:-1]))))
    assert given_grad is grad_out
    assert options == (*ALL_OPTIONS[OPTIONS], None, None, False)


def test_a_window_has_plans_of_its_own_and_reaches_python(known):
    """Its number is that of the other options with their count added for each key."""
    tensors, number, seen = inputs(), OPTIONS + 7 * len(ALL_OPTIONS), []
    assert known.attend(*tensors, number) is None
    known.add_forward([tensor.detach() for tensor in tensors], number, plan_of_forward(known))
    compute = lambda *arguments: (seen.append(arguments[6:]), [torch.zeros(SHAPE)] * 3)[1]  # noqa: E731
    known.use_python(unexpected, unexpected, compute)
    torch.autograd.grad(known.attend(*tensors, number).sum(), tensors)
    assert seen == [(*ALL_OPTIONS[OPTIONS], 7, None, False)]


def unexpected(*arguments):
    raise AssertionError("Python was called")


def test_a_call_of_python_keeps_no_tensor(known):
    tensors, out, grad_out = python_backward(known, lambda *_: [torch.zeros(SHAPE)] * 3)
    held = sys.getrefcount(grad_out)
    torch.autograd.grad(out, tensors, grad_out)
    assert sys.getrefcount(grad_out) == held


def test_deterministic_algorithms_need_a_plan_of_their_own(known):
    tensors, out, _ = python_backward(known, lambda *_: [torch.zeros(SHAPE)] * 3)
    torch.use_deterministic_algorithms(True)
    try:
        assert not any(grad.any() for grad in torch.autograd.grad(out, tensors, torch.ones(SHAPE)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_error_in_python_keeps_its_type(known):
    def compute(*arguments):
        raise LookupError("no plan")

    _, out, grad_out = python_backward(known, compute)
    with pytest.raises(LookupError, match="no plan"):
        out.backward(grad_out)


def test_it_is_differentiable_once(known):
    tensors = inputs()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(known.attend(*tensors, OPTIONS).sum(), tensors, create_graph=True)


def test_autograd_guards_what_was_saved(known):
    query, key, value = inputs()
    doubled = query * 2
    other = known.attend(doubled, key, value, OPTIONS)
    doubled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


def test_saved_tensor_hooks_and_checkpointing(known, driver):
    tensors, grad_out = inputs(), torch.randn(SHAPE)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (packed.append(one.shape), one.clone())[1], torch.clone):
        out = known.attend(*tensors, OPTIONS)
    assert sorted(packed) == sorted([torch.Size(SHAPE)] * 4 + [torch.Size(SHAPE[:-1])])
    torch.testing.assert_close(list(torch.autograd.grad(out, tensors, grad_out)), expected_gradients(grad_out))
    driver.launches.clear()
    out = checkpoint(lambda *given: known.attend(*given, OPTIONS), *tensors, use_reentrant=False)
    torch.testing.assert_close(list(torch.autograd.grad(out, tensors, grad_out)), expected_gradients(grad_out))
    assert len(driver.launches) == 3


@pytest.fixture(scope="module")
def operators(native):
    """Operators as the attention kernels', of a library of their own, that the C++ computes on the CPU."""
    library = torch.library.Library("cs336sys_test", "DEF")
    for name in ("flash_attention_forward", "flash_attention_backward"):
        library.define(str(getattr(torch.ops.cs336sys, name).default._schema).removeprefix("cs336sys::"))
        library.impl(name, unexpected, "CompositeExplicitAutograd")
    native.register_operators("cs336sys_test", "cpu")
    yield torch.ops.cs336sys_test
    library._destroy()


def test_operators_compute_by_plans_and_else_in_python(known, operators, driver):
    tensors = [tensor.detach() for tensor in inputs()]
    query, key, value = tensors
    out, logsumexp = operators.flash_attention_forward(*tensors, *ALL_OPTIONS[OPTIONS])
    torch.testing.assert_close(out, 2 * query + 3 * key - value)
    assert torch.equal(logsumexp, torch.ones(SHAPE[:-1]))
    grad_out = torch.randn(SHAPE)
    grads = operators.flash_attention_backward(*tensors, out, logsumexp, grad_out, *ALL_OPTIONS[OPTIONS])
    torch.testing.assert_close(list(grads), expected_gradients(grad_out))
    assert len(driver.launches) == 2

    calls = []

    def python(number):
        return lambda *arguments: (calls.append((number, arguments)), [torch.full((1,), number)] * number)[1]

    known.use_python(python(2), python(3), unexpected)
    plain = ALL_OPTIONS[OPTIONS]
    unknown = [(*ALL_OPTIONS[OPTIONS + 1], None), (True, "tf16", False, "auto", None), (*plain, 9), (*plain, 0)]
    for options in (*((*one, None, False) for one in unknown), (*plain, None, 0.5, False), (*plain, None, None, True)):
        assert [one.item() for one in operators.flash_attention_forward(*tensors, *options)] == [2, 2]
        arguments = *tensors, out, logsumexp, grad_out, *options
        assert [one.item() for one in operators.flash_attention_backward(*arguments)] == [3, 3, 3]
        (two, of_forward), (three, of_backward) = calls
        assert (two, of_forward[3:]) == (2, options)
        assert (three, of_backward[6:]) == (3, options)
        assert all(one is other for one, other in zip(of_backward, arguments[:6], strict=False))
        calls.clear()
    assert len(driver.launches) == 2


def test_a_failing_launch_is_an_error(known, driver):
    driver.error = 719
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with error 719"):
        known.attend(*inputs(), OPTIONS)


def test_own_tensors_and_numbers(native, driver):
    """Scratch memory is there for the call, constants are given as they are, numbers lie in memory as packed."""
    tensors = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(3)]
    constant, seen = torch.arange(4.0), {}

    def first(parameters):
        floats_at(parameters[0], 6).copy_(torch.arange(6.0))
        seen["numbers"] = struct.unpack("<if", ctypes.string_at(parameters[2], 4) + ctypes.string_at(parameters[3], 4))

    def second(parameters):
        seen["scratch"], seen["constant"] = floats_at(parameters[0], 6).clone(), floats_at(parameters[1], 4).clone()
        floats_at(parameters[2], 5).fill_(3)

    driver.kernels |= {3: first, 4: second}
    launches = [
        native.Launch(3, 1, 32, 0, False, [5, 6, struct.pack("<i", -7), struct.pack("<f", 0.5)]),
        native.Launch(4, 1, 32, 0, False, [5, 6, 3]),
    ]
    results = [native.Layout((5,), (1,), torch.float32), native.Layout((3, 2), (1, 4), torch.bfloat16)]
    own = [native.Layout((2, 3), (3, 1), torch.float32), constant]
    native.add_forward(tensors, 0, native.Plan(results, own, launches))
    result, other = native.forward(tensors, 0)
    assert seen["numbers"] == (-7, 0.5)
    assert torch.equal(seen["scratch"], torch.arange(6.0))
    assert torch.equal(seen["constant"], constant)
    assert torch.equal(result, torch.full((5,), 3.0))
    assert (other.shape, other.stride(), other.dtype) == ((3, 2), (1, 4), torch.bfloat16)


def test_descriptors_are_encoded_once_for_an_address(native, driver):
    seen = []
    driver.kernels[6] = lambda parameters: seen.append(ctypes.string_at(parameters[0], 128))
    descriptor = native.Descriptor(1, 9, 3, 2, [1, 1, 64, 32], [2, 3, 100, 64], [19200, 6400, 64, 1])
    results = [native.Layout((1,), (1,), torch.float32)]
    tensors = [[torch.randn(SHAPE, dtype=torch.float16) for _ in range(3)] for _ in range(2)]
    native.add_forward(tensors[0], 0, native.Plan(results, [], [native.Launch(6, 1, 32, 0, False, [descriptor])]))
    for which in (0, 1, 0, 1):
        native.forward(tensors[which], 0)
    assert [bytes_of[0] for bytes_of in seen] == [1, 2, 1, 2]
    addresses = [given[1].data_ptr() for given in tensors]
    # Innermost dimension first; the stride of its elements is not said; bytes; no interleave, swizzle 3, L2, zero fill.
    rest = [64, 100, 3, 2], [128, 12800, 38400], [32, 64, 1, 1], [1] * 4, (0, 3, 2, 0)
    assert driver.encoded == [(9, address, *rest) for address in addresses]
    driver.error = 1
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed with error 1"):
        native.forward([torch.randn(SHAPE, dtype=torch.float16) for _ in range(3)], 0)


PTX = """
.visible .entry scale(
	.param .u64 .ptr .global .align 16 scale_param_0,
	.param .u64 .ptr .global .align 16 scale_param_1,
	.param .u32 scale_param_2,
	.param .u64 .ptr .global .align 1 scale_param_3,
	.param .u64 .ptr .global .align 1 scale_param_4
)
.reqntid 256
{
	ld.param.b64 	%rd5, [scale_param_4];
}
"""


def pretend_launch():
    """A launch of two tensors and a number, compiled by Triton."""
    metadata = SimpleNamespace(
        num_warps=8,
        shared=4096,
        tensordesc_meta=(),
        num_ctas=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
        global_scratch_size=0,
        profile_scratch_size=0,
    )
    signature = {"query": "*fp32", "out": "*fp32", "count": "i32"}
    source = SimpleNamespace(signature=signature)
    compiled = SimpleNamespace(function=99, metadata=metadata, src=source, asm={"ptx": PTX})
    return SimpleNamespace(compiled=compiled, arguments=(6,), descriptors=(), num_programs=11)


ONE_MORE = PTX.replace("_param_4\n", "_param_4,\n\t.param .align 64 .b8 scale_param_5[128]\n")


@pytest.mark.parametrize(
    ("metadata", "ptx", "signature", "reason"),
    [
        ({"num_ctas": 2}, PTX, {}, "num_ctas 2"),
        ({"launch_cooperative_grid": True}, PTX, {}, "launch_cooperative_grid True"),
        ({"global_scratch_size": 8}, PTX, {}, "global_scratch_size 8"),
        ({"profile_scratch_size": 8}, PTX, {}, "profile_scratch_size 8"),
        ({"shared": 229 * 1024}, PTX, {}, "takes 234496 bytes of shared memory"),
        ({"tensordesc_meta": [{"fp4_padded": True}]}, PTX, {}, "of the kind fp4_padded"),
        ({"tensordesc_meta": [{"fp4_padded": False, "is_im2col": True}]}, PTX, {}, "of the kind is_im2col"),
        ({}, PTX.replace(".u32", ".u64"), {}, r"of \[8, 8, 8, 8, 8\] bytes, expected were \[8, 8, 4, 8, 8\]"),
        ({}, ONE_MORE, {}, r"of \[8, 8, 4, 8, 8, 128\] bytes"),
        ({}, "", {}, r"of \[\] bytes"),
        ({}, PTX, {"count": "i1"}, "a number of the kind i1"),
        ({}, PTX, {"count": "tensordesc<bf16[1,64]>"}, "takes TMA descriptors apart"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_launches_of_another_kind_are_refused(metadata, ptx, signature, reason):
    launch = pretend_launch()
    vars(launch.compiled.metadata).update(metadata)
    launch.compiled.asm["ptx"] = ptx
    launch.compiled.src.signature |= signature
    with pytest.raises(native_call.UnknownLaunchError, match=reason):
        native_call.translate_launch(None, launch, (0, 1))


def test_descriptors_are_encoded_as_by_tritons_own_launcher(monkeypatch):
    """Of the Triton that is installed, whose launcher asks its driver module for the same descriptor.

    Parameters are in the order of the signature: constants and what Triton made one are left out, two pointers added.
    """
    encoded = []
    fill = lambda *arguments: encoded.append(arguments)  # noqa: E731
    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    tensor = torch.empty(10, 64, dtype=torch.bfloat16)
    about = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
    descriptors = Descriptors((10, 64), (64, 1), [1, 64])
    make = triton_driver.make_tensordesc_arg
    arguments = [descriptors.describe(tensor), about, None][: len(inspect.signature(make).parameters)]
    _, *shape_and_strides = make(*arguments)
    ((address, swizzle, element_bytes, dtype, box, shape, strides, *padding),) = encoded
    assert address == tensor.data_ptr()
    assert not any(padding)

    kinds = "tensordesc<bf16[1,64]>", "*bf16", ("i32", "constexpr", "i64"), "fp32", "constexpr"
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=dict(enumerate(kinds))), metadata=SimpleNamespace(tensordesc_meta=[about])
    )
    module = SimpleNamespace(Descriptor=lambda *arguments: arguments)
    arguments = 4, 2, (640, 1, 2**40), 0.25, True
    descriptor, *others = native_call._launch_parameters(module, compiled, arguments, [descriptors])
    assert descriptor == (4, dtype, swizzle, element_bytes, box, shape, strides)
    sizes = [struct.pack(kind, size) for kind, size in zip(["<i", "<i", "<q", "<q"], shape_and_strides, strict=True)]
    packed = [struct.pack("<i", 640), struct.pack("<q", 2**40), struct.pack("<f", 0.25), bytes(8), bytes(8)]
    assert others == [*sizes, 2, *packed]


def test_translation_of_a_plan():
    module = SimpleNamespace(Layout=lambda *one: one, Launch=lambda *one: one, Plan=lambda *one: one)
    launch = pretend_launch()
    constant = torch.ones(2)
    layouts = [((4, 4), (4, 1), torch.float32)]
    plan = SimpleNamespace(steps=[(launch, (0, 3))], additions=[Scratch((5, 6)), constant], result_layouts=layouts)
    results, (scratch, one), launches = native_call.translate(module, plan)
    assert results == layouts
    assert scratch == ((5, 6), (6, 1), torch.float32)
    assert one is constant
    assert launches == [(99, 11, 256, 4096, False, [0, 3, struct.pack("<i", 6), bytes(8), bytes(8)])]
    launch.compiled.metadata.launch_cooperative_grid = True
    with pytest.warns(UserWarning, match="triton .*: a kernel has launch_cooperative_grid True"):
        assert native_call.translate(module, plan) is None


@pytest.fixture
def library(monkeypatch, tmp_path):
    """One whose "compiler" copies a text, after a while if CXX says so, into a cache that is empty."""
    monkeypatch.setattr(native_call, "KNOWN_TRITON", True)
    monkeypatch.setattr(native_call, "compiler", lambda: "sh")
    monkeypatch.setattr(native_call, "library_path", lambda: tmp_path / "cache" / "native.so")
    return native_call.Library()


def compile_by(monkeypatch, script: str) -> None:
    """By a script that is given ``-o FILE``."""
    monkeypatch.setattr(native_call, "_build_command", lambda: ["sh", "-c", script, "compiler"])


def load(library):
    return library.load(print, print, print, ())


def test_calls_go_on_while_it_is_compiled(library, monkeypatch, tmp_path, capsys, recwarn):
    compile_by(monkeypatch, f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo library > $2")
    assert load(library) is None
    assert load(library) is None
    assert os.getsid(library._build.pid) != os.getsid(0)  # it does not end with this process
    other = native_call.Library()
    other.start()  # as another rank
    assert not native_call.library_path().exists()
    (tmp_path / "go").touch()
    library.wait()
    other.wait()
    assert native_call.library_path().read_text() == "library\n"
    assert capsys.readouterr().err.count("cs336sys: first attention on this machine: compiling its kernels") == 1
    assert not list(tmp_path.glob("cache/*.part"))
    imported = []
    monkeypatch.setattr(native_call, "import_from", lambda path: imported.append(path) or failing_import())
    assert load(library) is None
    assert imported == [str(native_call.library_path())]
    assert len(of_ours(recwarn)) == 1


def of_ours(warned):
    """Those about the attention kernels: a garbage collection may end in others at any moment."""
    return [warning for warning in warned if "calls of the attention kernels" in str(warning.message)]


def failing_import():
    raise ImportError("undefined symbol: x")


def test_a_killed_compilation_leaves_nothing_in_the_way(library, monkeypatch, tmp_path):
    compile_by(monkeypatch, f"echo half > $2; touch {tmp_path}/begun; sleep 60")
    library.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    os.killpg(library._build.pid, signal.SIGKILL)
    library.wait()
    assert not native_call.library_path().exists()
    compile_by(monkeypatch, "echo whole > $2")
    another = native_call.Library()
    another.wait()
    assert native_call.library_path().read_text() == "whole\n"
    assert not list(tmp_path.glob("cache/*.part"))


def test_the_library_stays_where_it_is(monkeypatch, tmp_path):
    """torch.compile's inductor sets this variable to a folder of its own."""
    before = native_call.library_path()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert native_call.library_path() == before


def test_a_failing_compiler_is_named_once(library, monkeypatch, recwarn):
    compile_by(monkeypatch, "echo 'native_call.cpp:1: error: unknown' >&2; echo more >&2; exit 1")
    library.wait()
    assert load(library) is None
    assert load(library) is None
    (warning,) = of_ours(recwarn)
    assert str(warning.message).endswith(
        "take the longer way through Python: the C++ compiler failed: native_call.cpp:1: error: unknown"
    )


def test_calls_go_through_python_after_a_warning_unless_triton_is_of_another_version(library, monkeypatch, recwarn):
    monkeypatch.setattr(native_call, "compiler", lambda: None)
    assert load(library) is None
    assert load(library) is None
    monkeypatch.setattr(native_call, "KNOWN_TRITON", False)
    assert load(native_call.Library()) is None
    (warning,) = of_ours(recwarn)
    assert str(warning.message).endswith("through Python: there is no C++ compiler: install g++ or set CXX")


def test_the_probe_names_what_is_off_and_its_fix(monkeypatch, tmp_path):
    monkeypatch.setattr(native_call, "KNOWN_TRITON", True)
    monkeypatch.setattr(native_call, "compiler", lambda: None)
    missing = "through Python: there is no C++ compiler: install g++ or set CXX"
    assert native_probe.calls_and_fix() == (missing, "`apt-get install g++`, or set CXX.")
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "6.4")  # No compiler would help.
        assert native_probe.calls_and_fix()[1] is None
    monkeypatch.setattr(native_call, "compiler", lambda: "g++")
    broken = tmp_path / "native_call.so"
    monkeypatch.setattr(native_call, "library_path", lambda: broken)
    assert native_probe.calls_and_fix() == ("in C++, which g++ compiles in the background at the first call", None)
    broken.write_bytes(b"no library")
    found, fix = native_probe.calls_and_fix()
    assert found.startswith("through Python: ")
    assert fix == f"Have it compiled again: `rm {broken}`."
    monkeypatch.setattr(native_call, "import_from", lambda path: None)
    assert native_probe.calls_and_fix() == ("in C++, compiled by g++", None)
    monkeypatch.setattr(native_call, "KNOWN_TRITON", False)
    assert native_probe.calls_and_fix() == (
        f"through Python: triton {triton.__version__} may launch kernels in another way than 3.6, 3.7, 3.8, 3.9, the "
        "versions that the C++ supports",
        '`python -m pip install "triton==3.9.*"`, if this torch allows it.',
    )


# Two programs sharing keys, one launch backward, passes after a preparation, split sums, many heads, the Hopper
# kernels' ranges.
GPU_SHAPES = [
    (1, 1, 2048, 64),
    (1, 1, 256, 32),
    (2, 4, 1024, 128),
    (1, 1, 4096, 16),
    (4, 16, 2048, 64),
    (1, 8, 8192, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "hopper", "auto"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_gpu_later_calls_equal_the_first(shape, implementation):
    if not native_call.KNOWN_TRITON:
        pytest.skip("this version of Triton is left alone")
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    names = []
    for seed in range(6):
        # New data, and then the same at other addresses, by and by those of tensors that are gone.
        torch.manual_seed(seed // 2)
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        grad_out = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        out = flash_attention(*tensors, True, implementation=implementation)
        names.append(out.grad_fn.name())
        actual = out, *torch.autograd.grad(out, tensors, grad_out)
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        expected = expected, *torch.autograd.grad(expected, tensors, grad_out)
        for one, other in zip(actual, expected, strict=True):
            assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()
    assert all("CppNode" in name for name in names[1:])


@pytest.fixture(scope="module", autouse=True)
def compiled_before_the_gpu_tests():
    """What is checked there is the C++, not the way around it."""
    if torch.cuda.is_available():
        native_call.library.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gpu_memory_is_given_back(dtype):
    """Scratch memory and gradients of a call are free after it, and no plan keeps a tensor of the user's."""
    tensors = [torch.randn(2, 4, 1000, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        flash_attention(*tensors, True).sum().backward()
    for tensor in tensors:
        tensor.grad = None
    del tensor
    held = settled_memory()
    for _ in range(3):
        torch.autograd.grad(flash_attention(*tensors, True).sum(), tensors)
        assert settled_memory() == held
    size = tensors[0].nbytes
    del tensors
    assert held - settled_memory() >= 3 * size


def settled_memory() -> int:
    """Bytes allocated, once autograd's thread has let go of what it returned, which may be a moment later."""
    torch.cuda.synchronize()
    time.sleep(0.2)
    gc.collect()
    return torch.cuda.memory_allocated()
