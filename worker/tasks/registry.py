"""Build the task of a run spec. Each task's module is imported only when a run needs it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Final

from protocol.base.errors import DataError
from protocol.datasets.data_check import check_samples
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import (
    CausalLmRun,
    ClassifyRun,
    DigitsRun,
    DistilRun,
    DpoRun,
    EmbedRun,
    MaskedLmRun,
    RegressRun,
    RunSpec,
    ScriptedRun,
    Seq2SeqRun,
    TagRun,
    TeacherLogitsRun,
)
from worker.tasks.base.evaluation_modes import with_modes_kept
from worker.tasks.base.task import Task

_METHODS: Final = ("initial_parameters", "batch", "evaluation_batch")
_EXTRAS: Final = {
    "classify": "hf", "causal-lm": "hf", "teacher-logits": "hf", "distil": "hf", "dpo": "hf",
    "embed": "hf",
    "tag": "hf", "seq2seq": "hf", "masked-lm": "hf", "digits": "digits",
}  # fmt: skip
_TASKS: Final[Mapping[type[RunSpec], str]] = {
    ScriptedRun: "worker.tasks.small.scripted:Scripted",
    RegressRun: "worker.tasks.small.regress:Regress",
    DigitsRun: "worker.tasks.small.digits:Digits",
    CausalLmRun: "worker.tasks.language.causal_lm:CausalLM",
    MaskedLmRun: "worker.tasks.language.masked_lm:MaskedLM",
    Seq2SeqRun: "worker.tasks.language.seq2seq:Seq2Seq",
    DpoRun: "worker.tasks.language.dpo:Dpo",
    EmbedRun: "worker.tasks.language.embed:Embed",
    DistilRun: "worker.tasks.language.distil:Distil",
    TeacherLogitsRun: "worker.tasks.language.teacher_logits:TeacherLogits",
    ClassifyRun: "worker.tasks.labels.classify:Classify",
    TagRun: "worker.tasks.labels.tag:Tag",
}
"""The class of each task; its module is imported only when a run needs it."""
_ReadsText: Final = (
    CausalLmRun
    | TeacherLogitsRun
    | DpoRun
    | ClassifyRun
    | TagRun
    | Seq2SeqRun
    | MaskedLmRun
    | EmbedRun
)


def build(spec: RunSpec) -> Task:
    """Build the task: read its data and model, so this may take seconds.

    Raises:
        DataError: Data, model source or an extra that the task needs is not there, or there are
            fewer samples than a microbatch has.
    """
    # Progress bars are not for a log. Read when the libraries are imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    task = _build_user_task(spec) if spec.is_own_task else _build_known(spec)
    check_samples(task.manifest.train_samples, spec)
    return task


def view(spec: RunSpec, samples: int) -> Iterator[str]:
    """Show what a model will read of the data, as lines for a person.

    Args:
        spec: Of a task that reads text.
        samples: How many are shown.

    Raises:
        DataError: The task reads no such data, it cannot be used, or an extra is missing.
    """
    if not isinstance(spec, _ReadsText):
        raise DataError(f"expected a task that reads text, got {spec.task}, whose data is not text")
    try:
        from worker.data.data_view import data_lines  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _without(error, spec) from None
    return data_lines(spec, samples)


def _build_known(spec: RunSpec) -> Task:
    try:
        return _build(spec)
    except ModuleNotFoundError as error:
        raise _without(error, spec) from None


def _without(error: ModuleNotFoundError, spec: RunSpec) -> DataError:
    extra = _EXTRAS.get(spec.task, "worker")
    return DataError(
        f"the task {spec.task!r} needs {error.name!r}; pip install 'samestep[{extra}]'"
    )


def _build(spec: RunSpec) -> Task:
    module, _, name = _TASKS[type(spec)].partition(":")
    task: Task = getattr(importlib.import_module(module), name)(spec)
    return task


def _build_user_task(spec: RunSpec) -> Task:
    """Import a task class that is installed on every worker, and call it with the run spec.

    Whoever may submit a run may have an installed module imported here.

    Raises:
        DataError: It is not installed here, is no task class, or what it builds is no task.
    """
    module_name, _, class_name = spec.task.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DataError(
            f"the task {spec.task!r} cannot be imported on this worker ({error}); "
            "install its package here"
        ) from None
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type) or not all(callable(getattr(kind, m, None)) for m in _METHODS):
        raise DataError(
            f"expected {spec.task!r} to be a class with the methods {', '.join(_METHODS)}"
        )
    task: Task = kind(spec)
    if not isinstance(getattr(task, "manifest", None), Manifest):
        raise DataError(f"expected a Manifest as {spec.task!r}'s attribute manifest")
    trainable = getattr(task, "trainable", None)
    if trainable is None or trainable.blocks != task.manifest.blocks:
        raise DataError(f"expected {spec.task!r} to have a trainable with the manifest's blocks")
    kept = with_modes_kept(trainable)
    if kept is not trainable:
        vars(task)["trainable"] = kept
    return task
