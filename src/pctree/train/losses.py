"""DeepSpec's losses: cross-entropy against the text or the target's distribution, and ‖p_draft - p_target‖₁."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 256


@dataclass
class Teacher:
    """The target's next-token distribution, as its K likeliest tokens.

    ``ids`` [n, K] index the loss vocabulary of V' tokens; ``probs`` [n, K] are probabilities under the target's whole
    vocabulary (0 where a token is not in the loss vocabulary, with any id). What they leave of 1 is the rest, which is
    compared as one lump. ``labels`` [n] are the tokens that really follow, -1 where not in the loss vocabulary.
    """

    ids: Tensor
    probs: Tensor
    labels: Tensor


class DistillationLoss(torch.autograd.Function):
    """Σ weights · (ce·CE + l1·L1 + soft·SCE) of logits ``hidden · headᵀ + latent · w2ᵀ`` [n, V'], and L1 [n] by itself.

    CE is against the labels; SCE = -Σ p log q over the tokens that the teacher names.

    The logits exist a chunk at a time: their gradient has a closed form, so it is taken in the forward and carried at
    once to ``hidden`` [n, H], ``latent`` [n, r] and ``w2`` [V', r]. ``head`` [V', H] is frozen.
    """

    @staticmethod
    def forward(ctx, hidden, latent, w2, head, teacher: Teacher, weights, ce: float, l1: float, soft: float):
        grad_hidden, grad_latent = torch.zeros_like(hidden), torch.zeros_like(latent)
        grad_w2 = torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        loss = torch.zeros((), device=hidden.device)
        distances = torch.empty(len(hidden), device=hidden.device)
        matches = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for rows in torch.arange(len(hidden), device=hidden.device).split(CHUNK):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            ids, p, labels = teacher.ids[part], teacher.probs[part].float(), teacher.labels[part]
            weight = weights[part, None]
            known = labels >= 0
            logits = torch.addmm(hidden[part] @ head.T, latent[part], w2.T)
            q_all = logits.softmax(-1)
            q = q_all.gather(1, ids).float()
            matches[part] = q[:, 0] >= q_all.amax(-1)
            q = q * (p > 0)
            rest = (1 - q.sum(-1, keepdim=True)) - (1 - p.sum(-1, keepdim=True))
            distance = (q - p).abs().sum(-1) + rest.abs()[:, 0]
            distances[part] = distance
            label_q = q_all.gather(1, labels.clamp_min(0)[:, None]).float()
            nll = -label_q.clamp_min(1e-12).log()[:, 0] * known
            soft_nll = -(p * q.clamp_min(1e-12).log()).sum(-1)
            loss += (weight[:, 0] * (l1 * distance + ce * nll + soft * soft_nll)).sum()
            # d|q-p|/dq is a sign; through the softmax, dz = q ⊙ (g - Σ q g). All but K entries share the rest's sign.
            sign, rest_sign = (q - p).sign() * (p > 0), rest.sign()
            mean = (q * sign).sum(-1, keepdim=True) + rest_sign * (1 - q.sum(-1, keepdim=True))
            scale = weight * (l1 * (rest_sign - mean) + ce * known[:, None] + soft * p.sum(-1, keepdim=True))
            grad = q_all.mul_(scale.to(q_all.dtype))
            grad.scatter_add_(1, ids, (weight * (l1 * q * (sign - rest_sign) - soft * p)).to(grad.dtype))
            grad.scatter_add_(1, labels.clamp_min(0)[:, None], (-weight * ce * known[:, None]).to(grad.dtype))
            grad_hidden[part] = grad @ head
            grad_latent[part] = grad @ w2
            grad_w2 += grad.T @ latent[part]
        ctx.save_for_backward(grad_hidden, grad_latent, grad_w2.to(w2.dtype))
        ctx.mark_non_differentiable(distances, matches)
        return loss, distances, matches

    @staticmethod
    def backward(ctx, grad_loss, *unused):
        return (*(grad_loss * grad for grad in ctx.saved_tensors), None, None, None, None, None, None)
