"""Packed weights change the speed and nothing else."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

from pctree import DraftSettings, SpeculativeDecoder, TargetModel
from pctree.fused import fuse
from pctree.packing import PackedLinear, can_pack

PACKS = can_pack(nn.Linear(2, 2, dtype=torch.bfloat16))
needs_packing = pytest.mark.skipif(not PACKS, reason="this processor's library does not pack bfloat16 weights")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 33), (1, 1, 300)])
def test_products_are_the_same_to_the_last_bit(rows, bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    hidden = torch.randn(*rows, 48).to(torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(PackedLinear(linear.weight, linear.bias)(hidden), linear(hidden))


@needs_packing
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_packed_pair_decodes_the_same(kind):
    texts = []
    for packed in (False, True):
        model = tiny.target(kind, seed=2).to(torch.bfloat16)
        draft = tiny.drafter(model, "gated", seed=1).to(torch.bfloat16)
        if packed:
            fuse(model)
            draft.fuse()
            draft.lm_head = model.get_output_embeddings()
            assert isinstance(draft.lm_head, PackedLinear)
            assert not any(type(module) is nn.Linear for module in [*model.modules(), *draft.modules()])
        decoder = SpeculativeDecoder(TargetModel(model, draft.config.target_layer_ids), draft, settings=DraftSettings(budget=9))
        result = decoder.generate(tiny.prompt(1, 9), max_new_tokens=40)
        texts.append((result.token_ids, result.stats.acceptance_lengths))
    assert texts[0] == texts[1]


@needs_packing
@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama with biases"])
def test_fused_layers_give_the_numbers_of_the_models_own(kind):
    """A prompt, then a tree, with features: to the last bit, and the model's own forward goes on working."""
    models = [tiny.target(kind.split()[0], seed=2, attention_bias="biases" in kind).to(torch.bfloat16) for _ in range(2)]
    fuse(models[1])
    assert not any(type(module) is nn.Linear for module in models[1].modules())
    ids, tree = torch.tensor([tiny.prompt(1, 9)]), tiny.random_tree(1, 12, 40, seed=4)
    outputs = []
    for model in models:
        target = TargetModel(model, [-1, 0, 1])
        cache = target.new_cache(1, 40)
        prefill = target.prefill(cache, ids)
        outputs.append([*prefill, *target.verify(cache, tree.token_ids, tree.depths, tree.ancestor_mask(12)), cache.keys])
    for mine, theirs in zip(*outputs, strict=True):
        assert torch.equal(mine, theirs)
    with torch.inference_mode():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


@needs_packing
@pytest.mark.parametrize("make", [tiny.drafter, tiny.eagle])
def test_a_fused_drafter_gives_the_numbers_of_its_own_layers(make):
    """The context's keys and values, and a draft forward for requests of two lengths: to the last bit."""
    outputs = []
    for fused in (False, True):
        model = tiny.target(seed=2).to(torch.bfloat16)
        draft = make(model, seed=1).to(torch.bfloat16)
        if fused:
            draft.fuse()
            assert len(draft.fused_layers) == len(draft.layers)
        features = torch.randn(2, 9, draft.fc.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        ids = torch.tensor([tiny.prompt(1, 9), tiny.prompt(2, 9)])
        context = draft.new_cache(2, 30, 8)
        draft.extend(context, features, ids, torch.tensor([9, 6]))
        outputs.append([*draft.draft_block(context, ids[:, 0]), context.keys, context.values])
    for mine, theirs in zip(*outputs, strict=True):
        assert torch.equal(mine, theirs)


def test_layers_of_another_kind_are_packed_and_not_fused():
    model = tiny.target(seed=2).to(torch.bfloat16)
    model.config.hidden_act = "gelu"
    fuse(model)
    assert not hasattr(model, "pctree_layers")


def test_a_processor_that_cannot_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = tiny.target().to(torch.bfloat16)
    fuse(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_other_dtypes_are_left_alone():
    model = tiny.target()
    fuse(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert not hasattr(model, "pctree_layers")
