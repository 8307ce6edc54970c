"""Who says how likely each child is: the table of methods (DESIGN, section 3), one small class a row.

Each reads what one backbone forward gave: base logits [R, B, V] and hidden states [R, B, H]. Where a request reshapes the
target's distribution (temperature, penalties), ``reshape`` does the same to the drafter's logits [R, P, V], so that what is
proposed is what the target will want.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pctree.drafters import MarkovHead

Reshape = Callable[[Tensor], Tensor]


def _log_softmax(logits: Tensor, reshape: Reshape | None) -> Tensor:
    logits = logits.float()
    return (reshape(logits) if reshape else logits).log_softmax(-1)


class BaseScorer:
    """Base logits alone: every parent of a depth has the same children (DFlash, DDTree)."""

    def __init__(self, base_logits: Tensor, reshape: Reshape | None = None):
        self.depth = base_logits.shape[1]
        self.base_logits, self.reshape = base_logits, reshape

    def initial_state(self) -> Tensor:
        return self.base_logits.new_zeros(len(self.base_logits), 1, 0)

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return _log_softmax(self.base_logits[:, depth : depth + 1], self.reshape), states


class MarkovScorer:
    """Base logits plus the head's bias for the actual parent (DSpark's chain, PCTree)."""

    def __init__(self, base_logits: Tensor, hidden: Tensor, head: MarkovHead, reshape: Reshape | None = None):
        self.depth = base_logits.shape[1]
        self.base_logits, self.hidden, self.head, self.reshape = base_logits, hidden, head, reshape

    def initial_state(self) -> Tensor:
        return self.head.initial_state(len(self.base_logits))

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        slot = slice(depth, depth + 1)
        latent, states = self.head(parents, self.hidden[:, slot], states)
        return _log_softmax(self.base_logits[:, slot] + self.head.bias(latent), self.reshape), states


class SharedMarkovScorer(BaseScorer):
    """The control: distributions along the greedy chain, reused for every parent of a depth.

    It branches like PCTree but does not condition on the parent, so the difference between the two is what parent
    conditioning brings.
    """

    def __init__(self, base_logits: Tensor, hidden: Tensor, head: MarkovHead, anchors: Tensor, reshape: Reshape | None = None):
        super().__init__(base_logits)
        chain = MarkovScorer(base_logits, hidden, head, reshape)
        parents, states = anchors[:, None], chain.initial_state()
        log_probs = []
        for depth in range(chain.depth):
            layer, states = chain.score(depth, parents, states)
            parents = layer.argmax(-1)
            log_probs.append(layer)
        self.log_probs = torch.cat(log_probs, dim=1)

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_probs[:, depth : depth + 1], states
