"""Weights in large pages, where the system gives them to those who ask.

A forward of few rows does little but read all weights once. In pages of 4 KiB every 64th cache line needs another address
translation, which on a virtual machine is two walks through tables; in pages of 2 MiB the translations stay at hand.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

LARGE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # <linux/mman.h>; the second since Linux 6.1
MAPS = Path("/proc/self/maps")


def enlarge() -> None:
    """Ask for large pages for all large pieces of the process's own memory, once models are loaded. It is a wish: where the
    system knows no such pages, or refuses, nothing changes.
    """
    if sys.platform != "linux" or not MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in MAPS.read_text().splitlines():
        place, rights, _, _, _, *name = line.split()
        start, stop = (int(end, 16) for end in place.split("-"))
        start, stop = -(-start // LARGE) * LARGE, stop // LARGE * LARGE
        if rights == "rw-p" and name in ([], ["[heap]"]) and start < stop:
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                madvise(start, stop - start, advice)
