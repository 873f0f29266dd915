"""The `worker` commands for results: merge, export, generate, classify, logits show."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from protocol.base.errors import DataError, UsageError

if TYPE_CHECKING:
    from worker.tasks.labels.prediction import Prediction

_STORAGES: Final[tuple[Literal["f32", "f16", "bf16", "q8_0"], ...]] = ("f32", "f16", "bf16", "q8_0")
_DTYPES: Final[tuple[Literal["float32", "bfloat16"], ...]] = ("float32", "bfloat16")

Result = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of a run, an adapter or a model.")
]
Base = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Base model of the adapter [the one that it names]."),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New directory to write to.")]


def merge(
    directory: Result,
    out: Out,
    base: Base = None,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16", help="Type in which the weights are stored.")
    ] = "float32",
) -> None:
    """Merge an adapter into its base model, and check that the result computes the same."""
    from worker.results.merge import merge as merge_into
    from worker.results.saved_model import find

    stored = next((each for each in _DTYPES if each == dtype), None)
    if stored is None:
        raise UsageError(f"--dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    made = merge_into(find(directory), base, out, stored)
    typer.echo(f"model: {made.directory}")
    typer.echo(
        f"{made.compared} of {made.tokens} tokens: at most {made.difference:.2g} from those of "
        "base and adapter"
    )
    typer.echo(f"weights: {made.weights_digest}")


def export(
    directory: Result,
    out: Out,
    gguf: Annotated[
        str, typer.Option(metavar="|".join(_STORAGES), help="Type in which matrices are stored.")
    ],
    base: Base = None,
) -> None:
    """Write a language model as GGUF, for llama.cpp; an adapter is merged into its base."""
    from worker.results.gguf_export import export_gguf
    from worker.results.saved_model import find

    storage = next((each for each in _STORAGES if each == gguf), None)
    if storage is None:
        raise UsageError(f"--gguf: expected one of {', '.join(_STORAGES)}, got {gguf!r}")
    made = export_gguf(find(directory), base, storage, out)
    typer.echo(f"model: {made.file}")
    typer.echo(f"read back: {made.written.tensors} tensors, all as written")
    if made.written.stored_as_f16:
        typer.echo(
            f"stored as f16, as their rows are not a multiple of 32: {made.written.stored_as_f16}"
        )
    if made.written.left_out:
        typer.echo(f"left out: {made.written.left_out} tokens that the model has no row for")
    if made.written.window:
        typer.echo(
            f"context: {made.written.window} tokens, the model's sliding window, which llama.cpp "
            "ignores; on longer texts it would compute another model"
        )


def generate(
    directory: Result,
    prompt: Annotated[str, typer.Argument(help="Text that the model continues or answers.")],
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0: always take the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw only from the likeliest tokens that together have this probability."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Generate at most this many tokens.")
    ] = 256,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")
    ] = None,
    base: Base = None,
) -> None:
    """Generate text with a language model, with its chat template if it has one."""
    if not 0 < top_p <= 1:
        raise UsageError(f"--top-p: expected a share above 0 and at most 1, got {top_p}")
    if top_p < 1 and temperature == 0:
        raise UsageError("--top-p: expected --temperature above 0 with it: nothing is drawn at 0")
    from worker.results.generate import Sampling, generate, prompt_tokens, source_tokens
    from worker.results.load import is_seq2seq, load
    from worker.results.saved_model import find

    saved = find(directory)
    saved.refuse_embeddings()
    loaded = load(saved, base)
    if loaded.trained is not None:
        raise DataError(
            f"expected a language model in {str(directory)!r}, got a classifier; use it: "
            f"worker classify {directory} TEXT"
        )
    if not loaded.model.can_generate():
        raise DataError(
            f"expected a model that writes text in {str(directory)!r}, got one that fills in "
            "masked tokens; load it with transformers' AutoModelForMaskedLM"
        )
    tokens = (
        source_tokens(loaded.tokenizer, prompt, system)
        if is_seq2seq(loaded.model)
        else prompt_tokens(loaded.tokenizer, prompt, system)
    )
    sampling = Sampling(temperature, top_p, seed, max_tokens)
    for piece in generate(loaded.model, loaded.tokenizer, tokens, sampling):
        typer.echo(piece, nl=False)
    typer.echo()


def classify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a classify run, or of its result.")
    ],
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...|FILE", help="Instead of TEXT: a file of rows, or of one text per line."
        ),
    ],
    column: Annotated[str, typer.Option(help="Column or key of the text.")] = "text",
    pair_column: Annotated[
        str | None, typer.Option(help="Column of the second text of a pair.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document per line.")
    ] = False,
) -> None:
    """Classify texts with a trained classifier."""
    from backends.registry import choose
    from worker.results.saved_model import find
    from worker.results.text_rows import is_file, read_texts
    from worker.tasks.labels.prediction import classify as classify_texts

    columns = [column] if pair_column is None else [column, pair_column]
    rows = read_texts(Path(texts[0]), columns) if is_file(texts) else texts
    path = find(directory).directory if (directory / "run.json").is_file() else directory
    for found in classify_texts(path, rows, lambda: choose("cpu").backend):
        if as_json:
            typer.echo(json.dumps(_document(found), ensure_ascii=False))
        elif found.is_tagged:
            pairs = zip(found.text, found.labels, strict=True)
            typer.echo(" ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in pairs))
        elif found.is_value:
            typer.echo(f"{plain_number(found.value)}  {' | '.join(found.text)}")
        else:
            labels = ", ".join(f"{name} {found.scores[name]:.3f}" for name in found.labels)
            typer.echo(f"{labels or '-'}  {' | '.join(found.text)}")


def plain_number(value: float) -> str:
    """Write a number with six digits, and without an exponent where people read none."""
    short = f"{value:.6g}"
    readable = 1e-4 <= abs(value) < 1e12
    return f"{Decimal(short):f}" if readable else short


def _document(found: Prediction) -> dict[str, Any]:
    if found.is_tagged:
        return {"words": list(found.text), "tags": list(found.labels)}
    text = found.text[0] if len(found.text) == 1 else list(found.text)
    if found.is_value:
        return {"value": found.value, "text": text}
    if found.is_single:
        (label,) = found.labels
        return {"label": label, "probability": found.scores[label], "text": text}
    return {"labels": list(found.labels), "probabilities": dict(found.scores), "text": text}


logits = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Read the captured logits of a teacher.",
)


@logits.command()
def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File of captured logits (.parquet).")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to show.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of each sample.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens of each row.")] = 4,
) -> None:
    """Print a readable sample of a file of captured logits."""
    from worker.distillation.logits_sample import sample_lines

    for line in sample_lines(file, samples, rows, tokens):
        typer.echo(line)
