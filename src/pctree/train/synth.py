"""Training data written by the target itself: it makes up user turns after the chat template's user header, then answers.

All rows of the batch go through one forward a step, each at its own place: a row samples a user turn, is fed the
template's assistant header, writes its answer, and starts over behind the shared system prompt, whose keys and values
stay in the cache. Nothing is ever padded or prefilled again.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pctree.errors import UsageError
from pctree.targets import TargetModel

_MARK = "\N{SYMBOL FOR NULL}"


@dataclass
class Opening:
    """The first words of a user turn (may be empty) and words added at its end; ``weight`` is how often it is drawn."""

    text: str = ""
    suffix: str = ""
    weight: float = 1.0


@dataclass
class SynthConfig:
    """What to write. Lengths are in tokens."""

    answer_tokens: int = 1_000_000
    rows: int = 192
    turns: int = 1
    max_prompt: int = 96
    max_answer: int = 160
    prompt_temperature: float = 1.0
    sampled_fraction: float = 0.2
    answer_temperature: float = 0.8
    min_p: float = 0.02
    seed: int = 0
    openings: list[Opening] = field(default_factory=lambda: [Opening()])

    def validate(self) -> None:
        for name in ("answer_tokens", "rows", "turns", "max_prompt", "max_answer"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.openings:
            raise UsageError("openings is empty; give at least one (an empty text lets the target begin by itself)")


class _Template:
    """The token ids that the chat template puts around turns."""

    def __init__(self, tokenizer: Any):
        def render(messages: list[dict[str, str]]) -> str:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        user = {"role": "user", "content": _MARK}
        head, tail = render([user]).split(_MARK)
        self.before_user, self.after_user = ids(head), ids(tail)
        between = render([user, {"role": "assistant", "content": _MARK}, user]).split(_MARK)[2]
        self.after_answer = ids(between)  # ends the answer and opens the next user turn
        self.end_of_user, self.end_of_answer = self.after_user[0], self.after_answer[0]
        self.encode = ids


class _Row:
    """One conversation being written."""

    def __init__(self, template: _Template, config: SynthConfig, rng: random.Random):
        self.template, self.config, self.rng = template, config, rng
        self.token_ids: list[int] = list(template.before_user)
        self.forced: deque[int] = deque()
        self.answers: list[tuple[int, int]] = []
        self.temperature = config.answer_temperature if rng.random() < config.sampled_fraction else 0.0
        self._open_turn()

    def _open_turn(self) -> None:
        openings = self.config.openings
        opening = self.rng.choices(openings, [o.weight for o in openings])[0]
        self.forced.extend(self.template.encode(opening.text))
        self.suffix = self.template.encode(opening.suffix)
        self.in_answer = False
        self.start = len(self.token_ids)

    @property
    def sampling_temperature(self) -> float:
        return self.temperature if self.in_answer else self.config.prompt_temperature

    def append(self, sampled: int) -> bool:
        """Take the next token (a forced one has precedence); true when the conversation is complete."""
        if self.forced:
            self.token_ids.append(self.forced.popleft())
            if not self.forced and self.in_answer:
                self.start = len(self.token_ids)
            return False
        length = len(self.token_ids) - self.start
        if not self.in_answer:
            if sampled == self.template.end_of_user and length == 0:
                return True  # it had nothing to ask
            if sampled == self.template.end_of_user or length >= self.config.max_prompt:
                self.forced.extend([*self.suffix, *self.template.after_user])
                self.in_answer = True
                return self.append(sampled)
            self.token_ids.append(sampled)
            return False
        self.token_ids.append(sampled)
        ended = sampled == self.template.end_of_answer
        if not ended and length + 1 < self.config.max_answer:
            return False
        self.answers.append((self.start, len(self.token_ids)))
        if ended and len(self.answers) < self.config.turns:
            self.forced.extend(self.template.after_answer[1:])
            self._open_turn()
            return False
        return True

    def record(self, tokenizer: Any) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids,
            "answers": self.answers,
            "temperature": self.temperature,
            "text": tokenizer.decode(self.token_ids),  # for people; training reads the ids
        }


def sample(logits: Tensor, temperatures: Tensor, min_p: float, generator: torch.Generator) -> Tensor:
    """Next tokens [R] from logits [R, V]; temperature 0 is the argmax. No sort: min-p needs only the maximum."""
    tokens = logits.argmax(-1)
    rows = temperatures.nonzero()[:, 0]
    if len(rows):
        scaled = logits[rows].float() / temperatures[rows, None]
        probs = (scaled - scaled.amax(-1, keepdim=True)).exp_()
        probs.mul_(probs >= min_p)
        cumulative = probs.cumsum(-1)
        points = torch.rand(len(rows), 1, generator=generator) * cumulative[:, -1:]
        tokens[rows] = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return tokens


def count_written(path: Path) -> tuple[int, int]:
    """Conversations and answer tokens in a data file; a torn last line is cut off, so that writing can go on."""
    conversations = tokens = 0
    if path.exists():
        with path.open("rb+") as file:
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                tokens += sum(stop - start for start, stop in json.loads(line)["answers"])
                conversations += 1
                end += len(line)
            file.truncate(end)
    return conversations, tokens


@torch.inference_mode()
def synthesize(
    target: TargetModel,
    tokenizer: Any,
    output: Path,
    config: SynthConfig,
    progress: Callable[[int, int], None] = lambda conversations, tokens: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[int, int]:
    """Append conversations to ``output`` until it holds ``config.answer_tokens`` answer tokens or ``should_stop``.

    Every line is ``{"token_ids", "answers": [[start, stop], …], "temperature", "text"}``. An existing file is continued.

    Returns:
        Conversations and answer tokens in the file.
    """
    config.validate()
    conversations, tokens = count_written(output)
    rng = random.Random(f"{config.seed}/{conversations}")
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + conversations)
    template = _Template(tokenizer)
    longest = max(len(template.encode(o.text) + template.encode(o.suffix)) for o in config.openings)
    turn = longest + config.max_prompt + config.max_answer + len(template.after_user) + len(template.after_answer)
    cache = target.new_cache(config.rows, len(template.before_user) + config.turns * turn + 1)
    prefix = torch.tensor(template.before_user[:-1], device=target.device).expand(config.rows, -1)
    target.prefill(cache, prefix)
    shared = prefix.shape[1]
    rows = [_Row(template, config, rng) for _ in range(config.rows)]
    zeros = torch.zeros(config.rows, 1, dtype=torch.long, device=target.device)
    sees_itself = torch.ones(config.rows, 1, 1, dtype=torch.bool, device=target.device)
    seen: set[tuple[int, ...]] = set()
    with output.open("a") as file:
        while tokens < config.answer_tokens and not should_stop():
            inputs = torch.tensor([[row.token_ids[-1]] for row in rows], device=target.device)
            logits, _ = target.verify(cache, inputs, zeros, sees_itself)
            cache.advance(1)
            temperatures = torch.tensor([0.0 if row.forced else row.sampling_temperature for row in rows])
            sampled = sample(logits[:, 0].cpu(), temperatures, config.min_p, generator).tolist()
            for index, row in enumerate(rows):
                if not row.append(sampled[index]):
                    continue
                prompt = tuple(row.token_ids[: row.answers[0][0]]) if row.answers else ()
                if prompt and prompt not in seen:
                    seen.add(prompt)
                    file.write(json.dumps(row.record(tokenizer)) + "\n")
                    file.flush()
                    conversations += 1
                    tokens += sum(stop - start for start, stop in row.answers)
                rows[index] = _Row(template, config, rng)
                cache.lengths[index] = shared
            progress(conversations, tokens)
    return conversations, tokens
