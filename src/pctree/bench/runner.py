"""The run: every cell decodes a prompt before the next prompt is taken, and what is decoded is on the disk.

So a machine that speeds up or slows down does so for all cells alike, and a run that is stopped, or killed, goes on where it
stopped. Several processes share a run without talking to each other: each takes its own prompts and writes its own file.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from pctree.agreement import first_divergence
from pctree.bench.config import BenchConfig, Cell
from pctree.bench.machine import PeakMemory, Shard, environment
from pctree.bench.records import Record, RecordFile, identity, scan
from pctree.bench.tasks import read_tasks
from pctree.decoder import SpeculativeDecoder
from pctree.drafters import AnyDrafter
from pctree.economy import Economy
from pctree.errors import PCTreeError, UsageError
from pctree.graphs import recorder
from pctree.loading import check_compile, load_draft, load_target, prepare, resolve_device, resolve_dtype
from pctree.methods import DraftSettings
from pctree.params import SamplingParams
from pctree.profiles import find_profile
from pctree.prompts import encode_prompt
from pctree.results import Generation
from pctree.targets import TargetModel

WARM_UP_TOKENS = 8
LOOP_TAIL, LOOP_PERIOD = 48, 16


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as the models see it; ``index`` is its place in the selection of its task."""

    task: str
    index: int
    token_ids: tuple[int, ...]

    @cached_property
    def sha256(self) -> str:
        """Of the rendered token ids: other wording, template or thinking mode is another prompt."""
        return hashlib.sha256(" ".join(map(str, self.token_ids)).encode()).hexdigest()[:16]


def repeats_itself(token_ids: Sequence[int], tail: int = LOOP_TAIL, period: int = LOOP_PERIOD) -> bool:
    """Whether a text ends in a loop: its last ``tail`` tokens repeat with a period of at most ``period``.

    A drafter guesses a loop easily, so such a text is fast for the wrong reason.
    """
    last = token_ids[-tail:]
    return len(last) == tail and any(last[step:] == last[:-step] for step in range(1, period + 1))


def load_decoders(
    config: BenchConfig, cells: Sequence[Cell], device: torch.device
) -> tuple[dict[Cell, SpeculativeDecoder], dict[str, AnyDrafter]]:
    """A decoder for every cell (its budget filled in, if it is a chain), and the drafters; each model is loaded once."""
    dtype = resolve_dtype(config.dtype)
    check_compile(config.compile, device)
    loaded: dict[str, AnyDrafter] = {}
    drafts: dict[str, AnyDrafter] = {}
    complete: list[Cell] = []
    for cell in cells:
        if cell.drafter is not None:
            source = str(config.drafters[cell.drafter])
            if source not in loaded:
                loaded[source] = load_draft(source, dtype, device)
            drafts[cell.drafter] = loaded[source]
            if cell.is_chain:
                cell = replace(cell, budget=drafts[cell.drafter].config.draft_length + 1)
        try:
            cell.settings().validate(None if cell.drafter is None else drafts[cell.drafter])
        except UsageError as error:
            raise UsageError(f"cell {cell.label}: {error}") from None
        complete.append(cell)

    def settings(cell: Cell) -> DraftSettings:
        """The confidence head's calibration is measured on the whole chain."""
        whole_chain = cell.method == "dspark" and not cell.confidence_threshold
        known = cell.drafter is not None and drafts[cell.drafter].config.enable_confidence_head
        return replace(cell.settings(), record_confidence=whole_chain and known)

    model, tokenizer = load_target(config.target, dtype, device)
    bound = prepare(model, tokenizer, config.target, loaded, config.compile)
    tapped = {name: bound[str(config.drafters[name])] for name in drafts}
    plain, record = TargetModel(model), recorder(config.compile)
    decoders = {
        cell: SpeculativeDecoder(plain, None, tokenizer, settings(cell), record=record)
        if cell.drafter is None
        else SpeculativeDecoder(
            tapped[cell.drafter], drafts[cell.drafter], tokenizer, settings(cell), economy(config, cell), record
        )
        for cell in complete
    }
    return decoders, drafts


def economy(config: BenchConfig, cell: Cell) -> Economy | None:
    """What rounds cost here, for cells with an automatic budget."""
    if cell.budget != "auto" or cell.drafter is None:
        return None
    source = config.drafters[cell.drafter]
    found = find_profile(config.profile, config.target, source, config.dtype, config.device, config.compile)
    return None if found is None else found.economy


def encode_tasks(tasks: dict[str, list[str]], tokenizer: Any, context: int) -> list[BenchPrompt]:
    """All prompts, the first of every task, then the second of every task, and so on; equal ones of a task once.

    Raises:
        UsageError: a prompt leaves no room in the target's context; its task and index are named.
    """
    encoded: dict[tuple[str, tuple[int, ...]], BenchPrompt] = {}
    for index, row in enumerate(zip_longest(*tasks.values())):
        for task, text in zip(tasks, row, strict=True):
            if text is None:
                continue
            token_ids = tuple(encode_prompt(tokenizer, text))
            if len(token_ids) >= context:
                raise UsageError(
                    f"prompt {index} of task {task} has {len(token_ids)} tokens but the target's context holds {context}; "
                    "take it out, or take fewer prompts"
                )
            encoded.setdefault((task, token_ids), BenchPrompt(task, index, token_ids))
    return list(encoded.values())


class Bench:
    """A run, ready to start: prompts read, models loaded, and what the folder already holds left out.

    Args:
        config: what to measure.
        output: folder of the records, of this and of other runs.
        shard: which of the prompts are this process's.

    Raises:
        UsageError, CheckpointError: something cannot be used; nothing has been written then.
    """

    def __init__(self, config: BenchConfig, output: Path, shard: Shard | None = None):
        self.config, self.output, self.shard = config, output, shard or Shard()
        if output.exists() and not output.is_dir():
            raise UsageError(f"output is {output}, a file; give a folder for the records")
        cells = config.matrix()
        tasks = read_tasks(config.tasks, prompts=config.prompts, per_task=config.per_task, seed=config.seed)
        self.device = resolve_device(self.shard.device(config.device))
        self.decoders, self.drafts = load_decoders(config, cells, self.device)
        self.cells = list(self.decoders)
        self.target = TargetModel(self.decoders[self.cells[0]].target.model)
        self.prompts = encode_tasks(tasks, self.decoders[self.cells[0]].tokenizer, self.target.max_length)
        lines = scan([output] if output.exists() else [])
        self.done = {identity(line): self._plain_ids(line) for line in lines if line["kind"] == "record"}
        self._warm: set[Cell] = set()

    @staticmethod
    def _plain_ids(record: Record) -> list[int] | None:
        """Of what was decoded, only plain texts are needed again: the others are compared with them."""
        return record["token_ids"] if record["method"] == "ar" else None

    def head(self, cell: Cell, prompt: BenchPrompt, repeat: int) -> Record:
        """What is known of a record before decoding; it holds its identity."""
        draft = None if cell.drafter is None else self.drafts[cell.drafter]
        return {
            "target": self.config.target,
            "drafter": cell.drafter,
            "drafter_source": None if cell.drafter is None else self.config.drafters[cell.drafter],
            "block_size": None if draft is None else draft.config.block_size,
            **{name: value for name, value in asdict(cell).items() if name != "drafter"},
            "dtype": self.config.dtype,
            "max_new_tokens": self.config.max_new_tokens,
            "task": prompt.task,
            "index": prompt.index,
            "repeat": repeat,
            "prompt_sha256": prompt.sha256,
            "prompt_tokens": len(prompt.token_ids),
        }

    def missing(self, cell: Cell, prompt: BenchPrompt, repeat: int) -> bool:
        return identity(self.head(cell, prompt, repeat)) not in self.done

    def pending(self) -> Iterator[tuple[BenchPrompt, int, list[Cell]]]:
        """This process's prompts that are not wholly decoded, each with the cells to do, in an order that rotates."""
        for repeat in range(self.config.repeats):
            for number, prompt in enumerate(self.prompts):
                if self.shard.takes(number):
                    first = (number + repeat) % len(self.cells)
                    order = self.cells[first:] + self.cells[:first]
                    if todo := [cell for cell in order if self.missing(cell, prompt, repeat)]:
                        yield prompt, repeat, todo

    def wanted(self) -> set[tuple[Any, ...]]:
        """The identities of all records of this matrix, whichever process makes them."""
        return {
            identity(self.head(cell, prompt, repeat))
            for repeat in range(self.config.repeats)
            for prompt in self.prompts
            for cell in self.cells
        }

    def run(
        self, decoded: Callable[[Cell, BenchPrompt], None] | None = None, should_stop: Callable[[], bool] | None = None
    ) -> bool:
        """Decode what is missing; False when stopped early. A prompt's records are written together, when it is done.

        Args:
            decoded: told after every decoding.
            should_stop: asked before every decoding; a prompt that is not finished then is left for the next run.
        """
        work = list(self.pending())
        if not work:
            return True
        file = RecordFile(self.output / self.shard.file_name)
        try:
            line = environment(self.device, self.config.dtype, self.config.compile)
            file.append([line])
            for prompt, repeat, todo in work:
                results: dict[Cell, Record] = {}
                for cell in todo:
                    if should_stop is not None and should_stop():
                        return False
                    results[cell] = self._decode(cell, prompt, repeat)
                    if decoded is not None:
                        decoded(cell, prompt)
                self._compare(results, prompt, repeat)
                records = [{"kind": "record", "environment": line["environment"], **record} for record in results.values()]
                file.append(records)
                self.done |= {identity(record): self._plain_ids(record) for record in records}
        finally:
            file.close()
        return True

    def _decode(self, cell: Cell, prompt: BenchPrompt, repeat: int) -> Record:
        if cell not in self._warm:
            self._generate(cell, prompt, repeat, min(WARM_UP_TOKENS, self.config.max_new_tokens))
            self._warm.add(cell)
        memory = PeakMemory(self.device)
        memory.reset()
        began = time.perf_counter()
        result, confidences = self._generate(cell, prompt, repeat, self.config.max_new_tokens)
        seconds = time.perf_counter() - began
        return {
            **self.head(cell, prompt, repeat),
            "tokens": len(result.token_ids),
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "seconds": round(seconds, 4),
            "first_difference": None,
            "margin": None,
            "repeats_itself": repeats_itself(result.token_ids),
            "peak_memory_mb": memory.read(),
            "confidences": confidences,
            **result.stats.to_dict(),
        }

    def _generate(
        self, cell: Cell, prompt: BenchPrompt, repeat: int, max_new_tokens: int
    ) -> tuple[Generation, list[list[float]] | None]:
        """The result, and where it was asked what the confidence head thought of every round's chain."""
        sampling: dict[str, Any] = {}
        if cell.temperature:
            # DeepSpec's seed of a prompt; a repeat draws anew.
            sampling = {"temperature": cell.temperature, "seed": self.config.seed + prompt.index + 1_000_003 * repeat}
        decoder = self.decoders[cell]
        request = decoder.request(list(prompt.token_ids), SamplingParams(max_new_tokens=max_new_tokens, **sampling))
        trees = []
        try:
            for _, done in decoder.decode([request]):
                if done.path:
                    trees.append(done.tree)
        except torch.OutOfMemoryError:
            raise PCTreeError(
                f"out of memory in cell {cell.label} on prompt {prompt.index} of task {prompt.task}; lower max_new_tokens or "
                "the budget and run again: finished prompts are kept"
            ) from None
        asked = [tree.confidence[0, 1:].tolist() for tree in trees if tree.confidence is not None]
        confidences = [[round(chance, 4) for chance in chain] for chain in asked]
        return decoder.result(request), confidences or None

    def _compare(self, results: dict[Cell, Record], prompt: BenchPrompt, repeat: int) -> None:
        """Note where each greedy text leaves plain decoding, and how near a tie that was."""
        for cell, record in results.items():
            if cell.method == "ar" or cell.temperature:
                continue
            plain = next(c for c in self.cells if c.method == "ar" and not c.temperature)
            before = self.done.get(identity(self.head(plain, prompt, repeat)))
            expected = results[plain]["token_ids"] if plain in results else before
            assert expected is not None
            parted = first_divergence(self.target, prompt.token_ids, expected, record["token_ids"])
            if parted is not None:
                record["first_difference"] = parted.position
                record["margin"] = None if math.isnan(parted.margin) else parted.margin
