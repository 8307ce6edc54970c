"""The cheap sequential part of a DSpark drafter: Markov heads and the confidence head.

A Markov head turns the previous token (the parent, in a tree) into a low-rank bias on the base logits of one slot:
``bias = w2 · latent``. The three kinds differ only in the latent, so that is all a subclass defines. Shapes: R requests,
P parents, H hidden size, r rank, V vocabulary. Module names follow DeepSpec's checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Vanilla head: ``latent = w1[prev]``."""

    kind = "vanilla"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None):
        """``vocab_size`` tokens can stand before, ``draft_vocab_size`` (the same, if None) can follow."""
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)

    def initial_state(self, requests: int) -> Tensor:
        """State [R, 1, s] of the root; empty (s = 0) for heads without memory."""
        return self.markov_w1.weight.new_zeros(requests, 1, 0)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step for P parents at the same depth.

        Args:
            previous: token ids [R, P] of the parents.
            hidden: backbone output [R, 1 or P, H] of the slot.
            state: [R, P, s] of the parents.
        Returns:
            Latent [R, P, r], whose bias is :meth:`bias`, and the state [R, P, s] that every child inherits.
        """
        return self.markov_w1(previous), state

    def bias(self, latent: Tensor) -> Tensor:
        """Logit bias [..., V] of latents [..., r]."""
        return self.markov_w2(latent)


class GatedMarkovHead(MarkovHead):
    """Gated head: ``latent = sigmoid(gate([h; w1[prev]])) ⊙ w1[prev]``."""

    kind = "gated"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None):
        super().__init__(vocab_size, rank, hidden_size, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(previous)
        hidden = hidden.expand(*embedded.shape[:-1], -1)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return gate * embedded, state


class RecurrentMarkovHead(MarkovHead):
    """Recurrent head: ``[g, c, o] = joint([s; w1[prev]; h])``, ``s' = σ(g)⊙s + (1-σ(g))⊙tanh(c)``, ``latent = tanh(o)``."""

    kind = "rnn"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None):
        super().__init__(vocab_size, rank, hidden_size, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, requests: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(requests, 1, self.rank)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(previous)
        hidden = hidden.expand(*embedded.shape[:-1], -1)
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


MARKOV_HEADS = {head.kind: head for head in (MarkovHead, GatedMarkovHead, RecurrentMarkovHead)}


class ConfidenceHead(nn.Module):
    """The chance [R, P] that a drafted position survives verification, given that its parents did."""

    def __init__(self, hidden_size: int, markov_rank: int):
        super().__init__()
        self.with_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def logits(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """``hidden`` [R, P, H] of the slots, ``embedded`` [R, P, r] = w1[prev] (None for a head that does not read it)."""
        if self.with_markov:
            assert embedded is not None
            hidden = torch.cat([hidden, embedded], dim=-1)
        return self.proj(hidden)[..., 0]

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        return torch.sigmoid(self.logits(hidden, embedded))
