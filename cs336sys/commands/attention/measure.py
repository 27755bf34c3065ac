"""Checks attention implementations against a float64 reference and times them: the cells of ``flash`` and ``attn``."""

import contextlib
import functools
import importlib
import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336sys.accounting.hardware import least_ms
from cs336sys.accounting.memory import GIB
from cs336sys.commands.own_kernels import PARTS, OddCase, check_odd, counted, measure_users_function, time_parts
from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.kernels.attention import flash_attention, wait_until_compiled
from cs336sys.kernels.attention.reference import plain_attention
from cs336sys.machine.device import DTYPES, choose_device, peak_memory_gib, reset_peak_memory
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.operations import FLASH_ATTENTION_4, AttentionWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES
from cs336sys.settings.user_code import is_user_code
from cs336sys.timing.checked import KernelTimer
from cs336sys.timing.phases import time_calls, time_phases
from cs336sys.timing.relative_error import Errors, judged, relative_errors
from cs336sys.training.model import model_attention
from cs336sys.training.user_models import load

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Inputs(NamedTuple):
    """Query, key and value that require gradients, and the output's gradient: (batch, heads, context, head_dim).

    Key and value may have fewer heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def random_inputs(workload: AttentionWorkload, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(workload.seed)
    tensors = [
        torch.randn(
            (workload.batch_size, heads, workload.context, workload.head_dim),
            generator=generator,
            device=device,
            dtype=DTYPES[workload.dtype],
        )
        for heads in (workload.heads, workload.key_heads, workload.key_heads, workload.heads)
    ]
    if workload.implementation in FLASH_ATTENTION_4:
        # As it wants them in memory, and as a model that uses it would have them.
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    return Inputs(*tensors)


FA4_MODULE = "flash_attn.cute.interface"
_DTYPES = ("bf16", "fp16")


def flash_attention_4(workload: AttentionWorkload, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``flash_attn_func`` of the package ``flash-attn-4``, on (batch, heads, context, head_dim).

    It takes (batch, context, heads, head_dim) of any strides but the last, so it is given views, and nothing is copied.

    Raises:
        CapabilityError: the package is not installed or does not load, or the device or dtype is not one of its.
    """
    name = workload.implementation
    if device.type != "cuda":
        raise CapabilityError(f"implementation '{name}' needs a CUDA GPU")
    if workload.dtype not in _DTYPES:
        raise CapabilityError(f"implementation '{name}' takes {' and '.join(_DTYPES)}, got {workload.dtype}")
    try:
        function = importlib.import_module(FA4_MODULE).flash_attn_func
    except ModuleNotFoundError as error:
        raise CapabilityError(
            f"implementation '{name}' needs the package flash-attn-4, which is not there: "
            f"no module named {error.name!r}"
        ) from error
    except Exception as error:  # its imports load compilers and drivers, which fail in their own ways
        raise CapabilityError(f"implementation '{name}': the package flash-attn-4 does not load: {error}") from error
    options: dict[str, Any] = {"causal": workload.causal, "deterministic": name == "fa4-deterministic"}
    if workload.window is not None:
        # How many keys to the left and to the right of the query's own.
        options |= {"causal": False, "window_size": (workload.window - 1, 0)}
    return functools.partial(_transposed, functools.partial(function, **options))


def _transposed(function: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


_SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@contextlib.contextmanager
def implementation(workload: AttentionWorkload, device: torch.device):
    """The workload's implementation as a function of query, key and value.

    What an implementation needs once (a backend choice, a compiled function, a block mask) is done on entry, so that it
    is not timed with every call. A compiled backward pass may be repeated on one graph: it keeps its saved tensors
    instead of writing its results into them.

    Raises:
        CapabilityError: this machine does not have it, or it has no window; some say so only when they are called.
    """
    name = workload.implementation
    if name in _SDPA_BACKENDS:
        if workload.window is not None:
            raise CapabilityError(f"implementation '{name}' has no sliding window: choose flex or fa4")
        with sdpa_kernel(_SDPA_BACKENDS[name]):
            grouped = workload.key_heads != workload.heads
            yield functools.partial(F.scaled_dot_product_attention, is_causal=workload.causal, enable_gqa=grouped)
    elif name in ("compiled", "flex"):
        with torch._functorch.config.patch(donated_buffer=False):
            compiled = functools.partial(torch.compile(plain_attention, dynamic=False), **_causal_mask(workload))
            yield _flex(workload, device) if name == "flex" else compiled
    elif name == "model":
        yield functools.partial(model_attention, is_causal=workload.causal)
    elif name == "eager":
        yield functools.partial(plain_attention, **_causal_mask(workload))
    elif name in FLASH_ATTENTION_4:
        yield flash_attention_4(workload, device)
    else:
        wait_until_compiled()
        chosen = {"deterministic": True} if name == "deterministic" else {"implementation": name}
        yield functools.partial(flash_attention, **_causal_mask(workload), **chosen)


def _causal_mask(workload: AttentionWorkload) -> dict[str, Any]:
    return {"is_causal": workload.causal} | ({} if workload.window is None else {"window": workload.window})


def _flex(workload: AttentionWorkload, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type != "cuda":
        raise CapabilityError("implementation 'flex' needs a CUDA GPU: its backward pass does not run on a CPU")
    mask, context, window = None, workload.context, workload.window
    if workload.causal:

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Without a window what torch's own examples compile, as one comparison.
            return query >= key if window is None else (query >= key) & (query - key < window)

        mask = create_block_mask(sees, None, None, context, context, device=device.type, _compile=True)
    grouped = workload.key_heads != workload.heads
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=grouped)


# Rows of the score matrix that the float64 reference holds at a time: 0.5 GiB at context 65,536.
_REFERENCE_ROWS = 1024


@functools.lru_cache(maxsize=1)
def reference_results(workload: AttentionWorkload, device: torch.device) -> dict[str, Tensor]:
    """:func:`exact_results` of :func:`random_inputs`.

    The last result is kept, because every implementation of a sweep is compared with the same one.
    """
    return exact_results(random_inputs(workload, device), workload)


def exact_results(inputs: Inputs, workload: AttentionWorkload) -> dict[str, Tensor]:
    """Output and gradients in float64, computed a few rows of scores at a time.

    Plain softmax attention and its derivative (FlashAttention-2 handout, equations 4 to 6 and 13 to 19).
    """
    device = inputs.query.device
    query, key, value, grad_out = (tensor.detach().double() for tensor in inputs)
    scale, group = 1 / math.sqrt(workload.head_dim), workload.heads // workload.key_heads
    out, grad_query = torch.empty_like(query), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for batch in range(len(query)):
        for head in range(workload.heads):
            for start in range(0, workload.context, _REFERENCE_ROWS):
                at = batch, head, slice(start, start + _REFERENCE_ROWS)
                first = 0 if workload.window is None else max(0, start + 1 - workload.window)
                keys = slice(first, start + _REFERENCE_ROWS if workload.causal else None)
                seen = batch, head // group, keys
                scores = scale * query[at] @ key[seen].mT
                if workload.causal:
                    row, column = (torch.arange(size, device=device) for size in scores.shape)
                    row, column = start + row[:, None], first + column
                    invisible = column > row
                    if workload.window is not None:
                        invisible |= column <= row - workload.window
                    scores.masked_fill_(invisible, -math.inf)
                weights = scores.softmax(-1)
                out[at] = weights @ value[seen]
                grad_value[seen] += weights.mT @ grad_out[at]
                delta = (grad_out[at] * out[at]).sum(-1, keepdim=True)
                grad_scores = weights * (grad_out[at] @ value[seen].mT - delta)
                grad_query[at] = scale * grad_scores @ key[seen]
                grad_key[seen] += scale * grad_scores.mT @ query[at]
    return {"out": out, "dq": grad_query, "dk": grad_key, "dv": grad_value}


def attention_errors(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Errors:
    """Return the errors of the output and of each gradient of a second call.

    The first call compiles, and later ones may reach the kernels another way: a second call is what is timed.
    """
    inputs = random_inputs(workload, device)
    torch.autograd.grad(attention(*inputs.differentiable), inputs.differentiable, inputs.grad_out)
    # Without a name, so that all implementations of a sweep share it: their inputs differ in strides alone.
    expected = reference_results(replace(workload, implementation=""), device)
    return relative_errors(_results(attention, inputs), expected)


def _results(attention: Attention, inputs: Inputs) -> dict[str, Tensor]:
    out = attention(*inputs.differentiable)
    return {"out": out.detach(), **input_gradients(out, inputs)}


def input_gradients(out: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def errors_of_first_sequence(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Errors:
    """As :func:`attention_errors` of one call, whose first sequence alone is looked at: in float64 all take long."""
    inputs = random_inputs(workload, device)
    results = {name: tensor[:1] for name, tensor in _results(attention, inputs).items()}
    first = Inputs(*(tensor.detach()[:1] for tensor in inputs))
    return relative_errors(results, exact_results(first, workload))


# Largest relative error of an output or a gradient, as a whole, that counts as right. bf16 rounds to 8 bits, fp16 to
# 11: rounding P and dS once each gives a few times 2^-9 and 2^-12. fp32 leaves room for the order of sums, and none for
# TF32, whose error is near 1e-3.
TOLERANCES = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 2e-2}


def measure_flash(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check, then time one implementation on one shape: a cell of ``flash``, run in the worker process.

    Samples (ms): ``forward`` with gradients recorded, ``backward`` alone, ``end_to_end`` as one call. An implementation
    whose output or gradient is off by more than :data:`TOLERANCES`, as a whole or in a row (:func:`judged`), is
    ``wrong`` and is not timed.
    """
    workload = AttentionWorkload.from_configuration(configuration)
    device = choose_device(workload.device)
    progress("checking")
    with implementation(workload, device) as attention:
        errors = _checked_attention(attention, workload, device)
        derived, failure = judged(errors, TOLERANCES[workload.dtype])
        if failure is not None:
            return failure
        progress("timing")
        inputs = random_inputs(workload, device)
        derived["peak_gib"] = _peak_of_forward_and_backward(attention, inputs, device)
        samples = _time_attention(attention, inputs, workload, device)
    return Outcome("ok", samples, derived | workload.tflops(samples))


def _checked_attention(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Errors:
    try:
        return attention_errors(attention, workload, device)
    except (NotImplementedError, AssertionError) as error:
        if workload.implementation not in FLASH_ATTENTION_4:
            raise
        # How the package says that it has no kernel for these shapes on this GPU, in either pass.
        reason = str(error) or "it does not say why"
        raise CapabilityError(f"{workload.implementation} does not take this: {reason}") from error
    except RuntimeError as error:
        # How torch says that the chosen backend cannot serve a call; the second is the CPU's.
        if not any(text in str(error) for text in ("No available kernel", "No viable backend")):
            raise
        refused = f"{workload.implementation} has no kernel for {workload.dtype}, head dim {workload.head_dim}"
        raise CapabilityError(f"{refused} on this {device.type.upper()}") from error


def _peak_of_forward_and_backward(attention: Attention, inputs: Inputs, device: torch.device) -> float | None:
    """GiB held at once by inputs, output, gradients and whatever the implementation keeps."""
    reset_peak_memory(device)
    others_gib = 0.0
    if device.type == "cuda":
        others_gib = (torch.cuda.memory_allocated(device) - sum(tensor.nbytes for tensor in inputs)) / GIB
    torch.autograd.grad(attention(*inputs.differentiable), inputs.differentiable, inputs.grad_out)
    peak_gib = peak_memory_gib(device)
    return None if peak_gib is None else peak_gib - others_gib


def _time_attention(
    attention: Attention, inputs: Inputs, workload: AttentionWorkload, device: torch.device
) -> dict[str, Samples]:
    def forward() -> Tensor:
        return attention(*inputs.differentiable)

    def backward() -> None:
        torch.autograd.grad(out, inputs.differentiable, inputs.grad_out, retain_graph=True)

    def end_to_end() -> None:
        torch.autograd.grad(forward(), inputs.differentiable, inputs.grad_out)

    def time(call: Callable[[], Any]) -> Samples:
        return time_calls(call, device, workload.warmup_ms, workload.repetition_ms)

    samples = {"forward": time(forward)}
    out = forward()
    return samples | {"backward": time(backward), "end_to_end": time(end_to_end)}


def measure_attn(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check, then time plain attention and the memory it holds: a cell of ``attn``, run in the worker process.

    An implementation that is ``wrong``, as of :func:`measure_flash`, is not timed.

    Samples (ms): ``forward`` and ``backward``; the device is synchronized after each step of both. Derived: memory in
    use when the forward pass is done and the backward pass has not begun, and the peak, both including the inputs.
    """
    warmup, steps = configuration["warmup"], configuration["steps"]
    workload = AttentionWorkload.from_configuration(configuration)
    device = choose_device(workload.device)
    progress("checking")
    with implementation(workload, device) as attention:
        errors = errors_of_first_sequence(attention, workload, device)
        derived, failure = judged(errors, TOLERANCES[workload.dtype])
        if failure is not None:
            return failure
        progress("building the inputs")
        base_bytes = 0
        if device.type == "cuda":
            _settle_gpu_memory(device)
            base_bytes = torch.cuda.memory_allocated(device)
        inputs = random_inputs(workload, device)
        out: Tensor | None = None

        def forward() -> None:
            nonlocal out
            out = attention(*inputs.differentiable)

        def backward() -> None:
            assert out is not None
            torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)

        reset_peak_memory(device)
        samples = time_phases(
            {"forward": forward, "backward": backward}, warmup=warmup, steps=steps, device=device, progress=progress
        )
        peak_gib = peak_memory_gib(device)
        derived |= {"held_gib": None, "peak_gib": None}
        if peak_gib is not None:
            derived["peak_gib"] = peak_gib - base_bytes / GIB
            _settle_gpu_memory(device)
            # One more forward pass, to see what is held before its backward pass.
            forward()
            derived["held_gib"] = (torch.cuda.memory_allocated(device) - base_bytes) / GIB
    return Outcome("ok", samples, derived)


def _settle_gpu_memory(device: torch.device) -> None:
    """Make the memory in use on a GPU that of the tensors that are alive.

    A thread's first matrix product allocates a workspace that all its later ones use: autograd's has its own, and so
    have batched products. And autograd's thread may hold the last pass's gradients for a while after that has returned,
    but not once it has taken up the next pass.
    """
    factors = torch.ones(2, 16, 16, device=device, requires_grad=True)
    (factors[0].mm(factors[1]).sum() + factors.bmm(factors).sum()).backward()


# Attention of the user's, beside ours: ``flash --kernel FILE.py:NAME``.

# A length that no tile divides, and one shorter than any tile.
_ODD_CONTEXTS = (131, 1)
_ODD_MOST_HEADS = 4


class ChangingAttentionInputs:
    """Query, key, value and the output's gradient, of which one head of one sequence is new before each call.

    Args:
        workload: its shape; its seed is not used, for a seed that is known can be prepared for.
    """

    def __init__(self, workload: AttentionWorkload, device: torch.device):
        self._workload = workload
        self._master = random_inputs(replace(workload, seed=secrets.randbits(62)), device)
        self._expected = exact_results(self._master, workload)

        self.given = tuple(tensor.detach().clone() for tensor in self._master)
        self._group = workload.heads // workload.key_heads
        self._head_workload = replace(workload, batch_size=1, heads=self._group, kv_heads=1)

    @property
    def inputs(self) -> Inputs:
        """The inputs as leaves of a new graph, in the memory of ``given``."""
        query, key, value, grad_out = (tensor.detach() for tensor in self.given)
        return Inputs(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out)

    def draw_new_inputs(self) -> Callable[[], None]:
        """Draw one head anew, and return what copies the inputs to ``given``."""
        batch, head = secrets.randbelow(self._workload.batch_size), secrets.randbelow(self._workload.key_heads)
        queries = batch, slice(head * self._group, (head + 1) * self._group)
        keys = batch, slice(head, head + 1)
        new = random_inputs(replace(self._head_workload, seed=secrets.randbits(62)), self.given[0].device)
        results = exact_results(new, self._head_workload)
        with torch.no_grad():
            for tensor, new_tensor, where in zip(self._master, new, (queries, keys, keys, queries), strict=True):
                tensor[where] = new_tensor[0]
            for name, where in (("out", queries), ("dq", queries), ("dk", keys), ("dv", keys)):
                self._expected[name][where] = results[name][0]

        def write_to_given() -> None:
            with torch.no_grad():
                for input_tensor, tensor in zip(self.given, self._master, strict=True):
                    input_tensor.copy_(tensor)

        return write_to_given

    def is_as_given(self) -> bool:
        return all(map(torch.equal, self.given, self._master))

    def expected(self) -> Mapping[str, Tensor]:
        return self._expected


def measure_own_attention(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure a cell of ``flash --kernel``, of the user's attention or of another: runs in the worker process.

    Samples are those of :func:`measure_flash`; ``forward`` alone where the output has no gradient. Each
    call that is timed has new inputs, and is checked (:mod:`cs336sys.timing.checked`).
    """
    workload = AttentionWorkload.from_configuration(configuration)
    if not is_user_code(workload.implementation):
        return measure_flash(configuration, progress)
    device = choose_device(workload.device)
    reference, tolerance = workload.implementation, TOLERANCES[workload.dtype]
    attention = _called(reference, workload)

    def check() -> str | None:
        cases = _odd_contexts(attention, workload, device)
        cases = counted(cases, 2 * len(_ODD_CONTEXTS), "checking odd lengths and strides", progress)
        return check_odd(cases, tolerance)

    def time(timer: KernelTimer) -> dict[str, Samples]:
        problem: Any = timer.problem
        has_gradient = attention(*problem.inputs.differentiable).requires_grad
        parts = PARTS if has_gradient else PARTS[:1]
        least_ms = {part: _least_attention_ms(workload, device, part) for part in parts}
        return time_parts(
            timer,
            workload,
            lambda inputs: attention(*inputs.differentiable),
            lambda out: {"out": out},
            input_gradients,
            least_ms,
            progress,
        )

    problem = functools.partial(ChangingAttentionInputs, workload, device)
    return measure_users_function(reference, check, problem, time, workload.tflops, device, tolerance)


def _called(reference: str, workload: AttentionWorkload) -> Attention:
    """The user's function, called as torch's ``scaled_dot_product_attention`` is."""
    function = load(reference)
    options: dict[str, Any] = {"is_causal": workload.causal}
    if workload.window is not None:
        options["window"] = workload.window

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = function(query, key, value, **options)
        if not isinstance(out, Tensor):
            raise UserCodeError(f"{reference} returned a {type(out).__name__}: it should return the output, a tensor")
        return out

    return attention


def _odd_contexts(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Iterator[OddCase]:
    """Lengths that no tile divides, and inputs whose heads lie behind their tokens in memory."""
    heads = workload.heads if workload.heads <= _ODD_MOST_HEADS else workload.heads // workload.key_heads
    kv_heads = None if workload.kv_heads is None else max(1, heads * workload.key_heads // workload.heads)
    for context, is_strided in itertools.product(_ODD_CONTEXTS, (False, True)):
        window = None if workload.window is None else min(workload.window, context)
        odd = replace(workload, batch_size=2, heads=heads, kv_heads=kv_heads, context=context, window=window)
        # random_inputs makes fa4's with tokens before heads in memory.
        odd = replace(odd, seed=secrets.randbits(62), implementation="fa4" if is_strided else "")
        inputs = random_inputs(odd, device)
        # Before the kernel can change them.
        expected = {"out": exact_results(inputs, odd)["out"]}
        run = functools.partial(lambda tensors: {"out": attention(*tensors.differentiable).detach()}, inputs)
        yield f"a context of {context}" + (" with strided inputs" if is_strided else ""), run, expected


def _least_attention_ms(workload: AttentionWorkload, device: torch.device, part: str) -> float:
    """The least that FLOPs and bytes take at the peaks of the datasheet; 0 where they are not known."""
    if device.type != "cuda":
        return 0.0
    heads, rows = workload.heads + workload.key_heads, workload.batch_size * workload.context
    moved = 2 * heads * rows * workload.head_dim * ELEMENT_BYTES[workload.dtype]
    return least_ms(torch.cuda.get_device_name(device), workload.dtype, workload.flops[part], moved)
