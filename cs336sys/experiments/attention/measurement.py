"""Checks attention implementations against a float64 reference and times them: the cells of ``flash`` and ``attn``."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336sys.accounting.memory import GIB
from cs336sys.errors import CapabilityError
from cs336sys.experiments.attention.implementations import implementation
from cs336sys.experiments.attention.inputs import Attention, Inputs, random_inputs
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.device import choose_device
from cs336sys.measure.memory import peak_memory_gib, reset_peak_memory
from cs336sys.measure.relative_error import RelativeError, judged, relative_errors
from cs336sys.measure.timing import time_calls, time_phases
from cs336sys.results.model import Samples
from cs336sys.workload import FLASH_ATTENTION_4, AttentionWorkload

# Attention in float64, and how far implementations are from it.


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
    query, key, value, grad_out = (tensor.detach().double() for tensor in (*inputs.differentiable, inputs.grad_out))
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


def attention_errors(
    attention: Attention, workload: AttentionWorkload, device: torch.device
) -> dict[str, RelativeError]:
    """The errors of the output and of each gradient of a second call.

    The first call compiles, and later ones may reach the kernels another way: a second call is what is timed.
    """
    # The implementation decides neither inputs nor reference.
    workload = replace(workload, implementation="")
    inputs = random_inputs(workload, device)
    torch.autograd.grad(attention(*inputs.differentiable), inputs.differentiable, inputs.grad_out)
    return relative_errors(_results(attention, inputs), reference_results(workload, device))


def _results(attention: Attention, inputs: Inputs) -> dict[str, Tensor]:
    out = attention(*inputs.differentiable)
    gradients = torch.autograd.grad(out, inputs.differentiable, inputs.grad_out)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def errors_of_first_sequence(
    attention: Attention, workload: AttentionWorkload, device: torch.device
) -> dict[str, RelativeError]:
    """As :func:`attention_errors` of one call, whose first sequence alone is looked at: in float64 all take long."""
    inputs = random_inputs(workload, device)
    results = {name: tensor[:1] for name, tensor in _results(attention, inputs).items()}
    first = Inputs(*(tensor.detach()[:1] for tensor in (*inputs.differentiable, inputs.grad_out)))
    return relative_errors(results, exact_results(first, workload))


# Largest relative error of an output or a gradient, as a whole, that counts as right. bf16 rounds to 8 bits, fp16 to
# 11: rounding P and dS once each gives a few times 2^-9 and 2^-12. fp32 leaves room for the order of sums, and none for
# TF32, whose error is near 1e-3.
TOLERANCES = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 2e-2}

# How torch says that the chosen backend cannot serve a call; the second is the CPU's.
_NO_SDPA_KERNEL = ("No available kernel", "No viable backend")


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
        errors = _checked(attention, workload, device)
        derived, wrong = judged(errors, TOLERANCES[workload.dtype])
        if wrong is not None:
            return wrong
        progress("timing")
        inputs = random_inputs(workload, device)
        derived["peak_gib"] = _peak_of_forward_and_backward(attention, inputs, device)
        samples = _time(attention, inputs, workload, device)
    return Outcome("ok", samples, derived | workload.tflops(samples))


def _checked(attention: Attention, workload: AttentionWorkload, device: torch.device) -> dict[str, RelativeError]:
    try:
        return attention_errors(attention, workload, device)
    except (NotImplementedError, AssertionError) as error:
        if workload.implementation not in FLASH_ATTENTION_4:
            raise
        # How the package says that it has no kernel for these shapes on this GPU, in either pass.
        raise CapabilityError(
            f"{workload.implementation} does not take this: {str(error) or 'it does not say why'}"
        ) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _NO_SDPA_KERNEL):
            raise
        refused = f"{workload.implementation} has no kernel for {workload.dtype}, head dim {workload.head_dim}"
        raise CapabilityError(f"{refused} on this {device.type.upper()}") from error


def _peak_of_forward_and_backward(attention: Attention, inputs: Inputs, device: torch.device) -> float | None:
    """GiB held at once by inputs, output, gradients and whatever the implementation keeps."""
    reset_peak_memory(device)
    others_gib = 0.0
    if device.type == "cuda":
        held = sum(tensor.nbytes for tensor in (*inputs.differentiable, inputs.grad_out))
        others_gib = (torch.cuda.memory_allocated(device) - held) / GIB
    torch.autograd.grad(attention(*inputs.differentiable), inputs.differentiable, inputs.grad_out)
    peak_gib = peak_memory_gib(device)
    return None if peak_gib is None else peak_gib - others_gib


def _time(
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
        derived, wrong = judged(errors, TOLERANCES[workload.dtype])
        if wrong is not None:
            return wrong
        progress("building the inputs")
        base = 0
        if device.type == "cuda":
            # A thread's first matrix product allocates a workspace that all its later ones use: autograd's has its own,
            # and so have batched products.
            ones = torch.ones(2, 16, 16, device=device, requires_grad=True)
            (ones[0].mm(ones[1]).sum() + ones.bmm(ones).sum()).backward()
            del ones
            base = torch.cuda.memory_allocated(device)
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
            derived["peak_gib"] = peak_gib - base / GIB
            forward()
            derived["held_gib"] = (torch.cuda.memory_allocated(device) - base) / GIB
    return Outcome("ok", samples, derived)
