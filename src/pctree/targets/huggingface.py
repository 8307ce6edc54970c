"""Any Hugging Face causal LM with standard attention as a target: prefill, verify(tree), commit(path).

The model's own forward runs unchanged. What is ours is the attention function, which transformers lets a caller
register: it writes the new keys and values into our :class:`KVCache` and attends under our mask. So no version of the
transformers cache API is involved, and the same code runs a prompt, one token, and a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from pctree.errors import CheckpointError
from pctree.fused import FusedLayer
from pctree.targets.kv_cache import KVCache, Window, visible_rows

ATTENTION = "pctree"
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()
PREFILL_CHUNK = 512


@dataclass
class TreeAttention:
    """What one forward needs at every layer: the cache, where the new rows go, and who may see whom."""

    cache: KVCache
    window: Window
    mask: Tensor | None  # [R, 1, groups * n, span], additive, in the model's dtype; None: all see all

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        requests, heads, rows, head_dim = query.shape
        key, value = self.cache.write(layer, self.window.slots, key, value, self.window.span)
        # Grouped-query attention without copying keys: the heads that share a key head become rows of it.
        grouped = query.reshape(requests, key.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=self.mask, scale=scaling)
        return out.reshape(requests, heads, rows, head_dim)


def _attention_forward(module, query, key, value, attention_mask, scaling=None, tree_attention=None, **unused):
    return tree_attention(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention_forward)


class TargetModel:
    """A causal LM behind ``prefill``, ``verify`` and ``commit``, with context features from the layers a drafter names.

    Args:
        model: the language model, in evaluation mode.
        feature_layers: the drafter's ``target_layer_ids``: -1 is the embedding output, i the raw output of decoder
            layer i (before the final norm). Only these are kept during a forward.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int] = ()):
        config = model.config
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise CheckpointError(
                f"the target uses sliding-window attention (window {config.sliding_window}), whose cache cannot be "
                "rewound to a tree path; use a target with full attention"
            )
        self.model = model.eval()
        self.feature_layers = list(feature_layers)
        try:
            self._read_model()
            self._check_layers()
            if model not in _CHECKED:
                self._check_forward()
                _CHECKED.add(model)
        except CheckpointError:
            raise
        except Exception as error:  # other architectures fail in as many ways as there are
            cause = " ".join(str(error).split())
            raise CheckpointError(self._refusal(f"{type(error).__name__}: {cause}")) from error

    def _read_model(self) -> None:
        config = self.model.config
        self.backbone: Any = self.model.get_decoder()
        self.layers: Any = self.backbone.layers
        self.embed_tokens: Any = self.model.get_input_embeddings()
        self.lm_head: Any = self.model.get_output_embeddings()
        self._fused_layers: Sequence[FusedLayer] = getattr(self.model, "pctree_layers", ())
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_length: int = config.max_position_embeddings
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def _check_layers(self) -> None:
        kinds = set(getattr(self.model.config, "layer_types", None) or ()) - {"full_attention"}
        kinds |= {type(layer).__name__ for layer in self.layers if not hasattr(layer, "self_attn")}
        if kinds:
            raise CheckpointError(self._refusal(f"it has layers of kind {', '.join(sorted(kinds))}"))
        for layer in self.feature_layers:
            if not -1 <= layer < len(self.layers) - 1:
                raise CheckpointError(
                    f"target_layer_ids {self.feature_layers} do not fit a target of {len(self.layers)} layers: each "
                    f"must lie between -1 (the embedding output) and {len(self.layers) - 2}"
                )

    @torch.inference_mode()
    def _check_forward(self) -> None:
        """Compare our logits for a few tokens, prompt and verify, with the model's own.

        A model with running states, other position schemes or scaled logits can go through our forward without an error
        and be wrong; this finds it out before anything is decoded.
        """
        tokens = torch.arange(1, 6, device=self.device)[None] % self.vocab_size
        cache = self.new_cache(1, tokens.shape[1])
        self.prefill(cache, tokens[:, :3])
        chain = torch.ones(1, 2, 2, dtype=torch.bool, device=self.device).tril()
        mine, _ = self.verify(cache, tokens[:, 3:], torch.arange(2, device=self.device)[None], chain)
        theirs = self.model(tokens, use_cache=False).logits[:, 3:].float()
        error = float((mine.float() - theirs).norm() / theirs.norm().clamp_min(1e-9))
        if not error < (1e-3 if self.dtype == torch.float32 else 0.1):
            raise CheckpointError(self._refusal(f"its logits through a tree forward differ from its own by {error:.1%}"))

    def _refusal(self, reason: str) -> str:
        return (
            f"the target is a {type(self.model).__name__}, which cannot be verified as a tree ({reason}); "
            "use a decoder with standard attention in every layer, such as Qwen3 or Llama"
        )

    @property
    def eos_token_ids(self) -> list[int]:
        """Stop tokens of the model's generation config (or of its config, where it has none)."""
        generation = getattr(self.model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = getattr(self.model.config, "eos_token_id", None)
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def feature_size(self) -> int:
        return self.hidden_size * len(self.feature_layers)

    def new_cache(self, requests: int, max_length: int) -> KVCache:
        """An empty cache for ``requests`` sequences of at most ``max_length`` tokens, provisional rows included."""
        return KVCache(len(self.layers), requests, max_length, self._kv_heads, self._head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Commit a prompt [R, L] (the same L for all) and return the last logits [R, V] and all features [R, L, m·H]."""
        features = []
        hidden = None
        for chunk in token_ids.split(PREFILL_CHUNK, dim=1):
            rows = chunk.shape[1]
            causal = torch.ones(rows, rows, dtype=torch.bool, device=self.device).tril().expand(len(chunk), -1, -1)
            hidden, chunk_features = self.forward(cache, chunk, torch.arange(rows, device=self.device), causal)
            cache.advance(rows)
            features.append(chunk_features)
        assert hidden is not None
        return self.lm_head(hidden[:, -1]), torch.cat(features, dim=1)

    @torch.inference_mode()
    def verify(self, cache: KVCache, token_ids: Tensor, depths: Tensor, ancestor_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Score the nodes of a tree in one forward; their cache rows stay provisional until ``commit``.

        Args:
            token_ids: [R, N], root first.
            depths: [R, N], 0 for the root; the rotary position is the committed length plus the depth.
            ancestor_mask: bool [R, N, N], true where the column is an ancestor of the row or the row itself.
        Returns:
            Logits [R, N, V] after every node, and context features [R, N, m·H].
        """
        hidden, features = self.forward(cache, token_ids, depths, ancestor_mask)
        return self.lm_head(hidden), features

    def commit(self, cache: KVCache, path: Tensor, counts: Tensor) -> None:
        """Keep the accepted path's rows; see :meth:`KVCache.commit`."""
        cache.commit(path, counts)

    @torch.inference_mode()
    def forward(self, cache: KVCache, token_ids: Tensor, offsets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised last hidden states [R, n, H] and features [R, n, m·H] of n new rows behind the committed ones.

        ``offsets`` ([R, n] or [n]) are positions relative to the committed length; ``mask`` [R, n, n] says which new
        rows see which. All committed rows are seen by all.
        """
        requests, rows = token_ids.shape
        window = cache.window(rows)
        attention = TreeAttention(cache, window, self._additive_mask(window, mask))
        # A node past the context can never be committed; at its true position, though, it could rescale a dynamic rotary
        # embedding for all rows.
        positions = (window.lengths[:, None] + offsets).clamp_max(self.max_length - 1)
        if self._fused_layers:
            hidden, taps = self._fused_forward(token_ids, positions, attention)
        else:
            with self._own_attention(), self._tapped_layers() as taps:
                hidden = self.backbone(
                    input_ids=token_ids, position_ids=positions, use_cache=False, tree_attention=attention
                ).last_hidden_state
        features = [taps[layer] for layer in self.feature_layers]
        return hidden, torch.cat(features, dim=-1) if features else hidden.new_zeros(requests, rows, 0)

    def _fused_forward(
        self, token_ids: Tensor, positions: Tensor, attention: TreeAttention
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Normalised last hidden states, and the outputs of all tapped layers, through :mod:`pctree.fused`."""
        hidden = self.embed_tokens(token_ids)
        cos, sin = (part[:, :, None] for part in self.backbone.rotary_emb(hidden, positions))
        taps, attend = {-1: hidden}, partial(attention, scaling=self.layers[0].self_attn.scaling)
        for index, layer in enumerate(self._fused_layers):
            hidden = layer(index, hidden, cos, sin, attend)
            if index in self.feature_layers:
                taps[index] = hidden
        return self.backbone.norm(hidden), taps

    def _additive_mask(self, window: Window, mask: Tensor) -> Tensor | None:
        if mask.shape[1] == 1 and window.even:  # one row behind requests of one length sees all there is
            return None
        visible = visible_rows(window, mask)
        additive = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        additive.masked_fill_(~visible, torch.finfo(self.dtype).min)
        return additive.repeat(1, self._heads // self._kv_heads, 1)[:, None]

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        config = self.backbone.config
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before

    @contextmanager
    def _tapped_layers(self) -> Iterator[dict[int, Tensor]]:
        taps: dict[int, Tensor] = {}

        def tap(layer: int):
            def hook(module, args, output):
                taps[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [
            (self.embed_tokens if layer == -1 else self.layers[layer]).register_forward_hook(tap(layer))
            for layer in self.feature_layers
        ]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()
