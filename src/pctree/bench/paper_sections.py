"""Our figures beside the paper's, and the paper's claims put to our records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pctree.bench import paper
from pctree.bench.blocks import Block, Bullets, Section, Table, Text
from pctree.bench.claims import FAILS, HOLDS, IN_PART, claims
from pctree.bench.formatting import ABSENT, number, signed
from pctree.bench.study import BUDGET, LABELS, Study

MARKS = {HOLDS: "✓", IN_PART: "◐", FAILS: "✗"}


def differences(study: Study) -> Section | None:
    """Which of the paper's claims hold here."""
    found = claims(study)
    if not found:
        return None
    counts = Counter(claim.verdict for claim in found)
    tally = ", ".join(f"{counts[verdict]} × {verdict}" for verdict in MARKS if counts[verdict])
    blocks: list[Block] = [
        Text(f"{paper.TITLE} was measured with {paper.SETUP['target']} on {paper.SETUP['hardware']}; these records are of "
             f"{study.setting}. The claims that they can test: {tally}.")
    ]  # fmt: skip
    for claim in found:
        blocks += [Text(f"{MARKS[claim.verdict]} **{claim.statement}** {claim.verdict.capitalize()}."), Bullets(claim.evidence)]
    return Section("Where this differs from the paper", blocks)


def beside(study: Study) -> Section:
    """Ours beside the published figures, after the differences of set-up."""
    tables = (_setup(study), _main(study), _ablation(study), _stages(study))
    text = (
        f"The published figures are those of {paper.TITLE}. What differs in the set-up is bold: the columns show the same "
        "comparison, not the same experiment, so compare the gains rather than the values."
    )
    return Section("Beside the published figures", [Text(text), *(table for table in tables if table is not None)])


def _setup(study: Study) -> Table:
    prompts = [len({r["prompt_sha256"] for r in study.records if r["task"] == task}) for task in study.tasks]
    here = {
        "target": study.setting.target,
        "decoding": study.setting.decoding,
        "hardware": study.setting.machine,
        "number format": study.setting.dtype,
        "tree": "; ".join(dict.fromkeys(cell.point for cell in study.main if cell.name == LABELS["pctree"])) or ABSENT,
        "prompts a task": str(prompts[0]) if len(set(prompts)) == 1 else f"{min(prompts)} to {max(prompts)}",
        "most new tokens": str(study.setting.max_new_tokens),
    }
    rows = []
    for key in dict.fromkeys((*paper.SETUP, *here)):
        theirs, ours = paper.SETUP.get(key), here.get(key)
        shown = "not recorded" if ours is None else f"**{ours}**" if ours != theirs else ours
        rows.append([key, theirs or "not among the figures we have", shown])
    return Table(["set-up", "paper", "here"], rows, prose=True)


def _main(study: Study) -> Table:
    """The paper's main table: chain → PCTree."""
    rows = []
    for row in paper.MAIN:
        drafter = _drafter_of(study, row.block_size)
        cells = [study.main_cell(method, drafter) for method in ("dspark", "pctree")] if drafter else [None, None]
        taus = [study.tau(cell, row.task) if cell else None for cell in cells]
        speeds = [study.speedup(cell, row.task) if cell else None for cell in cells]
        rows.append([row.task, str(row.block_size), _step((row.chain_tau, row.pctree_tau)), _step(taus),
                     _step((row.chain_speedup, row.pctree_speedup), "×"), _step(speeds, "×")])  # fmt: skip
    headings = ["task", "B", "τ, paper", "τ, here", "AR speedup, paper", "AR speedup, here"]
    return Table(headings, rows, "DSpark chain → PCTree")


def _step(values: Sequence[float | None], unit: str = "") -> str:
    """``6.31 → 7.24 (+15 %)``"""
    before, after = values
    if before is None or after is None:
        return ABSENT
    return f"{before:.2f}{unit} → {after:.2f}{unit} ({signed(100 * (after / before - 1), 0)} %)"


def _ablation(study: Study) -> Table | None:
    """τ of the chain, of Shared-Markov and of PCTree by k, with the same weights."""
    task, size = paper.ABLATION_TASK, paper.ABLATION_BLOCK_SIZE
    drafter = _drafter_of(study, size)
    if drafter is None or task not in study.tasks:
        return None
    rows = []
    for method, k, theirs in paper.ABLATION:
        wanted = (LABELS[method], drafter)
        cells = [cell for cell in study.speculating if (cell.name, cell.drafter) == wanted
                 and (k is None or (cell.top_k, cell.budget) == (k, BUDGET))]  # fmt: skip
        name = f"{LABELS[method]}, k = {k}" if k else LABELS[method]
        rows.append([name, number(theirs, 3), number(study.tau(cells[0], task) if cells else None, 3)])
    return Table(["method", "paper", "here"], rows, f"τ with the same weights, {task}, B = {size}")


def _stages(study: Study) -> Table | None:
    """What the tree costs beside the chain."""
    drafter = _drafter_of(study, paper.STAGES_BLOCK_SIZE)
    chain, tree = (study.main_cell(method, drafter) for method in ("dspark", "pctree")) if drafter else (None, None)
    if chain is None or tree is None:
        return None
    chain_ms, tree_ms = study.summary(chain).stage_ms, study.summary(tree).stage_ms
    columns = [
        (paper.BACKBONE_MS, paper.CHAIN_HEAD_MS, paper.TREE_HEAD_MS),
        (tree_ms["draft"], chain_ms["tree"], tree_ms["tree"]),
    ]
    names = ("draft backbone", "the chain's head", "PCTree's head and tree")
    rows = [[name, *(number(column[row]) for column in columns)] for row, name in enumerate(names)]
    rows.append(["tree over chain", *(f"{c[2] / c[1]:.1f}×" if c[1] else ABSENT for c in columns)])
    rows.append(["tree over backbone", *(f"{c[2] / c[0]:.1f}×" if c[0] else ABSENT for c in columns)])
    return Table(["milliseconds a round", "paper", "here"], rows, f"What the tree costs, B = {paper.STAGES_BLOCK_SIZE}")


def _drafter_of(study: Study, block_size: int) -> str | None:
    """The DSpark drafter of a block size."""
    return next((name for name, size in study.drafters.items() if size == block_size and study.main_cell("dspark", name)), None)
