"""Draft trees: what one is, and the one way to grow one.

Growing knows no model. A scorer says how likely each child of each frontier parent is; everything here is a fixed
number of tensor operations on fixed shapes, so nothing waits on the host.
"""

from __future__ import annotations

import math
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

    def clone(self) -> DraftTree:
        return self._map(Tensor.clone)

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
        itself = torch.eye(nodes, device=self.parents.device).expand(requests, -1, -1)
        # Where a walk of at most `reach` steps leads to, and in how many ways; each product doubles the reach.
        reached, reach = itself.scatter(2, self.parents[..., None], 1.0), 1
        while reach < depth:
            reached, reach = reached @ reached, 2 * reach
        return reached > 0


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


def worth_growing(scores: Tensor, frontier_scores: Tensor, budget: int, floor: float) -> bool:
    """Whether a child of the frontier may be among the ``budget`` best: none is better than its parent."""
    if scores.shape[1] >= budget:
        last = scores.topk(budget, dim=1).values[:, -1:].clamp_min(floor)
        return bool((frontier_scores > last).any())
    return floor == -math.inf or bool((frontier_scores > floor).any())


def grow_tree(
    scorer: Scorer,
    anchors: Tensor,
    *,
    top_k: int = 4,
    budget: int = 32,
    exact: bool = False,
    floor: float | None = None,
) -> DraftTree:
    """The best tree of at most ``budget`` nodes, layer by layer (PCTree, section 3; DDTree for ``exact``).

    Each layer scores its frontier in one batch, and every parent proposes its likeliest children. The next frontier is the
    ``top_k`` best of these, with ``top_k`` children each; or, if ``exact``, the ``budget`` - 1 best, with as many children:
    no other node can have a descendant among the ``budget`` best, so this is the true optimum under the scorer. In the end
    the ``budget`` best nodes of all layers stay. Scores only fall along a path, so a node stays only with its parent.

    Args:
        anchors: token ids [R] of the roots.
        top_k: children per parent and frontier width; ignored if ``exact``.
        budget: most nodes, root included. The tree has fewer where there are fewer candidates.
        floor: None grows all layers and waits for nothing. A number lets the host look after every layer, and ends growing when
            no node of the frontier is among the ``budget`` best so far, which leaves the tree as it would have been, or has a
            path log-probability above the number (minus infinity: leave nothing out).
    """
    width = budget - 1 if exact else top_k
    root = torch.zeros_like(anchors)[:, None]
    # All nodes proposed so far, layer by layer; parents are places in these lists.
    tokens, parents, depths = [anchors[:, None]], [root], [root]
    scores = [torch.zeros(len(anchors), 1, device=anchors.device)]
    # The frontier: the nodes to expand, with their places in the lists.
    frontier, frontier_places, frontier_scores, known = tokens[0], root, scores[0], 1
    states = scorer.initial_state()
    for depth in range(scorer.depth if budget > 1 else 0):
        log_probs, token_ids, states = scorer.propose(depth, frontier, states, width)
        shape = (*frontier.shape, log_probs.shape[-1])
        added = log_probs.clamp(FLOOR, 0.0)  # rounding can lift a certain token above probability 1
        tokens.append(token_ids.expand(shape).flatten(1))
        parents.append(frontier_places[..., None].expand(shape).flatten(1))
        depths.append(torch.full_like(parents[-1], depth + 1))
        scores.append((frontier_scores[..., None] + added).flatten(1))
        if depth + 1 < scorer.depth:
            # A node that will not be among the best may be expanded in vain: its children are no better than it is.
            chosen = best(scores[-1], width)
            frontier, frontier_scores = tokens[-1].gather(1, chosen), scores[-1].gather(1, chosen)
            if states.shape[-1]:  # every child starts from the state that its parent's step left
                states = states.gather(1, (chosen // shape[2])[..., None].expand(-1, -1, states.shape[-1]))
            frontier_places = chosen + known
            if floor is not None and not worth_growing(torch.cat(scores, dim=1), frontier_scores, budget, floor):
                break
        known += shape[1] * shape[2]
    every_score = torch.cat(scores, dim=1)
    kept = best(every_score, budget)
    place = torch.zeros_like(every_score, dtype=torch.long)
    place.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    kept_parents = place.gather(1, torch.cat(parents, dim=1).gather(1, kept))
    return DraftTree(
        torch.cat(tokens, dim=1).gather(1, kept),
        kept_parents,
        torch.cat(depths, dim=1).gather(1, kept),
        every_score.gather(1, kept),
    )
