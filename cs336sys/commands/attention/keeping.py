"""Choose settings of the plain Triton attention kernels by measuring them: ``flash --keep-settings``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from cs336sys.commands.attention.measure import TOLERANCES, attention_errors, mask_options, measure_flash, random_inputs
from cs336sys.errors import CapabilityError
from cs336sys.kernels.attention import flash_attention, operators
from cs336sys.kernels.attention.choice import share_rows
from cs336sys.kernels.attention.problem import AttentionOptions, Operand, make_problem
from cs336sys.kernels.attention.triton import kept_settings
from cs336sys.kernels.attention.triton.settings import candidates
from cs336sys.machine.device import choose_device
from cs336sys.results.model import Samples
from cs336sys.results.statistics import ratio_of_pairs
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.operations import AttentionWorkload
from cs336sys.timing.calls import time_calls
from cs336sys.timing.relative_error import why_wrong

ROUNDS = 8
# What is kept is faster than the built-in settings by so much at least, and beyond the noise between rounds.
LEAST_SPEEDUP = 1.03


def measure_and_keep(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure a cell of ``flash --keep-settings``, after the choice of settings for its shape where it asks for one."""
    notes = []
    if configuration.get("keep_settings") and configuration.get("round", 1) == 1:  # Later rounds use what it keeps.
        workload = AttentionWorkload.from_configuration(configuration)
        notes = keep_settings(workload, choose_device(workload.device), progress)
    outcome = measure_flash(configuration, progress)
    return replace(outcome, derived=outcome.derived | {"notes": notes}) if notes else outcome


def keep_settings(workload: AttentionWorkload, device: torch.device, progress: Progress) -> list[str]:
    """Try settings of both passes on a shape, and keep those that are faster than the built-in ones.

    Returns:
        A sentence for each pass: what is kept, and the median time of everything that was tried.

    Raises:
        CapabilityError: no GPU runs the kernels, or the file cannot be written.
    """
    gpu = kept_settings.describe_gpu(device)
    if gpu is None:
        raise CapabilityError(f"--keep-settings needs kernels that run on a GPU, got {device.type}: leave it out")
    options = AttentionOptions(workload.causal, window=workload.window, aligned_at_end=workload.diagonal > 0)
    attention = partial(flash_attention, **mask_options(workload), implementation="triton")
    inputs = random_inputs(workload, device)
    (query, _), options = share_rows((inputs.query, inputs.grad_out), inputs.key, options)
    problem = make_problem(query, inputs.key, list(map(Operand, inputs)), options)  # As the kernels get it.
    in_force = kept_settings.settings_on(inputs.query.device)  # The kernels read this dictionary.

    def use(key: str, settings: str | None) -> None:
        """Put settings in force under a key; None: the built-in ones."""
        in_force.pop(key, None)
        in_force.update({} if settings is None else {key: settings})
        operators.forget_plans()  # Made with the settings of before.

    def check(key: str, settings: str) -> str | None:
        progress(f"checking {settings}")
        use(key, settings)
        return why_wrong(attention_errors(attention, workload, device), TOLERANCES[workload.dtype])

    def time(pass_name: str, key: str, settings: str | None) -> float:
        progress(f"timing {settings or 'built-in settings'}")
        use(key, settings)
        call: Callable[[], Any] = partial(attention, *inputs.differentiable)
        if pass_name == "backward":
            call = partial(torch.autograd.grad, call(), inputs.differentiable, inputs.grad_out, retain_graph=True)
        # One round: all together take as long as the measurement of a cell.
        return time_calls(call, device, workload.warmup_ms / ROUNDS, workload.repetition_ms / ROUNDS).median

    sentences = []
    for pass_name, built_in in kept_settings.BUILT_IN.items():
        key, built_in_settings = kept_settings.key_of(pass_name, problem), str(built_in(problem))
        alternatives = [settings for settings in candidates(built_in, problem) if settings != built_in_settings]
        chosen, tried = choose_settings(alternatives, partial(check, key), partial(time, pass_name, key))
        use(key, chosen)
        sentences.append(f"{key}: {chosen or 'nothing'} kept in place of the built-in {built_in_settings}: {tried}")
    kept_settings.write_settings(gpu, in_force)
    return sentences


def choose_settings(
    candidates: Sequence[str], check: Callable[[str], str | None], time: Callable[[str | None], float]
) -> tuple[str | None, str]:
    """Check candidates, time the right ones in turn with the built-in settings, and choose the fastest.

    Args:
        check: returns why settings are wrong, None if they are right.
        time: returns the median time of settings in one round, in ms; of None that of the built-in ones.

    Returns:
        The settings to keep, None for the built-in ones; and all medians, with what did not run.
    """
    reasons: dict[str, str] = {}
    for settings in candidates:
        try:
            reason = check(settings)
        except (TritonError, RuntimeError) as error:
            # It needs too much shared memory, for example, or the compiler refuses it.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if reason is not None:
            reasons[settings] = reason
    times_ms: dict[str | None, list[float]] = {
        settings: [] for settings in (None, *candidates) if settings not in reasons
    }
    for _ in range(ROUNDS):
        for candidate, rounds_ms in times_ms.items():
            rounds_ms.append(time(candidate))
    samples = {settings: Samples("ms", "rounds", tuple(rounds_ms)) for settings, rounds_ms in times_ms.items()}
    speedups = {settings: ratio_of_pairs(samples[None], series) for settings, series in samples.items()}
    fastest = max(speedups, key=lambda settings: speedups[settings].estimate)
    is_faster = speedups[fastest].low > 1 and speedups[fastest].estimate >= LEAST_SPEEDUP
    medians = [f"{settings or 'built-in'} {series.median:.4g} ms" for settings, series in samples.items()]
    failures = [f"{settings} does not run ({reason})" for settings, reason in reasons.items()]
    return fastest if is_faster else None, ", ".join((*medians, *failures))
