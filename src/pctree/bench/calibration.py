"""Is the confidence head right about itself? Measured as DeepSpec's evaluator does it.

At position i the prediction is the product of the head's first i probabilities along the chain, and the label is whether the
target accepted the first i drafted tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import fmean

from pctree.bench.records import Record

BINS = 20


@dataclass(frozen=True)
class Bin:
    """Predictions of one of the equal bins of [0, 1]."""

    predicted: float  # mean prediction
    accepted: float  # share of labels that are 1
    count: int


@dataclass(frozen=True)
class Calibration:
    """How predictions and labels of a position agree. ``auc`` is None where all labels are alike."""

    count: int
    predicted: float
    accepted: float
    ece: float  # expected calibration error
    auc: float | None
    brier: float


def predictions(records: Iterable[Record]) -> list[tuple[list[float], list[int]]]:
    """Predictions and labels of each position, over all rounds of records that hold confidences.

    The last round of a text that a stop token ended is left out: it was cut, so what the target would have accepted behind the
    cut is not known.
    """
    positions: list[tuple[list[float], list[int]]] = []
    for record in records:
        rounds = list(zip(record.get("confidences") or [], record["acceptance_lengths"], strict=False))
        for confidences, length in rounds[:-1] if record["finish_reason"] == "stop" else rounds:
            for position, predicted in enumerate(accumulate(confidences, mul)):
                if position == len(positions):
                    positions.append(([], []))
                positions[position][0].append(predicted)
                positions[position][1].append(int(length - 1 > position))
    return positions


def reliability(predicted: Sequence[float], labels: Sequence[int]) -> list[Bin]:
    """The bins that hold something, lowest first."""
    members: list[list[int]] = [[] for _ in range(BINS)]
    for index, value in enumerate(predicted):
        members[min(int(value * BINS), BINS - 1)].append(index)
    return [
        Bin(fmean(predicted[i] for i in inside), fmean(labels[i] for i in inside), len(inside)) for inside in members if inside
    ]


def calibrate(predicted: Sequence[float], labels: Sequence[int]) -> Calibration:
    """Expected calibration error over equal bins, AUC by ranks (ties count half), Brier score."""
    bins = reliability(predicted, labels)
    return Calibration(
        count=len(labels),
        predicted=fmean(predicted),
        accepted=fmean(labels),
        ece=sum(abs(b.predicted - b.accepted) * b.count for b in bins) / len(labels),
        auc=auc(predicted, labels),
        brier=fmean((p - label) ** 2 for p, label in zip(predicted, labels, strict=True)),
    )


def auc(predicted: Sequence[float], labels: Sequence[int]) -> float | None:
    """The chance that a drawn positive is predicted above a drawn negative; ties count half."""
    positives = sum(labels)
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    order = sorted(range(len(labels)), key=lambda i: predicted[i])
    rank_sum, start = 0.0, 0
    while start < len(order):
        stop = start
        while stop < len(order) and predicted[order[stop]] == predicted[order[start]]:
            stop += 1
        rank = (start + 1 + stop) / 2  # what ties share
        rank_sum += rank * sum(labels[i] for i in order[start:stop])
        start = stop
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def weighted_mean(positions: Sequence[Calibration]) -> Calibration:
    """The positions' mean, each weighted by its count (DeepSpec's summary line)."""
    total = sum(p.count for p in positions)

    def mean(values: Iterable[float]) -> float:
        return sum(value * p.count for value, p in zip(values, positions, strict=True)) / total

    told = [p for p in positions if p.auc is not None]
    return Calibration(
        count=total,
        predicted=mean(p.predicted for p in positions),
        accepted=mean(p.accepted for p in positions),
        ece=mean(p.ece for p in positions),
        auc=sum((p.auc or 0.0) * p.count for p in told) / sum(p.count for p in told) if told else None,
        brier=mean(p.brier for p in positions),
    )
