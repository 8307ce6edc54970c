"""``pctree train``: train a drafter for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pctree.cli.common import DEVICE, TARGET, err, given, graceful_stop, progress_bar, read_yaml


def command(
    data: Path = typer.Option(..., help="Training data, as `pctree synth` writes it."),
    output: Path = typer.Option(..., "--output", "-o", help="Folder of the run: settings, log, checkpoint, drafter."),
    config: Path = typer.Option(None, help="A YAML file with settings; flags win over it."),
    target: str = TARGET,
    device: str = DEVICE,
    features: Path = typer.Option(None, help="Where the target's features are kept. [default: DATA.features]"),
    algorithm: str = typer.Option(None, help="dspark, dflash or eagle3, each with DeepSpec's recipe. [default: dspark]"),
    layers: int = typer.Option(None, help="Layers of the drafter. [default: 3; eagle3: 1]"),
    block_size: int = typer.Option(None, help="Tokens drafted at once, B; eagle3: steps that are trained. [default: 7]"),
    markov_rank: int = typer.Option(None, help="Rank of DSpark's Markov head. [default: 64]"),
    markov_head_type: str = typer.Option(None, help="vanilla, gated or rnn. [default: vanilla]"),
    steps: int = typer.Option(None, help="Optimizer steps. [default: 5000]"),
    sequences: int = typer.Option(None, help="Conversations a step. [default: 8]"),
    anchors: int = typer.Option(None, help="Blocks a conversation and step. [default: 10]"),
    learning_rate: float = typer.Option(None, help="Peak learning rate. [default: 0.002]"),
    seed: int = typer.Option(None, help="Seed. [default: 0]"),
    checkpoint_every: int = typer.Option(500, help="Steps between checkpoints."),
    evaluate_every: int = typer.Option(500, help="Steps between evaluations on held-out conversations."),
) -> None:
    """Train a drafter: blocks behind anchors in the answers, against the target's own distributions.

    The target's features are computed once and kept beside the data. Interrupt it at any time: the same command resumes
    from the last step, exactly. The drafter lands in OUTPUT/drafter, in DeepSpec's layout.

    [bold]pctree train --data data.jsonl --output runs/first --steps 2000[/bold]
    """
    from pctree.train.config import TrainConfig, default_layer_ids
    from pctree.train.trainer import Progress, Trainer

    settings = read_yaml(config) | given(
        algorithm=algorithm, layers=layers, block_size=block_size, markov_rank=markov_rank,
        markov_head_type=markov_head_type, steps=steps, sequences=sequences, anchors=anchors,
        learning_rate=learning_rate, seed=seed)  # fmt: skip
    chosen = TrainConfig.from_dict(settings)

    from pctree.loading import load_pair
    from pctree.methods import DraftSettings
    from pctree.targets import TargetModel
    from pctree.train.features import feature_store

    plain = load_pair(target, None, DraftSettings("ar"), dtype="bfloat16", device=device, compile="off").target
    model = TargetModel(plain.model, chosen.target_layer_ids or default_layer_ids(len(plain.layers)))
    with progress_bar() as bar, graceful_stop() as stopped:
        task = bar.add_task("features", total=None, note="")
        store = feature_store(
            model,
            data,
            features or data.with_suffix(".features"),
            max_tokens=chosen.max_tokens,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            should_stop=lambda: bool(stopped),
        )
        bar.remove_task(task)
        trainer = Trainer(model, store, chosen, output)
        task = bar.add_task("steps", total=chosen.steps, completed=trainer.step, note="")
        smooth: dict[str, float] = {}

        def report(progress: Progress) -> None:
            for name in ("loss", "overlap", "match"):
                value = getattr(progress, name)
                smooth[name] = value if name not in smooth else 0.98 * smooth[name] + 0.02 * value
            note = f"loss {smooth['loss']:.3f}  overlap {smooth['overlap']:.3f}  match {smooth['match']:.3f}"
            bar.update(task, completed=progress.step, note=f"{note}  {progress.rows_per_second:.0f} rows/s")

        def evaluated(step: int, result: dict[str, Any]) -> None:
            shares = " ".join(f"{share:.3f}" for share in result["match"])
            bar.console.print(f"step {step}: held-out loss {result['held_out_loss']:.4f}, match by position {shares}")

        complete = trainer.run(
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
            report=report,
            evaluated=evaluated,
            should_stop=lambda: bool(stopped),
        )
    if not complete:
        err.print(f"Saved step {trainer.step} in {output}; run the same command again to go on.")
        raise typer.Exit(130)
    err.print(f"The drafter is in {output / 'drafter'}; try `pctree generate --drafter {output / 'drafter'} --prompt …`.")
