"""The automatic budget: its rule against brute force, its calibration against known chances, and the text untouched."""

from __future__ import annotations

import random

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from pctree import UsageError
from pctree.economy import Economy, calibrate
from pctree.tree import DraftTree


def chain_of(log_probs: list[list[float]]) -> DraftTree:
    scores = torch.tensor(log_probs)
    tokens = torch.arange(scores.shape[1]).expand_as(scores)
    return DraftTree(tokens, (tokens - 1).clamp_min(0), tokens, scores)


@given(
    rows=st.lists(st.lists(st.floats(-8, 0), min_size=6, max_size=6), min_size=1, max_size=3),
    per_row=st.floats(0.0, 5.0), fixed=st.floats(1.0, 50.0),
)  # fmt: skip
def test_the_prefix_has_the_most_expected_tokens_a_second(rows, per_row, fixed):
    rows = [[0.0, *sorted(row, reverse=True)] for row in rows]
    economy = Economy({1: per_row, 101: 101 * per_row}, fixed)
    kept = economy.trim(chain_of(rows)).nodes
    rates = []
    for count in range(1, 8):
        expected = sum(1 + sum(torch.tensor(row[1:count]).exp().tolist()) for row in rows)
        rates.append(expected / (fixed + per_row * count * len(rows)))
    assert rates[kept - 1] == pytest.approx(max(rates), rel=1e-5)


def test_rows_that_cost_nothing_are_all_verified_and_dear_ones_are_not():
    tree = chain_of([[0.0, -0.1, -1.0, -5.0]])
    assert Economy({1: 10.0, 2: 10.0}, 5.0).trim(tree).nodes == 4
    assert Economy({1: 10.0, 2: 1e6}, 5.0).trim(tree).nodes == 1
    assert Economy({8: 10.0}, 5.0).trim(tree).nodes == 4  # a single measurement says nothing of rows


def test_the_cost_is_straight_between_and_beyond_what_was_measured():
    economy = Economy({1: 10.0, 8: 17.0, 16: 33.0}, 2.0)
    assert [economy.cost(rows) for rows in (1, 4, 8, 12, 16, 20)] == pytest.approx([12, 15, 19, 27, 35, 43])


def test_calibration_recovers_the_true_chances():
    """Nodes that say p and are accepted with p²; 40,000 of them, so a bin of 625 is off by under 0.08."""
    draw = random.Random(0)
    seen = []
    for _ in range(40_000):
        p = draw.random()
        seen.append((float(torch.tensor(p + 1e-9).log()), draw.random() < p * p))
    points = calibrate(seen)
    assert [y for _, y in points] == sorted(y for _, y in points)
    log_probs = torch.tensor([[0.9, 0.7, 0.5, 0.3]]).log()
    chances = Economy({1: 1.0}, 1.0, points).chances(log_probs)
    torch.testing.assert_close(chances, torch.tensor([[0.81, 0.49, 0.25, 0.09]]), atol=0.08, rtol=0)


def test_calibration_of_little():
    assert calibrate([]) == []
    assert calibrate([(-1.0, False)] * 10) == [(-1.0, 0.0)]
    assert calibrate([(-2.0, True), (-1.0, False)]) == [(-1.5, 0.5)]  # pooled: the likelier must not count less
    assert Economy({1: 1.0}, 1.0, [(-1.0, 0.5)]).chances(torch.tensor([[-3.0, 0.0]])).tolist() == [[0.5, 0.5]]


def test_a_calibration_of_one_point_trims_too():
    assert Economy({1: 10.0, 2: 1e6}, 5.0, [(-1.0, 0.5)]).trim(chain_of([[0.0, -0.1, -1.0]])).nodes == 1


@pytest.mark.parametrize("method", ["pctree", "shared-markov", "dspark", "ddtree"])
@pytest.mark.parametrize("requests", [1, 3])
def test_the_text_is_the_targets_whatever_is_verified(method, requests):
    model = tiny.target(seed=3)
    draft = tiny.drafter(model, "gated", seed=2)
    draft.future, draft.boost = tiny.plain(model, tiny.prompt(1, 8), 60)[0], 0.0
    reader = tiny.decoder(model, draft, method, economy=Economy({1: 4.0, 64: 30.0}, 3.0), budget="auto")
    prompts = [tiny.prompt(seed, 8) for seed in range(requests)]
    expected = reader.with_settings(method="ar", budget=1).generate(prompts, max_new_tokens=30)
    for mine, plain in zip(reader.generate(prompts, max_new_tokens=30), expected, strict=True):
        assert mine.token_ids == plain.token_ids
        assert len(set(mine.stats.nodes)) > 1 or method == "dspark"
        assert max(mine.stats.nodes) <= 64


def test_an_automatic_budget_needs_to_know_the_costs():
    model = tiny.target()
    with pytest.raises(UsageError, match=r"budget is auto.*pctree tune"):
        tiny.decoder(model, tiny.drafter(model), budget="auto")
    with pytest.raises(UsageError, match="budget is 'many'"):
        tiny.decoder(model, tiny.drafter(model), budget="many")
