"""What a saved line may hold, so that nothing that shows it needs guards of its own. Plain data, no torch."""

import math
from typing import Any

from cs336sys.printable import printable

# The largest file in docs/results holds 2.3 MB in lines of at most 55 KB, nested 5 deep, with text of 982 characters.
FILE_BYTES = 128 * 2**20
LINE_BYTES = 32 * 2**20
# A number takes 32 bytes of memory, a list or an object 100 to 300.
FILE_LINES = 1_000_000
FILE_VALUES = 16_000_000
FILE_CONTAINERS = 500_000
LINE_CONTAINERS = 200_000
DEPTH = 32
TEXT_CHARACTERS = 20_000

# float32 ends at 3.4e38. Squares of squares of numbers up to here are still floats, so that no mean, variance or
# standard error of samples overflows; likewise of their reciprocals.
LARGEST = 1e60
_MOST_INTEGER = 2**64

TIME_UNITS = frozenset({"s", "ms", "us", "ns"})


def checked_value(value: Any, depth: int = DEPTH) -> Any:
    """The value of a line, with its text :func:`~cs336sys.printable.printable`.

    Raises:
        ValueError: it is nested too deep, or holds a number or a text that is too large; the sentence says which.
    """
    if isinstance(value, str):
        if len(value) > TEXT_CHARACTERS:
            raise ValueError(f"a text has {len(value):,} characters, more than {TEXT_CHARACTERS:,}")
        return printable(value)
    if isinstance(value, float):
        if math.isfinite(value) and abs(value) > LARGEST:
            raise ValueError(f"{value:g} is beyond {LARGEST:g}")
    elif isinstance(value, int):
        if abs(value) >= _MOST_INTEGER:
            raise ValueError("an integer has more than 64 bits")
    elif isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(f"values are nested more than {DEPTH} deep")
        if isinstance(value, dict):
            return {checked_value(name): checked_value(item, depth - 1) for name, item in value.items()}
        # Most are samples, in their thousands.
        return [
            item if type(item) is float and -LARGEST <= item <= LARGEST else checked_value(item, depth - 1)
            for item in value
        ]
    return value


def check_samples(name: str, unit: str, measured: list[Any], warmup: list[Any]) -> None:
    """Check the numbers of one series.

    Raises:
        ValueError: there is none, or one is no number, is too small to be divided by, or is no time where all are.
    """
    if not measured:
        raise ValueError(f"{name} has no sample")
    numbers = (*measured, *warmup)
    if not set(map(type, numbers)) <= {int, float}:
        raise ValueError(f"a sample of {name} is no number")
    if unit in TIME_UNITS and (none := next((value for value in numbers if value <= 0), None)) is not None:
        raise ValueError(f"a sample of {name} is {none:g} {unit}, and a time is more than 0")
    least = 1 / LARGEST
    if (tiny := next((value for value in numbers if -least < value < least and value), None)) is not None:
        raise ValueError(f"a sample of {name} is {tiny:g}, nearer to 0 than {least:g}")
