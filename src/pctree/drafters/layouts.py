"""Checkpoint layouts: from the ``config.json`` of a drafter to what the drafter is, one small reader a layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from pctree.drafters.dspark import DrafterConfig
from pctree.drafters.heads import MARKOV_HEADS
from pctree.errors import CheckpointError

# What DeepSpec's configuration has beyond a Qwen3 configuration.
DEEPSPEC_KEYS = (
    "block_size",
    "num_target_layers",
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def deepspec(raw: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec: DSpark, and DFlash as DSpark without a head. Slot j predicts the token after it."""
    return {
        "layout": "DeepSpec",
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        **{key: raw[key] for key in DEEPSPEC_KEYS if key in raw},
    }


def zlab_dflash(raw: dict[str, Any]) -> dict[str, Any]:
    """z-lab's DFlash: no head; slot 0 is the anchor and predicts nothing, the others predict themselves."""
    inner = raw.get("dflash_config")
    return {
        "layout": "z-lab DFlash",
        "mask_filling": True,
        **{key: raw[key] for key in ("block_size", "num_target_layers") if key in raw},
        **{key: inner[key] for key in ("mask_token_id", "target_layer_ids") if isinstance(inner, dict) and key in inner},
    }


def deepspec_eagle3(raw: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's EAGLE-3: ``ttt_length`` drafted tokens, one at a time; there is no block and so no mask token."""
    return {
        "layout": "DeepSpec EAGLE-3",
        "autoregressive": True,
        "mask_token_id": 0,
        **({"block_size": raw["ttt_length"]} if "ttt_length" in raw else {}),
        **{key: raw[key] for key in ("num_target_layers", "target_layer_ids") if key in raw},
    }


def speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """speculators' DSpark and DFlash: layer ids count the embedding output as 0, and the vocabulary may be reduced."""
    dspark = raw["speculators_model_type"] == "dspark"
    ids = raw.get("aux_hidden_state_layer_ids")
    reduced = raw.get("draft_vocab_size") not in (None, _backbone(raw).get("vocab_size"))
    rank = {"markov_rank": raw.get("markov_rank", 256)} if dspark else {}
    confident = dspark and raw.get("enable_confidence_head", True)
    return {
        "layout": "speculators",
        "num_target_layers": None,
        "mask_filling": not raw.get("sample_from_anchor", dspark),
        "markov_head_type": raw.get("markov_head_type", "vanilla"),
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and raw.get("confidence_head_with_markov", True),
        **rank,
        **({"draft_vocab_size": raw["draft_vocab_size"]} if reduced else {}),
        **({"target_layer_ids": [i - 1 if isinstance(i, int) else i for i in ids]} if isinstance(ids, list) else {}),
        **{key: raw[key] for key in ("block_size", "mask_token_id") if raw.get(key) is not None},
    }


def _backbone(raw: dict[str, Any]) -> dict[str, Any]:
    """The transformer's own numbers: in most layouts beside the drafter's, in speculators' one level down."""
    inner = raw.get("transformer_layer_config")
    return inner if isinstance(inner, dict) else raw


LAYOUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Qwen3DSparkModel": deepspec,
    "DFlashDraftModel": zlab_dflash,
    "Qwen3Eagle3Model": deepspec_eagle3,
    "speculators dspark": speculators,
    "speculators dflash": speculators,
}
# What a layout must say, by our names, and under which other names it does.
REQUIRED = ("block_size", "target_layer_ids", "mask_token_id", "num_target_layers")
OTHER_NAMES = {
    "Qwen3Eagle3Model": {"block_size": "ttt_length"},
    "speculators dspark": {"target_layer_ids": "aux_hidden_state_layer_ids"},
    "speculators dflash": {"target_layer_ids": "aux_hidden_state_layer_ids"},
}


def layout_of(raw: dict[str, Any], file: Path) -> str:
    """Which of ``LAYOUTS`` a ``config.json`` is in."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if f"speculators {kind}" not in LAYOUTS:
            raise CheckpointError(f"{file}: speculators_model_type is {kind!r}; pctree reads dspark and dflash")
        return f"speculators {kind}"
    architectures = raw.get("architectures") or []
    names = [str(name) for name in (architectures if isinstance(architectures, list) else [architectures])]
    known = [name for name in LAYOUTS if " " not in name]
    found = next((name for name in names if name in known), None)
    if found is None:
        expected = " or ".join(known)
        raise CheckpointError(f"{file}: architectures is {', '.join(names) or 'none'}; a drafter has {expected}")
    return found


def parse_config(raw: dict[str, Any], file: Path) -> DrafterConfig:
    """The drafter that ``config.json`` (``raw``, read from ``file``) describes.

    Raises:
        CheckpointError: the layout is none of ours, a key is missing, or a value is out of range; it is named.
    """
    layout = layout_of(raw, file)
    values = LAYOUTS[layout](raw)
    other_names = OTHER_NAMES.get(layout, {})
    missing = [other_names.get(key, key) for key in REQUIRED if key not in values]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}; a {layout} names them all")
    _check_types(values, file)
    own = {*DEEPSPEC_KEYS, "dflash_config", "ttt_length", "draft_num_hidden_layers", "step_loss_decay"}
    backbone = Qwen3Config.from_dict({key: value for key, value in _backbone(raw).items() if key not in own})
    config = DrafterConfig(backbone=backbone, **values)
    _check_config(config, file)
    return config


def _check_types(values: dict[str, Any], file: Path) -> None:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    for key in ("block_size", "num_target_layers", "mask_token_id", "markov_rank", "draft_vocab_size"):
        unsaid = key == "num_target_layers" and values["layout"] == "speculators"
        if key in values and not unsaid and not whole(values[key]):
            raise CheckpointError(f"{file}: {key} is {values[key]!r}; expected a whole number")
    ids = values["target_layer_ids"]
    if not isinstance(ids, list) or not all(whole(layer) for layer in ids):
        raise CheckpointError(f"{file}: target_layer_ids is {ids!r}; expected a list of whole numbers")


def _check_config(config: DrafterConfig, file: Path) -> None:
    def refuse(key: str, expected: str) -> None:
        raise CheckpointError(f"{file}: {key} is {getattr(config, key)!r}; expected {expected}")

    least = 2 if config.mask_filling else 1
    if config.block_size < least:
        refuse("block_size", f"at least {least}")
    ids = config.target_layer_ids
    if not ids or any(b <= a for a, b in pairwise(ids)):
        refuse("target_layer_ids", "strictly increasing layer ids")
    if config.num_target_layers is None and ids[0] < -1:
        refuse("target_layer_ids", "ids from -1, the embedding output")
    if config.num_target_layers is not None and (ids[0] < -1 or ids[-1] > config.num_target_layers - 2):
        refuse(
            "target_layer_ids",
            f"ids from -1 (the embedding output) to {config.num_target_layers - 2}: of {config.num_target_layers} "
            "layers the last is not allowed",
        )
    if not 0 <= config.mask_token_id < config.backbone.vocab_size:
        refuse("mask_token_id", f"a token id below vocab_size {config.backbone.vocab_size}")
    window = getattr(config.backbone, "layer_types", None) or []
    if "sliding_attention" in window:
        raise CheckpointError(f"{file}: layer_types holds sliding_attention; a block must see its whole context")
    if config.draft_vocab_size is not None and not 0 < config.draft_vocab_size < config.backbone.vocab_size:
        refuse("draft_vocab_size", f"a number below the vocabulary of {config.backbone.vocab_size}")
    if config.mask_filling and config.markov_rank and config.markov_head_type == "rnn":
        refuse("markov_head_type", "vanilla or gated where sample_from_anchor is false")
    if config.markov_rank < 0:
        refuse("markov_rank", "0 (no Markov head) or more")
    if config.markov_rank and config.markov_head_type not in MARKOV_HEADS:
        refuse("markov_head_type", f"one of {', '.join(MARKOV_HEADS)}")
    if config.confidence_head_with_markov and not config.markov_rank:
        refuse("confidence_head_with_markov", "false, since markov_rank is 0 and there is no Markov head to read")
