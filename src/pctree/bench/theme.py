"""The colours of a report: one a method, the same in every plot, on a light page and on a dark one."""

from __future__ import annotations

from importlib.resources import files

# The style sheet's variables, with their values on a light page. Plots are drawn in these; no two are alike, so that each can
# be found again in an SVG and left to the page.
COLOURS = {
    "ink": "#24292f",
    "grid": "#d9dee3",
    "paper": "#fefefe",
    "ar": "#7d8590",
    "dspark": "#2f6fc1",
    "shared-markov": "#d9822b",
    "pctree": "#0a8a6a",
    "dflash": "#8a63d2",
    "ddtree": "#c9405f",
    "eagle3": "#8c6d31",
    "draft": "#5b7fb5",
    "tree": "#e0a526",
    "verify": "#49545f",
    "commit": "#a9b4bf",
}


def style() -> str:
    """The style sheet; its dark page comes after the light one's colours and overrides them."""
    light = "".join(f"--{name}: {colour}; " for name, colour in COLOURS.items())
    return f":root {{ {light}}}\n" + (files("pctree.bench") / "report.css").read_text(encoding="utf-8")


def themed(svg: str) -> str:
    """An SVG with its colours left to the page."""
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
