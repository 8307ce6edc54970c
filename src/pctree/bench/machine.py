"""What a run ran on: the line of its environment, its share of the prompts, and the memory that it took."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import pctree
from pctree.errors import UsageError

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Shard:
    """One of several processes that share a run, each with its own prompts; by default the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Shard:
        """As ``torchrun`` and ``accelerate launch`` set it: RANK, WORLD_SIZE and LOCAL_RANK."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        try:
            rank, world_size, local_rank = (int(environment.get(name, default)) for name, default in names.items())
        except ValueError:
            rank = world_size = local_rank = -1
        if not (0 <= rank < world_size and local_rank >= 0):
            found = ", ".join(f"{name}={environment.get(name)}" for name in names)
            raise UsageError(f"the environment has {found}; launch the processes with torchrun, or unset these")
        return cls(rank, world_size, local_rank)

    def takes(self, number: int) -> bool:
        """Whether this process decodes the prompt of that number."""
        return number % self.world_size == self.rank

    def device(self, name: str) -> str:
        """The device of this process: a GPU of its own where that is what ``name`` leaves open."""
        on_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
        return f"cuda:{self.local_rank}" if on_gpu and self.world_size > 1 else name

    @property
    def file_name(self) -> str:
        return f"records.rank{self.rank}.jsonl" if self.rank else "records.jsonl"


def environment(device: torch.device, dtype: str, compile: str) -> dict[str, Any]:
    """The environment line; its id is a hash of all of it but the time."""
    facts = {
        "pctree": pctree.__version__,
        **_git_state(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "compile": compile,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"kind": "environment", "environment": digest, **facts, "started": started}


def _git_state() -> dict[str, Any]:
    """The commit of the clone that this code is part of, and whether its files differ from it; None in an installation."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installation may lie inside a clone of something else, which does not track this file.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"git_commit": None, "git_dirty": None}
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory:
    """The most memory in use since ``reset``, in MB, models included: of the GPU, or of this process on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                CLEAR_REFS.write_text("5")  # sets the peak of this process to what it uses now

    def read(self) -> float | None:
        """None on a CPU whose system does not tell."""
        if self.device.type == "cuda":
            return round(torch.cuda.max_memory_allocated(self.device) / 1e6, 1)
        with contextlib.suppress(OSError):
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return round(int(line.split()[1]) * 1024 / 1e6, 1)
        return None
