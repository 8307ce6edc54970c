"""How numbers look in a report."""

from __future__ import annotations

from collections.abc import Sequence

from pctree.bench.measures import Estimate

ABSENT = "–"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}{unit}"


def times(value: float | None) -> str:
    return number(value, unit="×")


def signed(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:+,.{digits}f}".replace("-", "−")


def percent(value: float | None, digits: int = 0) -> str:
    return ABSENT if value is None else f"{100 * value:.{digits}f} %"


def with_interval(found: Estimate | None, unit: str = "") -> str:
    """``2.73 [2.61, 2.85]``"""
    if found is None:
        return ABSENT
    between = "" if found.low is None else f" [{number(found.low)}, {number(found.high)}]"
    return f"{number(found.value)}{unit}{between}"


def gain(found: Estimate | None) -> str:
    """``+0.73 [+0.61, +0.85]``"""
    if found is None:
        return ABSENT
    between = "" if found.low is None else f" [{signed(found.low)}, {signed(found.high)}]"
    return f"{signed(found.value)}{between}"


def best_bold(texts: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """The texts, the one with the largest value in bold; none where there is nothing to beat."""
    known = [value for value in values if value is not None]
    best = max(known) if len(known) > 1 else None
    return [f"**{text}**" if value is not None and value == best else text for text, value in zip(texts, values, strict=True)]
