"""Acceptance length and speed of every method on the pair that comes with pctree: the numbers of the model card.

    python benchmarks/shipped_pair.py --prompts FOLDER --output runs/shipped.jsonl

FOLDER holds tasks as JSON lines, `{"turns": ["…"]}`, one file a task. Acceptance lengths are taken over `--per-task` prompts of
each task, decoded together to save time (that changes no token but for near-ties in bfloat16). Speed is taken over the first
`--speed-per-task` of them, one at a time: all methods decode a prompt before the next one is taken, in an order that rotates,
so that a machine that speeds up or slows down does so for all alike. Records are appended as they come, and a run that was
interrupted goes on where it stopped.
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

from pctree import Generation, SpeculativeDecoder
from pctree.agreement import first_divergence
from pctree.cli.common import err, out, progress_bar
from pctree.prompts import encode_prompt

METHODS = ("ar", "dspark", "shared-markov", "pctree")
SEED = 980406  # DeepSpec's


def read_task(file: Path, count: int) -> list[str]:
    """The first turns of ``count`` prompts, shuffled when that is fewer than all."""
    with file.open() as lines:  # not splitlines(): a prompt may hold other line separators
        prompts = [json.loads(line)["turns"][0] for line in lines]
    if count < len(prompts):
        random.Random(SEED).shuffle(prompts)
    return prompts[:count]


def main(
    prompts: Path = typer.Option(..., help='Folder of tasks: NAME.jsonl with one {"turns": [...]} a line.'),
    output: Path = typer.Option(Path("runs/shipped.jsonl"), help="Records, one line a prompt and method."),
    per_task: int = typer.Option(8, help="Prompts a task for acceptance lengths."),
    speed_per_task: int = typer.Option(2, help="Prompts a task for speed, one at a time."),
    max_new_tokens: int = typer.Option(128),
    top_k: int = typer.Option(4),
    budget: int = typer.Option(32),
    frontier: str = typer.Option("capped"),
    target: str = typer.Option("smollm2"),
    drafter: str = typer.Option("smollm2"),
    dtype: str = typer.Option("bfloat16"),
) -> None:
    """Run what is missing in OUTPUT, then print the tables made from it."""
    decoder = SpeculativeDecoder.from_pretrained(
        target, drafter, method="pctree", top_k=top_k, budget=budget, frontier=frontier, dtype=dtype, profile="off"
    )
    readers = {name: decoder.with_settings(method=name) for name in METHODS}
    tasks = {
        file.stem: [encode_prompt(decoder.tokenizer, text) for text in read_task(file, per_task)]
        for file in sorted(prompts.glob("*.jsonl"))
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    done = {(r["kind"], r["task"], r["index"]) for r in read_records(output)}
    together = [task for task in tasks if ("acceptance", task, 0) not in done]
    alone = [(i, t) for i in range(speed_per_task) for t in tasks if i < len(tasks[t]) and ("speed", t, i) not in done]
    err.print(f"{len(together)} tasks and {len(alone)} single prompts to do, {torch.get_num_threads()} threads")
    with output.open("a") as file, progress_bar() as bar:
        work = bar.add_task("decoding", total=len(together) + len(alone), note="")

        def write(kind: str, task: str, first: int, results: dict[str, list[Generation]]) -> None:
            """All methods of a prompt in one write: it is either wholly there or not at all."""
            lines = []
            for offset, plain in enumerate(results["ar"]):
                for name in METHODS:
                    mine, ids = results[name][offset], tasks[task][first + offset]
                    parted = first_divergence(decoder.target, ids, plain.token_ids, mine.token_ids)
                    lines.append({
                        "kind": kind, "task": task, "index": first + offset, "method": name, "prompt_tokens": len(ids),
                        "tokens": len(mine.token_ids), "position": parted.position if parted else None,
                        "margin": parted.margin if parted else None, **mine.stats.to_dict(),
                    })  # fmt: skip
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            bar.update(work, advance=1, note=task)

        for task in together:
            options = {"max_new_tokens": max_new_tokens, "max_batch_size": per_task}
            write("acceptance", task, 0, {name: readers[name].generate(tasks[task], **options) for name in METHODS})
        for reader in readers.values() if alone else ():
            reader.generate("Hi", max_new_tokens=16)  # warm-up
        for number, (index, task) in enumerate(alone):
            order = METHODS[number % len(METHODS) :] + METHODS[: number % len(METHODS)]
            results = {name: [readers[name].generate(tasks[task][index], max_new_tokens=max_new_tokens)] for name in order}
            write("speed", task, index, results)
    report(read_records(output))


def read_records(file: Path) -> list[dict[str, Any]]:
    """All whole lines of the file."""
    if not file.exists():
        return []
    with file.open() as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def report(records: list[dict[str, Any]]) -> None:
    """Acceptance length and speed by task and method, then the means over tasks, then agreement with plain decoding."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        cells[record["kind"], record["task"], record["method"]].append(record)
    tasks = sorted({task for _, task, _ in cells})
    table = Table(title="acceptance length τ, and speed over plain decoding (median over prompts)", title_justify="left")
    table.add_column("task")
    taus: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    for name in METHODS:
        table.add_column(name, justify="right")
    for task in tasks:
        row = [task]
        for name in METHODS:
            taus[name].append(fmean(n for r in cells["acceptance", task, name] for n in r["acceptance_lengths"]))
            pairs = zip(cells["speed", task, name], cells["speed", task, "ar"], strict=True)
            speed = [mine["tokens_per_second"] / plain["tokens_per_second"] for mine, plain in pairs]
            ratios[name] += speed
            row.append(f"{taus[name][-1]:.2f}" + (f"  {median(speed):.2f}×" if speed else ""))
        table.add_row(*row)
    table.add_section()
    last = (f"{fmean(taus[n]):.3f}" + (f"  {median(ratios[n]):.2f}×" if ratios[n] else "") for n in METHODS)
    table.add_row("mean τ, median speed", *last, style="bold")
    out.print(table)
    for name in METHODS[1:]:
        mine = [r for task in tasks for kind in ("acceptance", "speed") for r in cells[kind, task, name]]
        margins = sorted(abs(r["margin"]) for r in mine if r["position"] is not None)
        worst = f"; logit margins at the others: median {median(margins):.3g}, largest {margins[-1]:.3g}" if margins else ""
        out.print(f"{name}: {len(mine) - len(margins)} of {len(mine)} texts token for token as ar{worst}")
    for name in METHODS:
        mine = [r for task in tasks for r in cells["speed", task, name]]
        if mine:
            stages = {stage: median(r["stage_ms"][stage] for r in mine) for stage in mine[0]["stage_ms"]}
            rate = median(r["tokens_per_second"] for r in mine)
            out.print(f"{name}: {rate:.1f} tokens/s; ms a round: " + ", ".join(f"{k} {v:.1f}" for k, v in stages.items()))


if __name__ == "__main__":
    typer.run(main)
