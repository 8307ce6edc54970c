"""What one request asks for: lengths, stops, and how the target's next-token distribution is processed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import LogitsProcessor

from pctree.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of a request. The defaults are greedy decoding.

    Args:
        max_new_tokens: exact limit, lowered to what the target's context still holds.
        min_new_tokens: no stop token before this many.
        stop_token_ids: decoding ends with the first of them; None means the target's own, empty means none.
        stop: decoding ends where the text first contains one of these strings, which is not part of the text.
        temperature: 0 is greedy, else the softmax temperature.
        sample_top_k: sample among the so many likeliest tokens; 0 is all. (``top_k`` is the width of the tree.)
        top_p: sample among the likeliest tokens that together have this probability.
        min_p: sample among tokens with at least this share of the likeliest one's probability.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once and per occurrence.
        logit_bias: added to the logits of the given token ids.
        logits_processor: any processors of transformers, called with each node's own root path as the history. They run
            before the temperature, as in transformers, and must depend on the history alone.
        seed: makes sampling reproducible: one text, whatever the method and the company.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    temperature: float = 0.0
    sample_top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logits_processor: Sequence[LogitsProcessor] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, expected: str) -> None:
            if not valid:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {expected}")

        check("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        check("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens")
        check("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above")
        check("sample_top_k", self.sample_top_k >= 0, "0 (all tokens) or above")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1 is none)")
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, math.isfinite(getattr(self, name)), "a finite number")
        check("stop", all(self.stop_strings), "strings that are not empty")
        if self.temperature == 0:
            for name, neutral in (("top_p", 1.0), ("min_p", 0.0), ("sample_top_k", 0), ("seed", None)):
                if getattr(self, name) != neutral:
                    raise UsageError(
                        f"{name} is {getattr(self, name)!r} but temperature is 0 (greedy); raise it or drop {name}"
                    )

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from keyword arguments; an unknown name is an error."""
        unknown = sorted(options.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise UsageError(f"unknown option {', '.join(unknown)}; the options are {', '.join(f.name for f in fields(cls))}")
        return cls(**options)
