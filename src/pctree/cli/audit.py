"""``pctree audit``: prove on your own model that the text is the target's own."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from pctree.bench.tasks import read_file
from pctree.cli.common import (
    BUDGET,
    CANDIDATES,
    COMPILE,
    DEVICE,
    DRAFTER,
    DTYPE,
    FRONTIER,
    PROFILE,
    TARGET,
    TOP_K,
    err,
    out,
    progress_bar,
    read_budget,
)
from pctree.errors import UsageError

EDGES = (1e-4, 1e-3, 1e-2, 0.0625, 0.125, 0.25, 0.5, 1.0)
PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "A train travels 60 miles in 2 hours. How far does it travel in 5 hours?",
    "Write a short poem about autumn.",
)


def command(
    target: str = TARGET,
    drafter: str = DRAFTER,
    method: str = typer.Option("pctree", help="The method to audit; ar is audited beside it, as the yardstick."),
    top_k: int = TOP_K,
    budget: str = BUDGET,
    frontier: str = FRONTIER,
    candidates: int = CANDIDATES,
    prompts: Path = typer.Option(None, help="Prompts: text, one a line, or a .jsonl task. [default: four of our own]"),
    limit: int = typer.Option(None, help="Take the first so many prompts."),
    max_new_tokens: int = typer.Option(128, help="Most tokens per prompt."),
    temperature: float = typer.Option(0.0, help="0 audits greedy decoding; above, sampling."),
    top_p: float = typer.Option(1.0, help="Sample among the likeliest tokens with this much probability together."),
    repetition_penalty: float = typer.Option(1.0, help="Penalty on tokens of prompt and output; 1 is none."),
    max_batch_size: int = typer.Option(1, help="Prompts decoded together, when greedy."),
    draws: int = typer.Option(2000, help="Seeds per prompt, when sampling."),
    seed: int = typer.Option(0, help="The first seed, when sampling."),
    dtype: str = DTYPE,
    device: str = DEVICE,
    compile: str = COMPILE,
    profile: str = PROFILE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Check every emitted token against a plain forward of the target over the emitted text.

    Greedy: tokens that are not the argmax ("flips"), with their logit margins, for the method and for plain decoding.
    Sampling: a chi-square test of the first two tokens over many seeds. Exit code 1 when a flip's margin is larger than the
    dtype explains, or a p-value is below 0.0001.
    """
    from pctree import SamplingParams, SpeculativeDecoder

    texts = read_prompts(prompts)[:limit]
    options: dict[str, Any] = {"temperature": temperature, "repetition_penalty": repetition_penalty}
    if temperature:
        options |= {"seed": seed, "top_p": top_p}
    params = SamplingParams(max_new_tokens=max_new_tokens, **options)
    decoder = SpeculativeDecoder.from_pretrained(
        target,
        drafter,
        method=method,
        top_k=top_k,
        budget=read_budget(budget),
        frontier=frontier,
        candidates=candidates,
        dtype=dtype,
        device=device,
        compile=compile,
        profile=profile,
    )
    if temperature:
        passed = sampled(decoder, texts, params, draws, as_json)
    else:
        passed = greedy(decoder, texts, params, max_batch_size, as_json)
    raise typer.Exit(0 if passed else 1)


def read_prompts(file: Path | None) -> list[str]:
    """One prompt a line, empty lines left out; of a ``.jsonl`` file the first turns."""
    if file is None:
        return list(PROMPTS)
    if file.suffix == ".jsonl":
        return read_file(file)
    try:
        with file.open() as lines:  # not splitlines(): a prompt may hold other line separators
            texts = [line.strip() for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {file} cannot be read ({error}); give a text file") from None
    if not texts:
        raise UsageError(f"--prompts {file} holds no prompt; give one a line")
    return texts


def greedy(decoder, texts, params, max_batch_size, as_json) -> bool:
    from pctree.audit import audit_greedy, explained_margin

    audits = []
    with progress_bar() as bar:
        work = bar.add_task("auditing", total=2 * len(texts), note="")
        for name in ("ar", decoder.settings.method):
            advance = partial(bar.update, work, advance=1, note=name)
            reader = decoder.with_settings(method=name)
            audits.append(audit_greedy(reader, texts, params, max_batch_size=max_batch_size, progress=advance))
    limit = explained_margin(decoder.target.dtype, audits[0])
    passed = audits[1].largest_margin <= limit
    if as_json:
        record = {
            "passed": passed,
            "explained_margin": limit,
            "methods": [
                asdict(a) | {"flips_per_thousand": a.flips_per_thousand, "largest_margin": a.largest_margin} for a in audits
            ],
        }
        print(json.dumps(record))
        return passed
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    table = Table(title=f"greedy, {dtype}, {len(texts)} prompts: tokens that are not the argmax of a plain forward",
                  title_justify="left")  # fmt: skip
    for heading in ("method", "tokens", "flips", "per 1000", "largest margin"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for a in audits:
        row = (a.method, f"{a.tokens:,}", str(len(a.flips)), f"{a.flips_per_thousand:.2f}", f"{a.largest_margin:.4g}")
        table.add_row(*row)
    out.print(table)
    if audits[1].flips:
        show = decoder.tokenizer.decode if decoder.tokenizer else str
        firsts = Table(title=f"first flip of each prompt ({decoder.settings.method})", title_justify="left")
        for heading in ("prompt", "position", "emitted", "argmax", "margin"):
            firsts.add_column(heading)
        for flip in audits[1].first_flips():
            firsts.add_row(str(flip.prompt), str(flip.position), repr(show([flip.token])), repr(show([flip.argmax])),
                           f"{flip.margin:.4g}")  # fmt: skip
        out.print(firsts)
        out.print("margins:")
        counts = audits[1].histogram(EDGES)
        for label, count in zip([*(f"below {edge:g}" for edge in EDGES), f"{EDGES[-1]:g} and more"], counts, strict=True):
            out.print(f"  {label:>12}  {'█' * count} {count}")
    verdict = "Nothing that rounding does not explain" if passed else "A flip that rounding does NOT explain"
    out.print(f"{verdict}: margins up to {limit:.4g} are rounding in {dtype}.")
    return passed


def sampled(decoder, texts, params, draws, as_json) -> bool:
    from pctree.audit import audit_sampling

    audits = []
    for number, text in enumerate(texts):
        err.print(f"prompt {number + 1} of {len(texts)}: {draws} seeds")
        audits.append(audit_sampling(decoder, text, params, draws=draws))
    passed = all(a.p_value >= 1e-4 for a in audits)
    if as_json:
        print(json.dumps({"passed": passed, "prompts": [asdict(a) for a in audits]}))
        return passed
    table = Table(title=f"sampling, {decoder.settings.method}: chi-square of the first two tokens", title_justify="left")
    for heading in ("prompt", "seeds", "cells", "chi-square", "p-value"):
        table.add_column(heading, justify="right")
    for number, a in enumerate(audits):
        table.add_row(str(number), f"{a.draws:,}", str(a.cells), f"{a.statistic:.1f}", f"{a.p_value:.4f}")
    out.print(table)
    out.print(
        "The distribution is the target's, as far as these draws can tell."
        if passed
        else "The distribution is NOT the target's."
    )
    return passed
