"""SpeculativeDecoder: the round loop. Draft a block, grow a tree, verify it in one forward, commit the accepted path."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pctree.acceptance import greedy_walk
from pctree.drafters import DSparkDrafter
from pctree.errors import UsageError
from pctree.loading import load_pair
from pctree.methods import DraftSettings
from pctree.prompts import Prompt, encode_prompt
from pctree.stats import StageClock, Statistics
from pctree.targets import TargetModel
from pctree.tree import DraftTree


@dataclass
class Round:
    """One draft, verify, commit: the tree, the accepted path in it (node indices, root first), the committed tokens."""

    tree: DraftTree
    path: list[int]
    token_ids: list[int]


@dataclass
class Generation:
    """The result: new token ids (a stop token included), their text (without special tokens), and what was measured."""

    token_ids: list[int]
    text: str | None
    prompt_tokens: int
    method: str
    finish_reason: str  # "stop" or "length"
    stats: Statistics

    def to_dict(self) -> dict[str, Any]:
        record = {"text": self.text, "token_ids": self.token_ids, "prompt_tokens": self.prompt_tokens,
                  "method": self.method, "finish_reason": self.finish_reason, "stats": self.stats.to_dict()}  # fmt: skip
        if self.text is None:
            del record["text"]
        return record


class SpeculativeDecoder:
    """Decodes a target model with the help of a drafter; the tokens are those of the target alone.

    Args:
        target: the target, tapping the drafter's ``target_layer_ids``.
        drafter: may be None for ``method="ar"``.
        tokenizer: may be None when prompts are token ids.
        settings: method, top_k, budget, frontier.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DSparkDrafter | None = None,
        tokenizer: Any = None,
        settings: DraftSettings | None = None,
    ):
        self.settings = settings or DraftSettings()
        self.settings.validate(drafter)
        if drafter is not None and target.feature_layers != drafter.config.target_layer_ids:
            raise UsageError(
                f"the target taps layers {target.feature_layers}, but the drafter's target_layer_ids are "
                f"{drafter.config.target_layer_ids}; build it as TargetModel(model, drafter.config.target_layer_ids)"
            )
        self.drafter = drafter
        # Plain decoding must not pay for features that nobody reads.
        self.target = TargetModel(target.model) if self.settings.method == "ar" else target
        self._tapped_target = target
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        target: str = "smollm2",
        drafter: str | None = "smollm2",
        *,
        method: str = "pctree",
        top_k: int = 4,
        budget: int = 32,
        frontier: str = "capped",
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
    ) -> SpeculativeDecoder:
        """Load a target and a drafter from folders, hub names, or ``smollm2``, the pair that comes with pctree.

        ``dtype="auto"`` is bfloat16; ``device="auto"`` is CUDA where there is one.

        Raises:
            UsageError: a setting is out of range. CheckpointError: files are missing, damaged, or do not fit each other.
        """
        settings = DraftSettings(method, top_k, budget, frontier)
        return cls(*load_pair(target, drafter, settings, dtype=dtype, device=device), settings)

    def with_settings(self, **changes: Any) -> SpeculativeDecoder:
        """The same models, read in another way: ``decoder.with_settings(method="ar")``."""
        return SpeculativeDecoder(self._tapped_target, self.drafter, self.tokenizer, replace(self.settings, **changes))

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Decode to the end; the options are those of :meth:`rounds`, and ``system`` and ``raw`` of ``encode_prompt``."""
        *_, (generation, _) = self._run(prompt, **options)
        return generation

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[tuple[Generation, Round | None]]:
        """Like :meth:`generate`, but yields the growing result after prefill (with no round) and after every round."""
        return self._run(prompt, **options)

    def _run(
        self, prompt: Prompt, *, system: str | None = None, raw: bool = False, **options: Any
    ) -> Iterator[tuple[Generation, Round | None]]:
        prompt_ids = encode_prompt(self.tokenizer, prompt, system=system, raw=raw)
        stats = Statistics()
        result = Generation([], None, len(prompt_ids), self.settings.method, "length", stats)
        for done in self.rounds(prompt_ids, stats=stats, **options):
            result.token_ids += done.token_ids
            if self.tokenizer is not None:
                result.text = self.tokenizer.decode(result.token_ids, skip_special_tokens=True)
            if result.token_ids[-1] in self.stop_ids(options.get("stop_token_ids")):
                result.finish_reason = "stop"
            yield result, done if done.path else None

    def stop_ids(self, stop_token_ids: Sequence[int] | None = None) -> set[int]:
        """The given stop tokens, or else those of the target's own generation config."""
        if stop_token_ids is None:
            stop_token_ids = self.target.eos_token_ids
        return set(stop_token_ids)

    @torch.inference_mode()
    def rounds(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int = 256,
        stop_token_ids: Sequence[int] | None = None,
        stats: Statistics | None = None,
    ) -> Iterator[Round]:
        """The loop itself, one yield a round; the first yield is the prefill's token and has an empty path.

        Args:
            prompt_ids: at least one token, fewer than the target's context holds.
            max_new_tokens: exact limit, lowered to what the context still holds.
            stop_token_ids: decoding ends with the first of them; None means the target's own, empty means none.
            stats: filled in while decoding.
        """
        limit = self._limit(prompt_ids, max_new_tokens)
        stats, stop_ids = stats or Statistics(), self.stop_ids(stop_token_ids)
        target, drafter, settings = self.target, self.drafter, self.settings
        speculative = settings.method != "ar"
        clock = StageClock(target.device)
        began = time.perf_counter()

        # A last round may verify a whole budget behind the last token that counts.
        cache = target.new_cache(1, len(prompt_ids) + limit + settings.budget)
        context = drafter.new_cache(1, len(prompt_ids) + limit) if speculative and drafter else None
        logits, features = target.prefill(cache, torch.tensor([list(prompt_ids)], device=target.device))
        anchor = logits.argmax(-1)
        committed = anchor.tolist()
        produced = 1
        stats.time_to_first_token_ms, stats.new_tokens = 1e3 * (time.perf_counter() - began), 1
        yield Round(root_only(anchor), [], committed)

        while produced < limit and committed[-1] not in stop_ids:
            round_began = time.perf_counter()  # what the caller does between rounds is not ours to count
            if speculative:
                assert drafter is not None
                assert context is not None
                with clock("draft"):
                    drafter.extend(context, features)
                    hidden, base_logits = drafter.draft_block(context, anchor)
                with clock("tree"):
                    tree = settings.grow(drafter, hidden, base_logits, anchor)
                    mask = tree.ancestor_mask(drafter.block_size)
            else:
                tree = root_only(anchor)
                mask = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
            with clock("verify"):
                logits, node_features = target.verify(cache, tree.token_ids, tree.depths, mask)
                path, lengths, bonus = greedy_walk(tree, mask, logits.argmax(-1))
                tokens = torch.cat([tree.token_ids.gather(1, path)[:, 1:], bonus[:, None]], dim=1)
                # The one wait of a round: which path was accepted.
                length, *row = torch.cat([lengths[:, None], path, tokens], dim=1)[0].tolist()
            accepted, drafted = row[: tree.nodes][:length], row[tree.nodes :]
            committed = cut_after_stop([*drafted[: length - 1], drafted[-1]], stop_ids)
            stats.acceptance_lengths.append(len(committed))
            stats.nodes.append(tree.nodes)
            committed = committed[: limit - produced]
            produced += len(committed)
            with clock("commit"):
                # All committed tokens but the last have their rows in the cache; the last is the next anchor.
                kept = path[:, : len(committed)]
                target.commit(cache, kept, torch.tensor([kept.shape[1]]))
                features = node_features.gather(1, kept[..., None].expand(-1, -1, node_features.shape[-1]))
                anchor = bonus
            stats.new_tokens = produced
            stats.seconds += time.perf_counter() - round_began
            yield Round(tree, accepted, committed)
        stats.total_stage_ms = clock.total_ms()

    def _limit(self, prompt_ids: Sequence[int], max_new_tokens: int) -> int:
        context, vocab_size = self.target.max_length, self.target.vocab_size
        if not prompt_ids:
            raise UsageError("the prompt is empty; give at least one token")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        if len(prompt_ids) >= context:
            raise UsageError(f"the prompt has {len(prompt_ids)} tokens but the target's context holds {context}; shorten it")
        outside = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise UsageError(f"the prompt has token id {outside}, outside the target's vocabulary of {vocab_size}")
        return min(max_new_tokens, context - len(prompt_ids))


def root_only(anchors: Tensor) -> DraftTree:
    """The tree [R, 1] that drafts nothing: verifying it is plain autoregressive decoding."""
    token_ids = anchors[:, None]
    return DraftTree(token_ids, torch.zeros_like(token_ids), torch.zeros_like(token_ids), torch.zeros(token_ids.shape))


def cut_after_stop(token_ids: list[int], stop_ids: set[int]) -> list[int]:
    """The tokens up to and with the first stop token."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: index + 1]
    return token_ids
