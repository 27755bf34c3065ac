"""Check and time a user's function, each call on new inputs: what ``kernels --kernel`` and ``flash --kernel`` share."""

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336sys.errors import UserCodeError
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome
from cs336sys.timing.calls import KernelTimer, WrongKernelError, check_untouched
from cs336sys.timing.relative_error import error_columns, relative_errors, why_wrong
from cs336sys.training.user_models import telling_errors_of

Results = Mapping[str, Tensor]
# A description, the call, and its right results.
OddCase = tuple[str, Callable[[], Results], Results]

PARTS = ("forward", "backward", "end_to_end")
OUTPUT_NAMES = ("out", "sum")


class UsersProblem(abc.ABC):
    """A call of the user's function on inputs that change in part: a :class:`cs336sys.timing.calls.ChangingInputs`.

    A subclass sets the last three attributes before it calls :meth:`__init__`.

    Args:
        call: returns the function's outputs, of inputs by name.

    Attributes:
        given: inputs and gradients of the outputs, in the same memory at every call.
        input_names: of the inputs, which ``given`` begins with.
        intended: the values that ``given`` should have.
        right: what the function should make of them, in float64.
    """

    input_names: Sequence[str]
    intended: Sequence[Tensor]
    right: Results

    def __init__(self, call: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]):
        self._call = call
        self.given = [tensor.detach().clone() for tensor in self.intended]

    @abc.abstractmethod
    def draw_intended(self) -> None:
        """Choose new values for a part of ``intended``, and what is ``right`` for them."""

    def draw_new_inputs(self) -> Callable[[], None]:
        self.draw_intended()
        return self._write_to_given

    @torch.no_grad()
    def _write_to_given(self) -> None:
        for input_tensor, tensor in zip(self.given, self.intended, strict=True):
            input_tensor.copy_(tensor)

    def is_as_given(self) -> bool:
        return all(map(torch.equal, self.given, self.intended))

    def expected(self) -> Results:
        return self.right

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs as leaves of a new graph, in the memory of ``given``."""
        tensors = [tensor.detach() for tensor in self.given[: len(self.input_names)]]
        leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
        return dict(zip(self.input_names, leaves, strict=True))

    def prepare(self, part: str) -> Callable[[], Results]:
        """Do what is not timed, and return the call of one of :data:`PARTS`, which returns its results by name."""
        inputs, grad_outputs = self.inputs, self.given[len(self.input_names) :]
        leaves = {f"d{name}": tensor for name, tensor in inputs.items() if tensor.requires_grad}
        forward_outputs = self._call(inputs) if part == "backward" else None

        def run() -> Results:
            outputs = self._call(inputs) if forward_outputs is None else forward_outputs
            # Not every function has the second output. A timed backward pass returns gradients alone.
            results = {} if part == "backward" else dict(zip(OUTPUT_NAMES, outputs, strict=False))
            if part != "forward":
                gradients = torch.autograd.grad(outputs, tuple(leaves.values()), grad_outputs)
                results |= dict(zip(leaves, gradients, strict=True))
            return results

        return run


def _refused_cases(
    cases: Sequence[Callable[[], OddCase]], odd_shapes: str, tolerance: float, progress: Callable[[str], None]
) -> list[str]:
    """Check cases, and return those that the function refuses by an error; a WrongKernelError if one is wrong."""
    refused = []
    for number, prepare in enumerate(cases, 1):
        progress(f"checking {odd_shapes}, {number} of {len(cases)}")
        description, run, expected = prepare()
        try:
            results = run()
        except UserCodeError:
            raise  # the function cannot be used at all
        except Exception:
            refused.append(description)
            continue
        check_untouched()  # The call may have replaced functions that check it.
        reason = why_wrong(relative_errors(results, expected), tolerance)
        if reason is not None:
            raise WrongKernelError(f"of {description}: {reason}")
    return refused


def measure_users_function(
    workload: Any,
    device: torch.device,
    tolerance: float,
    progress: Callable[[str], None],
    *,
    odd_cases: Sequence[Callable[[], OddCase]],
    odd_shapes: str,
    make_problem: Callable[[], UsersProblem],
    find_least_ms: Callable[[UsersProblem], Mapping[str, float]],
    rates: Callable[[dict[str, Samples]], dict[str, Any]],
) -> Outcome:
    """Check, then time a function that was loaded; ``wrong`` where a call is.

    Args:
        odd_cases: prepare shapes that no tile divides.
        odd_shapes: names the cases in reports of progress.
        find_least_ms: returns the parts to time, each with the ms that its work needs at least: less is refused.
        rates: returns derived columns.
    """
    user_code = workload.implementation  # FILE.py:NAME
    samples = {}
    try:
        check_untouched()  # Loading the function may have replaced those that time and check it.
        with telling_errors_of(user_code):
            refused = _refused_cases(odd_cases, odd_shapes, tolerance, progress)
            problem = make_problem()
            timer = KernelTimer(problem, device, tolerance)
            for part, least_ms in find_least_ms(problem).items():
                progress(f"timing {part}")
                prepare = partial(problem.prepare, part)
                samples[part] = timer.time(prepare, workload.warmup_ms, workload.repetition_ms, least_ms)
    except WrongKernelError as error:
        return Outcome("wrong", reason=str(error))
    derived = error_columns(timer.errors) | rates(samples)
    if refused:
        derived["notes"] = [f"{user_code} does not take {', '.join(refused)}"]
    return Outcome("ok", samples, derived)
