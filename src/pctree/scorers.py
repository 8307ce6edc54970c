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
from pctree.selection import likeliest, shortlist
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

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and token ids [R, P, k] of the ``count`` likeliest tokens of ``logits`` [R, P, V_draft]."""
        if self.reshape is not None:
            logits = self._reshaped(logits.float(), self.reshape)
        values, places = likeliest(logits, min(count, logits.shape[-1]))
        values = values.float()
        # The log-sum-exp, whose maximum is known already.
        total = (logits - values[..., :1]).exp_().sum(-1, keepdim=True).log_()
        log_probs = values - values[..., :1] - total
        return log_probs, places if self.ids is None else self.ids.take(places)

    def _reshaped(self, logits: Tensor, reshape: Reshape) -> Tensor:
        if self.ids is None:
            return reshape(logits)
        # Penalties and biases speak of target tokens.
        whole = logits.new_full((*logits.shape[:-1], self.size), torch.finfo(logits.dtype).min)
        whole[..., self.ids] = logits
        return reshape(whole)[..., self.ids]


class BaseScorer:
    """Base logits alone: every parent of a depth has the same children (DFlash, DDTree)."""

    def __init__(self, base_logits: Tensor, vocabulary: DraftVocabulary | None = None):
        self.depth = base_logits.shape[1]
        self.base_logits = base_logits
        self.vocabulary = vocabulary or DraftVocabulary(base_logits.shape[-1])

    def initial_state(self) -> Tensor:
        return self.base_logits.new_zeros(len(self.base_logits), 1, 0)

    def logits(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, P or 1, V_draft] of all children, and the states that they inherit."""
        return self.base_logits[:, depth : depth + 1], states

    def propose(self, depth: int, parents: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        logits, states = self.logits(depth, parents, states)
        return *self.vocabulary.likeliest(logits, count), states


class MarkovScorer(BaseScorer):
    """Base logits plus the head's bias for the actual parent (DSpark's chain, PCTree)."""

    def __init__(self, base_logits: Tensor, hidden: Tensor, head: MarkovHead, vocabulary: DraftVocabulary | None = None):
        super().__init__(base_logits, vocabulary)
        self.hidden, self.head = hidden, head

    def initial_state(self) -> Tensor:
        return self.head.initial_state(len(self.base_logits))

    def logits(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        slot = slice(depth, depth + 1)
        latent, states = self.head(parents, self.hidden[:, slot], states)
        return self.base_logits[:, slot] + self.head.bias(latent), states


class ShortlistScorer(MarkovScorer):
    """The same over a shortlist a slot, so that the head reads a few of its rows and not all, once for every layer.

    What is not on the list is not drafted, but keeps its share of the distribution: its base logits stand for it.

    Args:
        candidates: tokens C on the list of a slot, see :func:`shortlist`.
    """

    def __init__(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        head: MarkovHead,
        vocabulary: DraftVocabulary,
        candidates: int,
    ):
        super().__init__(base_logits, hidden, head, vocabulary)
        self.places = shortlist(base_logits, candidates)  # [R, D, C]
        self.short = base_logits.gather(-1, self.places).float()
        self.rows = head.markov_w2.weight[self.places]  # [R, D, C, r]
        whole = base_logits.float().logsumexp(-1, keepdim=True)
        listed = (self.short.logsumexp(-1, keepdim=True) - whole).exp()
        self.rest = whole + torch.log1p(-listed.clamp_max(1 - 1e-6))  # [R, D, 1]

    def propose(self, depth: int, parents: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        slot = slice(depth, depth + 1)
        latent, states = self.head(parents, self.hidden[:, slot], states)
        logits = self.short[:, slot] + (latent @ self.rows[:, depth].transpose(-1, -2)).float()
        values, places = logits.topk(min(count, logits.shape[-1]), dim=-1)
        log_probs = values - torch.logaddexp(logits.logsumexp(-1, keepdim=True), self.rest[:, slot])
        children = self.places[:, slot].expand(*logits.shape).gather(-1, places)
        return log_probs, children if self.vocabulary.ids is None else self.vocabulary.ids.take(children), states


class SharedMarkovScorer:
    """The control: distributions along the greedy chain, reused for every parent of a depth.

    It branches like PCTree but does not condition on the parent, so the difference between the two is what parent
    conditioning brings.
    """

    def __init__(self, chain: MarkovScorer, anchors: Tensor):
        self.depth, self.chain = chain.depth, chain
        self.parent, self.state = anchors[:, None], chain.initial_state()

    def initial_state(self) -> Tensor:
        return self.state[..., :0]

    def propose(self, depth: int, parents: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Layers must be asked for in their order: each takes the chain a step further."""
        log_probs, token_ids, self.state = self.chain.propose(depth, self.parent, self.state, count)
        self.parent = token_ids[..., 0]
        return log_probs, token_ids, states


class EagleScorer(BaseScorer):
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
        super().__init__(logits, vocabulary)
        self.drafter, self.context = drafter, context
        self.depth = drafter.config.draft_length
        self.hidden = hidden  # [R, expansions, H]
        self.sees = torch.zeros(len(hidden), 1, 0, dtype=torch.bool, device=hidden.device)  # [R, expansions, rows]

    def initial_state(self) -> Tensor:
        return torch.zeros(len(self.hidden), 1, 1, dtype=torch.long, device=self.hidden.device)

    def logits(self, depth: int, parents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if depth == 0:
            return self.base_logits, states
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
        return logits, expansions[..., None]
