"""``pctree generate``: decode one prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pctree.cli.common import (
    BUDGET,
    CANDIDATES,
    COMPILE,
    DEVICE,
    DRAFTER,
    DTYPE,
    FRONTIER,
    METHOD,
    PROFILE,
    TARGET,
    TOP_K,
    err,
    given,
    out,
    read_budget,
)
from pctree.errors import UsageError

if TYPE_CHECKING:
    from pctree.results import Generation


def command(
    target: str = TARGET,
    drafter: str = DRAFTER,
    method: str = METHOD,
    top_k: int = TOP_K,
    budget: str = BUDGET,
    frontier: str = FRONTIER,
    candidates: int = CANDIDATES,
    confidence_threshold: float = typer.Option(
        0.0, help="dspark: verify only the positions before the first that the confidence head trusts less; 0 is all."
    ),
    prompt: str = typer.Option(None, help="The prompt. Without any of the three, it is read from standard input."),
    prompt_file: Path = typer.Option(None, help="A file that holds the prompt."),
    prompt_ids: str = typer.Option(None, help="The prompt as token ids, 1,2,3; needs no tokenizer."),
    system: str = typer.Option(None, help="A system message."),
    raw: bool = typer.Option(False, "--raw", help="Continue the text as it is, without the chat template."),
    max_new_tokens: int = typer.Option(256, help="Most tokens to write."),
    min_new_tokens: int = typer.Option(None, help="No stop token before so many."),
    stop: list[str] = typer.Option(None, help="End where the text first contains this; may be given several times."),
    temperature: float = typer.Option(None, help="0 is greedy, the default; else the temperature to sample at."),
    sample_top_k: int = typer.Option(None, help="Sample among the so many likeliest tokens. (--top-k is the tree's.)"),
    top_p: float = typer.Option(None, help="Sample among the likeliest tokens with this much probability together."),
    min_p: float = typer.Option(None, help="Sample among tokens with this share of the likeliest one's probability."),
    repetition_penalty: float = typer.Option(None, help="Penalty on tokens of prompt and output; 1 is none."),
    presence_penalty: float = typer.Option(None, help="Subtracted from the logits of tokens in the output."),
    frequency_penalty: float = typer.Option(None, help="Subtracted for every time a token is in the output."),
    seed: int = typer.Option(None, help="Makes sampling reproducible."),
    dtype: str = DTYPE,
    device: str = DEVICE,
    compile: str = COMPILE,
    profile: str = PROFILE,
    stream: bool = typer.Option(False, "--stream", help="Print the text as it comes."),
    stats: bool = typer.Option(False, "--stats", help="Print what was measured, on standard error."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object: text, token_ids, stats."),
    show_tree: bool = typer.Option(False, "--show-tree", help="Draw the tree of every round, with the accepted path marked."),
) -> None:
    """Decode a prompt. The text is the target's own; the drafter only makes it come faster.

    [bold]pctree generate --prompt "Why is the sky blue?" --stream --stats[/bold]
    """
    if as_json and (stream or show_tree):
        raise UsageError("--json prints one object at the end; drop --stream and --show-tree")
    text = read_prompt(prompt, prompt_file, prompt_ids)
    if isinstance(text, list) and (system is not None or raw):
        raise UsageError("--prompt-ids are used as they are; drop --system and --raw")

    from pctree import SamplingParams, SpeculativeDecoder

    options: dict[str, Any] = given(
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, stop=stop or None, temperature=temperature,
        sample_top_k=sample_top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed)  # fmt: skip
    SamplingParams.from_options(options)  # refuse what cannot be used before anything is loaded
    decoder = SpeculativeDecoder.from_pretrained(
        target,
        drafter,
        method=method,
        top_k=top_k,
        budget=read_budget(budget),
        frontier=frontier,
        candidates=candidates,
        confidence_threshold=confidence_threshold,
        dtype=dtype,
        device=device,
        compile=compile,
        profile=profile,
    )
    if isinstance(text, list):
        decoder.tokenizer = None  # ids in, ids out
    else:
        options |= {"system": system, "raw": raw}
    result = None
    write = text_writer()
    number = 0
    for result, done in decoder.stream(text, **options):
        if show_tree and done is not None:
            from pctree.cli.draw import draw_round

            number += 1
            out.print(draw_round(number, done, token_shower(decoder.tokenizer)))
        elif stream:
            write(readable(result), False)
    assert result is not None
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
    elif stream and not show_tree:
        write(readable(result), True)
    else:
        print(readable(result))
    if stats:
        err.print(summary(result, decoder.startup_seconds))


def read_prompt(prompt: str | None, prompt_file: Path | None, prompt_ids: str | None) -> str | list[int]:
    """The one prompt that was given, or standard input."""
    sources = [name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--prompt-ids", prompt_ids))
               if value is not None]  # fmt: skip
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)} were given; give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            return prompt_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompt-file {prompt_file} cannot be read ({error}); give a text file") from None
    if prompt_ids is not None:
        try:
            return [int(part) for part in prompt_ids.split(",")]
        except ValueError:
            raise UsageError(f"--prompt-ids is {prompt_ids!r}; give whole numbers with commas, like 1,2,3") from None
    if sys.stdin.isatty():
        raise UsageError("no prompt was given; use --prompt, --prompt-file, --prompt-ids, or pipe one in")
    return sys.stdin.read()


def readable(result: Generation) -> str:
    """The text, or the token ids where there is none."""
    return result.text if result.text is not None else ",".join(map(str, result.token_ids))


def text_writer() -> Callable[[str, bool], None]:
    """A function that prints what is new of a growing text, holding back a character that is not whole yet."""
    written = 0

    def write(text: str, last: bool) -> None:
        nonlocal written
        ready = text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")
        print(ready[written:], end="\n" if last else "", flush=True)
        written = max(written, len(ready))

    return write


def token_shower(tokenizer: Any) -> Callable[[int], str]:
    """How a token is drawn: its text with visible spaces and line ends, or its id."""
    if tokenizer is None:
        return str

    def show(token: int) -> str:
        return tokenizer.decode([token]).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or f"<{token}>"

    return show


def summary(result: Generation, startup_seconds: Mapping[str, float]) -> str:
    """What was measured, in four lines."""
    stats = result.stats
    stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in stats.stage_ms.items())
    return (
        f"{result.method}: {stats.new_tokens} tokens in {stats.rounds} rounds, acceptance length "
        f"{stats.acceptance_length:.2f}, {stats.tree_nodes:.0f} nodes a round ({result.finish_reason})\n"
        f"{stats.tokens_per_second:.1f} tokens/s after a first token at {stats.time_to_first_token_ms:.0f} ms "
        f"({result.prompt_tokens} prompt tokens)\n"
        f"milliseconds a round: {stages}\n"
        f"before that: models read in {startup_seconds['read']:.1f} s, prepared for speed in {startup_seconds['prepare']:.1f} s"
        + (f"\nrecording graphs took {stats.recording_ms:.0f} ms, once" if stats.recording_ms else "")
    )
