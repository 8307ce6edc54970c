"""A drafter's first weights: shaped like the target, and started from its last layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from pctree.drafters import AnyDrafter, DrafterConfig, DSparkDrafter, Eagle3Drafter
from pctree.targets import TargetModel
from pctree.train.config import TrainConfig


def new_drafter(config: TrainConfig, target: TargetModel) -> AnyDrafter:
    """A drafter shaped like the target, its layers copied from the target's last ones where the shapes allow it."""
    theirs = target.model.config
    rope = {k: v for k in ("rope_parameters", "rope_theta", "rope_scaling") if (v := getattr(theirs, k, None)) is not None}
    backbone = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or target.hidden_size // theirs.num_attention_heads,
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        tie_word_embeddings=False,
        **rope,
    )
    torch.manual_seed(config.seed)
    shape = DrafterConfig(
        backbone=backbone,
        block_size=config.block_size,
        num_target_layers=len(target.layers),
        target_layer_ids=list(target.feature_layers),
        mask_token_id=config.mask_token_id,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.confidence_weight > 0,
        confidence_head_with_markov=config.confidence_weight > 0 and config.markov_rank > 0,
        autoregressive=config.algorithm == "eagle3",
    )
    drafter = Eagle3Drafter(shape) if shape.autoregressive else DSparkDrafter(shape)
    for module in drafter.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    if isinstance(drafter, DSparkDrafter) and drafter.markov_head is not None:
        nn.init.zeros_(drafter.markov_head.markov_w2.weight)  # no bias to begin with
    return drafter


@torch.no_grad()
def initialise_from_target(drafter: AnyDrafter, target: TargetModel, sample: Tensor) -> None:
    """Start from the target's last layers, and read the last tapped layer through a near-identity ``fc``.

    The attention of EAGLE-3 reads [token; hidden state]: the target's projections go to the hidden state's half. Llama has
    no query and key norms: theirs are set to the root mean square per channel that the target's projections show on
    ``sample`` [1, L], so that attention starts with about the target's logits.
    """
    source = list(target.layers)[-len(drafter.layers) :]
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        seen[module] = output.float()

    projections = [p for layer in source for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    handles = [projection.register_forward_hook(record) for projection in projections]
    target.prefill(target.new_cache(1, sample.shape[1]), sample)
    for handle in handles:
        handle.remove()
    for mine, theirs in zip(drafter.layers, source, strict=True):
        shapes = {name: tensor.shape for name, tensor in mine.state_dict().items()}
        state = {name: tensor for name, tensor in theirs.state_dict().items() if tensor.shape == shapes.get(name)}
        mine.load_state_dict(state, strict=False)
        if isinstance(drafter, Eagle3Drafter):
            mine.hidden_norm.weight.copy_(theirs.input_layernorm.weight)
            mine.input_layernorm.weight.fill_(1.0)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(theirs.self_attn, name).weight
                getattr(mine.self_attn, name).weight[:, -weight.shape[1] :] = weight
        for norm, projection in (("q_norm", theirs.self_attn.q_proj), ("k_norm", theirs.self_attn.k_proj)):
            if f"self_attn.{norm}.weight" not in state:
                rms = mine.self_attn.split(seen[projection]).pow(2).mean(dim=(0, 1, 2)).sqrt()
                getattr(mine.self_attn, norm).weight.copy_(rms)
    hidden = drafter.fc.weight.shape[0]
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
    if isinstance(drafter, DSparkDrafter):
        drafter.hidden_norm.weight.copy_(torch.stack([layer.input_layernorm.weight.float() for layer in source]).mean(0))
    drafter.norm.weight.copy_(target.backbone.norm.weight)
