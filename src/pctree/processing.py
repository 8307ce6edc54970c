"""Processing the target's logits at every node of a tree, each with its own root path as the history; and drawing.

Drafted children are a fixed set, not samples, so no ratio of probabilities is involved: at each node the target's token
is drawn from its processed distribution, and the walk follows the child that carries it, if there is one. What comes out
is distributed as the target's own, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pctree.params import SamplingParams
from pctree.scorers import Reshape
from pctree.selection import argmax


class LogitBias(LogitsProcessor):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, bias: dict[int, float]):
        self.token_ids, self.values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        values = self.values.to(scores).expand(len(scores), -1)
        return scores.index_add(1, self.token_ids.to(scores.device), values)


class CountPenalty(LogitsProcessor):
    """Presence and frequency penalties: on tokens of the output, not of the prompt."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


# What the drafter's logits can follow without the path.
CHEAP = (RepetitionPenaltyLogitsProcessor, CountPenalty, LogitBias, TemperatureLogitsWarper)


class Processors:
    """A request's processors: those that read the history (``paths``), then those that do not (``warpers``)."""

    def __init__(self, params: SamplingParams, prompt_length: int, stop_ids: Sequence[int], device: torch.device):
        self.params = params
        self.paths: Any = LogitsProcessorList()
        self.warpers: Any = LogitsProcessorList()
        if params.repetition_penalty != 1:
            self.paths.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            self.paths.append(CountPenalty(prompt_length, params.presence_penalty, params.frequency_penalty))
        if params.logit_bias:
            self.paths.append(LogitBias(dict(params.logit_bias)))
        if params.min_new_tokens and stop_ids:
            ids = list(stop_ids)
            self.paths.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ids, device=str(device)))
        self.paths.extend(params.logits_processor)
        if params.temperature not in (0, 1):
            self.warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.sample_top_k:
            self.warpers.append(TopKLogitsWarper(params.sample_top_k))
        if params.top_p < 1:
            self.warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            self.warpers.append(MinPLogitsWarper(params.min_p))

    def __bool__(self) -> bool:
        return bool(self.paths or self.warpers)

    def __call__(
        self, history: Callable[[], Tensor], tokens: Tensor, depths: Tensor, ancestor_mask: Tensor, logits: Tensor
    ) -> Tensor:
        """Processed logits [N, V] (float32) of one request's nodes.

        Args:
            history: gives the committed token ids [L], without the root's, if they are needed.
            tokens, depths: [N] of the nodes.
            ancestor_mask: bool [N, N].
            logits: [N, V].
        """
        scores = logits.float()
        if self.paths:
            scores, committed = scores.clone(), history()
            # Nodes of one depth have histories of one length, so they go through the processors together.
            for depth in range(int(depths.max()) + 1):
                nodes = (depths == depth).nonzero()[:, 0]
                path = ancestor_mask[nodes].nonzero()[:, 1].view(len(nodes), depth + 1)  # parents stand first
                past = torch.cat([committed.expand(len(nodes), -1), tokens[path]], dim=1)
                scores[nodes] = self.paths(past, scores[nodes])
        return self.warpers(tokens[:, None], scores) if self.warpers else scores

    def reshape(self, history: Callable[[], Tensor]) -> Reshape | None:
        """How this request reshapes the drafter's logits [P, V], as far as that is cheap: the same temperature, bias and
        penalties, the latter for the committed history alone. It decides what is drafted, never what is accepted.
        """
        params = self.params
        cheap: Any = LogitsProcessorList(p for p in self.paths if isinstance(p, CHEAP))
        if not cheap and params.temperature in (0, 1):
            return None

        committed = history() if cheap else None

        def apply(logits: Tensor) -> Tensor:
            if committed is not None:
                logits = cheap(committed.expand(len(logits), -1), logits)
            return logits / params.temperature if params.temperature else logits

        return apply


class Draws:
    """Uniform numbers of a request, one for each place of its output.

    A token is drawn with the number of its place, by whichever node of whichever tree stands there, so a seed gives one text
    whatever is drafted and however much of it is verified. Of the nodes of a depth only one can be on the path, and which one
    depends on earlier places alone; so every number is used for one token, and that was not chosen by it.
    """

    def __init__(self, seed: int | None):
        self._generator = torch.Generator()
        self._generator.seed() if seed is None else self._generator.manual_seed(seed)
        self._numbers = torch.empty(0, dtype=torch.float64)

    def __call__(self, start: int, count: int) -> Tensor:
        """The numbers [count] of places from ``start`` on."""
        while len(self._numbers) < start + count:
            more = torch.rand(256, generator=self._generator, dtype=torch.float64)
            self._numbers = torch.cat([self._numbers, more])
        return self._numbers[start : start + count]


def choose(logits: Tensor, points: Tensor | None) -> Tensor:
    """The target's token [N] after each node: the argmax, or with uniform numbers ``points`` [N] the one that each of them
    draws from the softmax of processed ``logits`` [N, V].
    """
    if points is None:
        return argmax(logits)
    # In float64, so that rounding neither favours a token nor reaches past the last one that is possible.
    cumulative = logits.double().softmax(-1).cumsum(-1)
    points = points[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
