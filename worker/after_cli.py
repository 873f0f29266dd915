"""The `worker` commands for what a run has left: merge, export, generate, classify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from protocol.base.errors import DataError, UsageError

_STORAGES: Final[tuple[Literal["f32", "f16", "bf16", "q8_0"], ...]] = ("f32", "f16", "bf16", "q8_0")

Result = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run's directory, an adapter's, or a model's.")
]
Base = Annotated[
    str | None, typer.Option(metavar="DIR", help="The adapter's base model [where it says].")
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new directory.")]


def merge(directory: Result, out: Out, base: Base = None) -> None:
    """Add an adapter to its base model for good, and check that it computes the same."""
    from worker.after.finished import find
    from worker.after.merging import merge as merge_into

    made = merge_into(find(directory), base, out)
    typer.echo(f"model: {made.directory}")
    typer.echo(
        f"logits of {made.tokens} tokens: at most {made.difference:.2g} from those of base and "
        "adapter"
    )
    typer.echo(f"weights: {made.weights_digest}")


def export(
    directory: Result,
    out: Out,
    gguf: Annotated[
        str, typer.Option(metavar="|".join(_STORAGES), help="As GGUF, matrices stored as this.")
    ],
    base: Base = None,
) -> None:
    """Write a language model as GGUF, for llama.cpp; an adapter is added to its base."""
    from worker.after.exporting import export_gguf
    from worker.after.finished import find

    storage = next((each for each in _STORAGES if each == gguf), None)
    if storage is None:
        raise UsageError(f"--gguf: expected one of {', '.join(_STORAGES)}, got {gguf!r}")
    made = export_gguf(find(directory), base, storage, out)
    typer.echo(f"model: {made.file}")
    typer.echo(f"read back: {made.written.tensors} tensors, all as written")
    if made.written.otherwise:
        typer.echo(f"stored as f16, as their rows are no multiple of 32: {made.written.otherwise}")
    if made.written.left_out:
        typer.echo(f"left out: {made.written.left_out} tokens that the model has no row for")


def generate(
    directory: Result,
    prompt: Annotated[str, typer.Argument(help="What the model goes on with, or answers.")],
    temperature: Annotated[
        float, typer.Option(min=0, help="Draw tokens, the flatter the higher; 0: the likeliest.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest with this share together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same draws again.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="No more than these.")] = 256,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")
    ] = None,
    base: Base = None,
) -> None:
    """Have a language model answer, by its chat template where it has one."""
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p: expected a share above 0 and at most 1, got {top_p}")
    if top_p < 1 and temperature == 0:
        raise UsageError("--top-p: expected --temperature above 0 with it: nothing is drawn at 0")
    from worker.after.finished import find
    from worker.after.generating import Sampling, generate, prompt_tokens
    from worker.after.loading import load

    loaded = load(find(directory), base)
    if loaded.trained is not None:
        raise DataError(
            f"expected a language model in {str(directory)!r}, got a classifier; use it: "
            f"worker classify {directory} TEXT"
        )
    told = prompt_tokens(loaded.tokenizer, prompt, system)
    sampling = Sampling(temperature, top_p, seed, max_tokens)
    for piece in generate(loaded.model, loaded.tokenizer, told, sampling):
        typer.echo(piece, nl=False)
    typer.echo()


def classify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A classify run's directory, or its result's.")
    ],
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...|FILE", help="Or one file: .csv, .tsv, .jsonl, or a text a line."
        ),
    ],
    column: Annotated[str, typer.Option(help="Of a table, or key, that holds the text.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON document a line.")] = False,
) -> None:
    """Classify texts with what a run has trained."""
    from backends.registry import choose
    from worker.after.finished import find
    from worker.after.text_rows import is_file, read_texts
    from worker.tasks.prediction import classify as classify_texts

    given = read_texts(Path(texts[0]), column) if is_file(texts) else texts
    place = find(directory).directory if (directory / "run.json").is_file() else directory
    for found in classify_texts(place, given, lambda: choose("cpu").backend):
        if as_json:
            document = {"label": found.label, "probability": found.probability, "text": found.text}
            typer.echo(json.dumps(document, ensure_ascii=False))
        else:
            typer.echo(f"{found.label} {found.probability:.3f}  {found.text}")
