"""What results/ and the README say is what the records say."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from pctree.bench.csv_files import csv_files
from pctree.bench.records import read_records
from pctree.bench.study import studies

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "shipped"
TASKS = 8

pytestmark = pytest.mark.skipif(not RUN.is_dir(), reason="results/ is part of the repository, not of a source package")


@pytest.fixture(scope="module")
def study():
    (found,) = studies(*read_records([RUN / "records.jsonl"]))
    return found


def rows_of(markdown: str) -> list[list[str]]:
    """The rows of all tables, without emphasis."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_run_is_whole(study):
    assert len(study.tasks) == TASKS
    counts = {(cell, task): len(study.of(cell, task)) for cell in study.cells for task in study.tasks}
    assert min(counts.values()) >= 16
    assert all(count == counts[study.cells[0], task] for (_, task), count in counts.items()), "a cell lacks prompts"


def test_the_report_is_made_from_the_records(study):
    """Everything but the intervals, which hang on a generator's numbers, and where a rounding falls."""
    committed = list(csv.DictReader((RUN / "report" / "cells.csv").open()))
    again = list(csv.DictReader(csv_files([study])["cells.csv"].splitlines()))
    assert len(committed) == len(again) == len(study.cells) * (TASKS + 1)
    for before, now in zip(committed, again, strict=True):
        for name, value in before.items():
            if name.endswith(("_low", "_high")):
                continue
            assert now[name] == value or float(now[name]) == pytest.approx(float(value), abs=2e-4), (before, name)


def test_the_readme_says_what_the_report_says():
    readme = (ROOT / "README.md").read_text()
    section = re.search(r"## What it measures here\n(.*?)\n## ", readme, re.S)
    assert section is not None
    shown = [row for row in rows_of(section[1]) if "[" in row[-1]]
    report = rows_of((RUN / "report" / "report.md").read_text())
    assert len(shown) >= 10
    for row in shown:
        assert any(set(row) - {""} <= set(line) for line in report), f"no line of the report says {row}"
