"""``model.generate(custom_generate=…)`` returns what ``model.generate`` returns."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from pctree import CheckpointError, UsageError, custom_generate


@pytest.fixture(scope="module")
def model():
    return tiny.target("qwen3", seed=3)


@pytest.fixture(scope="module")
def loop(model):
    return custom_generate(tiny.drafter(model, "gated"), budget=16)


def inputs(*prompts: list[int]) -> dict[str, torch.Tensor]:
    """A batch padded on the left."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


BATCHES = [inputs(tiny.prompt(1, 8)), inputs(tiny.prompt(1, 8), tiny.prompt(2, 3), tiny.prompt(3, 12))]


@pytest.mark.parametrize("batch", BATCHES, ids=["one", "padded"])
@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"eos_token_id": [5, 9, 17]}, {"max_length": 20},
     {"eos_token_id": 9, "min_new_tokens": 12}, {"bad_words_ids": [[7], [3, 4]]}],
)  # fmt: skip
def test_greedy_sequences_are_those_of_generate(model, loop, batch, options):
    options = {"do_sample": False, "pad_token_id": 0, **({} if "max_length" in options else {"max_new_tokens": 18}), **options}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, custom_generate=loop, **options), expected)


def test_scores_and_logits_where_asked(model, loop):
    options = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, "repetition_penalty": 1.3,
               "return_dict_in_generate": True, "output_scores": True, "output_logits": True}  # fmt: skip
    expected = model.generate(**BATCHES[0], **options)
    found = model.generate(**BATCHES[0], custom_generate=loop, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores) == 10
    for mine, theirs in zip((*found.scores, *found.logits), (*expected.scores, *expected.logits), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_own_processors_and_criteria_are_used(model, loop):
    class Odd:
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.arange(0, 40, 2), -torch.inf)

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, 8:].sum(-1) > 100).to(torch.bool)

    options = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0,
               "logits_processor": LogitsProcessorList([Odd()]),
               "stopping_criteria": StoppingCriteriaList([After()])}  # fmt: skip
    expected = model.generate(**BATCHES[0], **options)
    assert expected.shape[1] < 38
    assert torch.equal(model.generate(**BATCHES[0], custom_generate=loop, **options), expected)


def test_sampling_follows_torchs_seed(model, loop):
    options = {"do_sample": True, "max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "pad_token_id": 0}

    def sampled(seed):
        torch.manual_seed(seed)
        return model.generate(**BATCHES[0], custom_generate=loop, **options).tolist()

    assert sampled(1) == sampled(1)
    assert len({str(sampled(seed)) for seed in range(5)}) > 1


def test_what_it_cannot_do_is_refused(model, loop):
    with pytest.raises(UsageError, match="num_beams is 2"):
        model.generate(**BATCHES[0], custom_generate=loop, num_beams=2, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(UsageError, match="output_attentions"):
        model.generate(**BATCHES[0], custom_generate=loop, max_new_tokens=4, pad_token_id=0, output_attentions=True,
                       return_dict_in_generate=True)  # fmt: skip
    other = custom_generate(tiny.drafter(tiny.target("qwen3", vocab=24)))
    with pytest.raises(CheckpointError, match="vocabulary is 24"):
        model.generate(**BATCHES[0], custom_generate=other, max_new_tokens=4, pad_token_id=0)
