"""Tokens a second of requests decoded together against one at a time.

    python benchmarks/batches.py --prompts FOLDER

FOLDER holds tasks as JSON lines, `{"turns": ["…"]}`. For every method the same requests are decoded with each batch size in
turn, and the sizes alternate within a repeat, so that a machine that speeds up or slows down does so for all alike. The time is
that of the whole call, prompts included; tokens are counted as emitted.
"""

from __future__ import annotations

import json
import time
from itertools import zip_longest
from pathlib import Path
from statistics import median

import typer
from rich.table import Table

from pctree import SpeculativeDecoder
from pctree.bench.tasks import read_file, select
from pctree.cli.common import err, out, progress_bar
from pctree.prompts import encode_prompt

LONGEST = 300  # prompt tokens: a batch is as slow as its longest row


def main(
    prompts: Path = typer.Option(..., help='Folder of tasks: NAME.jsonl with one {"turns": [...]} a line.'),
    output: Path = typer.Option(Path("runs/batches.jsonl"), help="The measured times, as JSON lines."),
    requests: int = typer.Option(16, help="Requests, taken from the tasks in turn."),
    sizes: str = typer.Option("1,4,16", help="Batch sizes."),
    readings: str = typer.Option("ar,dspark,pctree:8,pctree:32", help="Methods, with the budget where it is a tree."),
    max_new_tokens: int = typer.Option(64),
    repeats: int = typer.Option(3),
    target: str = typer.Option("smollm2"),
    drafter: str = typer.Option("smollm2"),
    dtype: str = typer.Option("bfloat16"),
) -> None:
    """Time every method with every batch size."""
    decoder = SpeculativeDecoder.from_pretrained(target, drafter, dtype=dtype, profile="off")
    short = [
        [tokens for text in select(read_file(file), 64) if len(tokens := encode_prompt(decoder.tokenizer, text)) <= LONGEST]
        for file in sorted(prompts.glob("*.jsonl"))
    ]
    ids = [tokens for row in zip_longest(*short) for tokens in row if tokens is not None][:requests]
    batch_sizes = [int(size) for size in sizes.split(",")]
    readers = {}
    for reading in readings.split(","):
        method, _, budget = reading.partition(":")
        readers[reading] = decoder.with_settings(method=method, budget=int(budget or 32))
    err.print(f"{len(ids)} requests of {min(map(len, ids))} to {max(map(len, ids))} prompt tokens")
    rates: dict[tuple[str, int], list[float]] = {}
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file, progress_bar() as bar:
        work = bar.add_task("decoding", total=repeats * len(readers) * len(batch_sizes), note="")
        for repeat in range(repeats):
            for reading, reader in readers.items():
                for size in batch_sizes:
                    began = time.perf_counter()
                    results = reader.generate(ids, max_new_tokens=max_new_tokens, max_batch_size=size)
                    seconds = time.perf_counter() - began
                    tokens = sum(len(result.token_ids) for result in results)
                    rates.setdefault((reading, size), []).append(tokens / seconds)
                    line = {"method": reading, "batch_size": size, "repeat": repeat, "tokens": tokens, "seconds": seconds}
                    file.write(json.dumps(line) + "\n")
                    bar.update(work, advance=1, note=f"{reading}, {size} together")
    table = Table("method", *(f"{size} together" for size in batch_sizes), title="tokens a second", title_justify="left")
    for reading in readers:
        table.add_row(reading, *(f"{median(rates[reading, size]):.1f}" for size in batch_sizes))
    out.print(table)


if __name__ == "__main__":
    typer.run(main)
