"""What a run measures: its settings, and the matrix of cells that its grids span."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from pctree.bench.tasks import BUILTIN, SEED
from pctree.errors import UsageError
from pctree.loading import check_compile, resolve_dtype
from pctree.methods import FRONTIERS, METHODS, DraftSettings

PRESETS = Path(__file__).parent / "presets"
DEFAULT_METHODS = ("dspark", "shared-markov", "pctree")


def _check(name: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise UsageError(f"{name} is {value!r}; it must be {expected}")


def _is_int(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Cell:
    """One way to decode: a method with one drafter. Fields that mean nothing to the method are None (or 0), so that equal
    cells are equal. A chain is as long as its drafter's block: ``budget`` is None until the drafter is known.
    """

    method: str
    drafter: str | None
    top_k: int | None
    budget: int | str | None
    frontier: str | None
    candidates: int
    temperature: float
    confidence_threshold: float

    def settings(self) -> DraftSettings:
        """How the decoder is told."""
        return DraftSettings(
            self.method,
            self.top_k or 1,
            self.budget or 1,
            self.frontier or "capped",
            self.candidates,
            confidence_threshold=self.confidence_threshold,
        )

    @property
    def is_chain(self) -> bool:
        """Whether it drafts one path and no tree."""
        return self.method != "ar" and self.top_k == 1 and self.frontier is None

    @property
    def label(self) -> str:
        """A short name for a table."""
        parts = [self.method, self.drafter]
        if self.method == "eagle3" and self.is_chain:
            parts.append("chain")
        if self.frontier == "exact":
            parts.append("exact")
        elif self.frontier is not None:
            parts.append(f"k={self.top_k}")
        if self.budget is not None and not self.is_chain:
            parts.append(f"N={self.budget}")
        if self.candidates:
            parts.append(f"C={self.candidates}")
        if self.temperature:
            parts.append(f"T={self.temperature:g}")
        if self.confidence_threshold:
            parts.append(f"c≥{self.confidence_threshold:g}")
        return " ".join(part for part in parts if part)


def cell(
    method: str,
    drafter: str | None = None,
    top_k: int = 4,
    budget: int | str = 32,
    frontier: str = "capped",
    candidates: int = 0,
    temperature: float = 0.0,
    confidence_threshold: float = 0.0,
) -> Cell:
    """A cell without the fields that mean nothing to its method.

    Raises:
        UsageError: a value is out of range, or a drafter is missing.
    """
    _check("method", method, isinstance(method, str) and method in METHODS, f"one of {', '.join(METHODS)}")
    _check("drafter", drafter, drafter is None or isinstance(drafter, str), "the name of one of the drafters")
    _check("top_k", top_k, _is_int(top_k, 1), "a whole number of at least 1")
    _check("budget", budget, budget == "auto" or _is_int(budget, 1), "a whole number of at least 1, or auto")
    _check("candidates", candidates, _is_int(candidates, 0), "a whole number, 0 for the whole vocabulary")
    _check("frontier", frontier, frontier in FRONTIERS, " or ".join(FRONTIERS))
    _check("temperature", temperature, _is_number(temperature) and 0 <= temperature < math.inf, "0 (greedy) or above")
    _check("confidence_threshold", confidence_threshold,
           _is_number(confidence_threshold) and 0 <= confidence_threshold < 1, "at least 0 (off) and below 1")  # fmt: skip
    temperature = float(temperature)
    if method == "ar":
        return Cell("ar", None, None, None, None, 0, temperature, 0.0)
    if drafter is None:
        raise UsageError(f"a cell of method {method} names no drafter; only ar needs none")
    listed = candidates if METHODS[method].needs_head else 0
    if METHODS[method].chain:
        return Cell(method, drafter, 1, None, None, listed, temperature, float(confidence_threshold))
    if METHODS[method].autoregressive and top_k == 1 and frontier == "capped":
        return Cell(method, drafter, 1, None, None, 0, temperature, 0.0)
    if METHODS[method].always_exact:
        return Cell(method, drafter, None, budget, None, 0, temperature, 0.0)
    # The exact frontier is as wide as the budget, whatever top_k says.
    return Cell(method, drafter, top_k if frontier == "capped" else None, budget, frontier, listed, temperature, 0.0)


@dataclass(frozen=True)
class BenchConfig:
    """The settings of a run, as in its YAML file; docs/benchmark.md explains each."""

    target: str = "smollm2"
    drafters: Mapping[str, str | None] = field(default_factory=lambda: {"smollm2": "smollm2"})
    tasks: Sequence[str] = (BUILTIN,)
    prompts: str | None = None
    per_task: int | None = None
    max_new_tokens: int = 128
    repeats: int = 1
    seed: int = SEED
    dtype: str = "bfloat16"
    device: str = "auto"
    compile: str = "auto"
    profile: str = "auto"
    cells: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> BenchConfig:
        """Settings by name, checked.

        Raises:
            UsageError: a name is unknown, or a value is of the wrong kind or out of range.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(map(str, settings.keys() - set(names)))
        if unknown:
            raise UsageError(f"unknown setting {', '.join(unknown)}; the settings are {', '.join(names)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, expected: str) -> None:
            _check(name, getattr(self, name), valid, expected)

        check("target", isinstance(self.target, str), "a folder, a hub name, or smollm2")
        check("drafters", isinstance(self.drafters, Mapping) and all(
              isinstance(name, str) and (source is None or isinstance(source, str)) for name, source in self.drafters.items()),
              "names with a folder, hub name or shipped name each, like {b7: smollm2}")  # fmt: skip
        check("tasks", isinstance(self.tasks, (list, tuple)) and len(self.tasks) > 0
              and all(isinstance(task, str) for task in self.tasks), "a list of names or paths of .jsonl files")  # fmt: skip
        check("prompts", self.prompts is None or isinstance(self.prompts, str), "a folder of NAME.jsonl files")
        check("per_task", self.per_task is None or _is_int(self.per_task, 1), "a whole number of at least 1, or null")
        for name in ("max_new_tokens", "repeats"):
            check(name, _is_int(getattr(self, name), 1), "a whole number of at least 1")
        check("seed", _is_int(self.seed, 0), "a whole number of at least 0")
        check("device", isinstance(self.device, str), "auto, cpu, cuda or cuda:N")
        check("profile", isinstance(self.profile, str), "auto, off, or a file that pctree tune wrote")
        check("cells", self.cells is None or (isinstance(self.cells, (list, tuple))
              and all(isinstance(grid, Mapping) for grid in self.cells)),
              "a list of grids like {drafter: b7, method: pctree, top_k: [1, 2]}")  # fmt: skip
        check_compile(self.compile)
        # Records name it, so that it is the same name however it was given.
        object.__setattr__(self, "dtype", str(resolve_dtype(self.dtype)).removeprefix("torch."))

    def matrix(self) -> list[Cell]:
        """All cells, each once, in the order of the file; plain decoding at every temperature in use, which speedups need,
        comes first where it is not named. Cells of a drafter whose source is null are left out.

        Raises:
            UsageError: a grid cannot be used.
        """
        grids = self.cells
        if grids is None:
            grids = [{"drafter": list(self.drafters), "method": list(DEFAULT_METHODS)}]
        cells = list(dict.fromkeys(found for grid in grids for found in self._expand(grid)))
        if not cells:
            raise UsageError("no cell is left to measure; name at least one method, and a source for its drafter")
        plain = dict.fromkeys(cell("ar", temperature=temperature) for temperature in sorted({c.temperature for c in cells}))
        return [*(absent for absent in plain if absent not in cells), *cells]

    def _expand(self, grid: Mapping[str, Any]) -> list[Cell]:
        names = [f.name for f in fields(Cell)]
        unknown = sorted(map(str, grid.keys() - set(names)))
        if unknown:
            raise UsageError(f"unknown field {', '.join(unknown)} of a cell; the fields are {', '.join(names)}")
        if "method" not in grid:
            raise UsageError(f"the cell {dict(grid)} names no method; the methods are {', '.join(METHODS)}")
        axes = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in grid.items()}
        cells = [cell(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
        for name in {found.drafter for found in cells} - {None, *self.drafters}:
            raise UsageError(f"a cell names drafter {name!r}, but the drafters are {', '.join(self.drafters) or 'none'}")
        return [found for found in cells if found.drafter is None or self.drafters[found.drafter] is not None]


def preset_file(name: str) -> Path:
    """The YAML file of a preset.

    Raises:
        UsageError: there is none of that name.
    """
    names = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if name not in names:
        raise UsageError(f"preset is {name!r}; the presets are {', '.join(names)}")
    return PRESETS / f"{name}.yaml"
