"""Benchmark records made up for tests: lengths and times drawn from a simple model, the same every time."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "kind": "environment", "environment": "aaaaaaaaaaaa", "pctree": "0.1.0", "git_commit": "0123456789ab", "git_dirty": False,
    "python": "3.11.2", "torch": "2.13.0", "transformers": "5.20.0", "platform": "Linux", "cpu": "Test CPU", "device": "cpu",
    "threads": 2, "dtype": "bfloat16", "started": "2026-01-01T00:00:00",
}  # fmt: skip
BLOCK_SIZES = {"b7": 7, "b16": 16, "dflash": 7, "eagle3": 7}
# Chance that a drafted token survives.
QUALITY = {"ar": 0.0, "dspark": 0.55, "shared-markov": 0.64, "pctree": 0.68, "dflash": 0.48, "ddtree": 0.6, "eagle3": 0.58}
TASKS = ("gsm8k", "humaneval", "mt-bench")
EASE = {"gsm8k": 0.08, "humaneval": 0.03, "mt-bench": -0.1}
CHAINS = ("dspark", "dflash")


def record(
    method: str = "ar",
    drafter: str | None = None,
    task: str = "gsm8k",
    index: int = 0,
    *,
    top_k: int | None = 4,
    budget: int | None = 32,
    lengths: list[int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One record; what is not given follows the model."""
    size = BLOCK_SIZES.get(drafter or "")
    chain = method in CHAINS or (method == "eagle3" and top_k == 1)
    if method == "ar":
        drafter = top_k = budget = None
    elif chain:
        top_k, budget = 1, (size or 7) + 1
    drawn = random.Random(zlib.crc32(repr((method, drafter, task, index, top_k, budget, changes.get("repeat"))).encode()))
    if lengths is None:
        width = 0.0 if chain or method == "ar" else 0.02 * min(top_k or 4, 4) + 0.012 * (budget or 32).bit_length() - 0.15
        quality = QUALITY.get(method, 0.5)
        survive = quality and quality + EASE.get(task, 0.0) + width
        lengths = []
        while sum(lengths) < 60:
            accepted = 0
            while accepted < (size or 0) and drawn.random() < survive:
                accepted += 1
            lengths.append(accepted + 1)
    nodes = 1 if method == "ar" else budget or 1
    stage_ms = {
        "draft": 0.0 if method == "ar" else 20.0,
        "tree": 0.0 if method == "ar" else 4.0 if chain else 9.0,
        "verify": (100 + 1.2 * nodes) * drawn.uniform(0.97, 1.03),
        "commit": 1.0,
    }
    seconds = sum(stage_ms.values()) * len(lengths) / 1e3
    tokens = 1 + sum(lengths)
    return {
        "kind": "record", "environment": ENVIRONMENT["environment"], "target": "smollm2", "drafter": drafter,
        "drafter_source": drafter and f"smollm2-{drafter}", "block_size": size if drafter else None, "method": method,
        "top_k": top_k, "budget": budget, "frontier": None if chain or method in ("ar", "ddtree") else "capped",
        "temperature": 0.0, "candidates": 0, "confidence_threshold": 0.0, "dtype": "bfloat16", "max_new_tokens": 64,
        "task": task, "index": index, "repeat": 0, "prompt_sha256": f"{task}-{index}", "prompt_tokens": 50 + index,
        "tokens": tokens, "token_ids": list(range(tokens)), "finish_reason": "length", "seconds": seconds,
        "first_difference": None, "margin": None,
        "repeats_itself": False, "peak_memory_mb": 900.0 + nodes, "rounds": len(lengths),
        "acceptance_length": sum(lengths) / max(1, len(lengths)), "acceptance_lengths": lengths, "tree_nodes": nodes,
        "tokens_per_second": (tokens - 1) / seconds if seconds else 0.0, "time_to_first_token_ms": 100.0, "stage_ms": stage_ms,
    } | changes  # fmt: skip


def matrix(prompts: int = 4, tasks: tuple[str, ...] = TASKS, repeats: int = 1) -> list[dict[str, Any]]:
    """The whole harness in small: every method, both block sizes, both sweeps, flips, a loop, confidences."""
    cells: list[tuple[str, str | None, int, int]] = [("ar", None, 4, 32)]
    for drafter in ("b7", "b16"):
        cells += [("dspark", drafter, 1, 8), ("shared-markov", drafter, 4, 32)]
        cells += [("pctree", drafter, k, 32) for k in (1, 2, 4, 8)] + [("pctree", drafter, 4, n) for n in (8, 16, 64)]
    cells += [("dflash", "dflash", 1, 8), ("ddtree", "dflash", 4, 32), ("ddtree", "dflash", 4, 64)]
    cells += [("eagle3", "eagle3", k, 32) for k in (1, 2, 4)]
    made = []
    for repeat in range(repeats):
        for task in tasks:
            for index in range(prompts):
                for method, drafter, k, n in cells:
                    one = record(method, drafter, task, index, top_k=k, budget=n, repeat=repeat)
                    one["repeats_itself"] = (task, index) == ("gsm8k", 1)
                    if method != "ar" and index == 2:
                        one |= {"first_difference": 20, "margin": 0.03 if method == "pctree" else float("nan")}
                    if method == "dspark":
                        drawn = random.Random(f"{task}{index}{drafter}")
                        one["confidences"] = [
                            [drawn.uniform(0.2, 1.0) for _ in range(one["block_size"])] for _ in one["acceptance_lengths"]
                        ]
                    made.append(one)
    return made


def write(folder: Path, records: list[dict[str, Any]], name: str = "records.jsonl") -> Path:
    """The records as a run's folder holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in [ENVIRONMENT, *records]))
    return folder
