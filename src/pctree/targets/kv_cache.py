"""A preallocated key-value cache whose accepted rows are moved into place."""

from __future__ import annotations

import torch
from torch import Tensor


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

    def slots(self, rows: int) -> Tensor:
        """Slots [R, rows] that the next ``rows`` tokens of every request are written to."""
        return self.lengths[:, None] + torch.arange(rows)

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
        view.keys, view.values = self.keys[:, start : start + count], self.values[:, start : start + count]
        view.lengths, view.max_length = self.lengths[start : start + count], self.max_length
        view._flattened = None
        return view

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


def visible_rows(lengths: Tensor, mask: Tensor, span: int) -> Tensor:
    """Which cache rows each new row sees, bool [R, n, span]: all committed ones, and of the M provisional ones behind them
    those that ``mask`` [R, n, M] says. ``lengths`` [R] is on the host.
    """
    requests, rows, provisional = mask.shape
    visible = torch.zeros(requests, rows, span, dtype=torch.bool, device=mask.device)
    if bool((lengths == lengths[0]).all()):
        visible[:, :, : span - provisional] = True
        visible[:, :, span - provisional :] = mask
    else:
        lengths = lengths.to(mask.device)
        visible |= (torch.arange(span, device=mask.device) < lengths[:, None])[:, None]
        columns = (lengths[:, None] + torch.arange(provisional, device=mask.device))[:, None].expand(-1, rows, -1)
        visible.scatter_(2, columns, mask)
    return visible
