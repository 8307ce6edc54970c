"""What the paper claims, put to our records: does it hold here, and with which numbers?

Each claim looks for the cells that it needs; where they were not run it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from pctree.bench.formatting import gain as show_gain
from pctree.bench.formatting import number, percent
from pctree.bench.measures import Estimate, speedup_gain, tau_gain
from pctree.bench.study import Cell, Study

Measure = Callable[[Cell, "str | None"], "float | None"]

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the verdict of our records, and the numbers behind it."""

    statement: str
    verdict: str
    evidence: list[str]


def claims(study: Study) -> list[Claim]:
    """Every claim that the records can test."""
    tests = (ordering, wide_trees, long_blocks, against_ddtree, speed, best_budget_speed, against_eagle3)
    return [claim for test in tests if (claim := test(study)) is not None]


def ordering(study: Study) -> Claim | None:
    """PCTree > Shared-Markov > chain in τ."""
    verdicts, evidence = [], []
    for drafter in study.drafters:
        chosen = study.trio(drafter)
        if chosen is None:
            continue
        tasks, failing = _tasks(study.tau, study.tasks, chosen)
        if not tasks:
            continue
        means = [study.tau(cell) for cell in chosen]
        verdicts.append(_verdict(failing, _rising(means)))
        steps = [tau_gain(study.of(a), study.of(b)) for a, b in pairwise(chosen)]
        text = (
            f"{_named(study, drafter)}, {chosen[2].point}: on {_of(tasks, failing)}. Mean τ: chain "
            f"{number(means[0])}, Shared-Markov {number(means[1])}, PCTree {number(means[2])}; the steps are "
            f"{show_gain(steps[0])} and {show_gain(steps[1])}."
        )
        for task in failing:
            text += f" {task}: {', '.join(number(study.tau(cell, task)) for cell in chosen)}{_loops(study, chosen, task)}."
        evidence.append(text + _on_shared_text(study, chosen))
    return _claim("PCTree's τ is above Shared-Markov's, and that above the chain's, on every task.", verdicts, evidence)


def wide_trees(study: Study) -> Claim | None:
    """k = 8 gives no more than k = 4."""
    verdicts, evidence = [], []
    for sweep in study.sweeps("k"):
        by_k = {sweep.value(cell): cell for cell in sweep.cells}
        if sweep.cells[-1].method != "pctree" or not {4, 8} <= by_k.keys():
            continue
        gain = tau_gain(study.of(by_k[4]), study.of(by_k[8]))
        faster = speedup_gain(study.of(by_k[4]), study.of(by_k[8]), study.plain)
        verdicts.append(FAILS if _is_above_zero(gain) else HOLDS)
        text = (
            f"{_named(study, by_k[4].drafter)}, {sweep.held}: mean τ {number(study.tau(by_k[4]))} at k = 4, "
            f"{number(study.tau(by_k[8]))} at k = 8, difference {show_gain(gain)}"
            + (f"; AR speedup differs by {show_gain(faster)}." if faster else ".")
        )
        chain = study.main_cell("dspark", by_k[4].drafter)
        if verdicts[-1] == FAILS and chain is not None:
            text += (
                f" The chain's first draft is accepted in {percent(study.accepted(chain)[0])} of its rounds: the less often "
                "the likeliest child is right, the more a wider tree has to gain."
            )
        evidence.append(text)
    return _claim("k = 8 gives no more τ than k = 4.", verdicts, evidence)


def long_blocks(study: Study) -> Claim | None:
    """A larger B gives a larger τ."""
    verdicts, evidence = [], []
    by_block = {size: name for name, size in study.drafters.items() if study.main_cell("dspark", name)}
    if len(by_block) < 2:
        return None
    short, long = by_block[min(by_block)], by_block[max(by_block)]
    for method in ("dspark", "pctree"):
        before, after = study.main_cell(method, short), study.main_cell(method, long)
        if before is None or after is None:
            continue
        found = _by_tau(study, before, after)
        if not found.tasks:
            continue
        verdicts.append(found.verdict)
        full = study.accepted(before)[-1]
        firsts = [percent(study.accepted(cell)[0]) for cell in (before, after)]
        evidence.append(
            f"{before.name}: mean τ {number(study.tau(before))} at B = {min(by_block)}, {number(study.tau(after))} at "
            f"B = {max(by_block)}, difference {show_gain(found.gain)}; larger on "
            f"{found.where}. At B = {min(by_block)}, {percent(full, 1)} of the rounds accept all drafts, "
            f"and only those can gain from more. The first draft is accepted in {firsts[0]} and {firsts[1]}: a drafter that is "
            "worse there loses what its longer block could gain."
        )
    return _claim("A larger block size B gives a larger τ.", verdicts, evidence)


def against_ddtree(study: Study) -> Claim | None:
    """PCTree is above DDTree with a DFlash drafter."""
    verdicts, evidence = [], []
    headless = [name for name in study.drafters if study.main_cell("ddtree", name) and not study.main_cell("pctree", name)]
    for drafter in study.drafters:
        mine = study.main_cell("pctree", drafter)
        for other in headless:
            theirs = study.main_cell("ddtree", other)
            if mine is None or theirs is None or mine.block_size != theirs.block_size or mine.budget != theirs.budget:
                continue
            found = _by_tau(study, theirs, mine)
            if not found.tasks:
                continue
            verdicts.append(found.verdict)
            text = f"{theirs}: mean τ {number(study.tau(theirs))}. {_above(study, found)}"
            exact = next((cell for cell in study.main if cell == replace(mine, top_k=None, frontier="exact")), None)
            if exact is not None:
                text += f" With an exact frontier, which DDTree's is: {_above(study, _by_tau(study, theirs, exact))}"
            if found.failing:
                first, second = (
                    percent(fmean(study.accepted(cell, task)[0] for task in found.failing)) for cell in (theirs, exact or mine)
                )
                text += (
                    f" On {', '.join(found.failing)} {first} of DDTree's rounds accept a draft of depth 1, and {second} of "
                    "PCTree's: there both know the parent, and the drafters' own probabilities decide."
                )
            evidence.append(text)
    return _claim("PCTree's τ is above DDTree's with a DFlash drafter of the same block size.", verdicts, evidence)


def _above(study: Study, found: Comparison) -> str:
    """By how much, and on which tasks, a τ is above another."""
    text = f"{found.after}: {number(study.tau(found.after))}, difference {show_gain(found.gain)}, above on {found.where}."
    return text + _on_shared_text(study, [found.before, found.after])


def speed(study: Study) -> Claim | None:
    """PCTree is faster than the chain."""
    verdicts, evidence = [], []
    for drafter in study.drafters:
        chain, tree = study.main_cell("dspark", drafter), study.main_cell("pctree", drafter)
        if chain is None or tree is None or study.speedup(tree) is None:
            continue
        found = _by_speed(study, chain, tree)
        if not found.tasks:
            continue
        verdicts.append(found.verdict)
        evidence.append(
            f"{_named(study, drafter)}, {tree.point}: mean AR speedup {number(study.speedup(chain))}× for the chain, "
            f"{number(study.speedup(tree))}× for PCTree, difference {show_gain(found.gain)}; faster on "
            f"{found.where}. {_break_even(study, [chain, tree])}"
        )
    return _claim("PCTree's AR speedup is above the chain's on every task.", verdicts, evidence)


def best_budget_speed(study: Study) -> Claim | None:
    """At its best N, PCTree is faster than the chain on the mean over tasks."""
    verdicts, evidence = [], []
    for sweep in study.sweeps("N"):
        chain = study.main_cell("dspark", sweep.cells[0].drafter)
        best = _fastest(study, sweep.cells)
        if sweep.name != "PCTree" or chain is None or best is None:
            continue
        gain = speedup_gain(study.of(chain), study.of(best), study.plain)
        verdicts.append(HOLDS if _is_gain(gain) else FAILS)
        evidence.append(
            f"{_named(study, chain.drafter)}: PCTree at its best N = {best.budget} runs at {number(study.speedup(best))}×, the "
            f"chain at {number(study.speedup(chain))}×, difference {show_gain(gain)}. "
            f"{_break_even(study, [chain, best])}"
        )
    return _claim("At its best N, PCTree's mean AR speedup is above the chain's (a bar of our own).", verdicts, evidence)


def against_eagle3(study: Study) -> Claim | None:
    """At their best k and N, PCTree is faster than EAGLE-3."""
    verdicts, evidence = [], []
    for drafter in study.drafters:
        mine = _fastest(study, [cell for cell in study.speculating if (cell.method, cell.drafter) == ("pctree", drafter)])
        others = [c for c in study.speculating if c.method == "eagle3" and mine is not None and c.block_size == mine.block_size]
        theirs = _fastest(study, others)
        if mine is None or theirs is None:
            continue
        found = _by_speed(study, theirs, mine)
        if not found.tasks:
            continue
        verdicts.append(found.verdict)
        text = "; ".join(
            f"{cell}: τ {number(study.tau(cell))}, {number(_drafting_ms(study, cell), 1)} ms a round to draft, "
            f"{number(study.speedup(cell))}×"
            for cell in (mine, theirs)
        )
        text += f"; difference {show_gain(found.gain)}; faster on {found.where}."
        chains = [study.main_cell("dspark", drafter), next((cell for cell in others if cell.chain), None)]
        shares = [percent(study.accepted(cell)[0]) for cell in chains if cell is not None]
        if len(shares) == 2:
            text += (
                f" As chains, their first drafts are accepted in {shares[0]} and {shares[1]} of the rounds: that far the "
                "drafters themselves differ, before any tree."
            )
        evidence.append(text)
    return _claim("At its best N, PCTree is faster than EAGLE-3 at its best (a comparison of our own).", verdicts, evidence)


# --- helpers ------------------------------------------------------------------------------------------------------------


def _claim(statement: str, verdicts: Sequence[str], evidence: list[str]) -> Claim | None:
    if not verdicts:
        return None
    return Claim(statement, verdicts[0] if len(set(verdicts)) == 1 else IN_PART, evidence)


def _named(study: Study, drafter: str | None) -> str:
    return f"Drafter {drafter} (B = {study.drafters[drafter or '']})"


def _tasks(measure: Measure, tasks: Sequence[str], cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """The tasks that all cells have, and those of them on which the measure does not rise from cell to cell."""
    rows = {task: [measure(cell, task) for cell in cells] for task in tasks}
    shared = {task: values for task, values in rows.items() if None not in values}
    return list(shared), [task for task, values in shared.items() if not _rising(values)]


@dataclass(frozen=True)
class Comparison:
    """Is a measure of the second cell above the first's: on which of the tasks that both have, and by how much?"""

    before: Cell
    after: Cell
    tasks: list[str]
    failing: list[str]
    gain: Estimate | None

    @property
    def verdict(self) -> str:
        return _verdict(self.failing, _is_gain(self.gain))

    @property
    def where(self) -> str:
        return _of(self.tasks, self.failing)


def _by_tau(study: Study, before: Cell, after: Cell) -> Comparison:
    gain = tau_gain(study.of(before), study.of(after))
    return Comparison(before, after, *_tasks(study.tau, study.tasks, [before, after]), gain)


def _by_speed(study: Study, before: Cell, after: Cell) -> Comparison:
    gain = speedup_gain(study.of(before), study.of(after), study.plain)
    return Comparison(before, after, *_tasks(study.speedup, study.tasks, [before, after]), gain)


def _on_shared_text(study: Study, cells: Sequence[Cell]) -> str:
    """The same comparison without what the texts differ in; nothing where they are the same."""
    shared = study.on_shared_text(cells)
    if shared is None:
        return ""
    means = ", ".join(number(shared.tau(cell)) for cell in cells)
    where = _of(*_tasks(shared.tau, shared.tasks, cells))
    return f" In the rounds that start from the same text the mean τ is {means}; in this order on {where}."


def _loops(study: Study, cells: Sequence[Cell], task: str) -> str:
    """How many of the texts repeat themselves: those are easy to draft, for whichever method wrote them."""
    counts = [study.summary(cell, task).loops for cell in cells]
    return f" (texts in a loop: {', '.join(map(str, counts))})" if any(counts) else ""


def _rising(values: Sequence[float | None]) -> bool:
    return all(a is not None and b is not None and a < b for a, b in pairwise(values))


def _fastest(study: Study, cells: Sequence[Cell]) -> Cell | None:
    """The cell with the largest speedup of those that decode as the paper does."""
    timed = [cell for cell in cells if cell.of_the_paper and study.speedup(cell) is not None]
    return max(timed, key=lambda cell: study.speedup(cell) or 0.0, default=None)


def _drafting_ms(study: Study, cell: Cell) -> float:
    """Milliseconds a round before its verify: backbone, head and tree."""
    return study.summary(cell).stage_ms["draft"] + study.summary(cell).stage_ms["tree"]


def _verdict(failing: Sequence[str], in_the_mean: bool) -> str:
    return HOLDS if not failing else IN_PART if in_the_mean else FAILS


def _of(tasks: Sequence[str], failing: Sequence[str]) -> str:
    count = f"{len(tasks) - len(failing)} of {len(tasks)} tasks"
    return f"{count} (not on {', '.join(failing)})" if failing else count


def _is_gain(found: Estimate | None) -> bool:
    return found is not None and found.value > 0


def _is_above_zero(found: Estimate | None) -> bool:
    return found is not None and (found.value if found.low is None else found.low) > 0


def _break_even(study: Study, cells: Sequence[Cell]) -> str:
    """What a round costs in plain steps: below that many tokens a round a method is slower than plain decoding."""
    if not study.plain:
        return ""
    costs = " and ".join(f"{number(study.plain_steps(cell))} with the {cell.name}" for cell in cells)
    return f"A round costs {costs}, in steps of plain decoding; only tokens beyond that make it faster."
