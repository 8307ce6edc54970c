"""Records sorted into what can be compared: settings (same target, numbers, machine), and in each the cells of the matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import log2
from typing import Any

from pctree.bench.measures import Summary, acceptance_by_depth, on_shared_text, summarise
from pctree.bench.records import Record
from pctree.methods import METHODS

Environments = dict[str, dict[str, Any]]

LABELS = {
    "ar": "plain decoding",
    "dspark": "DSpark chain",
    "shared-markov": "Shared-Markov",
    "pctree": "PCTree",
    "dflash": "DFlash chain",
    "ddtree": "DDTree",
    "eagle3": "EAGLE-3 tree",
}
# The paper's own point; where a method was not run there, the nearest one stands for it.
TOP_K, BUDGET = 4, 32
# A knee is the smallest value whose measure is within this share of the best.
KNEE = 0.01


@dataclass(frozen=True)
class Setting:
    """What records must share to be compared."""

    target: str
    temperature: float
    dtype: str
    max_new_tokens: int
    machine: str

    @property
    def decoding(self) -> str:
        return f"temperature {self.temperature:g}" if self.temperature else "greedy"

    def __str__(self) -> str:
        return f"{self.target}, {self.decoding}, {self.dtype}, up to {self.max_new_tokens} new tokens, {self.machine}"


@dataclass(frozen=True)
class Cell:
    """One way of decoding: a method, the drafter it reads, and how."""

    method: str
    drafter: str | None
    block_size: int | None
    top_k: int | None
    budget: int | str | None
    frontier: str | None
    candidates: int
    confidence_threshold: float

    @property
    def chain(self) -> bool:
        if self.method == "eagle3":
            return self.top_k == 1
        return self.method == "ar" or (self.method in METHODS and METHODS[self.method].chain)

    @property
    def exact(self) -> bool:
        """Whether an exact frontier was asked for (DDTree has no other)."""
        return not self.chain and self.frontier == "exact" and self.method != "ddtree"

    @property
    def has_k(self) -> bool:
        """Whether ``top_k`` means something: a chain, DDTree and an exact frontier need none."""
        return not self.chain and not self.exact and self.method != "ddtree"

    @property
    def name(self) -> str:
        """The method, as the column of a table calls it."""
        label = "EAGLE-3 chain" if self.method == "eagle3" and self.chain else LABELS.get(self.method, self.method)
        exact = ", exact frontier" if self.exact else ""
        threshold = f", threshold {self.confidence_threshold:g}" if self.confidence_threshold else ""
        listed = f", {self.candidates} candidates" if self.candidates else ""
        return label + exact + threshold + listed + (", auto budget" if self.budget == "auto" else "")

    @property
    def of_the_paper(self) -> bool:
        """Whether it decodes as the paper does: no threshold, no shortlist, a budget that is a number."""
        return not self.confidence_threshold and not self.candidates and self.budget != "auto"

    @property
    def most_nodes(self) -> int:
        """The budget as a number; an automatic one sorts behind all."""
        return self.budget if isinstance(self.budget, int) else 10**6 if self.budget else 0

    @property
    def point(self) -> str:
        """The numbers that were chosen for it; a chain has none."""
        k = f"k = {self.top_k}, " if self.has_k else ""
        return "" if self.chain else f"{k}N = {self.budget}"

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.drafter, self.point) if part)
        return f"{self.name} ({details})" if details else self.name

    def order(self) -> tuple[Any, ...]:
        place = [*METHODS, self.method].index(self.method)
        return (self.block_size or 0, place, not self.chain, self.exact, self.confidence_threshold, self.candidates,
                self.drafter or "", self.top_k or 0, self.most_nodes)  # fmt: skip

    def distance(self) -> float:
        """How far its k and N are from the paper's, in doublings."""
        k = abs(log2(self.top_k / TOP_K)) if self.has_k and self.top_k else 0.0
        return k + (abs(log2(self.most_nodes / BUDGET)) if not self.chain and self.most_nodes else 0.0)


@dataclass(frozen=True)
class Sweep:
    """Cells that differ in one number alone, in its order."""

    variable: str  # "k" or "N"
    cells: list[Cell]

    def value(self, cell: Cell) -> int:
        return (cell.top_k or 0) if self.variable == "k" else cell.most_nodes

    @property
    def name(self) -> str:
        """The tree's name; its k = 1 may be a chain with another."""
        return self.cells[-1].name

    @property
    def held(self) -> str:
        """The number that stays the same."""
        last = self.cells[-1]
        return f"N = {last.budget}" if self.variable == "k" else f"k = {last.top_k}" if last.has_k else ""

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.cells[-1].drafter, self.held) if part)
        return f"{self.name} ({details})"

    def knee(self, measure: Callable[[Cell], float | None]) -> Cell | None:
        """The smallest value whose measure is within 1 % of the best."""
        values = [(cell, value) for cell in self.cells if (value := measure(cell)) is not None]
        best = max((value for _, value in values), default=0.0)
        return next((cell for cell, value in values if value >= (1 - KNEE) * best), None)


class Study:
    """The records of one setting, by cell."""

    def __init__(self, setting: Setting, records: Sequence[Record], environments: Environments):
        self.setting = setting
        self.records = list(records)
        self.tasks = sorted({record["task"] for record in records})
        named = {record["environment"] for record in records}
        self.environments = [found for name, found in environments.items() if name in named]
        self.sources: dict[str, set[str]] = defaultdict(set)
        for record in records:
            if record["drafter"] is not None:
                self.sources[record["drafter"]].add(record["drafter_source"])
        self._of: dict[Cell, list[Record]] = defaultdict(list)
        for record in records:
            self._of[self._cell(record)].append(record)
        self.cells = sorted(self._of, key=Cell.order)
        self.speculating = [cell for cell in self.cells if cell.method != "ar"]
        self.plain = [record for record in records if record["method"] == "ar"]
        self._summaries: dict[tuple[Cell, str | None], Summary] = {}

    def _cell(self, record: Record) -> Cell:
        drafter = record["drafter"]
        if len(self.sources.get(drafter, ())) > 1:  # one name for several checkpoints
            drafter = f"{drafter} = {record['drafter_source']}"
        keys = ("method", "block_size", "top_k", "budget", "frontier", "candidates", "confidence_threshold")
        return Cell(drafter=drafter, **{key: record[key] for key in keys})

    def of(self, cell: Cell, task: str | None = None) -> list[Record]:
        """The records of a cell, on one task or on all."""
        return [record for record in self._of.get(cell, ()) if task in (None, record["task"])]

    def summary(self, cell: Cell, task: str | None = None) -> Summary:
        """The measures of a cell, on one task or over all; computed once."""
        if (cell, task) not in self._summaries:
            self._summaries[cell, task] = summarise(self.of(cell, task), self.plain)
        return self._summaries[cell, task]

    def tau(self, cell: Cell, task: str | None = None) -> float | None:
        found = self.summary(cell, task).tau
        return found.value if found else None

    def speedup(self, cell: Cell, task: str | None = None) -> float | None:
        found = self.summary(cell, task).speedup
        return found.value if found else None

    def accepted(self, cell: Cell, task: str | None = None) -> list[float]:
        """Share of rounds that accept at least d drafted tokens, for d = 1 … the cell's block size."""
        return acceptance_by_depth(self.of(cell, task), cell.block_size or 0)

    def on_shared_text(self, cells: Sequence[Cell]) -> Study | None:
        """These cells in the rounds that start while all their texts are still the same; None where no text parts."""
        if not any(self.summary(cell).flips.parted for cell in cells):
            return None
        shared = copy(self)
        shared._of = dict(zip(cells, on_shared_text(*map(self.of, cells)), strict=True))
        shared._summaries = {}
        return shared

    def plain_steps(self, cell: Cell) -> float | None:
        """What a round of the cell costs, in steps of plain decoding."""
        plain = next((self.summary(cell).round_ms for cell in self.cells if cell.method == "ar"), 0.0)
        return self.summary(cell).round_ms / plain if plain else None

    @property
    def main(self) -> list[Cell]:
        """For each drafter and method the cell that stands for it: the one nearest to the paper's k and N, decoded as the
        paper does.
        """
        nearest: dict[tuple[str, str | None], Cell] = {}
        for cell in sorted(self.speculating, key=Cell.distance):
            if cell.of_the_paper:
                nearest.setdefault((cell.name, cell.drafter), cell)
        return sorted(nearest.values(), key=Cell.order)

    def main_cell(self, method: str, drafter: str | None) -> Cell | None:
        """The main cell of a method in its plain form, with a capped frontier."""
        return next((cell for cell in self.main if cell.drafter == drafter and cell.name == LABELS[method]), None)

    @property
    def with_plain(self) -> list[Cell]:
        """Plain decoding, where it was run, and the main cells."""
        return [cell for cell in self.cells if cell.method == "ar"] + self.main

    def trio(self, drafter: str) -> tuple[Cell, Cell, Cell] | None:
        """The main cells of chain, Shared-Markov and PCTree, where all were run and both trees at the same k and N."""
        chain, shared, tree = (self.main_cell(method, drafter) for method in ("dspark", "shared-markov", "pctree"))
        if chain is None or shared is None or tree is None or shared.point != tree.point:
            return None
        return chain, shared, tree

    @property
    def drafters(self) -> dict[str, int]:
        """Drafters and their block sizes, the smallest first."""
        return {cell.drafter: cell.block_size or 0 for cell in self.speculating if cell.drafter}

    def blocks(self) -> dict[int, list[Cell]]:
        """The main cells by block size."""
        blocks: dict[int, list[Cell]] = defaultdict(list)
        for cell in self.main:
            blocks[cell.block_size or 0].append(cell)
        return dict(blocks)

    def sweeps(self, variable: str) -> list[Sweep]:
        """For each drafter and method that was run at several values of ``variable``: the cells nearest to the paper's other
        number. EAGLE-3's chain is its tree's k = 1.
        """
        groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
        for cell in self.speculating:
            if cell.of_the_paper and (cell.has_k or (variable == "N" and not cell.chain)):
                held = cell.budget if variable == "k" else cell.top_k if cell.has_k else None
                groups[cell.name, cell.drafter, held].append(cell)
        if variable == "k":
            for (_, drafter, _), cells in groups.items():
                cells += [c for c in self.speculating if c.name == "EAGLE-3 chain" and c.drafter == drafter]
        found: dict[tuple[Any, ...], Sweep] = {}
        for (name, drafter, _), cells in sorted(groups.items(), key=lambda group: min(map(Cell.distance, group[1]))):
            if len(cells) > 1:
                ordered = sorted(cells, key=lambda cell: (cell.top_k or 0) if variable == "k" else cell.most_nodes)
                found.setdefault((name, drafter), Sweep(variable, ordered))
        return sorted(found.values(), key=lambda sweep: sweep.cells[-1].order())


def studies(records: Sequence[Record], environments: Environments) -> list[Study]:
    """The records by setting, the largest first."""
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        keys = ("target", "temperature", "dtype", "max_new_tokens")
        machine = machine_of(environments.get(record["environment"], {}))
        groups[Setting(machine=machine, **{key: record[key] for key in keys})].append(record)
    return [
        Study(s, group, environments) for s, group in sorted(groups.items(), key=lambda item: (-len(item[1]), str(item[0])))
    ]


def machine_of(environment: dict[str, Any]) -> str:
    """The device whose speed was measured; on a CPU with its threads."""
    if environment.get("device", "cpu") != "cpu":
        return str(environment["device"])
    return f"{environment.get('cpu') or 'a CPU'} ({environment.get('threads', '?')} threads)"
