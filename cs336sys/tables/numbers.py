"""Numbers as text, by unit: the one place where digits are rounded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cs336sys.results.model import Samples
from cs336sys.results.statistics import Interval, is_noisy, same_within

# What a table's cell holds.
Value = str | bool | int | float | Samples | Interval | None

MISSING = "-"


@dataclass(frozen=True)
class Unit:
    """The way in which numbers of one unit are written.

    Attributes:
        label: the unit's name for a column header; empty where every number carries its own.
        digits: significant digits, as far as ``most_decimals`` and the digits before the point allow.
        scales: (divisor, suffix) in rising order; a number is written in the largest that does not exceed it.
        factor: how many of ``label`` are one of the unit.
    """

    label: str = ""
    digits: int = 4
    most_decimals: int = 4
    scales: tuple[tuple[float, str], ...] = ((1, ""),)
    factor: float = 1


# By the unit's name as column names and samples spell it; any other unit is written like ms under its own name.
UNITS = {
    "gib": Unit("GiB"),
    # For people, of numbers that are GiB: see shown_units.
    "gib as mib": Unit("MiB", factor=2**10),
    "gbps": Unit("GB/s"),
    "joules": Unit("J"),
    "tokens_per_j": Unit("tokens/J", most_decimals=1),
    "mhz": Unit("MHz", most_decimals=0),
    "tflops": Unit("TFLOP/s"),
    "tokens_per_s": Unit("tokens/s", most_decimals=1),
    "examples_per_s": Unit("examples/s", most_decimals=1),
    "percent": Unit("%", digits=3, most_decimals=2),
    "ratio": Unit(most_decimals=3, scales=((1, "x"),)),
    "p_value": Unit(digits=2),
    "correlation": Unit(most_decimals=2),
    "count": Unit(most_decimals=0),
    "parameters": Unit(most_decimals=2, scales=((1, ""), (1e3, " K"), (1e6, " M"), (1e9, " B"), (1e12, " T"))),
    # Messages and bandwidths are counted in powers of ten, memory in powers of two.
    "decimal_bytes": Unit(most_decimals=2, scales=((1, " B"), (1e3, " KB"), (1e6, " MB"), (1e9, " GB"), (1e12, " TB"))),
    "bytes": Unit(most_decimals=2, scales=((1, " B"), (2**10, " KiB"), (2**20, " MiB"), (2**30, " GiB"))),
    "value": Unit(digits=6),
}

# Units of values that have a column for their unit next to them: (divisor, label) in rising order.
_SHOWN_UNITS = {
    "bytes": tuple((2 ** (10 * power), label) for power, label in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
    "decimal_bytes": tuple((10 ** (3 * power), label) for power, label in enumerate(("B", "KB", "MB", "GB", "TB"))),
    "flops": tuple((10 ** (3 * power), f"{prefix}FLOPs") for power, prefix in enumerate(("", "K", "M", "G", "T", "P"))),
    "parameters": ((1, "parameters"), (10**6, "million parameters"), (10**9, "billion parameters")),
    "s": ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1, "s")),
}


def unit_label(unit: str | None) -> str:
    """Return what a header says after its comma: ``GiB`` for ``gib``, nothing where the numbers carry their unit."""
    return "" if unit is None else _rule(unit).label


def shown_units(columns: Sequence[tuple[str | None, Sequence[Value]]]) -> list[str | None]:
    """Return the unit in which each column of a table is shown, from the columns' units and values.

    Their own, but MiB for GiB where the largest number is below 0.1 GiB, of which GiB with four decimals would leave
    three digits. A column of zeros follows the others in GiB.
    """
    largest = [max((abs(_number(value)) for value in values), default=0.0) for _, values in columns]
    units = [unit for unit, _ in columns]
    largest_gib = max((size for unit, size in zip(units, largest, strict=True) if unit == "gib"), default=0.0)
    return [
        "gib as mib" if unit == "gib" and 0 < (size or largest_gib) < 0.1 else unit
        for unit, size in zip(units, largest, strict=True)
    ]


def central_value(value: Value) -> str | bool | float | None:
    """Return the mean of samples, the estimate of an interval, and any other value as it is."""
    if isinstance(value, Samples):
        return value.mean if value.measured else None
    return value.estimate if isinstance(value, Interval) else value


def _number(value: Value) -> float:
    """Return the number of a table's cell; 0 for text, None, infinity and NaN."""
    value = central_value(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def format_value(value: Value, unit: str | None = None) -> str:
    """Write a table cell for people: text as it is, ``yes`` or ``no``, a number, samples as mean ± std, ``-`` for None.

    Samples that vary too much end in ``!``. A difference is one of three: a number, and of a ratio its interval;
    ``same within 2.1 %``; or ``undecided``. A cost within the noise is an upper bound, ``< 1.2``.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Samples):
        if not value.measured:
            return MISSING
        std = value.std if len(value.measured) > 1 else None
        return format_mean_std(value.mean, std, unit or value.unit) + (" !" if is_noisy(value) else "")
    if isinstance(value, Interval):
        return _format_interval(value, unit)
    return format_number(value, unit)


def _format_interval(interval: Interval, unit: str | None) -> str:
    """Write an estimate, with its interval if it is a ratio, or what the interval says in place of the estimate."""
    low, high = (format_number(end, unit) for end in (interval.low, interval.high))
    # The order matters: a range, and an undecided ratio, contain "no difference" as noise does.
    if interval.is_range:
        return f"{low} to {high}"
    if interval.is_undecided:
        return "undecided"
    if interval.is_noise and interval.is_cost:
        return f"< {high}"
    if interval.is_noise and interval.is_ratio:
        return same_within(interval.low, interval.high)
    if interval.neutral is not None and interval.is_noise:  # A difference. The first half is for mypy alone.
        largest = max(interval.neutral - interval.low, interval.high - interval.neutral)
        return f"same within {format_number(largest, unit)}"
    if interval.is_bound and interval.is_ratio:
        return f"at least {low}" if interval.low > 1 else f"at most {high}"
    estimate = format_number(interval.estimate, unit)
    return f"{estimate} ({low.removesuffix('x')} to {high.removesuffix('x')})" if interval.is_ratio else estimate


def format_number(value: float | None, unit: str | None = None) -> str:
    """Write a number under a header with its unit: four significant digits, thousands separators, ``-`` for None.

    Without a unit a whole number keeps all digits and no separators, and another up to four decimals, a tiny one as
    ``1.2e-05``.
    """
    if value is None:
        return MISSING
    if unit is None:
        if isinstance(value, int) or not math.isfinite(value):
            return str(value)
        return f"{value:.2g}" if value and abs(value) < 1e-4 else f"{value:z.4f}".rstrip("0").rstrip(".")
    rule = _rule(unit)
    value *= rule.factor
    divisor, suffix = _scale(value, rule.scales)
    if isinstance(value, int) and divisor == 1:
        return f"{value:,}{suffix}"
    scaled = value / divisor
    decimals = _decimals(scaled, digits=rule.digits, most=rule.most_decimals)
    if scaled and not round(scaled, decimals):  # It would be written as 0.00.
        return f"{scaled:.1e}{suffix}"
    return _fixed(scaled, decimals) + suffix


def format_mean_std(mean: float, std: float | None, unit: str) -> str:
    """Write ``12.34 ± 0.05``, both in the same unit with the same number of decimals.

    The larger of the two has the digits of the unit, or one less where that is enough for two digits of the std. A std
    that would be rounded to 0 gets one decimal more where that shows it.
    """
    if std is None or not math.isfinite(mean):
        return format_number(mean, unit)
    rule = _rule(unit)
    mean, std = rule.factor * mean, rule.factor * std
    divisor, suffix = _scale(mean, rule.scales)
    mean, std = mean / divisor, std / divisor
    larger = max(abs(mean), std) if math.isfinite(std) else abs(mean)
    std_decimals = _decimals(std, digits=2, most=rule.most_decimals)
    fewest_decimals = _decimals(larger, digits=rule.digits - 1, most=rule.most_decimals)
    decimals = min(_decimals(larger, digits=rule.digits, most=rule.most_decimals), max(std_decimals, fewest_decimals))
    if math.isfinite(std) and round(std, decimals) == 0 < round(std, decimals + 1):
        decimals += 1
    return f"{_fixed(mean, decimals)} ± {_fixed(std, decimals)}{suffix}"


def format_duration(seconds: float) -> str:
    """Write a time to wait: ``0.4 s``, ``12 s``, ``3 min 20 s``, ``1 h 05 min``."""
    if seconds < 9.95:  # from here on one decimal would make it 10.0 s
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest_s:02} s" if minutes else f"{rest_s} s"


def format_quantity(value: float | None, unit: str) -> str:
    """Write a number with its unit, for running text: ``12.34 ms``, ``1.50 GiB``, ``5.00 %``."""
    label = unit_label(unit) if value is not None else ""
    return f"{format_number(value, unit)} {label}".rstrip()


def in_shown_unit(value: float, unit: str) -> tuple[float, str]:
    """Return a value in the largest unit that leaves it at 1 or more, and that unit: of 3e9 bytes (2.79, "GiB").

    A unit that has no scales, ``tokens``, is its own label.
    """
    divisor, label = _scale(value, _SHOWN_UNITS.get(unit, ((1, unit),)))
    return value if divisor == 1 else value / divisor, label  # A division would make a float of an integer.


def format_operand(value: float) -> str:
    """Write a number in a formula: an integer with all digits, another with six; large and small ones as ``4.6e14``."""
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:,.6g}" if 1e-4 <= abs(value) < 1e6 or value == 0 else f"{value:.6g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def _rule(unit: str) -> Unit:
    return UNITS.get(unit) or Unit(unit)


def _scale(value: float, scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest scale, (divisor, name), that leaves a value at 1 or more, or else that of divisor 1."""
    fitting = [scale for scale in scales if scale[0] <= abs(value) < math.inf]  # Scales rise.
    return fitting[-1] if fitting else next(scale for scale in scales if scale[0] == 1)


def _decimals(value: float, digits: int, most: int) -> int:
    """Return how many decimals show ``value`` with ``digits`` significant digits, at most ``most``."""
    if value == 0 or not math.isfinite(value):
        return most
    # The exponent after rounding: 9.9996 with four digits is 10.00, which has two decimals and not three.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return min(max(digits - 1 - exponent, 0), most)


def _fixed(value: float, decimals: int) -> str:
    # z: a small negative number is rounded to 0.00, not to -0.00.
    return f"{value:z,.{decimals}f}"
