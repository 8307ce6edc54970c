"""Reading and writing drafter checkpoints in the DeepSpec layout (``Qwen3DSparkModel``)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config

from pctree.drafters.dspark import DrafterConfig, DSparkDrafter
from pctree.drafters.heads import MARKOV_HEADS
from pctree.errors import CheckpointError

ARCHITECTURE = "Qwen3DSparkModel"
OTHER_ARCHITECTURES = {
    "DFlashDraftModel": "z-lab's DFlash layout",
    "Qwen3Eagle3Model": "DeepSpec's EAGLE-3 layout",
}
SHARED = ("embed_tokens", "lm_head")
_EXTRA = (
    "block_size",
    "num_target_layers",
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


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
    """The configuration of a drafter in the DeepSpec layout.

    Raises:
        CheckpointError: the folder, the file or a key is missing, or a value is out of range; the message names it.
    """
    raw = read_json_config(path)
    file = path / "config.json"
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        architectures = [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
        found = ", ".join(architectures) or "none"
        known = [OTHER_ARCHITECTURES[name] for name in architectures if name in OTHER_ARCHITECTURES]
        hint = f" ({known[0]}, which is not supported yet)" if known else ""
        raise CheckpointError(f"{file}: architectures is {found}{hint}; a drafter has {ARCHITECTURE}")
    missing = [key for key in ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers") if key not in raw]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}; a {ARCHITECTURE} names them all")
    _check_types(raw, file)
    backbone = Qwen3Config.from_dict({k: v for k, v in raw.items() if k not in _EXTRA})
    config = DrafterConfig(
        backbone=backbone,
        block_size=raw["block_size"],
        num_target_layers=raw["num_target_layers"],
        target_layer_ids=list(raw["target_layer_ids"]),
        mask_token_id=raw["mask_token_id"],
        markov_rank=raw.get("markov_rank", 0),
        markov_head_type=raw.get("markov_head_type", "vanilla"),
        enable_confidence_head=raw.get("enable_confidence_head", False),
        confidence_head_with_markov=raw.get("confidence_head_with_markov", False),
    )
    _check_config(config, file)
    return config


def _check_types(raw: dict[str, Any], file: Path) -> None:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    for key in ("block_size", "num_target_layers", "mask_token_id", "markov_rank"):
        if key in raw and not whole(raw[key]):
            raise CheckpointError(f"{file}: {key} is {raw[key]!r}; expected a whole number")
    ids = raw["target_layer_ids"]
    if not isinstance(ids, list) or not all(whole(layer) for layer in ids):
        raise CheckpointError(f"{file}: target_layer_ids is {ids!r}; expected a list of whole numbers")


def _check_config(config: DrafterConfig, file: Path) -> None:
    def refuse(key: str, expected: str) -> None:
        raise CheckpointError(f"{file}: {key} is {getattr(config, key)!r}; expected {expected}")

    if config.block_size < 1:
        refuse("block_size", "a whole number of at least 1")
    ids = config.target_layer_ids
    if not ids or any(b <= a for a, b in pairwise(ids)):
        refuse("target_layer_ids", "strictly increasing layer ids")
    if ids[0] < -1 or ids[-1] > config.num_target_layers - 2:
        refuse(
            "target_layer_ids",
            f"ids from -1 (the embedding output) to {config.num_target_layers - 2}: of {config.num_target_layers} "
            "layers the last is not allowed",
        )
    if not 0 <= config.mask_token_id < config.backbone.vocab_size:
        refuse("mask_token_id", f"a token id below vocab_size {config.backbone.vocab_size}")
    if config.markov_rank < 0:
        refuse("markov_rank", "0 (no Markov head) or more")
    if config.markov_rank and config.markov_head_type not in MARKOV_HEADS:
        refuse("markov_head_type", f"one of {', '.join(MARKOV_HEADS)}")
    if config.confidence_head_with_markov and not config.markov_rank:
        refuse("confidence_head_with_markov", "false, since markov_rank is 0 and there is no Markov head to read")


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


def load_drafter(path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> DSparkDrafter:
    """A drafter in evaluation mode. Every tensor must be used, and none may be missing, but for the shared ones.

    Raises:
        CheckpointError: something is missing, unexpected, of another shape, or damaged.
    """
    config = read_config(path)
    tensors = open_tensors(path)
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
        backbone = config.backbone
        if "embed_tokens.weight" in tensors:
            drafter.embed_tokens = nn.Embedding(backbone.vocab_size, backbone.hidden_size)
            if backbone.tie_word_embeddings:
                tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
        if "lm_head.weight" in tensors:
            drafter.lm_head = nn.Linear(backbone.hidden_size, backbone.vocab_size, bias=False)
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
    return drafter.requires_grad_(False).eval()


def save_drafter(drafter: DSparkDrafter, path: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json`` and ``model.safetensors`` without the frozen copies of the target's embeddings and head."""
    config = drafter.config
    raw = {
        **config.backbone.to_diff_dict(),
        **{key: getattr(config, key) for key in _EXTRA},
        "architectures": [ARCHITECTURE],
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
