"""The few numbers that are shown when a run ends; `pctree report` makes the whole of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from pctree.bench.config import Cell
from pctree.bench.records import Record


def acceptance_length(records: Iterable[Record]) -> float:
    """τ over all rounds of all records, as DeepSpec pools it."""
    lengths = [length for record in records for length in record["acceptance_lengths"]]
    return fmean(lengths) if lengths else 0.0


def summarise(records: Iterable[Record], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For every cell: τ and the median speed over plain decoding of the same prompt, by task, and their means over tasks."""
    by_cell: dict[Cell, dict[str, dict[tuple[str, int], Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        cell = Cell(**{name: record[name] for name in Cell.__dataclass_fields__})
        by_cell[cell][record["task"]][record["prompt_sha256"], record["repeat"]] = record
    rows = []
    for cell in cells:
        plain = by_cell[next(c for c in cells if c.method == "ar" and c.temperature == cell.temperature)]
        tasks = {}
        for task, mine in by_cell[cell].items():
            speeds = [
                record["tokens_per_second"] / plain[task][key]["tokens_per_second"]
                for key, record in mine.items()
                if key in plain[task] and plain[task][key]["tokens_per_second"]
            ]
            tasks[task] = {
                "records": len(mine),
                "acceptance_length": round(acceptance_length(mine.values()), 4),
                "speedup": round(median(speeds), 4) if speeds else None,
            }
        rows.append({
            "label": cell.label,
            **asdict(cell),
            "acceptance_length": _mean(facts["acceptance_length"] for facts in tasks.values()),
            "speedup": _mean(facts["speedup"] for facts in tasks.values()),
            "tasks": tasks,
        })  # fmt: skip
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None
