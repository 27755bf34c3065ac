"""Expressions: the number and the two texts of the same arithmetic."""

import math
import random

import pytest

from cs336sys.accounting.derivation import Expression, expression_of, maximum, number_of, symbol

N, S, W, B = symbol("N", 4), symbol("S", 96), symbol("W", 8), symbol("B", 3)


@pytest.mark.parametrize(
    ("expression", "value", "formula", "substituted"),
    [
        (2 * (N - 1) / N * S / W, 18.0, "2 (N - 1) / N x S / W", "2 x (4 - 1) / 4 x 96 / 8"),
        (12 * B * S / (N * W), 108, "12 B S / (N W)", "12 x 3 x 96 / (4 x 8)"),
        (S / (N / W), 192.0, "S / (N / W)", "96 / (4 / 8)"),
        (S / 2 * B, 144, "S / 2 x B", "96 / 2 x 3"),
        (W / N**2 * B, 1.5, "W / N^2 x B", "8 / 4^2 x 3"),
        (S - (N - B), 95, "S - (N - B)", "96 - (4 - 3)"),
        ((B + N) ** 2, 49, "(B + N)^2", "(3 + 4)^2"),
        ((S * W / B) ** 0.5, 16.0, "sqrt(S W / B)", "sqrt(96 x 8 / 3)"),
        (maximum(S / N, B * W), 24, "max(S / N, B W)", "max(96 / 4, 3 x 8)"),
        (sum([B, N, 2]), 9, "B + N + 2", "3 + 4 + 2"),
        (4e14 * B, 1.2e15, "4e14 B", "4e14 x 3"),
        (1234567 * B, 3703701, "1234567 B", "1234567 x 3"),
    ],
)
def test_value_and_both_texts(expression, value, formula, substituted):
    assert expression.value == value
    assert expression.formula == formula
    assert expression.substituted(str) == substituted


def test_factors_of_one_and_terms_of_zero_leave_no_trace():
    for expression in (1 * N, N * 1, N / 1, N + 0, 0 + N, N - 0, sum([N]), maximum(N)):
        assert expression.formula == "N"
        assert expression.is_symbol


def test_whole_quotients_stay_whole():
    assert (S / N).value == 24
    assert isinstance((S / N).value, int)
    assert (N / S).value == pytest.approx(1 / 24)


def test_numbers_compare_by_value():
    assert N < 5 < S
    assert S >= 96 > N
    assert N <= 4
    assert not N > B + 1


def test_the_text_with_numbers_computes_to_the_value():
    """Random arithmetic: what is printed, read again as arithmetic, gives what was computed."""
    chance = random.Random(0)
    functions = {"sqrt": math.sqrt, "max": max, "min": min, "ceil": math.ceil, "floor": math.floor, "log2": math.log2}

    def build(depth: int) -> Expression | int:
        if depth == 0:
            return chance.choice([N, S, W, B, chance.randint(1, 9)])
        a, b = build(depth - 1), build(depth - 1)
        return chance.choice(
            [
                lambda: a + b,
                lambda: a - b,
                lambda: a * b,
                lambda: a / b if number_of(b) else a,
                lambda: maximum(a, b),
                lambda: math.ceil(a) * 1,
                lambda: a**2,
            ]
        )()

    for _ in range(500):
        expression = expression_of(build(4))
        text = expression.substituted(repr).replace(" x ", " * ").replace("^", "**")
        again = eval(text, {"__builtins__": {}}, functions)
        assert again == pytest.approx(expression.value, rel=1e-9, abs=1e-9), text
