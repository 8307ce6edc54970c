"""A conversation that keeps its caches between turns, so that a turn reads only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pctree.errors import UsageError
from pctree.params import SamplingParams

if TYPE_CHECKING:
    from pctree.decoder import SpeculativeDecoder
    from pctree.results import Generation, Round


class Conversation:
    """Chat messages and the caches behind them.

    ``messages`` is an ordinary list: edit it at will. A turn keeps the target's cache and the drafter's context as far as
    the rendered conversation still begins with what they hold, and reads the rest.

    Args:
        max_length: most tokens of the whole conversation; it fixes the memory of the caches.
    """

    def __init__(self, decoder: SpeculativeDecoder, *, system: str | None = None, max_length: int = 4096):
        if decoder.tokenizer is None:
            raise UsageError("a conversation needs a tokenizer with a chat template, which this target has not")
        self.decoder, self.max_length = decoder, min(max_length, decoder.target.max_length)
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._batch = decoder.new_batch(1, self.max_length)

    def send(self, text: str, params: SamplingParams | None = None, **options: Any) -> Generation:
        """Say something and wait for the whole answer."""
        *_, (generation, _) = self.stream(text, params, **options)
        return generation

    def stream(
        self, text: str, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[tuple[Generation, Round | None]]:
        """Say something and get the growing answer; what was read of it is part of the conversation, also after a break."""
        asked = {"role": "user", "content": text}
        request = self.decoder.request([*self.messages, asked], params, **options)
        room = self.max_length - len(request.prompt_ids)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(request.prompt_ids)} tokens but max_length is {self.max_length}; "
                "drop some messages or start it with a larger max_length"
            )
        request.limit = min(request.limit, room)
        self.messages.append(asked)
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        rounds = self.decoder.decode([request], batch=self._batch)
        try:
            for _, done in rounds:
                generation = self.decoder.result(request)
                answer["content"] = generation.text or ""
                yield generation, done if done.path else None
        finally:
            rounds.close()  # type: ignore[attr-defined]
            self._batch.abandon()
