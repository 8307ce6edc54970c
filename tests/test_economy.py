"""The automatic budget: its rule against brute force, its calibration against known chances, and the text untouched."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from pctree import UsageError
from pctree.economy import Economy, calibrate
from pctree.scorers import BaseScorer
from pctree.tree import DraftTree, grow_tree

SIZES = [1, 2, 4, 6, 7]  # of a tree of 7 nodes that are verified
rounds = given(
    rows=st.lists(st.lists(st.floats(-8, 0), min_size=6, max_size=6), min_size=1, max_size=3),
    per_row=st.floats(0.0, 5.0), fixed=st.floats(1.0, 50.0),
)  # fmt: skip


def expected_tokens(rows: list[list[float]], count: int) -> float:
    """What requests with these path log-probabilities expect of their first ``count`` nodes."""
    return sum(1 + sum(torch.tensor(row[1:count]).exp().tolist()) for row in rows)


def chain_of(log_probs: list[list[float]]) -> DraftTree:
    scores = torch.tensor(log_probs)
    tokens = torch.arange(scores.shape[1]).expand_as(scores)
    return DraftTree(tokens, (tokens - 1).clamp_min(0), tokens, scores)


@rounds
def test_the_prefix_has_the_most_expected_tokens_a_second(rows, per_row, fixed):
    rows = [[0.0, *sorted(row, reverse=True)] for row in rows]
    economy = Economy({1: per_row, 101: 101 * per_row}, fixed)
    kept = economy.trim(chain_of(rows)).nodes
    rates = []
    for count in SIZES:
        rates.append(expected_tokens(rows, count) / (fixed + per_row * count * len(rows)))
    assert rates[SIZES.index(kept)] == pytest.approx(max(rates), rel=1e-5)


@rounds
def test_where_time_has_a_price_the_prefix_earns_the_most(rows, per_row, fixed):
    rows = [[0.0, *sorted(row, reverse=True)] for row in rows]
    committed = [1.0, 1.7, 2.1, 2.2]
    economy = Economy({1: per_row, 101: 101 * per_row}, fixed, committed=committed)

    def cost(count: int) -> float:
        return fixed + per_row * count * len(rows)

    price = max(len(rows) * tokens / cost(count) for count, tokens in enumerate(committed, 1))
    kept = economy.trim(chain_of(rows)).nodes
    earned = [expected_tokens(rows, n) - price * cost(n) for n in SIZES]
    assert earned[SIZES.index(kept)] == pytest.approx(max(earned), rel=1e-4, abs=1e-4)


def test_a_price_gives_more_tokens_a_second_over_easy_and_hard_rounds_than_each_round_for_itself():
    """Half of the rounds are certain of 7 tokens, half of none: a round of one row is dear for what it brings."""
    easy, hard = chain_of([[0.0] * 8]), chain_of([[0.0] + [-2.0] * 7])
    costs = {1: 11.0, 64: 74.0}
    committed = [1 + (n + n * 0.135) / 2 for n in range(8)]  # of rounds with 1 … 8 nodes, half and half

    def speed(economy: Economy) -> float:
        tokens = time = 0.0
        for tree, chance in ((easy, 1.0), (hard, 0.135)):
            nodes = economy.trim(tree).nodes
            tokens, time = tokens + 1 + chance * (nodes - 1), time + economy.cost(nodes)
        return tokens / time

    alone, priced = speed(Economy(costs, 10.0)), speed(Economy(costs, 10.0, committed=committed))
    assert priced >= alone
    assert priced > max(2 * tokens / (2 * Economy(costs, 10.0).cost(n)) for n, tokens in enumerate(committed, 1))


def test_growth_ends_where_no_node_is_worth_a_layer():
    economy = Economy(
        {1: 10.0, 64: 10.0}, 10.0, committed=[1.0, 2.0], layer_ms=1.0
    )  # a millisecond is worth a tenth of a token
    assert economy.floor(1) == pytest.approx(math.log(0.1))
    calibrated = replace(economy, calibration=[(-4.0, 0.05), (-2.0, 0.15), (0.0, 0.9)])
    assert calibrated.floor(1) == pytest.approx(-3.0)
    assert replace(economy, calibration=[(-4.0, 0.2), (0.0, 0.9)]).floor(1) == -math.inf
    assert replace(economy, calibration=[(-4.0, 0.02), (0.0, 0.05)]).floor(1) == 0.0
    assert replace(economy, committed=()).floor(1) == replace(economy, layer_ms=0.0).floor(1) == -math.inf
    assert economy.floor(4) == pytest.approx(
        math.log(0.1)
    )  # four requests pay for a layer together, and time is worth as much more


def test_a_tree_that_stops_growing_is_the_tops_of_the_whole_one():
    scorer = BaseScorer(torch.randn(1, 6, 50, generator=torch.Generator().manual_seed(0)))
    anchors = torch.tensor([3])
    whole = grow_tree(scorer, anchors, top_k=3, budget=64)
    deepest = []
    for floor in (-1.0, -6.0, -12.0, -math.inf):
        grown = grow_tree(scorer, anchors, top_k=3, budget=64, floor=floor)
        depth = int(grown.depths.max())
        deepest.append(depth)
        tops = whole.depths <= depth
        assert sorted(grown.log_probs[0].tolist()) == sorted(whole.log_probs[tops].tolist())
        for below in range(1, depth):
            assert whole.log_probs[whole.depths == below].max() > floor
        assert depth == 6 or not bool((whole.log_probs[whole.depths == depth] > floor).any())
    assert deepest == sorted(deepest)
    assert deepest[-1] == 6
    assert deepest[0] < 6


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
    reader = tiny.decoder(model, draft, method, economy=tiny.ECONOMY, budget="auto")
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
