"""Sampling keeps the target's distribution, whatever is drafted; processors see each node's own history.

The statistical tests compare 20,000 runs (4,000 in the other modes) with the exact distribution by chi-square at p = 1e-4: a
right implementation fails one of them in ten thousand, and the seeds are fixed. Two deliberately wrong rules show that they
have teeth.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from pctree import SamplingParams, UsageError
from pctree.processing import CountPenalty, Draws

VOCAB, DRAWS, LENGTH = 6, int(20_000 * tiny.SHARE), 3


@pytest.fixture(scope="module")
def model():
    made = tiny.target("llama", vocab=VOCAB, seed=11, layers=2)
    with torch.no_grad():
        made.lm_head.weight.mul_(0.25)  # flat enough that every token has a chance
    return made


PROMPT = [1, 4, 2]


def exact(model, processors, warpers) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of three tokens, from plain forwards."""
    table = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for index in range(LENGTH):
            past = torch.tensor([[*PROMPT, *tokens[:index]]])
            scores = warpers(past, processors(past, model(past).logits[:, -1].float()))
            probability *= scores.softmax(-1)[0, tokens[index]].item()
        table[tokens] = probability
    return table


def p_value(counts: Counter, expected: dict[tuple[int, ...], float], draws: int) -> float:
    """Chi-square over cells with an expected count of at least 5; the rest is one cell."""
    cells = [(counts[k], draws * p) for k, p in expected.items() if draws * p >= 5]
    seen, wanted = sum(c for c, _ in cells), sum(e for _, e in cells)
    if draws - wanted >= 5:
        cells.append((draws - seen, draws - wanted))
    else:
        assert draws - seen <= 25  # next to nothing is left for the cells that were left out
    statistic = sum((count - e) ** 2 / e for count, e in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0), torch.tensor(statistic / 2.0)))


def sample_many(model, method: str, params: SamplingParams, *, draws: int = DRAWS, batch: int = 500, **settings) -> Counter:
    """``draws`` runs under as many seeds, many at a time."""
    draft = tiny.drafter(model, "vanilla", block_size=3, seed=1, layer_ids=(-1, 0))
    reader = tiny.decoder(model, draft, method, **settings)
    counts: Counter = Counter()
    for start in range(0, draws, batch):
        params_list = [SamplingParams(**{**vars(params), "seed": seed}) for seed in range(start, start + batch)]
        results = reader.generate([PROMPT] * batch, params_list, max_batch_size=batch)
        counts.update(tuple(result.token_ids) for result in results)
    return counts


GRID = [
    ("dspark", 1, 4, {"temperature": 1.0}),
    ("dspark", 1, 4, {"temperature": 0.7, "top_p": 0.8}),
    ("shared-markov", 3, 8, {"temperature": 0.8, "repetition_penalty": 1.4}),
    ("shared-markov", 2, 6, {"temperature": 1.2, "top_p": 0.9}),
    ("pctree", 2, 8, {"temperature": 0.6}),
    ("pctree", 4, 12, {"temperature": 1.0, "top_p": 0.7}),
    ("pctree", 3, 10, {"temperature": 1.1, "repetition_penalty": 1.5, "top_p": 0.9}),
    ("pctree", 6, 20, {"temperature": 1.5}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "top_k", "budget", "options"), GRID)
def test_the_distribution_is_the_targets(model, method, top_k, budget, options):
    params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=[], **options)
    processors, warpers = LogitsProcessorList(), LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    warpers.append(lambda ids, scores: scores / options["temperature"])
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    counts = sample_many(model, method, params, top_k=top_k, budget=budget)
    assert p_value(counts, exact(model, processors, warpers), DRAWS) > 1e-4


def wrong_follow_any_child(tree, mask, logits, batch):
    """Takes the likeliest drafted child wherever there is one: what a greedy chain would do to a sample."""
    chosen = batch.right(tree, mask, logits)
    first_child = torch.full_like(chosen, -1)
    for node in range(tree.nodes - 1, 0, -1):
        first_child.scatter_(1, tree.parents[:, node : node + 1], tree.token_ids[:, node : node + 1])
    return torch.where(first_child >= 0, first_child, chosen)


def wrong_without_temperature(tree, mask, logits, batch):
    """Draws from the raw softmax although the request has a temperature (seen in other engines)."""
    return torch.distributions.Categorical(logits=logits.float()).sample()


@pytest.mark.tree
@pytest.mark.parametrize("rule", [wrong_follow_any_child, wrong_without_temperature])
def test_a_wrong_rule_is_caught(model, monkeypatch, rule):
    from pctree.batch import Batch

    right = Batch.choose
    torch.manual_seed(0)

    def choose(self, tree, mask, logits):
        self.right = lambda *args: right(self, *args)
        return rule(tree, mask, logits, self)

    monkeypatch.setattr(Batch, "choose", choose)
    params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=[], temperature=0.6)
    warpers = LogitsProcessorList([lambda ids, scores: scores / 0.6])
    counts = sample_many(model, "pctree", params, draws=4000, top_k=2, budget=6)
    assert p_value(counts, exact(model, LogitsProcessorList(), warpers), 4000) < 1e-6


def test_seeds_make_a_request_reproducible_in_any_company():
    model = tiny.target(seed=3)
    reader = tiny.decoder(model, tiny.drafter(model))
    params = SamplingParams(temperature=1.0, max_new_tokens=20, seed=7)
    alone = reader.generate(tiny.prompt(1, 9), params).token_ids
    assert reader.generate(tiny.prompt(1, 9), params).token_ids == alone
    neighbours = [tiny.prompt(2, 5), tiny.prompt(1, 9), tiny.prompt(3, 14)]
    together = reader.generate(neighbours, [SamplingParams(temperature=1.2), params, SamplingParams()])
    assert together[1].token_ids == alone
    unseeded = {tuple(reader.generate(tiny.prompt(1, 9), temperature=1.0, max_new_tokens=20).token_ids) for _ in range(4)}
    assert len(unseeded) > 1


@tiny.examples(25)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 5), budget=st.integers(1, 40), penalty=st.sampled_from([1.0, 1.4]))
@pytest.mark.parametrize("method", ["dspark", "shared-markov", "pctree", "ddtree"])
def test_a_seed_gives_one_text_whatever_is_drafted(method, seed, top_k, budget, penalty):
    model = tiny.target(seed=3)
    draft = tiny.drafter(model, "gated")
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=30, seed=seed, repetition_penalty=penalty)
    expected = tiny.decoder(model, draft, "ar").generate(tiny.prompt(1, 9), params).token_ids
    draft.future, draft.boost = tiny.prompt(1, 9) + expected, 4.0  # so that deep paths are accepted
    result = tiny.decoder(model, draft, method, top_k=top_k, budget=budget).generate(tiny.prompt(1, 9), params)
    assert result.token_ids == expected


def test_draws_do_not_depend_on_how_they_are_asked_for():
    one, other = Draws(3), Draws(3)
    assert one(0, 700).tolist() == [other(place, 1).item() for place in range(700)]
    assert one(300, 5).equal(other(300, 5))


class Forbid(LogitsProcessor):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


class Force(LogitsProcessor):
    """Every third token is forced."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, 5] = 0
        return forced


class SumAutomaton(LogitsProcessor):
    """A grammar whose state is a function of the whole history: only tokens of the parity of its sum are allowed."""

    def __call__(self, input_ids, scores):
        parity = input_ids.sum(-1, keepdim=True) % 2
        allowed = torch.arange(scores.shape[1]) % 2 == parity
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("processor", [Forbid(7), Force(), SumAutomaton(), RepetitionPenaltyLogitsProcessor(1.6)])
@pytest.mark.parametrize("method", ["dspark", "pctree", "ddtree"])
def test_greedy_with_a_processor_equals_generate(processor, method):
    for seed in range(3):
        model = tiny.target("qwen3", seed=seed)
        prompt = tiny.prompt(seed, 8)
        expected, _ = tiny.plain(model, prompt, 24, logits_processor=LogitsProcessorList([processor]))
        draft = tiny.drafter(model, "gated")
        draft.future, draft.boost = prompt + expected, 5.0  # so that deep paths are accepted
        result = tiny.decoder(model, draft, method).generate(prompt, max_new_tokens=24, logits_processor=[processor])
        assert result.token_ids == expected
        if method == "pctree":
            assert result.stats.acceptance_length > 1.5


def test_penalties_count_each_token_of_the_output_once():
    scores = torch.zeros(1, 5)
    out = CountPenalty(prompt_length=2, presence=0.5, frequency=0.25)(torch.tensor([[4, 4, 1, 1, 2]]), scores)
    assert out.tolist() == [[0.0, -1.0, -0.75, 0.0, 0.0]]


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.7}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"logit_bias": {3: 14.0, 9: -2.0}},
     {"min_new_tokens": 12}],
)  # fmt: skip
def test_penalties_act_as_in_plain_decoding(options):
    model = tiny.target(seed=5)
    prompt = tiny.prompt(2, 7)
    stop = tiny.plain(model, prompt, 24)[0][4] if "min_new_tokens" in options else 39
    options = {"max_new_tokens": 24, "stop_token_ids": [stop], **options}
    draft = tiny.drafter(model, "rnn")
    plain = tiny.decoder(model, draft, "ar").generate(prompt, **options)
    assert tiny.decoder(model, draft, "pctree").generate(prompt, **options).token_ids == plain.token_ids
    without = tiny.decoder(model, draft, "ar").generate(prompt, max_new_tokens=24, stop_token_ids=[stop])
    assert plain.token_ids != without.token_ids  # the parameter does something


def test_drafting_follows_the_penalties():
    """A perfect drafter of the raw distribution is no longer one under a bias, unless the bias reaches the drafter."""
    model = tiny.target(seed=5)
    prompt = tiny.prompt(2, 7)
    bias = dict.fromkeys((3, 9), 12.0)
    expected = tiny.decoder(model, None, "ar").generate(prompt, max_new_tokens=30, logit_bias=bias).token_ids
    draft = tiny.drafter(model)
    result = tiny.decoder(model, draft, "pctree").generate(prompt, max_new_tokens=30, logit_bias=bias)
    assert result.token_ids == expected
    assert set(expected) <= {3, 9}
    assert result.stats.acceptance_length > 4


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": 1, "top_p": 1.5}, {"temperature": 1, "top_p": 0},
     {"temperature": 1, "min_p": 2}, {"repetition_penalty": 0}, {"frequency_penalty": float("inf")}, {"stop": ""},
     {"stop": ["a", ""]}, {"max_new_tokens": 0}, {"min_new_tokens": 9, "max_new_tokens": 3}, {"top_p": 0.9}, {"seed": 1},
     {"temperature": 1, "sample_top_k": -1}, {"colour": 1}],
)  # fmt: skip
def test_bad_parameters_are_named(options):
    model = tiny.target()
    with pytest.raises(UsageError, match=list(options)[-1] if "min_new_tokens" not in options else "min_new_tokens"):
        tiny.decoder(model, None, "ar").generate([1, 2], **options)
