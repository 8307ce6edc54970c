"""EAGLE-3 through the same tree builder: each node is scored on its own path, and the output stays the target's."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from pctree import DraftSettings, SamplingParams, SpeculativeDecoder, TargetModel, UsageError
from pctree.scorers import EagleScorer
from pctree.tree import grow_tree


def reader(model, draft, **options) -> SpeculativeDecoder:
    target = TargetModel(model, draft.config.target_layer_ids)
    return SpeculativeDecoder(target, draft, settings=DraftSettings("eagle3", **options))


@pytest.mark.parametrize("exact", [False, True])
def test_every_node_is_scored_on_its_own_path(exact):
    """Two requests of different lengths; a node's probability equals that of walking to it alone, one token at a time."""
    model = tiny.target(seed=1)
    draft = tiny.eagle(model)
    prompts, anchors = [tiny.prompt(1, 9), tiny.prompt(2, 5)], torch.tensor([7, 11])
    target = TargetModel(model, draft.config.target_layer_ids)

    def context_of(rows: list[int]):
        cache = draft.new_cache(len(rows), 40, 16)
        for place, row in enumerate(rows):
            _, features = target.prefill(target.new_cache(1, 40), torch.tensor([prompts[row]]))
            following = torch.tensor([[*prompts[row][1:], int(anchors[row])]])
            draft.extend(cache.narrow(place, 1), features, following)
        return cache

    cache = context_of([0, 1])
    tree = grow_tree(EagleScorer(draft, cache, *draft.draft_block(cache, anchors)), anchors, top_k=3, budget=16, exact=exact)
    for row in range(2):
        for node in range(1, 16):
            tokens = tiny.root_path_tokens(tree, row, node)
            alone = context_of([row])
            scorer = EagleScorer(draft, alone, *draft.draft_block(alone, anchors[row : row + 1]))
            state, total = scorer.initial_state(), 0.0
            for depth, (parent, child) in enumerate(itertools.pairwise(tokens)):
                logits, state = scorer.logits(depth, torch.tensor([[parent]]), state)
                total += float(logits[0, 0].log_softmax(-1)[child])
            assert float(tree.log_probs[row, node]) == pytest.approx(total, abs=1e-4)


@tiny.examples(20)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["qwen3", "llama"]),
    length=st.integers(1, 8),
    top_k=st.integers(1, 6),
    budget=st.integers(1, 40),
    frontier=st.sampled_from(["capped", "exact"]),
    count=st.integers(1, 30),
)
def test_tokens_are_the_targets(seed, kind, length, top_k, budget, frontier, count):
    model = tiny.target(kind, seed=seed % 9)
    prompt = tiny.prompt(seed, 1 + seed % 12)
    expected, _ = tiny.plain(model, prompt, count)
    decoder = reader(model, tiny.eagle(model, seed=seed % 4, length=length), top_k=top_k, budget=budget, frontier=frontier)
    assert decoder.generate(prompt, max_new_tokens=count).token_ids == expected


def test_batches_equal_one_at_a_time():
    model = tiny.target(seed=6)
    decoder = reader(model, tiny.eagle(model), budget=12)
    prompts = [tiny.prompt(i, 3 + 2 * i) for i in range(6)]
    params = [SamplingParams(max_new_tokens=4 + 3 * i) for i in range(6)]
    together = decoder.generate(prompts, params, max_batch_size=4)
    for prompt, param, result in zip(prompts, params, together, strict=True):
        alone = decoder.generate(prompt, param)
        assert result.token_ids == alone.token_ids
        assert result.stats.acceptance_lengths == alone.stats.acceptance_lengths


def test_methods_and_drafters_must_fit():
    model = tiny.target()
    draft = tiny.eagle(model)
    with pytest.raises(UsageError, match="made for eagle3; use method eagle3"):
        SpeculativeDecoder(TargetModel(model, [0, 1]), draft, settings=DraftSettings("pctree"))
    with pytest.raises(UsageError, match="made for dspark; use method dspark"):
        tiny.decoder(model, tiny.drafter(model), "eagle3")
