"""Fixtures of the whole suite. The models are tiny and random; see ``tiny.py``."""

from __future__ import annotations

import io
import os
import sys
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


def shared(folder: str, file: str) -> Path:
    """A folder of ``shared`` beside the clone, or of the one that ``PCTREE_SHARED`` names; skips where it is not here."""
    found = Path(os.environ.get("PCTREE_SHARED") or Path(__file__).parents[2] / "shared") / folder
    if not (found / file).exists():
        pytest.skip(f"{found} is not here (set PCTREE_SHARED to the folder that holds {folder}/)")
    return found


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of official outputs."""
    return shared("golden", "target/config.json")


@pytest.fixture(scope="session")
def task_files() -> Path:
    """The folder of DeepSpec's prompts, a file a task."""
    return shared("data/prompts", "gsm8k.jsonl")


@pytest.fixture
def run(monkeypatch, capsys):
    """Call ``pctree`` with arguments; gives the exit code and both outputs."""

    from pctree.cli import main

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pctree", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
