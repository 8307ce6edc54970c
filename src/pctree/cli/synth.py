"""``pctree synth``: let a target write training data."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer

from pctree.cli.common import DEVICE, DTYPE, TARGET, err, given, graceful_stop, progress_bar, read_yaml
from pctree.errors import UsageError


def command(
    output: Path = typer.Option(..., "--output", "-o", help="The JSON-lines file to write, or to go on with."),
    config: Path = typer.Option(None, help="A YAML file with settings; flags win over it."),
    target: str = TARGET,
    dtype: str = DTYPE,
    device: str = DEVICE,
    answer_tokens: int = typer.Option(None, help="Stop when the file holds this many answer tokens. [default: 1,000,000]"),
    rows: int = typer.Option(None, help="Conversations written at once. [default: 192]"),
    turns: int = typer.Option(None, help="User turns per conversation. [default: 1]"),
    max_prompt: int = typer.Option(None, help="Longest user turn, in tokens. [default: 96]"),
    max_answer: int = typer.Option(None, help="Longest answer, in tokens. [default: 160]"),
    sampled_fraction: float = typer.Option(None, help="Share of answers that are sampled, not greedy. [default: 0.2]"),
    answer_temperature: float = typer.Option(None, help="Temperature of the sampled answers. [default: 0.8]"),
    seed: int = typer.Option(None, help="Seed. [default: 0]"),
) -> None:
    """Write training data with the target itself: it makes up user turns and answers them.

    Every line holds the token ids of a conversation and where the answers are. Interrupt it at any time: the same command
    goes on where the file ends.

    [bold]pctree synth --output data.jsonl --answer-tokens 200000[/bold]
    """
    from pctree.train.synth import Opening, SynthConfig, synthesize

    settings = read_yaml(config) | given(
        answer_tokens=answer_tokens, rows=rows, turns=turns, max_prompt=max_prompt, max_answer=max_answer,
        sampled_fraction=sampled_fraction, answer_temperature=answer_temperature, seed=seed)  # fmt: skip
    unknown = sorted(settings.keys() - {f.name for f in fields(SynthConfig)})
    if unknown:
        raise UsageError(f"{config}: unknown setting {', '.join(unknown)}")
    if "openings" in settings:
        try:
            settings["openings"] = [Opening(**opening) for opening in settings["openings"]]
        except TypeError as error:
            raise UsageError(f"{config}: openings are a list of {{weight, text, suffix}} ({error})") from None
    chosen = SynthConfig(**settings)
    chosen.validate()

    from pctree.loading import load_pair
    from pctree.methods import DraftSettings

    pair = load_pair(target, None, DraftSettings("ar"), dtype=dtype, device=device)
    model, tokenizer = pair.target, pair.tokenizer
    if tokenizer is None:
        raise UsageError(f"target {target} has no tokenizer; synth needs its chat template")
    output.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as bar, graceful_stop() as stopped:
        task = bar.add_task("answer tokens", total=chosen.answer_tokens, note="")

        def progress(conversations: int, tokens: int) -> None:
            bar.update(task, completed=tokens, note=f"{conversations:,} conversations")

        conversations, tokens = synthesize(model, tokenizer, output, chosen, progress, lambda: bool(stopped))
    err.print(f"{output}: {conversations:,} conversations, {tokens:,} answer tokens")
    if tokens < chosen.answer_tokens:
        err.print("Run the same command again to go on.")
        raise typer.Exit(130)
