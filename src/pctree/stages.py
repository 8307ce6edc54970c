"""What a round does with the models: draft a tree, verify it, and tell the drafter what was committed.

Each is computed anew, or, where a batch keeps recordings (see :mod:`pctree.graphs`), replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pctree.batch import Batch
from pctree.drafters import AnyDrafter
from pctree.economy import Economy
from pctree.graphs import row_bucket
from pctree.methods import Block, DraftSettings
from pctree.stats import StageClock
from pctree.targets import KVCache, TargetModel
from pctree.tree import DraftTree


@dataclass
class Stages:
    """The models of a decoder, and how they are read; ``drafter`` is None for plain decoding."""

    target: TargetModel
    drafter: AnyDrafter | None
    settings: DraftSettings
    economy: Economy | None

    def draft(self, batch: Batch, clock: StageClock) -> tuple[DraftTree, Tensor]:
        """A tree for every running request, and its ancestor mask."""
        drafter, context, anchors, reshape = self.drafter, batch.context, batch.anchors, batch.reshape()
        if context is None or drafter is None:
            return root_only(anchors), torch.ones(len(anchors), 1, 1, dtype=torch.bool, device=anchors.device)
        # What reshapes the logits is asked anew for every round, and EAGLE-3 drafts layer by layer: neither is recorded.
        if batch.graphs is not None and reshape is None and not drafter.config.autoregressive:
            with clock("draft"):
                tree, mask = batch.graphs(context, drafter.config.block_size, self.grow, anchors)
            with clock("tree"):
                tree = self.settings.trim(tree.clone(), self.economy)  # callers keep it
                return tree, mask[:, : tree.nodes, : tree.nodes]
        with clock("draft"):
            block = self._block(context, anchors)
        with clock("tree"):
            tree = self.settings.trim(self.settings.grow(block, reshape, self._floor(len(anchors))), self.economy)
            return tree, tree.ancestor_mask(drafter.config.draft_length)

    def grow(self, context: KVCache, anchors: Tensor) -> tuple[DraftTree, Tensor]:
        """The draft forward, the tree and its mask, in one piece that can be recorded."""
        block = self._block(context, anchors)
        tree = self.settings.grow(block)
        return tree, tree.ancestor_mask(block.drafter.config.draft_length)

    def _block(self, context: KVCache, anchors: Tensor) -> Block:
        assert self.drafter is not None
        return Block(self.drafter, context, anchors, *self.drafter.draft_block(context, anchors))

    def _floor(self, requests: int) -> float | None:
        """Where growing a tree may stop. On a GPU asking after every layer costs more than it saves."""
        if self.target.device.type != "cpu":
            return None
        return self.economy.floor(requests) if self.economy is not None and self.settings.budget == "auto" else -math.inf

    def verify(self, batch: Batch, tree: DraftTree, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits [R, N, V] and context features [R, N, m·H] after every node."""
        if batch.graphs is None:
            return self.target.verify(batch.cache, tree.token_ids, tree.depths, mask)
        rows = row_bucket(tree.nodes)
        more = (0, rows - tree.nodes)  # rows that nobody sees
        token_ids, depths, mask = F.pad(tree.token_ids, more), F.pad(tree.depths, more), F.pad(mask, more + more)
        logits, features = batch.graphs(batch.cache, rows, self.target.verify, token_ids, depths, mask)
        return logits[:, : tree.nodes], features[:, : tree.nodes]

    def extend(self, batch: Batch, features: Tensor, path: Tensor, next_ids: Tensor, counts: Tensor) -> None:
        """Give the drafter the features of committed tokens, and the tokens that follow them.

        Args:
            features: [R, N, m·H] of all nodes.
            path: [R, N] nodes that were committed, of which ``counts`` [R] count; ``next_ids`` [R, N] follow them.
        """
        context, drafter = batch.context, self.drafter
        if context is None or drafter is None:
            return
        graphs = None if drafter.config.autoregressive else batch.graphs
        most = int(counts.max()) if graphs is None else drafter.config.draft_length + 1  # one shape for all recorded rounds
        path, next_ids = path[:, :most], next_ids[:, :most]
        committed = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
        if graphs is None:
            drafter.extend(context, committed, next_ids, counts)
        else:
            graphs(context, path.shape[1], drafter.extend, committed, next_ids)
            context.advance(counts)


def root_only(anchors: Tensor) -> DraftTree:
    """The tree [R, 1] that drafts nothing: verifying it is plain autoregressive decoding."""
    token_ids = anchors[:, None]
    zeros = torch.zeros_like(token_ids)
    return DraftTree(token_ids, zeros, zeros, zeros.float())
