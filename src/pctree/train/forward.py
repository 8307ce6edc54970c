"""One training step's forward: the hidden states of all blocks of a batch, and the loss on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pctree.drafters import AnyDrafter, DSparkDrafter, Eagle3Drafter
from pctree.drafters.dspark import attention
from pctree.train.batches import Batch
from pctree.train.config import TrainConfig
from pctree.train.losses import DistillationLoss


def training_mask(anchors: Tensor, context: int, block_size: int) -> Tensor:
    """Who sees whom, bool [S, 1, A·B, L + A·B]: the context before the own anchor, and the own block both ways."""
    sequences, blocks = anchors.shape
    sees_context = torch.arange(context) < anchors[:, :, None]
    block = torch.arange(blocks).repeat_interleave(block_size)
    sees_block = (block[:, None] == block).expand(sequences, -1, -1)
    return torch.cat([sees_context.repeat_interleave(block_size, dim=1), sees_block], dim=-1)[:, None]


def training_hidden(drafter: AnyDrafter, batch: Batch) -> Tensor:
    """Hidden states [S, A·B, H], ready for the output head, of all blocks; gradients reach the context's projections too."""
    return eagle_hidden(drafter, batch) if isinstance(drafter, Eagle3Drafter) else block_hidden(drafter, batch)


def block_hidden(drafter: DSparkDrafter, batch: Batch) -> Tensor:
    """DSpark and DFlash: all blocks in one forward."""
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


def eagle_hidden(drafter: Eagle3Drafter, batch: Batch) -> Tensor:
    """EAGLE-3's training-time test: the layer runs B times, each time on its own last output and the next true token.

    The first step reads the context, whose last row belongs to the anchor; a later step also reads the rows of the steps
    before it, of its own block only.
    """
    assert drafter.embed_tokens is not None
    layer, anchors = drafter.layers[0], batch.anchors
    sequences, blocks = anchors.shape
    length = batch.features.shape[1]
    fused = drafter.fc(batch.features.to(drafter.fc.weight.dtype))
    pair = layer.pair(drafter.embed_tokens(batch.next_ids), fused)
    keys, values = layer.self_attn.keys_values(pair, drafter.rotary(fused, torch.arange(length).expand(sequences, -1)))
    sees_context = (torch.arange(length) < anchors[:, :, None])[:, None]
    own = torch.eye(blocks, dtype=torch.bool).expand(sequences, 1, -1, -1)
    hidden = fused.gather(1, (anchors - 1)[..., None].expand(-1, -1, fused.shape[-1]))
    outputs = []
    for step in range(drafter.config.block_size):

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor, step: int = step) -> Tensor:
            nonlocal keys, values
            if step:  # the first step's own row is the context's last
                keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
            visible = torch.cat([sees_context, *[own] * step], dim=-1)
            mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, torch.finfo(query.dtype).min)
            return attention(query, keys, values, mask)

        pair = layer.pair(drafter.embed_tokens(batch.previous[..., step]), hidden)
        hidden = layer.finish(hidden, layer.self_attn(pair, drafter.rotary(hidden, anchors - 1 + step), attend))
        outputs.append(drafter.norm(hidden))
    return torch.stack(outputs, dim=2).flatten(1, 2)


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
    drafter: AnyDrafter, batch: Batch, head: Tensor, loss_vocab: Tensor, config: TrainConfig
) -> tuple[Tensor, Measures]:
    """The weighted mean loss of a batch: DeepSpec's terms, as ``config`` weighs them."""
    slots = drafter.config.block_size
    hidden = training_hidden(drafter, batch)
    hidden = hidden.reshape(-1, slots, hidden.shape[-1])
    previous = batch.previous.reshape(-1, slots)
    decay = torch.exp(-torch.arange(slots) / config.position_decay)
    weights = (batch.weights * decay).flatten()
    weights = weights / weights.sum().clamp_min(1e-9)
    markov_head = drafter.markov_head if isinstance(drafter, DSparkDrafter) else None
    confidence_head = drafter.confidence_head if isinstance(drafter, DSparkDrafter) else None
    if markov_head is not None:
        assert isinstance(drafter, DSparkDrafter)
        latent = markov_latents(drafter, previous, hidden).flatten(0, 1)
        w2 = markov_head.markov_w2.weight[loss_vocab]
        embedded = markov_head.markov_w1(previous).flatten(0, 1).detach()
    else:
        latent = hidden.new_zeros(hidden.shape[0] * slots, 1)
        w2 = hidden.new_zeros(len(loss_vocab), 1)
        embedded = None
    rows = hidden.flatten(0, 1)
    loss, distance, match = DistillationLoss.apply(
        rows, latent, w2, head, batch.teacher, weights, config.ce_weight, config.l1_weight, config.soft_ce_weight
    )
    overlap = 1 - distance / 2
    if confidence_head is not None:
        # The head reports on the backbone without steering it.
        guess = confidence_head.logits(rows.detach(), embedded if confidence_head.with_markov else None)
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
