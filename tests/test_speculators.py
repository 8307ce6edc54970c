"""The layout of speculators: the same drafters under other names, and a reduced draft vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from pctree import CheckpointError, DraftSettings, SpeculativeDecoder, TargetModel, load_drafter
from pctree.drafters import Drafting, save_drafter
from pctree.methods import Block

VOCAB, KEPT = 40, [3, 4, 5, 9, 11, 12, 20, 21, 33, 39, 2, 1]  # target ids of the draft tokens, in no order


def write(folder: Path, source, kind: str, *, kept: list[int] | None = None, drop: tuple[str, ...] = (), **changes) -> Path:
    """``source`` as speculators would write it, reduced to the draft tokens ``kept``."""
    config = source.config
    raw = {
        "architectures": [f"{kind.title()}Speculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids], "block_size": config.block_size,
        "mask_token_id": config.mask_token_id, "draft_vocab_size": len(kept) if kept else VOCAB,
        "transformer_layer_config": {**config.backbone.to_diff_dict(), "model_type": "qwen3"},
    }  # fmt: skip
    if kind == "dspark":
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type, "sample_from_anchor": True,
                "enable_confidence_head": config.enable_confidence_head,
                "confidence_head_with_markov": config.confidence_head_with_markov}  # fmt: skip
    tensors = {n: t.clone() for n, t in source.state_dict().items() if n.split(".")[0] not in ("embed_tokens", "lm_head")}
    tensors["verifier_norm.weight"] = torch.ones(tiny.HIDDEN)  # the target's own, which older files hold
    if kept:
        places = torch.tensor(kept)
        tensors["d2t"] = places - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, places, True)
        tensors["lm_head.weight"] = source.lm_head.weight[places].clone()
        if source.markov_head is not None:
            tensors["markov_head.markov_w2.weight"] = source.markov_head.markov_w2.weight[places].clone()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | changes).items() if v is not ...}))
    save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@torch.inference_mode()
def first_block(model, draft: Drafting) -> Block:
    target = TargetModel(model, draft.config.target_layer_ids)
    _, features = target.prefill(target.new_cache(1, 9), torch.tensor([tiny.prompt(1, 9)]))
    context = draft.new_cache(1, 40)
    draft.extend(context, features)
    anchors = torch.tensor([7])
    return Block(draft, context, anchors, *draft.draft_block(context, anchors))


def loaded(model, folder: Path) -> Drafting:
    draft = load_drafter(folder)
    draft.share(model.get_input_embeddings(), model.get_output_embeddings())
    return draft


@pytest.mark.parametrize("head", tiny.HEADS)
def test_dspark_drafts_as_in_deepspecs_layout(model, tmp_path, head):
    source = tiny.drafter(model, head, confidence=True, layer_ids=(-1, 1))
    draft = loaded(model, write(tmp_path / "d", source, "dspark"))
    assert (draft.config.method, draft.config.layout) == ("dspark", "speculators")
    assert draft.config.target_layer_ids == [-1, 1]
    settings = DraftSettings("pctree", budget=12)
    mine, theirs = settings.grow(first_block(model, draft)), settings.grow(first_block(model, source))
    assert mine.token_ids.equal(theirs.token_ids)
    assert mine.log_probs.equal(theirs.log_probs)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_dflash_reads_its_block_as_the_configuration_says(model, tmp_path, from_anchor):
    source = tiny.drafter(model, None, block_size=5)
    draft = loaded(model, write(tmp_path / "d", source, "dflash", sample_from_anchor=from_anchor))
    block, whole = first_block(model, draft), first_block(model, source)
    assert draft.config.draft_length == (5 if from_anchor else 4)
    assert block.logits.equal(whole.logits if from_anchor else whole.logits[:, 1:])
    # Without a word, DFlash fills masks and DSpark samples from the anchor.
    assert load_drafter(write(tmp_path / "d", source, "dflash")).config.mask_filling
    sparse = write(tmp_path / "d", tiny.drafter(model), "dspark", sample_from_anchor=...)
    assert not load_drafter(sparse).config.mask_filling


@pytest.mark.parametrize("method", ["dspark", "pctree", "shared-markov", "ddtree"])
def test_a_reduced_vocabulary_drafts_its_own_tokens_only(model, tmp_path, method):
    """Its tree is the one that the whole drafter grows when all other tokens are impossible; the text stays the target's."""
    source = tiny.drafter(model, "gated", seed=3)
    draft = loaded(model, write(tmp_path / "d", source, "dspark", kept=KEPT))
    assert draft.draft_ids.tolist() == KEPT
    settings = DraftSettings(method, top_k=3, budget=14)
    tree, reference = settings.grow(first_block(model, draft)), first_block(model, source)
    reference.logits = reference.logits.clone()
    reference.logits[..., [token for token in range(VOCAB) if token not in KEPT]] = -1e9
    expected = settings.grow(reference)
    assert tree.token_ids.equal(expected.token_ids)
    torch.testing.assert_close(tree.log_probs, expected.log_probs, atol=1e-4, rtol=1e-4)
    assert set(tree.token_ids[0, 1:].tolist()) <= set(KEPT)

    target = TargetModel(model, draft.config.target_layer_ids)
    decoder = SpeculativeDecoder(target, draft, settings=settings)
    for options in ({}, {"repetition_penalty": 1.4, "logit_bias": {4: 2.0, 30: 1.0}}):
        plain = decoder.with_settings(method="ar").generate(tiny.prompt(2, 8), max_new_tokens=30, **options)
        assert decoder.generate(tiny.prompt(2, 8), max_new_tokens=30, **options).token_ids == plain.token_ids


def test_penalties_speak_of_target_tokens(model, tmp_path):
    draft = loaded(model, write(tmp_path / "d", tiny.drafter(model), "dspark", kept=KEPT))
    block = first_block(model, draft)

    def forbid(logits):
        return logits.index_fill(-1, torch.tensor([4, 9]), -1e9)

    tree = DraftSettings("pctree", top_k=6, budget=30).grow(block, forbid)
    assert not {4, 9} & set(tree.token_ids[0, 1:].tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "mtp"}, "speculators_model_type is 'mtp'; pctree reads dspark and dflash"),
        ({"aux_hidden_state_layer_ids": ...}, "lacks aux_hidden_state_layer_ids"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"aux_hidden_state_layer_ids": [2, 2]}, "strictly increasing"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41; expected a number below the vocabulary of 40"),
        ({"draft_vocab_size": 11}, "d2t is"),
        ({"sample_from_anchor": False, "markov_head_type": "rnn"}, "markov_head_type is 'rnn'"),
    ],
)
def test_what_does_not_fit_is_named(model, tmp_path, changes, message):
    folder = write(tmp_path / "d", tiny.drafter(model, "gated"), "dspark", kept=KEPT, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)


@pytest.mark.parametrize("tensor", ["d2t", "lm_head.weight", "markov_head.markov_w1.weight"])
def test_a_missing_tensor_is_named(model, tmp_path, tensor):
    folder = write(tmp_path / "d", tiny.drafter(model), "dspark", kept=KEPT, drop=(tensor,))
    with pytest.raises(CheckpointError, match=f"lacks {tensor}"):
        load_drafter(folder)


@pytest.mark.parametrize(("offset", "message"), [(37, "outside the target's vocabulary of 40"), (0, "two draft tokens to one")])
def test_a_wrong_table_is_refused(model, tmp_path, offset, message):
    """d2t holds offsets; read as target ids, or with two tokens on one, it would draft siblings that are equal."""
    kept = [*KEPT[:-1], KEPT[0] if offset == 0 else len(KEPT) - 1 + offset]
    source = tiny.drafter(model)
    folder = write(tmp_path / "d", source, "dspark", kept=KEPT)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)
    tensors["d2t"] = torch.zeros(len(KEPT), dtype=torch.long)  # no offsets at all: the first tokens of the vocabulary
    save_file(tensors, folder / "model.safetensors")
    assert load_drafter(folder).draft_ids.tolist() == list(range(len(KEPT)))


@pytest.mark.parametrize("own", [False, True])
def test_a_vocabulary_file_reduces_any_checkpoint(model, tmp_path, own):
    """The same drafter as with d2t: beside a checkpoint in DeepSpec's layout lies the list of tokens worth drafting."""
    source = tiny.drafter(model, "gated", seed=3, confidence=True)
    save_drafter(source, tmp_path / "d", dtype=torch.float32)
    if own:
        tensors = load_file(tmp_path / "d" / "model.safetensors")
        tensors["lm_head.weight"] = source.lm_head.weight.detach().clone()
        save_file(tensors, tmp_path / "d" / "model.safetensors")
    (tmp_path / "d" / "draft_vocabulary.json").write_text(json.dumps(KEPT))
    draft, other = loaded(model, tmp_path / "d"), loaded(model, write(tmp_path / "s", source, "dspark", kept=KEPT))
    assert draft.config.draft_vocab_size == len(KEPT)
    for method in ("dspark", "pctree"):
        mine, theirs = (DraftSettings(method, budget=14).grow(first_block(model, each)) for each in (draft, other))
        assert mine.token_ids.equal(theirs.token_ids)
    target = TargetModel(model, draft.config.target_layer_ids)
    decoder = SpeculativeDecoder(target, draft, settings=DraftSettings(budget=14, candidates=5))
    plain = decoder.with_settings(method="ar").generate(tiny.prompt(2, 8), max_new_tokens=30)
    assert decoder.generate(tiny.prompt(2, 8), max_new_tokens=30).token_ids == plain.token_ids


@pytest.mark.parametrize("text", ["{}", "[]", "[1, 1]", "[1, 40]", "[-1]", "[1.5]", "[true]", "nonsense"])
def test_a_bad_vocabulary_file_is_named(model, tmp_path, text):
    save_drafter(tiny.drafter(model), tmp_path / "d", dtype=torch.float32)
    (tmp_path / "d" / "draft_vocabulary.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"draft_vocabulary\.json is damaged.*below 40"):
        load_drafter(tmp_path / "d")
