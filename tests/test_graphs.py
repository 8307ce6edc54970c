"""Rounds that are recorded and replayed: the same tokens, whatever the length, the tree, the batch or the moment."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay import record

from pctree import METHODS, DraftSettings, SpeculativeDecoder, TargetModel, UsageError
from pctree.economy import ROWS, Economy
from pctree.graphs import Graphs, cuda_graph, row_bucket, span_bucket

PROMPTS = [tiny.prompt(1, 8), tiny.prompt(2, 5), tiny.prompt(3, 11)]
READINGS = {name: {"method": name} for name in METHODS if name != "eagle3"} | {
    "exact": {"frontier": "exact", "budget": 20},
    "candidates": {"candidates": 12},
    "auto": {"budget": "auto"},
    "confidence": {"method": "dspark", "confidence_threshold": 0.4},
}


def pair(head: str = "vanilla", *, recorded: bool = True, **settings) -> SpeculativeDecoder:
    """Twice the same pair, with recordings and without."""
    model = tiny.target(seed=3)
    draft = tiny.drafter(model, head, seed=2, confidence=True)
    draft.future, draft.boost = PROMPTS[0] + tiny.plain(model, PROMPTS[0], 60)[0], 2.5
    target = TargetModel(model, draft.config.target_layer_ids)
    economy = Economy({1: 4.0, 64: 30.0}, 3.0)
    return SpeculativeDecoder(target, draft, None, DraftSettings(**settings), economy, record if recorded else None)


@pytest.mark.parametrize("head", tiny.HEADS)
@pytest.mark.parametrize("reading", READINGS)
def test_recorded_rounds_are_the_rounds(head, reading):
    mine, theirs = pair(head, **READINGS[reading]), pair(head, recorded=False, **READINGS[reading])
    for prompt in PROMPTS:  # the second and third replay what the first recorded
        a, b = mine.generate(prompt, max_new_tokens=50), theirs.generate(prompt, max_new_tokens=50)
        assert (a.token_ids, a.stats.acceptance_lengths, a.stats.nodes) == (
            b.token_ids,
            b.stats.acceptance_lengths,
            b.stats.nodes,
        )
    a, b = (reader.generate(PROMPTS, max_new_tokens=30) for reader in (mine, theirs))
    assert [x.token_ids for x in a] == [x.token_ids for x in b]
    assert [x.stats.acceptance_lengths for x in a] == [x.stats.acceptance_lengths for x in b]


def test_trees_that_callers_keep_are_not_overwritten():
    mine, theirs = (
        [done.tree for _, done in pair(recorded=r).stream(PROMPTS[0], max_new_tokens=30) if done] for r in (True, False)
    )
    assert len(mine) == len(theirs) > 3
    assert all(a.token_ids.equal(b.token_ids) and a.log_probs.allclose(b.log_probs) for a, b in zip(mine, theirs, strict=True))


def test_a_text_that_outgrows_its_span_is_recorded_anew(monkeypatch):
    monkeypatch.setattr("pctree.graphs.SHORTEST_SPAN", 16)
    mine, theirs = pair(), pair(recorded=False)
    kept = [mine.generate(PROMPTS[0], max_new_tokens=120), theirs.generate(PROMPTS[0], max_new_tokens=120)]
    assert kept[0].token_ids == kept[1].token_ids
    assert mine._kept is not None
    assert mine._kept.graphs is not None
    spans = {key[1] for key in mine._kept.graphs._recorded}
    assert {64, 128} <= spans
    before = len(mine._kept.graphs)
    mine.generate(PROMPTS[0], max_new_tokens=120)
    assert len(mine._kept.graphs) == before, "a second text of the same length records nothing"


def test_recording_is_counted_apart():
    mine = pair()
    first, second = (mine.generate(PROMPTS[0], max_new_tokens=20).stats for _ in range(2))
    assert first.recording_ms > 0
    assert second.recording_ms == 0
    assert first.to_dict()["recording_ms"] > 0


def test_a_request_with_processors_drafts_without_recordings():
    mine, theirs = pair(), pair(recorded=False)
    options = {"repetition_penalty": 1.4, "temperature": 0.8, "seed": 4, "max_new_tokens": 30}
    assert mine.generate(PROMPTS[0], **options).token_ids == theirs.generate(PROMPTS[0], **options).token_ids


def test_batches_keep_their_recordings_apart():
    """A stream that is read slowly owns its caches, whatever is decoded meanwhile."""
    mine, theirs = pair(), pair(recorded=False)
    slow = mine.stream(PROMPTS[1], max_new_tokens=30)
    next(slow)
    assert mine.generate(PROMPTS[0], max_new_tokens=30).token_ids == theirs.generate(PROMPTS[0], max_new_tokens=30).token_ids
    *_, (last, _) = slow
    assert last.token_ids == theirs.generate(PROMPTS[1], max_new_tokens=30).token_ids
    abandoned = mine.stream(PROMPTS[1], max_new_tokens=30)
    next(abandoned)
    abandoned.close()
    assert mine.generate(PROMPTS[2], max_new_tokens=30).token_ids == theirs.generate(PROMPTS[2], max_new_tokens=30).token_ids


def test_max_length_holds_with_a_batch_that_was_kept():
    mine = pair()
    mine.generate(PROMPTS[0], max_new_tokens=60)
    mine.generate(PROMPTS[0], max_new_tokens=10, max_length=20)
    assert mine._kept is not None
    assert mine._kept.length == 20
    with pytest.raises(UsageError, match="max_length is 20"):
        mine.generate(PROMPTS[0], max_new_tokens=60, max_length=20)


def test_what_asks_the_host_cannot_be_recorded():
    with pytest.raises(AssertionError, match="waits on the host"):
        record(lambda: int(torch.arange(3).sum()))


@given(st.integers(1, 400))
def test_buckets_hold_what_they_are_for(rows):
    assert row_bucket(rows) >= rows
    assert rows > ROWS[-1] or row_bucket(rows) in ROWS
    assert row_bucket(row_bucket(rows)) == row_bucket(rows)
    assert min(rows, 300) <= span_bucket(min(rows, 300), 300) <= 300


def test_graphs_need_a_cuda_device(run):
    code, _, err = run("generate", "--prompt", "hi", "--compile", "graphs", "--device", "cpu")
    assert code == 2
    assert "the device is cpu; use auto" in err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("reading", READINGS)
def test_cuda_graphs(reading):
    expected = pair(recorded=False).generate(PROMPTS[0], max_new_tokens=50).token_ids
    mine = pair(**READINGS[reading])
    mine.target.model.to("cuda")
    mine.drafter.to("cuda")
    mine.record = cuda_graph
    assert mine.generate(PROMPTS[0], max_new_tokens=50).token_ids == expected
    assert len(Graphs(cuda_graph)) == 0
