"""Is the text the target's own? Checks every emitted token against a plain forward of the target over the emitted text.

Greedy: is each token the argmax, and if not, by what logit margin? Where the margin is what rounding explains, the token
was one of two that all but tie. Plain decoding with the same dtype is audited too, as the yardstick.
Sampling: a chi-square test of the first two tokens over many seeds against their exact distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pctree.decoder import SpeculativeDecoder
from pctree.errors import UsageError
from pctree.params import SamplingParams
from pctree.request import Request


@dataclass
class Flip:
    """An emitted token that is not the argmax of the plain forward, and by how much its logit is below."""

    prompt: int
    position: int
    token: int
    argmax: int
    margin: float


@dataclass
class GreedyAudit:
    """What the audit of one method found over all prompts."""

    method: str
    tokens: int = 0
    flips: list[Flip] = field(default_factory=list)
    largest_logit: float = 0.0

    @property
    def flips_per_thousand(self) -> float:
        return 1000 * len(self.flips) / self.tokens if self.tokens else 0.0

    @property
    def largest_margin(self) -> float:
        return max((flip.margin for flip in self.flips), default=0.0)

    def first_flips(self) -> list[Flip]:
        """The first flip of each prompt that has one."""
        first: dict[int, Flip] = {}
        for flip in self.flips:
            first.setdefault(flip.prompt, flip)
        return list(first.values())

    def histogram(self, edges: Sequence[float]) -> list[int]:
        """How many margins lie below each edge and at or above the one before; the last entry is the rest."""
        counts = [0] * (len(edges) + 1)
        for flip in self.flips:
            counts[next((i for i, edge in enumerate(edges) if flip.margin < edge), len(edges))] += 1
        return counts


def plain_logits(request: Request, decoder: SpeculativeDecoder) -> Tensor:
    """The target's logits [n, V] (float32) for each emitted token of a request, from the model's own forward."""
    ids = torch.tensor([[*request.prompt_ids, *request.token_ids]], device=decoder.target.device)
    count = len(request.token_ids)
    with torch.inference_mode():
        return decoder.target.model(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()


def plain_scores(request: Request, decoder: SpeculativeDecoder) -> Tensor:
    """The same, processed as the request asks."""
    return request.process_emitted(plain_logits(request, decoder))


def audit_greedy(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    max_batch_size: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> GreedyAudit:
    """Decode the prompts and compare every token with the argmax of a plain forward; ``progress`` hears of each prompt.

    Raises:
        UsageError: the parameters sample.
    """
    if params.temperature:
        raise UsageError(f"temperature is {params.temperature}; the greedy audit needs 0, sampling has its own")
    found = GreedyAudit(decoder.settings.method)
    requests = [decoder.request(prompt, params) for prompt in prompts]
    for request, _ in decoder.decode(requests, max_batch_size=max_batch_size):
        if request.finish_reason is not None:
            progress()
    for number, request in enumerate(requests):
        scores = plain_scores(request, decoder)
        emitted = torch.tensor(request.token_ids, device=scores.device)
        best = scores.max(-1)
        margins = best.values - scores.gather(1, emitted[:, None])[:, 0]
        found.tokens += len(emitted)
        found.largest_logit = max(found.largest_logit, float(best.values.abs().max()))
        for position in (margins > 0).nonzero()[:, 0].tolist():
            found.flips.append(
                Flip(number, position, int(emitted[position]), int(best.indices[position]), float(margins[position]))
            )
    return found


def explained_margin(dtype: torch.dtype, plain: GreedyAudit) -> float:
    """The largest margin that rounding explains: eight units in the last place of the largest logit, or twice what plain
    decoding itself shows.
    """
    return max(8 * torch.finfo(dtype).eps * plain.largest_logit, 2 * plain.largest_margin)


@dataclass
class SamplingAudit:
    """Chi-square of the first two tokens: how far the counts of ``draws`` seeds are from the exact distribution."""

    method: str
    draws: int
    cells: int
    statistic: float
    p_value: float


def audit_sampling(
    decoder: SpeculativeDecoder, prompt: Any, params: SamplingParams, *, draws: int, max_batch_size: int = 64
) -> SamplingAudit:
    """Decode one prompt under ``draws`` seeds and test the first two tokens.

    Cells are pairs of tokens with an expected count of at least 5; all others are one cell.

    Raises:
        UsageError: the parameters are greedy.
    """
    if not params.temperature:
        raise UsageError("temperature is 0; the sampling audit needs a temperature above 0")
    base = params.seed or 0
    short = replace(params, max_new_tokens=2, min_new_tokens=0, stop=(), stop_token_ids=[])
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, max_batch_size):
        seeds = range(base + start, base + min(draws, start + max_batch_size))
        requests = [decoder.request(prompt, replace(short, seed=seed)) for seed in seeds]
        for _ in decoder.decode(requests, max_batch_size=max_batch_size):
            pass
        counts.update(tuple(request.token_ids) for request in requests)
    expected = exact_pairs(decoder, prompt, short, least=5 / draws)
    inside = sum(expected.values())
    statistic = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in expected.items())
    cells = len(expected)
    if draws * (1 - inside) >= 5:
        outside = draws - sum(counts[pair] for pair in expected)
        statistic += (outside - draws * (1 - inside)) ** 2 / (draws * (1 - inside))
        cells += 1
    return SamplingAudit(decoder.settings.method, draws, cells, statistic, chi_square_p(statistic, cells - 1))


def exact_pairs(
    decoder: SpeculativeDecoder, prompt: Any, params: SamplingParams, *, least: float
) -> dict[tuple[int, ...], float]:
    """Probabilities, of at least ``least``, of the first two tokens, from plain forwards."""

    def next_probabilities(tokens: list[int]) -> Tensor:
        request = decoder.request(prompt, params)
        request.token_ids = [*tokens, 0]  # the last token only marks the place
        return plain_scores(request, decoder)[-1].softmax(-1)

    first = next_probabilities([])
    pairs: dict[tuple[int, ...], float] = {}
    for token in (first >= least).nonzero()[:, 0].tolist():
        joint = float(first[token]) * next_probabilities([token])
        pairs.update({(token, other): float(joint[other]) for other in (joint >= least).nonzero()[:, 0].tolist()})
    return pairs


def chi_square_p(statistic: float, degrees: int) -> float:
    """The chance of a statistic at least this large when nothing is wrong."""
    if degrees < 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))
