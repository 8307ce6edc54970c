"""Fixtures of the whole suite. The models are tiny and random; see ``tiny.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# The models are so small that a second thread only adds waiting.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples every time; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("pctree", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", settings.get_profile("pctree"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pctree"))


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of official outputs, ``shared/golden`` beside the clone; ``PCTREE_SHARED`` names another ``shared``."""
    shared = Path(os.environ.get("PCTREE_SHARED") or Path(__file__).parents[2] / "shared")
    if not (shared / "golden" / "target" / "config.json").exists():
        pytest.skip(f"{shared / 'golden'} is not here (set PCTREE_SHARED to the folder that holds golden/)")
    return shared / "golden"
