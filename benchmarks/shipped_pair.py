"""Acceptance length and speed of every method on the pair that comes with pctree: the numbers of the model card.

    python benchmarks/shipped_pair.py --prompts FOLDER --per-task 8 --output runs/shipped.jsonl

FOLDER holds tasks as JSON lines, `{"turns": ["…"]}`, one file a task. All methods decode a prompt before the next one is
taken, in an order that rotates, so that a machine that speeds up or slows down does so for all alike. Records are
appended as they come, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import typer
from rich.table import Table

from pctree import SpeculativeDecoder
from pctree.agreement import first_divergence
from pctree.cli.common import err, out, progress_bar
from pctree.prompts import encode_prompt

METHODS = ("ar", "dspark", "shared-markov", "pctree")
SEED = 980406  # DeepSpec's


def read_task(file: Path, count: int) -> list[str]:
    """The first turns of ``count`` prompts, shuffled when that is fewer than all."""
    prompts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
    if count < len(prompts):
        random.Random(SEED).shuffle(prompts)
    return prompts[:count]


def main(
    prompts: Path = typer.Option(..., help='Folder of tasks: NAME.jsonl with one {"turns": [...]} a line.'),
    output: Path = typer.Option(Path("runs/shipped.jsonl"), help="Records, one line a prompt and method."),
    per_task: int = typer.Option(8, help="Prompts a task."),
    max_new_tokens: int = typer.Option(128),
    top_k: int = typer.Option(4),
    budget: int = typer.Option(32),
    frontier: str = typer.Option("capped"),
    target: str = typer.Option("smollm2"),
    drafter: str = typer.Option("smollm2"),
    dtype: str = typer.Option("bfloat16"),
    methods: str = typer.Option(",".join(METHODS), help="Methods with commas; ar comes first."),
) -> None:
    """Run what is missing in OUTPUT, then print the tables made from it."""
    decoder = SpeculativeDecoder.from_pretrained(
        target, drafter, method="pctree", top_k=top_k, budget=budget, frontier=frontier, dtype=dtype
    )
    names = methods.split(",")
    readers = {name: decoder.with_settings(method=name) for name in names}
    output.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["task"], r["index"]) for r in read_records(output)}
    tasks = {file.stem: read_task(file, per_task) for file in sorted(prompts.glob("*.jsonl"))}
    work = [(task, i, text) for task, texts in tasks.items() for i, text in enumerate(texts) if (task, i) not in done]
    err.print(f"{len(work)} prompts to do, {torch.get_num_threads()} threads")
    for reader in readers.values():
        reader.generate("Hi", max_new_tokens=16)  # warm-up
    with output.open("a") as file, progress_bar() as bar:
        bar_task = bar.add_task("prompts", total=len(work), note="")
        for number, (task, index, text) in enumerate(work):
            prompt_ids = encode_prompt(decoder.tokenizer, text)
            order = names[number % len(names) :] + names[: number % len(names)]
            results = {name: readers[name].generate(prompt_ids, max_new_tokens=max_new_tokens) for name in order}
            lines = []
            for name in names:
                difference = first_divergence(decoder.target, prompt_ids, results[names[0]].token_ids, results[name].token_ids)
                lines.append(
                    {"task": task, "index": index, "method": name, "prompt_tokens": len(prompt_ids),
                     "tokens": len(results[name].token_ids), "margin": difference.margin if difference else None,
                     "position": difference.position if difference else None, **results[name].stats.to_dict()}
                )  # fmt: skip
            # All methods of a prompt in one write: a prompt is either wholly there or not.
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            bar.update(bar_task, advance=1, note=task)
    report(read_records(output), names)


def read_records(file: Path) -> list[dict[str, Any]]:
    """All whole lines of the file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def report(records: list[dict[str, Any]], names: list[str]) -> None:
    """Acceptance length and speed by task and method, then the means over tasks, then agreement with plain decoding."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        cells[record["task"], record["method"]].append(record)
    tasks = sorted({task for task, _ in cells})
    table = Table(title="acceptance length τ, and speed over plain decoding (median over prompts)", title_justify="left")
    table.add_column("task")
    for name in names:
        table.add_column(name, justify="right")
    taus: dict[str, list[float]] = defaultdict(list)
    speeds: dict[str, list[float]] = defaultdict(list)
    for task in tasks:
        row = [task]
        for name in names:
            lengths = [n for r in cells[task, name] for n in r["acceptance_lengths"]]
            ratios = [
                mine["tokens_per_second"] / plain["tokens_per_second"]
                for mine, plain in zip(cells[task, name], cells[task, names[0]], strict=True)
                if plain["tokens_per_second"]
            ]
            taus[name].append(fmean(lengths))
            speeds[name].append(median(ratios))
            row.append(f"{taus[name][-1]:.2f}  {speeds[name][-1]:.2f}×")
        table.add_row(*row)
    table.add_section()
    table.add_row("mean over tasks", *(f"{fmean(taus[n]):.3f}  {fmean(speeds[n]):.2f}×" for n in names), style="bold")
    out.print(table)
    for name in names[1:]:
        mine = [r for task in tasks for r in cells[task, name]]
        parted = [r for r in mine if r["position"] is not None]
        margins = sorted(abs(r["margin"]) for r in parted)
        worst = f", margins up to {margins[-1]:.3g}, median {median(margins):.3g}" if margins else ""
        out.print(f"{name}: {len(mine) - len(parted)} of {len(mine)} prompts token for token as {names[0]}{worst}")
    for name in names:
        mine = [r for task in tasks for r in cells[task, name]]
        stages = {stage: median(r["stage_ms"][stage] for r in mine) for stage in mine[0]["stage_ms"]}
        rate = median(r["tokens_per_second"] for r in mine)
        out.print(f"{name}: {rate:.1f} tokens/s; ms a round: " + ", ".join(f"{k} {v:.1f}" for k, v in stages.items()))


if __name__ == "__main__":
    typer.run(main)
