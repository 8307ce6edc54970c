"""Draft trees: what one is, and the one way to grow one.

Growing knows no model. A scorer says how likely each child of each frontier parent is; everything here is a fixed
number of tensor operations on fixed shapes, so nothing waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

# Added log-probabilities are kept above this, so that minus infinity can only mean "no such node".
FLOOR = -1e30


@dataclass
class DraftTree:
    """The N nodes that a target verifies for each of R requests, root (the anchor token) first.

    Nodes are ordered by path log-probability, which never grows from parent to child: so every parent stands before its
    children, and cutting the tree after any node leaves a tree.
    """

    token_ids: Tensor  # [R, N]
    parents: Tensor  # [R, N], indices into the same row; the root is its own parent
    depths: Tensor  # [R, N], 0 for the root
    log_probs: Tensor  # [R, N], of the whole path from the root; minus infinity: there is no such node
    confidence: Tensor | None = None  # [R, N], where a confidence head was asked: the chance of a node given its parent

    @property
    def nodes(self) -> int:
        return self.token_ids.shape[1]

    def row(self, request: int) -> DraftTree:
        """The tree of one request, with R = 1."""
        return self._map(lambda tensor: tensor[request : request + 1])

    def cut(self, alive: Tensor) -> DraftTree:
        """The tree without the nodes that are not ``alive`` (bool [R, N], a prefix of each row that holds the root).

        It is as wide as the widest row needs, which the host waits for; in the others, what is behind their own last node
        counts as no node.
        """
        width = int(alive.sum(1).max())
        shorter = self._map(lambda tensor: tensor[:, :width])
        return replace(shorter, log_probs=shorter.log_probs.masked_fill(~alive[:, :width], -torch.inf))

    @property
    def sizes(self) -> Tensor:
        """How many nodes each request really has [R]."""
        return (self.log_probs > -torch.inf).sum(1)

    def _map(self, change: Callable[[Tensor], Tensor]) -> DraftTree:
        confidence = None if self.confidence is None else change(self.confidence)
        return DraftTree(change(self.token_ids), change(self.parents), change(self.depths), change(self.log_probs), confidence)

    def ancestor_mask(self, depth: int) -> Tensor:
        """Bool [R, N, N], true where the column is the row itself or an ancestor of it; ``depth`` bounds all depths."""
        requests, nodes = self.parents.shape
        current = torch.arange(nodes, device=self.parents.device).expand(requests, -1)
        mask = torch.zeros(requests, nodes, nodes, dtype=torch.bool, device=self.parents.device)
        for _ in range(depth + 1):
            mask.scatter_(2, current[..., None], True)
            current = self.parents.gather(1, current)
        return mask


class Scorer(Protocol):
    """Says how likely each child is; the only thing in which the methods differ."""

    depth: int  # how many tokens can be drafted

    def initial_state(self) -> Tensor:
        """State [R, 1, s] of the root (s may be 0)."""
        ...

    def propose(self, depth: int, parents: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The ``count`` likeliest children (or all, if there are fewer) of P parents that stand at ``depth``.

        Args:
            parents: token ids [R, P].
            states: [R, P, s].
        Returns:
            Log-probabilities and token ids [R, P, k], or [R, 1, k] where they do not depend on the parent, likeliest
            first, and the state [R, P, s] that all children of a parent inherit.
        """
        ...


def best(scores: Tensor, count: int) -> Tensor:
    """Indices [R, count] of the largest scores, equal ones in their order, so that a parent never loses to its child."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def grow_tree(scorer: Scorer, anchors: Tensor, *, top_k: int = 4, budget: int = 32, exact: bool = False) -> DraftTree:
    """The best tree of at most ``budget`` nodes, layer by layer (PCTree, section 3; DDTree for ``exact``).

    Each layer scores its frontier in one batch, every parent proposes its likeliest children, and the ``budget`` best
    nodes so far stay. The frontier is the ``top_k`` best of the new nodes with ``top_k`` children each; or, if
    ``exact``, all new nodes that stay, with as many children as could stay: a node outside the best so far has no
    descendant among the final best, so this is the true optimum under the scorer.

    Args:
        anchors: token ids [R] of the roots.
        top_k: children per parent and frontier width; ignored if ``exact``.
        budget: most nodes, root included. The tree has fewer where there are fewer candidates.
    """
    requests = len(anchors)
    width = budget - 1 if exact else top_k
    tokens = anchors[:, None]
    parents = torch.zeros_like(tokens)
    depths = torch.zeros_like(tokens)
    scores = torch.zeros(requests, 1, device=anchors.device)
    frontier = torch.zeros_like(tokens)  # indices of the parents to expand
    states = scorer.initial_state()
    for depth in range(scorer.depth if budget > 1 else 0):
        log_probs, token_ids, states = scorer.propose(depth, tokens.gather(1, frontier), states, width)
        children = log_probs.shape[-1]
        added = log_probs.clamp(FLOOR, 0.0)  # rounding can lift a certain token above probability 1
        parent_scores = scores.gather(1, frontier).masked_fill(depths.gather(1, frontier) != depth, -torch.inf)
        shape = (requests, frontier.shape[1], children)

        known = tokens.shape[1]
        tokens = torch.cat([tokens, token_ids.expand(shape).flatten(1)], dim=1)
        parents = torch.cat([parents, frontier[..., None].expand(shape).flatten(1)], dim=1)
        depths = torch.cat([depths, torch.full_like(parents[:, known:], depth + 1)], dim=1)
        scores = torch.cat([scores, (parent_scores[..., None] + added).flatten(1)], dim=1)

        kept = best(scores, budget)
        position = torch.zeros_like(parents).scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
        tokens, depths, scores = tokens.gather(1, kept), depths.gather(1, kept), scores.gather(1, kept)
        parents = position.gather(1, parents.gather(1, kept))
        if depth + 1 < scorer.depth:
            new = depths == depth + 1
            proposals = shape[1] * shape[2]
            frontier = best(scores.masked_fill(~new, -torch.inf), min(width, proposals))
            # Every child starts from the state that its parent's step left.
            slot = kept.gather(1, frontier).sub(known).clamp_min(0) // children
            states = states.gather(1, slot[..., None].expand(-1, -1, states.shape[-1]))
    return DraftTree(tokens, parents, depths, scores)
