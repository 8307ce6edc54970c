"""Reading drafter checkpoints in all layouts, and writing them in DeepSpec's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pctree.drafters.dspark import DrafterConfig, DSparkDrafter
from pctree.drafters.eagle3 import Eagle3Drafter
from pctree.drafters.layouts import DEEPSPEC_KEYS, parse_config
from pctree.errors import CheckpointError

SHARED = ("embed_tokens", "lm_head")
# Beside a checkpoint in any layout: the tokens worth drafting. A file of its own, so that other readers are not disturbed.
VOCABULARY = "draft_vocabulary.json"
# What speculators may leave in a file beside the drafter: the target's own weights, and the inverse of d2t.
NOT_OURS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_json_config(path: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint folder, or an error that says what is missing."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder that holds config.json and model.safetensors")
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; give the folder that holds config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download the checkpoint again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds a JSON {type(config).__name__}; expected an object, download the checkpoint again")
    return config


def read_config(path: Path) -> DrafterConfig:
    """The configuration of a drafter.

    Raises:
        CheckpointError: the folder, the file or a key is missing, or a value is out of range; the message names it.
    """
    return parse_config(read_json_config(path), path / "config.json")


def open_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names."""
    index = path / "model.safetensors.index.json"
    files = [path / "model.safetensors"]
    if index.exists():
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(
                f"{index} is damaged; expected a JSON object whose weight_map names a file for each tensor"
            ) from None
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing; the checkpoint needs its weights beside config.json")
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged or cut short ({error}); download or write it again") from None
    return tensors


def load_drafter(path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """A :class:`DSparkDrafter` or :class:`Eagle3Drafter` in evaluation mode. Every tensor must be used, and none may be
    missing, but for the shared ones.

    Raises:
        CheckpointError: something is missing, unexpected, of another shape, or damaged.
    """
    config = read_config(path)
    tensors = open_tensors(path)
    draft_ids = None
    if config.layout == "speculators":
        tensors = {name: tensor for name, tensor in tensors.items() if name not in NOT_OURS}
        offsets = tensors.pop("d2t", None)
        if config.draft_vocab_size is not None:
            draft_ids = read_draft_ids(offsets, config, path / "model.safetensors")
    with torch.device("meta"):
        drafter: Any = Eagle3Drafter(config) if config.autoregressive else DSparkDrafter(config)
        backbone = config.backbone
        if "embed_tokens.weight" in tensors:
            drafter.embed_tokens = nn.Embedding(backbone.vocab_size, backbone.hidden_size)
            if backbone.tie_word_embeddings:
                tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
        if "lm_head.weight" in tensors or draft_ids is not None:
            drafter.lm_head = nn.Linear(backbone.hidden_size, config.draft_vocab_size or backbone.vocab_size, bias=False)
    expected = drafter.state_dict()
    for complaint, names in (
        ("lacks", sorted(expected.keys() - tensors.keys())),
        ("holds the unexpected", sorted(tensors.keys() - expected.keys())),
    ):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(f"{path / 'model.safetensors'} {complaint} {listed}; config.json describes another model")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{path / 'model.safetensors'}: {name} is {list(tensor.shape)}, expected {list(expected[name].shape)} "
                "from config.json"
            )
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    drafter.rotary = type(drafter.rotary)(backbone).to(device)  # its tables are computed, not stored
    drafter.draft_ids = None if draft_ids is None else draft_ids.to(device)
    if draft_ids is None and (path / VOCABULARY).exists():
        drafter.reduce_vocabulary(read_vocabulary(path / VOCABULARY, backbone.vocab_size).to(device))
    return drafter.requires_grad_(False).eval()


def read_vocabulary(file: Path, vocab_size: int) -> Tensor:
    """Target ids of the tokens that a drafter was trained to draft, from the file beside its checkpoint."""
    try:
        ids = json.loads(file.read_text())
        whole = isinstance(ids, list) and bool(ids) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    except (json.JSONDecodeError, UnicodeDecodeError):
        whole = False
    if not whole or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise CheckpointError(f"{file} is damaged; expected a list of different token ids below {vocab_size}")
    return torch.tensor(ids)


def read_draft_ids(offsets: Tensor | None, config: DrafterConfig, file: Path) -> Tensor:
    """Target ids [V_draft] of the draft tokens, from ``d2t``, which holds how far each lies behind its own number."""
    size, vocab_size = config.draft_vocab_size, config.backbone.vocab_size
    assert size is not None
    if offsets is None:
        raise CheckpointError(f"{file} lacks d2t; a draft vocabulary of {size} needs the table to the target's {vocab_size}")
    if offsets.shape != (size,) or offsets.is_floating_point():
        found = f"{list(offsets.shape)} of {offsets.dtype}"
        raise CheckpointError(f"{file}: d2t is {found}, expected {size} whole numbers as draft_vocab_size says")
    ids = torch.arange(size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise CheckpointError(f"{file}: d2t leads to token {int(ids.max())}, outside the target's vocabulary of {vocab_size}")
    if len(ids.unique()) < size:
        raise CheckpointError(f"{file}: d2t leads two draft tokens to one target token; expected offsets, each to its own")
    return ids


def save_drafter(drafter: DSparkDrafter | Eagle3Drafter, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` in DeepSpec's layout, without the frozen copies of the target's
    embeddings and head.
    """
    config = drafter.config
    if config.mask_filling or config.draft_vocab_size is not None:
        raise CheckpointError(f"a {config.layout} drafter reads its block in another way, which this layout cannot say")
    if config.autoregressive:
        own = {"architectures": ["Qwen3Eagle3Model"], "ttt_length": config.block_size, "draft_num_hidden_layers": 1,
               "num_target_layers": config.num_target_layers, "target_layer_ids": config.target_layer_ids}  # fmt: skip
    else:
        own = {"architectures": ["Qwen3DSparkModel"], **{key: getattr(config, key) for key in DEEPSPEC_KEYS}}
    raw = {
        **config.backbone.to_diff_dict(),
        **own,
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
    }
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
        if name.split(".")[0] not in SHARED
    }
    # Weights first, each under a temporary name: a folder with a config.json is a whole checkpoint.
    partial = path / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
