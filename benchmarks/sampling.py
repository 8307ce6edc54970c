"""Acceptance length under temperature and penalties, and what it is worth that the drafter follows them.

    python benchmarks/sampling.py --prompts FOLDER

FOLDER holds tasks as JSON lines, `{"turns": ["…"]}`, one file a task. Every cell decodes the same prompts with the same seeds,
sixteen together (that changes no distribution). "not followed" is PCTree whose drafter does not hear of temperature and
penalties: what is proposed is then the raw head's choice, while the target's distribution is another one.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import typer
from rich.table import Table

from pctree import SamplingParams, SpeculativeDecoder
from pctree.batch import Batch
from pctree.bench.tasks import read_file, select
from pctree.cli.common import err, out, progress_bar
from pctree.prompts import encode_prompt

TEMPERATURES = (0.0, 0.7, 1.0)
PENALTIES = {
    "none": {},
    "repetition 1.2": {"repetition_penalty": 1.2},
    "frequency 0.3, presence 0.3": {"frequency_penalty": 0.3, "presence_penalty": 0.3},
}
LONGEST = 600  # prompt tokens; a longer one makes all rows of its batch slow


def main(
    prompts: Path = typer.Option(..., help='Folder of tasks: NAME.jsonl with one {"turns": [...]} a line.'),
    output: Path = typer.Option(Path("runs/sampling.json"), help="The measured cells, as JSON."),
    per_task: int = typer.Option(2, help="Prompts a task."),
    max_new_tokens: int = typer.Option(96),
    top_k: int = typer.Option(4),
    budget: int = typer.Option(32),
    target: str = typer.Option("smollm2"),
    drafter: str = typer.Option("smollm2"),
    dtype: str = typer.Option("bfloat16"),
) -> None:
    """Measure every method at every temperature with every penalty."""
    decoder = SpeculativeDecoder.from_pretrained(target, drafter, top_k=top_k, budget=budget, dtype=dtype, profile="off")
    ids = []
    for file in sorted(prompts.glob("*.jsonl")):
        texts = (encode_prompt(decoder.tokenizer, text) for text in select(read_file(file), 8 * per_task))
        ids += [tokens for tokens in texts if len(tokens) <= LONGEST][:per_task]
    err.print(f"{len(ids)} prompts")
    columns = {"dspark": "dspark", "shared-markov": "shared-markov", "pctree": "pctree", "pctree, not followed": "pctree"}
    cells = []
    follows = Batch.reshape
    with progress_bar() as bar:
        work = bar.add_task("decoding", total=len(TEMPERATURES) * len(PENALTIES) * len(columns), note="")
        for temperature in TEMPERATURES:
            for penalty, options in PENALTIES.items():
                for column, method in columns.items():
                    seeds = range(len(ids)) if temperature else [None] * len(ids)
                    params = [
                        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens, **options)
                        for seed in seeds
                    ]
                    Batch.reshape = follows if column == method else lambda self: None  # type: ignore[method-assign]
                    results = decoder.with_settings(method=method).generate(ids, params)
                    lengths = [n for result in results for n in result.stats.acceptance_lengths]
                    cells.append({
                        "temperature": temperature, "penalty": penalty, "method": column, "prompts": len(ids),
                        "rounds": len(lengths), "acceptance_length": fmean(lengths),
                    })  # fmt: skip
                    bar.update(work, advance=1, note=f"T={temperature}, {penalty}, {column}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    table = Table("temperature", "penalty", *columns, title="acceptance length τ", title_justify="left")
    for start in range(0, len(cells), len(columns)):
        row = cells[start : start + len(columns)]
        table.add_row(str(row[0]["temperature"]), row[0]["penalty"], *(f"{cell['acceptance_length']:.2f}" for cell in row))
    out.print(table)


if __name__ == "__main__":
    typer.run(main)
