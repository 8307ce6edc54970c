"""The numbers of a report as tidy CSV: a row a cell and task, a row a sweep's point, a row a cell and depth."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from pctree.bench.measures import Estimate, length_distribution
from pctree.bench.study import Cell, Study
from pctree.stats import STAGES

Row = dict[str, Any]


def csv_files(studies: Sequence[Study]) -> dict[str, str]:
    """The three files, by name."""
    makers: dict[str, Callable[[Study], list[Row]]] = {
        "cells.csv": cell_rows,
        "sweeps.csv": sweep_rows,
        "depth.csv": depth_rows,
    }
    return {name: csv_text([row for study in studies for row in make(study)]) for name, make in makers.items()}


def csv_text(rows: Sequence[Row]) -> str:
    """Rows with the same keys, under a header; None is an empty field, a float has four decimals."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()


def cell_rows(study: Study) -> list[Row]:
    """A row a cell and task; the task ``mean`` is the mean over tasks."""
    rows = []
    for cell in study.cells:
        for task in (*study.tasks, None):
            if not study.of(cell, task):
                continue
            s = study.summary(cell, task)
            rows.append({
                **_named(study, cell), "task": task or "mean", "prompts": s.prompts, "texts": s.texts,
                **_estimate("tau", s.tau), **_estimate("speedup_median", s.speedup),
                **_estimate("speedup_mean", s.mean_speedup), "tokens_per_second": s.tokens_per_second, "rounds": s.rounds,
                "nodes": s.nodes, **{f"{stage}_ms": s.stage_ms[stage] for stage in STAGES}, "peak_memory_mb": s.peak_memory_mb,
                "parted": s.flips.parted, "flips_per_thousand": s.flips.per_thousand,
                "margin_median": s.flips.median_margin, "margin_largest": s.flips.largest_margin, "loops": s.loops,
            })  # fmt: skip
    return rows


def sweep_rows(study: Study) -> list[Row]:
    """A row a point of a sweep, mean over tasks."""
    rows = []
    for sweep in (*study.sweeps("k"), *study.sweeps("N")):
        knees = (sweep.knee(study.tau), sweep.knee(study.speedup))
        for cell in sweep.cells:
            s = study.summary(cell)
            rows.append({
                "sweep": sweep.variable, "value": sweep.value(cell), **_named(study, cell), **_estimate("tau", s.tau),
                **_estimate("speedup_median", s.speedup), "knee_tau": int(cell == knees[0]),
                "knee_speedup": int(cell == knees[1]),
            })  # fmt: skip
    return rows


def depth_rows(study: Study) -> list[Row]:
    """A row a cell and depth, mean over tasks: the share of rounds that accept at least, and exactly, that many drafts."""
    rows = []
    for cell in study.speculating:
        deepest = cell.block_size or 0
        at_least = [1.0, *study.accepted(cell)]
        exactly = length_distribution(study.of(cell), deepest + 1)
        for depth in range(deepest + 1):
            rows.append({**_named(study, cell), "depth": depth, "at_least": at_least[depth], "exactly": exactly[depth]})
    return rows


def _named(study: Study, cell: Cell) -> Row:
    setting = study.setting
    return {
        "target": setting.target, "machine": setting.machine, "dtype": setting.dtype, "temperature": setting.temperature,
        "max_new_tokens": setting.max_new_tokens, "method": cell.method, "drafter": cell.drafter, "block_size": cell.block_size,
        "top_k": cell.top_k, "budget": cell.budget, "frontier": cell.frontier,
        "candidates": cell.candidates,
        "confidence_threshold": cell.confidence_threshold,
    }  # fmt: skip


def _estimate(name: str, found: Estimate | None) -> Row:
    low, high = (found.low, found.high) if found else (None, None)
    return {name: found.value if found else None, f"{name}_low": low, f"{name}_high": high}
