"""``pctree report``: what a benchmark's records say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from pctree.cli.common import err, out

if TYPE_CHECKING:
    from pctree.bench.study import Study


def command(
    runs: list[Path] = typer.Argument(help="What pctree bench wrote: folders or .jsonl files; several are merged."),
    output: Path = typer.Option(None, help="Folder for the report; report in the first run's folder if not given."),
    paper: bool = typer.Option(False, "--paper", help="Set the figures beside the published ones, with what differs."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object: the files, the means, the paper's claims."),
) -> None:
    """Make tables and plots of a benchmark: report.html (one page, nothing beside it needed), report.md and CSV files."""
    from pctree.bench import plots
    from pctree.bench.claims import claims
    from pctree.bench.csv_files import cell_rows
    from pctree.bench.records import read_records
    from pctree.bench.report import build, write

    records, environments = read_records(runs)
    draw = plots.available()
    chapters = build(records, environments, with_paper=paper, draw=draw)
    folder = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report"
    written = write(chapters, folder)
    if not draw:
        err.print("The plots are left out: matplotlib is not installed; pip install 'pctree\\[bench]' brings it.")
    if as_json:
        settings = [
            {
                "setting": asdict(chapter.study.setting),
                "cells": [row for row in cell_rows(chapter.study) if row["task"] == "mean"],
                "claims": [asdict(claim) for claim in claims(chapter.study)],
            }
            for chapter in chapters
        ]
        print(json.dumps({"files": [str(path) for path in written], "settings": settings}))
        return
    for chapter in chapters:
        out.print(summary(chapter.study))
    out.print(f"{len(records):,} records. Open {written[0]}, or read report.md and the CSV files beside it.", soft_wrap=True)


def summary(study: Study) -> Table:
    """The main cells, mean over tasks."""
    from pctree.bench.formatting import number, times

    table = Table(title=f"{study.setting}\nmean over {len(study.tasks)} tasks", title_justify="left")
    for heading in ("method", "drafter", "point", "τ", "AR speedup"):
        table.add_column(heading, justify="right" if heading in ("τ", "AR speedup") else "left")
    for cell in study.main:
        table.add_row(cell.name, cell.drafter, cell.point, number(study.tau(cell)), times(study.speedup(cell)))
    return table
