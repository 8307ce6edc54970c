"""A preallocated key-value cache whose accepted rows are moved into place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pctree.errors import UsageError


@dataclass(frozen=True)
class Window:
    """Where the next n rows of every request go in a cache, and how far attention reads."""

    lengths: Tensor  # [R] committed rows, on the cache's device
    slots: Tensor  # [R, n] that the new rows are written to
    span: int  # rows that attention reads
    even: bool  # all requests have one length, and the span ends with the new rows


class KVCache:
    """Keys and values of every layer for R requests of at most S tokens each.

    Storage is ``[layers, R, kv_heads, S, head_dim]``. Request ``r`` has ``lengths[r]`` committed rows; a forward of n
    rows writes them behind those, at ``lengths[r] … lengths[r]+n-1``, where they stay provisional until :meth:`commit`
    keeps some and drops the rest.
    """

    def __init__(
        self,
        layers: int,
        requests: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        shape = (layers, requests, kv_heads, max_length, head_dim)
        # Zeros, not empty: a masked row is multiplied by zero, and zero times an uninitialised NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.long)  # on the host: they steer shapes
        self.max_length = max_length
        self._flattened: tuple[Tensor, Tensor] | None = None

    @property
    def requests(self) -> int:
        return self.keys.shape[1]

    def window(self, rows: int) -> Window:
        """Where the next ``rows`` tokens of every request go.

        Raises:
            UsageError: they do not fit.
        """
        longest = int(self.lengths.max())
        if longest + rows > self.max_length:
            raise UsageError(f"{longest + rows} cache rows are needed but the cache has {self.max_length}")
        even = bool((self.lengths == longest).all())
        return Window(*self._places(self.lengths.to(self.keys.device), rows), longest + rows, even)

    @staticmethod
    def _places(lengths: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return lengths, lengths[:, None] + torch.arange(rows, device=lengths.device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, span: int) -> tuple[Tensor, Tensor]:
        """Store rows of one layer and return all rows up to ``span``.

        Args:
            slots: [R, n] on the cache's device.
            keys, values: [R, kv_heads, n, head_dim].
        Returns:
            Keys and values [R, kv_heads, span, head_dim], views into the cache.
        """
        head_dim = self.keys.shape[-1]
        flat = self._flat(slots)
        for cache, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            cache.view(-1, head_dim).index_copy_(0, flat, rows.reshape(-1, head_dim))
        return self.keys[layer, :, :, :span], self.values[layer, :, :, :span]

    def write_all(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows of all layers at once; ``keys`` and ``values`` [R, n, layers, kv_heads, head_dim]."""
        requests = torch.arange(len(slots), device=slots.device)[:, None]
        for cache, rows in ((self.keys, keys), (self.values, values)):
            cache[:, requests, :, slots] = rows

    def _flat(self, slots: Tensor) -> Tensor:
        """Rows of a layer's storage, seen as [R · kv_heads · S, head_dim], that ``slots`` are; the same for all layers."""
        if self._flattened is None or self._flattened[0] is not slots:
            requests, kv_heads, max_length = self.keys.shape[1:4]
            plane = torch.arange(requests * kv_heads, device=slots.device).view(requests, kv_heads, 1)
            self._flattened = (slots, (plane * max_length + slots[:, None]).flatten())
        return self._flattened[1]

    def narrow(self, start: int, count: int) -> KVCache:
        """A view of ``count`` requests from ``start`` on; what it commits is committed here."""
        view = object.__new__(type(self))
        view._view(self, self.lengths[start : start + count], start, count)
        return view

    def _view(self, cache: KVCache, lengths: Tensor, start: int, count: int) -> None:
        self.keys, self.values = cache.keys[:, start : start + count], cache.values[:, start : start + count]
        self.lengths, self.max_length, self._flattened = lengths, cache.max_length, None

    def move(self, source: int, target: int) -> None:
        """Let request ``source`` take the place of ``target``."""
        if source != target:
            length = int(self.lengths[source])
            for cache in (self.keys, self.values):
                cache[:, target, :, :length] = cache[:, source, :, :length]
            self.lengths[target] = length

    def advance(self, rows: int | Tensor) -> None:
        """Commit the first ``rows`` provisional rows (of all requests, or [R] each) where they stand."""
        self.lengths += rows

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep the provisional rows on a path, moved together behind the committed ones; all layers in one copy.

        Args:
            path: [R, A] offsets of the kept rows among the provisional ones, ascending, on the cache's device. Entries
                from ``counts[r]`` on are padding, and what is copied for them is overwritten by the next forward.
            counts: [R] on the host, how many entries of each row of ``path`` count.
        """
        for request in range(self.requests):
            length, count = int(self.lengths[request]), int(counts[request])
            source = length + path[request, :count]
            for cache in (self.keys, self.values):
                rows = cache[:, request]
                rows[:, :, length : length + count] = rows[:, :, source]
        self.lengths += counts


class FixedCache(KVCache):
    """A view of a cache whose lengths lie on the device and whose attention always reads ``span`` rows: what runs on it has
    fixed shapes and never asks the host, so it can be recorded. Lengths are set from outside, by copying into ``lengths``.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, span: int):
        self._view(cache, lengths, 0, cache.requests)
        self.span = span

    def window(self, rows: int) -> Window:
        return Window(*self._places(self.lengths, rows), self.span, even=False)

    def advance(self, rows: int | Tensor) -> None:
        """Nothing: what is committed is counted by the cache itself, on the host."""


def visible_rows(window: Window, mask: Tensor) -> Tensor:
    """Which cache rows each new row sees, bool [R, n, span]: all committed ones, and of the M provisional ones behind them
    those that ``mask`` [R, n, M] says. The window is that of the M rows.
    """
    requests, rows, provisional = mask.shape
    visible = torch.zeros(requests, rows, window.span, dtype=torch.bool, device=mask.device)
    if window.even:
        visible[:, :, : window.span - provisional] = True
        visible[:, :, window.span - provisional :] = mask
    else:
        visible |= (torch.arange(window.span, device=mask.device) < window.lengths[:, None])[:, None]
        visible.scatter_(2, window.slots[:, None].expand(-1, rows, -1), mask)
    return visible
