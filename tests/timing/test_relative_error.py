import math

import pytest
import torch

from cs336sys.timing.relative_error import ROW_TOLERANCE, error_columns, relative_error, relative_errors, why_wrong


def results(seed=0, shape=(2, 4096, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_error_of_a_whole_is_the_ratio_of_norms():
    expected = results()
    found = expected + 1e-3 * results(1)
    error = relative_error(found.float(), expected)
    assert error.whole == pytest.approx((torch.dist(found, expected) / expected.norm()).item(), rel=1e-4)
    assert error.whole < error.row < 10 * error.whole


@pytest.mark.parametrize("row", [(0, 0), (1, 4095)])
def test_a_row_that_is_left_out_is_wrong_among_thousands(row):
    expected = results()
    found = expected.clone()
    found[row] = 0
    error = relative_error(found, expected)
    tolerance = 2e-2
    assert error.whole < tolerance < ROW_TOLERANCE * tolerance < error.row <= 1
    reason = why_wrong({"out": error}, tolerance)
    assert reason == f"relative error of a row over 0.2: out by {error.row:.1e}"
    assert why_wrong({"out": relative_error(expected, expected)}, tolerance) is None


def test_small_rows_are_held_against_usual_ones_and_large_ones_against_themselves():
    expected = torch.ones(100, 4, dtype=torch.float64)
    expected[0], expected[1] = 1e-6, 100
    usual = expected.norm(dim=-1).square().mean().sqrt()
    off_small, off_large = expected.clone(), expected.clone()
    off_small[0] += 0.01
    off_large[1] += 0.01
    assert relative_error(off_small, expected).row == pytest.approx(0.02 / usual.item())
    assert relative_error(off_large, expected).row == pytest.approx(0.01 / 100)


def test_elements_of_one_dimension_are_rows():
    expected = torch.ones(10_000, dtype=torch.float64)
    found = expected.clone()
    found[7] = 0
    assert relative_error(found, expected) == (0.01, 1)


def test_zeros_but_for_rounding_are_compared_with_the_inputs():
    expected = 1e-17 * results()
    assert relative_error(expected + 1e-8, expected).whole == pytest.approx(1e-8)
    assert relative_error(torch.full_like(expected, 0.5), expected).whole == pytest.approx(0.5)


def test_nan_is_wrong_and_kept():
    found = {"out": results(), "dq": torch.full((4, 4), math.nan)}
    errors = relative_errors(found, {"out": results(), "dq": torch.ones(4, 4, dtype=torch.float64)})
    assert why_wrong(errors, 1.0) == "relative error over 1: dq by nan"
    columns = error_columns(errors)
    assert columns["out_error"] == 0
    assert math.isnan(columns["dq_error"])
    assert math.isnan(columns["error_of_a_row"])
