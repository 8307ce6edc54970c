"""What DeepSpec's own code gave for small trained pairs (``shared/golden``): the referee for compatibility."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pctree import DraftSettings, SpeculativeDecoder
from pctree.methods import Block

DRAFTERS = ("dspark_vanilla_b7", "dspark_gated_b7", "dspark_rnn_b7", "dspark_vanilla_b16", "dflash_b7")
# How a tree is read, and the chain that reads the same distributions.
TREES = {
    "pctree, k=4": ({"method": "pctree"}, "dspark"),
    "pctree, exact": ({"method": "pctree", "frontier": "exact"}, "dspark"),
    "shared-markov": ({"method": "shared-markov"}, "dspark"),
    "ddtree": ({"method": "ddtree"}, "dflash"),
}
READINGS = [
    pytest.param(name, *how, id=f"{name}-{label}")
    for name in DRAFTERS
    for label, how in TREES.items()
    if name != "dflash_b7" or how[1] == "dflash"  # it has no Markov head
]
# DeepSpec's loop runs until 96 tokens besides the pending bonus token, the next anchor, are committed. Ours counts that
# token too, so its rounds are those of a limit of 97.
EVALUATOR_LIMIT = 97


@cache
def load(golden: Path, name: str) -> tuple[SpeculativeDecoder, list[dict], float]:
    """The pair with its trained chain, the cases, and the mean acceptance length that DeepSpec found."""
    expected = json.loads((golden / f"{name}.expected.json").read_text())
    method = "dflash" if name.startswith("dflash") else "dspark"
    decoder = SpeculativeDecoder.from_pretrained(
        str(golden / "target"), str(golden / name), method=method, dtype="float32", device="cpu"
    )
    assert len(expected["cases"]) > 1
    return decoder, expected["cases"], expected["deepspec_tau"]


@torch.inference_mode()
def first_block(decoder: SpeculativeDecoder, case: dict) -> Block:
    """The block behind the prompt."""
    prompt = case["prompt_ids"]
    target, drafter = decoder.target, decoder.drafter
    cache = target.new_cache(1, len(prompt))
    logits, features = target.prefill(cache, torch.tensor([prompt]))
    anchor = logits.argmax(-1)
    context = drafter.new_cache(1, len(prompt))
    drafter.extend(context, features)
    return Block(drafter, context, anchor, *drafter.draft_block(context, anchor))


@pytest.mark.tree
@pytest.mark.parametrize("name", DRAFTERS)
def test_first_block(golden, name):
    decoder, cases, _ = load(golden, name)
    head, confidence = decoder.drafter.markov_head, decoder.drafter.confidence_head
    for case in cases:
        block = first_block(decoder, case)
        anchor, hidden, base_logits = block.anchors, block.hidden, block.logits
        assert anchor.tolist() == [case["anchor"]]
        for slot, key in ((0, "first_block_base_logits_row0"), (-1, "first_block_base_logits_last")):
            assert torch.allclose(base_logits[0, slot], torch.tensor(case[key]), atol=1e-4), key

        # Walk the greedy chain by hand: the corrected logits of the last slot are those along it.
        chain, state, previous = [], head.initial_state(1) if head else None, anchor[:, None]
        confidences = []
        with torch.inference_mode():
            for slot in range(decoder.drafter.block_size):
                corrected, here = base_logits[:, slot : slot + 1], hidden[:, slot : slot + 1]
                if confidence is not None:
                    embedded = head.markov_w1(previous) if confidence.with_markov else None
                    confidences.append(float(confidence(here, embedded)[0, 0]))
                if head is not None:
                    latent, state = head(previous, here, state)
                    corrected = corrected + head.bias(latent)
                previous = corrected.argmax(-1)
                chain.append(int(previous))
        assert chain == case["first_block_chain"]
        assert torch.allclose(corrected[0, 0], torch.tensor(case["first_block_corrected_logits_last"]), atol=1e-4)
        if case["first_block_confidence"] is None:
            assert confidence is None
        else:
            assert confidences == pytest.approx(case["first_block_confidence"], abs=1e-4)

        tree = decoder.settings.grow(block)
        assert tree.token_ids[0].tolist() == [case["anchor"], *chain]


@pytest.mark.tree
@pytest.mark.parametrize("name", DRAFTERS)
def test_chain_round_for_round(golden, name):
    decoder, cases, tau = load(golden, name)
    lengths = []
    for case in cases:
        result = decoder.generate(case["prompt_ids"], max_new_tokens=EVALUATOR_LIMIT)
        assert result.stats.acceptance_lengths == case["acceptance_lengths"]
        # Their output is cut to 96 tokens.
        assert case["prompt_ids"] + result.token_ids[:96] == case["output_ids"] == case["greedy_ids"]
        lengths += result.stats.acceptance_lengths
    assert sum(lengths) / len(lengths) == pytest.approx(tau, abs=5e-5)  # rounded to four digits there


@pytest.mark.tree
@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_a_confidence_threshold_verifies_fewer_positions(golden, threshold):
    decoder, cases, _ = load(golden, "dspark_vanilla_b7")
    cut = decoder.with_settings(confidence_threshold=threshold)
    results = [cut.generate(case["prompt_ids"], max_new_tokens=EVALUATOR_LIMIT) for case in cases]
    for case, result in zip(cases, results, strict=True):
        expected = case[f"threshold_{threshold}"]
        assert result.stats.acceptance_lengths == expected["acceptance_lengths"]
        assert [nodes - 1 for nodes in result.stats.nodes] == expected["proposal_lengths"]
        assert case["prompt_ids"] + result.token_ids[:96] == case["output_ids"]
    # Together, each request keeps its own cut.
    together = cut.generate([case["prompt_ids"] for case in cases], max_new_tokens=EVALUATOR_LIMIT)
    for alone, mine in zip(results, together, strict=True):
        assert (mine.token_ids, mine.stats.nodes) == (alone.token_ids, alone.stats.nodes)
        assert mine.stats.acceptance_lengths == alone.stats.acceptance_lengths


@pytest.mark.tree
def test_recorded_confidence_is_deepspecs(golden):
    decoder, cases, _ = load(golden, "dspark_vanilla_b7")
    recording = decoder.with_settings(record_confidence=True)
    for case in cases:
        tree = recording.settings.grow(first_block(decoder, case))
        assert tree.confidence[0].tolist() == pytest.approx([1.0, *case["first_block_confidence"]], abs=1e-4)


@pytest.mark.parametrize(("name", "how", "chain"), READINGS)
def test_trees_give_the_greedy_tokens_in_fewer_rounds(golden, name, how, chain):
    decoder, cases, _ = load(golden, name)
    rounds = []
    for reading in (how, {"method": chain}):
        results = [decoder.with_settings(**reading).generate(case["prompt_ids"], max_new_tokens=96) for case in cases]
        for case, result in zip(cases, results, strict=True):
            assert case["prompt_ids"] + result.token_ids == case["greedy_ids"]
        rounds.append(sum(result.stats.rounds for result in results))
    assert rounds[0] < rounds[1]


def test_plain_decoding_gives_the_greedy_tokens(golden):
    decoder, cases, _ = load(golden, DRAFTERS[0])
    result = decoder.with_settings(method="ar").generate(cases[0]["prompt_ids"], max_new_tokens=96)
    assert cases[0]["prompt_ids"] + result.token_ids == cases[0]["greedy_ids"]
    assert result.stats.acceptance_lengths == [1] * 95


@pytest.mark.tree
@pytest.mark.parametrize("name", DRAFTERS[:3])
def test_pctree_with_k_of_one_is_the_golden_chain(golden, name):
    decoder, cases, _ = load(golden, name)
    narrow = decoder.with_settings(method="pctree", top_k=1, budget=decoder.drafter.block_size + 1)
    for case in cases[:2]:
        result = narrow.generate(case["prompt_ids"], max_new_tokens=EVALUATOR_LIMIT)
        assert result.stats.acceptance_lengths == case["acceptance_lengths"]


def test_exact_frontier_finds_what_the_capped_one_drops(golden):
    # Of one block, the exact frontier's nodes hold at least as much probability as those of any k.
    decoder, cases, _ = load(golden, "dspark_vanilla_b7")
    for case in cases:
        block = first_block(decoder, case)
        exact = DraftSettings("pctree", frontier="exact").grow(block)
        for k in (1, 2, 4, 8, 128):
            capped = DraftSettings("pctree", top_k=k).grow(block)
            assert exact.log_probs.exp().sum() >= capped.log_probs.exp().sum() - 1e-5


def test_bfloat16_differs_only_at_near_ties(golden):
    # A forward of many rows and one of one row round differently; where tokens part, the target hardly cared.
    _, cases, _ = load(golden, "dspark_vanilla_b7")
    decoder = SpeculativeDecoder.from_pretrained(
        str(golden / "target"), str(golden / "dspark_vanilla_b7"), dtype="bfloat16", device="cpu"
    )
    exact = AutoModelForCausalLM.from_pretrained(golden / "target", dtype=torch.float32).eval()
    for case in cases:
        prompt = case["prompt_ids"]
        tree = decoder.generate(prompt, max_new_tokens=96).token_ids
        plain = decoder.with_settings(method="ar").generate(prompt, max_new_tokens=96).token_ids
        parted = next((i for i, pair in enumerate(zip(tree, plain, strict=True)) if pair[0] != pair[1]), None)
        if parted is not None:
            with torch.inference_mode():
                logits = exact(torch.tensor([prompt + plain[:parted]])).logits[0, -1]
            assert (logits[tree[parted]] - logits[plain[parted]]).abs() < 0.25


# --- z-lab's DFlash layout, with DDTree's official trees


@pytest.fixture(scope="module")
def zlab(golden):
    expected = json.loads((golden / "dflash_zlab_b8.expected.json").read_text())["cases"]
    reader = SpeculativeDecoder.from_pretrained(
        str(golden / "target"), str(golden / "dflash_zlab_b8"), method="dflash", dtype="float32", device="cpu"
    )
    return reader, expected


@pytest.mark.tree
def test_mask_filling_chain_equals_the_official_one(zlab):
    reader, cases = zlab
    assert reader.drafter.config.draft_length == 7
    for case in cases:
        result = reader.generate(case["prompt_ids"], max_new_tokens=97)
        assert result.stats.acceptance_lengths == case["chain_acceptance_lengths"]
        assert [*case["prompt_ids"], *result.token_ids[:96]] == case["greedy_ids"]


@pytest.mark.tree
@pytest.mark.parametrize("budget", [8, 16, 32, 64])
def test_ddtree_grows_the_official_trees(zlab, budget):
    """The first tree node for node, and every round's acceptance length. DDTree lists nodes as its heap pops them, which is
    our order, by path probability; its tree leaves the root out.
    """
    reader, cases = zlab
    reader = reader.with_settings(method="ddtree", budget=budget)
    for case in cases:
        expected = case[f"ddtree_{budget}"]
        rounds = [done for _, done in reader.decode([reader.request(case["prompt_ids"], max_new_tokens=97)])]
        first = rounds[1].tree
        assert first.token_ids[0, 1:].tolist() == expected["first_tree"]["node_token_ids"]
        assert first.depths[0, 1:].tolist() == expected["first_tree"]["node_depths"]
        assert first.parents[0, 1:].tolist() == expected["first_tree"]["parents"][1:]
        result = reader.generate(case["prompt_ids"], max_new_tokens=97)
        assert result.stats.acceptance_lengths == expected["acceptance_lengths"]


# --- EAGLE-3


@pytest.mark.tree
def test_eagle3_chain_equals_deepspecs(golden):
    cases = json.loads((golden / "eagle3_ttt7.expected.json").read_text())["cases"]
    chain = SpeculativeDecoder.from_pretrained(
        str(golden / "target"), str(golden / "eagle3_ttt7"), method="eagle3", top_k=1, dtype="float32", device="cpu"
    )
    tree = chain.with_settings(top_k=4)
    for case in cases:
        result = chain.generate(case["prompt_ids"], max_new_tokens=97)
        assert result.stats.acceptance_lengths == case["acceptance_lengths"]
        assert [*case["prompt_ids"], *result.token_ids[:96]] == case["output_ids"] == case["greedy_ids"]
        assert tree.generate(case["prompt_ids"], max_new_tokens=96).token_ids == result.token_ids[:96]
