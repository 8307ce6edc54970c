"""``pctree demo``: the same prompts, plainly, as a chain, and as trees."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pctree.cli.common import COMPILE, DEVICE, DRAFTER, TARGET, err, out

if TYPE_CHECKING:
    from pctree.decoder import SpeculativeDecoder

PROMPTS = {
    "a sum in words": "A baker sells 12 rolls every hour. Each roll costs 2 dollars. How much does she earn in 5 hours? "
    "Think step by step.",
    "code": "Write a Python function that returns the largest number in a list.",
    "a letter": "Write a short letter to a friend, inviting her to dinner on Saturday.",
    "chat": "Hello! Can you tell me three interesting facts about the ocean?",
}
METHODS = ("ar", "dspark", "shared-markov", "pctree")
LABELS = {"ar": "plain (ar)", "dspark": "DSpark chain", "shared-markov": "Shared-Markov tree", "pctree": "PCTree"}


@dataclass
class Tally:
    """What one method did over all prompts."""

    lengths: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    speedups: list[float] = field(default_factory=list)
    same: int = 0
    margins: list[float] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        return sum(self.lengths) / max(1, len(self.lengths))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def command(
    target: str = TARGET,
    drafter: str = DRAFTER,
    top_k: int = typer.Option(4, help="Children per parent, and width of the frontier."),
    budget: int = typer.Option(32, help="Nodes sent to the target in a round, root included."),
    max_new_tokens: int = typer.Option(64, help="Most tokens per prompt; half as many in the float32 check."),
    device: str = DEVICE,
    compile: str = COMPILE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object at the end and nothing else."),
) -> None:
    """Decode a few prompts plainly, with DSpark's chain, with a Shared-Markov tree and with PCTree.

    First in bfloat16 for speed, then in float32, where every method must give the very tokens of plain decoding. About two
    minutes on two cores.
    """
    from pctree import SpeculativeDecoder

    report: dict[str, Any] = {}
    for dtype, tokens in (("bfloat16", max_new_tokens), ("float32", max(8, max_new_tokens // 2))):
        decoder = SpeculativeDecoder.from_pretrained(
            target, drafter, method="pctree", top_k=top_k, budget=budget, dtype=dtype, device=device, compile=compile,
            profile="off",
        )  # fmt: skip
        tallies = compare(decoder, tokens, quiet=as_json)
        report[dtype] = {
            method: {
                "acceptance_length": round(tally.acceptance_length, 3),
                "tokens_per_second": round(tally.tokens_per_second, 2),
                "speedup": round(median(tally.speedups), 3),
                "identical_prompts": tally.same,
                "prompts": len(PROMPTS),
                "near_tie_margins": [round(margin, 4) for margin in tally.margins],
            }
            for method, tally in tallies.items()
        }
        if not as_json:
            out.print(table(dtype, tokens, tallies))
    if as_json:
        print(json.dumps(report))
        return
    identical = all(cell["identical_prompts"] == len(PROMPTS) for cell in report["float32"].values())
    best = report["bfloat16"]["pctree"]
    out.print(
        Text("float32: every method gave the tokens of plain decoding, all of them." if identical else
             "float32: NOT identical to plain decoding; please report this.", "bold green" if identical else "bold red")
    )  # fmt: skip
    out.print(
        f"PCTree committed {best['acceptance_length']:.2f} tokens a round and ran at {best['speedup']:.2f} times the speed of "
        "plain decoding.\nSee the trees themselves: pctree generate --show-tree --prompt 'Name three colours.'"
    )
    if not identical:
        raise typer.Exit(1)


def compare(decoder: SpeculativeDecoder, max_new_tokens: int, *, quiet: bool) -> dict[str, Tally]:
    """Decode every prompt with every method in turn (so that drift of the machine hits all alike)."""
    from pctree.agreement import first_divergence
    from pctree.prompts import encode_prompt

    tallies = {method: Tally() for method in METHODS}
    readers = {method: decoder.with_settings(method=method) for method in METHODS}
    for reader in readers.values():
        reader.generate("Hi", max_new_tokens=8)  # warm-up
    for name, prompt in PROMPTS.items():
        prompt_ids = encode_prompt(decoder.tokenizer, prompt)
        plain: Any = None
        with Live(console=err, transient=True, refresh_per_second=8, auto_refresh=not quiet) as live:
            for method, reader in readers.items():
                result: Any = None
                for result, _ in reader.stream(prompt_ids, max_new_tokens=max_new_tokens):
                    if not quiet:
                        live.update(view(name, prompt, method, result))
                tally, stats = tallies[method], result.stats
                plain = plain or result
                tally.lengths += stats.acceptance_lengths
                tally.tokens += stats.new_tokens - 1
                tally.seconds += stats.seconds
                tally.speedups.append(stats.tokens_per_second / max(plain.stats.tokens_per_second, 1e-9))
                difference = first_divergence(decoder.target, prompt_ids, plain.token_ids, result.token_ids)
                tally.same += difference is None
                if difference is not None:
                    tally.margins.append(difference.margin)
        if not quiet and decoder.target.dtype.itemsize == 2:
            out.print(Text(f"{name}: ", "bold").append(prompt, "italic not bold"))
            out.print(Text(plain.text.strip() + "\n", "dim"))
    return tallies


def view(name: str, prompt: str, method: str, result: Any) -> Text:
    """What is on the screen while a method writes."""
    text = Text(f"{name}  ", "bold").append(LABELS[method], "bold cyan")
    stats = result.stats
    text.append(f"  {stats.acceptance_length:.2f} tokens a round, {stats.tokens_per_second:.0f} tokens/s\n", "cyan")
    return text.append(result.text or "")


def table(dtype: str, tokens: int, tallies: dict[str, Tally]) -> Table:
    """One row a method."""
    made = Table(title=f"{dtype}, greedy, {len(PROMPTS)} prompts, {tokens} tokens each", title_justify="left")
    for heading in ("method", "acceptance length", "tokens/s", "speed over plain", "same tokens as plain"):
        made.add_column(heading, justify="left" if heading == "method" else "right")
    for method, tally in tallies.items():
        ties = f"; parted at a near-tie (margin ≤ {max(map(abs, tally.margins)):.2g})" if tally.margins else ""
        agreement = "—" if method == "ar" else f"{tally.same} of {len(PROMPTS)}{ties}"
        made.add_row(
            LABELS[method],
            f"{tally.acceptance_length:.2f}",
            f"{tally.tokens_per_second:.1f}",
            f"{median(tally.speedups):.2f}×",
            agreement,
            style="bold" if method == "pctree" else None,
        )
    return made
