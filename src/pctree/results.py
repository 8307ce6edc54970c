"""What decoding gives back: a round as it happened, and a generation as it grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pctree.stats import Statistics
from pctree.tree import DraftTree


@dataclass
class Round:
    """One draft, verify, commit: the tree, the accepted path in it (node indices, root first), the committed tokens."""

    tree: DraftTree
    path: list[int]
    token_ids: list[int]


@dataclass
class Generation:
    """The result: new token ids (what ended them included), their text (without special tokens and stop strings), and what
    was measured. While streaming, ``finish_reason`` is None and the text ends before anything that is not sure yet.
    """

    token_ids: list[int]
    text: str | None
    prompt_tokens: int
    method: str
    finish_reason: str | None  # "stop" or "length"
    stats: Statistics

    def to_dict(self) -> dict[str, Any]:
        record = {"text": self.text, "token_ids": self.token_ids, "prompt_tokens": self.prompt_tokens,
                  "method": self.method, "finish_reason": self.finish_reason, "stats": self.stats.to_dict()}  # fmt: skip
        if self.text is None:
            del record["text"]
        return record
