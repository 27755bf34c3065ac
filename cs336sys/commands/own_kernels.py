"""Check and time a user's function, each call on new inputs: what ``kernels --kernel`` and ``flash --kernel`` share."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336sys.errors import UserCodeError
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome
from cs336sys.timing.checked import ChangingInputs, KernelTimer, WrongKernelError, check_untouched
from cs336sys.timing.relative_error import error_columns, relative_errors, why_wrong
from cs336sys.training.user_models import telling_errors_of

Results = Mapping[str, Tensor]
# A description, the call, and its right results.
OddCase = tuple[str, Callable[[], Results], Results]

PARTS = ("forward", "backward", "end_to_end")


def counted(cases: Iterable[OddCase], count: int, text: str, progress: Callable[[str], None]) -> Iterator[OddCase]:
    """Yield the cases, and report before each is prepared which it is: ``checking odd lengths, 3 of 8``."""
    iterator = iter(cases)
    for number in range(1, count + 1):
        progress(f"{text}, {number} of {count}")
        yield next(iterator)


def check_odd(cases: Iterable[OddCase], tolerance: float) -> str | None:
    """Check shapes that no tile divides; return what the function refuses by raising an error, None: nothing.

    Raises:
        WrongKernelError: it takes one of them and computes something else.
    """
    refused = []
    for description, run, expected in cases:
        try:
            results = run()
        except UserCodeError:
            raise
        except Exception:
            refused.append(description)
            continue
        check_untouched()
        reason = why_wrong(relative_errors(results, expected), tolerance)
        if reason is not None:
            raise WrongKernelError(f"of {description}: {reason}")
    return ", ".join(refused) or None


def time_parts(
    timer: KernelTimer,
    workload: Any,
    call: Callable[[Any], Any],
    named: Callable[[Any], Results],
    gradients: Callable[[Any, Any], Results],
    least_ms: Mapping[str, float],
    progress: Callable[[str], None],
) -> dict[str, Samples]:
    """Time the parts that ``least_ms`` has: no GPU of this kind does them in less.

    Args:
        workload: says for how long.
        call: returns the outputs of the problem's inputs; ``named`` has their names, ``gradients`` those of the inputs.
    """
    problem: Any = timer.problem

    def prepare(part: str) -> Callable[[], Results]:
        inputs = problem.inputs
        ready = call(inputs) if part == "backward" else None

        def run() -> Results:
            outputs = call(inputs) if ready is None else ready
            results = {} if part == "backward" else named(outputs)
            return results if part == "forward" else {**results, **gradients(outputs, inputs)}

        return run

    samples = {}
    for part, least in least_ms.items():
        progress(f"timing {part}")
        samples[part] = timer.time(partial(prepare, part), workload.warmup_ms, workload.repetition_ms, least)
    return samples


def measure_users_function(
    reference: str,
    check: Callable[[], str | None],
    problem: Callable[[], ChangingInputs],
    time: Callable[[KernelTimer], dict[str, Samples]],
    rates: Callable[[dict[str, Samples]], dict[str, Any]],
    device: torch.device,
    tolerance: float,
) -> Outcome:
    """Check, then time a function that was loaded; ``wrong`` where a call is."""
    try:
        check_untouched()
        with telling_errors_of(reference):
            refused = check()
            timer = KernelTimer(problem(), device, tolerance)
            samples = time(timer)
    except WrongKernelError as error:
        return Outcome("wrong", reason=str(error))
    derived = error_columns(timer.errors) | rates(samples)
    if refused:
        derived["notes"] = [f"{reference} does not take {refused}"]
    return Outcome("ok", samples, derived)
