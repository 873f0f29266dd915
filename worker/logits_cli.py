"""The `worker logits` commands: look into captured logits, and take over those of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Captured logits of teachers: look at them, import those of other tools.",
)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of logits (.parquet).")],
    samples: Annotated[int, typer.Option(min=1, help="How many samples.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="How many rows of each.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens of each row.")] = 4,
) -> None:
    """Print a readable sample of a file of captured logits."""
    from worker.distillation.logits_sample import sample_lines

    for line in sample_lines(file, samples, rows, tokens):
        typer.echo(line)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="DistillKit's Parquet.")],
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Its compression, as YAML or JSON: d, k, exact_k.")
    ],
    tokenizer: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the teacher's tokenizer.json lies.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="A new directory, for data.train.")
    ],
) -> None:
    """Make a capture of logits that DistillKit has written, for task distil."""
    from worker.distillation.distillkit import import_distillkit

    typer.echo(f"data.train: {import_distillkit(files, config, tokenizer, out)}")
