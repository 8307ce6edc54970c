"""grow_tree against a slow obvious oracle, on scorers whose probabilities depend on the whole path."""

from __future__ import annotations

import math
from itertools import product

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pctree.acceptance import walk
from pctree.drafters.heads import MARKOV_HEADS
from pctree.methods import METHODS
from pctree.scorers import BaseScorer, MarkovScorer, SharedMarkovScorer
from pctree.tree import DraftTree, grow_tree


class PathScorer:
    """Log-probabilities from a table with one row for every path: a state that goes astray shows at once.

    A state is the path's number, read as digits of base V; the oracle reads the same table. In float64, where sums of
    random numbers have no ties.
    """

    def __init__(self, requests: int, vocab: int, depth: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.depth, self.vocab, self.requests = depth, vocab, requests
        self.tables = [
            (2 * torch.randn(requests, vocab**d, vocab, generator=generator, dtype=torch.float64)).log_softmax(-1)
            for d in range(depth)
        ]

    def alone(self, request: int) -> PathScorer:
        one = object.__new__(PathScorer)
        one.depth, one.vocab, one.requests = self.depth, self.vocab, 1
        one.tables = [table[request : request + 1] for table in self.tables]
        return one

    def initial_state(self) -> Tensor:
        return torch.zeros(self.requests, 1, 1, dtype=torch.long)

    def propose(self, depth: int, parents: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        path = states[..., 0] * self.vocab + parents if depth else torch.zeros_like(parents)
        rows = self.tables[depth].gather(1, path[..., None].expand(-1, -1, self.vocab))
        return *rows.topk(min(count, self.vocab), dim=-1), path[..., None]

    def log_probs(self, request: int, path: tuple[int, ...]) -> list[float]:
        number = 0
        for token in path:
            number = number * self.vocab + token
        return self.tables[len(path)][request, number].tolist()


class ConstantScorer:
    """The same log-probabilities [V] for every parent of every depth."""

    def __init__(self, log_probs: list[float], depth: int, requests: int = 1):
        self.depth = depth
        self.row = torch.tensor(log_probs).expand(requests, 1, -1)

    def initial_state(self) -> Tensor:
        return torch.zeros(len(self.row), 1, 0)

    def propose(self, depth: int, parents: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return *self.row.topk(min(count, self.row.shape[-1]), dim=-1), states


def capped_oracle(scorer: PathScorer, request: int, top_k: int, budget: int) -> dict[tuple[int, ...], float]:
    """The paper's rule in words: k children a parent, the k best of a layer are its frontier, the N best of all stay."""
    nodes, frontier = {(): 0.0}, {(): 0.0}
    for _ in range(scorer.depth):
        layer = {}
        for path, score in frontier.items():
            children = sorted(enumerate(scorer.log_probs(request, path)), key=lambda child: -child[1])[:top_k]
            layer |= {(*path, token): score + log_prob for token, log_prob in children}
        nodes |= layer
        frontier = largest(layer, top_k)
    return largest(nodes, budget)


def exact_oracle(scorer: PathScorer, request: int, budget: int) -> dict[tuple[int, ...], float]:
    """Every path there is; the N likeliest."""
    nodes = {(): 0.0}
    for depth in range(scorer.depth):
        for path in product(range(scorer.vocab), repeat=depth):
            nodes |= {(*path, token): nodes[path] + value for token, value in enumerate(scorer.log_probs(request, path))}
    return largest(nodes, budget)


def largest(nodes: dict[tuple[int, ...], float], count: int) -> dict[tuple[int, ...], float]:
    return dict(sorted(nodes.items(), key=lambda node: -node[1])[:count])


def read(tree: DraftTree, request: int) -> dict[tuple[int, ...], float]:
    """Paths (without the root) and scores of a tree, in its order."""
    scores = tree.log_probs[request].tolist()
    return {tuple(tiny.root_path_tokens(tree, request, node)[1:]): scores[node] for node in range(tree.nodes)}


def check_tree(tree: DraftTree, anchors: Tensor, budget: int) -> None:
    """The contract of DESIGN, section 5."""
    assert tree.nodes <= budget
    assert tree.token_ids[:, 0].equal(anchors)
    assert tree.log_probs.isfinite().all()
    assert (tree.log_probs.diff(dim=1) <= 0).all()  # ordered by path log-probability
    for parents, depths, tokens in zip(tree.parents.tolist(), tree.depths.tolist(), tree.token_ids.tolist(), strict=True):
        assert parents[0] == depths[0] == 0
        assert all(parents[node] < node for node in range(1, tree.nodes))  # so it is prefix-closed too
        assert all(depths[node] == depths[parents[node]] + 1 for node in range(1, tree.nodes))
        children = list(zip(parents[1:], tokens[1:], strict=True))
        assert len(set(children)) == len(children)


scorers = st.builds(
    PathScorer, requests=st.integers(1, 3), vocab=st.integers(2, 5), depth=st.integers(1, 4), seed=st.integers(0, 10**6)
)


def layers_asked(scorer: PathScorer) -> list[int]:
    """The depths that the scorer is asked for from now on."""
    asked: list[int] = []
    propose = scorer.propose
    scorer.propose = lambda depth, *args: asked.append(depth) or propose(depth, *args)
    return asked


@settings(max_examples=300)
@given(scorer=scorers, top_k=st.integers(1, 7), budget=st.integers(1, 40), exact=st.booleans())
def test_a_host_that_looks_on_leaves_the_tree_as_it_is(scorer, top_k, budget, exact):
    asked = layers_asked(scorer)
    anchors = torch.arange(scorer.requests) % scorer.vocab
    whole = grow_tree(scorer, anchors, top_k=top_k, budget=budget, exact=exact)
    layers = len(asked)
    stopped = grow_tree(scorer, anchors, top_k=top_k, budget=budget, exact=exact, floor=-math.inf)
    assert len(asked) - layers <= layers
    for mine, theirs in zip(vars(stopped).values(), vars(whole).values(), strict=True):
        assert mine is theirs is None or mine.equal(theirs)


def test_growth_ends_when_no_child_can_be_among_the_best():
    scorer = PathScorer(requests=1, vocab=5, depth=4, seed=0)
    asked = layers_asked(scorer)
    grow_tree(scorer, torch.tensor([0]), top_k=5, budget=3, floor=-math.inf)
    assert len(asked) < 4


@settings(max_examples=300)
@given(scorer=scorers, top_k=st.integers(1, 7), budget=st.integers(1, 40))
def test_capped_frontier_is_the_papers_rule(scorer, top_k, budget):
    anchors = torch.arange(scorer.requests) % scorer.vocab
    tree = grow_tree(scorer, anchors, top_k=top_k, budget=budget)
    check_tree(tree, anchors, budget)
    for request in range(scorer.requests):
        expected = capped_oracle(scorer, request, top_k, budget)
        assert list(read(tree, request).items()) == list(expected.items())


@settings(max_examples=300)
@given(scorer=scorers, top_k=st.integers(1, 7), budget=st.integers(1, 40))
def test_exact_frontier_is_the_best_tree_there_is(scorer, top_k, budget):
    anchors = torch.arange(scorer.requests) % scorer.vocab
    tree = grow_tree(scorer, anchors, top_k=top_k, budget=budget, exact=True)
    check_tree(tree, anchors, budget)
    for request in range(scorer.requests):
        expected = exact_oracle(scorer, request, budget)
        assert list(read(tree, request).items()) == list(expected.items())


@given(scorer=scorers, top_k=st.integers(1, 5), budget=st.integers(1, 40), exact=st.booleans())
def test_requests_do_not_touch_each_other(scorer, top_k, budget, exact):
    anchors = torch.arange(scorer.requests) % scorer.vocab
    together = grow_tree(scorer, anchors, top_k=top_k, budget=budget, exact=exact)
    for request in range(scorer.requests):
        options = {"top_k": top_k, "budget": budget, "exact": exact}
        alone = grow_tree(scorer.alone(request), anchors[request : request + 1], **options)
        for name in ("token_ids", "parents", "depths", "log_probs"):
            assert getattr(together, name)[request].equal(getattr(alone, name)[0]), name


LOG_PROBS = {
    "all equal": [-1.3862943] * 4,
    "one certain": [0.0, -torch.inf, -torch.inf, -torch.inf],
    "all certain": [0.0] * 4,  # no distribution, but the hardest tie: children score what their parents do
    "two halves": [-0.6931472, -torch.inf, -0.6931472, -torch.inf],
    "all impossible": [-torch.inf] * 4,
    "above one by rounding": [1e-6, -15.0, -16.0, -17.0],
}


@pytest.mark.parametrize("log_probs", LOG_PROBS.values(), ids=LOG_PROBS.keys())
@pytest.mark.parametrize("exact", [False, True], ids=["capped", "exact"])
@pytest.mark.parametrize(("depth", "budget"), [(1, 3), (4, 2), (4, 9), (4, 30), (16, 64)])
def test_ties_keep_parents(log_probs, exact, depth, budget):
    anchors = torch.tensor([3, 1])
    tree = grow_tree(ConstantScorer(log_probs, depth, requests=2), anchors, top_k=3, budget=budget, exact=exact)
    check_tree(tree, anchors, budget)


@pytest.mark.parametrize("exact", [False, True], ids=["capped", "exact"])
def test_budget_of_one_is_the_root(exact):
    tree = grow_tree(PathScorer(2, vocab=4, depth=3, seed=0), torch.tensor([2, 3]), top_k=4, budget=1, exact=exact)
    assert tree.token_ids.tolist() == [[2], [3]]
    assert tree.parents.tolist() == tree.depths.tolist() == [[0], [0]]


def test_budget_above_all_candidates_keeps_every_one_once():
    scorer = PathScorer(1, vocab=3, depth=3, seed=1)
    assert grow_tree(scorer, torch.tensor([0]), budget=1000, exact=True).nodes == 1 + 3 + 9 + 27
    # k = 2: two children of the root, then two parents with two children each at both other depths.
    assert grow_tree(scorer, torch.tensor([0]), top_k=2, budget=1000).nodes == 1 + 2 + 4 + 4


def test_depth_of_one_proposes_the_likeliest_children():
    scorer = PathScorer(1, vocab=5, depth=1, seed=2)
    tree = grow_tree(scorer, torch.tensor([0]), top_k=3, budget=32)
    assert tree.token_ids[0, 1:].tolist() == scorer.tables[0][0, 0].topk(3).indices.tolist()
    assert tree.depths.tolist() == [[0, 1, 1, 1]]


def test_k_of_one_is_a_chain():
    tree = grow_tree(PathScorer(2, vocab=5, depth=4, seed=3), torch.tensor([0, 1]), top_k=1, budget=5)
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3, 4]] * 2


@given(requests=st.integers(1, 3), nodes=st.integers(1, 24), seed=st.integers(0, 10**6), slack=st.integers(0, 3))
def test_ancestor_mask_is_the_walk_to_the_root(requests, nodes, seed, slack):
    tree = tiny.random_tree(requests, nodes, vocab=30, seed=seed)
    mask = tree.ancestor_mask(int(tree.depths.max()) + slack)
    for request in range(requests):
        for node in range(nodes):
            assert mask[request, node].nonzero().flatten().tolist() == sorted(tiny.root_path(tree, request, node))


class Forbidden(TorchDispatchMode):
    """Fails on every operation that makes the host wait for a tensor's value."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(self.WAITING), f"{name} waits on the host"
        return func(*args, **(kwargs or {}))


def real_scorers(device: str):
    """Every scorer of the table, with every head, on random numbers."""
    generator = torch.Generator().manual_seed(0)
    logits, hidden = torch.randn(2, 5, 12, generator=generator).to(device), torch.randn(2, 5, 8, generator=generator).to(device)
    anchors = torch.tensor([1, 2]).to(device)
    yield "base", lambda: BaseScorer(logits), anchors
    for kind, head_class in MARKOV_HEADS.items():
        head = head_class(12, 4, 8).to(device).requires_grad_(False)
        yield kind, lambda head=head: MarkovScorer(logits, hidden, head), anchors
        yield f"shared {kind}", lambda head=head: SharedMarkovScorer(MarkovScorer(logits, hidden, head), anchors), anchors


def test_the_mode_that_forbids_waiting_catches_it():
    ones = torch.ones(2)
    for waiting in (lambda: ones[0].item(), lambda: bool(ones.any()), lambda: ones.nonzero()):
        with pytest.raises(AssertionError, match="waits on the host"), Forbidden():
            waiting()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("exact", [False, True], ids=["capped", "exact"])
def test_drafting_and_walking_never_wait_on_the_host(device, exact):
    # On "meta" tensors have no values at all, so whatever asked for one would fail; what runs has fixed shapes.
    for _, scorer, anchors in real_scorers(device):
        with Forbidden():
            tree = grow_tree(scorer(), anchors, top_k=3, budget=16, exact=exact)
            mask = tree.ancestor_mask(5)
            walk(tree, mask, tree.token_ids.flip(1))
        assert tree.nodes == 16


def test_every_method_has_a_scorer_but_plain_decoding():
    assert [name for name, method in METHODS.items() if method.scorer is None] == ["ar"]
