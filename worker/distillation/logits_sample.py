"""A few samples of captured logits as lines for a person, with the tokenizer that lies beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from protocol.base.errors import DataError
from protocol.datasets.capture_check import TOKENIZER, changed
from protocol.datasets.capture_index import INDEX, read_index
from protocol.datasets.logits_file import LogitsFile, Records
from protocol.spec.files.file_digest import file_digest
from protocol.spec.manifest import CaptureLayout

Speak = Callable[[int], str]


def sample_lines(path: Path, samples: int, rows: int, tokens: int) -> Iterator[str]:
    """What a file holds, and the beginning of its first samples.

    Args:
        path: The file.
        samples: How many.
        rows: Of each.
        tokens: The likeliest so many of each row.

    Raises:
        DataError: It is no file of captured logits, it is damaged, or it is not what the index
            beside it says.
    """
    if path.is_file():
        _check_digest(path)
    file = LogitsFile(path)
    facts, layout = file.facts, file.facts.layout
    which = "drawn" if layout.drawn else "largest"
    yield (
        f"{path.name}: {sum(file.row_groups)} samples in {len(file.row_groups)} row groups; of each"
        f" token the {layout.top_k} {which} of {layout.vocabulary} logits, temperature "
        f"{layout.temperature:g}"
    )
    yield f"teacher {facts.teacher}, vocabulary {facts.tokenizer}"
    speak = _speaker(path.parent / TOKENIZER)
    shown = 0
    for group in range(len(file.row_groups)):
        for record in file.records(group):
            yield f"sample {record['sample_id']}: {record['rows']} rows"
            for row in range(min(int(record["rows"]), rows)):
                yield f"  {_row(record, row, tokens, layout, speak)}"
            shown += 1
            if shown == samples:
                file.close()
                return


def _check_digest(path: Path) -> None:
    """See that it is what the capture has written, where the capture's index lies beside it.

    Raises:
        DataError: It is not, or cannot be read.
    """
    if not (path.parent / INDEX).exists():
        return
    told = {file.name: file.digest for file in read_index(path.parent).files}
    try:
        found = file_digest(path)[1]
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    if told.get(path.name, found) != found:
        raise changed(path.name, str(path.parent))


def _row(record: Any, row: int, tokens: int, layout: CaptureLayout, speak: Speak) -> str:
    read, said = int(record["input_ids"][row]), int(record["input_ids"][row + 1])
    ids = record["topk_ids"][row].astype(np.int64)
    probabilities = _probabilities(record, row)
    best = sorted(set(zip((-probabilities).tolist(), ids.tolist(), strict=True)))[:tokens]
    told = ", ".join(f"{speak(token)} {-minus:.3f}" for minus, token in best)
    rest = "" if layout.drawn else f"; all others {max(0.0, 1 - probabilities.sum()):.3f}"
    ignored = "" if record["loss_mask"][row] else " (not counted)"
    return f"{row}: {speak(read)} then {speak(said)}{ignored}; the teacher: {told}{rest}"


def _probabilities(record: Records, row: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """At temperature 1, of the tokens that are kept."""
    logits = record["topk_logits"][row].astype(np.float64)
    found: np.ndarray[Any, np.dtype[np.float64]] = np.exp(logits - float(record["lse_1"][row]))
    return found


def _speaker(tokenizer: Path) -> Speak:
    """Tokens as text where there is a tokenizer and the library that reads it, else by number."""
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 -- an extra

        known = Tokenizer.from_file(str(tokenizer))
    except Exception:  # noqa: BLE001 -- (whatever is amiss with it, numbers are to be had)
        return lambda token: f"token {token}"
    return lambda token: json.dumps(known.decode([token], skip_special_tokens=False))
