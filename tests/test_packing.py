"""Packed weights change the speed and nothing else."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

from pctree import DraftSettings, SpeculativeDecoder, TargetModel
from pctree.packing import PackedLinear, can_pack, pack_linears

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
        assert torch.equal(PackedLinear(linear)(hidden), linear(hidden))


@needs_packing
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_packed_pair_decodes_the_same(kind):
    texts = []
    for packed in (False, True):
        model = tiny.target(kind, seed=2).to(torch.bfloat16)
        draft = tiny.drafter(model, "gated", seed=1).to(torch.bfloat16)
        if packed:
            pack_linears(model)
            pack_linears(draft)
            draft.lm_head = model.get_output_embeddings()
            assert isinstance(draft.lm_head, PackedLinear)
            assert not any(type(module) is nn.Linear for module in [*model.modules(), *draft.modules()])
        decoder = SpeculativeDecoder(TargetModel(model, draft.config.target_layer_ids), draft, settings=DraftSettings(budget=9))
        result = decoder.generate(tiny.prompt(1, 9), max_new_tokens=40)
        texts.append((result.token_ids, result.stats.acceptance_lengths))
    assert texts[0] == texts[1]


def test_other_dtypes_are_left_alone():
    model = tiny.target()
    pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
