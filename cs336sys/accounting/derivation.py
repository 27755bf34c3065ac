"""Values that know how they were computed: the same arithmetic gives the number and the formula next to it.

A formula is an ordinary Python function of numbers, ``def ring_all_gather_s(size, devices, bytes_per_s)``. Called with
numbers it returns a number; called with symbols it returns an :class:`Expression`, which has that number as its value
and can be written with names and with numbers. Text and value cannot disagree, because nobody writes the text.

    >>> n, s, w = symbol("N", 4), symbol("S", 8e9), symbol("W", 1e11)
    >>> (2 * (n - 1) / n * s / w).formula
    '2 (N - 1) / N x S / W'
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Union

Number = Union[int, float, "Expression"]

# How tightly an expression holds together, for parentheses.
_SUM, _PRODUCT, _ATOM = range(3)

_TIMES = " x "


def divide(a: float, b: float) -> float:
    """Return ``a / b``, as an integer where both are and it is one: bytes stay whole."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _operator(
    text: str,
    compute: Callable[[float, float], float],
    binding: int,
    *,
    right: int | None = None,
    neutral: int | None = None,
    is_reflected: bool = False,
) -> Callable[["Expression", Number], "Expression"]:
    """Return a method of :class:`Expression`.

    Args:
        binding: precedence of the result; a left operand of a lower one gets parentheses.
        right: below which a right operand gets them, where that differs: ``a - (b - c)``.
        neutral: the plain number that changes nothing and is not written, as in ``a x 1``.
        is_reflected: whether the method is that of the right operand, as ``__radd__``.
    """

    def join(expression: "Expression", operand: Number) -> "Expression":
        if not isinstance(operand, Expression) and operand == neutral:
            return expression
        a, b = (operand, expression) if is_reflected else (expression, operand)
        first, second = expression_of(a), expression_of(b)
        parts = (*first._within(binding), text, *second._within(binding if right is None else right))
        return Expression(compute(first.value, second.value), parts, binding)

    return join


def _comparison(compare: Callable[[float, float], bool]) -> Callable[["Expression", Number], bool]:
    """Return a method of :class:`Expression` that compares values."""
    return lambda expression, operand: compare(expression.value, number_of(operand))


class Expression:
    """A number, its ``value``, and the arithmetic that it came from.

    Supports ``+ - * / **`` with numbers and expressions, ``math.ceil`` and ``math.floor``, and comparison by value;
    :func:`maximum` and :func:`minimum` keep all operands in the text. Multiplying by 1 and adding 0 leave no trace.
    """

    def __init__(self, value: float, parts: tuple["str | _Symbol", ...], binding: int):
        self.value = value
        self._parts = parts
        self._binding = binding

    @property
    def formula(self) -> str:
        """Write the formula with names: ``2 (N - 1) / N x S / W``, a product as a space where that is clear."""
        text = ""
        # Whether the term follows a division: outside, and in each open parenthesis.
        after_division = [False]
        for position, part in enumerate(self._parts):
            if isinstance(part, _Symbol):
                text += part.name
                continue
            if part == _TIMES:
                following = self._parts[position + 1]
                # Not before a number, "2 3", nor after a division: "a / b c" reads as a / (b c).
                is_clear = (isinstance(following, _Symbol) or following == "(") and not after_division[-1]
                part = " " if is_clear else _TIMES
            if part.endswith("("):
                after_division.append(False)
            elif part == ")":
                after_division.pop()
            elif part.endswith(" ") and part != " ":
                # An operator or a comma; numbers and powers leave the division open.
                after_division[-1] = part == " / "
            text += part
        return text

    def substituted(self, format_number: Callable[[float], str]) -> str:
        """Write the formula with each symbol's number in its place."""
        return "".join(format_number(part.value) if isinstance(part, _Symbol) else part for part in self._parts)

    @property
    def is_symbol(self) -> bool:
        """Return whether it is one symbol, of which nothing is left to compute."""
        return len(self._parts) == 1

    __add__ = _operator(" + ", operator.add, _SUM, neutral=0)
    __radd__ = _operator(" + ", operator.add, _SUM, neutral=0, is_reflected=True)
    __sub__ = _operator(" - ", operator.sub, _SUM, right=_PRODUCT, neutral=0)
    __rsub__ = _operator(" - ", operator.sub, _SUM, right=_PRODUCT, is_reflected=True)
    __mul__ = _operator(_TIMES, operator.mul, _PRODUCT, neutral=1)
    __rmul__ = _operator(_TIMES, operator.mul, _PRODUCT, neutral=1, is_reflected=True)
    __truediv__ = _operator(" / ", divide, _PRODUCT, right=_ATOM, neutral=1)
    __rtruediv__ = _operator(" / ", divide, _PRODUCT, right=_ATOM, is_reflected=True)

    def __pow__(self, exponent: float) -> "Expression":
        if exponent == 0.5:
            return _function_call("sqrt", math.sqrt, self)
        # A power of a power is an atom, too, and needs parentheses.
        base = self._parts if self.is_symbol else ("(", *self._parts, ")")
        return Expression(self.value**exponent, (*base, f"^{exponent:g}"), _ATOM)

    def __ceil__(self) -> "Expression":
        return _function_call("ceil", math.ceil, self)

    def __floor__(self) -> "Expression":
        return _function_call("floor", math.floor, self)

    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    def _within(self, binding: int) -> tuple["str | _Symbol", ...]:
        return self._parts if self._binding >= binding else ("(", *self._parts, ")")


@dataclass(frozen=True)
class _Symbol:
    name: str
    value: float


@dataclass(frozen=True)
class Derived:
    """One derived value: a row of an answer.

    Attributes:
        quantity: what it is, in words.
        result: of its formula; a plain number has none and is written out.
        unit: ``bytes``, ``s``, ``flops``, ``tokens``, ``devices`` or any other plural noun; "" for a ratio.
        symbol: its name in its own and in later formulas.
        relation: ``=``, or ``<=`` and ``>=`` where the expression bounds the symbol.
        reason: why the formula holds, in one sentence.
        source: where the formula comes from.
        question: the handout's problem that it answers, ``fsdp_calcs (a)``; "" for a step on the way.
    """

    quantity: str
    result: Number
    unit: str
    symbol: str = ""
    relation: str = "="
    reason: str = ""
    source: str = ""
    question: str = ""

    @property
    def expression(self) -> Expression:
        """Return its value and formula."""
        return expression_of(self.result)

    @property
    def value(self) -> float:
        return number_of(self.result)

    def as_symbol(self) -> Expression:
        """Return this value under its name, for the formulas that build on it."""
        return symbol(self.symbol, self.value)

    def derivation(self, format_number: Callable[[float], str]) -> str:
        """Write formula and numbers in one line, without the result: ``P = 2 D F L = 2 x 16 x 64 x 3``."""
        formula, numbers = self.expression.formula, self.expression.substituted(format_number)
        steps = [formula] if self.expression.is_symbol or formula == numbers else [formula, numbers]
        start = f"{self.symbol} {self.relation} " if self.symbol else ""
        return start + " = ".join(steps)


@functools.cache
def _reasons() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("cs336sys.accounting", "."), undefined=StrictUndefined)
    return environment.get_template("reasons.jinja").module


def why(name: str, *facts: Any) -> str:
    """Return the sentence of this name in ``reasons.jinja``: why a formula holds."""
    return " ".join(getattr(_reasons(), name)(*facts).split())


def symbol(name: str, value: Number) -> Expression:
    """Return a named number: what formulas are written in."""
    number = number_of(value)
    return Expression(number, (_Symbol(name, number),), _ATOM)


def number_of(value: Number) -> float:
    """Return the plain number of a number or an expression."""
    return value.value if isinstance(value, Expression) else value


def expression_of(value: Number) -> Expression:
    """Return an expression as it is, a plain number as a constant that is written out."""
    if isinstance(value, Expression):
        return value
    # 4e14 instead of 4e+14; all digits where six change the value.
    short = f"{value:g}".replace("e+0", "e").replace("e+", "e")
    return Expression(value, (short if float(short) == value else str(value),), _ATOM)


def log2(value: Expression) -> Expression:
    return _function_call("log2", math.log2, value)


def _choose(name: str, choose: Callable[..., float], *terms: Number) -> Number:
    """Return the chosen term; as an expression it names all of them."""
    if len(terms) == 1:
        return terms[0]
    if not any(isinstance(term, Expression) for term in terms):
        return choose(terms)
    return _function_call(name, choose, *terms)


maximum = partial(_choose, "max", max)
minimum = partial(_choose, "min", min)


def _function_call(name: str, function: Callable[..., float], *terms: Number) -> Expression:
    """Return a function of terms, written ``name(a, b)``."""
    parts: list[str | _Symbol] = [f"{name}("]
    for position, term in enumerate(map(expression_of, terms)):
        if position:
            parts.append(", ")
        parts += term._parts
    return Expression(function(*map(number_of, terms)), (*parts, ")"), _ATOM)
