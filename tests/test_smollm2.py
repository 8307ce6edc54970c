"""The pair that ships with pctree, in float32, against transformers' own greedy decoding."""

from __future__ import annotations

import os

import pytest
import torch

from pctree import PCTreeError, SpeculativeDecoder, smollm2

# On one worker, so that the target is de-quantised and loaded once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

METHODS = ("ar", "dspark", "shared-markov", "pctree", "dflash", "ddtree")
# Prompt, length limit, and after how many new tokens the stop token comes (None: only the target's own).
CASES = [
    ("What is gravity?", 13, None),
    ("Write a Python function that adds two numbers.", 22, None),
    ("List three fruits.", 16, 5),
    ("Tom has 3 apples and buys 4 more. How many does he have?", 18, None),
    ("Say hello.", 9, None),
    ("Translate 'good morning' into French.", 11, 3),
    ("Write a haiku about rain.", 14, None),
    ("Explain photosynthesis in one sentence.", 17, None),
    ("What is the capital of Italy?", 9, None),
    ("Count from one to ten.", 20, 11),
    ("Give me a recipe for pancakes.", 16, None),
    ("Who wrote Hamlet?", 12, None),
    ("def fibonacci(n):", 20, None),
    ("Solve 2x + 3 = 11 for x.", 15, 7),
    ("Write an email asking for a day off.", 19, None),
    ("Why do cats purr?", 13, None),
    ("Describe a sunset.", 1, None),
    ("Name a prime number above 50.", 2, None),
    ("Repeat the word 'blue' five times.", 14, 2),
    ("What does HTTP stand for?", 10, None),
    ("Hi", 7, 1),
]


@pytest.fixture(scope="module")
def decoder():
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    try:
        yield SpeculativeDecoder.from_pretrained(dtype="float32", device="cpu")
    except PCTreeError as error:
        pytest.skip(f"the pair is not here: {error}")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("prompt", "limit", "stop_after"), CASES)
def test_tokens_equal_generate(decoder, prompt, limit, stop_after):
    from pctree.prompts import encode_prompt

    ids = torch.tensor([encode_prompt(decoder.tokenizer, prompt)])
    model = decoder.target.model
    options = {"do_sample": False, "max_new_tokens": limit, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    stop_ids = None
    if stop_after is not None:
        stop_ids = [*decoder.target.eos_token_ids, expected[min(stop_after, len(expected) - 1)]]
        expected = model.generate(ids, eos_token_id=stop_ids, **options)[0, ids.shape[1] :].tolist()
    for method in METHODS:
        reader = decoder.with_settings(method=method)
        result = reader.generate(prompt, max_new_tokens=limit, stop_token_ids=stop_ids)
        assert result.token_ids == expected, method
    exact = decoder.with_settings(frontier="exact", budget=24).generate(prompt, max_new_tokens=limit, stop_token_ids=stop_ids)
    assert exact.token_ids == expected


def test_the_tree_commits_more_than_the_chain(decoder):
    """Not a benchmark: only that the shipped drafter is a drafter, and that branching and conditioning help it."""
    lengths = {}
    for method in ("dspark", "pctree"):
        reader = decoder.with_settings(method=method)
        done = [reader.generate(prompt, max_new_tokens=24).stats.acceptance_lengths for prompt, _, _ in CASES[:6]]
        lengths[method] = sum(map(sum, done)) / sum(map(len, done))
    assert 1.3 < lengths["dspark"] < lengths["pctree"]


@pytest.mark.parametrize("name", smollm2.DRAFTERS)
def test_the_drafters_travel_with_the_package(name):
    folder = smollm2.drafter_path(name)
    assert (folder / "model.safetensors").stat().st_size <= 45e6
    assert (folder / "README.md").exists()
    assert (folder / "draft_vocabulary.json").exists()


def test_the_drafters_are_small_together():
    assert sum(file.stat().st_size for file in smollm2.drafter_path().parent.rglob("*.safetensors")) <= 130e6


def test_a_wrong_gguf_is_refused(tmp_path):
    file = tmp_path / smollm2.GGUF
    file.write_bytes(b"GGUF")
    with pytest.raises(PCTreeError, match="SHA-256"):
        smollm2._checked(file)
