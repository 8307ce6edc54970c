"""``pctree bench``: measure methods, drafters and settings on the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from pctree.cli.common import err, given, graceful_stop, out, progress_bar, read_yaml
from pctree.errors import UsageError

if TYPE_CHECKING:
    from pctree.bench.config import BenchConfig, Cell
    from pctree.bench.runner import Bench

AXES: dict[str, Callable[[str], Any]] = {
    "method": str,
    "top_k": int,
    "budget": lambda text: text if text == "auto" else int(text),
    "frontier": str,
    "candidates": int,
    "temperature": float,
    "confidence_threshold": float,
}


def command(
    config: Path = typer.Option(None, help="A YAML file with settings; flags win over it."),
    preset: str = typer.Option(None, help="Settings that come with pctree: quick, paper-main, shipped-main, …"),
    target: str = typer.Option(None, help="Target model: a folder, a hub name, or smollm2. (default: smollm2)"),
    drafter: list[str] = typer.Option(None, help="NAME=SOURCE, or SOURCE alone; several times for several. (default: smollm2)"),
    task: list[str] = typer.Option(
        None, help="A task by name, or a .jsonl file; several times for several. (default: builtin)"
    ),
    prompts: str = typer.Option(None, help="Folder of tasks, NAME.jsonl; without it they come from the hub."),
    method: str = typer.Option(None, help="Methods, with commas. (default: dspark,shared-markov,pctree, and always ar)"),
    top_k: str = typer.Option(None, help="Children per parent, with commas. (default: 4)"),
    budget: str = typer.Option(None, help="Nodes sent to the target, root included, or auto; with commas. (default: 32)"),
    frontier: str = typer.Option(None, help="capped, exact, or both with a comma. (default: capped)"),
    temperature: str = typer.Option(None, help="Temperatures, with commas; 0 is greedy. (default: 0)"),
    candidates: str = typer.Option(None, help="Tokens a slot that the Markov head looks at, with commas. (default: 0, all)"),
    confidence_threshold: str = typer.Option(None, help="Thresholds at which a chain is cut, with commas. (default: 0, off)"),
    per_task: int = typer.Option(None, help="Prompts a task. (default: as many as DeepSpec takes; of a file all)"),
    max_new_tokens: int = typer.Option(None, help="Most tokens per prompt. (default: 128)"),
    repeats: int = typer.Option(None, help="How often everything is decoded. (default: 1)"),
    seed: int = typer.Option(None, help="Chooses the prompts, and the samples. (default: 980406, DeepSpec's)"),
    dtype: str = typer.Option(None, help="bfloat16, float16 or float32. (default: bfloat16)"),
    compile: str = typer.Option(None, help="auto, off or graphs: how models are prepared for speed. (default: auto)"),
    profile: str = typer.Option(None, help="Where --budget auto looks up costs: auto, or a file of tune's. (default: auto)"),
    device: str = typer.Option(None, help="auto (CUDA where there is one), cpu, cuda or cuda:N. (default: auto)"),
    output: Path = typer.Option(Path("runs/bench"), "--output", "-o", help="Folder of the records, to write or to go on with."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the cells of the matrix and stop."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
) -> None:
    """Measure methods, drafters and settings side by side: one record for each prompt and cell.

    Plain decoding (ar) is always measured beside them. Interrupt it at any time: the same command goes on where it stopped.
    Under torchrun or accelerate launch every process takes its share of the prompts.

    [bold]pctree bench --preset quick[/bold]
    """
    if config is not None and preset is not None:
        raise UsageError("--config and --preset were given; give one of them, and flags for what should differ")
    from pctree.bench.config import BenchConfig, preset_file

    settings = read_yaml(preset_file(preset) if preset is not None else config)
    settings |= given(target=target, tasks=task or None, prompts=prompts, per_task=per_task, max_new_tokens=max_new_tokens,
                      repeats=repeats, seed=seed, dtype=dtype, device=device, compile=compile, profile=profile)  # fmt: skip
    flags = given(method=method, top_k=top_k, budget=budget, frontier=frontier, candidates=candidates, temperature=temperature,
                  confidence_threshold=confidence_threshold)  # fmt: skip
    axes = {name: parse_list(name, text) for name, text in flags.items()}
    settings = lay_drafters(settings, drafter or [], any_name="method" in axes or settings.get("cells") is None)
    chosen = BenchConfig.from_settings(lay_cells(settings, axes))
    cells = chosen.matrix()
    for name in [name for name, source in chosen.drafters.items() if source is None]:
        say(f"Drafter {name} has no source, so its cells are left out; --drafter {name}=SOURCE adds them.")
    if dry_run:
        show_matrix(chosen, cells, as_json)
        return
    if not run(chosen, output, quiet=as_json):
        raise typer.Exit(130)


def say(text: str) -> None:
    """A line on standard error, as it is."""
    err.print(text, markup=False, soft_wrap=True)


def parse_list(name: str, text: str) -> list[Any]:
    """The values of a flag that takes several with commas."""
    kind = AXES[name]
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        example = "1,2,4" if kind is int else "0,0.7"
        raise UsageError(f"--{name.replace('_', '-')} is {text!r}; give numbers with commas, like {example}") from None


def lay_drafters(settings: dict[str, Any], flags: list[str], *, any_name: bool) -> dict[str, Any]:
    """Settings with the drafters of the flags. A source without a name takes the place of the only one, or that of its own
    last part; an empty source (``b16=``) leaves a drafter out. Without ``any_name`` the cells are made already, so that only
    their drafters make sense.
    """
    drafters = settings.get("drafters") or {}
    if not flags or not isinstance(drafters, dict):  # which the configuration complains about
        return settings
    known = dict(drafters)
    for flag in flags:
        name, separator, source = flag.partition("=")
        if not separator or "/" in name:
            name, source = "", flag
        if not name and (len(drafters) > 1 or (drafters and len(flags) > 1)):
            raise UsageError(f"--drafter {flag} says not which it is; the drafters are {', '.join(drafters)}: give NAME=SOURCE")
        name = name or next(iter(drafters), source.rstrip("/").rsplit("/", 1)[-1])
        if name not in drafters and not any_name:
            raise UsageError(f"--drafter {flag}: no cell uses {name}; the drafters are {', '.join(drafters)}")
        known[name] = source or None
    return settings | {"drafters": known}


def lay_cells(settings: dict[str, Any], axes: dict[str, list[Any]]) -> dict[str, Any]:
    """Settings with the cells of the flags: ``--method`` makes the grid anew, over all drafters; the others are laid over
    every grid there is.
    """
    from pctree.bench.config import DEFAULT_METHODS, BenchConfig

    grids = settings.get("cells")
    if axes and (grids is None or "method" in axes):
        drafters = settings.get("drafters") or BenchConfig().drafters
        grids = [{"drafter": list(drafters), "method": list(DEFAULT_METHODS)}]
    if not axes or not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        return settings  # the configuration complains about what is no list of grids
    return settings | {"cells": [grid | axes for grid in grids]}


def show_matrix(config: BenchConfig, cells: list[Cell], as_json: bool) -> None:
    """What would be measured, without loading anything."""
    from dataclasses import asdict

    if as_json:
        print(json.dumps({"target": config.target, "drafters": config.drafters, "tasks": config.tasks,
                          "cells": [{"label": cell.label, **asdict(cell)} for cell in cells]}))  # fmt: skip
        return
    drafters = ", ".join(f"{name}={source}" for name, source in config.drafters.items() if source is not None)
    lines = [cell.label for cell in cells]
    lines.append(f"{len(cells)} cells × {config.repeats} repeats on {', '.join(config.tasks)}")
    lines.append(f"target {config.target}, drafters {drafters or 'none'}")
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def run(config: BenchConfig, output: Path, *, quiet: bool) -> bool:
    """Decode what is missing and show the summary; False when stopped early."""
    from pctree.bench.machine import Shard
    from pctree.bench.runner import Bench

    shard = Shard.from_environment()
    bench = Bench(config, output, shard)
    cells, prompts, left = len(bench.cells), len(bench.prompts), sum(len(todo) for _, _, todo in bench.pending())
    if shard.rank == 0:
        among = f" of the first of {shard.world_size} processes" if shard.world_size > 1 else ""
        say(f"{cells} cells × {prompts} prompts × {config.repeats} repeats = {cells * prompts * config.repeats:,} decodings, "
            f"{left:,} to do{among}; {output}")  # fmt: skip
    bar = progress_bar()
    bar.disable = shard.rank > 0
    with bar, graceful_stop() as stopped:
        work = bar.add_task("decoding", total=left, note="")
        complete = bench.run(
            decoded=lambda cell, prompt: bar.update(work, advance=1, note=f"{prompt.task}  {cell.label}"),
            should_stop=lambda: bool(stopped),
        )
    if shard.rank == 0:
        report(bench, complete, quiet)
    return complete


def report(bench: Bench, complete: bool, as_json: bool) -> None:
    """The compact table, or the same as JSON, over what the folder holds of this matrix; and what to do next."""
    from pctree.bench.records import identity, read_records
    from pctree.bench.summary import summarise

    wanted = bench.wanted()
    records = [record for record in read_records([bench.output])[0] if identity(record) in wanted]
    rows = summarise(records, bench.cells)
    if as_json:
        facts = {"output": str(bench.output), "complete": complete, "decodings": len(wanted), "records": len(records)}
        print(json.dumps(facts | {"cells": rows}, ensure_ascii=False))
    else:
        tasks = list(dict.fromkeys(prompt.task for prompt in bench.prompts))
        whole = table(rows, tasks)
        # A narrow terminal gets the means alone, which can be read; the report has the tasks.
        fits = out.measure(whole, options=out.options.update(width=1000)).maximum <= out.width
        out.print(whole if fits or len(tasks) == 1 else table(rows, []))
    if not complete:
        say(f"Stopped: {len(records):,} of {len(wanted):,} decodings are in {bench.output}, with every prompt that was "
            "finished. Run the same command again to go on.")  # fmt: skip
    elif len(records) < len(wanted):
        say(f"{len(wanted) - len(records):,} decodings are still to come from the other processes.")
    say(f"The whole report: pctree report {bench.output}")


def table(rows: list[dict[str, Any]], tasks: Sequence[str]) -> Table:
    """A row a cell, a column a task, and the mean over all: τ and the median speed over plain decoding."""
    made = Table(title="acceptance length τ, and speed over plain decoding (median over prompts)", title_justify="left")
    made.add_column("cell")
    for task in tasks:
        made.add_column(task, justify="right")
    if len(tasks) != 1:
        made.add_column("mean over tasks", justify="right", style="bold")
    for row in rows:
        shown = [row["tasks"].get(task) for task in tasks] + ([row] if len(tasks) != 1 else [])
        made.add_row(row["label"], *(figures(facts) for facts in shown))
    return made


def figures(facts: dict[str, Any] | None) -> str:
    if facts is None or facts["acceptance_length"] is None:
        return "–"
    return f"{facts['acceptance_length']:.2f}" + ("" if facts["speedup"] is None else f"  {facts['speedup']:.2f}×")
