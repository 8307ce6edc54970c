"""Training a drafter against a frozen target: DeepSpec's recipes, in one loop.

bfloat16 weights compute, float32 masters are what AdamW moves. A checkpoint holds the masters, the optimizer and the
step; batches depend on the step alone; so a run that is stopped and resumed takes the same steps as one that is not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pctree.drafters import save_drafter
from pctree.drafters.checkpoint import VOCABULARY
from pctree.errors import UsageError
from pctree.targets import TargetModel
from pctree.train.batches import Batcher, evaluation_batches, held_out, vocabulary
from pctree.train.config import TrainConfig
from pctree.train.features import Conversation, FeatureStore
from pctree.train.forward import step_loss
from pctree.train.initial import initialise_from_target, new_drafter


class MasterAdamW:
    """AdamW on float32 masters of bfloat16 weights, with warm-up, cosine decay to zero and gradient clipping."""

    def __init__(self, module: nn.Module, config: TrainConfig):
        self.config = config
        self.names, self.weights = zip(*((n, p) for n, p in module.named_parameters() if p.requires_grad), strict=True)
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        matrices = [m for m in self.masters if m.ndim > 1]
        vectors = [m for m in self.masters if m.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )

    def rate(self, step: int) -> float:
        config = self.config
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Move the masters and refresh the weights; returns the gradient norm before clipping."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, self.config.clip).item()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None
            weight.copy_(master)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"masters": dict(zip(self.names, self.masters, strict=True)), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, master, weight in zip(self.names, self.masters, self.weights, strict=True):
            master.copy_(state["masters"][name])
            weight.copy_(master)
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass
class Progress:
    """What a run tells while it works."""

    step: int
    loss: float
    overlap: float
    match: float
    rate: float
    gradient_norm: float
    rows_per_second: float


class Trainer:
    """One run in one folder: ``train.json`` (settings), ``log.jsonl``, ``checkpoint.pt``, and the exported drafter."""

    def __init__(self, target: TargetModel, store: FeatureStore, config: TrainConfig, folder: Path):
        config.validate()
        self.config, self.folder, self.target = config, folder, target
        training, testing = held_out(store.conversations, config.held_out, config.seed)
        self.training, self.testing = training, testing
        self.loss_vocab = vocabulary(training, config.loss_vocab, target.vocab_size)
        shape = {"block_size": config.block_size, "sequences": config.sequences, "anchors": config.anchors}
        self.batcher = Batcher(store, training, self.loss_vocab, target.vocab_size, seed=config.seed, **shape)
        self.test_batcher = Batcher(store, testing, self.loss_vocab, target.vocab_size, seed=config.seed, **shape)
        drafter = new_drafter(config, target)
        initialise_from_target(drafter, target, torch.tensor([self._sample(training)]))
        drafter.share(target.embed_tokens, target.lm_head)
        self.drafter = drafter.to(torch.bfloat16)
        for module in (target.embed_tokens, target.lm_head):
            module.requires_grad_(False)
        self.head = target.lm_head.weight.detach()[self.loss_vocab].to(torch.bfloat16)
        self.optimizer = MasterAdamW(drafter, config)
        self.step = 0
        self._resume()

    @staticmethod
    def _sample(conversations: list[Conversation]) -> list[int]:
        return max((c.token_ids for c in conversations), key=len)[:512]

    def _resume(self) -> None:
        """Go on from the folder's checkpoint, if the settings are the same."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, checkpoint = self.folder / "train.json", self.folder / "checkpoint.pt"
        mine = asdict(self.config)
        if settings.exists():
            theirs = json.loads(settings.read_text())
            changed = sorted(k for k in mine if theirs.get(k) != mine[k])
            if changed:
                listed = ", ".join(f"{k} {theirs.get(k)} → {mine[k]}" for k in changed)
                raise UsageError(
                    f"{self.folder} was begun with other settings ({listed}); use another folder or the same settings"
                )
        settings.write_text(json.dumps(mine, indent=2) + "\n")
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self.optimizer.load_state_dict(state)
            self.step = state["step"]

    def save(self) -> None:
        partial = self.folder / "checkpoint.partial"
        torch.save({**self.optimizer.state_dict(), "step": self.step}, partial)
        partial.replace(self.folder / "checkpoint.pt")

    def train_step(self) -> Progress:
        began = time.perf_counter()
        batch = self.batcher.batch(self.step)
        loss, measures = step_loss(self.drafter, batch, self.head, self.loss_vocab, self.config)
        loss.backward()
        norm = self.optimizer.step(self.step)
        rate = self.optimizer.rate(self.step)
        self.step += 1
        total = float(measures.weight.sum())
        return Progress(
            self.step,
            measures.loss,
            float(measures.overlap.sum()) / total,
            float(measures.match.sum()) / total,
            rate,
            norm,
            total / (time.perf_counter() - began),
        )

    @torch.no_grad()
    def evaluate(self, batches: int = 24) -> dict[str, Any]:
        """Held-out loss, and by slot the overlap 1 - ½·L1 and how often the likeliest tokens agree."""
        sums = [
            step_loss(self.drafter, batch, self.head, self.loss_vocab, self.config)[1]
            for batch in evaluation_batches(self.test_batcher, batches)
        ]
        weight = torch.stack([m.weight for m in sums]).sum(0).clamp_min(1)
        return {
            "held_out_loss": sum(m.loss for m in sums) / len(sums),
            "overlap": (torch.stack([m.overlap for m in sums]).sum(0) / weight).tolist(),
            "match": (torch.stack([m.match for m in sums]).sum(0) / weight).tolist(),
        }

    def run(
        self,
        *,
        checkpoint_every: int = 500,
        evaluate_every: int = 500,
        log_every: int = 20,
        report: Callable[[Progress], None] = lambda progress: None,
        evaluated: Callable[[int, dict[str, Any]], None] = lambda step, result: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the end, or to a checkpoint when ``should_stop`` says so; true when the run is complete."""
        log_file = self.folder / "log.jsonl"
        self._forget_later_lines(log_file)
        with log_file.open("a") as log:
            while self.step < self.config.steps and not should_stop():
                progress = self.train_step()
                report(progress)
                last = self.step == self.config.steps
                if self.step % log_every == 0 or last:
                    log.write(json.dumps(asdict(progress)) + "\n")
                if self.step % evaluate_every == 0 or last:
                    result = self.evaluate()
                    log.write(json.dumps({"step": self.step, **result}) + "\n")
                    log.flush()
                    evaluated(self.step, result)
                if self.step % checkpoint_every == 0:
                    self.save()
        self.save()
        complete = self.step >= self.config.steps
        if complete:
            save_drafter(self.drafter, self.folder / "drafter")
            if len(self.loss_vocab) < self.target.vocab_size:  # it never learnt to draft the others
                (self.folder / "drafter" / VOCABULARY).write_text(json.dumps(self.loss_vocab.tolist()) + "\n")
        return complete

    def _forget_later_lines(self, log_file: Path) -> None:
        """Drop what an interrupted run logged after its last checkpoint: those steps are taken again."""
        if log_file.exists():
            lines = log_file.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            log_file.write_text("".join(kept))
