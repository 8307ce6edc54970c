"""The EAGLE-3 drafter: one decoder layer, run once for every layer of the tree.

Its attention reads [token embedding; hidden state], 2H wide. Hidden state i is paired with token i+1 while its rotary
position stays i. Committed tokens bring the target's features through ``fc``; a drafted token brings the hidden state that
the drafter itself put out for its parent. Source: DeepSpec, ``Qwen3Eagle3Model``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from pctree.drafters.dspark import BlockAttention, DrafterConfig, Drafting, attention
from pctree.targets.kv_cache import KVCache, visible_rows


class EagleContext(KVCache):
    """The drafter's cache, and each request's last hidden state [R, H], which the next root starts from."""

    last_hidden: Tensor

    def narrow(self, start: int, count: int) -> EagleContext:
        view = super().narrow(start, count)
        assert isinstance(view, EagleContext)
        view.last_hidden = self.last_hidden[start : start + count]
        return view

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.last_hidden[target] = self.last_hidden[source]


class EagleLayer(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.self_attn = BlockAttention(config, 0, input_size=2 * config.hidden_size)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads [R, n, 2H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(Drafting):
    """EAGLE-3 with one layer; drafts up to ``ttt_length`` tokens, each layer of the tree in one forward."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        backbone = config.backbone
        self.fc = nn.Linear(len(config.target_layer_ids) * backbone.hidden_size, backbone.hidden_size, bias=False)
        self.layers: Any = nn.ModuleList([EagleLayer(backbone)])
        self.norm = Qwen3RMSNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(backbone)

    def new_cache(self, requests: int, max_length: int, budget: int = 64) -> EagleContext:
        """An empty context with room for every node that a tree of ``budget`` nodes can expand."""
        backbone, weight = self.config.backbone, self.norm.weight
        rows = max_length + self.config.draft_length * budget
        heads, head_dim = backbone.num_key_value_heads, backbone.head_dim
        cache = EagleContext(1, requests, rows, heads, head_dim, weight.dtype, weight.device)
        cache.last_hidden = torch.zeros(requests, backbone.hidden_size, dtype=weight.dtype, device=weight.device)
        return cache

    @torch.inference_mode()
    def extend(self, cache: KVCache, features: Tensor, next_ids: Tensor, counts: Tensor | None = None) -> None:
        """Commit features [R, n, m·H], each paired with the token that follows it (``next_ids`` [R, n])."""
        assert isinstance(cache, EagleContext)
        assert self.embed_tokens is not None
        layer, rows = self.layers[0], features.shape[1]
        hidden = self.fc(features)
        slots = cache.window(rows).slots
        pair = layer.pair(self.embed_tokens(next_ids), hidden)
        keys, values = layer.self_attn.keys_values(pair, self.rotary(hidden, slots))
        cache.write(0, slots, keys, values, span=0)
        last = torch.full((len(features),), rows) if counts is None else counts
        cache.last_hidden.copy_(hidden[torch.arange(len(features)), last - 1])
        cache.advance(last)

    @torch.inference_mode()
    def draft_block(self, cache: KVCache, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [R, 1, H] and logits [R, 1, V] of the first drafted token; the root's own row is committed."""
        assert isinstance(cache, EagleContext)
        rows = (cache.lengths - 1).to(anchors.device)[:, None]
        span = int(cache.lengths.max())
        mask = (torch.arange(span, device=anchors.device) <= rows)[:, None, None]
        return self._expand(cache, anchors[:, None], cache.last_hidden[:, None], rows, None, span, mask)

    @torch.inference_mode()
    def expand(
        self, cache: KVCache, token_ids: Tensor, hidden: Tensor, depth: int, first_row: int, ancestors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One layer of the tree: P drafted tokens at ``depth``, written to the provisional rows from ``first_row`` on.

        Args:
            token_ids: [R, P]; ``hidden`` [R, P, H]: what the drafter put out for their parents.
            ancestors: bool [R, P, M], which of the M provisional rows each may see, its own included.
        Returns:
            Hidden states [R, P, H], and logits [R, P, V] of their children.
        """
        window = cache.window(ancestors.shape[2])
        mask = visible_rows(window, ancestors)[:, None]
        positions = (window.lengths[:, None] - 1 + depth).expand_as(token_ids)
        return self._expand(cache, token_ids, hidden, positions, window.slots[:, first_row:], window.span, mask)

    def _expand(self, cache, token_ids, hidden, positions, slots, span, mask) -> tuple[Tensor, Tensor]:
        assert self.embed_tokens is not None
        assert self.lm_head is not None
        layer = self.layers[0]

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if slots is not None:
                cache.write(index, slots, key, value, span)
            return attention(query, cache.keys[index, :, :, :span], cache.values[index, :, :, :span], mask)

        pair = layer.pair(self.embed_tokens(token_ids), hidden)
        rotary = self.rotary(hidden, positions)
        if self.fused_layers:
            fused, (cos, sin) = self.fused_layers[0], (part[:, :, None] for part in rotary)
            out = fused.feed(hidden + fused.mix(0, pair, cos, sin, attend))
        else:
            out = layer.finish(hidden, layer.self_attn(pair, rotary, attend))
        return out, self.lm_head(self.norm(out))
