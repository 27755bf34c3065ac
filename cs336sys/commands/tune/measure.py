"""One configuration of ``tune``, checked first; and the rates of a CPU, of which there are no saved cells."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from cs336sys.accounting.step_time.prediction import StepConfiguration
from cs336sys.accounting.step_time.work import TERMS, attention_square, product_work
from cs336sys.commands.bench.measure import build_step, training_outcome
from cs336sys.kernels.attention import flash_attention
from cs336sys.machine.device import DTYPES, choose_device, peak_memory_gib
from cs336sys.parity.step import check_training
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.profiling import MemoryWorkload
from cs336sys.settings.training import Workload
from cs336sys.timing.phases import gpu_busy_ms
from cs336sys.training.checkpoints import MemoryStep
from cs336sys.training.model import build_optimizer
from cs336sys.training.step import TrainStep, set_matmul_precision, time_steps
from cs336sys.training.user_models import telling_user_errors


def measure_configuration(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure a configuration on one device: runs in the worker process.

    Samples and derived columns are those of ``bench``; with several micro-batches ``passes`` are all of their forward
    and backward passes, and tokens count all of them.
    """
    chosen = StepConfiguration.from_configuration(configuration)
    workload = chosen.training
    with telling_user_errors(workload):
        device = choose_device(workload.device)
        set_matmul_precision(workload)
        checked, failure = check_training(workload, device, progress)
        if failure is not None:
            return failure
        memory = MemoryWorkload(workload, checkpointing=chosen.checkpointing)
        built = build_step(functools.partial(MemoryStep, memory, device), device, progress)
        step = built.step
        phases = step.phases
        if chosen.accumulation > 1:
            passes = functools.partial(_run_passes, step, chosen.accumulation)
            phases = {"passes": passes, "optimizer": step.phases["optimizer"]}
        samples = time_steps(step, phases, progress)
        observed: dict[str, Any] = {"peak_gib": peak_memory_gib(device)}
        # A call of `step` runs one micro-batch.
        observed["gpu_busy_ms"] = gpu_busy_ms(step) if device.type == "cuda" and chosen.accumulation == 1 else None
        outcome = training_outcome(built, samples, checked, observed)
        for name in ("tokens_per_s", "tflops", "mfu_percent"):  # Of a step with one micro-batch so far.
            if outcome.derived.get(name) is not None:
                outcome.derived[name] *= chosen.accumulation
        return outcome


def _run_passes(step: TrainStep, count: int) -> None:
    """Run forward and backward passes of so many micro-batches, whose gradients add up to their mean."""
    for _ in range(count):
        step.phases["forward"]()
        assert step.loss is not None, "the forward pass has set it"
        step.loss = step.loss / count
        step.phases["backward"]()


# Repetitions of an operation, whose median counts; fewer once they have taken so many seconds.
_REPETITIONS, _LONGEST_S = 7, 1.0


def measure_rates(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure a CPU's rates on the shapes of a workload: runs in the worker process.

    Derived columns: ``seconds``, by the terms of :mod:`cs336sys.accounting.step_time.work`. On a CPU operations run
    where they are launched: what one costs besides its work is in ``kernels``.
    """
    workload = Workload.from_configuration(configuration)
    size, dtype = workload.size, DTYPES[workload.precision]
    progress("measuring products, copies, attention and optimizers")
    shapes = (size.tokens, size.d_model), (size.d_model, size.d_ff)
    product_s = _median_seconds(torch.mm, *(torch.randn(shape, dtype=dtype) for shape in shapes))
    # Most bytes of a small model are those of logits, whose memory is often returned and mapped again.
    logits = torch.randn(size.tokens, size.vocab_size)
    byte_s = _median_seconds(torch.mul, logits, logits) / (12 * logits.numel())  # Two reads and a write of fp32.
    flop_s = product_s / product_work(size.tokens, size.d_ff, size.d_model, "cpu")
    small = torch.randn(8, requires_grad=True)  # An operation costs what autograd records of it, too.
    operation_s = _median_seconds(lambda: [small * small for _ in range(100)]) / 100
    seconds = dict.fromkeys(TERMS, 0.0)  # Gaps between kernels stay at 0: a CPU has none.
    seconds |= dict.fromkeys(("half_products", "full_products", "full_scores"), flop_s)
    seconds |= dict.fromkeys(("eager_bytes", "fused_bytes", "score_bytes"), byte_s)
    shape = size.batch_size, size.num_heads, size.context, size.head_dim
    # Attention has two products forward and five backward, each of so many multiply-adds.
    square = attention_square(size.batch_size * size.num_heads, size.context, size.head_dim, "cpu")
    attentions: dict[str, Any] = {"flash": flash_attention, "sdpa": F.scaled_dot_product_attention}
    for name, attention in attentions.items():
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        forward = functools.partial(attention, *inputs, is_causal=True)
        output = forward()
        gradient = torch.ones_like(output)
        backward = functools.partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
        forward_s, backward_s = _median_seconds(forward), _median_seconds(backward)
        del inputs, forward, output, gradient, backward  # What comes next has the memory to itself.
        seconds |= {f"{name}_forward": forward_s / (2 * square), f"{name}_backward": backward_s / (5 * square)}
    parameters = size.vocab_size * size.d_model  # Over a tensor as large as the embedding.
    seconds["course_parameters"] = _update_seconds(replace(workload, optimizer="course"), parameters) / parameters
    # In fp32 it reads parameter, gradient and both moments, and writes all but the gradient: 28 bytes.
    seconds["state_bytes"] = _update_seconds(replace(workload, optimizer="fused"), parameters) / (28 * parameters)
    seconds["kernels"] = operation_s
    return Outcome("ok", derived={"seconds": seconds})


def _update_seconds(workload: Workload, parameters: int) -> float:
    parameter = torch.nn.Parameter(torch.randn(parameters))
    parameter.grad = torch.ones_like(parameter)
    return _median_seconds(build_optimizer(workload, [parameter]).step)


def _median_seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the median time of a call, after one that is not measured."""
    run(*arguments)
    times_s: list[float] = []
    while len(times_s) < _REPETITIONS and sum(times_s) < _LONGEST_S:
        started_s = time.perf_counter()
        run(*arguments)
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)
