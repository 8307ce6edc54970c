"""From names to a target and a drafter that fit each other, or an error that says why they do not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pctree import smollm2
from pctree.drafters import AnyDrafter, load_drafter
from pctree.errors import CheckpointError, UsageError
from pctree.fused import fuse
from pctree.methods import METHODS, DraftSettings
from pctree.pages import enlarge
from pctree.targets import TargetModel

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
          "float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16}  # fmt: skip
COMPILE_MODES = ("auto", "off", "graphs")


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name; ``auto`` is bfloat16."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def check_compile(mode: str, device: torch.device | None = None) -> str:
    """How models are prepared for speed: ``auto`` packs weights where that gains something, ``off`` leaves them, and ``graphs``
    also records rounds as CUDA graphs.
    """
    if mode not in COMPILE_MODES:
        raise UsageError(f"compile is {mode!r}; it is one of {', '.join(COMPILE_MODES)}")
    if mode == "graphs" and device is not None and device.type != "cuda":
        raise UsageError(f"compile is graphs, which records CUDA graphs, but the device is {device.type}; use auto")
    return mode


def resolve_device(device: str) -> torch.device:
    """A device from its name; ``auto`` is CUDA where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device is {device!r}; use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {device!r} but this machine has no CUDA device; use cpu")
    return resolved


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def local_folder(name: str, kind: str) -> Path:
    """The folder behind a name: a path, a model of the Hugging Face hub, or ``smollm2``."""
    if kind == "target" and name == smollm2.NAME:
        return smollm2.target_path()
    if kind == "drafter" and name in smollm2.DRAFTERS:
        return smollm2.drafter_path(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
        except Exception as error:  # the hub's client raises a different class for every cause
            raise CheckpointError(
                f"{kind} {name} is no folder here and the hub did not give it ({first_line(error)})"
            ) from None
    raise CheckpointError(f"{kind} {name} does not exist; give a folder, a hub name like owner/model, or {smollm2.NAME}")


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A causal language model in evaluation mode."""
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} holds no config.json; give the folder of a transformers model")
    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except Exception as error:  # safetensors, OS and value errors alike mean a folder that cannot be loaded
        raise CheckpointError(f"target {path} cannot be loaded ({first_line(error)})") from None
    return model.to(device).eval()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder, or None where it has none."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    return AutoTokenizer.from_pretrained(path)


def check_fit(drafter: AnyDrafter, model: PreTrainedModel, drafter_name: str, target_name: str) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        CheckpointError: vocabulary, hidden size, number of layers, or shared weights do not fit; the message names it.
    """
    backbone, config = drafter.config.backbone, model.config
    for what, mine, theirs in (
        ("vocabulary", backbone.vocab_size, config.vocab_size),
        ("hidden size", backbone.hidden_size, config.hidden_size),
        ("number of target layers", drafter.config.num_target_layers, config.num_hidden_layers),
    ):
        if mine is not None and mine != theirs:
            raise CheckpointError(
                f"drafter {drafter_name} does not fit target {target_name}: its {what} is {mine}, the target's {theirs}; "
                "use the drafter that was trained for this target"
            )


def check_tokenizers(drafter_tokenizer: Any, target_tokenizer: Any, drafter_name: str, target_name: str) -> None:
    """Refuse a drafter whose own tokenizer numbers tokens in another way than the target's."""
    if drafter_tokenizer is None or target_tokenizer is None:
        return
    if drafter_tokenizer.get_vocab() != target_tokenizer.get_vocab():
        raise CheckpointError(
            f"drafter {drafter_name} does not fit target {target_name}: their tokenizers differ; use the drafter that was "
            "trained for this target"
        )


def load_draft(drafter: str, dtype: torch.dtype, device: torch.device) -> AnyDrafter:
    """A drafter by name, not yet bound to a target."""
    return load_drafter(local_folder(drafter, "drafter"), dtype=dtype, device=device)


def load_target(target: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """A target model by name, and its tokenizer (None where it has none)."""
    folder = local_folder(target, "target")
    return load_model(folder, dtype, device), load_tokenizer(folder)


def bind(draft: AnyDrafter, drafter: str, model: PreTrainedModel, tokenizer: Any, target: str) -> TargetModel:
    """The target as this drafter taps it; what the drafter's checkpoint leaves out is taken from the target.

    Raises:
        CheckpointError: the two do not fit each other.
    """
    check_fit(draft, model, drafter, target)
    check_tokenizers(load_tokenizer(local_folder(drafter, "drafter")), tokenizer, drafter, target)
    tapped = TargetModel(model, draft.config.target_layer_ids)
    draft.share(tapped.embed_tokens, tapped.lm_head)
    return tapped


def prepare(
    model: PreTrainedModel, tokenizer: Any, target: str, drafts: Mapping[str, AnyDrafter], compile: str
) -> dict[str, TargetModel]:
    """Bind drafters, by name, to a target, all prepared for speed as ``compile`` says; the target as each of them taps it."""
    if compile == "off":
        return {name: bind(draft, name, model, tokenizer, target) for name, draft in drafts.items()}
    for part in (model, *drafts.values()):
        fuse(part) if isinstance(part, PreTrainedModel) else part.fuse()
    tapped = {name: bind(draft, name, model, tokenizer, target) for name, draft in drafts.items()}
    if model.device.type == "cpu":
        enlarge()
    return tapped


@dataclass
class Pair:
    """What :func:`load_pair` gives; ``seconds`` says what reading the models took, and preparing them for speed."""

    target: TargetModel
    drafter: AnyDrafter | None
    tokenizer: Any
    seconds: dict[str, float]


def load_pair(
    target: str,
    drafter: str | None,
    settings: DraftSettings,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    compile: str = "auto",
) -> Pair:
    """Target, drafter and tokenizer, checked against each other. ``method="ar"`` loads no drafter."""
    if settings.method not in METHODS:
        settings.validate(None)
    torch_dtype, torch_device = resolve_dtype(dtype), resolve_device(device)
    check_compile(compile, torch_device)
    began = time.perf_counter()
    drafts = {}
    if drafter is not None and settings.method != "ar":
        drafts[drafter] = load_draft(drafter, torch_dtype, torch_device)
    draft = drafts.get(drafter or "")
    settings.validate(draft)  # before the target, which is the larger one
    model, tokenizer = load_target(target, torch_dtype, torch_device)
    read = time.perf_counter()
    tapped = prepare(model, tokenizer, target, drafts, compile)
    fitting = tapped[drafter] if drafter in tapped else TargetModel(model)
    return Pair(fitting, draft, tokenizer, {"read": read - began, "prepare": time.perf_counter() - read})
