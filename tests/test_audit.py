"""The audit finds nothing where there is nothing, and finds a decoder that cheats."""

from __future__ import annotations

import pytest
import tiny
import torch

from pctree import SamplingParams, UsageError
from pctree.audit import GreedyAudit, audit_greedy, audit_sampling, chi_square_p, exact_pairs, explained_margin
from pctree.batch import Batch


@pytest.fixture(scope="module")
def reader():
    model = tiny.target("llama", vocab=12, seed=4)
    return tiny.decoder(model, tiny.drafter(model), budget=8)


PROMPTS = [tiny.prompt(seed, 6, 12) for seed in range(4)]


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"logit_bias": {3: 2.0}}])
def test_nothing_is_found_in_float32(reader, options):
    found = audit_greedy(reader, PROMPTS, SamplingParams(max_new_tokens=20, **options))
    assert found.tokens == 80
    assert found.flips == []


def second_best(self, tree, ancestor_mask, logits):
    """Now and then, the token that is not the target's."""
    chosen = logits.topk(2, dim=-1).indices
    return torch.where(tree.token_ids % 3 == 0, chosen[..., 1], chosen[..., 0])


def test_a_decoder_that_cheats_is_found(reader, monkeypatch):
    plain = audit_greedy(reader.with_settings(method="ar"), PROMPTS, SamplingParams(max_new_tokens=20))
    monkeypatch.setattr(Batch, "choose", second_best)
    found = audit_greedy(reader, PROMPTS, SamplingParams(max_new_tokens=20))
    assert len(found.flips) > 5
    assert found.largest_margin > explained_margin(torch.float32, plain)
    assert found.flips_per_thousand == 1000 * len(found.flips) / 80
    assert len(found.first_flips()) <= len(PROMPTS)
    assert sum(found.histogram([0.1, 1.0])) == len(found.flips)


def test_pairs_are_the_product_of_plain_forwards(reader):
    params = SamplingParams(temperature=0.8, repetition_penalty=1.2)
    pairs = exact_pairs(reader, PROMPTS[0], params, least=0.0)
    assert len(pairs) == 144
    assert sum(pairs.values()) == pytest.approx(1.0, abs=1e-4)


def test_sampling_passes_and_a_cheat_does_not(reader, monkeypatch):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5)
    assert audit_sampling(reader, PROMPTS[0], params, draws=1500).p_value > 1e-4
    monkeypatch.setattr(Batch, "choose", second_best)
    assert audit_sampling(reader, PROMPTS[0], params, draws=1500).p_value < 1e-6


def test_chi_square_at_known_quantiles():
    assert chi_square_p(3.841, 1) == pytest.approx(0.05, abs=1e-3)
    assert chi_square_p(18.307, 10) == pytest.approx(0.05, abs=1e-3)
    assert chi_square_p(0.0, 4) == pytest.approx(1.0)


def test_the_wrong_audit_is_refused(reader):
    with pytest.raises(UsageError, match="temperature"):
        audit_greedy(reader, PROMPTS, SamplingParams(temperature=1.0))
    with pytest.raises(UsageError, match="temperature"):
        audit_sampling(reader, PROMPTS[0], SamplingParams(), draws=10)
    assert GreedyAudit("ar").flips_per_thousand == 0
