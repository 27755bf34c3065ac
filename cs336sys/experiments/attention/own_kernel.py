"""Attention of the user's, beside ours: ``flash --kernel FILE.py:NAME``."""

import functools
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336sys.accounting.flops import attention_flops
from cs336sys.accounting.hardware import least_ms
from cs336sys.errors import UserCodeError
from cs336sys.experiments.attention.measurement import (
    TOLERANCES,
    Attention,
    Inputs,
    exact_results,
    input_gradients,
    measure_flash,
    random_inputs,
)
from cs336sys.experiments.own_kernels import PARTS, OddCase, check_odd, measure_users_function, time_parts
from cs336sys.experiments.user_models import load
from cs336sys.measure.cells import Outcome, Progress
from cs336sys.measure.checked_timing import KernelTimer
from cs336sys.measure.device import choose_device
from cs336sys.results.model import Samples
from cs336sys.user_code import is_user_code
from cs336sys.workload import AttentionWorkload

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
        self._one = replace(workload, batch_size=1, heads=self._group, kv_heads=1)

    @property
    def inputs(self) -> Inputs:
        """The inputs as leaves of a new graph, in the memory of ``given``."""
        query, key, value, grad_out = (tensor.detach() for tensor in self.given)
        return Inputs(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out)

    def renew(self) -> Callable[[], None]:
        batch, head = secrets.randbelow(self._workload.batch_size), secrets.randbelow(self._workload.key_heads)
        queries = batch, slice(head * self._group, (head + 1) * self._group)
        keys = batch, slice(head, head + 1)
        new = random_inputs(replace(self._one, seed=secrets.randbits(62)), self.given[0].device)
        results = exact_results(new, self._one)
        with torch.no_grad():
            for tensor, new_tensor, where in zip(self._master, new, (queries, keys, keys, queries), strict=True):
                tensor[where] = new_tensor[0]
            for name, where in (("out", queries), ("dq", queries), ("dk", keys), ("dv", keys)):
                self._expected[name][where] = results[name][0]

        def put() -> None:
            with torch.no_grad():
                for input_tensor, tensor in zip(self.given, self._master, strict=True):
                    input_tensor.copy_(tensor)

        return put

    def is_as_given(self) -> bool:
        return all(map(torch.equal, self.given, self._master))

    def expected(self) -> Mapping[str, Tensor]:
        return self._expected


def measure_own_attention(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure a cell of ``flash --kernel``, of the user's attention or of another: runs in the worker process.

    Samples are those of :func:`.measurement.measure_flash`; ``forward`` alone where the output has no gradient. Each
    call that is timed has new inputs, and is checked (:mod:`cs336sys.measure.checked_timing`).
    """
    workload = AttentionWorkload.from_configuration(configuration)
    if not is_user_code(workload.implementation):
        return measure_flash(configuration, progress)
    device = choose_device(workload.device)
    reference, tolerance = workload.implementation, TOLERANCES[workload.dtype]
    attention = _called(reference, workload)

    def check() -> str | None:
        progress("checking odd lengths and strides")
        return check_odd(_odd_contexts(attention, workload, device), tolerance)

    def time(timer: KernelTimer) -> dict[str, Samples]:
        problem: Any = timer.problem
        has_gradient = attention(*problem.inputs.differentiable).requires_grad
        least_ms = {
            part: _least_attention_ms(workload, device, part) for part in (PARTS if has_gradient else PARTS[:1])
        }
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


def _output_of(attention: Attention, inputs: Inputs) -> dict[str, Tensor]:
    return {"out": attention(*inputs.differentiable).detach()}


def _odd_contexts(attention: Attention, workload: AttentionWorkload, device: torch.device) -> Iterator[OddCase]:
    """Lengths that no tile divides, and inputs whose heads lie behind their tokens in memory."""
    heads = workload.heads if workload.heads <= _ODD_MOST_HEADS else workload.heads // workload.key_heads
    kv_heads = None if workload.kv_heads is None else max(1, heads * workload.key_heads // workload.heads)
    for context, is_strided in itertools.product(_ODD_CONTEXTS, (False, True)):
        window = None if workload.window is None else min(workload.window, context)
        odd = replace(workload, batch_size=2, heads=heads, kv_heads=kv_heads, context=context, window=window)
        odd = replace(odd, seed=secrets.randbits(62), implementation="fa4" if is_strided else "")
        inputs = random_inputs(odd, device)
        # Before the kernel can change them.
        expected = {"out": exact_results(inputs, odd)["out"]}
        run = functools.partial(_output_of, attention, inputs)
        yield (
            f"a context of {context}" + (" with strided inputs" if is_strided else ""),
            run,
            expected,
        )


def _least_attention_ms(workload: AttentionWorkload, device: torch.device, part: str) -> float:
    """The least that FLOPs and bytes take at the peaks of the datasheet; 0 where they are not known."""
    if device.type != "cuda":
        return 0.0
    shape = (workload.batch_size, workload.heads, workload.context, workload.context, workload.head_dim)
    forward, both = (
        attention_flops(*shape, causal=workload.causal, window=workload.window, backward=backward)
        for backward in (False, True)
    )
    flops = {"forward": forward, "backward": both - forward, "end_to_end": both}[part]
    heads = workload.heads + workload.key_heads
    moved = (
        2 * heads * workload.batch_size * workload.context * workload.head_dim * (2 if workload.dtype != "fp32" else 4)
    )
    return least_ms(torch.cuda.get_device_name(device), workload.dtype, flops, moved)
