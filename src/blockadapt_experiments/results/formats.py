"""Says how numbers and settings are written for people."""

from __future__ import annotations

import json
import math
from typing import Any

NONE = "–"
"""What stands where there is no number."""

_FIXED = (1e-4, 1e6)
"""Numbers below or above these are written with an exponent."""


def number(value: float, digits: int = 4) -> str:
    """Write a number with `digits` significant digits.

    >>> [number(value) for value in (0.0, 0.1, 98.25, 1200.0, 1234567.0, -3.2e-7, float("nan"))]
    ['0', '0.1', '98.25', '1,200', '1.235e6', '−3.2e-7', '–']
    """
    if math.isnan(value):
        return NONE
    if math.isinf(value) or value == 0:
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "0")
    if _FIXED[0] <= abs(value) < _FIXED[1]:
        return _trimmed(f"{value:,.{max(digits - 1 - _exponent(value), 0)}f}")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{_trimmed(mantissa)}e{int(exponent)}"


def estimate(mean: float, half: float) -> str:
    """Write a mean with the half width of its interval, which is given two digits.

    >>> estimate(0.023456, 0.00123), estimate(98.2, float("nan")), estimate(3.21e-7, 4.5e-8), estimate(1234.5, 210.0)
    ('0.0235 ± 0.0012', '98.2', '(3.21 ± 0.45)e-7', '1,234 ± 210')
    """
    if not (math.isfinite(mean) and math.isfinite(half)) or half == 0:
        return number(mean)
    largest = max(abs(mean), half)
    exponent = 0 if _FIXED[0] <= largest < _FIXED[1] else _exponent(largest)
    mean, half = mean / 10.0**exponent, half / 10.0**exponent
    decimals = min(max(1 - _exponent(half), 0), 8)
    text = f"{mean:,.{decimals}f} ± {half:,.{decimals}f}".replace("-", "−")
    return f"({text})e{exponent}" if exponent else text


def setting(value: Any) -> str:
    """Write a setting as one would after `--set`, lists without their brackets.

    >>> setting([0, 1, 2]), setting(0.001), setting(True), setting("dev"), setting(None), setting([])
    ('0, 1, 2', '0.001', 'true', 'dev', 'none', 'none')
    """
    if isinstance(value, (list, tuple)):
        return ", ".join(map(setting, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))


def _trimmed(text: str) -> str:
    """Remove zeros at its end, and put a minus sign instead of a hyphen."""
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
