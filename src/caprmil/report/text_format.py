"""Numbers and dates as text."""

from datetime import datetime
from math import floor, log10

PERCENT = "\u00a0%"  # stays on the line of its number
CERTAIN = 0.9995  # no model is certain: what is beyond is not shown as 100 %


def percent(probability: float) -> str:
    """Return a probability in per cent, never as 0 % or 100 %."""
    if probability > CERTAIN:
        return f"> 99.9{PERCENT}"
    if probability < 1 - CERTAIN:
        return f"< 0.1{PERCENT}"
    digits = 1 if probability > 0.985 or probability < 0.015 else 0
    return f"{100 * probability:.{digits}f}{PERCENT}"


def share(part: float) -> str:
    """Return a share in per cent, which may be 0 % or 100 %."""
    if 0 < part < 0.0005:
        return f"< 0.1{PERCENT}"
    digits = 0 if part >= 0.0995 or not part else 1
    return f"{100 * part:.{digits}f}{PERCENT}"


def signed(value: float) -> str:
    """Return a number with its sign, a real minus, and at least three significant digits."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = f"{size:.3f}" if size >= 0.1 else f"{size:.3g}"
    return f"{'+' if value > 0 else '−'}{digits}"


def number(value: float) -> str:
    """Return a number with four significant digits and a real minus: 0.1235, 12.35, 12,346."""
    size = abs(value)
    if size >= 10_000:
        text = f"{size:,.0f}" if size < 1e9 else f"{size:.3e}"
    else:
        text = f"{size:.4g}" if size >= 1e-4 or not size else f"{size:.2e}"
    return f"−{text}" if value < 0 else text


def decimals(spread: float) -> int | None:
    """Return the decimals that matter for numbers that differ by `spread`: three digits of it.

    None means significant digits, for numbers that are tiny or all equal.
    """
    if not spread or not 1e-6 < spread < 1e9:
        return None
    return max(0, 2 - floor(log10(spread)))


def fixed(value: float, places: int | None) -> str:
    """Return a number with these decimals, and a real minus."""
    if places is None:
        return number(value)
    text = f"{abs(value):,.{places}f}"
    return f"−{text}" if value < 0 and text.strip("0.,") else text


def signed_fixed(value: float, places: int | None) -> str:
    """Return a number as `fixed` does, with a plus if it is positive."""
    text = fixed(value, places)
    return f"+{text}" if value > 0 and text.strip("0.,") else text


def timestamp(when: datetime) -> str:
    """Return a date and time in UTC."""
    return f"{when:%Y-%m-%d %H:%M} UTC"
