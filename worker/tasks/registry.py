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
from worker.tasks.base.evaluation_modes import keep_evaluation_modes
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
        DataError: Data, the model source or an extra that the task needs is missing, or there are
            fewer samples than a microbatch has.
    """
    # Progress bars clutter the log. Libraries read this variable when they are imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    task = _build_user_task(spec) if spec.is_user_task else _build_built_in(spec)
    manifest = task.manifest
    check_samples(manifest.train_samples, spec, manifest.notes.get("duplicates_removed", 0))
    return task


def view_data(spec: RunSpec, samples: int) -> Iterator[str]:
    """Yield lines that show samples as the model reads them, and statistics.

    Args:
        spec: A run spec whose task reads text.
        samples: Number of samples to show.

    Raises:
        DataError: The task reads no text, its data cannot be used, or an extra is missing.
    """
    if not isinstance(spec, _ReadsText):
        raise DataError(f"expected a task that reads text, got {spec.task}, whose data is not text")
    try:
        from worker.data.data_view import data_lines  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _missing_extra(error, spec) from None
    return data_lines(spec, samples)


def _build_built_in(spec: RunSpec) -> Task:
    try:
        return _build(spec)
    except ModuleNotFoundError as error:
        raise _missing_extra(error, spec) from None


def _missing_extra(error: ModuleNotFoundError, spec: RunSpec) -> DataError:
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

    Note that anyone who may submit a run can have any installed module imported here.

    Raises:
        DataError: The module is not installed here, the class is not a task class, or it builds
            something other than a task.
    """
    module_name, _, class_name = spec.task.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DataError(
            f"the task {spec.task!r} cannot be imported on this worker ({error}); "
            "install its package here"
        ) from None
    task_class = getattr(module, class_name, None)
    if not isinstance(task_class, type) or not all(
        callable(getattr(task_class, m, None)) for m in _METHODS
    ):
        raise DataError(
            f"expected {spec.task!r} to be a class with the methods {', '.join(_METHODS)}"
        )
    task: Task = task_class(spec)
    if not isinstance(getattr(task, "manifest", None), Manifest):
        raise DataError(f"expected a Manifest as {spec.task!r}'s attribute manifest")
    trainable = getattr(task, "trainable", None)
    if trainable is None or trainable.blocks != task.manifest.blocks:
        raise DataError(f"expected {spec.task!r} to have a trainable with the manifest's blocks")
    with_modes = keep_evaluation_modes(trainable)
    if with_modes is not trainable:
        vars(task)["trainable"] = with_modes
    return task
