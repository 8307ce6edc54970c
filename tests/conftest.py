"""Fixtures of the whole suite. The models are tiny and random; see ``tiny.py``."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
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


MODES = ("default", "off", "graphs", "candidates", "auto")


def pytest_addoption(parser):
    parser.addoption("--mode", choices=MODES, default="default", help="decode like this wherever a test leaves it open")


def pytest_configure(config):
    config.addinivalue_line("markers", "tree: about the tree and what it commits, not the text alone")
    config.addinivalue_line("markers", "memory: counts what is kept")


def pytest_collection_modifyitems(config, items):
    mode = config.getoption("--mode")
    for item in items:
        if mode in ("candidates", "auto") and item.get_closest_marker("tree"):
            item.add_marker(pytest.mark.skip(reason="this mode verifies another tree"))
        if mode == "graphs" and item.get_closest_marker("memory"):
            item.add_marker(pytest.mark.skip(reason="recordings are kept"))


@pytest.fixture(autouse=True, scope="session")
def mode(request):
    """Every decoder of the run works in the mode that ``--mode`` names, as far as its settings leave that open."""
    import replay
    import tiny

    from pctree import DraftSettings, SpeculativeDecoder, packing

    chosen = request.config.getoption("--mode")
    build = SpeculativeDecoder.__init__

    def built(self, target, drafter=None, tokenizer=None, settings=None, known=None, record=None, **named):
        settings, known, record = settings or DraftSettings(), named.get("economy", known), named.get("record", record)
        build(self, target, drafter, tokenizer, settings, known, record)  # which refuses what cannot work
        if chosen == "graphs":
            record = record or replay.record
        elif chosen == "candidates" and getattr(drafter, "markov_head", None) is not None and not settings.candidates:
            settings = replace(settings, candidates=max(16, settings.top_k))
        elif chosen == "auto" and settings.method != "ar":
            settings, known = replace(settings, budget="auto"), known or tiny.ECONOMY
        build(self, target, drafter, tokenizer, settings, known, record)

    with pytest.MonkeyPatch.context() as patch:
        if chosen not in ("default", "off"):
            patch.setattr(SpeculativeDecoder, "__init__", built)
        if chosen == "off":
            patch.setattr(packing, "can_pack", lambda linear: False)
            patch.setattr("pctree.fused.can_pack", lambda linear: False)
        yield chosen


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
