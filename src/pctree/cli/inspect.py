"""``pctree inspect``: what a drafter checkpoint is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from pctree.cli.common import out


def command(
    path: str = typer.Argument(help="A drafter: a folder or hub name (DSpark or DFlash), or smollm2."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Say what a drafter checkpoint is: block size, head, layers it reads, size, and the methods it can run."""
    from pctree.loading import local_folder

    facts = describe(local_folder(path, "drafter"))
    if as_json:
        out.print_json(json.dumps(facts))
        return
    from rich.table import Table

    out.print(sentence(facts))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
        table.add_row(key.replace("_", " "), shown)
    out.print(table)


def describe(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint; it is loaded whole, so that a damaged one is found out."""
    from pctree.drafters import load_drafter
    from pctree.errors import UsageError
    from pctree.methods import METHODS, DraftSettings

    drafter = load_drafter(path)
    config, backbone = drafter.config, drafter.config.backbone

    def runs(method: str) -> bool:
        try:
            DraftSettings(method).validate(drafter)
        except UsageError:
            return False
        return True

    parameters = {name: tensor.numel() for name, tensor in drafter.state_dict().items()}
    shared = sum(n for name, n in parameters.items() if name.split(".")[0] in ("embed_tokens", "lm_head"))
    return {
        "path": str(path),
        "layout": config.layout,
        "method": config.method,
        "block_size": config.block_size,
        "drafted_tokens": config.draft_length,
        "markov_head": config.markov_head_type if config.markov_rank else None,
        "markov_rank": config.markov_rank,
        "confidence_head": config.enable_confidence_head,
        "target_layers": config.num_target_layers,
        "target_layer_ids": config.target_layer_ids,
        "mask_token_id": config.mask_token_id,
        "layers": backbone.num_hidden_layers,
        "hidden_size": backbone.hidden_size,
        "heads": backbone.num_attention_heads,
        "key_value_heads": backbone.num_key_value_heads,
        "vocabulary": backbone.vocab_size,
        "draft_vocabulary": config.draft_vocab_size or backbone.vocab_size,
        "parameters": sum(parameters.values()) - shared,
        "own_embeddings": "embed_tokens.weight" in parameters,
        "own_output_head": "lm_head.weight" in parameters,
        "megabytes": round(sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6, 1),
        "methods": [name for name in METHODS if runs(name)],
    }


def sentence(facts: dict[str, Any]) -> str:
    """The facts in words."""
    name = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "EAGLE-3"}[facts["method"]]
    article = "An" if name.startswith("E") else "A"
    stack = f"{facts['layers']} layer{'s' if facts['layers'] > 1 else ''} of width {facts['hidden_size']}"
    if facts["method"] == "eagle3":
        drafts = f"{facts['drafted_tokens']} tokens a draft, each from a forward of {stack}"
    else:
        head = (
            f"a {facts['markov_head']} Markov head of rank {facts['markov_rank']}" if facts["markov_head"] else "no Markov head"
        )
        confidence = "a confidence head" if facts["confidence_head"] else "no confidence head"
        drafts = f"{facts['drafted_tokens']} tokens a block from {stack}, {head}, {confidence}"
    frozen = "its own" if facts["own_output_head"] else "the target's"
    layers = ", ".join(map(str, facts["target_layer_ids"]))
    target = f"{facts['vocabulary']:,} tokens"
    if facts["target_layers"] is not None:
        target = f"{facts['target_layers']} layers and {target}"
    if facts["draft_vocabulary"] != facts["vocabulary"]:
        target += f" ({facts['draft_vocabulary']:,} of which it drafts)"
    return (
        f"{article} {name} drafter ({facts['layout']} layout): {drafts}; it reads layers {layers} of a target of {target}, and "
        f"uses {frozen} output head."
    )
