"""The cells of ``flash`` and ``attn``: attention, checked against a float64 reference and timed."""

import contextlib
import functools
import importlib
import itertools
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from cs336sys.accounting.hardware import least_ms
from cs336sys.accounting.memory import GIB
from cs336sys.commands import own_kernels
from cs336sys.errors import CapabilityError, UserCodeError
from cs336sys.kernels.attention import flash_attention, wait_until_compiled
from cs336sys.kernels.attention.reference import plain_attention
from cs336sys.machine.device import (
    DTYPES,
    choose_device,
    held_memory_gib,
    peak_memory_gib,
    reading_gpu,
    reset_peak_memory,
)
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.operations import FLASH_ATTENTION_4, AttentionWorkload
from cs336sys.settings.sizes import ELEMENT_BYTES
from cs336sys.settings.user_code import is_user_code
from cs336sys.timing.calls import time_calls
from cs336sys.timing.phases import time_phases
from cs336sys.timing.relative_error import Errors, judged, relative_errors
from cs336sys.training.model import model_attention
from cs336sys.training.user_models import load

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Inputs(NamedTuple):
    """Query, key and value that require gradients, and the output's gradient: (batch, heads, context, head_dim).

    Key and value may have fewer heads, query and gradient another length.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def random_inputs(workload: AttentionWorkload, device: torch.device) -> Inputs:
    """Draw normal inputs by the workload's seed, the same for every implementation but for their order in memory."""
    generator = torch.Generator(device).manual_seed(workload.seed)
    random = functools.partial(torch.randn, generator=generator, device=device, dtype=DTYPES[workload.dtype])
    of_queries, of_keys = (workload.heads, workload.num_queries), (workload.key_heads, workload.context)
    shapes = of_queries, of_keys, of_keys, of_queries  # As in Inputs.
    tensors = [random((workload.batch_size, *shape, workload.head_dim)) for shape in shapes]
    if workload.implementation in FLASH_ATTENTION_4:
        # Tokens before heads in memory, as the package takes them, and as a model that uses it would have them.
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    for tensor in tensors[:3]:  # All but the output's gradient.
        tensor.requires_grad_()
    return Inputs(*tensors)


FA4_MODULE = "flash_attn.cute.interface"
_FA4_DTYPES = ("bf16", "fp16")


def flash_attention_4(workload: AttentionWorkload, device: torch.device) -> Attention:
    """Return ``flash_attn_func`` of the package ``flash-attn-4``, on (batch, heads, context, head_dim).

    It takes (batch, context, heads, head_dim) of any strides but the last, so it is given views, and nothing is copied.

    Raises:
        CapabilityError: the package is not installed or does not load, or the device or dtype is not one of its.
    """
    name = workload.implementation
    if device.type != "cuda":
        raise CapabilityError(f"implementation '{name}' needs a CUDA GPU")
    if workload.dtype not in _FA4_DTYPES:
        raise CapabilityError(f"implementation '{name}' takes {' and '.join(_FA4_DTYPES)}, got {workload.dtype}")
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
        # How many keys to the left and to the right of the query's own; with none to the right it is causal.
        options |= {"causal": False, "window_size": (workload.window - 1, 0)}

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)), **options)
        out = result[0] if isinstance(result, tuple) else result  # It may be (output, logsumexp).
        return out.transpose(1, 2)

    return attention


_SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@contextlib.contextmanager
def implementation(workload: AttentionWorkload, device: torch.device):
    """Yield the workload's implementation, a function of query, key and value.

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
        mask = causal_lower_right(workload.num_queries, workload.context) if workload.diagonal else None
        if mask is not None and name == "sdpa-cudnn":  # It would be given a matrix of numbers to add.
            raise CapabilityError(f"implementation '{name}' has no causal mask at the end: choose sdpa-flash")
        is_causal, grouped = workload.causal and mask is None, workload.key_heads != workload.heads
        with sdpa_kernel(_SDPA_BACKENDS[name]):
            function = F.scaled_dot_product_attention
            yield functools.partial(function, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    elif name in ("compiled", "flex"):
        with torch._functorch.config.patch(donated_buffer=False):
            compiled = functools.partial(torch.compile(plain_attention, dynamic=False), **mask_options(workload))
            yield _flex(workload, device) if name == "flex" else compiled
    elif name == "model":  # One of attn's, which has no windows.
        yield functools.partial(model_attention, is_causal=workload.causal)
    elif name == "eager":
        yield functools.partial(plain_attention, **mask_options(workload))
    elif name in FLASH_ATTENTION_4:
        yield flash_attention_4(workload, device)
    else:
        wait_until_compiled()  # Until then Python makes the calls of our kernels, slower than C++ afterwards.
        ours = {"deterministic": True} if name == "deterministic" else {"implementation": name}
        yield functools.partial(flash_attention, **mask_options(workload), **ours)


def mask_options(workload: AttentionWorkload) -> dict[str, Any]:
    """Return the arguments of :func:`flash_attention` that say which keys a query sees, those that are not default."""
    options: dict[str, Any] = {} if workload.window is None else {"window": workload.window}
    return {"is_causal": workload.causal} | options | ({"causal_alignment": "end"} if workload.diagonal else {})


def _flex(workload: AttentionWorkload, device: torch.device) -> Attention:
    """Return torch's compiled flex attention with the workload's mask, whose blocks are found here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type != "cuda":
        raise CapabilityError("implementation 'flex' needs a CUDA GPU: its backward pass does not run on a CPU")
    mask, lengths, window, diagonal = None, (workload.num_queries, workload.context), workload.window, workload.diagonal
    if workload.causal:

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Without a window a single comparison, which torch's own examples compile.
            distance = query + diagonal - key
            return distance >= 0 if window is None else (distance >= 0) & (distance < window)

        mask = create_block_mask(sees, None, None, *lengths, device=device.type, _compile=True)
    grouped = workload.key_heads != workload.heads
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=mask, enable_gqa=grouped)


# Rows of the score matrix that the float64 reference holds at a time: 0.5 GiB at context 65,536.
_REFERENCE_ROWS = 1024


@functools.lru_cache(maxsize=1)
def reference_results(workload: AttentionWorkload, device: torch.device) -> dict[str, Tensor]:
    """Return :func:`exact_results` of :func:`random_inputs`, and keep the last: a sweep's implementations share it."""
    return exact_results(random_inputs(workload, device), workload)


def exact_results(inputs: Inputs, workload: AttentionWorkload) -> dict[str, Tensor]:
    """Compute ``out``, ``dq``, ``dk`` and ``dv`` in float64, a few rows of scores at a time.

    Plain softmax attention and its derivative (FlashAttention-2 handout, equations 4 to 6 and 13 to 19).
    """
    device = inputs.query.device
    query, key, value, grad_out = (tensor.detach().double() for tensor in inputs)
    scale, heads_per_key_head = 1 / math.sqrt(workload.head_dim), workload.heads // workload.key_heads
    out, grad_query = torch.empty_like(query), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for batch in range(len(query)):
        for head in range(workload.heads):
            for start in range(0, workload.num_queries, _REFERENCE_ROWS):
                rows = batch, head, slice(start, start + _REFERENCE_ROWS)
                # Of the keys, those that any of these rows sees.
                position = start + workload.diagonal
                first_key = 0 if workload.window is None else max(0, position + 1 - workload.window)
                key_end = position + _REFERENCE_ROWS if workload.causal else None
                keys = batch, head // heads_per_key_head, slice(first_key, key_end)
                scores = scale * query[rows] @ key[keys].mT
                if workload.causal:
                    query_position = position + torch.arange(scores.shape[0], device=device)[:, None]
                    key_position = first_key + torch.arange(scores.shape[1], device=device)
                    invisible = key_position > query_position
                    if workload.window is not None:  # AttentionWorkload refuses one without the causal mask.
                        invisible |= key_position <= query_position - workload.window
                    scores.masked_fill_(invisible, -math.inf)
                weights = scores.softmax(-1)
                out[rows] = weights @ value[keys]
                grad_value[keys] += weights.mT @ grad_out[rows]
                delta = (grad_out[rows] * out[rows]).sum(-1, keepdim=True)
                grad_scores = weights * (grad_out[rows] @ value[keys].mT - delta)
                grad_query[rows] = scale * grad_scores @ key[keys]
                grad_key[keys] += scale * grad_scores.mT @ query[rows]
    return {"out": out, "dq": grad_query, "dk": grad_key, "dv": grad_value}


def attention_errors(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Errors:
    """Return the errors of the output and of each gradient of a second call.

    The first call compiles, and later ones may reach the kernels another way: a second call is what is timed.
    """
    inputs = random_inputs(workload, device)
    torch.autograd.grad(attention(*inputs.differentiable), inputs.differentiable, inputs.grad_out)
    # Without a name, so that all implementations of a sweep share it: their inputs differ in strides alone.
    expected = reference_results(replace(workload, implementation=""), device)
    return relative_errors(_output_and_gradients(attention, inputs), expected)


def _output_and_gradients(attention: Attention, inputs: Inputs) -> dict[str, Tensor]:
    out = attention(*inputs.differentiable)
    gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def errors_of_first_sequence(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Errors:
    """Return the errors of one call in its first sequence: of all, the reference in float64 would take long."""
    inputs = random_inputs(workload, device)
    results = {name: tensor[:1] for name, tensor in _output_and_gradients(attention, inputs).items()}
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
    ``wrong`` and is not timed. Each call of the user's attention that is timed has new inputs, and is checked
    (:mod:`cs336sys.commands.own_kernels`); without a gradient of the output it has ``forward`` alone.
    """
    workload = AttentionWorkload.from_configuration(configuration)
    device = choose_device(workload.device)
    if is_user_code(workload.implementation):
        make_problem = functools.partial(UsersAttention, _load_attention(workload), workload, device)
        return own_kernels.measure_users_function(make_problem, workload, device, TOLERANCES[workload.dtype], progress)
    progress("checking")
    with implementation(workload, device) as attention:
        errors = _errors_if_supported(attention, workload, device)
        derived, failure = judged(errors, TOLERANCES[workload.dtype])
        if failure is not None:
            return failure
        progress("timing")
        inputs = random_inputs(workload, device)
        forward = functools.partial(attention, *inputs.differentiable)
        calls = own_kernels.calls_by_part(forward, forward(), inputs.differentiable, inputs.grad_out)
        # Held at once by inputs, output, gradients and whatever is kept for backward.
        call_gib = own_kernels.memory_of_call_gib(calls["end_to_end"], device)
        derived["peak_gib"] = None if call_gib is None else call_gib + sum(tensor.nbytes for tensor in inputs) / GIB
        with reading_gpu(device) as readings:
            samples = {
                part: time_calls(call, device, workload.warmup_ms, workload.repetition_ms)
                for part, call in calls.items()
            }
        derived["sm_clock_mhz"] = readings.median_clock_mhz()
    return Outcome("ok", samples, derived | workload.tflops(samples))


def _errors_if_supported(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Errors:
    """Return :func:`attention_errors`, or raise a CapabilityError if an implementation refuses this call."""
    try:
        return attention_errors(attention, workload, device)
    except (NotImplementedError, AssertionError) as error:
        if workload.implementation not in FLASH_ATTENTION_4:
            raise
        reason = str(error) or "it does not say why"  # How the package refuses a shape on this GPU, in either pass.
        raise CapabilityError(f"{workload.implementation} does not take this: {reason}") from error
    except RuntimeError as error:
        # How torch says that the chosen backend cannot serve a call; the second is the CPU's.
        if not any(text in str(error) for text in ("No available kernel", "No viable backend")):
            raise
        refused = f"{workload.implementation} has no kernel for {workload.dtype}, head dim {workload.head_dim}"
        raise CapabilityError(f"{refused} on this {device.type.upper()}") from error


def measure_attn(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Check, then time plain attention and the memory it holds: a cell of ``attn``, run in the worker process.

    An implementation that is ``wrong``, as in :func:`measure_flash`, is not timed.

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
        if device.type == "cuda":
            _settle_gpu_memory(device)
        base_gib = held_memory_gib(device)
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
            derived["peak_gib"] = peak_gib - base_gib
            _settle_gpu_memory(device)
            forward()  # One more forward pass, to see what is held before its backward pass.
            derived["held_gib"] = held_memory_gib(device) - base_gib
    return Outcome("ok", samples, derived)


def _settle_gpu_memory(device: torch.device) -> None:
    """Make the memory in use on a GPU that of the tensors that are alive.

    A thread's first matrix product allocates a workspace that all its later ones use: autograd's has its own, and so
    have batched products. And autograd's thread may hold the last pass's gradients for a while after that pass has
    returned, but not once it has begun the next one.
    """
    factors = torch.ones(2, 16, 16, device=device, requires_grad=True)
    (factors[0].mm(factors[1]).sum() + factors.bmm(factors).sum()).backward()


# Attention of the user's, beside ours: ``flash --kernel FILE.py:NAME``.


class UsersAttention(own_kernels.UsersProblem):
    """The user's attention; one head of one sequence of query, key, value and the output's gradient is new each time.

    The workload's seed is not used: a function could be prepared for a seed that is known.
    """

    odd_shapes = "odd lengths and strides"
    counts_launches = True  # As of the other implementations.
    input_names = ("q", "k", "v")

    def __init__(self, attention: Attention, workload: AttentionWorkload, device: torch.device):
        self._attention, self._workload, self._device = attention, workload, device
        self._heads_per_key_head = workload.heads // workload.key_heads
        # One head of keys and values, with the heads of queries that share it.
        self._head_workload = replace(workload, batch_size=1, heads=self._heads_per_key_head, kv_heads=1)
        inputs = random_inputs(replace(workload, seed=secrets.randbits(62)), device)
        self.intended, self.right = inputs, exact_results(inputs, workload)
        super().__init__(lambda inputs: (attention(*inputs.values()),))  # Copies what is intended.

    def draw_intended(self) -> None:
        """Draw one head of keys and values anew, with the queries that share it, and compute what is right for them."""
        batch, key_head = secrets.randbelow(self._workload.batch_size), secrets.randbelow(self._workload.key_heads)
        first_head = key_head * self._heads_per_key_head
        queries = batch, slice(first_head, first_head + self._heads_per_key_head)
        keys = batch, slice(key_head, key_head + 1)
        new = random_inputs(replace(self._head_workload, seed=secrets.randbits(62)), self._device)
        results = exact_results(new, self._head_workload)
        with torch.no_grad():
            for tensor, new_tensor, where in zip(self.intended, new, (queries, keys, keys, queries), strict=True):
                tensor[where] = new_tensor[0]  # Of its only sequence.
            for name, where in (("out", queries), ("dq", queries), ("dk", keys), ("dv", keys)):
                self.right[name][where] = results[name][0]

    def odd_cases(self) -> list[Callable[[], own_kernels.OddCase]]:
        return [
            functools.partial(self._odd_case, context, is_strided)
            # A length that no tile divides, and one shorter than any tile.
            for context, is_strided in itertools.product((131, 1), (False, True))
        ]

    def _odd_case(self, context: int, is_strided: bool) -> own_kernels.OddCase:
        """Prepare a length that no tile divides; strided inputs have tokens before heads in memory."""
        workload, attention = self._workload, self._attention
        # All heads where they are few, else one group: the heads that share a head of keys. Either way as many share.
        heads = workload.heads if workload.heads <= 4 else self._heads_per_key_head
        kv_heads = None if workload.kv_heads is None else max(1, heads * workload.key_heads // workload.heads)
        # As many queries as keys also here, or fewer: the user's function is told where they stand.
        queries = None if workload.num_queries == workload.context else min(workload.num_queries, context // 2 + 1)
        window = workload.window and min(workload.window, context)
        lengths: dict[str, Any] = {"context": context, "queries": queries, "window": window}
        odd = replace(workload, batch_size=2, heads=heads, kv_heads=kv_heads, **lengths)
        # random_inputs() puts tokens before heads for fa4; nobody can prepare for a seed that was drawn just now.
        odd = replace(odd, seed=secrets.randbits(62), implementation="fa4" if is_strided else "")
        inputs = random_inputs(odd, self._device)
        expected = {"out": exact_results(inputs, odd)["out"]}  # Before the kernel can change them.
        description = f"a context of {context}" + (" with strided inputs" if is_strided else "")
        return description, lambda: {"out": attention(*inputs.differentiable).detach()}, expected

    def least_ms(self) -> dict[str, float]:
        has_gradient = self._attention(*self.inputs.values()).requires_grad  # Only a call shows it.
        parts = own_kernels.PARTS if has_gradient else own_kernels.PARTS[:1]  # The forward pass alone.
        return {part: _least_attention_ms(self._workload, self._device, part) for part in parts}

    def rates(self, samples: dict[str, Samples]) -> dict[str, Any]:
        return self._workload.tflops(samples)


def _load_attention(workload: AttentionWorkload) -> Attention:
    """Return the user's function, called as torch's ``scaled_dot_product_attention`` is."""
    user_code, options = workload.implementation, mask_options(workload)  # FILE.py:NAME
    function = load(user_code)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = function(query, key, value, **options)
        if not isinstance(out, Tensor):
            raise UserCodeError(f"{user_code} returned a {type(out).__name__}: it should return the output, a tensor")
        return out

    return attention


def _least_attention_ms(workload: AttentionWorkload, device: torch.device, part: str) -> float:
    """Return the least ms that FLOPs and bytes take at the datasheet's peaks; 0 where these are not known."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    keys = min(workload.context, workload.num_queries + (workload.window or workload.context) - 1)  # Those seen.
    rows = workload.batch_size * (workload.heads * workload.num_queries + workload.key_heads * keys)
    # Query and output, key and value, once each: no part moves less.
    moved_bytes = 2 * rows * workload.head_dim * ELEMENT_BYTES[workload.dtype]
    return least_ms(gpu, workload.dtype, workload.flops[part], moved_bytes)
