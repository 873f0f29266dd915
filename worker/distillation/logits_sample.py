"""Format a few samples of captured logits as text, with the tokenizer in the same directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from protocol.base.errors import DataError
from protocol.datasets.capture_check import TOKENIZER, changed_file_error
from protocol.datasets.capture_index import read_index
from protocol.datasets.logits_file import LogitsFile, Records
from protocol.spec.files.file_digest import file_digest
from protocol.spec.files.run_files import CAPTURE_INDEX
from protocol.spec.manifest import CaptureLayout

TokenText = Callable[[int], str]


def sample_lines(path: Path, samples: int, rows: int, tokens: int) -> Iterator[str]:
    """Yield a summary of a file, then the beginning of its first samples.

    Args:
        path: The file.
        samples: Number of samples.
        rows: Number of rows of each sample.
        tokens: Number of the likeliest tokens of each row.

    Raises:
        DataError: The file does not contain captured logits, is damaged, or does not match the
            index in its directory.
    """
    if path.is_file():
        _check_digest(path)
    file = LogitsFile(path)
    facts, layout = file.facts, file.facts.layout
    selection = "sampled" if layout.drawn else "largest"
    yield (
        f"{path.name}: {sum(file.row_groups)} samples in {len(file.row_groups)} row groups; of each"
        f" token the {layout.top_k} {selection} of {layout.vocabulary} logits, temperature "
        f"{layout.temperature:g}"
    )
    yield f"teacher {facts.teacher}, vocabulary {facts.tokenizer}"
    token_text = _token_formatter(path.parent / TOKENIZER)
    sample_count = 0
    for group in range(len(file.row_groups)):
        for record in file.records(group):
            yield f"sample {record['sample_id']}: {record['rows']} rows"
            for row in range(min(int(record["rows"]), rows)):
                yield f"  {_format_row(record, row, tokens, layout, token_text)}"
            sample_count += 1
            if sample_count == samples:
                file.close()
                return


def _check_digest(path: Path) -> None:
    """Check the file against the capture's index, if its directory has one.

    Raises:
        DataError: The file's digest is not the one in the index, or the file cannot be read.
    """
    if not (path.parent / CAPTURE_INDEX).exists():
        return
    listed_digests = {file.name: file.digest for file in read_index(path.parent).files}
    try:
        digest = file_digest(path)[1]
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    if listed_digests.get(path.name, digest) != digest:
        raise changed_file_error(path.name, str(path.parent))


def _format_row(
    record: Any, row: int, tokens: int, layout: CaptureLayout, token_text: TokenText
) -> str:
    token, next_token = int(record["input_ids"][row]), int(record["input_ids"][row + 1])
    ids = record["topk_ids"][row].astype(np.int64)
    probabilities = _probabilities(record, row)
    likeliest = sorted(set(zip((-probabilities).tolist(), ids.tolist(), strict=True)))[:tokens]
    predictions = ", ".join(f"{token_text(id_)} {-negative:.3f}" for negative, id_ in likeliest)
    tail = "" if layout.drawn else f"; all others {max(0.0, 1 - probabilities.sum()):.3f}"
    note = "" if record["loss_mask"][row] else " (no loss)"
    return (
        f"{row}: {token_text(token)} then {token_text(next_token)}{note}; "
        f"the teacher: {predictions}{tail}"
    )


def _probabilities(record: Records, row: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the probabilities of the captured tokens at temperature 1."""
    logits = record["topk_logits"][row].astype(np.float64)
    probabilities: np.ndarray[Any, np.dtype[np.float64]] = np.exp(
        logits - float(record["lse_1"][row])
    )
    return probabilities


def _token_formatter(tokenizer: Path) -> TokenText:
    """Return a function that formats a token: as text if its tokenizer can be read, else by id."""
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 -- an extra

        decoder = Tokenizer.from_file(str(tokenizer))
    except Exception:  # noqa: BLE001 -- ids are shown if the tokenizer cannot be read
        return lambda token: f"token {token}"
    return lambda token: json.dumps(decoder.decode([token], skip_special_tokens=False))
