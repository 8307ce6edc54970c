"""Parity on every device there is: the tokens of plain decoding, and of the CPU. Without a GPU only the CPU's half runs."""

from __future__ import annotations

import pytest
import tiny
import torch

from pctree import METHODS, DraftSettings, SamplingParams, SpeculativeDecoder, TargetModel
from pctree.economy import Economy
from pctree.scorers import DraftVocabulary, MarkovScorer
from pctree.selection import argmax, likeliest, shortlist
from pctree.tree import grow_tree

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")),
]
READINGS = {name: {"method": name} for name in METHODS if name != "eagle3"} | {
    "exact": {"frontier": "exact", "budget": 20},
    "candidates": {"candidates": 12},
    "auto": {"budget": "auto"},
}


def decoder(device: str, head: str, **settings) -> SpeculativeDecoder:
    model = tiny.target(seed=3)
    draft = tiny.drafter(model, head, seed=2)
    draft.future, draft.boost = tiny.prompt(1, 8) + tiny.plain(model, tiny.prompt(1, 8), 60)[0], 2.5
    model.to(device)
    draft.to(device)
    draft.rotary = draft.rotary.to(device)
    draft.share(model.get_input_embeddings(), model.get_output_embeddings())
    target = TargetModel(model, draft.config.target_layer_ids)
    return SpeculativeDecoder(target, draft, settings=DraftSettings(**settings), economy=Economy({1: 4.0, 64: 30.0}, 3.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", tiny.HEADS)
@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_gives_the_tokens_of_plain_decoding(device, head, reading):
    expected, _ = tiny.plain(tiny.target(seed=3), tiny.prompt(1, 8), 40)
    reader = decoder(device, head, **READINGS[reading])
    alone = reader.generate(tiny.prompt(1, 8), max_new_tokens=40)
    assert alone.token_ids == expected
    together = reader.generate([tiny.prompt(1, 8), tiny.prompt(2, 5), tiny.prompt(3, 11)], max_new_tokens=40)
    assert together[0].token_ids == expected


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_and_processors_give_the_same_text_on_every_device(device):
    options = {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.3, "seed": 5, "max_new_tokens": 20}
    texts = [decoder(where, "vanilla", budget=12).generate(tiny.prompt(1, 8), SamplingParams(**options)) for where in
             ("cpu", device)]  # fmt: skip
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize("device", DEVICES)
def test_trees_and_selections_are_those_of_the_cpu(device):
    generator = torch.Generator().manual_seed(0)
    logits, hidden = torch.randn(2, 5, 4096, generator=generator), torch.randn(2, 5, 8, generator=generator)
    draft = tiny.drafter(tiny.target(vocab=4096), "vanilla").markov_head
    anchors = torch.tensor([1, 2])
    trees = []
    for where in ("cpu", device):
        head = draft.to(where)
        scorer = MarkovScorer(logits.to(where), hidden.to(where), head, DraftVocabulary(4096))
        trees.append(grow_tree(scorer, anchors.to(where), top_k=4, budget=24))
    assert trees[0].token_ids.equal(trees[1].token_ids.cpu())
    assert trees[0].ancestor_mask(5).equal(trees[1].ancestor_mask(5).cpu())
    for select in (argmax, lambda x: likeliest(x, 4)[1], lambda x: shortlist(x, 20)):
        assert select(logits).equal(select(logits.to(device)).cpu())
