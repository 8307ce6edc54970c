"""Linear layers whose weights lie as the processor reads them.

A matrix product of a few rows does little but read its weight. In its plain layout a bfloat16 weight is rearranged for the
matrix units at every call, which doubles the time of a forward; arranged once, when the model is loaded, it is read at about
the speed of the memory. The products are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 32  # the layout is chosen for about so many rows, and serves any number


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference in bfloat16 on a CPU. The plain weight is kept only for whom reads rows of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, keep_weight: bool = False):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        if keep_weight:
            self.weight = weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


def can_pack(linear: nn.Linear) -> bool:
    """Whether this layer gains from packing here: bfloat16, on a CPU, with the library that does it."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not on every processor


def rows_of(linear: Any, rows: Tensor) -> nn.Module:
    """A layer that gives only these outputs of ``linear`` (packed or not, without bias), packed if it is."""
    weight = linear.weight.detach()[rows]
    if isinstance(linear, PackedLinear):
        return PackedLinear(weight)
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def pack_linears(module: nn.Module, keep_weights: Sequence[str] = ()) -> None:
    """Replace the linear layers in ``module`` by packed ones, where that gains something; those of the names in
    ``keep_weights`` keep their plain weights too.
    """
    for name, child in module.named_children():
        if type(child) is nn.Linear and can_pack(child):
            setattr(module, name, PackedLinear(child.weight, child.bias, keep_weight=name in keep_weights))
        else:
            pack_linears(child, keep_weights)
