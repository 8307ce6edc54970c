"""The measures of the benchmark: what each number is, exactly."""

from __future__ import annotations

import json
import math
import random
from statistics import fmean

import pytest
from bench_records import matrix, record

from pctree.bench import calibration, measures
from pctree.bench.measures import (
    Estimate,
    acceptance_by_depth,
    flips,
    length_distribution,
    mean_speedup,
    median_speedup,
    on_shared_text,
    repeats_agree,
    speedup_gain,
    summarise,
    tau,
    tau_gain,
)


def chain(index: int, lengths: list[int], task: str = "gsm8k", **changes):
    return record("dspark", "b7", task, index, lengths=lengths, **changes)


def value(found: Estimate | None) -> float:
    assert found is not None
    return found.value


# --- acceptance ---------------------------------------------------------------------------------------------------------


def test_tau_counts_rounds_within_a_task_and_tasks_alike():
    short, long = chain(0, [8]), chain(1, [1, 1, 1])
    assert value(tau([short, long])) == 11 / 4  # every round counts, not every prompt
    other = chain(0, [5, 5], task="humaneval")
    assert value(tau([short, long, other])) == (11 / 4 + 5) / 2  # every task counts, not every round


def test_tau_of_golden_chains_is_deepspecs(golden):
    for file in sorted(golden.glob("*.expected.json")):
        expected = json.loads(file.read_text())
        if "deepspec_tau" not in expected:
            continue
        records = [chain(i, case["acceptance_lengths"]) for i, case in enumerate(expected["cases"])]
        assert value(tau(records)) == pytest.approx(expected["deepspec_tau"], abs=1e-4), file


def test_texts_without_a_round_have_no_tau():
    assert tau([chain(0, [])]) is None
    assert value(tau([chain(0, []), chain(1, [3])])) == 3
    assert tau([]) is None


def test_one_plus_the_depths_is_tau():
    records = [r for r in matrix() if r["method"] == "pctree" and r["drafter"] == "b7"]
    by_depth = acceptance_by_depth(records, 7)
    assert 1 + sum(by_depth) == pytest.approx(value(tau(records)))
    assert by_depth == sorted(by_depth, reverse=True)
    assert sum(length_distribution(records, 8)) == pytest.approx(1)
    assert acceptance_by_depth([chain(0, [1, 3, 8, 8])], 7) == [0.75, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert acceptance_by_depth([], 2) == [0.0, 0.0]


# --- intervals ----------------------------------------------------------------------------------------------------------


def test_intervals_are_those_of_the_bootstrap_over_prompts():
    drawn = random.Random(0)
    values = [drawn.gauss(3, 1) for _ in range(200)]
    found = measures.bootstrap({("t", f"{i:03}"): [v] for i, v in enumerate(values)}, measures._mean)
    assert found is not None
    spread = 1.96 * (sum((v - fmean(values)) ** 2 for v in values) / len(values) / len(values)) ** 0.5
    assert found.value == pytest.approx(fmean(values))
    assert found.low == pytest.approx(fmean(values) - spread, abs=0.15 * spread)
    assert found.high == pytest.approx(fmean(values) + spread, abs=0.15 * spread)
    assert found == measures.bootstrap({("t", f"{i:03}"): [v] for i, v in enumerate(values)}, measures._mean)


def test_repeats_of_a_prompt_are_drawn_together():
    lengths = [[2, 3], [1, 1], [7, 5], [4, 4]]
    once = [chain(i, found) for i, found in enumerate(lengths)]
    twice = once + [chain(i, found, repeat=1) for i, found in enumerate(lengths)]
    assert tau(once) == tau(twice)


def test_a_task_with_one_prompt_has_no_interval():
    assert tau([chain(0, [2, 3])]) == Estimate(2.5)
    assert tau([chain(0, [2]), chain(1, [2]), chain(0, [4], task="humaneval")]) == Estimate(3.0)


def test_a_gain_is_paired_by_prompt():
    lengths = [[1, 6], [2, 2], [8, 3], [1, 1]]
    before = [chain(i, found) for i, found in enumerate(lengths)]
    after = [record("pctree", "b7", index=i, lengths=[n + 1 for n in found]) for i, found in enumerate(lengths)]
    assert tau_gain(before, after) == Estimate(1.0, 1.0, 1.0)  # though τ itself varies a lot between prompts
    assert tau_gain(before[:2], [*after[1:], chain(9, [8])]) == Estimate(1.0)  # only prompt 1 is in both
    assert tau_gain(before[:1], after[1:]) is None


def test_rounds_from_the_same_text_are_those_that_start_before_it_parts():
    """The prefill's token, then rounds: a text that parts at token 4 was the same when the round at 4 started, not at 5."""
    first = chain(0, [1, 2, 1, 6], token_ids=[7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])  # rounds start at 1, 2, 4, 5
    second = chain(0, [3, 7], token_ids=[7, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0])  # rounds start at 1, 4
    only_there = chain(1, [2, 2])
    cut = on_shared_text([first, only_there], [second])
    assert [[record["acceptance_lengths"] for record in records] for records in cut] == [[[1, 2, 1]], [[3, 7]]]
    assert first["acceptance_lengths"] == [1, 2, 1, 6]  # the records themselves are left alone
    assert value(tau_gain(*cut)) == 10 / 2 - 4 / 3


def test_the_same_texts_keep_all_their_rounds():
    a, b = [chain(i, [2, 2, 2, 2]) for i in range(2)], [chain(i, [4, 4]) for i in range(2)]
    assert on_shared_text(a, b) == [a, b]
    assert on_shared_text(a, [chain(5, [1])]) == [[], []]


# --- speed --------------------------------------------------------------------------------------------------------------


def speeds(method: str, *tokens_per_second: float, **changes) -> list[dict]:
    drafter = None if method == "ar" else "b7"
    return [record(method, drafter, index=i, tokens_per_second=speed, **changes) for i, speed in enumerate(tokens_per_second)]


def test_speedup_is_the_ratio_to_plain_decoding_of_the_same_prompt():
    plain, fast = speeds("ar", 10, 20, 40), speeds("dspark", 20, 30, 40)
    assert value(median_speedup(fast, plain)) == 1.5
    assert value(mean_speedup(fast, plain)) == 1.5
    assert value(median_speedup(speeds("dspark", 20, 30, 400), plain)) == 2
    assert median_speedup(plain, plain) == Estimate(1.0, 1.0, 1.0)
    assert speedup_gain(plain, fast, plain) is not None
    assert value(speedup_gain(plain, fast, plain)) == 0.5


@pytest.mark.parametrize(
    "change", [{"environment": "b"}, {"repeat": 1}, {"temperature": 1.0}, {"dtype": "float32"}, {"max_new_tokens": 9}]
)
def test_speeds_of_other_circumstances_do_not_pair(change):
    assert median_speedup(speeds("dspark", 20, 30, **change), speeds("ar", 10, 10)) is None


def test_a_text_without_a_speed_does_not_count():
    assert value(median_speedup(speeds("dspark", 20, 0, 30), speeds("ar", 10, 10, 10))) == 2.5
    assert median_speedup(speeds("dspark", 20), speeds("ar", 0)) is None


def test_a_prompts_repeats_are_one_ratio():
    plain = speeds("ar", 10, 10) + speeds("ar", 10, repeat=1) + speeds("ar", 10, repeat=2)
    fast = speeds("dspark", 20, 30) + speeds("dspark", 21, repeat=1) + speeds("dspark", 90, repeat=2)
    assert value(median_speedup(fast, plain)) == pytest.approx((2.1 + 3) / 2)
    assert value(mean_speedup(fast, plain)) == pytest.approx((13.1 / 3 + 3) / 2)


# --- the rest of a cell -------------------------------------------------------------------------------------------------


def test_summary():
    stages = [{"draft": d, "tree": 1.0, "verify": 10.0, "commit": 0.0} for d in (2.0, 4.0, 99.0)]
    records = [
        record("pctree", "b7", index=i, lengths=[2] * rounds, tree_nodes=nodes, stage_ms=stage, peak_memory_mb=memory)
        for i, (rounds, nodes, stage, memory) in enumerate(zip((1, 3, 2), (8, 32, 32), stages, (5, 9, None), strict=True))
    ]
    found = summarise(records, [])
    assert found.prompts == found.texts == 3
    assert found.nodes == (8 + 3 * 32 + 2 * 32) / 6
    assert found.rounds == 2
    assert found.stage_ms["draft"] == 4
    assert found.round_ms == 15
    assert found.peak_memory_mb == 9
    assert found.speedup is None
    assert summarise([], []).tau is None


def test_flips_count_tokens_up_to_the_difference():
    records = [
        chain(0, [5], tokens=100),
        chain(1, [5], tokens=100, first_difference=49, margin=-0.25),
        chain(2, [5], tokens=100, first_difference=29, margin=0.125),
        chain(3, [5], tokens=100, first_difference=19, margin=math.nan),  # one of the texts had ended
    ]
    found = flips(records)
    assert (found.texts, found.parted, found.compared) == (4, 3, 200)
    assert found.per_thousand == 15
    assert (found.median_margin, found.largest_margin) == (0.1875, 0.25)
    assert flips([]).per_thousand == 0


def test_repeats_agree_within_their_intervals():
    assert repeats_agree([Estimate(2.0, 1.9, 2.1), Estimate(2.1, 2.0, 2.2)])
    assert not repeats_agree([Estimate(2.0, 1.9, 2.1), Estimate(2.2, 2.1, 2.3)])
    assert repeats_agree([Estimate(2.0, 2.0, 2.0), Estimate(2.0, 2.0, 2.0)])
    assert repeats_agree([Estimate(2.0, 1.9, 2.1), Estimate(2.0), None]) is None


# --- calibration --------------------------------------------------------------------------------------------------------


def test_calibration_predicts_prefixes():
    one = chain(0, [3, 1], confidences=[[0.5, 0.5, 0.5], [0.9, 1.0, 0.1]])
    assert calibration.predictions([one]) == [
        ([0.5, 0.9], [1, 0]),
        ([0.25, 0.9], [1, 0]),
        ([0.125, pytest.approx(0.09)], [0, 0]),
    ]
    ended = one | {"finish_reason": "stop"}  # its last round was cut
    assert calibration.predictions([ended, chain(1, [2]), chain(2, [2], confidences=None)])[0] == ([0.5], [1])
    assert calibration.predictions([]) == []


def test_calibration_numbers():
    predicted, labels = [0.02, 0.04, 0.52, 0.54, 1.0], [0, 1, 1, 1, 1]
    found = calibration.calibrate(predicted, labels)
    assert (found.count, found.predicted, found.accepted) == (5, pytest.approx(0.424), 0.8)
    assert found.ece == pytest.approx((abs(0.03 - 0.5) * 2 + abs(0.53 - 1) * 2 + 0) / 5)
    assert found.brier == pytest.approx((0.02**2 + 0.96**2 + 0.48**2 + 0.46**2) / 5)
    assert found.auc == 1.0
    perfect = calibration.calibrate([0.0, 1.0, 1.0], [0, 1, 1])
    assert (perfect.ece, perfect.auc, perfect.brier) == (0, 1, 0)


def test_auc_is_the_chance_of_the_right_order_with_ties_half():
    drawn = random.Random(1)
    predicted = [drawn.randrange(6) / 5 for _ in range(60)]
    labels = [int(drawn.random() < p) for p in predicted]
    pairs = [(p > q) + (p == q) / 2 for p, a in zip(predicted, labels, strict=True) if a
             for q, b in zip(predicted, labels, strict=True) if not b]  # fmt: skip
    assert calibration.auc(predicted, labels) == pytest.approx(fmean(pairs))
    assert calibration.auc([0.5, 0.7], [1, 1]) is None


def test_the_mean_over_positions_weights_by_count_and_skips_what_has_no_auc():
    first = calibration.Calibration(3, 0.5, 0.6, 0.1, 0.8, 0.2)
    second = calibration.Calibration(1, 0.1, 0.0, 0.3, None, 0.6)
    found = calibration.weighted_mean([first, second])
    assert (found.count, found.ece, found.auc, found.brier) == pytest.approx((4, 0.15, 0.8, 0.3))
