"""A request in flight: what it has produced, where it must stop, and the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from pctree.params import SamplingParams
from pctree.processing import Draws, Processors, choose
from pctree.scorers import Reshape
from pctree.stats import Statistics
from pctree.tree import DraftTree

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for a character whose last bytes have not come yet


class Request:
    """One prompt on its way through the decoder.

    Args:
        prompt_ids: at least one token.
        limit: most new tokens, no more than the context holds.
        stop_ids: tokens that end it.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        limit: int,
        stop_ids: Sequence[int],
        tokenizer: Any = None,
        device: torch.device | str = "cpu",
    ):
        self.prompt_ids, self.params, self.limit, self.stop_ids = list(prompt_ids), params, limit, set(stop_ids)
        self.tokenizer, self.device = tokenizer, torch.device(device)
        self.token_ids: list[int] = []
        self._text: tuple[int, str] = (0, "")  # of so many tokens; worked out when somebody asks
        self._end: int | None = None  # where a stop string cuts it
        self.finish_reason: str | None = None
        self.stats = Statistics()
        self.prefix_ids: list[int] = []  # tokens that processors see before the prompt and the target does not: padding
        self.stopping: StoppingCriteriaList | None = None  # further reasons to stop, asked after every token
        self.processors = Processors(params, len(self.prompt_ids), list(self.stop_ids), self.device)
        self.draws = Draws(params.seed) if params.temperature else None

    # --- what the target says ---------------------------------------------------------------------------------------

    def history(self) -> Tensor:
        """Committed tokens [L] before the next root."""
        return self._ids([*self.prefix_ids, *self.prompt_ids, *self.token_ids][:-1])

    def _ids(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.long, device=self.device)

    def process_emitted(self, logits: Tensor) -> Tensor:
        """Processed logits [n, V] of the n emitted tokens, which are a tree of one branch behind the prompt."""
        if not self.processors:
            return logits
        count = len(self.token_ids)
        branch = self._ids([self.prompt_ids[-1], *self.token_ids[:-1]])
        chain = torch.ones(count, count, dtype=torch.bool, device=self.device).tril()
        past = [*self.prefix_ids, *self.prompt_ids][:-1]
        return self.processors(lambda: self._ids(past), branch, torch.arange(count, device=self.device), chain, logits)

    def choose(self, tree: DraftTree, row: int, ancestor_mask: Tensor, logits: Tensor) -> Tensor:
        """The target's token [N] after each node of this request's row of the tree; ``logits`` [N, V]."""
        if self.processors:
            logits = self.processors(self.history, tree.token_ids[row], tree.depths[row], ancestor_mask[row], logits)
        if self.draws is None:
            return choose(logits, None)
        # No node is deeper than there are nodes.
        return choose(logits, self.draws(len(self.token_ids), tree.nodes).to(logits.device)[tree.depths[row]])

    def choose_first(self, root: DraftTree, logits: Tensor) -> int:
        """The target's token after the prompt, whose last token is ``root`` and has ``logits`` [1, V]."""
        sees_itself = torch.ones(1, 1, 1, dtype=torch.bool, device=self.device)
        return int(self.choose(root, 0, sees_itself, logits))

    def reshape(self) -> Reshape | None:
        """How the drafter's logits are reshaped for the next round; the root is part of the past by then."""
        if not self.processors:
            return None
        return self.processors.reshape(lambda: self._ids([*self.prefix_ids, *self.prompt_ids, *self.token_ids]))

    # --- what is committed ------------------------------------------------------------------------------------------

    def commit(self, token_ids: Sequence[int]) -> list[int]:
        """Take the tokens of a round up to the first stop or the limit; returns those taken.

        Counts as the round's acceptance length what a stop leaves of it; the length limit does not cut that count.
        """
        offered = cut_after_stop(list(token_ids), self.stop_ids)
        counted, before = len(offered), len(self.token_ids)
        for index, token in enumerate(offered):
            self.token_ids.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif self._reached_stop_string():
                self.finish_reason, counted = "stop", index + 1
            elif len(self.token_ids) == self.limit:
                self.finish_reason = "length"
            elif self.stopping is not None and self._criteria_met(self.stopping):
                self.finish_reason, counted = "stop", index + 1
            if self.finish_reason is not None:
                break
        if self.stats.new_tokens:
            self.stats.acceptance_lengths.append(counted)
        self.stats.new_tokens = len(self.token_ids)
        return self.token_ids[before:]

    def _criteria_met(self, criteria: StoppingCriteriaList) -> bool:
        ids = self._ids([*self.prefix_ids, *self.prompt_ids, *self.token_ids])[None]
        return bool(torch.as_tensor(criteria(ids, None)).any())

    @property
    def text(self) -> str | None:
        """All tokens as text, before the first stop string; None where there is no tokenizer."""
        if self.tokenizer is None:
            return None
        if self._text[0] != len(self.token_ids):
            self._text = len(self.token_ids), self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return self._text[1][: self._end]

    def _reached_stop_string(self) -> bool:
        """Whether the text now contains a stop string; cuts it before the first one."""
        strings = self.params.stop_strings
        if not strings:
            return False
        text = self.text or ""
        self._end = min((at for string in strings if (at := text.find(string)) >= 0), default=None)
        return self._end is not None

    @property
    def ready_text(self) -> str | None:
        """The text that can be shown: no half character, and nothing that may yet turn out to begin a stop string."""
        text = self.text
        if text is None or self.finish_reason is not None:
            return text
        text = text.rstrip(UNFINISHED)
        held = 0
        for string in self.params.stop_strings:
            longest = next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
            held = max(held, longest)
        return text[: len(text) - held]


def cut_after_stop(token_ids: list[int], stop_ids: set[int]) -> list[int]:
    """The tokens up to and with the first stop token."""
    for index, token in enumerate(token_ids):
        if token in stop_ids:
            return token_ids[: index + 1]
    return token_ids
