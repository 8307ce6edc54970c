"""Reading and writing drafters: what fits loads to the bit, and what does not is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from pctree import CheckpointError, DSparkDrafter, SpeculativeDecoder, load_drafter
from pctree.drafters import read_config, save_drafter


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """A good checkpoint, with a gated head and a confidence head, for a test to damage."""
    path = tmp_path / "drafter"
    save_drafter(tiny.drafter(model, "gated", confidence=True), path, dtype=torch.float32)
    return path


def edit_config(folder: Path, **changes) -> None:
    """Set keys of config.json; ``...`` removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Copies, since the file that they might be mapped from is written over."""
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def edit_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(act: Callable[[], object], *words: str) -> str:
    """The message of the refusal: one line that holds the words."""
    with pytest.raises(CheckpointError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def same_parameters(mine: DSparkDrafter, theirs: DSparkDrafter) -> bool:
    a, b = mine.state_dict(), theirs.state_dict()
    return all(tensor.equal(b[name]) for name, tensor in a.items() if name.split(".")[0] not in ("embed_tokens", "lm_head"))


# --- what loads


@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("head", [*tiny.HEADS, None])
def test_what_was_saved_is_what_loads(model, tmp_path, head, confidence):
    # With no head and a confidence head too: that one then reads hidden states alone.
    saved = tiny.drafter(model, head, confidence=confidence, block_size=5, layer_ids=[0, 1], rope=tiny.YARN_ROPE)
    save_drafter(saved, tmp_path / "d", dtype=torch.float32)
    loaded = load_drafter(tmp_path / "d")
    mine, theirs = vars(loaded.config) | {"backbone": None}, vars(saved.config) | {"backbone": None}
    assert mine == theirs
    for key in ("hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps", "rope_parameters", "vocab_size"):
        assert getattr(loaded.config.backbone, key) == getattr(saved.config.backbone, key)
    assert loaded.state_dict().keys() == {k for k in saved.state_dict() if k.split(".")[0] not in ("embed_tokens", "lm_head")}
    assert same_parameters(loaded, saved)
    assert loaded.rotary.inv_freq.equal(saved.rotary.inv_freq)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())

    # And it drafts the same.
    loaded.share(model.get_input_embeddings(), model.get_output_embeddings())
    features, anchor = torch.randn(1, 6, 2 * tiny.HIDDEN), torch.tensor([4])
    logits = []
    for drafter in (saved, loaded):
        cache = drafter.new_cache(1, 6)
        drafter.extend(cache, features)
        logits.append(drafter.draft_block(cache, anchor)[1])
    assert logits[0].equal(logits[1])


def test_saving_keeps_bfloat16_and_leaves_nothing_half_made(model, tmp_path):
    save_drafter(tiny.drafter(model, own=True), tmp_path / "d")
    assert sorted(file.name for file in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in tensors)  # the target has them
    assert load_drafter(tmp_path / "d").fc.weight.dtype == torch.float32
    assert load_drafter(tmp_path / "d", dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_own_embeddings_and_head_are_used(model, folder):
    own = {"embed_tokens.weight": torch.randn(40, tiny.HIDDEN), "lm_head.weight": torch.randn(40, tiny.HIDDEN)}
    edit_tensors(folder, lambda tensors: tensors.update(own))
    loaded = load_drafter(folder)
    loaded.share(model.get_input_embeddings(), model.get_output_embeddings())
    assert loaded.embed_tokens.weight.equal(own["embed_tokens.weight"])
    assert loaded.lm_head.weight.equal(own["lm_head.weight"])


def test_tied_embeddings_stand_in_for_a_missing_head(model, folder):
    edit_config(folder, tie_word_embeddings=True)
    embedding = torch.randn(40, tiny.HIDDEN)
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": embedding}))
    loaded = load_drafter(folder)
    loaded.share(model.get_input_embeddings(), model.get_output_embeddings())
    assert loaded.embed_tokens.weight.equal(embedding)
    assert loaded.lm_head.weight.equal(embedding)


def test_without_its_own_a_drafter_shares_the_targets(saved_target, folder):
    decoder = load(saved_target, folder)
    assert decoder.drafter.embed_tokens is decoder.target.model.get_input_embeddings()
    assert decoder.drafter.lm_head is decoder.target.model.get_output_embeddings()


def test_shards_are_read_together(folder):
    whole = load_drafter(folder)
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same_parameters(load_drafter(folder), whole)

    (folder / "model-00002-of-00002.safetensors").unlink()
    refusal(lambda: load_drafter(folder), "model-00002-of-00002.safetensors is missing")


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_index_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refusal(lambda: load_drafter(folder), "model.safetensors.index.json")


@pytest.mark.parametrize("rope", [tiny.YARN_ROPE, tiny.LLAMA3_ROPE], ids=["yarn", "llama3"])
def test_rope_scaling_is_read_under_both_keys(folder, rope):
    wanted = Qwen3RotaryEmbedding(Qwen3Config(head_dim=8, hidden_size=32, rope_parameters=dict(rope))).inv_freq
    plain = load_drafter(folder).rotary.inv_freq
    edit_config(folder, rope_parameters=dict(rope))
    assert load_drafter(folder).rotary.inv_freq.equal(wanted)
    assert not plain.allclose(wanted)
    # As transformers 4 wrote it.
    old = {key: value for key, value in rope.items() if key != "rope_theta"}
    edit_config(folder, rope_parameters=..., rope_scaling=old, rope_theta=rope["rope_theta"])
    assert load_drafter(folder).rotary.inv_freq.equal(wanted)


# --- damaged or incomplete checkpoints


def test_missing_folder_or_file(folder, tmp_path):
    refusal(lambda: load_drafter(tmp_path / "nowhere"), f"{tmp_path / 'nowhere'} is not a folder", "give the folder that holds")
    refusal(lambda: load_drafter(folder / "config.json"), "config.json is not a folder")
    (folder / "model.safetensors").rename(folder / "weights")
    refusal(lambda: load_drafter(folder), f"{folder / 'model.safetensors'} is missing", "beside config.json")
    (folder / "config.json").unlink()
    refusal(lambda: load_drafter(folder), f"{folder / 'config.json'} is missing", "give the folder")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}"])
def test_config_that_is_not_json(folder, content):
    (folder / "config.json").write_bytes(content)
    refusal(lambda: load_drafter(folder), f"{folder / 'config.json'} is not valid JSON", "download the checkpoint again")


def test_config_that_is_no_object(folder):
    (folder / "config.json").write_text("[1]")
    refusal(lambda: load_drafter(folder), f"{folder / 'config.json'}", "holds a JSON list; expected an object")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_weights_cut_short(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refusal(lambda: load_drafter(folder), f"{file} is damaged or cut short", "download or write it again")


def test_every_tensor_is_needed(folder):
    tensors = read_tensors(folder)
    for name in tensors:
        edit_tensors(folder, lambda held, name=name: held.pop(name))
        # Also markov_w1: a DSpark drafter without its head must not load as DFlash.
        refusal(lambda: load_drafter(folder), f"{folder / 'model.safetensors'} lacks {name}", "config.json describes another")
        save_file(tensors, folder / "model.safetensors")
    load_drafter(folder)


def test_no_tensor_is_dropped(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    refusal(lambda: load_drafter(folder), "holds the unexpected layers.0.self_attn.q_proj.bias")


def test_renamed_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"markov_head.w1.weight": tensors.pop("markov_head.markov_w1.weight")}))
    refusal(lambda: load_drafter(folder), "lacks markov_head.markov_w1.weight")


def test_head_without_its_key_is_not_ignored(folder):
    # A config that lost markov_rank would turn the same weights into DFlash.
    edit_config(folder, markov_rank=..., confidence_head_with_markov=...)
    refusal(lambda: load_drafter(folder), "holds the unexpected markov_head.")


@pytest.mark.parametrize("name", ["fc.weight", "markov_head.markov_w2.weight", "layers.1.mlp.up_proj.weight", "norm.weight"])
def test_wrong_shape(folder, name):
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    message = refusal(lambda: load_drafter(folder), f"{folder / 'model.safetensors'}: {name} is [", "from config.json")
    assert "expected [" in message


# --- configurations


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["DFlashDraftModel"], ["DFlashDraftModel", "lacks target_layer_ids, mask_token_id"]),
        (["Qwen3Eagle3Model"], ["Qwen3Eagle3Model", "lacks ttt_length"]),
        (["Qwen3ForCausalLM"], ["Qwen3ForCausalLM", "a drafter has Qwen3DSparkModel"]),  # a target where a drafter belongs
        ([], ["none", "a drafter has Qwen3DSparkModel"]),
        (None, ["none", "a drafter has Qwen3DSparkModel"]),
    ],
)
def test_other_architectures(folder, architectures, words):
    edit_config(folder, architectures=architectures)
    refusal(lambda: load_drafter(folder), f"{folder / 'config.json'}", *words)


@pytest.mark.parametrize("key", ["block_size", "target_layer_ids", "mask_token_id", "num_target_layers"])
def test_keys_that_must_be_there(folder, key):
    edit_config(folder, **{key: ...})
    refusal(lambda: load_drafter(folder), f"{folder / 'config.json'} lacks {key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_layer_ids", [-2, 0]),
        ("target_layer_ids", [0, 0]),
        ("target_layer_ids", [1, 0]),
        ("target_layer_ids", [0, 2]),  # the last of three layers
        ("target_layer_ids", [0, 7]),
        ("target_layer_ids", []),
        ("mask_token_id", 40),
        ("mask_token_id", -1),
        ("block_size", 0),
        ("block_size", "7"),
        ("block_size", 7.5),
        ("markov_rank", -1),
        ("markov_head_type", "lstm"),
    ],
)
def test_values_out_of_range(folder, key, value):
    edit_config(folder, **{key: value})
    refusal(lambda: read_config(folder), f"{folder / 'config.json'}: {key} is {value!r}; expected ")


def test_confidence_head_cannot_read_a_markov_head_that_is_not_there(folder):
    edit_config(folder, markov_rank=0, confidence_head_with_markov=True)
    refusal(lambda: load_drafter(folder), "confidence_head_with_markov is True; expected false, since markov_rank is 0")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask_token_id", None),  # several trainers write null
        ("mask_token_id", "3"),
        ("target_layer_ids", None),
        ("target_layer_ids", 3),
        ("target_layer_ids", ["0", "1"]),
        ("num_target_layers", None),
        ("num_target_layers", "3"),
        ("markov_rank", "6"),
        ("architectures", [3]),
    ],
)
def test_values_of_another_type(folder, key, value):
    edit_config(folder, **{key: value})
    refusal(lambda: load_drafter(folder), key)


# --- pairs


@pytest.fixture(scope="module")
def saved_target(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target"
    model.save_pretrained(path)
    return path


def load(target: Path, drafter: Path | None, **options) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        str(target), str(drafter) if drafter else None, dtype="float32", device="cpu", **options
    )


def test_a_pair_from_folders_decodes(model, saved_target, folder):
    decoder = load(saved_target, folder)
    expected, _ = tiny.plain(model, [1, 2, 3], 20)
    assert decoder.generate([1, 2, 3], max_new_tokens=20).token_ids == expected
    assert load(saved_target, None, method="ar").generate([1, 2, 3], max_new_tokens=20).token_ids == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": 41}, "its vocabulary is 41, the target's 40"),
        ({"layers": 4}, "its number of target layers is 4, the target's 3"),
    ],
)
def test_a_drafter_for_another_target(saved_target, tmp_path, changes, words):
    save_drafter(tiny.drafter(tiny.target(**changes), "vanilla"), tmp_path / "d")
    message = refusal(lambda: load(saved_target, tmp_path / "d"), words, str(tmp_path / "d"), str(saved_target))
    assert "use the drafter that was trained for this target" in message


def test_a_drafter_of_another_hidden_size(saved_target, model, tmp_path):
    config = tiny.drafter_config(model)
    config.backbone.hidden_size = 24
    save_drafter(DSparkDrafter(config), tmp_path / "d")
    refusal(lambda: load(saved_target, tmp_path / "d"), "its hidden size is 24, the target's 32", str(tmp_path / "d"))


def save_tokenizer(path: Path, words: list[str]) -> None:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(path)


def test_a_drafter_with_another_tokenizer(model, folder, tmp_path):
    target = tmp_path / "target"
    model.save_pretrained(target)
    words = [chr(ord("a") + number) for number in range(26)]
    save_tokenizer(target, words)
    load(target, folder)  # a drafter without a tokenizer relies on the target's
    save_tokenizer(folder, words)
    assert load(target, folder).generate("b c d", raw=True, max_new_tokens=4).text is not None
    save_tokenizer(folder, words[::-1])
    refusal(lambda: load(target, folder), "their tokenizers differ", str(folder), str(target), "use the drafter that was")


def test_names_that_lead_nowhere(saved_target, folder, tmp_path):
    nowhere = tmp_path / "nowhere"
    refusal(lambda: load(saved_target, nowhere), f"drafter {nowhere} does not exist", "give a folder")
    refusal(lambda: load(nowhere, folder), f"target {nowhere} does not exist", "give a folder")
    refusal(lambda: load(tmp_path, folder), f"{tmp_path} holds no config.json", "give the folder of a transformers model")


def test_a_damaged_target(saved_target, model, folder, tmp_path):
    model.save_pretrained(tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refusal(lambda: load(tmp_path / "target", folder), f"target {tmp_path / 'target'} cannot be loaded")


def test_unknown_dtype_and_device(saved_target, folder):
    with pytest.raises(ValueError, match="dtype is 'int3'; it is one of auto, bfloat16"):
        SpeculativeDecoder.from_pretrained(str(saved_target), str(folder), dtype="int3")
    with pytest.raises(ValueError, match="device is 'abacus'; use auto, cpu, cuda"):
        SpeculativeDecoder.from_pretrained(str(saved_target), str(folder), device="abacus")
