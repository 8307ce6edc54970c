"""Whether the numbers can be trusted: flips, loops, the confidence head, repeats, and what was equal and what was not."""

from __future__ import annotations

from statistics import median

from pctree.bench import plots
from pctree.bench.blocks import Block, Figure, Section, Table, Text
from pctree.bench.calibration import calibrate, predictions, reliability, weighted_mean
from pctree.bench.formatting import ABSENT, number, percent, times, with_interval
from pctree.bench.measures import by_repeat, median_speedup, repeats_agree, tau
from pctree.bench.study import Study


def flips(study: Study) -> Section | None:
    """Texts that part from plain decoding."""
    if study.setting.temperature or not study.plain:
        return None
    rows = []
    for cell in study.main:
        found = study.summary(cell).flips
        rows.append([str(cell), f"{found.parted} of {found.texts}", number(found.per_thousand),
                     number(found.median_margin, 4), number(found.largest_margin, 4)])  # fmt: skip
    every = [study.summary(cell).flips for cell in study.speculating]
    text = (
        "A forward of many rows and a forward of one round differently; where the target's two best tokens all but tie, either "
        "may win, and from there on the texts part. The margin is the difference of the two tokens' logits at the first "
        "difference, in a plain forward; the rate counts tokens up to it. Over all cells "
        f"{sum(found.parted for found in every):,} of {sum(found.texts for found in every):,} texts part (cells.csv)."
    )
    table = Table(["method", "texts that part", "per 1000 tokens", "median margin", "largest margin"], rows)
    return Section("Flips: texts that part from plain decoding", [Text(text), table])


def loops(study: Study) -> Section | None:
    """Texts that fell into a loop, and what is left of the numbers without them."""
    looping: dict[str, set[int]] = {}
    for record in study.records:
        if record["repeats_itself"]:
            looping.setdefault(record["task"], set()).add(record["index"])
    if not looping:
        return None
    rows = []
    for cell in study.with_plain:
        records = study.of(cell)
        rest = [record for record in records if not record["repeats_itself"]]
        other, speed = tau(rest), median_speedup(rest, study.plain)
        rows.append([str(cell), f"{len(records) - len(rest)} of {len(records)}", number(study.tau(cell)),
                     number(other.value if other else None), times(study.speedup(cell)),
                     times(speed.value if speed else None)])  # fmt: skip
    names = "; ".join(f"{task} {', '.join(map(str, sorted(numbers)))}" for task, numbers in sorted(looping.items()))
    text = f"A text that repeats itself is easy to draft. Prompts with such a text, by their number in the task: {names}."
    headings = ["method", "looping texts", "τ", "τ without them", "speedup", "speedup without them"]
    return Section("Loops: texts that repeat themselves", [Text(text), Table(headings, rows)])


def calibration(study: Study, draw: bool) -> Section | None:
    """Is the confidence head right about itself?"""
    curves = {}
    tables: list[Block] = []
    for cell in study.speculating:
        positions = predictions(study.of(cell))
        if not positions:
            continue
        found = [calibrate(*position) for position in positions]
        names = [*map(str, range(1, len(found) + 1)), "**weighted mean**"]
        rows = [
            [name, f"{c.count:,}", percent(c.predicted, 1), percent(c.accepted, 1), number(c.ece, 4), number(c.auc, 4),
             number(c.brier, 4)]
            for name, c in zip(names, [*found, weighted_mean(found)], strict=True)
        ]  # fmt: skip
        tables.append(Table(["position", "rounds", "predicted", "accepted", "ECE", "AUC", "Brier"], rows, str(cell)))
        predicted = [value for values, _ in positions for value in values]
        curves[str(cell)] = reliability(predicted, [label for _, labels in positions for label in labels])
    if not tables:
        return None
    text = (
        "At position i the confidence head's prediction is the product of its first i probabilities, and the label is whether "
        "the target accepted the first i drafts. ECE: expected calibration error over 20 equal bins. AUC: the chance that an "
        "accepted prefix was predicted above a rejected one."
    )
    blocks: list[Block] = [Text(text), *tables]
    if draw:
        alt = "Reliability: predicted against observed acceptance of the first i drafts, all positions together."
        blocks.append(Figure("calibration", alt, plots.draw(plots.calibration, curves)))
    return Section("Calibration of the confidence head", blocks)


def thresholds(study: Study) -> Section | None:
    """Chains that verify only the positions before the first one that the confidence head trusts too little."""
    scheduled = {(cell.method, cell.drafter) for cell in study.speculating if cell.confidence_threshold}
    rows = []
    for cell in study.speculating:
        if (cell.method, cell.drafter) in scheduled:
            found = study.summary(cell)
            rows.append([str(cell), number(found.nodes), with_interval(found.tau), with_interval(found.speedup, "×")])
    if not rows:
        return None
    text = (
        "With a threshold, a round verifies only the drafts before the first one whose confidence is below it: rounds get "
        "cheaper, and τ smaller. The paper turns it off."
    )
    return Section("Confidence threshold", [Text(text), Table(["method", "nodes a round", "τ", "AR speedup"], rows)])


def repeats(study: Study) -> Section | None:
    """Do repeats of the same matrix agree within their intervals?"""
    rows = []
    told: tuple[list[bool], list[bool]] = ([], [])
    for cell in study.speculating:
        groups = by_repeat(study.of(cell))
        if len(groups) < 2:
            continue
        row = [str(cell)]
        found = ([tau(group) for group in groups], [median_speedup(group, study.plain) for group in groups])
        for verdicts, estimates, show in zip(told, found, (number, times), strict=True):
            agree = repeats_agree(estimates)
            if agree is None:
                row += [ABSENT, ABSENT, ABSENT]
                continue
            verdicts.append(agree)
            values = [estimate.value for estimate in estimates if estimate]
            row += [" / ".join(map(show, values)), number(max(values) - min(values)), "yes" if agree else "**no**"]
        rows.append(row)
    if not rows:
        return None
    counts = " and ".join(
        f"{sum(verdicts)} of {len(verdicts)} cells in {name}"
        for name, verdicts in zip(("τ", "AR speedup"), told, strict=True)
        if verdicts
    )
    text = (
        "Repeats agree where they are no further apart than √(h² + h'²), with h the half-widths of their 95 % intervals: what "
        "95 % of independent runs would show." + (f" They do for {counts}." if counts else "")
    )
    headings = ["method", "τ", "apart", "agree", "AR speedup", "apart", "agree"]
    return Section("Do repeats agree?", [Text(text), Table(headings, rows)])


# --- the set-up ---------------------------------------------------------------------------------------------------------

SOFTWARE = ("pctree", "git_commit", "python", "torch", "transformers", "platform")


def setup(study: Study) -> Section:
    """What was equal for all records and what was not, from the records themselves."""
    setting = study.setting
    equal = [["target", setting.target], ["decoding", setting.decoding], ["number format", setting.dtype],
             ["most new tokens", str(setting.max_new_tokens)], ["machine", setting.machine],
             ["repeats", str(len(by_repeat(study.records)))]]  # fmt: skip
    unequal: list[list[str]] = []
    for key in SOFTWARE:
        values = sorted({str(environment.get(key)) for environment in study.environments})
        if values:
            (equal if len(values) == 1 else unequal).append([key.replace("_", " "), "; ".join(values)])
    if any(environment.get("git_dirty") for environment in study.environments):
        unequal.append(["git", "the working tree held changes that are in no commit"])
    blocks: list[Block] = [Table(["equal for all", ""], equal, prose=True)]
    unequal += _coverage(study)
    if unequal:
        blocks.append(Table(["not equal", ""], unequal, prose=True))
    if study.drafters:
        blocks.append(Table(["drafter", "source", "B", "methods"], _drafter_rows(study), prose=True))
    headings = ["task", "prompts", "prompt tokens, median", "new tokens, median", "texts that ended by themselves"]
    blocks.append(Table(headings, _task_rows(study)))
    return Section("Set-up: what was equal and what was not", blocks)


def _coverage(study: Study) -> list[list[str]]:
    """Cells that lack prompts that others have: their means are over other prompts."""
    prompts = {(record["task"], record["prompt_sha256"]) for record in study.records}
    lacking = [(cell, len(prompts) - study.summary(cell).prompts) for cell in study.cells]
    return [[str(cell), f"lacks {missing} of the {len(prompts)} prompts"] for cell, missing in lacking if missing]


def _drafter_rows(study: Study) -> list[list[str]]:
    rows = []
    for drafter, size in study.drafters.items():
        cells = [cell for cell in study.speculating if cell.drafter == drafter]
        source = study.of(cells[0])[0]["drafter_source"]
        rows.append([drafter, str(source), str(size), ", ".join(dict.fromkeys(cell.name for cell in cells))])
    return rows


def _task_rows(study: Study) -> list[list[str]]:
    rows = []
    for task in study.tasks:
        records = [record for record in study.records if record["task"] == task]
        prompts = len({record["prompt_sha256"] for record in records})
        told = [record for record in records if record["method"] == "ar"] or records
        ended = sum(record["finish_reason"] == "stop" for record in told) / len(told)
        rows.append([task, str(prompts), number(median(r["prompt_tokens"] for r in told), 0),
                     number(median(r["tokens"] for r in told), 0), percent(ended)])  # fmt: skip
    return rows
