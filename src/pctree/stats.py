"""What a decoding measured: rounds, acceptance lengths, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

STAGES = ("draft", "tree", "verify", "commit")


class StageClock:
    """Milliseconds per stage. On a GPU it records events, which are read at the end, so that timing waits for nothing."""

    def __init__(self, device: torch.device | str):
        self.cuda = torch.device(device).type == "cuda"
        self._milliseconds = dict.fromkeys(STAGES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((stage, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._milliseconds[stage] += 1e3 * (time.perf_counter() - began)

    def total_ms(self) -> dict[str, float]:
        """Totals so far; on a GPU this waits for it."""
        if self._events:
            torch.cuda.synchronize()
        for stage, begin, end in self._events:
            self._milliseconds[stage] += begin.elapsed_time(end)
        self._events.clear()
        return dict(self._milliseconds)


@dataclass
class Statistics:
    """Counts and times of one generation.

    ``acceptance_lengths`` has one entry a round: the tokens that the round commits, bonus token included. The prefill
    token belongs to no round. A stop token cuts the count; the length limit does not (as in DeepSpec's evaluator), since
    where it falls says nothing about the method.
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # sent to the target, root included, per round
    new_tokens: int = 0
    time_to_first_token_ms: float = 0.0
    seconds: float = 0.0  # spent in rounds, so after the first token
    recording_ms: float = 0.0  # spent on recording graphs, which happens once and is not in ``seconds``
    total_stage_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def rounds(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per round (0 without rounds)."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 0.0

    @property
    def tree_nodes(self) -> float:
        """Mean nodes verified per round, root included."""
        return sum(self.nodes) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first over the time after the first."""
        return max(0, self.new_tokens - 1) / self.seconds if self.seconds else 0.0

    @property
    def stage_ms(self) -> dict[str, float]:
        """Mean milliseconds per round and stage: draft backbone, head plus tree, verify, commit."""
        return {stage: ms / self.rounds if self.rounds else 0.0 for stage, ms in self.total_stage_ms.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_lengths": self.acceptance_lengths,
            "tree_nodes": round(self.tree_nodes, 2),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "time_to_first_token_ms": round(self.time_to_first_token_ms, 2),
            "recording_ms": round(self.recording_ms, 2),
            "stage_ms": {stage: round(ms, 3) for stage, ms in self.stage_ms.items()},
        }
