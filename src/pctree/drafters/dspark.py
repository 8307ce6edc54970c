"""The DSpark drafter: one parallel backbone forward gives base logits for a block of B positions.

Keys and values of every layer are [context; block]. The context part comes from the target's hidden states and depends
on no block, so it is computed once per committed token and kept; the block part is thrown away after each round. Source:
DeepSpec, ``Qwen3DSparkModel``; without a Markov head (``markov_rank: 0``) the same backbone is DFlash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from pctree.drafters.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead
from pctree.fused import Attend, FusedKeys, FusedLayer, can_fuse
from pctree.packing import pack_linears, rows_of
from pctree.targets.kv_cache import KVCache


@dataclass
class DrafterConfig:
    """What a drafter is, whatever layout it was stored in; ``backbone`` holds the transformer's own numbers."""

    backbone: Any  # a transformers Qwen3Config
    block_size: int
    num_target_layers: int | None  # None: the layout does not say
    target_layer_ids: list[int]
    mask_token_id: int
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    mask_filling: bool = False  # the anchor's slot predicts nothing and the others themselves, not the token after
    layout: str = "DeepSpec"
    autoregressive: bool = False  # EAGLE-3: one forward a layer of the tree, not one a block
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary

    @property
    def draft_length(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - 1 if self.mask_filling else self.block_size

    @property
    def method(self) -> str:
        """The method that the checkpoint was trained for."""
        return "eagle3" if self.autoregressive else "dspark" if self.markov_rank else "dflash"


class BlockAttention(nn.Module):
    """Attention of a block to all context and, in both directions, to itself."""

    def __init__(self, config: Any, layer: int, input_size: int | None = None):
        super().__init__()
        width = input_size or config.hidden_size
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

    def split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [R, kv_heads, n, D] of rows [R, n, H]."""
        keys = self.k_norm(self.split(self.k_proj(hidden))).transpose(1, 2)
        keys, _ = apply_rotary_pos_emb(keys, keys[:, :0], *rotary)
        return keys, self.split(self.v_proj(hidden)).transpose(1, 2)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query = self.q_norm(self.split(self.q_proj(hidden))).transpose(1, 2)
        query, _ = apply_rotary_pos_emb(query, query[:, :0], *rotary)
        out = attend(self.layer, query, *self.keys_values(hidden, rotary))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.self_attn = BlockAttention(config, layer)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafting(nn.Module):
    """What all drafters have: a configuration, and embeddings and an output head, which are either the checkpoint's own or,
    where it has none, the target's modules, shared and not copied. A drafter with a reduced vocabulary always has its own head.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.layers: Any = ()
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        # Target ids [V_draft] of the drafter's own tokens; None where it drafts from the target's whole vocabulary.
        self.draft_ids: Tensor | None = None
        self.fused_layers: Sequence[FusedLayer] = ()

    def fuse(self) -> None:
        """Prepare for decoding on this machine, in place: packed weights, and fused layers where they are of a known kind. The
        numbers stay the same. To be called before :meth:`share`, since the target's modules are the target's to prepare.
        """
        if can_fuse(self.layers, self.config.backbone.hidden_act):
            self._fuse_layers()
        pack_linears(self, keep_weights=["markov_w2"])

    def _fuse_layers(self) -> None:
        self.fused_layers = [FusedLayer(layer) for layer in self.layers]

    def share(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Use the target's embeddings and output head where the checkpoint brought none."""
        if self.embed_tokens is None:
            self.embed_tokens = embed_tokens
        if self.lm_head is None:
            self.lm_head = lm_head if self.draft_ids is None else rows_of(lm_head, self.draft_ids)

    def reduce_vocabulary(self, ids: Tensor) -> None:
        """Draft only the target tokens ``ids`` [V_draft]: the head and the Markov head shrink to their rows."""
        self.config = replace(self.config, draft_vocab_size=len(ids))
        self.draft_ids = ids
        if self.lm_head is not None:
            self.lm_head = rows_of(self.lm_head, ids)
        markov_head = getattr(self, "markov_head", None)
        if markov_head is not None:
            markov_head.markov_w2 = rows_of(markov_head.markov_w2, ids)


class DSparkDrafter(Drafting):
    """DSpark, and without a head DFlash. In DeepSpec's read-out slot j predicts the token after it, so B slots draft B tokens;
    in the mask-filling one the slots behind the anchor predict themselves, so B slots draft B - 1.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        backbone = config.backbone
        self.fc = nn.Linear(len(config.target_layer_ids) * backbone.hidden_size, backbone.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.layers: Any = nn.ModuleList(BlockLayer(backbone, i) for i in range(backbone.num_hidden_layers))
        self.norm = Qwen3RMSNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(backbone)
        self.fused_keys: FusedKeys | None = None
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if config.markov_rank:
            head = MARKOV_HEADS[config.markov_head_type]
            self.markov_head = head(
                backbone.vocab_size, config.markov_rank, backbone.hidden_size, config.draft_vocab_size or backbone.vocab_size
            )
        if config.enable_confidence_head:
            read_rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(backbone.hidden_size, read_rank)

    def _fuse_layers(self) -> None:
        self.fused_keys = FusedKeys([layer.self_attn for layer in self.layers])
        super()._fuse_layers()

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def new_cache(self, requests: int, max_length: int, budget: int = 0) -> KVCache:
        """An empty context cache; ``max_length`` counts committed tokens, the block's rows are added here (whatever the
        tree's ``budget``).
        """
        backbone = self.config.backbone
        weight = self.norm.weight
        return KVCache(
            len(self.layers),
            requests,
            max_length + self.block_size,
            backbone.num_key_value_heads,
            backbone.head_dim,
            weight.dtype,
            weight.device,
        )

    def context(self, features: Tensor) -> Tensor:
        """Context rows [R, n, H] of target features [R, n, m·H]."""
        return self.hidden_norm(self.fc(features))

    @torch.inference_mode()
    def extend(self, cache: KVCache, features: Tensor, next_ids: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Commit the features [R, n, m·H] of newly committed tokens to the context; ``counts`` [R], where given, says how
        many of the n count for each request (the rows behind them are overwritten by what comes next). ``next_ids`` is
        for drafters that pair features with tokens.
        """
        rows = features.shape[1]
        context = self.context(features)
        slots = cache.window(rows).slots
        rotary = self.rotary(context, slots)
        if self.fused_keys is not None:
            cache.write_all(slots, *self.fused_keys(context, *rotary))
        else:
            for layer, block in enumerate(self.layers):
                keys, values = block.self_attn.keys_values(context, rotary)
                cache.write(layer, slots, keys, values, span=0)
        cache.advance(rows if counts is None else counts)

    @torch.inference_mode()
    def draft_block(self, cache: KVCache, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [R, D, H] and base logits [R, D, V] of the D tokens drafted behind each request's anchor [R]."""
        assert self.lm_head is not None
        window = cache.window(self.block_size)
        mask = None
        if not window.even:  # the rows behind a request's own block are not its
            mask = (torch.arange(window.span, device=anchors.device) <= window.slots[:, -1:])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = cache.write(layer, window.slots, key, value, window.span)
            return attention(query, key, value, mask)

        hidden = self.backbone(self.block_ids(anchors), window.slots, attend)
        if self.config.mask_filling:
            hidden = hidden[:, 1:]
        return hidden, self.lm_head(hidden)

    def block_ids(self, anchors: Tensor) -> Tensor:
        """Input ids [..., B]: the anchor, then mask tokens."""
        masks = anchors.new_full((*anchors.shape, self.block_size - 1), self.config.mask_token_id)
        return torch.cat([anchors[..., None], masks], dim=-1)

    def backbone(self, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Normalised hidden states [R, n, H] of block rows; ``attend`` brings the context's keys and values in."""
        assert self.embed_tokens is not None
        hidden = self.embed_tokens(token_ids)
        rotary = self.rotary(hidden, position_ids)
        if self.fused_layers:
            cos, sin = (part[:, :, None] for part in rotary)
            for index, fused in enumerate(self.fused_layers):
                hidden = fused(index, hidden, cos, sin, attend)
        else:
            for layer in self.layers:
                hidden = layer(hidden, rotary, attend)
        return self.norm(hidden)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention [R, heads, n, D] where heads share key heads; ``mask`` broadcasts over heads."""
    requests, heads, rows, head_dim = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(requests, key.shape[1], groups * rows, head_dim)
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, groups, 1)
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).reshape(query.shape)
