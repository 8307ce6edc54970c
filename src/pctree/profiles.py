"""What ``pctree tune`` found for a pair on this machine: the settings to use, and what rounds cost.

A profile is a JSON file in the cache folder, named by what it depends on: the pair, the device, the number format, the threads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pctree.economy import Economy
from pctree.errors import UsageError
from pctree.loading import check_compile, resolve_device, resolve_dtype
from pctree.smollm2 import cache_folder

SETTINGS = ("method", "top_k", "budget", "frontier", "candidates")


@dataclass
class Profile:
    """The fastest settings that were found, and what they were found from.

    Args:
        key: what the profile depends on, see :func:`profile_key`.
        settings: method, top_k, budget, frontier and candidates.
        economy: costs and calibration, for ``budget="auto"``.
        measured: tokens a second by settings, and other figures, for the reader.
        compile: the mode of ``--compile`` that was the fastest.
    """

    key: dict[str, Any]
    settings: dict[str, Any]
    economy: Economy
    measured: dict[str, Any] = field(default_factory=dict)
    compile: str = "auto"

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Raises UsageError where the file is missing or is no profile."""
        try:
            raw = json.loads(path.read_text())
            costs = {int(rows): float(ms) for rows, ms in raw["economy"]["verify_ms"].items()}
            points = [(float(x), float(y)) for x, y in raw["economy"]["calibration"]]
            numbers = raw["economy"]
            committed = [float(tokens) for tokens in numbers["committed"]]
            economy = Economy(costs, float(numbers["round_ms"]), points, committed, float(numbers["layer_ms"]))
            settings = {name: raw["settings"][name] for name in SETTINGS}
            return cls(dict(raw["key"]), settings, economy, dict(raw["measured"]), check_compile(raw.get("compile", "auto")))
        except OSError as error:
            raise UsageError(f"profile {path} cannot be read ({error.strerror}); make one with `pctree tune`") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"profile {path} is damaged; make it again with `pctree tune`") from None


def profile_key(target: str, drafter: str, dtype: str | torch.dtype, device: str, compile: str) -> dict[str, Any]:
    """What the speed of a pair depends on, as far as it can be told."""
    where = resolve_device(device)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    return {
        "target": target,
        "drafter": drafter,
        "device": name,
        "dtype": str(resolve_dtype(dtype)).removeprefix("torch."),
        "threads": torch.get_num_threads() if where.type == "cpu" else None,
        "compile": compile,
    }


def profile_path(key: Mapping[str, Any]) -> Path:
    """Where the profile of a pair on this machine lies."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{digest}.json"


def find_profile(
    profile: str, target: str, drafter: str | None, dtype: str | torch.dtype, device: str, compile: str
) -> Profile | None:
    """The profile to use: ``auto`` is the one of this pair and machine, if there is one; ``off`` is none; else a file."""
    if profile == "off" or drafter is None:
        return None
    if profile != "auto":
        return Profile.load(Path(profile).expanduser())
    path = profile_path(profile_key(target, drafter, dtype, device, compile))
    return Profile.load(path) if path.exists() else None


def settings_from(profile: Profile | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen settings (None: not chosen), laid over the profile's. A profile speaks of its own method only."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if profile is None or given.get("method", profile.settings["method"]) != profile.settings["method"]:
        return given
    return profile.settings | given
