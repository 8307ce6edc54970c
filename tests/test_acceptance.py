"""walk against a walk one node at a time."""

from __future__ import annotations

import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from pctree import DraftTree
from pctree.acceptance import walk


def slow_walk(tree: DraftTree, request: int, target_ids: torch.Tensor) -> tuple[list[int], int]:
    """Follow the child that carries the target's token, as long as there is one."""
    path = [0]
    while True:
        wanted = int(target_ids[request, path[-1]])
        children = [n for n in range(1, tree.nodes) if int(tree.parents[request, n]) == path[-1]]
        match = [n for n in children if int(tree.token_ids[request, n]) == wanted]
        if not match:
            return path, wanted
        path += match


# A vocabulary of three makes most trees branch along the accepted path; one of forty rejects most children.
@given(
    requests=st.integers(1, 4), nodes=st.integers(1, 24), vocab=st.sampled_from([3, 5, 40]), seed=st.integers(0, 10**6)
)  # fmt: skip
def test_walk_follows_the_targets_choices(requests, nodes, vocab, seed):
    tree = tiny.random_tree(requests, nodes, vocab, seed)
    target_ids = torch.randint(vocab, (requests, nodes), generator=torch.Generator().manual_seed(seed + 1))
    tokens_before = tree.token_ids.clone()
    path, lengths, bonus = walk(tree, tree.ancestor_mask(nodes), target_ids)
    assert path.shape == (requests, nodes)
    assert lengths.shape == bonus.shape == (requests,)
    for request in range(requests):
        expected, token = slow_walk(tree, request, target_ids)
        assert path[request, : lengths[request]].tolist() == expected
        assert int(bonus[request]) == token
        # The padding behind the path names nodes that exist, so gathering along the whole row is safe.
        assert sorted(path[request].tolist()) == list(range(nodes))
    assert tree.token_ids.equal(tokens_before)


def chain(*token_ids: int) -> DraftTree:
    nodes = torch.arange(len(token_ids))[None]
    return DraftTree(torch.tensor([token_ids]), (nodes - 1).clamp_min(0), nodes, -nodes.float())


def test_root_alone_gives_only_the_bonus_token():
    path, lengths, bonus = walk(chain(7), torch.ones(1, 1, 1, dtype=torch.bool), torch.tensor([[9]]))
    assert (path.tolist(), lengths.tolist(), bonus.tolist()) == ([[0]], [1], [9])


def test_whole_chain_accepted():
    tree = chain(7, 1, 2, 3)
    path, lengths, bonus = walk(tree, tree.ancestor_mask(3), torch.tensor([[1, 2, 3, 8]]))
    assert (path.tolist(), lengths.tolist(), bonus.tolist()) == ([[0, 1, 2, 3]], [4], [8])


def test_a_match_below_a_mismatch_does_not_count():
    tree = chain(7, 1, 2, 3)  # the target wants 5 where 2 was drafted; that 3 then follows 2 means nothing
    path, lengths, bonus = walk(tree, tree.ancestor_mask(3), torch.tensor([[1, 5, 3, 8]]))
    assert (path[0, :2].tolist(), lengths.tolist(), bonus.tolist()) == ([0, 1], [2], [5])


def test_the_roots_own_token_is_never_questioned():
    # The target's choice after the root equals no node; the root's token is not compared with it.
    path, lengths, bonus = walk(chain(7, 1), chain(7, 1).ancestor_mask(1), torch.tensor([[3, 7]]))
    assert (path[0, :1].tolist(), lengths.tolist(), bonus.tolist()) == ([0], [1], [3])
