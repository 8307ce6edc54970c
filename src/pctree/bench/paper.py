"""The published figures of PCTree (arXiv 2608.02123), with their set-up. Nothing here is ours; nothing else is known to us."""

from __future__ import annotations

from dataclasses import dataclass

TITLE = "PCTree (arXiv 2608.02123)"

SETUP = {
    "target": "Qwen3-4B",
    "decoding": "greedy",
    "hardware": "one NVIDIA H20",
    "number format": "bfloat16",
    "attention": "SDPA",
    "tree": "k = 4, N = 32",
}


@dataclass(frozen=True)
class Published:
    """A row of the main table: acceptance lengths and AR speedups, chain first."""

    task: str
    block_size: int
    chain_tau: float
    pctree_tau: float
    chain_speedup: float
    pctree_speedup: float


MAIN = (
    Published("gsm8k", 7, 6.31, 7.24, 4.24, 4.50),
    Published("gsm8k", 16, 9.41, 11.16, 6.14, 6.60),
    Published("humaneval", 7, 5.60, 6.78, 3.74, 4.27),
    Published("mt-bench", 7, 3.82, 5.07, 2.48, 3.20),
)

# Acceptance lengths with the same weights; method, k (None: a chain). Of k = 8 it is said that it gives no more than k = 4.
ABLATION_TASK, ABLATION_BLOCK_SIZE = "gsm8k", 16
ABLATION: tuple[tuple[str, int | None, float], ...] = (
    ("dspark", None, 9.410),
    ("shared-markov", 4, 10.225),
    ("pctree", 2, 10.85),
    ("pctree", 4, 11.156),
)

# Milliseconds a round.
STAGES_BLOCK_SIZE = 7
BACKBONE_MS = 3.46
CHAIN_HEAD_MS = 0.65
TREE_HEAD_MS = 3.52
