"""Errors of results, as a whole and in the worst row."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336sys.run.cells import Outcome

# One row of many does not show in the norm of all: of 8,192, a row of zeros is an error of 1.1 %. So a row has a
# tolerance of its own, so many times as large. Rows of plain and tiled attention were off by up to 1.5 times the
# tolerance of the whole (dQ of the first queries in fp16, up to 4096 x 128); a missing row by 15 times and more.
ROW_TOLERANCE = 10.0

# A tensor with a smaller root mean square is zero but for rounding: the gradient of scores with a single key a query.
_ZERO = 1e-9


class RelativeError(NamedTuple):
    """Error of a tensor relative to its reference."""

    whole: float  # ``||x - reference|| / ||reference||``.
    # The largest of any row (along the last dimension), relative to the norm of that row, or to the root mean square of
    # all rows' norms if that is larger. In one dimension a row is an element.
    row: float


def relative_error(actual: Tensor, expected: Tensor) -> RelativeError:
    """Compare a tensor with its reference in float64; one of zeros counts as one of elements of size 1."""
    if expected.dim() < 2:
        actual, expected = actual.reshape(-1, 1), expected.reshape(-1, 1)
    error_norms = torch.linalg.vector_norm(actual.double() - expected, dim=-1)
    norms = torch.linalg.vector_norm(expected, dim=-1)
    usual_norm = norms.square().mean().sqrt()  # The error of a smaller row counts relative to it: see RelativeError.
    usual_norm = torch.where(usual_norm > _ZERO, usual_norm, expected.shape[-1] ** 0.5)  # Else that of a row of ones.
    whole = error_norms.square().mean().sqrt() / usual_norm
    return RelativeError(whole=whole.item(), row=(error_norms / norms.clamp_min(usual_norm)).max().item())


Errors = dict[str, RelativeError]


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Errors:
    """Return the error of each expected tensor, by name."""
    return {name: relative_error(actual[name], tensor) for name, tensor in expected.items()}


def error_columns(errors: Errors) -> dict[str, Any]:
    """Return the columns of a cell: ``NAME_error`` of each tensor as a whole, and the largest ``error_of_a_row``."""
    # NaN is the largest: max() alone would return it only if it came first.
    largest = max((error.row for error in errors.values()), key=lambda row: (math.isnan(row), row))
    return {f"{name}_error": error.whole for name, error in errors.items()} | {"error_of_a_row": largest}


def why_wrong(errors: Errors, tolerance: float) -> str | None:
    """List errors over the tolerance, or over :data:`ROW_TOLERANCE` times it in a row; None if there are none."""
    # Written so that NaN counts as wrong.
    wholes = [f"{name} by {error.whole:.1e}" for name, error in errors.items() if not error.whole <= tolerance]
    if wholes:
        return f"relative error over {tolerance:g}: {', '.join(wholes)}"
    row_tolerance = ROW_TOLERANCE * tolerance
    rows = [f"{name} by {error.row:.1e}" for name, error in errors.items() if not error.row <= row_tolerance]
    return f"relative error of a row over {row_tolerance:g}: {', '.join(rows)}" if rows else None


def judged(errors: Errors, tolerance: float) -> tuple[dict[str, Any], Outcome | None]:
    """Return :func:`error_columns`, and the outcome of a cell that is wrong by :func:`why_wrong`, else None."""
    columns, reason = error_columns(errors), why_wrong(errors, tolerance)
    return columns, None if reason is None else Outcome("wrong", derived=columns, reason=reason)
