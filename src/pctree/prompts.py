"""From text, chat messages or token ids to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pctree.errors import UsageError

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode_prompt(tokenizer: Any, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text (one user message, unless ``raw``), chat messages ``{"role", "content"}``, or token ids.
        system: system message for a text prompt.
        raw: continue the text as it is, without the chat template.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UsageError("the prompt is empty; give some text")
        if tokenizer is None:
            raise UsageError("this target has no tokenizer; give the prompt as token ids")
        if raw:
            if system is not None:
                raise UsageError("a system message needs the chat template; drop it or drop raw")
            return tokenizer.encode(prompt)
        messages: list[Mapping[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        return _render(tokenizer, [*messages, {"role": "user", "content": prompt}])
    if len(prompt) == 0:
        raise UsageError("the prompt is empty; give at least one token or message")
    if isinstance(prompt[0], Mapping):
        if tokenizer is None:
            raise UsageError("this target has no tokenizer; give the prompt as token ids")
        return _render(tokenizer, list(prompt))
    return [int(token) for token in cast(Sequence[int], prompt)]


def _render(tokenizer: Any, messages: list[Any]) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("this target's tokenizer has no chat template; use raw text instead (--raw, raw=True)")
    # Rendered with thinking off, as DeepSpec's evaluator does; templates without that switch ignore it.
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer.encode(text, add_special_tokens=False)
