"""Student's t with any number of degrees of freedom: its tail and quantiles. Standard library only."""

import math
from statistics import NormalDist

# A continued fraction adds about as many digits with every term, here and in _quantile's steps.
_PRECISION = 1e-15
_TERMS = 10_000
_STEPS = 200

# From here on the difference of two logarithms of Gamma has lost digits that its series has.
_LARGE = 50.0


def upper_tail(degrees: float, t: float) -> float:
    """The probability of more than ``t``, which is not negative.

    ``I_x(degrees / 2, 1 / 2) / 2`` with ``x = degrees / (degrees + t^2)``: the regularized incomplete beta function
    (Abramowitz and Stegun 26.5.27, 26.7.1).
    """
    if t == 0:
        return 0.5
    a, square = degrees / 2, t * t
    front = math.exp(
        -a * math.log1p(square / degrees) + 0.5 * (math.log(square) - math.log(degrees + square)) - _log_beta(a)
    )
    x = degrees / (degrees + square)
    if x < (a + 1) / (a + 2.5):
        return front * _continued_fraction(a, 0.5, x) / a / 2
    return (1 - front * _continued_fraction(0.5, a, square / (degrees + square)) / 0.5) / 2


def quantile(degrees: float, probability: float) -> float:
    """What is not exceeded with this probability, which is from a half to less than 1: Newton's steps, kept between."""
    wanted = 1 - probability
    if wanted >= 0.5:
        return 0.0
    low, high = 0.0, max(1.0, NormalDist().inv_cdf(probability))
    while upper_tail(degrees, high) > wanted:
        low, high = high, 2 * high
    t = high
    for _ in range(_STEPS):
        excess = upper_tail(degrees, t) - wanted
        low, high = (t, high) if excess > 0 else (low, t)
        step = t + excess / _density(degrees, t)
        if not low < step < high:
            step = (low + high) / 2
        if abs(step - t) <= _PRECISION * t:
            break
        t = step
    return t


def _density(degrees: float, t: float) -> float:
    a = degrees / 2
    return math.exp(-(a + 0.5) * math.log1p(t * t / degrees) - 0.5 * math.log(degrees) - _log_beta(a))


def _log_beta(a: float) -> float:
    """Of ``B(a, 1 / 2)``."""
    if a < _LARGE:
        return math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    # lgamma(a + 1/2) - lgamma(a), from Stirling's series.
    difference = 0.5 * math.log(a) - 1 / (8 * a) + 1 / (192 * a**3) - 1 / (640 * a**5) + 17 / (14336 * a**7)
    return math.lgamma(0.5) - difference


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Of the incomplete beta function (Abramowitz and Stegun 26.5.8), by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value
