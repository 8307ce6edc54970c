"""DistillationLoss, whose gradient is written by hand, against autograd on the dense loss in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pctree.train import losses
from pctree.train.losses import DistillationLoss, Teacher

CE, L1, SOFT = 0.1, 0.9, 0.3


def inputs(n: int, vocab: int, k: int, seed: int, *, hidden: int = 6, rank: int = 3, beyond: float = 0.2):
    """Random states, matrices and a teacher that names its ``k`` likeliest tokens; ``beyond`` is its mass outside V'."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    probs = (1 - beyond) * (2 * normal(n, vocab)).softmax(-1)
    top = probs.topk(k, dim=-1)
    labels = torch.randint(vocab, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < 0.2] = -1
    weights = torch.rand(n, generator=generator)
    weights[torch.rand(n, generator=generator) < 0.2] = 0.0
    leaves = [normal(n, hidden), normal(n, rank), normal(vocab, rank)]
    return leaves, normal(vocab, hidden), Teacher(top.indices, top.values, labels), weights


def oracle(leaves: list[Tensor], head: Tensor, teacher: Teacher, weights: Tensor, ce: float, l1: float, soft: float):
    """The documented loss, a row at a time: tokens that the teacher names one by one, all others as one lump."""
    hidden, latent, w2 = (leaf.double().requires_grad_() for leaf in leaves)
    q_all = (hidden @ head.double().T + latent @ w2.T).softmax(-1)
    losses_, distances = [], []
    for q, ids, p, label, weight in zip(q_all, teacher.ids, teacher.probs.double(), teacher.labels, weights, strict=True):
        named = ids[p > 0]
        p = p[p > 0]
        distance = (q[named] - p).abs().sum() + ((1 - q[named].sum()) - (1 - p.sum())).abs()
        nll = -q[label].log() if label >= 0 else 0.0
        soft_nll = -(p * q[named].log()).sum()
        losses_.append(weight.double() * (l1 * distance + ce * nll + soft * soft_nll))
        distances.append(distance)
    return sum(losses_), torch.stack(distances), q_all, (hidden, latent, w2)


def compare(leaves, head, teacher, weights, ce=CE, l1=L1, soft=SOFT) -> None:
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    loss, distances, matches = DistillationLoss.apply(*mine, head, teacher, weights, ce, l1, soft)
    expected, expected_distances, q_all, theirs = oracle(leaves, head, teacher, weights, ce, l1, soft)
    assert torch.allclose(loss.double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.allclose(distances.double(), expected_distances, atol=1e-5)
    assert matches.tolist() == (q_all.argmax(-1) == teacher.ids[:, 0]).tolist()
    (3 * loss).backward()  # the factor shows that the outer gradient is carried on
    (3 * expected).backward()
    for name, ours, wanted in zip(("hidden", "latent", "w2"), mine, theirs, strict=True):
        assert torch.allclose(ours.grad.double(), wanted.grad, atol=1e-4), name


@given(
    n=st.integers(1, 12), vocab=st.integers(3, 20), k=st.integers(1, 20), beyond=st.sampled_from([0.0, 0.3]),
    ce=st.sampled_from([0.0, 0.1, 1.0]), l1=st.sampled_from([0.0, 0.9]), soft=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_gradients_are_those_of_autograd(n, vocab, k, beyond, ce, l1, soft, seed):
    compare(*inputs(n, vocab, min(k, vocab), seed, beyond=beyond), ce=ce, l1=l1, soft=soft)


@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 100])
def test_chunks_do_not_show(chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    compare(*inputs(14, 11, 4, seed=1))


@pytest.mark.parametrize("seed", range(3))
def test_a_teacher_that_names_all_tokens_gives_the_dense_loss(seed):
    leaves, head, teacher, weights = inputs(9, 13, 13, seed, beyond=0.0)
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    loss, distances, _ = DistillationLoss.apply(*mine, head, teacher, weights, CE, L1, 0.0)

    dense_p = torch.zeros(9, 13, dtype=torch.float64).scatter_(1, teacher.ids, teacher.probs.double())
    hidden, latent, w2 = theirs = [leaf.double().requires_grad_() for leaf in leaves]
    log_q = (hidden @ head.double().T + latent @ w2.T).log_softmax(-1)
    known = teacher.labels >= 0
    nll = -log_q.gather(1, teacher.labels.clamp_min(0)[:, None])[:, 0] * known
    l1 = (log_q.exp() - dense_p).abs().sum(-1)
    expected = (weights.double() * (0.1 * nll + 0.9 * l1)).sum()

    assert torch.allclose(loss.double(), expected, atol=1e-4)
    assert torch.allclose(distances.double(), l1, atol=1e-5)
    loss.backward()
    expected.backward()
    for ours, wanted in zip(mine, theirs, strict=True):
        assert torch.allclose(ours.grad.double(), wanted.grad, atol=1e-4)


def test_named_tokens_of_probability_zero_belong_to_the_rest():
    # Where a likely token is not in the loss vocabulary, its probability is 0 and its id means nothing, twice or not.
    leaves, head, teacher, weights = inputs(8, 10, 4, seed=3)
    teacher.probs[:, 2:] = 0.0
    teacher.ids[:, 2:] = 0
    teacher.probs[5] = 0.0  # and sometimes none is
    compare(leaves, head, teacher, weights)


def test_rows_without_label_learn_from_the_teacher_alone():
    leaves, head, teacher, weights = inputs(6, 10, 4, seed=4)
    teacher.labels[:] = -1
    compare(leaves, head, teacher, weights)
    loss = DistillationLoss.apply(*leaves, head, teacher, weights, CE, 0.0, 0.0)[0]
    assert float(loss) == 0.0


def test_rows_of_zero_weight_have_no_gradient():
    leaves, head, teacher, weights = inputs(6, 10, 4, seed=5)
    weights[:] = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0, 2.0])
    compare(leaves, head, teacher, weights)
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    DistillationLoss.apply(*mine, head, teacher, weights, CE, L1, 0.0)[0].backward()
    assert not mine[0].grad[::2].any()
    assert not mine[1].grad[::2].any()
    assert mine[0].grad[1::2].any()


def test_distances_lie_between_zero_and_two():
    leaves, _, teacher, weights = inputs(12, 10, 4, seed=6, beyond=0.0)
    # A draft that is the teacher: distance 0, so the confidence head's target is 1.
    logits = torch.full((12, 10), -30.0).scatter_(1, teacher.ids[:, :1], 30.0)
    teacher.probs[:] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    identity = torch.eye(10)
    _, distances, matches = DistillationLoss.apply(logits, leaves[1], 0 * leaves[2], identity, teacher, weights, CE, L1, 0.0)
    assert torch.allclose(distances, torch.zeros(12), atol=1e-5)
    assert matches.all()
    _, distances, matches = DistillationLoss.apply(-logits, leaves[1], 0 * leaves[2], identity, teacher, weights, CE, L1, 0.0)
    assert torch.allclose(distances, torch.full((12,), 2.0), atol=1e-5)
    assert not matches.any()
