"""Anchors, blocks and their labels: which positions a step supervises, and what each of them may see."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pctree.train.features import Conversation, FeatureStore
from pctree.train.losses import Teacher


@dataclass
class Batch:
    """S conversations with A blocks of B slots each, n = S·A·B supervised rows."""

    features: Tensor  # [S, L, m·H]: context, padded at the end
    next_ids: Tensor  # [S, L]: the token that follows each row of the context
    anchors: Tensor  # [S, A]: positions of the anchor tokens
    anchor_ids: Tensor  # [S, A]
    previous: Tensor  # [S, A, B]: the true token before each predicted one
    weights: Tensor  # [S, A, B]: 0 where a slot has nothing to learn, before the decay by position
    teacher: Teacher


def vocabulary(conversations: list[Conversation], size: int, vocab_size: int) -> Tensor:
    """The ``size`` commonest answer tokens, which the loss is taken over; ascending."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for conversation in conversations:
        for start, stop in conversation.answers:
            counts += torch.bincount(torch.tensor(conversation.token_ids[start:stop]), minlength=vocab_size)
    if size >= vocab_size:
        return torch.arange(vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def block_weights(anchor: int, stop: int, block_size: int) -> list[float]:
    """1 for each slot whose predicted token (anchor + 1 + slot) lies before ``stop``, the end of the answer, else 0."""
    return [1.0 if anchor + 1 + slot < stop else 0.0 for slot in range(block_size)]


class Batcher:
    """Draws batches; batch ``step`` depends on the seed and ``step`` alone, so a resumed run goes on exactly."""

    def __init__(self, store: FeatureStore, chosen: list[Conversation], loss_vocab: Tensor, vocab_size: int, *,
                 block_size: int, sequences: int, anchors: int, seed: int):  # fmt: skip
        self.store, self.block_size, self.sequences, self.anchors, self.seed = (
            store,
            block_size,
            sequences,
            anchors,
            seed,
        )
        self.to_loss_vocab = torch.full((vocab_size,), -1, dtype=torch.long)
        self.to_loss_vocab[loss_vocab] = torch.arange(len(loss_vocab))
        # A conversation is visited as often as its anchors fill, so that long and short answers are seen alike.
        self.visits = [
            (conversation, list(anchor_list))
            for conversation in chosen
            if (anchor_list := conversation.anchors())
            for _ in range(max(1, round(len(anchor_list) / (2 * anchors))))
        ]
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.visits) // self.sequences)

    def _batches(self, epoch: int) -> list[list[int]]:
        """Visits of one epoch in batches of like length (less padding), in random order."""
        if self._epoch[0] != epoch:
            rng = random.Random(f"{self.seed}/{epoch}")
            order = list(range(len(self.visits)))
            rng.shuffle(order)
            pool = self.sequences * 32
            batches = []
            for start in range(0, len(order), pool):
                part = sorted(order[start : start + pool], key=lambda i: len(self.visits[i][0].token_ids))
                batches += [part[i : i + self.sequences] for i in range(0, len(part), self.sequences)]
            rng.shuffle(batches)
            self._epoch = (epoch, batches)
        return self._epoch[1]

    def batch(self, step: int) -> Batch:
        epoch, index = divmod(step, self.steps_per_epoch)
        rng = random.Random(f"{self.seed}/{epoch}/{index}")
        picked = []
        for visit in self._batches(epoch)[index]:
            conversation, anchors = self.visits[visit]
            picked.append((conversation, sorted(rng.sample(anchors, min(self.anchors, len(anchors))))))
        return self.collate(picked)

    def collate(self, picked: list[tuple[Conversation, list[int]]]) -> Batch:
        """A batch of the given anchors; where a conversation has fewer than the others, its last one is idle padding."""
        store, slots = self.store, self.block_size
        most = max(len(anchors) for _, anchors in picked)
        longest = max(anchors[-1] for _, anchors in picked)
        features = torch.zeros(len(picked), longest, store.features.shape[1], dtype=store.features.dtype)
        next_ids = torch.zeros(len(picked), longest, dtype=torch.long)
        rows, tokens, weights, all_anchors = [], [], [], []
        for i, (conversation, anchors) in enumerate(picked):
            context = anchors[-1]
            features[i, :context] = store.features[conversation.offset : conversation.offset + context]
            next_ids[i, :context] = torch.tensor(conversation.token_ids[1 : context + 1])
            padded = anchors + anchors[-1:] * (most - len(anchors))
            all_anchors.append(padded)
            for j, anchor in enumerate(padded):
                stop = conversation.answer_stop(anchor)
                alive = j < len(anchors)
                weights.append(block_weights(anchor, stop if alive else 0, slots))
                # Slots beyond the answer repeat its last row, with weight 0.
                positions = [min(anchor + slot, stop - 2) for slot in range(slots)]
                rows.append([conversation.offset + position for position in positions])
                tokens.append([conversation.token_ids[position] for position in [*positions, positions[-1] + 1]])
        shape = (len(picked), most, slots)
        row = torch.tensor(rows).flatten()
        token = torch.tensor(tokens)
        ids = self.to_loss_vocab[store.top_ids[row].long()]
        probs = store.top_probs[row].float() * (ids >= 0)
        labels = self.to_loss_vocab[token[:, 1:].flatten()]
        return Batch(
            features=features,
            next_ids=next_ids,
            anchors=torch.tensor(all_anchors),
            anchor_ids=token[:, 0].view(shape[:2]),
            previous=token[:, :-1].reshape(shape),
            weights=torch.tensor(weights).view(shape),
            teacher=Teacher(ids.clamp_min(0), probs, labels),
        )


def held_out(conversations: list[Conversation], fraction: float, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Split into training and held-out conversations, always the same way for the same data and seed."""
    order = list(range(len(conversations)))
    random.Random(f"held-out/{seed}").shuffle(order)
    count = min(max(1, round(len(order) * fraction)), len(order) - 1)
    return [conversations[i] for i in sorted(order[count:])], [conversations[i] for i in sorted(order[:count])]


def evaluation_batches(batcher: Batcher, limit: int) -> Iterator[Batch]:
    """The first ``limit`` batches of an epoch of their own."""
    for step in range(min(limit, batcher.steps_per_epoch)):
        yield batcher.batch(step)
