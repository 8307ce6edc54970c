"""Who says how likely each child is: the table of methods (DESIGN, section 3), one small class a row.

Each reads what one backbone forward gave: base logits [R, B, V] and hidden states [R, B, H]. Where a request reshapes the
target's distribution (temperature, penalties), the drafter's logits [R, P, V] are reshaped alike, so that what is proposed is
what the target will want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pctree.drafters import Eagle3Drafter, MarkovHead
from pctree.targets import KVCache

Reshape = Callable[[Tensor], Tensor]


@dataclass
class DraftVocabulary:
    """The tokens that a drafter's logits stand for, and how requests reshape those logits.

    ``ids`` [V_draft] are target ids, None for the target's whole vocabulary of ``size`` tokens.
    """

    size: int
    ids: Tensor | None = None
    reshape: Reshape | None = None

    def log_softmax(self, logits: Tensor) -> Tensor:
        logits = logits.float()
        if self.reshape is not None:
            logits = self._reshaped(logits, self.reshape)
        return logits.log_softmax(-1)

    def _reshaped(self, logits: Tensor, reshape: Reshape) -> Tensor:
        if self.ids is None:
            return reshape(logits)
        # Penalties and biases speak of target tokens.
        whole = logits.new_full((*logits.shape[:-1], self.size), torch.finfo(logits.dtype).min)
        whole[..., self.ids] = logits
        return reshape(whole)[..., self.ids]

    def token_ids(self, places: Tensor) -> Tensor:
        return places if self.ids is None else self.ids[places]


class BaseScorer:
    """Base logits alone: every parent of a depth has the same children (DFlash, DDTree)."""

    def __init__(self, base_logits: Tensor, vocabulary: DraftVocabulary | None = None):
        self.depth = base_logits.shape[1]
        self.base_logits = base_logits
        self.vocabulary = vocabulary or DraftVocabulary(base_logits.shape[-1])

    def initial_state(self) -> Tensor:
        return self.base_logits.new_zeros(len(self.base_logits), 1, 0)

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.vocabulary.log_softmax(self.base_logits[:, depth : depth + 1]), states

    def token_ids(self, depth: int, places: Tensor) -> Tensor:
        return self.vocabulary.token_ids(places)


class MarkovScorer(BaseScorer):
    """Base logits plus the head's bias for the actual parent (DSpark's chain, PCTree)."""

    def __init__(self, base_logits: Tensor, hidden: Tensor, head: MarkovHead, vocabulary: DraftVocabulary | None = None):
        super().__init__(base_logits, vocabulary)
        self.hidden, self.head = hidden, head

    def initial_state(self) -> Tensor:
        return self.head.initial_state(len(self.base_logits))

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        slot = slice(depth, depth + 1)
        latent, states = self.head(parents, self.hidden[:, slot], states)
        return self.vocabulary.log_softmax(self.base_logits[:, slot] + self.head.bias(latent)), states


class SharedMarkovScorer(BaseScorer):
    """The control: distributions along the greedy chain, reused for every parent of a depth.

    It branches like PCTree but does not condition on the parent, so the difference between the two is what parent
    conditioning brings.
    """

    def __init__(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        head: MarkovHead,
        anchors: Tensor,
        vocabulary: DraftVocabulary | None = None,
    ):
        super().__init__(base_logits, vocabulary)
        chain = MarkovScorer(base_logits, hidden, head, vocabulary)
        parents, states = anchors[:, None], chain.initial_state()
        log_probs = []
        for depth in range(chain.depth):
            layer, states = chain.score(depth, parents, states)
            parents = chain.token_ids(depth, layer.argmax(-1))
            log_probs.append(layer)
        self.log_probs = torch.cat(log_probs, dim=1)

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_probs[:, depth : depth + 1], states


class EagleScorer:
    """One forward of the EAGLE-3 layer for every layer of the tree.

    A node's state is the number of the expansion that its parent had: 0 is the root's, whose row is committed; expansion
    e > 0 stands in provisional row e - 1 and sees its ancestors' rows.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        context: KVCache,
        hidden: Tensor,
        logits: Tensor,
        vocabulary: DraftVocabulary | None = None,
    ):
        self.drafter, self.context = drafter, context
        self.vocabulary = vocabulary or DraftVocabulary(logits.shape[-1])
        self.depth = drafter.config.draft_length
        self.root_logits, self.hidden = logits, hidden  # hidden [R, expansions, H]
        self.sees = torch.zeros(len(hidden), 1, 0, dtype=torch.bool, device=hidden.device)  # [R, expansions, rows]

    def initial_state(self) -> Tensor:
        return torch.zeros(len(self.hidden), 1, 1, dtype=torch.long, device=self.hidden.device)

    def score(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if depth == 0:
            return self.vocabulary.log_softmax(self.root_logits), states
        requests, width = parents.shape
        known, rows = self.sees.shape[1:]
        hidden = self.hidden.gather(1, states.expand(-1, -1, self.hidden.shape[-1]))
        inherited = self.sees.gather(1, states.expand(-1, -1, rows))
        itself = torch.eye(width, dtype=torch.bool, device=parents.device).expand(requests, -1, -1)
        ancestors = torch.cat([inherited, itself], dim=2)
        out, logits = self.drafter.expand(self.context, parents, hidden, depth, rows, ancestors)
        padded = torch.cat([self.sees, self.sees.new_zeros(requests, known, width)], dim=2)
        self.sees = torch.cat([padded, ancestors], dim=1)
        self.hidden = torch.cat([self.hidden, out], dim=1)
        expansions = torch.arange(known, known + width, device=parents.device).expand(requests, -1)
        return self.vocabulary.log_softmax(logits), expansions[..., None]

    def token_ids(self, depth: int, places: Tensor) -> Tensor:
        return self.vocabulary.token_ids(places)
