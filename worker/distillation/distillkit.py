"""Logits that DistillKit has written, as a capture of ours.

Its rows hold `input_ids`, `bytepacked_indices` (k token numbers, most significant bit first, in as
many bits as the vocabulary needs) and `compressed_logprobs` (k falling log-probabilities: some as
they are, the rest as a polynomial and quantised residuals, maybe as differences), in the layout of
its `DistributionQuantizationConfig`, which is not in the files and has to be given. Row t is about
token t + 1, as here. Log-probabilities are at temperature 1, so a student can have no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import yaml
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.base import limits
from protocol.base.errors import DataError
from protocol.base.regular_file import read_regular
from protocol.data.capture_index import INDEX, SUFFIX, CapturedFile, CaptureIndex
from protocol.data.captured_rows import Records, record_dtype
from protocol.data.logits_file import CaptureFacts, LogitsFile, pyarrow_modules, write_logits
from protocol.data.vocabulary import TOKENIZER, tokens_of_file, vocabulary_digest
from protocol.spec.capture_layout import CaptureLayout
from protocol.spec.file_digest import open_file_digest, open_plain
from protocol.spec.run_spec_text import explain, read_yaml

_COLUMNS: Final = ("input_ids", "compressed_logprobs", "bytepacked_indices")
_WIDTHS: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_SAMPLES: Final = 64
"""Read at once."""

Float = Literal["float16", "bfloat16", "float32", "float64"]
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bin(_Document):
    """Residuals that share a scale."""

    scale_dtype: Float
    element_bits: Annotated[int, Field(ge=1, le=64)]
    num_elements: Annotated[int, Field(ge=1)]


class Compression(_Document):
    """DistillKit's `DistributionQuantizationConfig`."""

    d: Annotated[int, Field(ge=2)]
    k: Annotated[int, Field(ge=1, le=limits.ROW_LOGITS_ELEMENTS)]
    exact_k: Annotated[int, Field(ge=0)]
    exact_dtype: Float = "float32"
    polynomial_terms: tuple[int | Literal["sqrt", "exp"], ...] | None = None
    term_dtype: Float = "float32"
    residual_bins: tuple[Bin, ...] = ()
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Compression:
        if self.exact_k + sum(each.num_elements for each in self.residual_bins) > self.k:
            raise ValueError("expected exact_k and the bins to hold at most k")
        return self

    @property
    def index_bits(self) -> int:
        return int(np.ceil(np.log2(np.float32(self.d))))


def import_distillkit(files: Sequence[Path], config: Path, tokenizer: Path, out: Path) -> Path:
    """Write a capture.

    Args:
        files: DistillKit's, in order.
        config: Its compression, as YAML or JSON.
        tokenizer: The teacher's `tokenizer.json`, or the directory that holds it.
        out: A new directory.

    Raises:
        DataError: Something is not what it should be; nothing is left that looks like a capture.
    """
    compression = read_compression(config)
    tokenizer = tokenizer / TOKENIZER if tokenizer.is_dir() else tokenizer
    tokens = tokens_of_file(tokenizer)
    if tokens is None:
        raise DataError(f"expected the teacher's {TOKENIZER} at {str(tokenizer)!r}, found none")
    if out.exists() and any(out.iterdir()):
        raise DataError(f"expected a new directory at {str(out)!r}, got one with files in it")
    longest = max(_longest(path) for path in files)
    vocabulary = min(compression.d, max(tokens.values()) + 1)
    layout = CaptureLayout(tokens=longest - 1, vocabulary=vocabulary, top_k=compression.k)
    facts = CaptureFacts(
        teacher=_digest_of(files), tokenizer=vocabulary_digest(tokens), layout=layout
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / TOKENIZER).write_bytes(tokenizer.read_bytes())
    listed = tuple(_written(out, facts, _samples(files, compression, layout)))
    (out / INDEX).write_bytes(CaptureIndex(facts=facts, files=listed).to_bytes())
    return out


def read_compression(path: Path) -> Compression:
    """Read DistillKit's configuration.

    Raises:
        DataError: It is none.
    """
    try:
        document = read_yaml(read_regular(path, limits.RUN_SPEC_BYTES).decode("utf-8"))
        if not isinstance(document, dict):
            raise DataError(f"expected DistillKit's d, k and exact_k in {str(path)!r}, found none")
        return Compression.model_validate(document)
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except ValidationError as error:
        reason = explain(Compression, error)
    except (ValueError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
    raise DataError(
        f"expected DistillKit's compression (d, k, exact_k, ...) in {str(path)!r}: {reason}"
    )


def log_probabilities(content: Bytes, how: Compression) -> Floats:
    """Of (rows, bytes) the (rows, k) values."""
    rows, at = len(content), 0

    def take(count: int) -> Bytes:
        nonlocal at
        at += count
        return content[:, at - count : at]

    exact = _floats(take(how.exact_k * _WIDTHS[how.exact_dtype]), how.exact_dtype)
    rest = np.zeros((rows, how.k - how.exact_k))
    if how.polynomial_terms:
        count = len(how.polynomial_terms)
        coefficients = _floats(take(count * _WIDTHS[how.term_dtype]), how.term_dtype)
        rest += coefficients @ _terms(how, rest.shape[1]).T
    first = 0
    for each in how.residual_bins:
        scale = _floats(take(_WIDTHS[each.scale_dtype]), each.scale_dtype)
        packed = take((each.num_elements * each.element_bits + 7) // 8)
        whole = unpacked(packed, each.element_bits, each.num_elements).astype(np.float64)
        low = 2.0 ** (each.element_bits - 1)
        signed = whole * 2 - 1 if each.element_bits == 1 else whole - low
        rest[:, first : first + each.num_elements] += signed * scale
        first += each.num_elements
    joined = np.concatenate([exact, rest], axis=1)
    return np.cumsum(joined, axis=1) if how.delta_encoding else joined


def unpacked(content: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    """Of (rows, bytes) the (rows, count) whole numbers, most significant bit first."""
    flat = np.unpackbits(content, axis=1)[:, : count * bits].reshape(len(content), count, bits)
    return flat.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))


def _floats(content: Bytes, kind: Float) -> Floats:
    raw = np.ascontiguousarray(content)
    if kind == "bfloat16":
        wide = raw.view("<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return raw.view(f"<f{_WIDTHS[kind]}").astype(np.float64)


def _terms(how: Compression, count: int) -> Floats:
    points = np.linspace(0, 1, count) if how.normalize_t else np.arange(count, dtype=np.float64)
    named = {"sqrt": np.sqrt, "exp": np.exp}
    terms = [
        points**term if isinstance(term, int) else named[term](points)
        for term in how.polynomial_terms or ()
    ]
    return np.stack(terms, axis=-1)


def _batches(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Columns of some samples at a time.

    Raises:
        DataError: It is no Parquet, or has another layout.
    """
    pa, pq = pyarrow_modules()
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if not set(_COLUMNS) <= set(names):
            raise DataError(
                f"expected DistillKit's columns {', '.join(_COLUMNS)} in {str(path)!r}, got "
                f"{', '.join(names)[:200]}"
            )
        for batch in file.iter_batches(_SAMPLES, columns=list(columns)):
            yield {name: batch.column(name) for name in columns}
    except FileNotFoundError:
        raise DataError(f"expected Parquet at {str(path)!r}, found no such file") from None
    except (pa.ArrowException, OSError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"expected Parquet in {str(path)!r}, got: {words}") from None


def _longest(path: Path) -> int:
    """Tokens of the longest sample.

    Raises:
        DataError: There is no sample of two tokens.
    """
    counts = [
        int(batch["input_ids"].value_lengths().to_numpy().max(initial=0))
        for batch in _batches(path, ["input_ids"])
    ]
    if max(counts, default=0) < 2:
        raise DataError(f"expected samples of at least two tokens in {str(path)!r}, found none")
    return max(counts)


def _samples(files: Sequence[Path], how: Compression, layout: CaptureLayout) -> Iterator[Records]:
    """Records of some samples at a time."""
    number = 0
    for path in files:
        for batch in _batches(path, _COLUMNS):
            tokens = batch["input_ids"].flatten().to_numpy().astype(np.int64)
            counts = batch["input_ids"].value_lengths().to_numpy()
            records = np.zeros(len(counts), record_dtype(layout))
            records["sample_id"] = number + np.arange(len(counts))
            number += len(counts)
            records["rows"] = np.maximum(counts, 1) - 1
            in_tokens = np.arange(layout.tokens + 1) < counts[:, None]
            records["input_ids"][in_tokens] = tokens
            inside = np.arange(layout.tokens) < records["rows"][:, None]
            records["loss_mask"] = inside
            _fill(records, inside, _rows(path, batch, records, how), layout)
            yield records[records["rows"] > 0]


def _rows(
    path: Path, batch: Mapping[str, Any], records: Records, how: Compression
) -> tuple[NDArray[np.int64], Floats]:
    """Token numbers and log-probabilities of all rows, (rows, k).

    Raises:
        DataError: There are not as many as tokens say, or not of the size that the configuration
            says.
    """
    needed = int(records["rows"].sum())
    found = {}
    for name in _COLUMNS[1:]:
        column = batch[name]
        if (column.value_lengths().to_numpy() != records["rows"]).any():
            raise DataError(f"expected {name} for all tokens but the first in {str(path)!r}")
        flat = column.flatten().flatten().to_numpy().astype(np.uint8)
        found[name] = flat.reshape(needed, -1) if needed else flat.reshape(0, 0)
    bits = how.index_bits * how.k
    packed = found["bytepacked_indices"]
    widths = packed.shape[1], found["compressed_logprobs"].shape[1]
    expected = (bits + 7) // 8, _logits_bytes(how)
    if needed and widths != expected:
        raise DataError(
            f"expected {expected[0]} bytes of numbers and {expected[1]} of log-probabilities a "
            f"token in {str(path)!r}, by the configuration, got {widths[0]} and {widths[1]}"
        )
    ids = unpacked(packed, how.index_bits, how.k)
    return ids, log_probabilities(found["compressed_logprobs"], how)


def _logits_bytes(how: Compression) -> int:
    terms = len(how.polynomial_terms or ()) * _WIDTHS[how.term_dtype]
    bins = sum(
        _WIDTHS[each.scale_dtype] + (each.num_elements * each.element_bits + 7) // 8
        for each in how.residual_bins
    )
    return how.exact_k * _WIDTHS[how.exact_dtype] + terms + bins


def _fill(
    records: Records,
    inside: NDArray[np.bool_],
    rows: tuple[NDArray[np.int64], Floats],
    layout: CaptureLayout,
) -> None:
    ids, logs = rows
    if ids.size and (ids.max() >= layout.vocabulary or not np.isfinite(logs).all()):
        raise DataError(
            f"expected tokens below {layout.vocabulary}, the tokenizer's, and finite "
            f"log-probabilities, got up to token {ids.max()}: see to the configuration and the "
            "tokenizer"
        )
    peak = logs.max(1, initial=-np.inf)
    records["topk_ids"][inside] = ids
    lowest = float(np.finfo(np.float16).min)
    records["topk_logits"][inside] = np.clip(logs - peak[:, None], lowest, 0)
    for name in ("lse_1", "lse_T"):
        records[name][inside] = -peak


def _written(out: Path, facts: CaptureFacts, samples: Iterator[Records]) -> Iterator[CapturedFile]:
    """Files of logits, each of at most so many bytes of rows."""
    each = facts.layout.sample_bytes
    group = max(1, limits.ROW_GROUP_BYTES // each)
    size = group * max(1, limits.LOGITS_FILE_BYTES // (group * each))
    left = np.zeros(0, record_dtype(facts.layout))
    number = 0
    for records in samples:
        left = np.concatenate([left, records])
        while len(left) >= size:
            yield _file(out, number, facts, left[:size], group)
            number, left = number + 1, left[size:]
    if len(left):
        yield _file(out, number, facts, left, group)


def _file(
    out: Path, number: int, facts: CaptureFacts, records: Records, group: int
) -> CapturedFile:
    path = out / f"{number:05}{SUFFIX}"
    write_logits(path, facts, (records[at : at + group] for at in range(0, len(records), group)))
    with open_plain(path) as file:
        size, digest = open_file_digest(file)
    logits = LogitsFile(path)
    groups = logits.row_groups
    logits.close()
    return CapturedFile(name=path.name, size=size, digest=digest, row_groups=groups)


def _digest_of(files: Sequence[Path]) -> str:
    """Of what was imported: DistillKit's files do not say which teacher it was."""
    hasher = blake3()
    for path in files:
        try:
            with open_plain(path) as file:
                hasher.update(open_file_digest(file)[1].encode())
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    return hasher.hexdigest()
