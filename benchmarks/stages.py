"""Where the time of a round goes, stage by stage, beside the least that each could take.

    python benchmarks/stages.py head                 # head and tree at the shapes of Qwen3-4B's drafter, random weights
    python benchmarks/stages.py pair --prompts FILE  # all stages of a real pair, chain and tree

What is compared runs in turn, over and over, and medians are shown, so that a machine that speeds up or slows down does so for
all alike. Floors: bytes that must be read over the measured speed of the memory, or operations over the measured rate of the
matrix units, whichever is more. Every line is also written to --output as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from rich.table import Table
from torch import nn
from transformers.generation.streamers import BaseStreamer

from pctree import SpeculativeDecoder
from pctree.bench.tasks import read_file, select
from pctree.cli.common import err, out, progress_bar
from pctree.drafters import MarkovHead
from pctree.loading import resolve_device
from pctree.packing import PackedLinear, can_pack
from pctree.prompts import encode_prompt
from pctree.scorers import DraftVocabulary, MarkovScorer, ShortlistScorer
from pctree.targets import KVCache
from pctree.tree import grow_tree

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
DTYPE = torch.bfloat16


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alternate(work: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of each, one after the other in every repeat; the first two repeats warm up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    with torch.inference_mode(), progress_bar() as bar:
        task = bar.add_task("measuring", total=repeats + 2, note="")
        for _ in range(repeats + 2):
            for name, call in work.items():
                synchronise(device)
                began = time.perf_counter()
                call()
                synchronise(device)
                times[name].append(1e3 * (time.perf_counter() - began))
            bar.update(task, advance=1)
    return {name: median(values[2:]) for name, values in times.items()}


def memory_speed(device: torch.device) -> float:
    """Bytes a millisecond, read and written, of copying 256 MB."""
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / alternate({"copy": lambda: target.copy_(source)}, device, 9)["copy"]


def matrix_rate(device: torch.device) -> float:
    """Operations a millisecond of a large matrix product."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(DTYPE)
    return 2 * size**3 / alternate({"product": lambda: a @ a}, device, 9)["product"]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@app.command()
def head(
    vocabulary: int = typer.Option(151_936),
    rank: int = typer.Option(256),
    hidden_size: int = typer.Option(2560),
    blocks: str = typer.Option("7,16", help="Block sizes B."),
    top_ks: str = typer.Option("1,2,4,8"),
    budgets: str = typer.Option("8,16,32,64"),
    candidates: str = typer.Option("0,256", help="Tokens on a slot's shortlist; 0 is the whole vocabulary."),
    repeats: int = typer.Option(15),
    device: str = typer.Option("auto"),
    output: Path = typer.Option(Path("runs/stages-head.jsonl")),
) -> None:
    """Head and tree: the chain, and trees of every k and N, with random weights."""
    where = resolve_device(device)
    speed, rate = memory_speed(where), matrix_rate(where)
    err.print(f"memory {speed / 1e6:.1f} GB/s, matrix products {rate / 1e9:.2f} TFLOP/s, {torch.get_num_threads()} threads")
    torch.manual_seed(0)
    markov = MarkovHead(vocabulary, rank, hidden_size).to(where, DTYPE).requires_grad_(False)
    if can_pack(markov.markov_w2):
        markov.markov_w2 = PackedLinear(markov.markov_w2.weight, keep_weight=True)  # type: ignore[assignment]
    words, anchors, rows = DraftVocabulary(vocabulary), torch.tensor([5], device=where), []
    for block in map(int, blocks.split(",")):
        base = (2 * torch.randn(1, block, vocabulary, device=where)).to(DTYPE)
        hidden = torch.randn(1, block, hidden_size, device=where).to(DTYPE)
        cells: dict[str, dict[str, int]] = {"chain": {"top_k": 1, "budget": block + 1, "candidates": 0}}
        for listed in map(int, candidates.split(",")):
            for k in map(int, top_ks.split(",")):
                for budget in map(int, budgets.split(",")):
                    cells[f"k={k} N={budget} C={listed or 'all'}"] = {"top_k": k, "budget": budget, "candidates": listed}

        def grow(top_k: int, budget: int, candidates: int, base=base, hidden=hidden) -> Any:
            scorer = (
                ShortlistScorer(base, hidden, markov, words, candidates)
                if candidates
                else MarkovScorer(base, hidden, markov, words)
            )
            tree = grow_tree(scorer, anchors, top_k=top_k, budget=budget)
            return tree.ancestor_mask(scorer.depth)

        work = {name: (lambda cell=cell: grow(**cell)) for name, cell in cells.items()}
        found = alternate(work, where, repeats)
        table = Table(title=f"head and tree, V={vocabulary:,}, r={rank}, B={block}, ms", title_justify="left")
        for heading in ("", "ms", "to the chain", "floor, ms", "to the floor"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, cell in cells.items():
            floor = head_floor(block, vocabulary, rank, cell["top_k"], cell["candidates"], speed, rate)
            ms = found[name]
            row = {"block_size": block, "vocabulary": vocabulary, "rank": rank, **cell, "name": name, "device": str(where),
                   "ms": ms, "floor_ms": floor, "to_chain": ms / found["chain"], "to_floor": ms / floor}  # fmt: skip
            rows.append(row)
            table.add_row(name, f"{ms:.2f}", f"{row['to_chain']:.2f}×", f"{floor:.2f}", f"{row['to_floor']:.2f}×")
        out.print(table)
    write(output, rows)


def head_floor(block: int, vocabulary: int, rank: int, width: int, candidates: int, speed: float, rate: float) -> float:
    """Milliseconds: the base logits once, and the head's rows once a layer (with a shortlist: the listed rows once)."""
    rows = candidates or vocabulary
    bytes_read = 2 * block * (vocabulary + rows * rank)
    return max(bytes_read / speed, 2 * block * width * rows * rank / rate)


@app.command()
def pair(
    target: str = typer.Option("smollm2"),
    drafter: str = typer.Option("smollm2"),
    prompts: Path = typer.Option(None, help='A task, {"turns": ["…"]} a line. [default: the built-in one]'),
    count: int = typer.Option(4, help="Prompts."),
    top_k: int = typer.Option(4),
    budgets: str = typer.Option("8,16,32"),
    candidates: int = typer.Option(0),
    max_new_tokens: int = typer.Option(96),
    repeats: int = typer.Option(3),
    context: int = typer.Option(256, help="Committed tokens for the forwards."),
    device: str = typer.Option("auto"),
    compile: str = typer.Option("auto"),
    output: Path = typer.Option(Path("runs/stages-pair.jsonl")),
) -> None:
    """All stages of a real pair, and its verify forward beside transformers' own."""
    from pctree.bench.tasks import BUILTIN_FILE

    decoder = SpeculativeDecoder.from_pretrained(
        target, drafter, device=device, compile=compile, candidates=candidates, profile="off"
    )
    where = str(decoder.target.device)
    plain = SpeculativeDecoder.from_pretrained(target, method="ar", device=where, compile="off", profile="off")
    rows: list[dict[str, Any]] = []
    texts = select(read_file(prompts or BUILTIN_FILE), count)
    methods = {"ar": {"method": "ar"}, "chain": {"method": "dspark"}}
    methods |= {f"tree N={n}": {"method": "pctree", "top_k": top_k, "budget": int(n)} for n in budgets.split(",")}
    readers = {name: decoder.with_settings(**settings) for name, settings in methods.items()}
    stats: dict[str, list[Any]] = {name: [] for name in readers}
    theirs: list[float] = []
    with progress_bar() as bar:
        work = bar.add_task("decoding", total=repeats * len(texts) * (len(readers) + 1), note="")
        for repeat in range(repeats + 1):
            for text in texts[: 1 if repeat == 0 else None]:
                for name, reader in readers.items():
                    result = reader.generate(text, max_new_tokens=16 if repeat == 0 else max_new_tokens)
                    if repeat:  # the first is a warm-up
                        stats[name].append(result.stats)
                        bar.update(work, advance=1, note=name)
                rate = transformers_rate(plain, text, 16 if repeat == 0 else max_new_tokens)
                if repeat:
                    theirs.append(rate)
                    bar.update(work, advance=1, note="transformers")
    table = Table(title="median ms a round", title_justify="left")
    for heading in ("", "draft", "tree", "verify", "commit", "rest", "round", "not a forward", "τ", "tokens/s"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, mine in stats.items():
        stage = {key: median(s.stage_ms[key] for s in mine) for key in ("draft", "tree", "verify", "commit")}
        whole = median(1e3 * s.seconds / s.rounds for s in mine)
        rest = median(1e3 * s.seconds / s.rounds - sum(s.stage_ms.values()) for s in mine)
        overhead = median(1 - (s.stage_ms["draft"] + s.stage_ms["verify"]) * s.rounds / (1e3 * s.seconds) for s in mine)
        tau, rate = median(s.acceptance_length for s in mine), median(s.tokens_per_second for s in mine)
        rows.append(
            {"name": name, **stage, "rest": rest, "round": whole, "overhead": overhead, "tau": tau, "tokens_per_second": rate}
        )
        numbers = [*stage.values(), rest, whole]
        table.add_row(name, *(f"{ms:.1f}" for ms in numbers), f"{overhead:.1%}", f"{tau:.2f}", f"{rate:.1f}")
    own = median(theirs)
    rows.append({"name": "transformers.generate", "round": 1e3 / own, "tau": 1.0, "tokens_per_second": own})
    table.add_row("transformers.generate", *[""] * 5, f"{1e3 / own:.1f}", "", "1.00", f"{own:.1f}")
    out.print(table)
    rows += forwards(decoder, plain.target.model, context)
    write(output, rows)


class Times(BaseStreamer):
    """When tokens came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def transformers_rate(plain: SpeculativeDecoder, text: str, max_new_tokens: int) -> float:
    """Tokens a second after the first, of greedy ``generate`` as transformers has it."""
    ids = torch.tensor([encode_prompt(plain.tokenizer, text)], device=plain.target.device)
    seen = Times()
    plain.target.model.generate(ids, do_sample=False, max_new_tokens=max_new_tokens, streamer=seen)
    _, first, *_, last = seen.times
    return (len(seen.times) - 2) / (last - first)


def forwards(decoder: SpeculativeDecoder, plain: Any, context: int) -> list[dict[str, Any]]:
    """A forward of n rows behind ``context`` tokens: ours, and transformers' own with its dynamic cache."""
    model, where = decoder.target, decoder.target.device
    floor = weight_bytes(model.model) / memory_speed(where)
    ids = torch.randint(100, 1000, (1, context), device=where)
    cache = model.new_cache(1, context + 128)
    model.prefill(cache, ids)
    rows = []
    table = Table(title=f"a forward behind {context} tokens, ms (reading the weights once: {floor:.1f})", title_justify="left")
    for heading in ("rows", "ours", "transformers", "ratio"):
        table.add_column(heading, justify="right")
    for count in (1, 8, 16, 32, 64):
        mask = torch.ones(1, count, count, dtype=torch.bool, device=where).tril()
        depths = torch.arange(count, device=where)[None]
        theirs = dynamic_forward(plain, cache, ids[:, :count])
        work = {"ours": lambda c=count, m=mask, d=depths: model.verify(cache, ids[:, :c], d, m), "transformers": theirs}
        found = alternate(work, where, 15)
        rows.append({"name": f"forward of {count}", "rows": count, "context": context, "floor_ms": floor, **found})
        table.add_row(str(count), *(f"{found[k]:.1f}" for k in found), f"{found['transformers'] / found['ours']:.2f}×")
    out.print(table)
    return rows


def weight_bytes(model: nn.Module) -> int:
    """Of all weights that a forward reads, packed or not; one row of the embeddings is next to nothing."""
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    plain = {id(p): p for p in model.parameters() if p is not model.get_input_embeddings().weight}  # type: ignore[operator]
    return sum(p.numel() * p.element_size() for p in plain.values()) + sum(2 * m.in_features * m.out_features for m in packed)


def dynamic_forward(model: nn.Module, cache: KVCache, ids: torch.Tensor) -> Callable[[], Any]:
    """A forward of transformers over the same context; its cache grows, so what it added is cropped again."""
    from transformers import DynamicCache

    length, added = int(cache.lengths[0]), ids.shape[1]
    past = DynamicCache()
    for layer in range(len(cache.keys)):
        past.update(cache.keys[layer, :1, :, :length].clone(), cache.values[layer, :1, :, :length].clone(), layer)

    def call() -> None:
        model(ids, past_key_values=past, use_cache=True)
        past.crop(-added)

    return call


@app.command()
def growth(
    target: str = typer.Option("smollm2"),
    drafter: str = typer.Option("smollm2"),
    method: str = typer.Option("pctree"),
    tokens: int = typer.Option(2000),
    windows: int = typer.Option(10, help="Parts that the rounds are cut into."),
    device: str = typer.Option("auto"),
    output: Path = typer.Option(Path("runs/stages-growth.jsonl")),
) -> None:
    """Rounds of one long text, early and late: nothing but attention may grow with what is committed."""
    decoder = SpeculativeDecoder.from_pretrained(target, drafter, method=method, device=device, profile="off")
    request = decoder.request("Tell me a very long story.", max_new_tokens=tokens, stop_token_ids=[])
    times: list[float] = []
    nodes = 1
    with progress_bar() as bar:
        work = bar.add_task("decoding", total=tokens, note="")
        began = time.perf_counter()
        for _, done in decoder.decode([request]):
            ended = time.perf_counter()
            if done.path:
                times.append(1e3 * (ended - began))
                nodes = done.tree.nodes
            bar.update(work, completed=len(request.token_ids))
            began = time.perf_counter()
    share = max(1, len(times) // windows)
    rows = []
    table = Table(title="median ms by part of the text", title_justify="left")
    for heading in ("tokens before", "a round", f"a forward of {nodes} rows alone", "the rest"):
        table.add_column(heading, justify="right")
    for start in range(0, len(times) - share + 1, share):
        before = len(request.prompt_ids) + round(len(request.token_ids) * (start + share / 2) / len(times))
        whole, forward = median(times[start : start + share]), lone_forward(decoder, before, nodes)
        rows.append({"tokens_before": before, "round": whole, "forward": forward, "rest": whole - forward})
        table.add_row(str(before), f"{whole:.1f}", f"{forward:.1f}", f"{whole - forward:.1f}")
    out.print(table)
    write(output, rows)


def lone_forward(decoder: SpeculativeDecoder, context: int, rows: int) -> float:
    """Median milliseconds of a verify forward behind so many tokens."""
    model, where = decoder.target, decoder.target.device
    ids = torch.randint(100, 1000, (1, context), device=where)
    cache = model.new_cache(1, context + rows)
    model.prefill(cache, ids)
    mask, depths = torch.ones(1, rows, rows, dtype=torch.bool, device=where).tril(), torch.arange(rows, device=where)[None]
    return alternate({"verify": lambda: model.verify(cache, ids[:, :rows], depths, mask)}, where, 7)["verify"]


if __name__ == "__main__":
    app()
