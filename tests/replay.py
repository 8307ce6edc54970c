"""Recording as a CUDA graph does it, on the CPU: the operators that a function calls, without the Python between them.

A replay calls the same operators on the same tensors and puts their results where the first ones lie. So whatever Python
computed the first time (a shape, a length, a branch) stays as it was, which is the fault that recordings are prone to; and
asking a tensor for its value, which a CUDA graph cannot record, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    """Where a tensor lies; packed weights do not tell, and are nobody's view."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        return id(tensor)


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in HOST_READS:
            raise AssertionError(f"{func} waits on the host; a CUDA graph cannot record it")
        out = func(*args, **(kwargs or {}))
        given = {memory(tensor) for tensor in tensors((args, kwargs))}
        # Views and what is written in place lie in memory that is there already.
        fresh = [tensor if memory(tensor) not in given else None for tensor in tensors(out)]
        self.calls.append((func, args, kwargs or {}, fresh))
        return out


def record(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """See :data:`pctree.graphs.Record`."""
    with _Recorder() as recorder:
        outputs = function()

    def replay() -> None:
        for func, args, kwargs, fresh in recorder.calls:
            for old, new in zip(fresh, tensors(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)

    return replay, outputs
