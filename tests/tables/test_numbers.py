import math

import pytest

from cs336sys.results.model import Samples
from cs336sys.results.statistics import Interval
from cs336sys.tables.numbers import (
    MISSING,
    format_mean_std,
    format_number,
    format_operand,
    format_quantity,
    format_value,
    in_shown_unit,
    unit_label,
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12.3456, "ms", "12.35"),
        (1.23456, "ms", "1.235"),
        (0.0456, "ms", "0.0456"),
        (123.456, "ms", "123.5"),
        (12345.6, "ms", "12,346"),
        # Rounding carries into a new digit: four digits all the same.
        (9.9996, "ms", "10.00"),
        (-0.00001, "ms", "-1.0e-05"),
        (0.0000213, "ms", "2.1e-05"),
        (0.0, "ms", "0.0000"),
        (12, "ms", "12"),
        (45.337, "percent", "45.3"),
        (0.042, "percent", "0.04"),
        (100.0, "percent", "100"),
        (165432.1, "tokens_per_s", "165,432"),
        (2.3144, "ratio", "2.314x"),
        (1234567, "count", "1,234,567"),
        (128_625_408, "parameters", "128.6 M"),
        (3_406_809_600, "parameters", "3.41 B"),
        (999, "parameters", "999"),
        (1536, "bytes", "1.50 KiB"),
        (0, "bytes", "0 B"),
        (0.0123, "p_value", "0.012"),
        (1.5, "furlongs", "1.500"),
        (None, "ms", MISSING),
        (math.nan, "ms", "nan"),
        (math.inf, "parameters", "inf"),
        (-math.inf, "ms", "-inf"),
        (math.nan, None, "nan"),
        (32768, None, "32768"),
        (10.0001, None, "10.0001"),
        (0.25, None, "0.25"),
        (3e-5, None, "3e-05"),
        (0.0, None, "0"),
    ],
)
def test_number_follows_its_unit(value, unit, text):
    assert format_number(value, unit) == text


@pytest.mark.parametrize(
    ("mean", "std", "unit", "text"),
    [
        (12.3456, 0.0512, "ms", "12.35 ± 0.05"),
        # A large std: two digits of it are enough, and three of the mean.
        (12.3456, 3.21, "ms", "12.3 ± 3.2"),
        (123.456, 31.0, "ms", "123 ± 31"),
        # A small std: one decimal more where that shows it.
        (1234.52, 0.26, "ms", "1,234.5 ± 0.3"),
        (1234.52, 0.026, "ms", "1,235 ± 0"),
        (0.01, 0.3, "ms", "0.010 ± 0.300"),
        (-0.0001, 0.3, "ms", "0.000 ± 0.300"),
        (0.0, 0.0, "ms", "0.0000 ± 0.0000"),
        # Both in the unit that the mean chooses.
        (3 * 2**30, 2**28, "bytes", "3.00 ± 0.25 GiB"),
        (12.3456, None, "ms", "12.35"),
        (math.nan, math.nan, "ms", "nan"),
        (12.3456, math.inf, "ms", "12.35 ± inf"),
    ],
)
def test_mean_and_std_share_unit_and_decimals(mean, std, unit, text):
    assert format_mean_std(mean, std, unit) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        ("oom", None, "oom"),
        (True, None, "yes"),
        (False, "count", "no"),
        (None, None, MISSING),
        (Samples("ms", "cuda events", (12.0, 12.1, 12.2)), None, "12.10 ± 0.10"),
        (Samples("ms", "cuda events", ()), "ms", MISSING),
    ],
)
def test_any_cell_value_has_a_text(value, unit, text):
    assert format_value(value, unit) == text


def test_quantity_carries_its_unit():
    assert format_quantity(12.3456, "ms") == "12.35 ms"
    assert format_quantity(5, "percent") == "5 %"
    assert format_quantity(2.0, "ratio") == "2.000x"
    assert format_quantity(1536, "bytes") == "1.50 KiB"
    assert format_quantity(None, "ms") == MISSING


def test_label_stands_in_the_header_unless_the_numbers_carry_it():
    units = ("ms", "gib", "percent", "parameters", "ratio", None)
    assert [unit_label(unit) for unit in units] == ["ms", "GiB", "%", "", "", ""]
    assert unit_label("furlongs") == "furlongs"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (3 * 2**30, "bytes", (3.0, "GiB")),
        (1023, "bytes", (1023, "B")),
        (-(2**21), "bytes", (-2.0, "MiB")),
        (3_517_578_215_424, "decimal_bytes", (3.517578215424, "TB")),
        (2.5e12, "flops", (2.5, "TFLOPs")),
        (611.669e-6, "s", (pytest.approx(611.669), "us")),
        (0, "s", (0, "s")),
        (219_848_638_464, "parameters", (219.848638464, "billion parameters")),
        (319.44, "tokens", (319.44, "tokens")),
        (math.inf, "bytes", (math.inf, "B")),
    ],
)
def test_values_of_mixed_company_get_the_unit_that_fits(value, unit, shown):
    assert in_shown_unit(value, unit) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (219_848_638_464, "219,848,638,464"),
        (2 * 9e10, "1.8e11"),
        (2e-5, "2e-5"),
        (2555.5555, "2,555.56"),
        (0.00260459, "0.00260459"),
        (0.0, "0"),
    ],
)
def test_operands_of_a_formula(value, text):
    assert format_operand(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Interval(1.02, 0.98, 1.04, 1.0), "same within 4 %"),
        (Interval(1.02, 0.98, 1.06, 1.0), "undecided"),
        (Interval(1.2, 0.0, math.inf, 1.0), "undecided"),
        (Interval(1.02, 1.01, 1.05, 1.0), "1.020x (1.010 to 1.050)"),
        (Interval(3.95, 3.82, 4.2, 1.0, is_bound=True), "at least 3.820x"),
        (Interval(0.25, 0.24, 0.26, 1.0, is_bound=True), "at most 0.260x"),
        (Interval(1.0, 1.0, 1.0), "1.000x"),
    ],
)
def test_a_ratio_differs_is_the_same_or_is_undecided(value, text):
    assert format_value(value, "ratio") == text
