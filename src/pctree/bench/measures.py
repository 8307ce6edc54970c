"""What the records say: pure functions from lists of records to numbers, most of them with a bootstrap interval.

Three rules hold everywhere. A number over several tasks is the unweighted mean of the tasks' numbers. An interval is the
percentile bootstrap's 95 % over *prompts*, resampled within their task; the repeats of a prompt go with it. A comparison of two
cells is made on the prompts that both have, resampled together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from statistics import fmean, median

import torch
from torch import Tensor

from pctree.bench.records import Record
from pctree.stats import STAGES

Prompt = tuple[str, str]  # task, prompt_sha256
Statistic = Callable[[Tensor], Tensor]  # [..., prompts, columns] to [...]

RESAMPLES = 1000
SEED = 20260802


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; no interval where a task has fewer than two prompts."""

    value: float
    low: float | None = None
    high: float | None = None


def by_task(records: Iterable[Record]) -> dict[str, list[Record]]:
    tasks = defaultdict(list)
    for record in records:
        tasks[record["task"]].append(record)
    return dict(sorted(tasks.items()))


def by_prompt(records: Iterable[Record]) -> dict[Prompt, list[Record]]:
    prompts = defaultdict(list)
    for record in records:
        prompts[record["task"], record["prompt_sha256"]].append(record)
    return dict(sorted(prompts.items()))


def over_tasks(records: Sequence[Record], measure: Callable[[list[Record]], float | None]) -> float | None:
    """The unweighted mean of the measure over the tasks that have it."""
    values = [value for group in by_task(records).values() if (value := measure(group)) is not None]
    return fmean(values) if values else None


# --- the bootstrap ------------------------------------------------------------------------------------------------------


def bootstrap(rows: Mapping[Prompt, Sequence[float]], statistic: Statistic) -> Estimate | None:
    """The mean over tasks of ``statistic`` over the rows of a task's prompts, with its interval.

    The draws depend on the numbers of prompts alone, so that equal prompts are drawn alike for every cell.
    """
    tasks: dict[str, list[Sequence[float]]] = defaultdict(list)
    for (task, _), row in sorted(rows.items()):
        tasks[task].append(row)
    if not tasks:
        return None
    generator = torch.Generator().manual_seed(SEED)
    value, drawn = 0.0, torch.zeros(RESAMPLES, dtype=torch.float64)
    for table in tasks.values():
        data = torch.tensor(table, dtype=torch.float64)  # [prompts, columns]
        picks = torch.randint(len(data), (RESAMPLES, len(data)), generator=generator)
        value += float(statistic(data)) / len(tasks)
        drawn += statistic(data[picks]) / len(tasks)
    if min(map(len, tasks.values())) < 2:
        return Estimate(value)
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)


def _mean(rows: Tensor) -> Tensor:
    return rows[..., 0].mean(-1)


def _median(rows: Tensor) -> Tensor:
    return rows[..., 0].quantile(0.5, dim=-1)


def _ratio(rows: Tensor) -> Tensor:
    return rows[..., 0].sum(-1) / rows[..., 1].sum(-1)


def _ratio_gain(rows: Tensor) -> Tensor:
    return _ratio(rows[..., 2:]) - _ratio(rows)


def _median_gain(rows: Tensor) -> Tensor:
    return _median(rows[..., 1:]) - _median(rows)


# --- acceptance ---------------------------------------------------------------------------------------------------------


def _tokens_and_rounds(records: Iterable[Record]) -> dict[Prompt, tuple[int, int]]:
    """Committed tokens and rounds of each prompt, its repeats together; prompts without a round are left out."""
    counts = {}
    for prompt, group in by_prompt(records).items():
        lengths = [length for record in group for length in record["acceptance_lengths"]]
        if lengths:
            counts[prompt] = (sum(lengths), len(lengths))
    return counts


def tau(records: Iterable[Record]) -> Estimate | None:
    """Acceptance length: tokens committed per round, bonus token included, over all rounds of a task."""
    return bootstrap(_tokens_and_rounds(records), _ratio)


def tau_gain(before: Iterable[Record], after: Iterable[Record]) -> Estimate | None:
    """τ of ``after`` less τ of ``before``, on the prompts that both have."""
    first, second = _tokens_and_rounds(before), _tokens_and_rounds(after)
    return bootstrap({prompt: (*first[prompt], *second[prompt]) for prompt in first.keys() & second.keys()}, _ratio_gain)


def on_shared_text(*cells: Iterable[Record]) -> list[list[Record]]:
    """The records of several cells, each with only those of its rounds that start while the texts of all cells are the same.

    Near-ties part the texts that methods write to one prompt, and of two texts one may be easier to draft (a loop, say). Rounds
    that start from the same text were put the same question, so that what tells them apart is the method alone.
    """
    keyed = [{(record["task"], record["prompt_sha256"], record["repeat"]): record for record in records} for records in cells]
    cut: list[list[Record]] = [[] for _ in cells]
    for key in keyed[0]:
        if not all(key in others for others in keyed):
            continue
        group = [records[key] for records in keyed]
        shared = _shared_length([record["token_ids"] for record in group])
        for kept, record in zip(cut, group, strict=True):
            starts = accumulate(record["acceptance_lengths"], initial=1)  # the prefill's token is there before any round
            rounds = zip(record["acceptance_lengths"], starts, strict=False)
            kept.append({**record, "acceptance_lengths": [length for length, start in rounds if start <= shared]})
    return cut


def _shared_length(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens the texts share from their beginning."""
    return next((i for i, tokens in enumerate(zip(*texts, strict=False)) if len(set(tokens)) > 1), min(map(len, texts)))


def length_distribution(records: Iterable[Record], longest: int) -> list[float]:
    """Share of rounds that commit exactly n tokens, for n = 1 … ``longest``."""
    shares = []
    for group in by_task(records).values():
        counts = Counter(length for record in group for length in record["acceptance_lengths"])
        if counts:
            shares.append([counts[length] / counts.total() for length in range(1, longest + 1)])
    return [fmean(column) for column in zip(*shares, strict=True)] if shares else [0.0] * longest


def acceptance_by_depth(records: Iterable[Record], depths: int) -> list[float]:
    """Share of rounds that accept at least d drafted tokens, for d = 1 … ``depths``; 1 + their sum is τ."""
    shares = length_distribution(records, depths + 1)
    return [sum(shares[depth:]) for depth in range(1, depths + 1)]


# --- speed --------------------------------------------------------------------------------------------------------------

# Speeds compare only under one roof: same target, prompt, repeat, temperature, number format, length, and environment.
PAIRED_BY = ("target", "task", "prompt_sha256", "repeat", "temperature", "dtype", "max_new_tokens", "environment")


def speed_ratios(records: Iterable[Record], plain: Iterable[Record]) -> dict[Prompt, list[float]]:
    """Tokens a second over plain decoding's, one ratio a repeat; prompts without a partner are left out."""
    partner = {tuple(record[key] for key in PAIRED_BY): record["tokens_per_second"] for record in plain}
    ratios = defaultdict(list)
    for record in records:
        mine, theirs = record["tokens_per_second"], partner.get(tuple(record[key] for key in PAIRED_BY))
        if mine and theirs:
            ratios[record["task"], record["prompt_sha256"]].append(mine / theirs)
    return dict(ratios)


def median_speedup(records: Iterable[Record], plain: Iterable[Record]) -> Estimate | None:
    """AR speedup: the median over prompts (each one's median over its repeats)."""
    return bootstrap({prompt: [median(found)] for prompt, found in speed_ratios(records, plain).items()}, _median)


def mean_speedup(records: Iterable[Record], plain: Iterable[Record]) -> Estimate | None:
    """AR speedup: the mean over prompts (each one's mean over its repeats)."""
    return bootstrap({prompt: [fmean(found)] for prompt, found in speed_ratios(records, plain).items()}, _mean)


def speedup_gain(before: Iterable[Record], after: Iterable[Record], plain: Sequence[Record]) -> Estimate | None:
    """Median speedup of ``after`` less that of ``before``, on the prompts that both have."""
    first, second = speed_ratios(before, plain), speed_ratios(after, plain)
    return bootstrap({p: (median(first[p]), median(second[p])) for p in first.keys() & second.keys()}, _median_gain)


# --- everything about one cell ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flips:
    """How often the text parts from plain decoding's, and how near a tie that was.

    ``compared`` counts tokens up to the first difference, since what follows it answers another text.
    """

    texts: int
    parted: int
    compared: int
    median_margin: float | None
    largest_margin: float | None

    @property
    def per_thousand(self) -> float:
        return 1000 * self.parted / self.compared if self.compared else 0.0


def flips(records: Sequence[Record]) -> Flips:
    """Flips of greedy records against ``ar`` of the same prompt."""
    parted = [record for record in records if record["first_difference"] is not None]
    margins = [abs(r["margin"]) for r in parted if r["margin"] is not None and not math.isnan(r["margin"])]
    return Flips(
        texts=len(records),
        parted=len(parted),
        compared=sum(r["tokens"] if r["first_difference"] is None else r["first_difference"] + 1 for r in records),
        median_margin=median(margins) if margins else None,
        largest_margin=max(margins, default=None),
    )


@dataclass(frozen=True)
class Summary:
    """All measures of one cell, on one task or over all."""

    prompts: int
    texts: int
    tau: Estimate | None
    speedup: Estimate | None  # median
    mean_speedup: Estimate | None
    tokens_per_second: float | None  # median
    rounds: float | None  # a text
    nodes: float | None  # a round
    stage_ms: dict[str, float]  # a round, medians over texts
    peak_memory_mb: float | None
    flips: Flips
    loops: int

    @property
    def round_ms(self) -> float:
        return sum(self.stage_ms.values())


def summarise(records: Sequence[Record], plain: Sequence[Record]) -> Summary:
    """All measures of the records of one cell; ``plain`` are the records of ``ar``."""
    with_rounds = [record for record in records if record["rounds"]]
    return Summary(
        prompts=len(by_prompt(records)),
        texts=len(records),
        tau=tau(records),
        speedup=median_speedup(records, plain),
        mean_speedup=mean_speedup(records, plain),
        tokens_per_second=over_tasks(records, lambda group: median(r["tokens_per_second"] for r in group)),
        rounds=over_tasks(records, lambda group: fmean(r["rounds"] for r in group)),
        nodes=over_tasks(with_rounds, _mean_nodes),
        stage_ms={stage: _stage_ms(with_rounds, stage) for stage in STAGES},
        peak_memory_mb=max((r["peak_memory_mb"] for r in records if r.get("peak_memory_mb")), default=None),
        flips=flips(records),
        loops=sum(record["repeats_itself"] for record in records),
    )


def _stage_ms(records: Sequence[Record], stage: str) -> float:
    return over_tasks(records, lambda group: median(r["stage_ms"][stage] for r in group)) or 0.0


def _mean_nodes(records: list[Record]) -> float:
    return sum(r["tree_nodes"] * r["rounds"] for r in records) / sum(r["rounds"] for r in records)


# --- do repeats agree? --------------------------------------------------------------------------------------------------


def repeats_agree(estimates: Sequence[Estimate | None]) -> bool | None:
    """Are no two of them further apart than √(h² + h'²), where h are their intervals' half-widths? That is what 95 % of
    independent runs would show. None with fewer than two intervals to compare.
    """
    known = [(e.value, (e.high - e.low) / 2) for e in estimates if e and e.low is not None and e.high is not None]
    if len(known) < 2:
        return None
    return all(abs(a - b) <= math.hypot(h, g) for (a, h), (b, g) in combinations(known, 2))


def by_repeat(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each repeat."""
    repeats = defaultdict(list)
    for record in records:
        repeats[record["repeat"]].append(record)
    return [group for _, group in sorted(repeats.items())]
