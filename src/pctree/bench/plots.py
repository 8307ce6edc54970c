"""The plots of a report, as SVG: one colour a method, a title that says what is seen, nothing else.

They are drawn for a light page; ``theme.themed`` leaves their colours to the page that they are put in.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from math import log2
from typing import Any

from pctree.bench.calibration import Bin
from pctree.bench.measures import Estimate, tau_gain
from pctree.bench.study import Cell, Study, Sweep
from pctree.bench.theme import COLOURS
from pctree.stats import STAGES

STAGE_LABELS = {"draft": "draft backbone", "tree": "head and tree", "verify": "verify", "commit": "commit"}
WIDTH = 9.0  # inches; a report is as wide as that

STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOURS["grid"],
    "axes.axisbelow": True,
    "lines.markersize": 5,
    "axes.grid": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.7,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": COLOURS["paper"],
    "axes.facecolor": COLOURS["paper"],
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pctree",
}


def available() -> bool:
    """Whether matplotlib is installed; it comes with ``pctree[bench]``."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(plot: Callable[..., Any], *arguments: Any) -> str:
    """The SVG that a plot function of this module gives; the same arguments give the same bytes."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = plot(*arguments)
        file = io.StringIO()
        figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    return re.sub(r" *<metadata>.*?</metadata>\n", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _canvas(rows: int, columns: int, height: float, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _colour(cell: Cell) -> str:
    return COLOURS.get(cell.method, COLOURS["ar"])


def _line(cell: Cell) -> str:
    """Two variants of one method share its colour and differ in the line."""
    return "--" if cell.exact or (cell.method == "eagle3" and cell.chain) else "-"


def _labels(cells: Sequence[Cell]) -> list[str]:
    """What tells cells of one plot apart: the name; B where there are several; the drafter where that is not enough."""
    several = len({cell.block_size for cell in cells if cell.block_size}) > 1
    names = [f"{cell.name}, B = {cell.block_size}" if several and cell.block_size else cell.name for cell in cells]
    return [f"{name} ({cell.drafter})" if names.count(name) > 1 else name for cell, name in zip(cells, names, strict=True)]


def _rows(cells: Sequence[Cell]) -> list[float]:
    """Where the bars of cells stand, from the top; block sizes are set apart."""
    sizes = [cell.block_size for cell in cells]
    return [row + 0.5 * len(set(sizes[: row + 1])) for row in range(len(cells))]


def _whisker(found: Estimate) -> list[list[float]]:
    """Distances from the value to the ends of its interval, as matplotlib wants them."""
    low = found.value if found.low is None else min(found.low, found.value)
    high = found.value if found.high is None else max(found.high, found.value)
    return [[found.value - low], [high - found.value]]


def _legend_below(figure: Any, axes: Any, columns: int = 4) -> None:
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=min(columns, len(entries)))


def overview(study: Study) -> Any:
    """τ and AR speedup of every main cell, mean over tasks."""
    cells = study.main
    with_speed = any(study.speedup(cell) is not None for cell in cells)
    figure, axes = _canvas(1, 1 + with_speed, 0.9 + 0.3 * len(cells), sharey=True)
    rows = _rows(cells)
    for axis, title, field, unit in zip(
        axes[0], ("Tokens a round (τ)", "Speed over plain decoding"), ("tau", "speedup"), ("", "×"), strict=False
    ):
        for row, cell in zip(rows, cells, strict=True):
            found = getattr(study.summary(cell), field)
            if found is None:
                continue
            axis.barh(row, found.value, height=0.62, color=_colour(cell))
            axis.errorbar(found.value, row, xerr=_whisker(found), color=COLOURS["ink"], linewidth=1.1)
            end = found.value if found.high is None else max(found.high, found.value)
            axis.annotate(f"{found.value:.2f}{unit}", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axis.axvline(1, color=COLOURS["ink"], linewidth=1)
        axis.margins(x=0.14)
        axis.set_xlim(left=0)
        axis.grid(axis="y", visible=False)
        axis.set_title(title)
    axes[0][0].set_yticks(rows, _labels(cells))
    axes[0][0].invert_yaxis()
    return figure


def tau_by_task(study: Study) -> Any:
    """τ of every main cell on every task with its interval; a panel a block size."""
    blocks = study.blocks()
    most = max(map(len, blocks.values()))
    figure, axes = _canvas(1, len(blocks), 1.3 + len(study.tasks) * max(0.34, 0.105 * most), sharex=True, sharey=True)
    for axis, (size, cells) in zip(axes[0], blocks.items(), strict=True):
        step = min(0.16, 0.8 / max(1, len(cells)))
        for place, (cell, label) in enumerate(zip(cells, _labels(cells), strict=True)):
            shift = (place - (len(cells) - 1) / 2) * step
            found = [(row + shift, study.summary(cell, task).tau) for row, task in enumerate(study.tasks)]
            for height, estimate in found:
                if estimate is not None:
                    marker = "o" if _line(cell) == "-" else "D"
                    axis.errorbar(estimate.value, height, xerr=_whisker(estimate), fmt=marker, markersize=4.2, linewidth=1.2,
                                  color=_colour(cell), markerfacecolor=_colour(cell) if marker == "o" else COLOURS["paper"],
                                  label=label)  # fmt: skip
        for row in range(1, len(study.tasks)):
            axis.axhline(row - 0.5, color=COLOURS["grid"], linewidth=0.7)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"τ by task, B = {size}")
        axis.set_xlabel("tokens a round, 95 % interval")
    axes[0][0].set_yticks(range(len(study.tasks)), study.tasks)
    axes[0][0].set_ylim(len(study.tasks) - 0.5, -0.5)
    _legend_below(figure, axes)
    return figure


def sweep(study: Study, sweeps: Sequence[Sweep]) -> Any:
    """τ and AR speedup along k or N; a ring marks the knee."""
    variable = sweeps[0].variable
    panels: list[tuple[str, str, Callable[[Cell], float | None]]] = [
        ("τ", "tau", study.tau),
        ("AR speedup", "speedup", study.speedup),
    ]
    if all(study.speedup(cell) is None for one in sweeps for cell in one.cells):
        panels.pop()
    figure, axes = _canvas(1, len(panels), 3.5)
    sizes = sorted(set(study.drafters.values()))
    labels = _labels([one.cells[-1] for one in sweeps])
    for axis, (title, field, measure) in zip(axes[0], panels, strict=True):
        for place, (one, label) in enumerate(zip(sweeps, labels, strict=True)):
            shown = [cell for cell in one.cells if measure(cell) is not None]
            last = one.cells[-1]
            look = {"color": _colour(last), "marker": "os^Dv"[sizes.index(last.block_size or 0) % 5]}
            axis.plot([log2(one.value(cell)) for cell in shown], list(map(measure, shown)), _line(last), label=label, **look)
            for cell in shown:
                found = getattr(study.summary(cell), field)
                x = log2(one.value(cell)) + 0.03 * (place - (len(sweeps) - 1) / 2)  # so that intervals stay apart
                axis.errorbar(x, found.value, yerr=_whisker(found), color=_colour(last), alpha=0.45, linewidth=1)
            knee = one.knee(measure)
            if knee is not None:
                ring = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.6}
                axis.plot(log2(one.value(knee)), measure(knee), "o", markeredgecolor=_colour(last), **ring)
        values = sorted({one.value(cell) for one in sweeps for cell in one.cells})
        axis.set_xticks([log2(value) for value in values], list(map(str, values)))
        axis.set_title(f"{title} by {variable}, mean over tasks")
        axis.set_xlabel("k: children a parent" if variable == "k" else "N: nodes sent to the target")
        axis.set_ylabel("tokens a round" if field == "tau" else "times plain decoding")
    _legend_below(figure, axes, columns=3)
    return figure


def stages(study: Study, cells: Sequence[Cell]) -> Any:
    """Milliseconds a round by stage, stacked."""
    figure, axes = _canvas(1, 1, 1.2 + 0.3 * len(cells))
    axis = axes[0][0]
    rows = _rows(cells)
    for row, cell in zip(rows, cells, strict=True):
        left = 0.0
        for stage in STAGES:
            width = study.summary(cell).stage_ms[stage]
            axis.barh(row, width, left=left, height=0.62, color=COLOURS[stage], label=STAGE_LABELS[stage])
            left += width
        axis.annotate(f"{left:.1f} ms", (left, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_yticks(rows, _labels(cells))
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("milliseconds a round (median over texts, mean over tasks)")
    axis.set_title("Where a round's time goes")
    _legend_below(figure, axes)
    return figure


def depth(study: Study) -> Any:
    """Share of rounds that accept at least d drafted tokens; a panel a block size."""
    blocks = study.blocks()
    figure, axes = _canvas(1, len(blocks), 3.5, sharey=True)
    for axis, (size, cells) in zip(axes[0], blocks.items(), strict=True):
        for cell, label in zip(cells, _labels(cells), strict=True):
            shares = [100 * share for share in study.accepted(cell)]
            axis.plot(range(1, size + 1), shares, _line(cell), marker="o", markersize=3.5,
                      color=_colour(cell), label=label)  # fmt: skip
        axis.set_title(f"How deep a round gets, B = {size}")
        axis.set_xlabel("d: drafted tokens")
        axis.set_xticks(range(1, size + 1))
        axis.set_ylim(0, 100)
    axes[0][0].set_ylabel("rounds that accept d or more (%)")
    _legend_below(figure, axes)
    return figure


def decomposition(study: Study, trios: dict[str, tuple[Cell, Cell, Cell]]) -> Any:
    """What branching and what parent conditioning add to τ, by task; a panel a drafter."""
    figure, axes = _canvas(1, len(trios), 1.3 + 0.4 * (len(study.tasks) + 1), sharey=True, sharex=True)
    names = [*study.tasks, "mean"]
    for axis, (drafter, (chain, shared, tree)) in zip(axes[0], trios.items(), strict=True):
        for place, label, before, after in ((-0.5, "branching", chain, shared), (0.5, "parent conditioning", shared, tree)):
            for row, task in enumerate([*study.tasks, None]):
                found = tau_gain(study.of(before, task), study.of(after, task))
                if found is not None:
                    height = row + 0.36 * place
                    axis.barh(height, found.value, height=0.34, color=_colour(after), label=label)
                    axis.errorbar(found.value, height, xerr=_whisker(found), color=COLOURS["ink"], linewidth=1)
        axis.axvline(0, color=COLOURS["ink"], linewidth=1)
        axis.axhline(len(study.tasks) - 0.5, color=COLOURS["ink"], linewidth=0.8)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"What adds to τ: {drafter}, B = {study.drafters[drafter]}")
        axis.set_xlabel("tokens a round more than the step before")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    _legend_below(figure, axes)
    return figure


def calibration(curves: dict[str, list[Bin]]) -> Any:
    """Predicted against observed acceptance; a panel a drafter, the size of a point its share of the predictions."""
    figure, axes = _canvas(1, max(2, len(curves)), 3.9, sharey=True)
    for axis in axes[0][len(curves) :]:
        axis.set_visible(False)
    for axis, (name, bins) in zip(axes[0], curves.items(), strict=False):
        total = sum(b.count for b in bins)
        axis.plot([0, 100], [0, 100], color=COLOURS["ink"], linewidth=0.9, linestyle=":")
        axis.annotate("perfect", (82, 84), rotation=45, ha="center", va="bottom", fontsize=8.5)
        axis.plot([100 * b.predicted for b in bins], [100 * b.accepted for b in bins], color=COLOURS["dspark"], linewidth=1.2)
        axis.scatter([100 * b.predicted for b in bins], [100 * b.accepted for b in bins],
                     s=[12 + 400 * b.count / total for b in bins], color=COLOURS["dspark"], alpha=0.7)  # fmt: skip
        axis.set_title(f"Calibration: {name}")
        axis.set_xlabel("predicted: the first i drafts survive (%)")
        axis.set_aspect("equal")
    axes[0][0].set_ylabel("accepted (%)")
    return figure
