"""Who says how likely each child is: the table of methods (DESIGN, section 3), one small class a row.

Each reads what one backbone forward gave: base logits [R, B, V] and hidden states [R, B, H].
"""

from __future__ import annotations

import torch
from torch import Tensor

from pctree.drafters import MarkovHead


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


class BaseScorer:
    """Base logits alone: every parent of a depth has the same children (DFlash, DDTree)."""

    def __init__(self, base_logits: Tensor):
        self.depth = base_logits.shape[1]
        self.log_probs = base_logits

    def initial_state(self) -> Tensor:
        return self.log_probs.new_zeros(len(self.log_probs), 1, 0)

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return _log_softmax(self.log_probs[:, depth : depth + 1]), states


class MarkovScorer:
    """Base logits plus the head's bias for the actual parent (DSpark's chain, PCTree)."""

    def __init__(self, base_logits: Tensor, hidden: Tensor, head: MarkovHead):
        self.depth = base_logits.shape[1]
        self.base_logits, self.hidden, self.head = base_logits, hidden, head

    def initial_state(self) -> Tensor:
        return self.head.initial_state(len(self.base_logits))

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        slot = slice(depth, depth + 1)
        latent, states = self.head(parents, self.hidden[:, slot], states)
        return _log_softmax(self.base_logits[:, slot] + self.head.bias(latent)), states


class SharedMarkovScorer(BaseScorer):
    """The control: distributions along the greedy chain, reused for every parent of a depth.

    It branches like PCTree but does not condition on the parent, so the difference between the two is what parent
    conditioning brings.
    """

    def __init__(self, base_logits: Tensor, hidden: Tensor, head: MarkovHead, anchors: Tensor):
        chain = MarkovScorer(base_logits, hidden, head)
        parents, states = anchors[:, None], chain.initial_state()
        log_probs = []
        for depth in range(chain.depth):
            layer, states = chain.score(depth, parents, states)
            parents = layer.argmax(-1)
            log_probs.append(layer)
        super().__init__(torch.cat(log_probs, dim=1))

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_probs[:, depth : depth + 1], states
