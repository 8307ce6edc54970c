"""Do two decodings of the same prompt agree, and if not, how near a tie was the first difference?

In float32 they are identical. In bfloat16 a forward of many rows and a forward of one round differently, so where the
target's two best tokens all but tie, either may win; from there on the texts part ways, both being the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from pctree.targets import TargetModel


@dataclass
class Divergence:
    """The first difference: where, which tokens (None: that text had ended), and the logit margin between them."""

    position: int
    expected: int | None
    found: int | None
    margin: float


def first_divergence(
    target: TargetModel, prompt_ids: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> Divergence | None:
    """Compare with the decoding ``expected``; None if identical.

    The margin is how much the target's logit of the expected token exceeds that of the found one after the common text,
    in one plain forward: near 0 it is a rounding tie, negative when this forward prefers the found token.
    """
    for position, (mine, theirs) in enumerate(zip_longest(expected, found)):
        if mine != theirs:
            if mine is None or theirs is None:
                return Divergence(position, mine, theirs, float("nan"))
            prefix = [*prompt_ids, *expected[:position]]
            logits, _ = target.prefill(target.new_cache(1, len(prefix)), torch.tensor([prefix], device=target.device))
            return Divergence(position, mine, theirs, float(logits[0, mine]) - float(logits[0, theirs]))
    return None
