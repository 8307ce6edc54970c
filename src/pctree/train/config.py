"""What decides a training run, and the recipe of each kind of drafter."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pctree.drafters.heads import MARKOV_HEADS
from pctree.errors import UsageError

# What DeepSpec trains each kind of drafter with, where that is not the default below. EAGLE-3 learns a step of its chain after
# the other from the target's whole distribution; its weights fall by 0.8 a step, which is exp(-1/4.48).
RECIPES: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"markov_rank": 0, "ce_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0},
    "eagle3": {"layers": 1, "markov_rank": 0, "ce_weight": 0.0, "l1_weight": 0.0, "soft_ce_weight": 1.0,
               "confidence_weight": 0.0, "position_decay": 4.48},
}  # fmt: skip


@dataclass
class TrainConfig:
    """Everything that decides the result; a resumed run must have the same."""

    algorithm: str = "dspark"
    # the drafter
    layers: int = 3
    block_size: int = 7  # EAGLE-3: steps of the training-time test, and tokens drafted at most
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
    ce_weight: float = 0.1  # against the tokens of the text
    l1_weight: float = 0.9  # against the target's distribution, ‖p_draft - p_target‖₁
    soft_ce_weight: float = 0.0  # against the target's distribution, -Σ p_target log p_draft
    confidence_weight: float = 1.0
    position_decay: float = 4.0

    def validate(self) -> None:
        if self.algorithm not in RECIPES:
            raise UsageError(f"algorithm is {self.algorithm!r}; it is one of {', '.join(RECIPES)}")
        for name in ("layers", "block_size", "steps", "sequences", "anchors", "loss_vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "clip", "position_decay"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("ce_weight", "l1_weight", "soft_ce_weight", "confidence_weight", "markov_rank"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 or above")
        if self.ce_weight + self.l1_weight + self.soft_ce_weight == 0:
            raise UsageError("ce_weight, l1_weight and soft_ce_weight are all 0; at least one must be above 0")
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out is {self.held_out}; it is a fraction between 0 and 1")
        if self.markov_head_type not in MARKOV_HEADS:
            raise UsageError(f"markov_head_type is {self.markov_head_type!r}; it is one of {', '.join(MARKOV_HEADS)}")
        if self.algorithm != "dspark" and self.markov_rank:
            raise UsageError(f"markov_rank is {self.markov_rank}, but {self.algorithm} has no Markov head; drop it")
        if self.algorithm == "eagle3" and self.layers != 1:
            raise UsageError(f"layers is {self.layers}; EAGLE-3 has one layer")
        if self.algorithm == "eagle3" and self.confidence_weight:
            raise UsageError(f"confidence_weight is {self.confidence_weight}, but EAGLE-3 has no confidence head; drop it")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> TrainConfig:
        """Settings by name, laid over the recipe of their ``algorithm``."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(raw.keys() - known)
        if unknown:
            raise UsageError(f"unknown setting {', '.join(unknown)}; the settings are {', '.join(sorted(known))}")
        config = cls(**{**RECIPES.get(raw.get("algorithm", "dspark"), {}), **raw})
        config.validate()
        return config


def default_layer_ids(layers: int) -> list[int]:
    """Five layers spread evenly from the second to the last but one."""
    last = layers - 2
    return sorted({round(1 + i * (last - 1) / 4) for i in range(5)}) if last > 1 else [last]
