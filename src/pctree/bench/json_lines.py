"""Reading JSON lines, with the file and the line in every complaint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pctree.errors import UsageError


def read_json_lines(file: Path, *, growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers; empty lines are passed over.

    Args:
        growing: a last line without its line end is one that a writer has not finished, or never will: it is left out.

    Raises:
        UsageError: the file cannot be read, or a line is not UTF-8, not JSON, or no object.
    """
    try:
        # In bytes, so that a line ends at \n and nowhere else (text may hold U+2028), and a bad byte has a line number.
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or (growing and not line.endswith(b"\n")):
                    continue
                yield number, _parse(line, f"{file}, line {number}")
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}); give a file of JSON lines") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: byte {error.start + 1} is not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON ({error.msg} at column {error.colno}); expected one object") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} holds a JSON {type(value).__name__}; expected an object")
    return value
