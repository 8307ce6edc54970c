"""The decoding methods by name: which scorer, which frontier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pctree.drafters import DSparkDrafter
from pctree.errors import UsageError
from pctree.scorers import BaseScorer, MarkovScorer, Reshape, SharedMarkovScorer
from pctree.tree import DraftTree, Scorer, grow_tree

FRONTIERS = ("capped", "exact")


@dataclass(frozen=True)
class Method:
    """One row of the table; ``scorer`` gets base logits [R, B, V], hidden states [R, B, H], the drafter, the anchors
    [R], and how the logits are reshaped."""

    name: str
    summary: str
    scorer: Callable[[Tensor, Tensor, DSparkDrafter, Tensor, Reshape | None], Scorer] | None
    chain: bool = False
    always_exact: bool = False
    needs_head: bool = False


def _base(logits: Tensor, hidden: Tensor, drafter: DSparkDrafter, anchors: Tensor, reshape: Reshape | None) -> Scorer:
    return BaseScorer(logits, reshape)


def _markov(logits: Tensor, hidden: Tensor, drafter: DSparkDrafter, anchors: Tensor, reshape: Reshape | None) -> Scorer:
    assert drafter.markov_head is not None
    return MarkovScorer(logits, hidden, drafter.markov_head, reshape)


def _shared(logits: Tensor, hidden: Tensor, drafter: DSparkDrafter, anchors: Tensor, reshape: Reshape | None) -> Scorer:
    assert drafter.markov_head is not None
    return SharedMarkovScorer(logits, hidden, drafter.markov_head, anchors, reshape)


METHODS = {
    method.name: method
    for method in (
        Method("ar", "plain autoregressive decoding, one token a forward", None),
        Method("dspark", "DSpark's greedy chain", _markov, chain=True, needs_head=True),
        Method("shared-markov", "a tree whose layers reuse the greedy chain's distributions", _shared, needs_head=True),
        Method("pctree", "a tree in which every child is scored for its own parent", _markov, needs_head=True),
        Method("dflash", "a chain from base logits alone", _base, chain=True),
        Method("ddtree", "the best tree from base logits alone", _base, always_exact=True),
    )
}


@dataclass(frozen=True)
class DraftSettings:
    """How a drafter is read: method, children per parent and frontier width ``top_k``, ``budget`` nodes, frontier."""

    method: str = "pctree"
    top_k: int = 4
    budget: int = 32
    frontier: str = "capped"

    def validate(self, drafter: DSparkDrafter | None) -> None:
        """Refuse what cannot work, by name.

        Raises:
            UsageError: an unknown method or frontier, a number out of range, a drafter without what the method needs.
        """
        if self.method not in METHODS:
            raise UsageError(f"method is {self.method!r}; the methods are {', '.join(METHODS)}")
        if self.frontier not in FRONTIERS:
            raise UsageError(f"frontier is {self.frontier!r}; it is one of {', '.join(FRONTIERS)}")
        for name in ("top_k", "budget"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.method == "ar":
            return
        if drafter is None:
            raise UsageError(f"method {self.method} needs a drafter; name one, or use method ar")
        vocab_size = drafter.config.backbone.vocab_size
        if self.top_k > vocab_size:
            raise UsageError(f"top_k is {self.top_k}; it must not be above the drafter's vocabulary of {vocab_size}")
        if METHODS[self.method].needs_head and drafter.markov_head is None:
            raise UsageError(f"method {self.method} needs a Markov head, which this drafter lacks; use dflash or ddtree")

    def grow(
        self, drafter: DSparkDrafter, hidden: Tensor, logits: Tensor, anchors: Tensor, reshape: Reshape | None = None
    ) -> DraftTree:
        """The tree that one backbone forward gives under these settings."""
        method = METHODS[self.method]
        assert method.scorer is not None
        return grow_tree(
            method.scorer(logits, hidden, drafter, anchors, reshape),
            anchors,
            top_k=1 if method.chain else self.top_k,
            budget=min(self.budget, drafter.config.draft_length + 1) if method.chain else self.budget,
            exact=not method.chain and (method.always_exact or self.frontier == "exact"),
        )
