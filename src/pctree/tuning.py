"""Finding the fastest settings for a pair on this machine: measure, predict, confirm.

One decoding with a large tree shows what every smaller one would have committed, since the N best nodes are the first N of it.
So a few decodings and the cost of a verify forward by its rows predict all settings; the best few are then decoded for real.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import torch

from pctree.decoder import SpeculativeDecoder
from pctree.economy import MOST_NODES, ROWS, Economy, calibrate
from pctree.methods import METHODS, Block, DraftSettings

CONTEXT = 256
CONFIRMED = 3  # of the predicted settings


@dataclass
class Confirmed:
    """What settings did when they were decoded for real."""

    settings: DraftSettings
    tokens_per_second: float
    acceptance_length: float
    compile: str | None = None  # the mode of ``--compile``, where it is not that of the decoder that was tuned


@dataclass
class Reading:
    """One way to read the drafter, decoded with the largest tree: what every budget would commit, and what it costs.

    ``committed[n]`` is the mean of tokens a round with n + 1 nodes.
    """

    settings: DraftSettings
    committed: list[float]
    overhead_ms: float  # a round without its verify forward
    seen: list[tuple[float, bool]] = field(default_factory=list)  # log path probability of a node, and whether it was accepted


def readings_for(decoder: SpeculativeDecoder) -> list[DraftSettings]:
    """The chain, and the trees worth trying with this drafter."""
    assert decoder.drafter is not None
    config = decoder.drafter.config
    if config.autoregressive:
        return [DraftSettings("eagle3", top_k=k, budget=MOST_NODES) for k in (1, 2, 4)]
    if not config.markov_rank:
        return [DraftSettings("dflash"), DraftSettings("ddtree", budget=MOST_NODES)]
    vocabulary = config.draft_vocab_size or config.backbone.vocab_size
    lists = [0, 256] if vocabulary >= 64 * 256 else [0]
    trees = [(2, "capped"), (4, "capped"), (8, "capped"), (4, "exact")]
    return [DraftSettings("dspark")] + [
        DraftSettings("pctree", k, MOST_NODES, frontier, candidates)
        for candidates in lists
        for k, frontier in trees
        if k <= vocabulary
    ]


@torch.inference_mode()
def verify_costs(decoder: SpeculativeDecoder, repeats: int = 9) -> dict[int, float]:
    """Median milliseconds of a verify forward by its rows, measured in turn."""
    target = decoder.target
    length = min(CONTEXT, target.max_length - max(ROWS) - 1)
    ids = torch.arange(length, device=target.device)[None] % target.vocab_size
    cache = target.new_cache(1, length + max(ROWS))
    target.prefill(cache, ids)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats + 1):
        for rows in ROWS:
            mask = torch.ones(1, rows, rows, dtype=torch.bool, device=target.device).tril()
            depths = torch.arange(rows, device=target.device)[None]
            began = time.perf_counter()
            logits, _ = target.verify(cache, ids[:, :1].expand(-1, rows), depths, mask)
            logits.argmax(-1).cpu()
            times[rows].append(1e3 * (time.perf_counter() - began))
    return {rows: median(values[1:]) for rows, values in times.items()}


@torch.inference_mode()
def layer_cost(decoder: SpeculativeDecoder, settings: DraftSettings, repeats: int = 9) -> float:
    """Milliseconds of growing a tree by another layer: the whole tree less the first layer, shared by the others."""
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    length = min(CONTEXT, target.max_length // 2)
    ids = torch.arange(length, device=target.device)[None] % target.vocab_size
    context = drafter.new_cache(1, length, settings.most_nodes)
    _, features = target.prefill(target.new_cache(1, length), ids)
    drafter.extend(context, features, ids)
    times: dict[float | None, list[float]] = {None: [], 0.0: []}  # by the floor that ends growth: never, and at once
    for _ in range(repeats + 1):
        for floor, taken in times.items():
            block = Block(drafter, context, ids[:, -1], *drafter.draft_block(context, ids[:, -1]))
            began = time.perf_counter()
            settings.grow(block, floor=floor).token_ids.cpu()
            taken.append(1e3 * (time.perf_counter() - began))
    whole, first = (median(taken[1:]) for taken in times.values())
    return max(0.0, whole - first) / max(1, drafter.config.draft_length - 1)


def read(decoder: SpeculativeDecoder, settings: DraftSettings, prompts: Sequence[Any], tokens: int) -> Reading:
    """Decode the sample with these settings."""
    reader = decoder.with_settings(**asdict(settings))
    accepted: Counter[int] = Counter()  # rounds in which the node of this number was on the path
    overheads, seen, rounds, nodes = [], [], 0, 0
    for prompt in prompts:
        request = reader.request(prompt, max_new_tokens=tokens)
        for _, done in reader.decode([request]):
            if not done.path:
                continue
            rounds += 1
            path = set(done.path)
            accepted.update(path)
            nodes = max(nodes, done.tree.nodes)
            log_probs = done.tree.log_probs[0].tolist()
            seen += [(log_prob, node in path) for node, log_prob in enumerate(log_probs) if node]
        stats = request.stats
        if stats.rounds:
            overheads.append(1e3 * stats.seconds / stats.rounds - stats.stage_ms["verify"])
    committed = [total / max(1, rounds) for total in accumulate(accepted[node] for node in range(nodes))]
    return Reading(settings, committed, median(overheads or [0.0]), seen)


def predict(reading: Reading, verify_ms: dict[int, float]) -> list[tuple[float, DraftSettings]]:
    """Predicted tokens a second of every budget worth naming, best first; a chain has its own length only."""
    economy = Economy(verify_ms, reading.overhead_ms)
    chain = METHODS[reading.settings.method].chain or reading.settings.top_k == 1
    found = []
    for budget in (len(reading.committed),) if chain else ROWS[1:]:
        if budget <= len(reading.committed):
            rate = 1e3 * reading.committed[budget - 1] / economy.cost(budget)
            found.append((rate, with_budget(reading.settings, budget)))
    return sorted(found, key=lambda pair: -pair[0])


def with_budget(settings: DraftSettings, budget: int | str) -> DraftSettings:
    return replace(settings, budget=budget)


def confirm(
    readers: Sequence[SpeculativeDecoder],
    prompts: Sequence[Any],
    tokens: int,
    progress: Callable[[], None],
) -> list[Confirmed]:
    """Decode with each in turn, prompt by prompt, in an order that rotates. Tokens a second are the median ratio to the first
    over the prompts, times the first's own median.
    """
    for reader in readers:
        reader.generate(prompts[0], max_new_tokens=min(tokens, 8))
    rates: list[list[float]] = [[] for _ in readers]
    lengths: list[list[float]] = [[] for _ in readers]
    for number, prompt in enumerate(prompts):
        order = [(number + step) % len(readers) for step in range(len(readers))]
        for place in order:
            stats = readers[place].generate(prompt, max_new_tokens=tokens).stats
            rates[place].append(stats.tokens_per_second)
            lengths[place].append(stats.acceptance_length)
            progress()
    found = []
    for reader, mine, tau in zip(readers, rates, lengths, strict=True):
        ratio = median(rate / base for rate, base in zip(mine, rates[0], strict=True) if base)
        found.append(Confirmed(reader.settings, median(rates[0]) * ratio, fmean(tau)))
    return found


@dataclass
class Tuned:
    """The result of :func:`tune`: what is fastest, and everything that was measured on the way."""

    best: Confirmed
    economy: Economy
    confirmed: list[Confirmed]  # plain decoding first, then the chain, then trees
    predicted: list[tuple[float, DraftSettings]]  # tokens a second, best first


def tune(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 48,
    others: Mapping[str, SpeculativeDecoder] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Tuned:
    """The fastest settings for a pair on this machine.

    Args:
        prompts: a sample of what will be decoded.
        others: the same pair prepared in other ways, by mode of ``--compile``; each is tried with the best settings.
        progress: told the stage, and how much of it is done.
    """
    verify_ms = verify_costs(decoder)
    progress("costs", 1, 1)
    settings = readings_for(decoder)
    readings = []
    for number, each in enumerate(settings):
        readings.append(read(decoder, each, prompts, max_new_tokens))
        progress("acceptance", number + 1, len(settings))
    predicted = sorted((pair for reading in readings for pair in predict(reading, verify_ms)), key=lambda pair: -pair[0])
    trees = [pair for pair in predicted if not METHODS[pair[1].method].chain]
    # The chain comes first among the readings, and every drafter can be read as some tree.
    reading = next(r for r in readings if with_budget(r.settings, 1) == with_budget(trees[0][1], 1))
    # A path's probability means the same whatever k the tree was grown with.
    kind = (reading.settings.method, reading.settings.candidates)
    seen = [node for r in readings if (r.settings.method, r.settings.candidates) == kind for node in r.seen]
    layer_ms = layer_cost(decoder, reading.settings)
    economy = Economy(verify_ms, reading.overhead_ms, calibrate(seen), reading.committed, layer_ms)
    chain = with_budget(settings[0], len(readings[0].committed))
    first = trees[0][1]
    tried = [decoder.with_settings(**asdict(each)) for each in (DraftSettings("ar"), chain, *(s for _, s in trees[:CONFIRMED]))]
    tried.append(decoder.with_settings(economy=economy, **asdict(with_budget(first, "auto"))))
    others = others or {}
    tried += [other.with_settings(**asdict(first)) for other in others.values()]
    total, done = len(tried) * len(prompts), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("confirming", done, total)

    confirmed = confirm(tried, prompts, max_new_tokens, step)
    for mode, other in zip(others, confirmed[len(confirmed) - len(others) :], strict=True):
        other.compile = mode
    best = max(confirmed[1:], key=lambda each: each.tokens_per_second)
    return Tuned(best, economy, confirmed, predicted)
