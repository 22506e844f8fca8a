"""Numbers as text, with no more digits than the reader can use."""

from __future__ import annotations

from typing import Any

from .naming import is_interval, is_number, text_of

NOTHING = "-"
NO_EFFECT = "no measurable effect"
# What only the 95% interval shows, or too few rounds.
UNCLEAR = ", unclear"


def figure(value: Any, form: str = "{:.3g}") -> str:
    """A number in the given form; `inf` and `nan` as they are, and `-` for nothing."""
    if value is None:
        return NOTHING
    return form.format(value) if is_number(value) else text_of(value)


def seconds(value: Any) -> str:
    """A time in the unit that suits it."""
    if not is_number(value):
        return figure(value)
    scale, unit = next((each for each in ((1, "s"), (1e3, "ms")) if value * each[0] >= 1), (1e6, "µs"))
    return f"{_three_digits(value * scale)} {unit}"


def megabytes(value: Any) -> str:
    """Bytes in millions."""
    return f"{_three_digits(value / 1e6)} MB" if is_number(value) else figure(value)


def ratio(value: Any) -> str:
    """A ratio with its interval, or just the interval where that holds 1."""
    if not is_interval(value):
        return NOTHING
    median, low, high = value["median"], value["low"], value["high"]
    # So that a narrow interval beside 1 is not shown as 1.
    digits = 2 if high - low >= 0.02 else 3
    interval = f"[{low:.{digits}f}, {high:.{digits}f}]"
    if low <= 1 <= high:
        return f"{NO_EFFECT} {interval}"
    return f"{median:.{digits}f} {interval}" + ("" if measurable(value) else UNCLEAR)


def measurable(value: dict[str, Any], nothing: float = 1.0) -> bool:
    """Whether an effect is claimed: the producer asks more of it than that the 95% interval leaves `nothing` out."""
    low, high = value["low"], value["high"]
    return bool(value.get("measurable", True)) and not low <= nothing <= high


def share(value: Any) -> str:
    """A share of the baseline's time, in per cent.

    The share stands there even where its interval holds 0, since the shares add up.
    """
    if not isinstance(value, dict) or not is_number(value.get("share")):
        return NOTHING
    low, high = value.get("low"), value.get("high")
    text = f"{value['share']:.1%}"
    if is_number(low) and is_number(high):
        interval = f"[{low:.1%}, {high:.1%}]"
        if low <= 0 <= high:
            text = f"{text} {interval}, {NO_EFFECT}"
        else:
            text = f"{text} {interval}" + ("" if measurable(value, 0.0) else UNCLEAR)
    error = value.get("sampling_error")
    return f"{text} ± {error:.1%} by sampling" if is_number(error) else text


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"
