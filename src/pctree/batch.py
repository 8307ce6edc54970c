"""Requests that are decoded together: row r of the caches and of the anchors belongs to ``running[r]``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pctree.drafters import AnyDrafter
from pctree.errors import UsageError
from pctree.graphs import Graphs, Record, row_bucket
from pctree.request import Request
from pctree.scorers import Reshape
from pctree.selection import argmax
from pctree.targets import KVCache, TargetModel
from pctree.tree import DraftTree

PREFILL_TOKENS = 4096  # most prompt tokens of several requests that are read in one forward


class Batch:
    """Rows of a target cache and a drafter context for requests in flight. The first rows are the running ones: when a
    request ends, the last one takes its row, so that every call sees a batch without holes.

    Args:
        rows: most requests at once.
        length: most tokens of a request, prompt and output.
        room: rows that a verify forward needs behind them, the tree's budget.
        record: how rounds are recorded, if they are; see :mod:`pctree.graphs`.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: AnyDrafter | None,
        *,
        rows: int,
        length: int,
        room: int,
        record: Record | None = None,
    ):
        self.rows, self.length = rows, length
        self.graphs = None if record is None else Graphs(record)
        if record is not None:
            room = row_bucket(room)
        self._cache = target.new_cache(rows, length + room)
        self._context = drafter.new_cache(rows, length + room, room) if drafter is not None else None
        self._anchors = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.running: list[Request] = []
        self.held: list[list[int]] = [[] for _ in range(rows)]  # tokens whose rows a finished request left behind

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.rows

    @property
    def cache(self) -> KVCache:
        """The target's cache of the running requests."""
        return self._cache.narrow(0, len(self.running))

    @property
    def context(self) -> KVCache | None:
        """The drafter's context of the running requests."""
        return None if self._context is None else self._context.narrow(0, len(self.running))

    @property
    def anchors(self) -> Tensor:
        """Last committed tokens [R] of the running requests; the caches hold everything before them."""
        return self._anchors[: len(self.running)]

    def next_to_admit(self, waiting: deque[Request]) -> list[Request]:
        """Take requests from the queue that can be read in one forward: prompts of one length, as many as have room."""
        length = len(waiting[0].prompt_ids)
        most = min(self.rows - len(self.running), max(1, PREFILL_TOKENS // length))
        group = [waiting.popleft()]
        while waiting and len(group) < most and len(waiting[0].prompt_ids) == length:
            group.append(waiting.popleft())
        return group

    def admit(self, requests: list[Request], *, reuse: bool) -> tuple[KVCache, KVCache | None, Tensor]:
        """Give requests the next rows: their part of the caches, and the prompts' tokens [R, L] they do not hold yet.

        With ``reuse`` a single request's row keeps its old content as far as it is a prefix of the prompt.
        """
        for request in requests:
            if len(request.prompt_ids) + request.limit > self.length:
                needed = len(request.prompt_ids) + request.limit
                raise UsageError(f"{needed} tokens do not fit a batch with length {self.length}; make it longer")
        row = len(self.running)
        self.running += requests
        # One token at least must be fed, since its logits are wanted.
        kept = common_prefix(self.held[row], requests[0].prompt_ids[:-1]) if reuse and len(requests) == 1 else 0
        cache = self._cache.narrow(row, len(requests))
        context = None if self._context is None else self._context.narrow(row, len(requests))
        for part in (cache, context):
            if part is not None:
                part.lengths.fill_(kept)
        return cache, context, torch.tensor([r.prompt_ids[kept:] for r in requests], device=self._anchors.device)

    def retire_finished(self) -> list[Request]:
        """Take finished requests out; what their rows hold is remembered."""
        finished = [request for request in self.running if request.finish_reason is not None]
        self._take_out(finished)
        return finished

    def abandon(self) -> None:
        """Take out whatever still runs: its caller has stopped reading."""
        self._take_out(list(self.running))

    def _take_out(self, requests: list[Request]) -> None:
        for request in requests:
            row, last = self.running.index(request), len(self.running) - 1
            ids = [*request.prompt_ids, *request.token_ids][: int(self._cache.lengths[row])]
            for cache in (self._cache, self._context):
                if cache is not None:
                    cache.move(last, row)
            self._anchors[row] = self._anchors[last]
            self.running[row] = self.running[last]
            self.running.pop()
            # Only with a single row is it sure that the row still holds this request.
            self.held[row] = ids if row == last else []

    def reshape(self) -> Reshape | None:
        """How the drafter's logits [R, P, V] are reshaped, each request's in its own way."""
        by_row = [request.reshape() for request in self.running]
        if not any(by_row):
            return None

        def apply(logits: Tensor) -> Tensor:
            return torch.stack([f(part) if f else part for f, part in zip(by_row, logits, strict=True)])

        return apply

    def choose(self, tree: DraftTree, ancestor_mask: Tensor, logits: Tensor) -> Tensor:
        """The target's tokens [R, N] after each node, each request's in its own way; ``logits`` [R, N, V]."""
        if all(not request.processors and request.draws is None for request in self.running):
            return argmax(logits)
        rows = enumerate(self.running)
        return torch.stack([request.choose(tree, row, ancestor_mask, logits[row]) for row, request in rows])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    for index, (mine, theirs) in enumerate(zip(a, b, strict=False)):
        if mine != theirs:
            return index
    return min(len(a), len(b))
