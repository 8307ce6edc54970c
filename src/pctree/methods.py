"""The decoding methods by name: which scorer, which frontier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pctree.drafters import Drafting
from pctree.economy import MOST_NODES, Economy
from pctree.errors import UsageError
from pctree.scorers import (
    BaseScorer,
    DraftVocabulary,
    EagleScorer,
    MarkovScorer,
    Reshape,
    SharedMarkovScorer,
    ShortlistScorer,
)
from pctree.targets import KVCache
from pctree.tree import DraftTree, Scorer, grow_tree

FRONTIERS = ("capped", "exact")


@dataclass
class Block:
    """What one draft forward gave for R requests, and what it was given."""

    drafter: Any  # AnyDrafter
    context: KVCache
    anchors: Tensor  # [R]
    hidden: Tensor  # [R, D, H]; EAGLE-3: of the root alone, D = 1
    logits: Tensor  # [R, D, V]


@dataclass(frozen=True)
class Method:
    """One row of the table; ``scorer`` reads a block, with so many candidates a slot (0: all) where there is a head."""

    name: str
    summary: str
    scorer: Callable[[Block, DraftVocabulary, int], Scorer] | None
    chain: bool = False
    always_exact: bool = False
    needs_head: bool = False
    autoregressive: bool = False


def _base(block: Block, vocabulary: DraftVocabulary, candidates: int) -> Scorer:
    return BaseScorer(block.logits, vocabulary)


def _markov(block: Block, vocabulary: DraftVocabulary, candidates: int) -> MarkovScorer:
    head = block.drafter.markov_head
    # Where a request reshapes the logits, a token may become likely that no list by base logits holds.
    if candidates and vocabulary.reshape is None:
        return ShortlistScorer(block.logits, block.hidden, head, vocabulary, candidates)
    return MarkovScorer(block.logits, block.hidden, head, vocabulary)


def _shared(block: Block, vocabulary: DraftVocabulary, candidates: int) -> Scorer:
    return SharedMarkovScorer(_markov(block, vocabulary, candidates), block.anchors)


def _eagle(block: Block, vocabulary: DraftVocabulary, candidates: int) -> Scorer:
    return EagleScorer(block.drafter, block.context, block.hidden, block.logits, vocabulary)


METHODS = {
    method.name: method
    for method in (
        Method("ar", "plain autoregressive decoding, one token a forward", None),
        Method("dspark", "DSpark's greedy chain", _markov, chain=True, needs_head=True),
        Method("shared-markov", "a tree whose layers reuse the greedy chain's distributions", _shared, needs_head=True),
        Method("pctree", "a tree in which every child is scored for its own parent", _markov, needs_head=True),
        Method("dflash", "a chain from base logits alone", _base, chain=True),
        Method("ddtree", "the best tree from base logits alone", _base, always_exact=True),
        Method("eagle3", "a tree with one draft forward a layer (a chain with top_k 1)", _eagle, autoregressive=True),
    )
}


@dataclass(frozen=True)
class DraftSettings:
    """How a drafter is read: method, children per parent and frontier width ``top_k``, ``budget`` nodes, frontier.

    ``budget="auto"`` verifies, round by round, as many nodes as pay for their rows; see :mod:`pctree.economy`.

    ``candidates`` is how many tokens of a slot, the likeliest by base logits, the Markov head looks at; 0 is the whole
    vocabulary. The text is the target's whatever is on the list.

    ``confidence_threshold`` (DSpark's static scheduling) verifies only the positions of the chain before the first one of
    which the confidence head thinks less; 0 verifies all. ``record_confidence`` keeps what it thinks in the rounds' trees.
    """

    method: str = "pctree"
    top_k: int = 4
    budget: int | str = 32
    frontier: str = "capped"
    candidates: int = 0
    confidence_threshold: float = 0.0
    record_confidence: bool = False

    def validate(self, drafter: Drafting | None) -> None:
        """Refuse what cannot work, by name.

        Raises:
            UsageError: an unknown method or frontier, a number out of range, a drafter without what the method needs.
        """
        if self.method not in METHODS:
            raise UsageError(f"method is {self.method!r}; the methods are {', '.join(METHODS)}")
        if self.frontier not in FRONTIERS:
            raise UsageError(f"frontier is {self.frontier!r}; it is one of {', '.join(FRONTIERS)}")
        if isinstance(self.budget, str) and self.budget != "auto":
            raise UsageError(f"budget is {self.budget!r}; it is a number of nodes, or auto")
        for name, value in (("top_k", self.top_k), ("budget", self.most_nodes)):
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")
        if self.candidates < 0:
            raise UsageError(f"candidates is {self.candidates}; it must be at least 1, or 0 for the whole vocabulary")
        if not 0 <= self.confidence_threshold <= 1:
            raise UsageError(f"confidence_threshold is {self.confidence_threshold}; it must be between 0 and 1")
        if self.reads_confidence and not METHODS[self.method].chain:
            raise UsageError(f"confidence_threshold cuts a chain, which {self.method} does not draft; use dspark, or drop it")
        if self.method == "ar":
            return
        if drafter is None:
            raise UsageError(f"method {self.method} needs a drafter; name one, or use method ar")
        vocab_size = drafter.config.draft_vocab_size or drafter.config.backbone.vocab_size
        if self.top_k > vocab_size:
            raise UsageError(f"top_k is {self.top_k}; it must not be above the drafter's vocabulary of {vocab_size}")
        method = METHODS[self.method]
        if method.autoregressive != drafter.config.autoregressive:
            kind = drafter.config.method
            raise UsageError(f"method {self.method} cannot read this drafter, which is made for {kind}; use method {kind}")
        if method.needs_head and not drafter.config.markov_rank:
            raise UsageError(f"method {self.method} needs a Markov head, which this drafter lacks; use dflash or ddtree")
        if self.reads_confidence and not drafter.config.enable_confidence_head:
            raise UsageError("confidence_threshold needs a confidence head, which this drafter lacks; drop it")

    @property
    def most_nodes(self) -> int:
        """The most nodes of a tree, root included."""
        return MOST_NODES if isinstance(self.budget, str) else self.budget

    @property
    def reads_confidence(self) -> bool:
        return self.confidence_threshold > 0 or self.record_confidence

    def grow(self, block: Block, reshape: Reshape | None = None, floor: float | None = None) -> DraftTree:
        """The tree that one draft forward gives under these settings, with the most nodes that they allow; ``reshape``
        reshapes the drafter's logits, and ``floor`` ends growth, see :func:`pctree.tree.grow_tree`.
        """
        method, vocab_size = METHODS[self.method], block.drafter.config.backbone.vocab_size
        assert method.scorer is not None
        tree = grow_tree(
            method.scorer(block, DraftVocabulary(vocab_size, block.drafter.draft_ids, reshape), self.candidates),
            block.anchors,
            top_k=1 if method.chain else self.top_k,
            budget=min(self.most_nodes, block.drafter.config.draft_length + 1) if method.chain else self.most_nodes,
            exact=not method.chain and (method.always_exact or self.frontier == "exact"),
            floor=floor,
        )
        if self.reads_confidence:
            tree.confidence = confidence(block, tree)
        return tree

    def trim(self, tree: DraftTree, economy: Economy | None = None) -> DraftTree:
        """What of a grown tree is verified: all, unless a confidence threshold cuts it, or an automatic budget, for which
        ``economy`` says what it buys. These wait for the host, to know how many nodes stay.
        """
        if self.confidence_threshold:
            assert tree.confidence is not None
            tree = tree.cut((tree.confidence >= self.confidence_threshold).cumprod(1).bool())
        return tree if economy is None or self.budget != "auto" else economy.trim(tree)


def confidence(block: Block, tree: DraftTree) -> Tensor:
    """What the confidence head thinks of each node [R, N], given that its parent is right; 1 for the root."""
    drafter, depths = block.drafter, tree.depths
    hidden = block.hidden.gather(1, (depths - 1).clamp_min(0)[..., None].expand(-1, -1, block.hidden.shape[-1]))
    head = drafter.confidence_head
    embedded = drafter.markov_head.markov_w1(tree.token_ids.gather(1, tree.parents)) if head.with_markov else None
    return head(hidden, embedded).float().masked_fill(depths == 0, 1.0)
