"""Large pages are a wish: what lies in memory stays as it is, and where there are none nothing happens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pctree import pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_kilobytes() -> int:
    found = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("AnonHugePages")]
    return int(found[0].split()[1])


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system gives no large pages")
def test_a_large_tensor_stays_what_it_is_in_large_pages():
    weights = torch.randn(16 << 20, generator=torch.Generator().manual_seed(0))  # 64 MiB
    before, total = large_kilobytes(), weights.double().sum()
    pages.enlarge()
    assert weights.double().sum() == total
    if large_kilobytes() < max(before, 32 << 10):
        pytest.skip("the system had no large pages to give")


def test_a_system_without_a_map_of_its_memory_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "MAPS", tmp_path / "none")
    monkeypatch.setattr(pages.ctypes, "CDLL", lambda name: pytest.fail("nothing may be asked"))
    pages.enlarge()
