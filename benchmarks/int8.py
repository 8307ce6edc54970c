"""Would weight-only int8 make forwards faster here? All linear layers of the small target, packed bfloat16 beside int8.

    python benchmarks/int8.py

Random weights in the target's shapes; the int8 product is torch's own weight-only kernel for CPUs. One row is plain decoding,
eight are a chain of seven, thirty-two a tree.
"""

from __future__ import annotations

import torch
import typer
from rich.table import Table
from stages import alternate
from torch import Tensor

from pctree.cli.common import out
from pctree.packing import PackedLinear

SHAPES = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]  # outputs, inputs
LAYERS = 30


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [N, K] and a scale for each output [N]."""
    scale = weight.float().abs().amax(1) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale.to(torch.bfloat16)


def main(rows: str = typer.Option("1,4,8,16,32", help="Rows of a forward."), repeats: int = typer.Option(10)) -> None:
    """Time both for every number of rows."""
    weights = [(0.02 * torch.randn(shape)).to(torch.bfloat16) for _ in range(LAYERS) for shape in SHAPES]
    packed = [PackedLinear(weight) for weight in weights]
    whole = [quantised(weight) for weight in weights]
    table = Table("rows", "packed bfloat16, ms", "int8, ms", title="all linear layers once", title_justify="left")
    for count in map(int, rows.split(",")):
        inputs = {size: torch.randn(count, size).to(torch.bfloat16) for size in {k for _, k in SHAPES}}

        def bfloat16(inputs: dict[int, Tensor] = inputs) -> None:
            for layer in packed:
                layer(inputs[layer.in_features])

        def int8(inputs: dict[int, Tensor] = inputs) -> None:
            for weight, scale in whole:
                torch.ops.aten._weight_int8pack_mm(inputs[weight.shape[1]], weight, scale)

        times = alternate({"bfloat16": bfloat16, "int8": int8}, torch.device("cpu"), repeats)
        table.add_row(str(count), f"{times['bfloat16']:.1f}", f"{times['int8']:.1f}")
    out.print(table)


if __name__ == "__main__":
    typer.run(main)
