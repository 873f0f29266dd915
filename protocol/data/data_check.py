"""Looks at a run's data before any worker is asked: mistakes show in seconds, where they were made.

Only the tasks that read text are looked at; a worker checks the same once more, with its tokenizer.
"""

from __future__ import annotations

from protocol.base.errors import DataError
from protocol.data import logits_file
from protocol.data.capture_check import check_capture
from protocol.data.conversations import read_conversations
from protocol.data.labelled_text import read_labelled_text
from protocol.data.preferences import read_preferences
from protocol.data.text_corpus import parts
from protocol.spec.adapter import check_adapter, check_labels
from protocol.spec.run_spec import DataSpec, RunSpec


def check_data(spec: RunSpec) -> None:
    """Read all of it, and keep nothing.

    Raises:
        DataError: It cannot be used, with the place and what to set.
    """
    check_adapter(spec)
    if spec.data is None:
        return
    if spec.task == "classify":
        labelled = read_labelled_text(spec.data)
        check_labels(spec, labelled.names)
        check_samples(trained_on(len(labelled.texts), spec.data), spec)
        if spec.data.validation is not None:
            read_labelled_text(validation_data(spec.data), labelled.names)
    elif spec.task == "dpo":
        check_samples(trained_on(len(read_preferences(spec.data)), spec.data), spec)
        if spec.data.validation is not None:
            read_preferences(validation_data(spec.data))
    elif spec.task == "distil":
        samples = check_capture(spec).samples
        check_samples(trained_on(samples, spec.data), spec)
    if spec.captures:
        logits_file.pyarrow_modules()  # the coordinator writes them
    if spec.task not in {"causal-lm", "teacher-logits"}:
        return
    if spec.data.format != "text":
        samples = len(read_conversations(spec.data))
        check_samples(samples if spec.captures else trained_on(samples, spec.data), spec)
    elif not sum(1 for _ in parts(spec.data)):
        raise DataError(f"expected text in {spec.data.train!r}, found none")
    if spec.data.validation is not None:
        check_validation(spec.data)


def check_validation(data: DataSpec) -> None:
    """Read the file that is measured on.

    Raises:
        DataError: It cannot be used.
    """
    measured = validation_data(data)
    if data.format != "text":
        read_conversations(measured)
    elif not sum(1 for _ in parts(measured)):
        raise DataError(f"expected text in {measured.train!r}, found none")


def validation_data(data: DataSpec) -> DataSpec:
    """The section as it were if the file that is measured on were trained on."""
    assert data.validation is not None
    return data.model_copy(update={"train": data.validation, "validation": None})


def check_samples(train_samples: int, spec: RunSpec) -> None:
    """See that there is a microbatch of training samples.

    Raises:
        DataError: There is not.
    """
    if train_samples < spec.batch.microbatch:
        raise DataError(
            f"expected at least {spec.batch.microbatch} training samples, a microbatch, got "
            f"{train_samples}; give more data, or lower it: --set batch.microbatch={train_samples}"
        )


def trained_on(samples: int, data: DataSpec) -> int:
    """How many samples of the training file are trained on: all, if another is measured on."""
    return samples if data.validation is not None else samples - held_out(samples, data.holdout)


def held_out(samples: int, fraction: float) -> int:
    """How many samples are held out; at least one stays for training."""
    return min(round(samples * fraction), samples - 1)
