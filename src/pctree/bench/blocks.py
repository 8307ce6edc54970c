"""What a report is made of. Each block can write itself as Markdown and as HTML; ``**bold**`` in a text is bold in both."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Protocol

from pctree.bench.theme import themed


class Block(Protocol):
    def markdown(self) -> str: ...

    def html(self) -> str: ...


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self) -> str:
        return f"<p>{marked_up(self.text)}</p>"


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: list[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{marked_up(item)}</li>" for item in self.items) + "</ul>"


@dataclass(frozen=True)
class Tiles:
    """The numbers that a reader should see first: value, what it is, details."""

    tiles: list[tuple[str, str, str]]

    def markdown(self) -> str:
        return "\n".join(f"- **{value}** {label} ({detail})" for value, label, detail in self.tiles)

    def html(self) -> str:
        made = (
            f'<div class="tile"><div class="value">{marked_up(value)}</div><div>{marked_up(label)}</div>'
            f'<div class="note">{marked_up(detail)}</div></div>'
            for value, label, detail in self.tiles
        )
        return f'<div class="tiles">{"".join(made)}</div>'


@dataclass
class Table:
    """Rows of texts under headings; the first column names the row. In ``prose`` all columns are text, not numbers."""

    headings: list[str]
    rows: list[list[str]] = field(default_factory=list)
    title: str = ""
    note: str = ""
    prose: bool = False

    def markdown(self) -> str:
        rule = ["---"] + ["---" if self.prose else "---:"] * (len(self.headings) - 1)
        lines = [f"**{self.title}**\n"] if self.title else []
        for row in (self.headings, rule, *self.rows):
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |")
        return "\n".join([*lines, *(["", self.note] if self.note else [])])

    def html(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{marked_up(cell)}</{tag}>" for cell in cells) + "</tr>"

        kind = ' class="prose"' if self.prose else ""
        caption = f"<caption>{marked_up(self.title)}</caption>" if self.title else ""
        note = f'<p class="note">{marked_up(self.note)}</p>' if self.note else ""
        body = "".join(row(cells, "td") for cells in self.rows)
        head = row(self.headings, "th")
        return f'<div class="table"><table{kind}>{caption}<thead>{head}</thead><tbody>{body}</tbody></table></div>{note}'


@dataclass(frozen=True)
class Figure:
    """A plot: its name as a file, what it shows in words, and its SVG."""

    name: str
    alt: str
    svg: str

    @property
    def file(self) -> str:
        return f"plots/{self.name}.svg"

    def markdown(self) -> str:
        return f"![{self.alt}]({self.file})"

    def html(self) -> str:
        return f'<figure role="img" aria-label="{escape(self.alt)}">{themed(self.svg)}</figure>'


def marked_up(text: str) -> str:
    """Text as HTML: ``**bold**``, and no line break around an equals sign."""
    parts = escape(text).replace(" = ", "\u00a0=\u00a0").split("**")
    if len(parts) % 2 == 0:  # a lone ** is the text's own
        return "**".join(parts)
    return "".join(f"<b>{part}</b>" if number % 2 else part for number, part in enumerate(parts))
