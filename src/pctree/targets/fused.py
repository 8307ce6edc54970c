"""Llama- and Qwen3-like layers in fewer and larger steps, with the numbers that transformers' own layers give.

A forward of a few rows is short, so what it costs besides reading the weights shows: many small products and many layers of
Python. Here query, key and value are one product, gate and up another, both rotations one step, and a norm two. Weights are
packed (see :mod:`pctree.packing`), and the model's own layers keep working on the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pctree.packing import PackedLinear, can_pack, pack_linears

FAMILIES = ("llama", "qwen3")
# Called with layer, query [R, heads, n, D], key and value [R, kv_heads, n, D], and the scale; returns [R, n, heads, D].
Attend = Callable[[int, Tensor, Tensor, Tensor, "float | None"], Tensor]


class Part(nn.Module):
    """Some of the outputs of a product that serves several layers: how the model's own forward sees it."""

    def __init__(self, whole: PackedLinear, start: int, size: int):
        super().__init__()
        self.whole, self.start, self.size = whole, start, size

    def forward(self, rows: Tensor) -> Tensor:
        return self.whole(rows)[..., self.start : self.start + self.size]


def join(owner: nn.Module, *names: str) -> PackedLinear:
    """One packed product in the place of several of ``owner``'s."""
    linears: list[Any] = [getattr(owner, name) for name in names]
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    whole, start = PackedLinear(torch.cat([linear.weight.detach() for linear in linears]), bias), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(owner, name, Part(whole, start, linear.out_features))
        start += linear.out_features
    return whole


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm as Llama rounds it: normalised in float32, rounded, then multiplied by the weight."""
    return F.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight


class FusedLayer:
    """A decoder layer of transformers, read anew; its modules stay the model's."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.attention, self.mlp = layer, attention, mlp
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = join(attention, "q_proj", "k_proj", "v_proj")
        self.gate_up = join(mlp, "gate_proj", "up_proj")
        self.head_norm: Tensor | None = None  # [heads + kv_heads, D]
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = attention.q_norm, attention.k_norm
            self.head_norm = torch.cat([q_norm.weight.expand(self.heads, -1), k_norm.weight.expand(self.kv_heads, -1)])
            self.head_eps = q_norm.variance_epsilon

    def __call__(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Rows [R, n, H]; ``cos`` and ``sin`` [R, n, 1, D]."""
        layer = self.layer
        norm = layer.input_layernorm
        rows = self.qkv(normed(hidden, norm.weight, norm.variance_epsilon)).unflatten(-1, (-1, self.head_dim))
        turned = rows[:, :, : self.heads + self.kv_heads]
        if self.head_norm is not None:
            turned = normed(turned, self.head_norm, self.head_eps)
        low, high = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
        query, key = turned[:, :, : self.heads].transpose(1, 2), turned[:, :, self.heads :].transpose(1, 2)
        attended = attend(index, query, key, rows[:, :, self.heads + self.kv_heads :].transpose(1, 2), self.scaling)
        hidden = hidden + self.attention.o_proj(attended.flatten(2))
        norm = layer.post_attention_layernorm
        gate, up = self.gate_up(normed(hidden, norm.weight, norm.variance_epsilon)).chunk(2, dim=-1)
        return hidden + self.mlp.down_proj(F.silu(gate) * up)


def fuse(model: PreTrainedModel) -> None:
    """Prepare a model for :class:`pctree.TargetModel`, in place: packed weights, and fused layers where its kind is known."""
    backbone: Any = model.get_decoder()
    if can_fuse(model, backbone):
        model.pctree_layers = [FusedLayer(layer) for layer in backbone.layers]  # type: ignore[assignment]
    pack_linears(model, keep_weights=["lm_head"])  # a drafter with fewer tokens takes some of its rows


def can_fuse(model: PreTrainedModel, backbone: Any) -> bool:
    """Whether the layers are those that :class:`FusedLayer` knows, with weights that can be packed."""
    config: Any = model.config
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    products = [
        getattr(part, name)
        for layer in backbone.layers
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj")))
        for name in names
    ]
    return all(type(linear) is nn.Linear and can_pack(linear) for linear in products)
