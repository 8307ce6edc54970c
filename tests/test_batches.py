"""Requests decoded together get what they get alone, and leave nothing behind."""

from __future__ import annotations

import gc
import random

import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from pctree import DraftSettings, SamplingParams, SpeculativeDecoder, TargetModel, UsageError


@tiny.examples(12)
@given(
    seed=st.integers(0, 10_000),
    head=st.sampled_from([*tiny.HEADS, None]),
    kind=st.sampled_from(["qwen3", "llama"]),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20)), min_size=1, max_size=16),
    places=st.integers(1, 16),
)
def test_a_mix_of_requests_equals_one_at_a_time(seed, head, kind, lengths, places):
    model = tiny.target(kind, seed=seed % 7)
    draft = tiny.drafter(model, head, seed=seed % 5)
    reader = tiny.decoder(model, draft, "pctree" if head else "ddtree", budget=12)
    prompts = [tiny.prompt(seed + i, length) for i, (length, _) in enumerate(lengths)]
    stop = tiny.plain(model, prompts[0], 6)[0][3:4]
    params = [SamplingParams(max_new_tokens=limit, stop_token_ids=[] if i % 3 else stop,
                             repetition_penalty=1.3 if i % 4 else 1.0) for i, (_, limit) in enumerate(lengths)]  # fmt: skip
    together = reader.generate(prompts, params, max_batch_size=places)
    for prompt, param, result in zip(prompts, params, together, strict=True):
        alone = reader.generate(prompt, param)
        assert result.token_ids == alone.token_ids
        assert result.finish_reason == alone.finish_reason
        if reader.settings.budget != "auto":  # which looks at all requests together
            assert result.stats.acceptance_lengths == alone.stats.acceptance_lengths


def test_memory_is_what_batch_size_and_length_say(monkeypatch):
    model = tiny.target()
    reader = tiny.decoder(model, tiny.drafter(model), budget=12)
    made = []
    new_batch = type(reader).new_batch
    monkeypatch.setattr(
        type(reader), "new_batch", lambda self, rows, length: made.append((rows, length)) or new_batch(self, rows, length)
    )
    prompts = [tiny.prompt(seed, 4 + seed) for seed in range(5)]
    bounded = reader.generate(prompts, max_new_tokens=6, max_batch_size=2, max_length=20)
    assert made == [(2, 20)]
    assert [r.token_ids for r in bounded] == [r.token_ids for r in reader.generate(prompts, max_new_tokens=6)]
    with pytest.raises(UsageError, match="needs 14 tokens, prompt and output, but max_length is 13"):
        reader.generate(prompts, max_new_tokens=6, max_length=13)


def text_decoder(seed: int = 2) -> SpeculativeDecoder:
    model = tiny.target("llama", vocab=260, seed=seed)
    draft = tiny.drafter(model, layer_ids=(0, 1))
    return SpeculativeDecoder(TargetModel(model, (0, 1)), draft, byte_tokenizer(), DraftSettings(budget=16))


@tiny.examples(15)
@given(seed=st.integers(0, 50), at=st.integers(0, 25), width=st.integers(1, 4))
def test_stop_strings_end_the_text_where_plain_decoding_would(seed, at, width):
    reader = text_decoder(seed % 3)
    whole = reader.with_settings(method="ar").generate(tiny.prompt(seed, 6, 256), max_new_tokens=40)
    stop = whole.text[at : at + width]
    if not stop or "\N{REPLACEMENT CHARACTER}" in stop:
        return
    result = reader.generate(tiny.prompt(seed, 6, 256), max_new_tokens=40, stop=stop)
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert stop not in result.text
    assert stop in reader.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert stop not in reader.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)
    shown = ""
    for partial, _ in reader.stream(tiny.prompt(seed, 6, 256), max_new_tokens=40, stop=stop):
        assert partial.text.startswith(shown)  # nothing that was shown is ever taken back
        shown = partial.text
    assert shown == result.text


def test_streamed_text_never_shows_half_a_character():
    reader = text_decoder()
    text = "é → 日本"
    ids = reader.tokenizer.encode(text, add_special_tokens=False)
    request = reader.request([1, 2], max_new_tokens=len(ids))
    shown = []
    for token in ids:
        request.commit([token])
        shown.append(request.ready_text)
    assert shown[-1] == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in shown)


def test_a_conversation_reads_only_what_is_new_and_answers_as_if_it_read_all(monkeypatch):
    reader = text_decoder()
    fed = []
    prefill = TargetModel.prefill
    monkeypatch.setattr(
        TargetModel, "prefill", lambda self, cache, ids: (fed.append(ids.shape[1]), prefill(self, cache, ids))[1]
    )
    chat = reader.chat(max_length=500)
    for turn in ("Hi", "And?", "More"):
        answer = chat.send(turn, max_new_tokens=12)
        cold = reader.generate(list(chat.messages[:-1]), max_new_tokens=12)
        assert answer.token_ids == cold.token_ids
        assert answer.stats.acceptance_lengths == cold.stats.acceptance_lengths
    hot, whole = fed[4], fed[5]
    assert hot < whole  # the third turn
    del chat.messages[2:]  # go back to after the first answer
    edited = chat.send("Else?", max_new_tokens=12)
    assert edited.token_ids == reader.generate(list(chat.messages[:-1]), max_new_tokens=12).token_ids


def live_tensor_bytes() -> int:
    """Bytes of all tensors that anything still refers to."""
    gc.collect()
    return sum(o.numel() * o.element_size() for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


@pytest.mark.memory
def test_cancelled_and_edited_requests_leave_no_trace():
    """500 rounds of streams dropped anywhere, batches dropped anywhere, and messages deleted or rewritten."""
    reader = text_decoder()
    expected = reader.generate([5, 6, 7], max_new_tokens=10).token_ids
    chat = reader.chat(max_length=300)
    first = chat.send("Hi", max_new_tokens=8).token_ids
    draw = random.Random(0)
    before = None
    for number in range(500):
        if draw.random() < 0.8:
            stream = chat.stream("x" * draw.randint(1, 8), max_new_tokens=8)
        else:
            prompts = [tiny.prompt(draw.randint(0, 99), draw.randint(2, 9), 260) for _ in range(draw.randint(1, 3))]
            stream = reader.decode([reader.request(ids, max_new_tokens=8) for ids in prompts], max_batch_size=2)
        for _ in range(draw.randint(0, 4)):
            next(stream, None)
        stream.close()
        assert not chat._batch.running
        if chat.messages and draw.random() < 0.5:
            draw.choice(chat.messages)["content"] = "y" * draw.randint(1, 8)
        del chat.messages[draw.randint(0, 3) :]
        if number % 100 == 99:
            held = live_tensor_bytes()
            assert before in (None, held)
            before = held
    chat.messages.clear()
    assert chat.send("Hi", max_new_tokens=8).token_ids == first
    assert reader.generate([5, 6, 7], max_new_tokens=10).token_ids == expected
