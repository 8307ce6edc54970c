"""What several commands share: the consoles, the option texts, a graceful stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pctree.errors import UsageError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

TARGET = typer.Option("smollm2", help="Target model: a folder, a hub name, or smollm2 (the pair that comes with pctree).")
DRAFTER = typer.Option("smollm2", help="Drafter: a folder or hub name (DSpark or DFlash), or smollm2.")
METHOD = typer.Option(
    None, help="ar, dspark, shared-markov, pctree, dflash, ddtree or eagle3. [default: the profile's, or pctree]"
)
TOP_K = typer.Option(None, help="Children per parent, and width of a capped frontier. [default: the profile's, or 4]")
BUDGET = typer.Option(
    None, help="Nodes sent to the target in a round, root included, or auto (after tune). [default: the profile's, or 32]"
)
FRONTIER = typer.Option(
    None, help="capped: the top-k best nodes of a layer grow; exact: all that can matter. [default: the profile's, or capped]"
)
CANDIDATES = typer.Option(
    None, help="Tokens a slot that the Markov head looks at; 0 is the whole vocabulary. [default: the profile's, or 0]"
)
PROFILE = typer.Option("auto", help="auto: what `pctree tune` found for this pair and machine, if it ran; off; or a file.")
DTYPE = typer.Option("auto", help="auto (bfloat16), bfloat16, float16 or float32. Only float32 is exact to the last bit.")
DEVICE = typer.Option("auto", help="auto (CUDA where there is one), cpu, cuda or cuda:N.")
COMPILE = typer.Option(
    "auto",
    help="auto: weights are arranged for speed when they are loaded; off: left as they are; graphs: rounds are also recorded "
    "as CUDA graphs (on a GPU, where starting kernels takes longer than running them).",
)


def progress_bar() -> Progress:
    """A bar with count, time so far and time left, on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
    )


@contextmanager
def graceful_stop() -> Iterator[list[bool]]:
    """Ctrl-C and termination set the yielded flag instead of raising; a second Ctrl-C raises."""
    stopped: list[bool] = []

    def handler(signum: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)
        err.print("Stopping after this step (again to stop at once) …")

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def read_yaml(path: Path | None) -> dict[str, Any]:
    """Settings from a YAML file; none is an empty set."""
    if path is None:
        return {}
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give a YAML file to --config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML ({error})") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UsageError(f"{path} holds a {type(settings).__name__}; expected settings as `name: value` lines")
    return settings


def read_budget(text: str | None) -> int | str | None:
    """``--budget``: a number of nodes, or auto."""
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--budget is {text!r}; it is a number of nodes, or auto") from None


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were set, to lay over a configuration file."""
    return {name: value for name, value in flags.items() if value is not None}
