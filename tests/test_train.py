"""Training: the data is the target's own, training sees what decoding will see, and a resumed run is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer

from pctree import TargetModel, UsageError
from pctree.scorers import EagleScorer
from pctree.train.batches import Batcher, block_weights, held_out, vocabulary
from pctree.train.config import TrainConfig, default_layer_ids
from pctree.train.features import Conversation, feature_store, read_conversations
from pctree.train.forward import markov_latents, step_loss, training_hidden
from pctree.train.initial import initialise_from_target, new_drafter
from pctree.train.synth import Opening, SynthConfig, count_written, sample, synthesize
from pctree.train.trainer import Trainer

LAYER_IDS = [0, 1]


@pytest.fixture(scope="module")
def model():
    return tiny.target("llama", vocab=260, seed=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Random conversations; what they say does not matter here."""
    file = tmp_path / "data.jsonl"
    lines = [
        {"token_ids": tiny.prompt(seed, 30 + seed % 7, 260), "answers": [[9, 17], [20, 28 + seed % 3]], "temperature": 0.0}
        for seed in range(12)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_written_answers_are_the_targets_own(model, tmp_path):
    """Rows start, end and restart at different times in one cache; every greedy answer must still be the target's."""
    file, tokenizer = tmp_path / "data.jsonl", byte_tokenizer()
    config = SynthConfig(answer_tokens=400, rows=5, turns=2, max_prompt=6, max_answer=9, sampled_fraction=0.3, seed=3,
                         openings=[Opening(), Opening("Why", " now?", 2.0)])  # fmt: skip
    conversations, tokens = synthesize(TargetModel(model), tokenizer, file, config)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == conversations
    assert sum(stop - start for r in records for start, stop in r["answers"]) == tokens >= 400
    assert {r["temperature"] for r in records} == {0.0, 0.8}
    header = tokenizer.encode("<e>\n<s>assistant\n", add_special_tokens=False)
    for record in records:
        ids = record["token_ids"]
        choices = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        for start, stop in record["answers"]:
            assert ids[start - len(header) : start] == header
            assert stop - start <= 9
            if record["temperature"] == 0:
                assert ids[start:stop] == choices[start - 1 : stop - 1]
    assert any(" now?<e>" in tokenizer.decode(r["token_ids"]) for r in records)


def test_writing_goes_on_where_the_file_ends(model, tmp_path):
    file = tmp_path / "data.jsonl"
    config = SynthConfig(answer_tokens=60, rows=3, max_prompt=4, max_answer=8)
    synthesize(TargetModel(model), byte_tokenizer(), file, config)
    before = file.read_text()
    file.write_text(before + '{"token_ids": [1, 2')  # a torn line, as a kill leaves it
    config.answer_tokens = 120
    conversations, tokens = synthesize(TargetModel(model), byte_tokenizer(), file, config)
    assert file.read_text().startswith(before)
    assert (conversations, tokens) == count_written(file)
    assert tokens >= 120
    lines = file.read_text().splitlines()
    assert len(set(lines)) == len(lines)


def test_sampling_follows_the_softmax():
    """Chi-square over 7 cells, 20,000 draws; a right sampler fails once in 10,000 seeds, and the seed is fixed."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5])
    generator = torch.Generator().manual_seed(0)
    draws = 20_000
    drawn = sample(logits.expand(draws, -1), torch.full((draws,), 0.7), 0.0, generator).bincount(minlength=7)
    expected = draws * (logits / 0.7).softmax(-1)
    assert float(((drawn - expected) ** 2 / expected).sum()) < 27.9  # 0.9999 quantile, 6 degrees of freedom
    rows = torch.stack([logits, logits.flip(0)])
    assert sample(rows, torch.zeros(2), 0.0, generator).tolist() == [3, 3]
    kept = sample(logits.expand(1000, -1), torch.ones(1000), 0.5, generator).unique().tolist()
    assert kept == [3, 6]  # min-p 0.5: half the likeliest token's probability or more


def test_features_are_the_targets_own(model, data, tmp_path):
    target = TargetModel(model, LAYER_IDS)
    store = feature_store(target, data, tmp_path / "f")
    for conversation in store.conversations:
        done = model(torch.tensor([conversation.token_ids]), output_hidden_states=True)
        at = slice(conversation.offset, conversation.offset + len(conversation.token_ids))
        expected = torch.cat([done.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)
        torch.testing.assert_close(store.features[at].float(), expected, atol=0.02, rtol=0.01)  # kept in bfloat16
        probs = done.logits[0].softmax(-1)
        for start, stop in conversation.answers:
            rows = slice(conversation.offset + start - 1, conversation.offset + stop - 1)
            theirs = probs[start - 1 : stop - 1].gather(1, store.top_ids[rows].long())
            torch.testing.assert_close(store.top_probs[rows].float(), theirs, atol=1e-3, rtol=0.01)
            assert (store.top_ids[rows, 0] == probs[start - 1 : stop - 1].argmax(-1)).all()


def test_an_interrupted_feature_pass_goes_on(model, data, tmp_path, monkeypatch):
    target = TargetModel(model, LAYER_IDS)
    monkeypatch.setattr("pctree.train.features.BATCH_TOKENS", 90)
    whole = feature_store(target, data, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        feature_store(target, data, tmp_path / "torn", should_stop=lambda: True)
    passes = []
    torn = feature_store(target, data, tmp_path / "torn", progress=lambda done, total: passes.append(done))
    assert passes[0] > 2  # the first batch was not computed again
    assert torch.equal(whole.features, torn.features)
    assert torch.equal(whole.top_probs, torn.top_probs)
    with data.open("a") as file:
        file.write(json.dumps({"token_ids": [1, 2, 3, 4], "answers": [[1, 4]]}) + "\n")
    with pytest.raises(UsageError, match="another data"):
        feature_store(target, data, tmp_path / "torn")


def test_a_block_is_taught_up_to_the_end_of_its_answer():
    """One turn at tokens 8 to 39, anchor 37, four slots: they predict 38, 39, 40, 41, of which two are in the turn."""
    assert block_weights(37, 40, 4) == [1.0, 1.0, 0.0, 0.0]
    conversation = Conversation(list(range(60)), [(8, 40), (45, 50)], 0)
    assert conversation.anchors() == [*range(8, 39), *range(45, 49)]  # the first answer token can be an anchor
    assert conversation.answer_stop(37) == 40
    assert conversation.answer_stop(45) == 50


def batch_of(store, picked, block_size=4):
    conversations = store.conversations
    batcher = Batcher(store, conversations, torch.arange(260), 260, block_size=block_size, sequences=2, anchors=3, seed=0)
    return batcher.collate([(conversations[i], anchors) for i, anchors in picked])


@pytest.mark.parametrize("head", tiny.HEADS)
def test_training_sees_what_decoding_sees(model, data, tmp_path, head):
    """Hidden states and head outputs of packed blocks equal those of decoding at the same anchors, one by one."""
    target = TargetModel(model, LAYER_IDS)
    store = feature_store(target, data, tmp_path / "f")
    store.features = store.features.float()
    drafter = tiny.drafter(model, head, block_size=4, layer_ids=LAYER_IDS)
    picked = [(0, [9, 12, 25]), (3, [10, 21])]
    batch = batch_of(store, picked)
    hidden = training_hidden(drafter, batch).view(2, 3, 4, -1)
    latents = markov_latents(drafter, batch.previous.view(-1, 4), hidden.flatten(0, 1)).view(2, 3, 4, -1)
    for row, (index, anchors) in enumerate(picked):
        conversation = store.conversations[index]
        for column, anchor in enumerate(anchors):
            cache = drafter.new_cache(1, 64)
            drafter.extend(cache, store.features[conversation.offset : conversation.offset + anchor][None])
            expected, _ = drafter.draft_block(cache, torch.tensor([conversation.token_ids[anchor]]))
            torch.testing.assert_close(hidden[row, column], expected[0], atol=1e-4, rtol=1e-4)
            state = drafter.markov_head.initial_state(1)
            for slot in range(4):
                if not batch.weights[row, column, slot]:
                    continue
                previous = torch.tensor([[conversation.token_ids[anchor + slot]]])  # the true token before
                latent, state = drafter.markov_head(previous, expected[:, slot : slot + 1], state)
                torch.testing.assert_close(latents[row, column, slot], latent[0, 0], atol=1e-4, rtol=1e-4)


def test_the_training_time_test_of_eagle3_is_its_decoding(model, data, tmp_path):
    """Every step's state equals the one that drafting along the true text gives, one token at a time."""
    target = TargetModel(model, LAYER_IDS)
    store = feature_store(target, data, tmp_path / "f")
    store.features = store.features.float()
    drafter = new_drafter(TrainConfig.from_dict({"algorithm": "eagle3", "block_size": 4}), target)
    tiny.randomise(drafter, 9, std=0.35)
    drafter.share(target.embed_tokens, target.lm_head)
    picked = [(0, [9, 12, 25]), (3, [10, 21])]
    batch = batch_of(store, picked)
    logits = target.lm_head(training_hidden(drafter, batch)).view(2, 3, 4, -1)
    for row, (index, anchors) in enumerate(picked):
        conversation = store.conversations[index]
        ids = conversation.token_ids
        for column, anchor in enumerate(anchors):
            cache = drafter.new_cache(1, 64, 8)
            features = store.features[conversation.offset : conversation.offset + anchor][None]
            drafter.extend(cache, features, torch.tensor([ids[1 : anchor + 1]]))
            scorer = EagleScorer(drafter, cache, *drafter.draft_block(cache, torch.tensor([ids[anchor]])))
            state = scorer.initial_state()
            for step in range(4):
                if not batch.weights[row, column, step]:
                    break
                expected, state = scorer.logits(step, torch.tensor([[ids[anchor + step]]]), state)
                torch.testing.assert_close(logits[row, column, step], expected[0, 0], atol=1e-4, rtol=1e-4)


def test_conversations_in_a_batch_do_not_mix(model, data, tmp_path):
    target = TargetModel(model, LAYER_IDS)
    store = feature_store(target, data, tmp_path / "f")
    drafter = tiny.drafter(model, block_size=4, layer_ids=LAYER_IDS)
    config, vocab = TrainConfig(block_size=4), torch.arange(260)
    head = model.lm_head.weight.detach()

    def sums(picked):
        measures = step_loss(drafter, batch_of(store, picked), head, vocab, config)[1]
        return measures.overlap, measures.weight

    both = sums([(1, [9, 11]), (2, [21, 22, 24])])
    one, two = sums([(1, [9, 11])]), sums([(2, [21, 22, 24])])
    torch.testing.assert_close(both[0], one[0] + two[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both[1], one[1] + two[1])


CONFIG = {"layers": 2, "block_size": 4, "markov_rank": 8, "steps": 4, "sequences": 3, "anchors": 3, "warmup_steps": 2,
          "held_out": 0.2, "learning_rate": 5e-3, "mask_token_id": 3}  # fmt: skip


@pytest.fixture
def bfloat16_target():
    return TargetModel(tiny.target("llama", vocab=260, seed=4).to(torch.bfloat16), LAYER_IDS)


def test_a_resumed_run_takes_the_same_steps(bfloat16_target, data, tmp_path):
    store = feature_store(bfloat16_target, data, tmp_path / "f")
    whole = Trainer(bfloat16_target, store, TrainConfig.from_dict(CONFIG), tmp_path / "whole")
    assert whole.run(log_every=1)
    first = Trainer(bfloat16_target, store, TrainConfig.from_dict(CONFIG), tmp_path / "parts")
    assert not first.run(log_every=1, should_stop=lambda: first.step == 2)
    second = Trainer(bfloat16_target, store, TrainConfig.from_dict(CONFIG), tmp_path / "parts")
    assert second.step == 2
    assert second.run(log_every=1)
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name

    def losses(folder):
        lines = map(json.loads, (tmp_path / folder / "log.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    assert losses("whole") == losses("parts")
    assert len(losses("whole")) == 4


def test_a_run_is_not_resumed_with_other_settings(bfloat16_target, data, tmp_path):
    store = feature_store(bfloat16_target, data, tmp_path / "f")
    Trainer(bfloat16_target, store, TrainConfig.from_dict(CONFIG), tmp_path / "run").save()
    with pytest.raises(UsageError, match=r"learning_rate 0\.005 → 0\.001"):
        Trainer(bfloat16_target, store, TrainConfig.from_dict(CONFIG | {"learning_rate": 1e-3}), tmp_path / "run")


@pytest.mark.parametrize(("algorithm", "method"), [("dspark", "pctree"), ("dflash", "ddtree"), ("eagle3", "eagle3")])
def test_training_learns_and_exports(bfloat16_target, data, tmp_path, algorithm, method):
    """Twelve conversations of noise can only be learnt by heart; some of that is done in 200 steps. The export decodes."""
    from pctree import DraftSettings, SpeculativeDecoder, load_drafter

    store = feature_store(bfloat16_target, data, tmp_path / "f")
    own = {"dspark": {}, "dflash": {"markov_rank": 0}, "eagle3": {"markov_rank": 0, "layers": 1}}[algorithm]
    config = TrainConfig.from_dict(CONFIG | {"algorithm": algorithm, "steps": 200, "learning_rate": 1e-2} | own)
    trainer = Trainer(bfloat16_target, store, config, tmp_path / "run")
    before = trainer.train_step().loss
    results = []
    assert trainer.run(evaluate_every=100, evaluated=lambda step, result: results.append((step, result)))
    assert trainer.train_step().loss < 0.8 * before
    assert [step for step, _ in results] == [100, 200]
    assert len(results[0][1]["match"]) == 4
    drafter = load_drafter(tmp_path / "run" / "drafter", dtype=torch.bfloat16)
    assert drafter.lm_head is None  # the frozen copies are left out
    assert drafter.config.target_layer_ids == LAYER_IDS
    drafter.share(bfloat16_target.embed_tokens, bfloat16_target.lm_head)
    settings = DraftSettings(method, budget=8)
    assert SpeculativeDecoder(bfloat16_target, drafter, settings=settings).generate([5, 6, 7], max_new_tokens=9).token_ids


def test_a_drafter_is_exported_with_the_tokens_that_it_learnt(bfloat16_target, data, tmp_path):
    from pctree import load_drafter

    store = feature_store(bfloat16_target, data, tmp_path / "f")
    config = TrainConfig.from_dict(CONFIG | {"steps": 1, "loss_vocab": 100})
    trainer = Trainer(bfloat16_target, store, config, tmp_path / "run")
    assert trainer.run()
    drafter = load_drafter(tmp_path / "run" / "drafter")
    assert drafter.draft_ids.tolist() == trainer.loss_vocab.tolist()
    assert drafter.config.draft_vocab_size == 100


def test_a_new_drafter_starts_from_the_target(bfloat16_target):
    drafter = new_drafter(TrainConfig(layers=2), bfloat16_target)
    assert not drafter.markov_head.markov_w2.weight.any()
    initialise_from_target(drafter, bfloat16_target, torch.tensor([tiny.prompt(1, 20, 260)]))
    theirs, mine = bfloat16_target.layers[-1].self_attn, drafter.layers[-1].self_attn
    torch.testing.assert_close(mine.o_proj.weight.to(torch.bfloat16), theirs.o_proj.weight)
    # Normalised queries times the norm's weight have about the size of the target's own queries.
    assert float(mine.q_norm.weight.detach().std()) > 0


def test_splits_and_vocabulary_are_stable():
    conversations = [Conversation([7, 7, 8, 9, i], [(1, 5)], 5 * i) for i in range(20)]
    training, testing = held_out(conversations, 0.1, seed=0)
    assert len(testing) == 2
    assert held_out(conversations, 0.1, seed=0)[1] == testing
    assert not {id(c) for c in training} & {id(c) for c in testing}
    assert vocabulary(conversations, 3, 40).tolist()[-2:] == [8, 9] or 7 in vocabulary(conversations, 3, 40).tolist()
    assert vocabulary(conversations, 99, 40).tolist() == list(range(40))


def test_default_layers_are_five_within_the_target():
    assert default_layer_ids(30) == [1, 8, 14, 21, 28]
    assert default_layer_ids(36)[-1] == 34
    assert default_layer_ids(2) == [0]


@pytest.mark.parametrize(
    ("line", "message"),
    [("nonsense", "line 1"), ('{"token_ids": [1]}', "line 1"), ('{"token_ids": [1, 2], "answers": []}', "no answer")],
)
def test_bad_data_is_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        read_conversations(file, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"learning_rate": 0.0},
        {"held_out": 1.0},
        {"colour": 1},
        {"algorithm": "eagle"},
        {"markov_rank": 8, "algorithm": "dflash"},
        {"layers": 2, "algorithm": "eagle3"},
        {"ce_weight": -1.0},
    ],
)
def test_bad_settings_are_named(change):
    with pytest.raises(UsageError, match=next(iter(change))):
        TrainConfig.from_dict(change)
