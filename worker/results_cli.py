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
        str, typer.Option(metavar="float32|bfloat16", help="Storage type of the weights.")
    ] = "float32",
) -> None:
    """Merge an adapter into its base model, and check that the result computes the same."""
    from worker.results.merge import merge as merge_into
    from worker.results.saved_model import find_saved_model

    storage = next((name for name in _DTYPES if name == dtype), None)
    if storage is None:
        raise UsageError(f"--dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    report = merge_into(find_saved_model(directory), base, out, storage)
    typer.echo(f"model: {report.directory}")
    typer.echo(
        f"{report.output_name} of {report.tokens} tokens: at most {report.difference:.2g} from "
        "those of base and adapter"
    )
    typer.echo(f"weights: {report.weights_digest}")


def export(
    directory: Result,
    out: Out,
    gguf: Annotated[
        str, typer.Option(metavar="|".join(_STORAGES), help="Storage type of matrices.")
    ],
    base: Base = None,
) -> None:
    """Write a language model as GGUF, for llama.cpp; an adapter is merged into its base."""
    from worker.results.gguf_export import export_gguf
    from worker.results.saved_model import find_saved_model

    storage = next((name for name in _STORAGES if name == gguf), None)
    if storage is None:
        raise UsageError(f"--gguf: expected one of {', '.join(_STORAGES)}, got {gguf!r}")
    result = export_gguf(find_saved_model(directory), base, storage, out)
    typer.echo(f"model: {result.file}")
    typer.echo(f"read back: {result.summary.tensors} tensors, all as written")
    if result.summary.f16_tensors:
        typer.echo(
            f"stored as f16, as their rows are not a multiple of 32: {result.summary.f16_tensors}"
        )
    if result.summary.tokens_without_row:
        typer.echo(
            f"left out: {result.summary.tokens_without_row} tokens that the model has no row for"
        )
    if result.summary.window:
        typer.echo(
            f"context: {result.summary.window} tokens, the model's sliding window, which llama.cpp "
            "ignores; on longer texts its results would differ"
        )


def generate(
    directory: Result,
    prompt: Annotated[str, typer.Argument(help="Text that the model continues or answers.")],
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Sampling temperature; 0: always choose the likeliest token."),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample only from the likeliest tokens that together have this probability."
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
        raise UsageError(f"--top-p: expected a probability above 0 and at most 1, got {top_p}")
    if top_p < 1 and temperature == 0:
        raise UsageError("--top-p: expected --temperature above 0, got 0, which samples no token")
    from worker.results.generate import Sampling, generate, prompt_tokens, source_tokens
    from worker.results.load import is_seq2seq, load
    from worker.results.saved_model import find_saved_model

    saved_model = find_saved_model(directory)
    saved_model.refuse_embeddings()
    loaded_model = load(saved_model, base)
    if loaded_model.result_info is not None:
        raise DataError(
            f"expected a language model in {str(directory)!r}, got a classifier; run: "
            f"worker classify {directory} TEXT"
        )
    if not loaded_model.model.can_generate():
        raise DataError(
            f"expected a model that generates text in {str(directory)!r}, got one that fills in "
            "masked tokens; load it with transformers' AutoModelForMaskedLM"
        )
    tokens = (
        source_tokens(loaded_model.tokenizer, prompt, system)
        if is_seq2seq(loaded_model.model)
        else prompt_tokens(loaded_model.tokenizer, prompt, system)
    )
    sampling = Sampling(temperature, top_p, seed, max_tokens)
    for text in generate(loaded_model.model, loaded_model.tokenizer, tokens, sampling):
        typer.echo(text, nl=False)
    typer.echo()


def classify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a classify run, or of its result.")
    ],
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...|FILE", help="Texts, or a file of rows or of one text per line."
        ),
    ],
    column: Annotated[
        str | None, typer.Option(help="Column or key of the text.", show_default="text")
    ] = None,
    pair_column: Annotated[
        str | None, typer.Option(help="Column of the second text of a pair.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document per line.")
    ] = False,
) -> None:
    """Classify texts with a trained classifier."""
    from backends.registry import choose
    from worker.results.saved_model import find_saved_model
    from worker.results.text_rows import check_texts, is_file, read_texts
    from worker.tasks.labels.prediction import classify as classify_texts

    columns = [column or "text", *([] if pair_column is None else [pair_column])]
    if is_file(texts):
        rows = read_texts(Path(texts[0]), columns)
    else:
        rows = check_texts(texts, has_columns=column is not None or pair_column is not None)
    path = (
        find_saved_model(directory).directory if (directory / "run.json").is_file() else directory
    )
    for prediction in classify_texts(path, rows, lambda: choose("cpu").backend):
        if as_json:
            typer.echo(json.dumps(_document(prediction), ensure_ascii=False))
        elif prediction.is_tagged:
            pairs = zip(prediction.text, prediction.labels, strict=True)
            typer.echo(" ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in pairs))
        elif prediction.is_value:
            typer.echo(f"{format_value(prediction.value)}  {' | '.join(prediction.text)}")
        else:
            labels = ", ".join(
                f"{name} {prediction.scores[name]:.3f}" for name in prediction.labels
            )
            typer.echo(f"{labels or '-'}  {' | '.join(prediction.text)}")


def format_value(value: float) -> str:
    """Format a number with six digits, without an exponent in a common range."""
    text = f"{value:.6g}"
    has_common_size = 1e-4 <= abs(value) < 1e12
    return f"{Decimal(text):f}" if has_common_size else text


def _document(prediction: Prediction) -> dict[str, Any]:
    if prediction.is_tagged:
        return {"words": list(prediction.text), "tags": list(prediction.labels)}
    text = prediction.text[0] if len(prediction.text) == 1 else list(prediction.text)
    if prediction.is_value:
        return {"value": prediction.value, "text": text}
    if prediction.is_single:
        (label,) = prediction.labels
        return {"label": label, "probability": prediction.scores[label], "text": text}
    return {
        "labels": list(prediction.labels),
        "probabilities": dict(prediction.scores),
        "text": text,
    }


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
