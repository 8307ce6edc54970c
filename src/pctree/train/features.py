"""What training reads: the target's hidden states and next-token distributions, computed once over the data and kept.

A folder holds flat arrays over all tokens of all conversations, memory-mapped while training:

    features.bin    bfloat16 [T, m·H]   hidden states of ``target_layer_ids``
    top_ids.bin     int32    [T, K]     the K likeliest next tokens of the target after each token (answers only)
    top_probs.bin   bfloat16 [T, K]     their probabilities under the whole vocabulary
    index.json      token ids, answer spans, and what the arrays were computed from
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pctree.errors import CheckpointError, UsageError
from pctree.targets import TargetModel

TOP = 64
BATCH_TOKENS = 8192
HEAD_ROWS = 96  # few enough that their logits stay in the cache and in reused memory


@dataclass
class Conversation:
    """Token ids with the answers' spans [start, stop); ``offset`` is its first row in the arrays."""

    token_ids: list[int]
    answers: list[tuple[int, int]]
    offset: int

    def anchors(self) -> list[int]:
        """Positions that can start a block: an answer token with at least one more of the same answer after it."""
        return [position for start, stop in self.answers for position in range(start, stop - 1)]

    def answer_stop(self, position: int) -> int:
        """Where the answer that holds ``position`` ends; a block must not be taught beyond it."""
        return next(stop for start, stop in self.answers if start <= position < stop)


@dataclass
class FeatureStore:
    conversations: list[Conversation]
    features: Tensor
    top_ids: Tensor
    top_probs: Tensor


def read_conversations(data: Path, max_tokens: int) -> list[Conversation]:
    """Conversations of a data file as ``pctree synth`` writes it, cut to ``max_tokens`` each."""
    conversations: list[Conversation] = []
    offset = 0
    try:
        lines = data.read_text().rstrip("\n").split("\n")  # not splitlines(): text may hold other separators
    except OSError as error:
        raise UsageError(f"{data} cannot be read ({error.strerror}); write it with `pctree synth --output {data}`") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            token_ids = [int(token) for token in record["token_ids"]][:max_tokens]
            spans = [(int(start), min(int(stop), max_tokens)) for start, stop in record["answers"]]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            raise UsageError(f'{data}, line {number}: expected {{"token_ids": […], "answers": [[start, stop], …]}}') from None
        answers = [(start, stop) for start, stop in spans if start >= 1 and stop - start >= 2]
        if answers:
            conversations.append(Conversation(token_ids, answers, offset))
            offset += len(token_ids)
    if not conversations:
        raise UsageError(f"{data} holds no answer of at least two tokens; write it with `pctree synth --output {data}`")
    return conversations


def _map(path: Path, shape: tuple[int, ...], dtype: torch.dtype, *, create: bool = False) -> Tensor:
    size = int(torch.tensor(shape).prod())
    if not create and path.stat().st_size != size * dtype.itemsize:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, expected {size * dtype.itemsize}; delete its folder")
    return torch.from_file(str(path), shared=create, size=size, dtype=dtype).view(shape)


def feature_store(
    target: TargetModel,
    data: Path,
    folder: Path,
    *,
    max_tokens: int = 1024,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> FeatureStore:
    """Open the arrays of ``data`` in ``folder``, computing what is not there yet (an interrupted pass goes on)."""
    conversations = read_conversations(data, max_tokens)
    total = sum(len(c.token_ids) for c in conversations)
    key: dict[str, Any] = {
        "data": hashlib.sha256(data.read_bytes()).hexdigest(),
        "target": hashlib.sha256(target.embed_tokens.weight.detach().float().cpu().numpy().tobytes()).hexdigest(),
        "layers": target.feature_layers,
        "dtype": str(target.dtype),
        "max_tokens": max_tokens,
        "top": TOP,
    }
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index.json"
    state: dict[str, Any] = json.loads(index.read_text()) if index.exists() else {"key": key, "done": 0}
    if state["key"] != key:
        differing = ", ".join(name for name in key if state["key"].get(name) != key[name])
        raise UsageError(f"{folder} was computed from another {differing}; name another folder or delete this one")
    create = state["done"] < len(conversations)
    top = min(TOP, target.vocab_size)
    features = _map(folder / "features.bin", (total, target.feature_size), torch.bfloat16, create=create)
    top_ids = _map(folder / "top_ids.bin", (total, top), torch.int32, create=create)
    top_probs = _map(folder / "top_probs.bin", (total, top), torch.bfloat16, create=create)
    order = sorted(range(len(conversations)), key=lambda i: len(conversations[i].token_ids))
    while state["done"] < len(order):
        longest = len(conversations[order[state["done"]]].token_ids)
        chosen = [conversations[i] for i in order[state["done"] :][: max(1, BATCH_TOKENS // (longest + 8))]]
        _compute(target, chosen, features, top_ids, top_probs, top)
        state["done"] += len(chosen)
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        partial.replace(index)
        progress(state["done"], len(order))
        if should_stop():
            raise KeyboardInterrupt
    return FeatureStore(conversations, features, top_ids, top_probs)


@torch.inference_mode()
def _compute(
    target: TargetModel, chosen: list[Conversation], features: Tensor, top_ids: Tensor, top_probs: Tensor, top: int
) -> None:
    """One padded forward; padding comes last, so that under the causal mask nothing before it changes."""
    longest = max(len(c.token_ids) for c in chosen)
    token_ids = torch.zeros(len(chosen), longest, dtype=torch.long)
    for row, conversation in enumerate(chosen):
        token_ids[row, : len(conversation.token_ids)] = torch.tensor(conversation.token_ids)
    cache = target.new_cache(len(chosen), longest)
    causal = torch.ones(longest, longest, dtype=torch.bool, device=target.device).tril().expand(len(chosen), -1, -1)
    positions = torch.arange(longest, device=target.device)
    hidden, tapped = target.forward(cache, token_ids.to(target.device), positions, causal)
    taught: list[tuple[int, int]] = []  # places in ``hidden`` of the rows that predict an answer's tokens
    rows: list[int] = []  # and where they go
    for row, conversation in enumerate(chosen):
        at = conversation.offset
        features[at : at + len(conversation.token_ids)] = tapped[row, : len(conversation.token_ids)].cpu()
        for start, stop in conversation.answers:
            taught += [(row, position) for position in range(start - 1, stop - 1)]
            rows += range(at + start - 1, at + stop - 1)
    places, into = torch.tensor(taught, device=hidden.device), torch.tensor(rows)
    for place, where in zip(places.split(HEAD_ROWS), into.split(HEAD_ROWS), strict=True):
        logits = target.lm_head(hidden[place[:, 0], place[:, 1]])
        best = logits.topk(top, dim=-1)
        probs = (best.values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        top_ids[where] = best.indices.int().cpu()
        top_probs[where] = probs.to(torch.bfloat16).cpu()
