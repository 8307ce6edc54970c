"""The contract: whatever is drafted, the tokens are those of the target's own greedy decoding."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import tiny
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pctree import METHODS as ALL_METHODS
from pctree import SpeculativeDecoder, TargetModel, UsageError
from pctree.drafters import DSparkDrafter
from pctree.stats import STAGES, Statistics
from pctree.targets import KVCache

METHODS = {name: method for name, method in ALL_METHODS.items() if not method.autoregressive}  # EAGLE-3: test_eagle3.py
HEADLESS = [name for name, method in METHODS.items() if not method.needs_head]
KNOWS_ALL = 1e4


def check_statistics(decoder: SpeculativeDecoder, result, produced: list[int]) -> None:
    """The sum rules of :class:`Statistics`, and the result's own fields."""
    stats, options = result.stats, decoder.settings
    assert result.token_ids == produced
    assert stats.new_tokens == len(result.token_ids)
    assert stats.rounds == len(stats.acceptance_lengths) == len(stats.nodes)
    depth = decoder.drafter.block_size if options.method != "ar" else 0
    for length, nodes in zip(stats.acceptance_lengths, stats.nodes, strict=True):
        assert 1 <= nodes <= options.most_nodes
        assert 1 <= length <= min(nodes, depth + 1)
    # The prefill token belongs to no round. A stop token cuts the last round's count, the length limit does not.
    counted = 1 + sum(stats.acceptance_lengths)
    assert 1 + sum(stats.acceptance_lengths[:-1]) < stats.new_tokens or not stats.rounds
    assert counted >= stats.new_tokens
    if result.finish_reason == "stop":
        assert counted == stats.new_tokens
    if stats.rounds:
        assert stats.acceptance_length == pytest.approx(sum(stats.acceptance_lengths) / stats.rounds)
    assert set(stats.total_stage_ms) == set(STAGES)
    assert stats.seconds >= 0
    assert stats.time_to_first_token_ms > 0


def cut(tokens: list[int], stop: set[int]) -> list[int]:
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[:end]


@tiny.examples(120)
@given(
    kind=st.sampled_from(["qwen3", "llama"]),
    head=st.sampled_from([*tiny.HEADS, None]),
    block_size=st.integers(1, 16),
    top_k=st.integers(1, 8),
    budget=st.integers(1, 64),
    frontier=st.sampled_from(["capped", "exact"]),
    candidates=st.sampled_from([0, 0, 3, 17]),
    boost=st.sampled_from([0.0, 2.0, 4.0, 8.0]),  # random drafters accept too little to exercise much
    max_new_tokens=st.integers(1, 40),
    stop_at=st.none() | st.integers(0, 39),
    vocab=st.integers(24, 64),
    own=st.booleans(),
    prompt_length=st.integers(1, 12),
    seed=st.integers(0, 10**4),
    data=st.data(),
)
def test_tokens_are_those_of_plain_greedy_decoding(
    kind, head, block_size, top_k, budget, frontier, candidates, boost, max_new_tokens, stop_at, vocab, own, prompt_length,
    seed, data
):  # fmt: skip
    method = data.draw(st.sampled_from(sorted(METHODS) if head else HEADLESS), label="method")
    model = tiny.target(kind, seed=seed, vocab=vocab)
    prompt = tiny.prompt(seed, prompt_length, vocab)
    expected, margin = tiny.plain(model, prompt, max_new_tokens)
    # Forwards of one row and of many round differently, so where the target itself hardly prefers one token over another,
    # either is its greedy choice, and there is nothing to compare.
    assume(margin > 1e-4)
    stop = set() if stop_at is None else {expected[stop_at % len(expected)]}

    draft = tiny.drafter(model, head, seed=seed, block_size=block_size, own=own)
    draft.future, draft.boost = prompt + expected, boost
    decoder = tiny.decoder(model, draft, method, top_k=top_k, budget=budget, frontier=frontier, candidates=candidates)
    result = decoder.generate(prompt, max_new_tokens=max_new_tokens, stop_token_ids=sorted(stop))
    assert result.token_ids == cut(expected, stop)
    assert result.finish_reason == ("stop" if stop else "length")
    assert (result.method, result.prompt_tokens, result.text) == (method, prompt_length, None)
    check_statistics(decoder, result, cut(expected, stop))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_stop_token_ends_as_in_generate(kind):
    model = tiny.target(kind, seed=3)
    prompt = tiny.prompt(1, 6)
    free, _ = tiny.plain(model, prompt, 40)
    draft = tiny.drafter(model, "vanilla")
    draft.future, draft.boost = prompt + free, KNOWS_ALL
    decoder = tiny.decoder(model, draft)
    for stop in sorted(set(free)):
        expected, _ = tiny.plain(model, prompt, 40, eos_token_id=stop)
        result = decoder.generate(prompt, max_new_tokens=40, stop_token_ids=[stop])
        assert result.token_ids == expected
        assert result.finish_reason == "stop"
        check_statistics(decoder, result, expected)


def test_the_targets_own_stop_tokens_are_the_default():
    model = tiny.target(seed=3)
    prompt = tiny.prompt(1, 6)
    free, _ = tiny.plain(model, prompt, 20)
    model.generation_config.eos_token_id = [free[9]]
    decoder = tiny.decoder(model, tiny.drafter(model))
    assert decoder.generate(prompt, max_new_tokens=20).token_ids == cut(free, {free[9]})
    assert decoder.generate(prompt, max_new_tokens=20, stop_token_ids=[]).token_ids == free


def test_a_stop_inside_a_long_round_wins_over_the_length_limit():
    # Six are accepted, the third of them stops, the limit is the fifth.
    model = tiny.target("llama", seed=1)  # its first forty tokens hardly repeat
    prompt = tiny.prompt(1, 5)
    free, _ = tiny.plain(model, prompt, 20)
    assert free[3] not in free[:3]
    draft = tiny.drafter(model, "vanilla", block_size=6)
    draft.future, draft.boost = prompt + free, KNOWS_ALL
    result = tiny.decoder(model, draft).generate(prompt, max_new_tokens=6, stop_token_ids=[free[3]])
    assert result.token_ids == free[:4]
    assert (result.finish_reason, result.stats.acceptance_lengths) == ("stop", [3])
    # The same without a stop: cut to the limit, while the round counts all that it found.
    result = tiny.decoder(model, draft).generate(prompt, max_new_tokens=6, stop_token_ids=[])
    assert (result.token_ids, result.finish_reason, result.stats.acceptance_lengths) == (free[:6], "length", [7])


@tiny.examples(30)
@given(
    head=st.sampled_from(tiny.HEADS),
    block_size=st.integers(1, 16),
    boost=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 10**4),
)
def test_k_of_one_is_the_chain_round_for_round(head, block_size, boost, seed):
    model = tiny.target(seed=seed)
    prompt = tiny.prompt(seed, 5)
    expected, margin = tiny.plain(model, prompt, 30)
    assume(margin > 1e-4)
    draft = tiny.drafter(model, head, seed=seed, block_size=block_size)
    draft.future, draft.boost = prompt + expected, boost
    tree = tiny.decoder(model, draft, "pctree", top_k=1, budget=block_size + 1)
    chain = tree.with_settings(method="dspark", top_k=4, budget=64)  # a chain has no k, and no more nodes than B + 1
    for mine, theirs in zip(tiny.rounds(tree, prompt, 30), tiny.rounds(chain, prompt, 30), strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.path == theirs.path
        assert mine.tree.token_ids.equal(theirs.tree.token_ids)
        assert mine.tree.parents.equal(theirs.tree.parents)


@pytest.mark.parametrize("head", [*tiny.HEADS, None])
@pytest.mark.parametrize("frontier", ["capped", "exact"])
def test_a_drafter_that_knows_all_is_accepted_whole(head, frontier):
    # Fails if a slot is read one too early or too late, or if the block is seeded at the wrong position.
    model = tiny.target(seed=2)
    prompt = tiny.prompt(2, 5)
    future, _ = tiny.plain(model, prompt, 60)
    draft = tiny.drafter(model, head, block_size=5)
    draft.future, draft.boost = prompt + future, KNOWS_ALL
    for method in sorted(METHODS) if head else HEADLESS:
        result = tiny.decoder(model, draft, method, frontier=frontier).generate(prompt, max_new_tokens=43)
        expected = [1] * 42 if method == "ar" else [6] * 7
        assert result.stats.acceptance_lengths == expected, method
        assert result.token_ids == future[:43]


@pytest.mark.parametrize("head", [*tiny.HEADS, None])
def test_a_random_drafter_is_near_chance(head):
    # Acceptance that is exactly 1, or far above 1 in V, would mean features from a wrong place.
    lengths = []
    for seed in range(6):
        model = tiny.target("llama", seed=seed, vocab=64)
        draft = tiny.drafter(model, head, seed=seed + 50, own=True)
        decoder = tiny.decoder(model, draft, "dspark" if head else "dflash")
        lengths += decoder.generate(tiny.prompt(seed, 6, 64), max_new_tokens=60).stats.acceptance_lengths
    tau = sum(lengths) / len(lengths)
    assert 1.0 < tau < 1.1  # 1 + 1/64 on average, with room for repeated tokens


def test_features_reach_the_drafter_as_a_fresh_prefill_would_give_them():
    # Round by round, the drafter's context is that of a cold run on the same tokens.
    model = tiny.target(seed=8)
    prompt = tiny.prompt(8, 4)
    future, _ = tiny.plain(model, prompt, 60)
    draft = tiny.drafter(model, "vanilla", block_size=4)
    draft.future, draft.boost = prompt + future, 4.0
    decoder = tiny.decoder(model, draft)
    tokens, lengths = list(prompt), set()
    for done in tiny.rounds(decoder, prompt, 40):
        if done.path:
            cold = next(r for r in tiny.rounds(decoder, tokens[:-1], 2) if r.path)
            assert cold.tree.token_ids.equal(done.tree.token_ids)
            assert torch.allclose(cold.tree.log_probs, done.tree.log_probs, atol=1e-3)
            lengths.add(len(done.path))
        tokens += done.token_ids
    assert len(lengths) > 2  # short and long paths were among them


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("max_new_tokens", [4, 100])
@pytest.mark.parametrize("prompt_length", [36, 39])
def test_decoding_ends_at_the_context_limit(method, max_new_tokens, prompt_length):
    model = tiny.target(max_length=40)
    prompt = tiny.prompt(9, prompt_length)
    draft = tiny.drafter(model, "rnn")
    left = min(max_new_tokens, 40 - prompt_length)
    expected, _ = tiny.plain(model, prompt, left)
    for boost in (0.0, KNOWS_ALL):
        draft.future, draft.boost = prompt + expected, boost
        result = tiny.decoder(model, draft, method, budget=16).generate(prompt, max_new_tokens=max_new_tokens)
        assert (result.token_ids, result.finish_reason) == (expected, "length")


@pytest.mark.parametrize("rope", [tiny.LLAMA3_ROPE, tiny.YARN_ROPE], ids=["llama3", "yarn"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_rope_scaling_in_target_and_drafter(kind, rope):
    model = tiny.target(kind, seed=1, rope=rope)
    prompt = tiny.prompt(1, 20)
    expected, _ = tiny.plain(model, prompt, 60)
    draft = tiny.drafter(model, "gated", rope=rope)
    draft.future, draft.boost = prompt + expected, 4.0
    assert tiny.decoder(model, draft).generate(prompt, max_new_tokens=60).token_ids == expected


def test_dynamic_rope_near_the_context_limit():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    for seed in range(8):
        model = tiny.target("llama", seed=seed, max_length=40, rope=rope)
        prompt = tiny.prompt(seed, 20)
        expected, _ = tiny.plain(model, prompt, 20)
        decoder = tiny.decoder(model, tiny.drafter(model, "vanilla", block_size=16), budget=64)
        assert decoder.generate(prompt, max_new_tokens=20).token_ids == expected


def test_a_drafter_with_a_shorter_position_limit():
    model = tiny.target(max_length=64)
    prompt = tiny.prompt(3, 10)
    expected, _ = tiny.plain(model, prompt, 54)
    draft = tiny.drafter(model, "vanilla", max_length=32)
    draft.future, draft.boost = prompt + expected, 3.0
    result = tiny.decoder(model, draft).generate(prompt, max_new_tokens=54)
    assert result.token_ids == expected


def test_a_target_that_emits_the_mask_token():
    model = tiny.target(seed=4)
    prompt = tiny.prompt(4, 6)
    expected, _ = tiny.plain(model, prompt, 40)
    mask_id = max(set(expected), key=expected.count)
    assert expected.count(mask_id) > 2
    draft = tiny.drafter(model, "vanilla", mask_token_id=mask_id)
    draft.future, draft.boost = prompt + expected, 4.0
    assert tiny.decoder(model, draft).generate(prompt, max_new_tokens=40).token_ids == expected
    # A prompt may hold it too.
    expected, _ = tiny.plain(model, [mask_id, mask_id, 1], 20)
    assert tiny.decoder(model, draft).generate([mask_id, mask_id, 1], max_new_tokens=20).token_ids == expected


def test_plain_decoding_needs_no_drafter_and_taps_nothing():
    model = tiny.target()
    decoder = tiny.decoder(model, None, "ar")
    expected, _ = tiny.plain(model, [5, 6, 7], 20)
    result = decoder.generate([5, 6, 7], max_new_tokens=20)
    assert result.token_ids == expected
    assert result.stats.acceptance_lengths == result.stats.nodes == [1] * 19
    tapped = tiny.decoder(model, tiny.drafter(model)).with_settings(method="ar")
    assert tapped.target.feature_layers == []
    assert tapped.generate([5, 6, 7], max_new_tokens=20).token_ids == expected


def test_stream_grows_into_the_result_of_generate():
    model = tiny.target(seed=5)
    prompt = tiny.prompt(5, 6)
    future, _ = tiny.plain(model, prompt, 40)
    draft = tiny.drafter(model, "vanilla")
    draft.future, draft.boost = prompt + future, 4.0
    decoder = tiny.decoder(model, draft)
    whole = decoder.generate(prompt, max_new_tokens=40)
    seen, rounds = [], []
    for result, done in decoder.stream(prompt, max_new_tokens=40):
        seen.append(list(result.token_ids))
        rounds.append(done)
    assert rounds[0] is None  # prefill
    assert len(seen[0]) == 1
    for (earlier, later), done in zip(pairwise(seen), rounds[1:], strict=True):
        assert later == earlier + done.token_ids
    assert seen[-1] == whole.token_ids
    assert len(rounds) == 1 + whole.stats.rounds


def test_every_round_shows_a_path_of_its_own_tree():
    model = tiny.target(seed=5)
    prompt = tiny.prompt(5, 6)
    future, _ = tiny.plain(model, prompt, 40)
    draft = tiny.drafter(model, "gated")
    draft.future, draft.boost = prompt + future, 4.0
    tokens = list(prompt)
    for done in tiny.rounds(tiny.decoder(model, draft), prompt, 30):
        if done.path:
            assert int(done.tree.token_ids[0, 0]) == tokens[-1]
            assert done.path == tiny.root_path(done.tree, 0, done.path[-1])
            drafted = done.tree.token_ids[0, done.path[1:]].tolist()
            assert done.token_ids[: len(drafted)] == drafted[: len(done.token_ids)]
        tokens += done.token_ids


def test_a_stream_dropped_half_way_leaves_the_decoder_usable():
    model = tiny.target(seed=6)
    decoder = tiny.decoder(model, tiny.drafter(model, "rnn"))
    whole = decoder.generate([1, 2, 3], max_new_tokens=30)
    before = model.config._attn_implementation
    dropped = decoder.stream([4, 5, 6], max_new_tokens=30)
    for _ in range(3):
        next(dropped)
    # Another request runs while the first is still open, and again after it is gone.
    assert decoder.generate([1, 2, 3], max_new_tokens=30).token_ids == whole.token_ids
    dropped.close()
    assert decoder.generate([1, 2, 3], max_new_tokens=30).token_ids == whole.token_ids
    assert model.config._attn_implementation == before
    assert not torch.is_inference_mode_enabled()


@pytest.mark.memory
def test_nothing_is_kept_after_a_request():
    model = tiny.target()
    decoder = tiny.decoder(model, tiny.drafter(model))

    def caches() -> int:
        gc.collect()
        return sum(type(thing) is KVCache for thing in gc.get_objects())

    before = caches()
    for seed in range(200):
        decoder.generate(tiny.prompt(seed, 3), max_new_tokens=5)
    assert caches() == before


def test_prompts_that_cannot_be_decoded_are_refused():
    model = tiny.target(max_length=40)
    decoder = tiny.decoder(model, tiny.drafter(model))
    for prompt, message in (
        ([], "the prompt is empty"),
        ([1, 40, 2], "token id 40, outside the target's vocabulary of 40"),
        ([1, -1], "token id -1, outside"),
        ([1] * 40, "the prompt has 40 tokens but the target's context holds 40; shorten it"),
        ([1] * 99, "the prompt has 99 tokens"),
        ("text", "no tokenizer; give the prompt as token ids"),
        ("", "the prompt is empty"),
        ([{"role": "user", "content": "hi"}], "no tokenizer"),
    ):
        with pytest.raises(UsageError, match=message):
            decoder.generate(prompt)
    for limit in (0, -3):
        with pytest.raises(UsageError, match=f"max_new_tokens is {limit}; it must be at least 1"):
            decoder.generate([1, 2], max_new_tokens=limit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tree"}, "method is 'tree'; the methods are ar, dspark, .*pctree"),
        ({"frontier": "wide"}, "frontier is 'wide'; it is one of capped, exact"),
        ({"budget": 0}, "budget is 0; it must be at least 1"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"confidence_threshold": 1.5}, "confidence_threshold is 1.5; it must be between 0 and 1"),
        ({"confidence_threshold": 0.5}, "confidence_threshold cuts a chain, which pctree does not draft"),
        ({"confidence_threshold": 0.5, "method": "dspark"}, "confidence_threshold needs a confidence head"),
        ({"candidates": -1}, "candidates is -1; it must be at least 1"),
        ({"top_k": 41}, "top_k is 41; it must not be above the drafter's vocabulary of 40"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    model = tiny.target()
    draft = tiny.drafter(model)
    with pytest.raises(UsageError, match=message):
        tiny.decoder(model, draft, **options)
    with pytest.raises(UsageError, match=message):
        tiny.decoder(model, draft).with_settings(**options)


def test_methods_are_refused_a_drafter_that_lacks_what_they_need():
    model = tiny.target()
    for method in sorted(METHODS.keys() - {"ar"}):
        with pytest.raises(UsageError, match=f"method {method} needs a drafter; name one, or use method ar"):
            tiny.decoder(model, None, method)
    headless = tiny.drafter(model, None)
    for method in sorted(METHODS.keys() - set(HEADLESS)):
        with pytest.raises(UsageError, match=f"method {method} needs a Markov head.*use dflash or ddtree"):
            tiny.decoder(model, headless, method)


def test_a_target_that_taps_other_layers_is_refused():
    # The same number of layers, so nothing fails by its shape: it would run, at low acceptance.
    model = tiny.target()
    with pytest.raises((UsageError, ValueError), match="target_layer_ids"):
        SpeculativeDecoder(TargetModel(model, [0, 1]), tiny.drafter(model, layer_ids=[-1, 1]))


def test_statistics_of_nothing_are_zeros():
    stats = Statistics()
    assert (stats.rounds, stats.acceptance_length, stats.tree_nodes, stats.tokens_per_second) == (0, 0.0, 0.0, 0.0)
    assert set(stats.to_dict()["stage_ms"]) == set(STAGES)


def test_statistics_of_a_log_made_by_hand():
    stats = Statistics(acceptance_lengths=[3, 1, 5], nodes=[8, 8, 4], new_tokens=9, seconds=2.0)
    assert (stats.rounds, stats.acceptance_length, stats.tree_nodes, stats.tokens_per_second) == (3, 3.0, 20 / 3, 4.0)


def test_batched_requests_of_different_lengths_draft_as_alone():
    model = tiny.target(seed=7)
    draft = tiny.drafter(model, "vanilla")
    lengths = [20, 3, 8, 11]
    features = torch.randn(4, 20, 3 * tiny.HIDDEN, generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([1, 2, 3, 4])
    together = draft.new_cache(4, 20)
    draft.extend(together, features)
    together.lengths = torch.tensor(lengths)  # rows behind a request's own length are somebody's leftovers
    hidden, logits = DSparkDrafter.draft_block(draft, together, anchors)
    for request, length in enumerate(lengths):
        alone = draft.new_cache(1, length)
        for start, end in pairwise([0, length // 2, length]):  # and in two pieces, as rounds deliver it
            draft.extend(alone, features[request : request + 1, start:end])
        single_hidden, single = DSparkDrafter.draft_block(draft, alone, anchors[request : request + 1])
        assert torch.allclose(hidden[request], single_hidden[0], atol=1e-4)
        assert torch.allclose(logits[request], single[0], atol=1e-4)
