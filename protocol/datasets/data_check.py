"""Check a run's data before workers read it, so that a user learns of mistakes at once.

Only the data of tasks that read text or captured logits is checked; workers check it again, with
the tokenizer.
"""

from __future__ import annotations

from collections import Counter

from protocol.base.errors import DataError
from protocol.datasets import logits_file
from protocol.datasets.capture_check import check_capture
from protocol.datasets.conversations import read_conversations
from protocol.datasets.embedding_pairs import read_text_groups
from protocol.datasets.labeled_text import read_labeled_text
from protocol.datasets.preferences import read_preferences
from protocol.datasets.rows import BadRows
from protocol.datasets.sequences import read_tagged_words, read_text_pairs
from protocol.datasets.text_corpus import read_parts
from protocol.spec.files.adapter import check_adapter, check_labels
from protocol.spec.run_spec import (
    CausalLmRun,
    ClassifyRun,
    DistilRun,
    DpoRun,
    EmbedRun,
    MaskedLmRun,
    RunSpec,
    Seq2SeqRun,
    TagRun,
    TeacherLogitsRun,
)
from protocol.spec.sections.data import DataSpec


def check_data(spec: RunSpec) -> None:
    """Read and check all data of the run spec.

    Raises:
        DataError: The data cannot be used; the error names the location and what to set.
    """
    check_adapter(spec)
    match spec:
        case ClassifyRun(data=data):
            labeled = read_labeled_text(data)
            check_labels(spec, labeled.names)
            classes = Counter(labeled.labels).values() if data.stratify else [len(labeled.texts)]
            train_samples = sum(count_training_samples(samples, data) for samples in classes)
            check_samples(train_samples, spec, labeled.duplicates)
            if data.validation is not None:
                read_labeled_text(validation_data(data), labeled.names)
        case TagRun(data=data):
            tagged = read_tagged_words(data)
            check_labels(spec, sorted({tag for row in tagged for tag in row.tags}))
            check_samples(count_training_samples(len(tagged), data), spec, tagged.duplicates)
            if data.validation is not None:
                read_tagged_words(validation_data(data))
        case Seq2SeqRun(data=data):
            pairs = read_text_pairs(data)
            check_samples(count_training_samples(len(pairs), data), spec, pairs.duplicates)
            if data.validation is not None:
                read_text_pairs(validation_data(data))
        case DpoRun(data=data):
            preferences = read_preferences(data)
            check_samples(
                count_training_samples(len(preferences), data), spec, preferences.duplicates
            )
            if data.validation is not None:
                read_preferences(validation_data(data))
        case EmbedRun(data=data):
            groups = read_text_groups(data)
            check_samples(count_training_samples(len(groups), data), spec, groups.duplicates)
            if spec.batch.samples == 1 and len(groups[0].passages) == 1:
                raise DataError(
                    "expected at least 2 pairs in a step, or rows with a hard negative, got 1 "
                    "pair, whose passage has no other to compete with; --set batch.samples=32"
                )
            if data.validation is not None:
                read_text_groups(validation_data(data), groups[0])
        case DistilRun():
            check_samples(count_training_samples(check_capture(spec).samples, spec.data), spec)
        case CausalLmRun(data=data) | MaskedLmRun(data=data):
            samples, duplicates = _read_language_data(data)
            if data.format != "text":
                check_samples(count_training_samples(samples, data), spec, duplicates)
            if data.validation is not None:
                _read_language_data(validation_data(data))
        case TeacherLogitsRun(data=data):
            logits_file.pyarrow_modules()  # the coordinator writes files of logits
            samples, duplicates = _read_language_data(data)
            if data.format != "text":
                check_samples(samples, spec, duplicates)


def _read_language_data(data: DataSpec) -> tuple[int, int]:
    """Return the number of conversations and of duplicates, or of parts of running text and 0.

    Raises:
        DataError: The data cannot be used, or is empty.
    """
    if data.format != "text":
        conversations = read_conversations(data)
        return len(conversations), conversations.duplicates
    count = sum(1 for _ in read_parts(data, BadRows(skip=data.skip_bad_rows)))
    if not count:
        raise DataError(
            f"expected text in {data.train!r}, found none; name other data: --set data.train=FILE"
        )
    return count, 0


def validation_data(data: DataSpec) -> DataSpec:
    """Return the section `data` with the evaluation data in place of the training data."""
    assert data.validation is not None
    return data.model_copy(update={"train": data.validation, "validation": None})


def check_samples(train_samples: int, spec: RunSpec, duplicates: int = 0) -> None:
    """Check that the training samples fill a microbatch.

    Args:
        train_samples: Number of training samples, without duplicates.
        spec: The run spec.
        duplicates: Number of removed duplicates, for the error.

    Raises:
        DataError: There are fewer samples.
    """
    if train_samples < spec.batch.microbatch:
        removed = f" (duplicates removed: {duplicates})" if duplicates else ""
        raise DataError(
            f"expected at least {spec.batch.microbatch} training samples (one microbatch), got "
            f"{train_samples}{removed}; add data, or lower the microbatch size: --set "
            f"batch.microbatch={train_samples}"
        )


def count_training_samples(samples: int, data: DataSpec) -> int:
    """Return the number of training samples: all samples if there is validation data."""
    return (
        samples if data.validation is not None else samples - held_out_count(samples, data.holdout)
    )


def held_out_count(samples: int, fraction: float) -> int:
    """Return the number of held-out samples; at least one sample remains for training."""
    return min(round(samples * fraction), samples - 1)
