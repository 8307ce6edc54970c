"""Writing a report: Markdown, CSV, and one HTML page that needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from pctree.bench.blocks import Figure, Section
from pctree.bench.csv_files import csv_files
from pctree.bench.records import Record
from pctree.bench.sections import sections
from pctree.bench.study import Environments, Study, studies
from pctree.bench.theme import style
from pctree.errors import UsageError

TITLE = "Speculative decoding, measured"


@dataclass(frozen=True)
class Chapter:
    """The report on one setting."""

    study: Study
    sections: list[Section]


def build(
    records: Sequence[Record], environments: Environments, *, with_paper: bool = False, draw: bool = True
) -> list[Chapter]:
    """A chapter for each setting in the records; ``draw`` needs matplotlib.

    Raises:
        UsageError: there is no record.
    """
    if not records:
        raise UsageError("there is no record in what was given; name the folder or the .jsonl file that pctree bench wrote")
    chapters = []
    for number, study in enumerate(studies(records, environments), 1):
        made = sections(study, with_paper=with_paper, draw=draw)
        chapters.append(Chapter(study, [_numbered(section, number) for section in made] if number > 1 else made))
    return chapters


def _numbered(section: Section, chapter: int) -> Section:
    """The section with figures whose files do not collide with another chapter's."""
    blocks = [replace(b, name=f"{b.name}-{chapter}") if isinstance(b, Figure) else b for b in section.blocks]
    return Section(section.title, blocks)


def write(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Write everything into ``folder``, over what an earlier report left; gives the files, the page first."""
    texts = {"report.html": html(chapters), "report.md": markdown(chapters), **csv_files([c.study for c in chapters])}
    blocks = (block for chapter in chapters for section in chapter.sections for block in section.blocks)
    texts |= {block.file: block.svg for block in blocks if isinstance(block, Figure)}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def markdown(chapters: Sequence[Chapter]) -> str:
    """The report as Markdown; its plots are the files in ``plots/``."""
    parts = [f"# {TITLE}"]
    for chapter in chapters:
        parts.append(f"## {chapter.study.setting}")
        for section in chapter.sections:
            parts += [f"### {section.title}", *(block.markdown() for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def html(chapters: Sequence[Chapter]) -> str:
    """The report as one page: style and plots are inside, and nothing is loaded from elsewhere."""
    body, contents = [f"<h1>{TITLE}</h1>"], []
    for number, chapter in enumerate(chapters, 1):
        name = escape(str(chapter.study.setting))
        body.append(f"<h2>{name}</h2>")
        if len(chapters) > 1:
            contents.append(f"<b>{name}</b>")
        for section in chapter.sections:
            anchor = f"{number}-" + re.sub(r"\W+", "-", section.title.lower()).strip("-")
            contents.append(f'<a href="#{anchor}">{escape(section.title.split(":")[0])}</a>')
            body += [f'<section id="{anchor}">', f"<h3>{escape(section.title)}</h3>"]
            body += [*(block.html() for block in section.blocks), "</section>"]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}</title>\n<style>\n{style()}</style>\n</head>\n<body>\n<nav>{''.join(contents)}</nav>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
