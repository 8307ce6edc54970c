"""A budget that follows the text: verify a node when its chance of being accepted pays for its row.

A round commits one token, and one more for every drafted node on the target's path. A node's chance of being there is its path
probability, corrected by what was seen of this drafter; what a row costs is measured on this machine, and a millisecond is
worth the tokens that rounds of the best fixed size commit in it. A tree is grown while its likeliest node is worth another
layer. Since nodes are sorted by probability, what is then worth verifying is a prefix.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pctree.tree import DraftTree

# What rows of a forward come in where their number is ours to choose: a library prepares itself for every shape that it meets.
ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MOST_NODES = ROWS[-1]  # that an automatic budget considers


@dataclass(frozen=True)
class Economy:
    """What rounds cost and nodes are worth, as ``pctree tune`` measured it.

    Args:
        verify_ms: milliseconds of a verify forward by its rows; between and beyond them the curve is straight.
        round_ms: milliseconds of all other stages of a round together.
        calibration: pairs of a log path probability and the share of such nodes that were accepted, both rising; straight
            between them, flat beyond. Empty: the drafter is taken at its word.
        committed: mean tokens of a round with 1, 2, … nodes. Empty: not known, and then every round has the most expected
            tokens a second that it can have by itself, which is not quite the most over all rounds.
        layer_ms: milliseconds of growing a tree by a layer; 0: not known, and then all layers are grown.
    """

    verify_ms: Mapping[int, float]
    round_ms: float
    calibration: Sequence[tuple[float, float]] = ()
    committed: Sequence[float] = ()
    layer_ms: float = 0.0

    def cost(self, rows: int) -> float:
        """Milliseconds of a round that verifies so many rows."""
        known = sorted(self.verify_ms)
        if len(known) == 1:
            return self.round_ms + self.verify_ms[known[0]]
        at = min(max(1, bisect_left(known, rows)), len(known) - 1)
        low, high = known[at - 1], known[at]
        slope = (self.verify_ms[high] - self.verify_ms[low]) / (high - low)
        return self.round_ms + max(self.verify_ms[low] + slope * (rows - low), self.verify_ms[known[0]])

    @cached_property
    def _points(self) -> tuple[Tensor, Tensor]:
        log_probs, shares = zip(*self.calibration, strict=True)
        return torch.tensor(log_probs), torch.tensor(shares)

    def _choices(self, requests: int, nodes: int) -> tuple[Tensor, Tensor]:
        """How many of ``nodes`` nodes a request can be verified, and what such rounds cost."""

        def work_out() -> tuple[Tensor, Tensor]:
            counts = [*(rows for rows in ROWS if rows < nodes), nodes]
            return torch.tensor(counts), torch.tensor([self.cost(requests * count) for count in counts])

        return self._once(("choices", requests, nodes), work_out)

    def _once(self, key: Any, work_out: Callable[[], Any]) -> Any:
        """What every round asks for is worked out for the first one."""
        if key not in self._known:
            self._known[key] = work_out()
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    def chances(self, log_probs: Tensor) -> Tensor:
        """The chance of each node [R, N] of being accepted."""
        if not self.calibration:
            return log_probs.exp()
        x, y = (column.to(log_probs.device) for column in self._points)
        if len(x) == 1:
            return y.expand_as(log_probs).clone()
        clamped = log_probs.float().clamp(x[0], x[-1])
        right = torch.searchsorted(x, clamped.contiguous()).clamp(1, len(x) - 1)
        share = (clamped - x[right - 1]) / (x[right] - x[right - 1])
        return y[right - 1] + share * (y[right] - y[right - 1])

    def rate(self, requests: int) -> float | None:
        """Tokens a millisecond with the best fixed budget, which is what time is worth; None if it is not known."""
        counts = range(1, len(self.committed) + 1)
        rates = (requests * self.committed[count - 1] / self.cost(requests * count) for count in counts)
        return self._once(("rate", requests), lambda: max(rates, default=None))

    def floor(self, requests: int) -> float:
        """The path log-probability down to which a node may be worth a further layer of the tree."""
        return self._once(("floor", requests), lambda: self._floor(requests))

    def _floor(self, requests: int) -> float:
        # If no request has a node with this chance, all of them together expect less from a layer than its time is worth.
        worth = (self.rate(requests) or 0.0) * self.layer_ms / requests
        if not worth:
            return -math.inf
        if not self.calibration:
            return min(0.0, math.log(worth))
        below = [log_prob for log_prob, share in self.calibration if share < worth]
        if not below:
            return -math.inf
        x, y = zip(*self.calibration, strict=True)
        at = len(below)
        if at == len(x):
            return 0.0
        return x[at - 1] + (x[at] - x[at - 1]) * (worth - y[at - 1]) / (y[at] - y[at - 1])

    def trim(self, tree: DraftTree) -> DraftTree:
        """The prefix of the tree that is worth its rows; the same number of nodes for all requests."""
        requests, nodes = tree.token_ids.shape
        gains = self.chances(tree.log_probs)
        gains[:, 0] = 1.0  # the bonus token
        counts, costs = (choice.to(gains.device) for choice in self._choices(requests, nodes))
        expected, rate = gains.sum(0).cumsum(0)[counts - 1], self.rate(requests)
        best = counts[(expected / costs if rate is None else expected - rate * costs).argmax()]
        return tree.cut((torch.arange(nodes, device=best.device) < best).expand(requests, -1))


def calibrate(seen: Sequence[tuple[float, bool]], bins: int = 64) -> list[tuple[float, float]]:
    """Points for :class:`Economy` from nodes seen: log path probability, and whether the node was accepted.

    Isotonic regression over bins of equally many nodes: where a bin's share falls below an earlier one's they are pooled,
    since the likelier node must not count less.
    """
    ordered = sorted(seen)
    edges = [len(ordered) * number // bins for number in range(bins + 1)]
    rising: list[tuple[float, float, int]] = []  # sum of log probabilities, accepted, nodes
    for start, stop in pairwise(edges):
        if start == stop:
            continue
        part = ordered[start:stop]
        rising.append((sum(p for p, _ in part), float(sum(hit for _, hit in part)), stop - start))
        while len(rising) > 1 and rising[-2][1] * rising[-1][2] >= rising[-1][1] * rising[-2][2]:
            (p1, hits1, n1), (p2, hits2, n2) = rising[-2:]
            rising[-2:] = [(p1 + p2, hits1 + hits2, n1 + n2)]
    return [(total / nodes, hits / nodes) for total, hits, nodes in rising]
