"""Rounds without launches: the large parts of a round, recorded once as CUDA graphs and replayed.

A round of a small target on a fast GPU is hundreds of short kernels, and starting them from Python takes longer than they
run. A graph starts them all at once, but always with the same shapes and the same memory. So rows are rounded up to buckets
(what is added counts as no node), attention reads a rounded span of the cache under a mask, and the lengths lie on the device.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pctree.economy import ROWS
from pctree.targets import FixedCache, KVCache

SHORTEST_SPAN = 256

# Takes a function that reads and writes the same memory at every call; gives what repeats it, and its outputs.
Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


def row_bucket(rows: int) -> int:
    """The rows of the forward that serves ``rows``."""
    return ROWS[bisect_left(ROWS, rows)] if rows <= ROWS[-1] else -(-rows // 32) * 32


def span_bucket(rows: int, most: int) -> int:
    """The cache rows that attention reads where ``rows`` are there: a power of two, so that a long text meets few."""
    return min(most, max(SHORTEST_SPAN, 1 << (rows - 1).bit_length()))


def cuda_graph(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record a function on the current CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries choose kernels and take workspaces at first calls, which cannot be recorded
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph.replay, outputs


def recorder(compile: str) -> Record | None:
    """How a mode of ``--compile`` records rounds."""
    return cuda_graph if compile == "graphs" else None


class Graphs:
    """What was recorded for one batch, whose caches the recordings are bound to."""

    def __init__(self, record: Record):
        self.record = record
        self._seconds = 0.0
        self._recorded: dict[Any, tuple[Tensor, tuple[Tensor, ...], Callable[[], None], Any]] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def take_seconds(self) -> float:
        """What recording has taken since this was last asked."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def __call__(self, cache: KVCache, rows: int, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """``function(cache, *inputs)``, recorded the first time that it meets these shapes and this span of the cache.

        Args:
            rows: that it writes behind the committed ones.
        Returns:
            What it returns, which the next call of the same function overwrites.
        """
        span = span_bucket(int(cache.lengths.max()) + rows, cache.max_length)
        key = (function, span, *(tuple(tensor.shape) for tensor in inputs))
        if key not in self._recorded:
            began = time.perf_counter()
            lengths, own = cache.lengths.to(cache.keys.device, copy=True), tuple(tensor.clone() for tensor in inputs)
            fixed = FixedCache(cache, lengths, span)
            self._recorded[key] = (lengths, own, *self.record(lambda: function(fixed, *own)))
            self._seconds += time.perf_counter() - began
        lengths, own, replay, outputs = self._recorded[key]
        lengths.copy_(cache.lengths, non_blocking=True)
        for tensor, given in zip(own, inputs, strict=True):
            tensor.copy_(given)
        replay()
        return outputs
