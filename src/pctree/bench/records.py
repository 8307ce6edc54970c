"""The records of runs: JSON lines, of the kinds ``environment`` (once a process) and ``record`` (once a decoding).

A record says by itself what was decoded and how, so files of several runs, processes and machines are merged by being read
together. docs/benchmark.md lists the fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pctree.bench.json_lines import read_json_lines
from pctree.errors import UsageError

Record = dict[str, Any]

# Two records that agree in these are of the same decoding.
IDENTITY = (
    "target",
    "drafter",
    "drafter_source",
    "method",
    "top_k",
    "budget",
    "frontier",
    "candidates",
    "temperature",
    "confidence_threshold",
    "dtype",
    "max_new_tokens",
    "task",
    "prompt_sha256",
    "repeat",
)


def identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a decoding from all others."""
    return tuple(record[name] for name in IDENTITY)


def record_files(paths: Iterable[Path | str]) -> list[Path]:
    """The files themselves, and every ``*.jsonl`` in the folders."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return files


def scan(paths: Iterable[Path | str]) -> Iterator[Record]:
    """All lines of all files, one at a time; a torn last line is left out.

    Raises:
        UsageError: a line is damaged, or is none of ours; file and line are named.
    """
    for file in record_files(paths):
        for number, line in read_json_lines(file, growing=True):
            required = {"environment": ("environment",), "record": ("environment", *IDENTITY)}.get(line.get("kind", ""))
            if required is None:
                raise UsageError(f"{file}, line {number} is of kind {line.get('kind')!r}; expected records of pctree bench")
            missing = [name for name in required if name not in line]
            if missing:
                raise UsageError(f"{file}, line {number} lacks {', '.join(missing)}; expected records of pctree bench")
            yield line


def read_records(paths: Iterable[Path | str]) -> tuple[list[Record], dict[str, Record]]:
    """Records of files and folders, and environments by their id. Of records of the same decoding the first wins."""
    records: dict[tuple[Any, ...], Record] = {}
    environments: dict[str, Record] = {}
    for line in scan(paths):
        if line["kind"] == "environment":
            environments.setdefault(line["environment"], line)
        else:
            records.setdefault(identity(line), line)
    return list(records.values()), environments


class RecordFile:
    """A file that grows by whole groups of lines. What a killed process left unfinished at its end is cut off."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        kept, block = 0, 1 << 16
        for start in range((end - 1) // block * block, -1, -block) if end else ():
            self._file.seek(start)
            found = self._file.read(min(block, end - start)).rfind(b"\n")
            if found >= 0:
                kept = start + found + 1
                break
        self._file.truncate(kept)

    def append(self, lines: Iterable[Record]) -> None:
        """Write the lines at once, and return when they are on the disk."""
        self._file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
