"""What a report says of the matrix: each section looks for the cells that it needs, and is None where they were not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pctree.bench import checks, paper_sections, plots
from pctree.bench.blocks import Block, Figure, Section, Table, Text, Tiles
from pctree.bench.formatting import ABSENT, best_bold, gain, number, percent, times, with_interval
from pctree.bench.measures import speedup_gain, tau_gain
from pctree.bench.study import Cell, Study
from pctree.stats import STAGES

MEAN = "**mean over tasks**"


def sections(study: Study, *, with_paper: bool, draw: bool) -> list[Section]:
    """The report on one setting, in reading order."""
    made = [
        at_a_glance(study, draw),
        main_table(study, draw),
        sweep(study, "k", draw),
        sweep(study, "N", draw),
        stage_times(study, draw),
        depth(study, draw),
        decomposition(study, draw),
        all_cells(study),
        paper_sections.beside(study) if with_paper else None,
        paper_sections.differences(study),
        checks.flips(study),
        checks.loops(study),
        checks.calibration(study, draw),
        checks.thresholds(study),
        checks.repeats(study),
        checks.setup(study),
    ]
    return [section for section in made if section is not None]


def at_a_glance(study: Study, draw: bool) -> Section:
    """The few numbers that matter, and which setting to serve."""
    tiles = []
    for cell in (cell for cell in study.main if cell.name == "PCTree"):
        chain = study.main_cell("dspark", cell.drafter)
        against = f"; chain {number(study.tau(chain))}" if chain else ""
        tiles.append((number(study.tau(cell)), f"tokens a round, PCTree, B = {cell.block_size}", cell.point + against))
    blocks: list[Block] = [Tiles(tiles)]
    ranked = sorted((cell for cell in study.speculating if study.speedup(cell)), key=lambda cell: -(study.speedup(cell) or 0))
    if ranked:
        tiles.append((times(study.speedup(ranked[0])), "plain decoding's speed, at best", str(ranked[0])))
        blocks.append(_what_to_serve(study, ranked))
    else:
        blocks.append(Text("No record of plain decoding (ar) pairs with these, so there is no speedup to report."))
    prompts = len({(record["task"], record["prompt_sha256"]) for record in study.records})
    tasks = f"{len(study.tasks)} task{'s' if len(study.tasks) > 1 else ''}"
    tiles.append((str(prompts), f"prompts of {tasks}", f"{len(study.records):,} texts, {len(study.cells)} ways of decoding"))
    if draw and study.main:
        alt = "Bars: acceptance length and speed over plain decoding of every method, mean over tasks, with 95 % intervals."
        blocks.append(Figure("overview", alt, plots.draw(plots.overview, study)))
    return Section("At a glance", blocks)


def _what_to_serve(study: Study, ranked: Sequence[Cell]) -> Text:
    """The fastest cell, and those that these records cannot tell from it."""
    best, level = ranked[0], []
    for cell in ranked[1:]:
        lead = speedup_gain(study.of(cell), study.of(best), study.plain)
        if lead is not None and lead.low is not None and lead.low <= 0:
            level.append(f"{cell} {times(study.speedup(cell))}")
    text = f"**To serve: {best}**, the fastest here at {with_interval(study.summary(best).speedup, '×')}."
    if level:
        more = f" and {len(level) - 4} more" if len(level) > 4 else ""
        text += f" These records do not tell it from {'; '.join(level[:4])}{more}."
    return Text(text)


def main_table(study: Study, draw: bool) -> Section | None:
    """Tasks × methods, a table a block size."""
    if not study.main:
        return None
    blocks: list[Block] = [
        Text("τ is the mean number of tokens a round commits, the target's bonus token included. The AR speedup is the median "
             "over prompts of tokens a second over plain decoding's, paired by prompt and repeat. The best of a row is bold; "
             "intervals are in the plot and in cells.csv.")
    ]  # fmt: skip
    for size, cells in study.blocks().items():
        rows = []
        for task in (*study.tasks, None):
            taus, speeds = [study.tau(cell, task) for cell in cells], [study.speedup(cell, task) for cell in cells]
            shown = zip(best_bold(list(map(number, taus)), taus), best_bold(list(map(times, speeds)), speeds), strict=True)
            rows.append([task or MEAN, *(f"{tau} · {speed}" if study.plain else tau for tau, speed in shown)])
        names = [cell.name for cell in cells]
        headings = [f"{cell.name} ({cell.drafter})" if names.count(cell.name) > 1 else cell.name for cell in cells]
        points = "; ".join(f"{cell.name}: {cell.point}" for cell in cells if cell.point)
        title = f"B = {size}: acceptance length τ" + (" · AR speedup" if study.plain else "")
        blocks.append(Table(["task", *headings], rows, title, f"{points}." if points else ""))
    if draw:
        alt = "Dots with whiskers: acceptance length of every method on every task with its 95 % interval."
        blocks.append(Figure("tau-by-task", alt, plots.draw(plots.tau_by_task, study)))
    return Section("Main table: τ and AR speedup by task", blocks)


def sweep(study: Study, variable: str, draw: bool) -> Section | None:
    """τ and speedup along k or N, with the knees."""
    found = study.sweeps(variable)
    if not found:
        return None
    values = sorted({one.value(cell) for one in found for cell in one.cells})
    blocks: list[Block] = []
    measures: tuple[tuple[str, Callable[[Cell], float | None], Callable[[float | None], str]], ...] = (
        ("τ", study.tau, number),
        ("AR speedup", study.speedup, times),
    )
    for title, measure, show in measures:
        rows = []
        for one in found:
            knee = one.knee(measure)
            if knee is not None:
                texts = {
                    one.value(cell): f"**{show(measure(cell))}**" if cell == knee else show(measure(cell)) for cell in one.cells
                }
                rows.append([str(one), *(texts.get(value, ABSENT) for value in values), f"{variable} = {one.value(knee)}"])
        if rows:
            headings = ["method", *(f"{variable} = {value}" for value in values), "knee"]
            blocks.append(Table(headings, rows, f"{title} by {variable}, mean over tasks"))
    blocks.append(Text(f"The knee (bold, ringed in the plot) is the smallest {variable} within 1 % of the row's best."))
    if draw:
        alt = f"Lines: acceptance length and speed over plain decoding by {variable}; rings mark the knees."
        blocks.append(Figure(f"sweep-{variable}", alt, plots.draw(plots.sweep, study, found)))
    what = "children a parent, and width of the frontier" if variable == "k" else "nodes sent to the target"
    return Section(f"Sweep of {variable}: {what}", blocks)


def stage_times(study: Study, draw: bool) -> Section | None:
    """Milliseconds a round by stage."""
    cells = [cell for cell in study.with_plain if study.summary(cell).round_ms]
    if not cells:
        return None
    rows = []
    for cell in cells:
        found = study.summary(cell)
        stages = [number(found.stage_ms[stage]) for stage in STAGES]
        rows.append([str(cell), *stages, number(found.round_ms), number(study.plain_steps(cell))])
    headings = ["method", *(plots.STAGE_LABELS[stage] for stage in STAGES), "round", "in plain steps"]
    blocks: list[Block] = [Table(headings, rows, "milliseconds a round (median over texts, mean over tasks)")]
    if study.plain:
        blocks.append(Text("“In plain steps” is what a round costs beside one step of plain decoding: a method is faster than "
                           "plain decoding where its τ is above this number."))  # fmt: skip
    if draw:
        alt = "Stacked bars: milliseconds a round for draft backbone, head and tree, verify and commit."
        blocks.append(Figure("stages", alt, plots.draw(plots.stages, study, cells)))
    return Section("Time a round, by stage", blocks)


def depth(study: Study, draw: bool) -> Section | None:
    """How deep a round gets."""
    if not study.main:
        return None
    deepest = max(study.blocks())
    rows = []
    for cell in study.main:
        shares = study.accepted(cell)
        rows.append([str(cell), *map(percent, shares), *[""] * (deepest - len(shares))])
    blocks: list[Block] = [
        Text("The share of rounds that accept at least d drafted tokens, mean over tasks. One plus the sum of a row is its τ."),
        Table(["method; d =", *map(str, range(1, deepest + 1))], rows),
    ]
    if draw:
        alt = "Lines: share of rounds that accept at least d drafted tokens, by d."
        blocks.append(Figure("depth", alt, plots.draw(plots.depth, study)))
    return Section("Acceptance by depth", blocks)


def decomposition(study: Study, draw: bool) -> Section | None:
    """Chain → Shared-Markov is branching; Shared-Markov → PCTree is parent conditioning."""
    trios = {drafter: cells for drafter in study.drafters if (cells := study.trio(drafter)) is not None}
    if not trios:
        return None
    parted = False
    blocks: list[Block] = [
        Text("A Shared-Markov tree has the chain's own distributions at every depth, so what it adds to the chain is branching "
             "alone. PCTree's tree of the same k and N scores each child for its own parent, so what it adds to that is parent "
             "conditioning. Differences are paired by prompt, with their 95 % intervals.")
    ]  # fmt: skip
    for drafter, cells in trios.items():
        title = f"{drafter}, B = {study.drafters[drafter]}, {cells[-1].point}"
        blocks.append(_steps(study, cells, title))
        shared = study.on_shared_text(cells)
        if shared is not None:
            blocks.append(_steps(shared, cells, title + ", rounds that start from the same text"))
            parted = True
    if parted:
        blocks.append(Text("Near-ties part the texts of a prompt, and of two texts one may be easier to draft. Rounds that "
                           "start while all three texts are still the same differ by the method alone."))  # fmt: skip
    if draw:
        alt = "Bars: tokens a round added by branching and by parent conditioning on every task, with 95 % intervals."
        blocks.append(Figure("decomposition", alt, plots.draw(plots.decomposition, study, trios)))
    return Section("Decomposition: branching and parent conditioning", blocks)


def _steps(study: Study, cells: tuple[Cell, Cell, Cell], title: str) -> Table:
    """From the chain to Shared-Markov to PCTree, by task."""
    chain, shared, tree = cells
    rows = []
    for task in (*study.tasks, None):
        branching = tau_gain(study.of(chain, task), study.of(shared, task))
        parents = tau_gain(study.of(shared, task), study.of(tree, task))
        rows.append([task or MEAN, number(study.tau(chain, task)), gain(branching), gain(parents),
                     number(study.tau(tree, task))])  # fmt: skip
    return Table(["task", "chain τ", "branching", "parent conditioning", "PCTree τ"], rows, title)


def all_cells(study: Study) -> Section:
    """Every cell, mean over tasks."""
    rows = []
    for cell in study.cells:
        s = study.summary(cell)
        rows.append([
            cell.name, cell.drafter or ABSENT, str(cell.block_size or ABSENT), cell.point or ABSENT, with_interval(s.tau),
            with_interval(s.speedup, "×"), with_interval(s.mean_speedup, "×"), number(s.tokens_per_second, 1),
            number(s.rounds, 1), number(s.nodes, 1), number(s.peak_memory_mb, 0),
        ])  # fmt: skip
    headings = ["method", "drafter", "B", "point", "τ", "speedup, median", "speedup, mean", "tokens/s", "rounds a text",
                "nodes a round", "peak memory, MB"]  # fmt: skip
    return Section("All cells: methods across drafters, mean over tasks", [Table(headings, rows)])
