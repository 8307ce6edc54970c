"""Walking a verified tree: which drafted tokens are the target's own."""

from __future__ import annotations

import torch
from torch import Tensor

from pctree.tree import DraftTree


def walk(tree: DraftTree, ancestor_mask: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path on which every token is the one that the target chose after its parent, by argmax or by a draw.

    A node is accepted when it and all its ancestors match. Siblings differ, so the accepted nodes are one path.

    Args:
        ancestor_mask: bool [R, N, N] of the tree.
        target_ids: [R, N], the target's choice after each node.
    Returns:
        ``path`` [R, N]: node indices of the accepted path, root first, padded; ``lengths`` [R]: how many count, root
        included; ``bonus`` [R]: the target's own token after the path.
    """
    matches = (tree.token_ids == target_ids.gather(1, tree.parents)) & (tree.log_probs > -torch.inf)
    matches[:, 0] = True  # the root is committed already
    accepted = (matches[:, None] | ~ancestor_mask).all(-1)
    lengths = accepted.sum(1)
    # Accepted nodes first, in their order, which is by depth since parents stand before children.
    path = accepted.int().sort(dim=1, descending=True, stable=True).indices
    last = path.gather(1, lengths[:, None] - 1)
    return path, lengths, target_ids.gather(1, last)[:, 0]
