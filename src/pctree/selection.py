"""Finding the largest of very many logits: the whole vocabulary is passed over once, to find the maxima of chunks."""

from __future__ import annotations

from torch import Tensor


def chunk_size(size: int, count: int) -> int | None:
    """Into what chunks an axis is cut to find its ``count`` largest; None where it is not worth it."""
    return next((chunk for chunk in (128, 64, 32) if size % chunk == 0 and size // chunk >= 8 * count), None)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``topk`` over a large last axis: the ``count`` best lie in the ``count`` chunks with the largest maxima, and finding
    maxima is a single fast pass.
    """
    chunk = chunk_size(logits.shape[-1], count)
    if chunk is None:
        return logits.topk(count, dim=-1)
    chunks = logits.unflatten(-1, (-1, chunk))
    best = chunks.amax(-1).topk(count, dim=-1).indices
    candidates = chunks.gather(-2, best[..., None].expand(*best.shape, chunk)).flatten(-2)
    values, places = candidates.topk(count, dim=-1)
    return values, best.gather(-1, places // chunk) * chunk + places % chunk


def argmax(logits: Tensor) -> Tensor:
    """``logits.argmax(-1)``, the first where several are equal: the first chunk with the largest maximum holds it."""
    chunk = chunk_size(logits.shape[-1], 1)
    if chunk is None:
        return logits.argmax(-1)
    chunks = logits.unflatten(-1, (-1, chunk))
    first = chunks.amax(-1).argmax(-1, keepdim=True)
    inside = chunks.gather(-2, first[..., None].expand(*first.shape, chunk)).squeeze(-2).argmax(-1)
    return first.squeeze(-1) * chunk + inside


def shortlist(logits: Tensor, count: int) -> Tensor:
    """Places [..., count] of likely tokens of ``logits`` [..., V], the likeliest first.

    Where V is large, the best token of a group stands for it, which takes one pass; there are at least three groups for each
    place on the list. The tokens of a group lie far from each other, since neighbours in a vocabulary are likely together; so
    two likely tokens in one group are rare, and the price is that the second is not drafted.
    """
    size = logits.shape[-1]
    group = next((group for group in (64, 32, 16) if size % group == 0 and size // group >= 3 * count), None)
    if group is None:
        return logits.topk(min(count, size), dim=-1).indices
    best = logits.unflatten(-1, (group, -1)).max(-2)
    chosen = best.values.topk(count, dim=-1).indices
    return best.indices.gather(-1, chosen) * (size // group) + chosen
