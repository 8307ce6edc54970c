"""``pctree tune``: find the fastest settings for a pair on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from pctree.cli.common import COMPILE, DEVICE, DRAFTER, DTYPE, TARGET, err, out, progress_bar

if TYPE_CHECKING:
    from pctree import SpeculativeDecoder
    from pctree.methods import DraftSettings
    from pctree.tuning import Tuned


SECOND_COPY = 2_000_000_000  # weights of all layers, about


def command(
    target: str = TARGET,
    drafter: str = DRAFTER,
    prompts: Path = typer.Option(None, help='A sample of what you decode: a task, {"turns": ["…"]} a line. [default: our own]'),
    count: int = typer.Option(6, help="Prompts of the sample."),
    max_new_tokens: int = typer.Option(48, help="Tokens per prompt and decoding."),
    output: Path = typer.Option(None, help="Where the profile goes. [default: where all commands look for it]"),
    dtype: str = DTYPE,
    device: str = DEVICE,
    compile: str = COMPILE,
    as_json: bool = typer.Option(False, "--json", help="Print the profile."),
) -> None:
    """Measure what rounds cost here and what they commit, choose the fastest settings, and keep them.

    generate, chat, audit, bench and the library use them from then on for this pair, device, number format and number of
    threads, unless settings are given. It takes a few minutes on a laptop.
    """
    from pctree import SpeculativeDecoder
    from pctree.bench.tasks import BUILTIN_FILE, read_file, select
    from pctree.profiles import SETTINGS, Profile, profile_key, profile_path
    from pctree.tuning import tune

    texts = select(read_file(prompts or BUILTIN_FILE), count)
    decoder = SpeculativeDecoder.from_pretrained(
        target, drafter, dtype=dtype, device=device, compile=compile, profile="off", **any_method(drafter)
    )
    others = other_modes(decoder, target, drafter, dtype) if compile == "auto" else {}
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, note="")
            bar.update(tasks[stage], completed=done)

        found = tune(decoder, texts, max_new_tokens=max_new_tokens, others=others, progress=progress)
    key = profile_key(target, drafter, dtype, device, compile)
    chosen = {name: getattr(found.best.settings, name) for name in SETTINGS}
    measured = {
        "prompts": len(texts),
        "max_new_tokens": max_new_tokens,
        "confirmed": [asdict(each) for each in found.confirmed],
        "predicted": [{"tokens_per_second": rate, **asdict(each)} for rate, each in found.predicted[:10]],
    }
    profile = Profile(key, chosen, found.economy, measured, found.best.compile or compile)
    path = output or profile_path(key)
    profile.save(path)
    if as_json:
        print(json.dumps(asdict(profile)))
        return
    out.print(table(found))
    for line in reasons(found):
        out.print(line, markup=False, soft_wrap=True)
    err.print(f"The profile is in {path}.", markup=False, soft_wrap=True)


def any_method(drafter: str) -> dict[str, Any]:
    """A method that this drafter can be loaded with."""
    from pctree.drafters import read_config
    from pctree.loading import local_folder

    return {"method": read_config(local_folder(drafter, "drafter")).method}


def other_modes(decoder: SpeculativeDecoder, target: str, drafter: str, dtype: str) -> dict[str, SpeculativeDecoder]:
    """The pair as the other modes of ``--compile`` prepare it: on a GPU the same models with recordings; on a CPU the
    models once more, as they are stored, unless they are so large that a second copy might not fit.
    """
    from pctree import SpeculativeDecoder
    from pctree.graphs import cuda_graph

    if decoder.target.device.type == "cuda":
        models = (decoder.target, decoder.drafter, decoder.tokenizer, decoder.settings)
        return {"graphs": SpeculativeDecoder(*models, record=cuda_graph)}
    if 12 * len(decoder.target.layers) * decoder.target.hidden_size**2 > SECOND_COPY:
        return {}
    method = decoder.settings.method
    plain = SpeculativeDecoder.from_pretrained(
        target, drafter, method=method, compile="off", profile="off", dtype=dtype, device="cpu"
    )
    return {"off": plain}


def label(settings: DraftSettings, compile: str | None = None) -> str:
    """Settings in a few words."""
    from pctree.methods import METHODS

    if compile is not None:
        return f"{label(settings)}, compile {compile}"
    if settings.method == "ar" or METHODS[settings.method].chain:
        return settings.method
    shape = "exact frontier" if settings.frontier == "exact" else f"k={settings.top_k}"
    listed = f", {settings.candidates} candidates" if settings.candidates else ""
    return f"{settings.method}, {shape}, N={settings.budget}{listed}"


def table(found: Tuned) -> Table:
    made = Table(title="decoded in turn", title_justify="left")
    for heading in ("settings", "τ", "tokens/s", "over plain"):
        made.add_column(heading, justify="left" if heading == "settings" else "right")
    plain = found.confirmed[0].tokens_per_second
    for each in found.confirmed:
        row = (f"{each.acceptance_length:.2f}", f"{each.tokens_per_second:.1f}", f"{each.tokens_per_second / plain:.2f}×")
        made.add_row(label(each.settings, each.compile), *row, style="bold" if each is found.best else None)
    return made


def reasons(found: Tuned) -> list[str]:
    """What was chosen and why, in two lines."""
    best, (plain, chain) = found.best, found.confirmed[:2]
    costs = found.economy.verify_ms
    few, many = min(costs), max(costs)
    over_plain = best.tokens_per_second / plain.tokens_per_second
    over_chain = best.tokens_per_second / chain.tokens_per_second
    speed = f"{best.tokens_per_second:.1f} tokens/s, {over_plain:.2f} times plain decoding and {over_chain:.2f} times the chain"
    return [
        f"Chosen: {label(best.settings, best.compile)}: {speed}.",
        f"Why: it commits {best.acceptance_length:.2f} tokens a round (the chain {chain.acceptance_length:.2f}), and here a "
        f"verify forward takes {costs[few]:.1f} ms for {few} row and {costs[many]:.1f} ms for {many}.",
    ]
