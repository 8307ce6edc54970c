"""Training a DSpark drafter against a frozen target: DeepSpec's recipe, in one loop.

bfloat16 weights compute, float32 masters are what AdamW moves. A checkpoint holds the masters, the optimizer and the
step; batches depend on the step alone; so a run that is stopped and resumed takes the same steps as one that is not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from pctree.drafters import DrafterConfig, DSparkDrafter, save_drafter
from pctree.drafters.dspark import attention
from pctree.errors import UsageError
from pctree.targets import TargetModel
from pctree.train.batches import Batch, Batcher, evaluation_batches, held_out, vocabulary
from pctree.train.features import Conversation, FeatureStore
from pctree.train.losses import DistillationLoss


@dataclass
class TrainConfig:
    """Everything that decides the result; a resumed run must have the same."""

    # the drafter
    layers: int = 3
    block_size: int = 7
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    target_layer_ids: list[int] = field(default_factory=list)  # empty: five, spread over the target
    mask_token_id: int = 16
    # the run
    steps: int = 5000
    sequences: int = 8
    anchors: int = 10
    learning_rate: float = 2e-3
    warmup_steps: int = 150
    weight_decay: float = 0.0
    clip: float = 1.0
    loss_vocab: int = 12288
    max_tokens: int = 1024
    held_out: float = 0.02
    seed: int = 0
    # the loss
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    position_decay: float = 4.0

    def validate(self) -> None:
        for name in ("layers", "block_size", "steps", "sequences", "anchors", "loss_vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "clip", "position_decay"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out is {self.held_out}; it is a fraction between 0 and 1")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> TrainConfig:
        known = {f.name for f in fields(cls)}
        unknown = sorted(raw.keys() - known)
        if unknown:
            raise UsageError(f"unknown setting {', '.join(unknown)}; the settings are {', '.join(sorted(known))}")
        config = cls(**raw)
        config.validate()
        return config


def default_layer_ids(layers: int) -> list[int]:
    """Five layers spread evenly from the second to the last but one."""
    last = layers - 2
    return sorted({round(1 + i * (last - 1) / 4) for i in range(5)}) if last > 1 else [last]


# --- the drafter's first weights ---------------------------------------------------------------------------------------


def new_drafter(config: TrainConfig, target: TargetModel) -> DSparkDrafter:
    """A drafter shaped like the target, its layers copied from the target's last ones where the shapes allow it."""
    theirs = target.model.config
    rope = {k: v for k in ("rope_parameters", "rope_theta", "rope_scaling") if (v := getattr(theirs, k, None)) is not None}
    backbone = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or target.hidden_size // theirs.num_attention_heads,
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        tie_word_embeddings=False,
        **rope,
    )
    torch.manual_seed(config.seed)
    drafter = DSparkDrafter(
        DrafterConfig(
            backbone=backbone,
            block_size=config.block_size,
            num_target_layers=len(target.layers),
            target_layer_ids=list(target.feature_layers),
            mask_token_id=config.mask_token_id,
            markov_rank=config.markov_rank,
            markov_head_type=config.markov_head_type,
            enable_confidence_head=True,
            confidence_head_with_markov=config.markov_rank > 0,
        )
    )
    for module in drafter.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    if drafter.markov_head is not None:
        nn.init.zeros_(drafter.markov_head.markov_w2.weight)  # no bias to begin with
    return drafter


@torch.no_grad()
def initialise_from_target(drafter: DSparkDrafter, target: TargetModel, sample: Tensor) -> None:
    """Start from the target's last layers, and read the last tapped layer through a near-identity ``fc``.

    Llama has no query and key norms: theirs are set to the root mean square per channel that the target's projections
    show on ``sample`` [1, L], so that attention starts with about the target's logits.
    """
    source = list(target.layers)[-len(drafter.layers) :]
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        seen[module] = output.float()

    projections = [p for layer in source for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    handles = [projection.register_forward_hook(record) for projection in projections]
    target.prefill(target.new_cache(1, sample.shape[1]), sample)
    for handle in handles:
        handle.remove()
    for mine, theirs in zip(drafter.layers, source, strict=True):
        state = {name: tensor for name, tensor in theirs.state_dict().items() if name in mine.state_dict()}
        mine.load_state_dict(state, strict=False)
        for norm, projection in (("q_norm", theirs.self_attn.q_proj), ("k_norm", theirs.self_attn.k_proj)):
            if f"self_attn.{norm}.weight" not in state:
                rms = mine.self_attn.split(seen[projection]).pow(2).mean(dim=(0, 1, 2)).sqrt()
                getattr(mine.self_attn, norm).weight.copy_(rms)
    hidden = drafter.fc.weight.shape[0]
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
    drafter.hidden_norm.weight.copy_(torch.stack([layer.input_layernorm.weight.float() for layer in source]).mean(0))
    drafter.norm.weight.copy_(target.backbone.norm.weight)


# --- one step ----------------------------------------------------------------------------------------------------------


def training_mask(anchors: Tensor, context: int, block_size: int) -> Tensor:
    """Who sees whom, bool [S, 1, A·B, L + A·B]: the context before the own anchor, and the own block both ways."""
    sequences, blocks = anchors.shape
    sees_context = torch.arange(context) < anchors[:, :, None]
    block = torch.arange(blocks).repeat_interleave(block_size)
    sees_block = (block[:, None] == block).expand(sequences, -1, -1)
    return torch.cat([sees_context.repeat_interleave(block_size, dim=1), sees_block], dim=-1)[:, None]


def training_hidden(drafter: DSparkDrafter, batch: Batch) -> Tensor:
    """Hidden states [S, A·B, H] of all blocks in one forward; gradients reach the context's projections too."""
    sequences, length = batch.features.shape[:2]
    dtype = drafter.fc.weight.dtype
    context = drafter.context(batch.features.to(dtype))
    context_rotary = drafter.rotary(context, torch.arange(length).expand(sequences, -1))
    visible = training_mask(batch.anchors, length, drafter.block_size)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context_key, context_value = drafter.layers[layer].self_attn.keys_values(context, context_rotary)
        return attention(query, torch.cat([context_key, key], 2), torch.cat([context_value, value], 2), mask)

    positions = batch.anchors[..., None] + torch.arange(drafter.block_size)
    return drafter.backbone(drafter.block_ids(batch.anchor_ids).flatten(1), positions.flatten(1), attend)


def markov_latents(drafter: DSparkDrafter, previous: Tensor, hidden: Tensor) -> Tensor:
    """Latents [S·A, B, r] of the Markov head along the true tokens ``previous`` [S·A, B]."""
    head = drafter.markov_head
    assert head is not None
    if head.kind != "rnn":
        return head(previous, hidden, head.initial_state(len(previous)))[0]
    state = head.initial_state(len(previous))
    latents = []
    for slot in range(previous.shape[1]):
        latent, state = head(previous[:, slot : slot + 1], hidden[:, slot : slot + 1], state)
        latents.append(latent)
    return torch.cat(latents, dim=1)


@dataclass
class Measures:
    """Sums over supervised rows, by slot; divided by ``weight`` they are means."""

    loss: float
    overlap: Tensor  # 1 - ½·L1: the chance that a sampled draft token is accepted
    match: Tensor  # the drafter's likeliest token is the target's
    weight: Tensor


def step_loss(
    drafter: DSparkDrafter, batch: Batch, head: Tensor, loss_vocab: Tensor, config: TrainConfig
) -> tuple[Tensor, Measures]:
    """The weighted mean loss of a batch (DeepSpec's three terms)."""
    slots = drafter.block_size
    hidden = training_hidden(drafter, batch)
    hidden = hidden.reshape(-1, slots, hidden.shape[-1])
    previous = batch.previous.reshape(-1, slots)
    decay = torch.exp(-torch.arange(slots) / config.position_decay)
    weights = (batch.weights * decay).flatten()
    weights = weights / weights.sum().clamp_min(1e-9)
    if drafter.markov_head is not None:
        latent = markov_latents(drafter, previous, hidden).flatten(0, 1)
        w2 = drafter.markov_head.markov_w2.weight[loss_vocab]
        embedded = drafter.markov_head.markov_w1(previous).flatten(0, 1).detach()
    else:
        latent = hidden.new_zeros(hidden.shape[0] * slots, 1)
        w2 = hidden.new_zeros(len(loss_vocab), 1)
        embedded = None
    rows = hidden.flatten(0, 1)
    loss, distance, match = DistillationLoss.apply(
        rows, latent, w2, head, batch.teacher, weights, config.ce_weight, config.l1_weight
    )
    overlap = 1 - distance / 2
    if drafter.confidence_head is not None:
        # The head reports on the backbone without steering it.
        guess = drafter.confidence_head.logits(rows.detach(), embedded if drafter.confidence_head.with_markov else None)
        bce = F.binary_cross_entropy_with_logits(guess.float(), overlap.clamp(0, 1), reduction="none")
        loss = loss + config.confidence_weight * (weights * bce).sum()
    alive = batch.weights.view(-1, slots)
    measures = Measures(
        loss.item(),
        (overlap.view(-1, slots) * alive).sum(0),
        (match.view(-1, slots) * alive).sum(0),
        alive.sum(0),
    )
    return loss, measures


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


# --- the run -----------------------------------------------------------------------------------------------------------


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
        return complete

    def _forget_later_lines(self, log_file: Path) -> None:
        """Drop what an interrupted run logged after its last checkpoint: those steps are taken again."""
        if log_file.exists():
            lines = log_file.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            log_file.write_text("".join(kept))
