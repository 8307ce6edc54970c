"""SpeculativeDecoder: the round loop. Draft a block, grow a tree, verify it in one forward, commit the accepted path."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pctree.acceptance import walk
from pctree.batch import Batch
from pctree.conversation import Conversation
from pctree.drafters import AnyDrafter
from pctree.economy import Economy
from pctree.errors import UsageError
from pctree.graphs import Record, recorder, span_bucket
from pctree.loading import load_pair
from pctree.methods import DraftSettings
from pctree.params import SamplingParams
from pctree.profiles import find_profile, settings_from
from pctree.prompts import Prompt, encode_prompt
from pctree.request import Request
from pctree.results import Generation, Round
from pctree.stages import Stages, root_only
from pctree.stats import STAGES, StageClock
from pctree.targets import TargetModel


class SpeculativeDecoder:
    """Decodes a target model with the help of a drafter; the tokens are those of the target alone.

    Args:
        target: the target, tapping the drafter's ``target_layer_ids``.
        drafter: may be None for ``method="ar"``.
        tokenizer: may be None when prompts are token ids.
        settings: method, top_k, budget, frontier.
        economy: what rounds cost here, for ``budget="auto"``; ``pctree tune`` measures it.
        record: records rounds and replays them, see :mod:`pctree.graphs`; None computes every round anew.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: AnyDrafter | None = None,
        tokenizer: Any = None,
        settings: DraftSettings | None = None,
        economy: Economy | None = None,
        record: Record | None = None,
    ):
        self.settings, self.economy, self.record = settings or DraftSettings(), economy, record
        self.startup_seconds: dict[str, float] = {}  # "read": the models; "prepare": for speed, see :mod:`pctree.loading`
        self._kept: Batch | None = None  # the last one, with its recordings
        self.settings.validate(drafter)
        if self.settings.budget == "auto" and economy is None:
            raise UsageError("budget is auto, which needs to know what rounds cost here; run `pctree tune`, or give a number")
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
        self.stages = Stages(self.target, None if self.settings.method == "ar" else drafter, self.settings, economy)

    @classmethod
    def from_pretrained(
        cls,
        target: str = "smollm2",
        drafter: str | None = "smollm2",
        *,
        method: str | None = None,
        top_k: int | None = None,
        budget: int | str | None = None,
        frontier: str | None = None,
        candidates: int | None = None,
        confidence_threshold: float = 0.0,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        compile: str = "auto",
        profile: str = "auto",
    ) -> SpeculativeDecoder:
        """Load a target and a drafter from folders, hub names, or ``smollm2``, the pair that comes with pctree.

        ``dtype="auto"`` is bfloat16; ``device="auto"`` is CUDA where there is one;
        ``compile="auto"`` prepares the weights for speed, which changes no result (``"off"`` does not), and ``"graphs"`` on
        CUDA also records rounds as graphs.

        Of method, top_k, budget, frontier and candidates, what is None (and of ``compile``, what is auto) comes from the
        profile that ``pctree tune`` wrote for this pair and machine (``profile="auto"``; or from a file, or with ``"off"``
        from none), and without one is :class:`DraftSettings`'s default: pctree with 4 children a parent and 32 nodes.

        Raises:
            UsageError: a setting is out of range. CheckpointError: files are missing, damaged, or do not fit each other.
        """
        chosen = {"method": method, "top_k": top_k, "budget": budget, "frontier": frontier, "candidates": candidates}
        found = find_profile(profile, target, drafter, dtype, device, compile)
        settings = DraftSettings(**settings_from(found, chosen), confidence_threshold=confidence_threshold)
        if found is not None and compile == "auto":
            compile = found.compile
        pair = load_pair(target, drafter, settings, dtype=dtype, device=device, compile=compile)
        economy = None if found is None else found.economy
        decoder = cls(pair.target, pair.drafter, pair.tokenizer, settings, economy, recorder(compile))
        decoder.startup_seconds = pair.seconds
        return decoder

    def with_settings(self, *, economy: Economy | None = None, **changes: Any) -> SpeculativeDecoder:
        """The same models, read in another way: ``decoder.with_settings(method="ar")``."""
        settings = replace(self.settings, **changes)
        models = (self._tapped_target, self.drafter, self.tokenizer)
        return SpeculativeDecoder(*models, settings, economy or self.economy, self.record)

    # --- for callers ------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Any, params: Any = None, *, max_batch_size: int = 16, max_length: int | None = None, **options: Any
    ) -> Any:
        """Decode a prompt to the end (a :class:`Generation`), or a list of prompts together (a list of them).

        Args:
            prompt: text, chat messages or token ids; or a list of such prompts, which gives a list of results.
            params: :class:`SamplingParams`, or a list of them, one a prompt; ``options`` are laid over them.
            max_batch_size: most requests decoded at once; further ones wait for a place.
            max_length: most tokens of a request, prompt and output; None is what the longest one needs. The two bound the
                memory: the caches hold ``max_batch_size`` times ``max_length`` rows, and a request that needs more is
                refused.
            options: fields of :class:`SamplingParams`, and ``system`` and ``raw`` of ``encode_prompt``.
        """
        if max_batch_size < 1:
            raise UsageError(f"max_batch_size is {max_batch_size}; it must be at least 1")
        if not is_batch(prompt):
            requests = [self.request(prompt, params, **options)]
        else:
            given = list(params) if isinstance(params, Sequence) else [params] * len(prompt)
            if len(given) != len(prompt):
                raise UsageError(f"{len(prompt)} prompts were given but {len(given)} params; give one for each, or one for all")
            requests = [self.request(p, q, **options) for p, q in zip(prompt, given, strict=True)]
        for _ in self.decode(requests, max_batch_size=max_batch_size, max_length=max_length):
            pass
        results = [self.result(request) for request in requests]
        return results if is_batch(prompt) else results[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[tuple[Generation, Round | None]]:
        """Like :meth:`generate` for one prompt, but yields the growing result after prefill (with no round) and after every
        round. A caller that stops reading ends the request.
        """
        request = self.request(prompt, params, **options)
        return ((self.result(request), done if done.path else None) for _, done in self.decode([request]))

    def chat(self, *, system: str | None = None, max_length: int = 4096) -> Conversation:
        """A conversation that keeps its caches between turns."""
        return Conversation(self, system=system, max_length=max_length)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        **options: Any,
    ) -> Request:
        """A request for :meth:`decode`, with everything checked that can be checked before decoding.

        Raises:
            UsageError: the prompt is empty, too long or outside the vocabulary, or a parameter cannot be used.
        """
        params = SamplingParams.from_options(options) if params is None else replace(params, **options)
        prompt_ids = encode_prompt(self.tokenizer, prompt, system=system, raw=raw)
        context, vocab_size = self.target.max_length, self.target.vocab_size
        if len(prompt_ids) >= context:
            raise UsageError(f"the prompt has {len(prompt_ids)} tokens but the target's context holds {context}; shorten it")
        for name, token_ids in (("prompt", prompt_ids), ("logit_bias", params.logit_bias or {})):
            outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise UsageError(f"{name} has token id {outside}, outside the target's vocabulary of {vocab_size}")
        if params.stop_strings and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, which this target has not; use stop_token_ids")
        stop_ids = self.target.eos_token_ids if params.stop_token_ids is None else params.stop_token_ids
        limit = min(params.max_new_tokens, context - len(prompt_ids))
        return Request(prompt_ids, params, limit=limit, stop_ids=stop_ids, tokenizer=self.tokenizer, device=self.target.device)

    def result(self, request: Request) -> Generation:
        """What a request has come to."""
        return Generation(
            list(request.token_ids),
            request.ready_text,
            len(request.prompt_ids),
            self.settings.method,
            request.finish_reason,
            request.stats,
        )

    # --- the loop ---------------------------------------------------------------------------------------------------

    def new_batch(self, rows: int, length: int) -> Batch:
        """Caches for ``rows`` requests of at most ``length`` tokens."""
        room, drafter = self.settings.most_nodes, self.stages.drafter
        return Batch(self.target, drafter, rows=rows, length=length, room=room, record=self.record)

    def _own_batch(self, rows: int, needed: int, max_length: int | None) -> Batch:
        """A batch for :meth:`decode`. Recordings are bound to the caches of one, so with them the last one serves again."""
        if max_length is not None and needed > max_length:
            raise UsageError(
                f"a request needs {needed} tokens, prompt and output, but max_length is {max_length}; "
                "shorten it or raise max_length"
            )
        length = max_length or (needed if self.record is None else span_bucket(needed, self.target.max_length))
        kept, self._kept = self._kept, None
        if kept is not None and kept.rows == rows and needed <= kept.length <= (max_length or kept.length):
            return kept
        return self.new_batch(rows, length)

    @torch.inference_mode()
    def decode(
        self,
        requests: Sequence[Request],
        *,
        max_batch_size: int = 16,
        max_length: int | None = None,
        batch: Batch | None = None,
    ) -> Iterator[tuple[Request, Round]]:
        """Decode requests together, yielding each one's rounds as they come; the first is its prefill, with an empty path.

        Requests that find no place wait until another one ends. A ``batch`` of the caller's keeps what it holds, so that a
        prompt that begins like the last one there is not read again.
        """
        if batch is not None:
            yield from self._decode(requests, batch, reuse=True)
            return
        longest = max(len(request.prompt_ids) + request.limit for request in requests)
        own = self._own_batch(min(max_batch_size, len(requests)), longest, max_length)
        try:
            yield from self._decode(requests, own, reuse=False)
        finally:
            if self.record is not None:
                own.abandon()
                self._kept = own

    def _decode(self, requests: Sequence[Request], batch: Batch, *, reuse: bool) -> Iterator[tuple[Request, Round]]:
        waiting, clock, began = deque(requests), StageClock(self.target.device), time.perf_counter()
        stages_before: dict[int, dict[str, float]] = {}
        while waiting or batch.running:
            while waiting and batch.has_room:
                admitted = batch.next_to_admit(waiting)
                prefilled = self._prefill(admitted, batch, reuse=reuse)
                for request in admitted:
                    request.stats.time_to_first_token_ms = 1e3 * (time.perf_counter() - began)
                    stages_before[id(request)] = clock.total_ms()
                batch.retire_finished()
                yield from zip(admitted, prefilled, strict=True)
            if batch.running:
                # What the caller does between rounds is not ours to count.
                round_began = time.perf_counter()
                running, rounds = list(batch.running), self._round(batch, clock)
                recording = 0.0 if batch.graphs is None else batch.graphs.take_seconds()
                seconds = time.perf_counter() - round_began - recording
                for request in running:
                    request.stats.seconds += seconds
                    request.stats.recording_ms += 1e3 * recording
                for request in batch.retire_finished():
                    spent, before = clock.total_ms(), stages_before.pop(id(request))
                    request.stats.total_stage_ms = {stage: spent[stage] - before[stage] for stage in STAGES}
                yield from zip(running, rounds, strict=True)

    def _prefill(self, requests: list[Request], batch: Batch, *, reuse: bool) -> list[Round]:
        """Read prompts of one length into the caches and take the target's first tokens."""
        cache, context, token_ids = batch.admit(requests, reuse=reuse)
        logits, features = self.target.prefill(cache, token_ids)
        last = root_only(token_ids[:, -1])
        first = [request.choose_first(last.row(row), logits[row : row + 1]) for row, request in enumerate(requests)]
        anchors = batch.anchors[-len(requests) :]
        anchors.copy_(torch.tensor(first))
        if context is not None:
            assert self.drafter is not None
            self.drafter.extend(context, features, torch.cat([token_ids[:, 1:], anchors[:, None]], dim=1))
        return [Round(last.row(row), [], request.commit([first[row]])) for row, request in enumerate(requests)]

    def _round(self, batch: Batch, clock: StageClock) -> list[Round]:
        """Draft a block, grow a tree, verify it in one forward, commit the accepted path; for all running requests."""
        tree, mask = self.stages.draft(batch, clock)
        with clock("verify"):
            logits, features = self.stages.verify(batch, tree, mask)
            choices = batch.choose(tree, mask, logits)
        with clock("commit"):
            path, lengths, bonus = walk(tree, mask, choices)
            tokens = tree.token_ids.gather(1, path)
            # The one wait of a round: which paths were accepted.
            outcome = torch.cat([tree.sizes[:, None], lengths[:, None], bonus[:, None], path, tokens], dim=1).tolist()
        rounds, counts = [], []
        for row, (request, (nodes, length, last, *both)) in enumerate(zip(batch.running, outcome, strict=True)):
            accepted, drafted = both[:length], both[tree.nodes + 1 :][: length - 1]
            committed = request.commit([*drafted, last])
            request.stats.nodes.append(nodes)
            rounds.append(Round(tree.row(row), accepted, committed))
            counts.append(len(committed))
        with clock("commit"):
            # All committed tokens but the last have their rows in the cache; the last is the next anchor.
            taken = torch.tensor(counts)
            self.target.commit(batch.cache, path, taken)
            batch.anchors.copy_(bonus)
        with clock("draft"):
            following = torch.cat([tokens[:, 1:], bonus[:, None]], dim=1).scatter(1, lengths[:, None] - 1, bonus[:, None])
            self.stages.extend(batch, features, path, following, taken)
        return rounds


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts rather than one prompt."""
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], (int, Mapping))
