"""Llama- and Qwen3-like layers in fewer and larger steps, with the numbers that transformers' own layers give.

A forward of a few rows is short, so what it costs besides reading the weights shows: many small products and many layers of
Python. Here query, key and value are one product, gate and up another, both rotations one step, and a norm two. Weights are
packed (see :mod:`pctree.packing`), and the layers' own modules keep working on the same ones. Targets and drafters use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pctree.packing import PackedLinear, can_pack, pack_linears

FAMILIES = ("llama", "qwen3")
# Called with layer, query [R, heads, n, D], key and value [R, kv_heads, n, D]; returns [R, heads, n, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Part(nn.Module):
    """Some of the outputs of a product that serves several layers: how the model's own forward sees it."""

    def __init__(self, whole: PackedLinear, start: int, size: int):
        super().__init__()
        self.whole, self.start, self.size = whole, start, size

    def forward(self, rows: Tensor) -> Tensor:
        return self.whole(rows)[..., self.start : self.start + self.size]


def joined(linears: Sequence[Any]) -> PackedLinear:
    """One packed product that gives the outputs of several."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    return PackedLinear(torch.cat([linear.weight.detach() for linear in linears]), bias)


def join(owner: nn.Module, *names: str) -> PackedLinear:
    """One packed product in the place of several of ``owner``'s."""
    linears: list[Any] = [getattr(owner, name) for name in names]
    whole, start = joined(linears), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(owner, name, Part(whole, start, linear.out_features))
        start += linear.out_features
    return whole


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm as Llama rounds it: normalised in float32, rounded, then multiplied by the weight."""
    return F.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight


def rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the last axis."""
    low, high = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-high, low], dim=-1) * sin


class FusedLayer:
    """A decoder layer, read anew; its modules stay its own."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.attention, self.mlp = layer, attention, mlp
        self.head_dim = attention.head_dim
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
        norm = self.layer.input_layernorm
        rows = normed(hidden, norm.weight, norm.variance_epsilon)
        return self.feed(hidden + self.mix(index, rows, cos, sin, attend))

    def mix(self, index: int, rows: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """What attention makes of normed rows [R, n, …]."""
        heads = self.qkv(rows).unflatten(-1, (-1, self.head_dim))
        turned = heads[:, :, : self.heads + self.kv_heads]
        if self.head_norm is not None:
            turned = normed(turned, self.head_norm, self.head_eps)
        turned = rotated(turned, cos, sin)
        query, key = turned[:, :, : self.heads].transpose(1, 2), turned[:, :, self.heads :].transpose(1, 2)
        attended = attend(index, query, key, heads[:, :, self.heads + self.kv_heads :].transpose(1, 2))
        return self.attention.o_proj(attended.transpose(1, 2).flatten(2))

    def feed(self, hidden: Tensor) -> Tensor:
        """Rows with what the multilayer perceptron adds to them."""
        norm = self.layer.post_attention_layernorm
        gate, up = self.gate_up(normed(hidden, norm.weight, norm.variance_epsilon)).chunk(2, dim=-1)
        return hidden + self.mlp.down_proj(F.silu(gate) * up)


class FusedKeys:
    """The keys and values that several layers take from the same rows, in one product: a drafter's context. To be made
    before the layers are fused.
    """

    def __init__(self, attentions: Sequence[Any]):
        first = attentions[0]
        self.shape = (len(attentions), 2, first.k_proj.out_features // first.head_dim, first.head_dim)
        self.product = joined([linear for each in attentions for linear in (each.k_proj, each.v_proj)])
        self.norm = torch.stack([each.k_norm.weight for each in attentions])[:, None]
        self.eps = first.k_norm.variance_epsilon

    def __call__(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values [R, n, layers, kv_heads, D] of rows [R, n, H]; ``cos`` and ``sin`` [R, n, D]."""
        keys, values = self.product(rows).unflatten(-1, self.shape).unbind(3)
        return rotated(normed(keys, self.norm, self.eps), cos[:, :, None, None], sin[:, :, None, None]), values


def fuse(model: PreTrainedModel) -> None:
    """Prepare a model for :class:`pctree.TargetModel`, in place: packed weights, and fused layers where its kind is known."""
    layers: Any = model.get_decoder().layers
    config: Any = model.config
    if config.model_type in FAMILIES and can_fuse(layers, config.hidden_act):
        model.pctree_layers = [FusedLayer(layer) for layer in layers]  # type: ignore[assignment]
    pack_linears(model, keep_weights=["lm_head"])  # a drafter with fewer tokens takes some of its rows


def can_fuse(layers: Sequence[Any], activation: str) -> bool:
    """Whether the layers are of the kind that :class:`FusedLayer` knows, with weights that can be packed."""
    products = [
        getattr(part, name)
        for layer in layers
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj")))
        for name in names
    ]
    return activation == "silu" and all(type(linear) is nn.Linear and can_pack(linear) for linear in products)
