"""The command line: one file a command. Errors are one line; exit code 2 for usage, 1 for failure, 130 for Ctrl-C."""

from __future__ import annotations

import sys

import typer

from pctree.cli import audit, bench, chat, demo, generate, inspect, report, synth, train, tune
from pctree.errors import PCTreeError, UsageError

app = typer.Typer(
    name="pctree",
    help="Speculative decoding with DSpark drafters read as trees: the target's own text, more tokens a second.",
    epilog="Start with [bold]pctree demo[/bold]. Every command explains itself: pctree COMMAND --help.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        from pctree import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    pass


for module in (demo, generate, chat, audit, inspect, tune, bench, report, synth, train):
    app.command(name=module.__name__.rsplit(".", 1)[-1])(module.command)


def main() -> None:
    """Entry point of ``pctree``."""
    try:
        app()
    except UsageError as error:
        fail(error, 2)
    except (PCTreeError, OSError) as error:
        fail(error, 1)
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        sys.exit(130)


def fail(error: Exception, code: int) -> None:
    """Print an error in one line and leave."""
    typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
    sys.exit(code)
