"""The table of methods: what each says a child's probability is, recomputed path by path from the head's formulas."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tiny
import torch
from torch import Tensor

from pctree import grow_tree
from pctree.drafters.heads import MARKOV_HEADS, ConfidenceHead
from pctree.scorers import (
    BaseScorer,
    DraftVocabulary,
    MarkovScorer,
    SharedMarkovScorer,
    ShortlistScorer,
)
from pctree.selection import argmax, likeliest, shortlist

VOCAB, RANK, WIDTH, BLOCK = 11, 4, 6, 5


def slow_step(head, previous: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bias [V] and next state [r] of one parent, as DESIGN, section 6, writes them."""
    embedded, w2 = head.markov_w1.weight[previous], head.markov_w2.weight
    if head.kind == "vanilla":
        return w2 @ embedded, state
    if head.kind == "gated":
        gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([hidden, embedded]) + head.gate_proj.bias)
        return w2 @ (gate * embedded), state
    joint = head.joint_proj.weight @ torch.cat([state, embedded, hidden]) + head.joint_proj.bias
    g, c, o = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
    return w2 @ o.tanh(), torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * c.tanh()


@pytest.fixture
def block() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits, hidden = torch.randn(2, BLOCK, VOCAB, generator=generator), torch.randn(2, BLOCK, WIDTH, generator=generator)
    return logits, hidden, torch.tensor([4, 7])


def random_head(kind: str):
    head = MARKOV_HEADS[kind](VOCAB, RANK, WIDTH).requires_grad_(False)
    generator = torch.Generator().manual_seed(6)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


@pytest.mark.parametrize("kind", tiny.HEADS)
@pytest.mark.parametrize("exact", [False, True], ids=["capped", "exact"])
def test_every_path_is_scored_with_its_own_parents(kind, exact, block):
    logits, hidden, anchors = block
    head = random_head(kind)
    tree = grow_tree(MarkovScorer(logits, hidden, head), anchors, top_k=4, budget=32, exact=exact)
    for request in range(2):
        for node in range(tree.nodes):
            path = tiny.root_path_tokens(tree, request, node)
            state, total = torch.zeros(RANK), 0.0
            for depth, (parent, child) in enumerate(pairwise(path)):
                bias, state = slow_step(head, parent, hidden[request, depth], state)
                total += float((logits[request, depth] + bias).log_softmax(-1)[child])
            assert float(tree.log_probs[request, node]) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("kind", tiny.HEADS)
def test_shared_markov_reuses_the_greedy_chain(kind, block):
    logits, hidden, anchors = block
    head = random_head(kind)
    tree = grow_tree(SharedMarkovScorer(MarkovScorer(logits, hidden, head), anchors), anchors, top_k=4, budget=32)
    for request in range(2):
        layers, state, previous = [], torch.zeros(RANK), int(anchors[request])
        for depth in range(BLOCK):
            bias, state = slow_step(head, previous, hidden[request, depth], state)
            layers.append((logits[request, depth] + bias).log_softmax(-1))
            previous = int(layers[-1].argmax())
        for node in range(tree.nodes):
            path = tiny.root_path_tokens(tree, request, node)[1:]
            total = sum(float(layers[depth][token]) for depth, token in enumerate(path))
            assert float(tree.log_probs[request, node]) == pytest.approx(total, abs=1e-4)


def test_base_logits_alone_ignore_the_parent(block):
    logits, _, anchors = block
    tree = grow_tree(BaseScorer(logits), anchors, budget=32, exact=True)
    log_probs = logits.log_softmax(-1)
    for request in range(2):
        for node in range(tree.nodes):
            path = tiny.root_path_tokens(tree, request, node)[1:]
            total = sum(float(log_probs[request, depth, token]) for depth, token in enumerate(path))
            assert float(tree.log_probs[request, node]) == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("rank", [0, RANK])
def test_confidence_head_is_a_sigmoid_of_hidden_and_previous_token(rank):
    head = ConfidenceHead(WIDTH, rank).requires_grad_(False)
    hidden, embedded = torch.randn(2, 3, WIDTH), torch.randn(2, 3, RANK) if rank else None
    read = torch.cat([hidden, embedded], -1) if embedded is not None else hidden
    expected = torch.sigmoid(read @ head.proj.weight[0] + head.proj.bias)
    assert torch.allclose(head(hidden, embedded), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "count"), [(4096, 4), (4096, 1), (6400, 31), (2080, 8), (1001, 5), (40, 40)])
def test_the_likeliest_tokens_are_those_of_a_whole_sort(size, count, dtype):
    """In chunks or not; equal logits, which bfloat16 has many of, may come in any order."""
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    values, places = likeliest(logits, count)
    assert values.equal(logits.sort(dim=-1, descending=True).values[..., :count])
    assert logits.gather(-1, places).equal(values)
    assert all(len(set(row)) == count for row in places.flatten(0, 1).tolist())


def test_log_probabilities_are_normalised_over_the_whole_vocabulary():
    logits = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(1))
    log_probs, ids = DraftVocabulary(4096).likeliest(logits, 6)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(-1, ids))


@pytest.mark.parametrize("kind", tiny.HEADS)
def test_a_shortlist_of_all_tokens_grows_the_same_tree(kind, block):
    logits, hidden, anchors = block
    head = random_head(kind)
    whole = grow_tree(MarkovScorer(logits, hidden, head), anchors, top_k=4, budget=32)
    listed = grow_tree(ShortlistScorer(logits, hidden, head, DraftVocabulary(VOCAB), VOCAB), anchors, top_k=4, budget=32)
    assert listed.token_ids.equal(whole.token_ids)
    torch.testing.assert_close(listed.log_probs, whole.log_probs, atol=1e-4, rtol=1e-4)


def test_tokens_off_the_list_keep_their_share(block):
    """Four of eleven tokens are listed; the others count with their base logits, as the docstring says."""
    logits, hidden, anchors = block
    head = random_head("vanilla")
    scorer = ShortlistScorer(logits, hidden, head, DraftVocabulary(VOCAB), 4)
    log_probs, ids, _ = scorer.propose(2, anchors[:, None], scorer.initial_state(), 3)
    for request in range(2):
        listed = logits[request, 2].topk(4).indices
        bias, _ = slow_step(head, int(anchors[request]), hidden[request, 2], torch.zeros(RANK))
        mixed = logits[request, 2].clone()
        mixed[listed] += bias[listed]
        expected = mixed.log_softmax(-1)[listed].sort(descending=True)
        torch.testing.assert_close(log_probs[request, 0], expected.values[:3], atol=1e-4, rtol=1e-4)
        assert ids[request, 0].tolist() == listed[expected.indices[:3]].tolist()


def test_the_shortlist_of_a_large_vocabulary_holds_likely_neighbours():
    """Common tokens are neighbours in a vocabulary, so those that stand for others must be far apart."""
    logits = torch.randn(2, 3, 64 * 60, generator=torch.Generator().manual_seed(3))
    logits[..., 5:15] += 10.0
    places = shortlist(logits, 20)
    assert places[..., :10].equal(logits.topk(10).indices)
    best = logits.unflatten(-1, (64, 60)).amax(-2).topk(20)
    assert (places % 60).equal(best.indices)
    assert logits.gather(-1, places).equal(best.values)
    more = shortlist(logits, 40)  # smaller groups, so that there are enough of them
    assert logits.gather(-1, more).equal(logits.unflatten(-1, (32, 120)).amax(-2).topk(40).values)
    assert shortlist(logits, 100).equal(logits.topk(100).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4096, 1001, 40])
def test_argmax_is_the_first_of_equals(size, dtype):
    """As torch's own, which plain decoding uses: in bfloat16 ties are common."""
    logits = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    logits[0, :, 7], logits[0, :, 30] = 9.0, 9.0
    logits[1, :, -1] = 9.0
    assert argmax(logits).equal(logits.argmax(-1))
    assert argmax(torch.zeros(2, size)).tolist() == [0, 0]
