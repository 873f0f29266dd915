"""From a run spec to its task. What a task needs is imported only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from protocol.base.errors import DataError
from protocol.data.data_check import check_samples
from protocol.spec.idle_keys import TASK_SECTIONS
from protocol.spec.run_spec import RunSpec
from worker.tasks.base import Task

_EXTRAS: Final = {
    "classify": "hf", "causal-lm": "hf", "teacher-logits": "hf", "distil": "hf", "dpo": "hf",
    "digits": "digits",
}  # fmt: skip


def build(spec: RunSpec) -> Task:
    """Build the task: read its data and model, so this may take seconds.

    Raises:
        DataError: Data, model source or an extra that the task needs is not there, or there are
            fewer samples than a microbatch has.
    """
    # Progress bars are not for a log. Read when the libraries are imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    task = _build_own(spec) if spec.task not in TASK_SECTIONS else _build_known(spec)
    check_samples(task.manifest.train_samples, spec)
    return task


def view(spec: RunSpec, samples: int) -> Iterator[str]:
    """What a language model will read of the data, as lines for a person.

    Args:
        spec: Of task causal-lm, teacher-logits or dpo.
        samples: How many are shown.

    Raises:
        DataError: The task reads no such data, it cannot be used, or an extra is missing.
    """
    if spec.task not in ("causal-lm", "teacher-logits", "dpo"):
        raise DataError(
            f"expected a run of task causal-lm, teacher-logits or dpo, got {spec.task}: only what "
            "language models read is shown"
        )
    try:
        from worker.data.data_view import data_lines  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise _without(error, spec) from None
    return data_lines(spec, samples)


def _build_own(spec: RunSpec) -> Task:
    from worker.tasks.own import build_own  # noqa: PLC0415

    return build_own(spec)


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
    if spec.task == "scripted":
        from worker.tasks.scripted import Scripted  # noqa: PLC0415

        return Scripted(spec)
    if spec.task == "regress":
        from worker.tasks.regress import Regress  # noqa: PLC0415

        return Regress(spec)
    if spec.task == "digits":
        from worker.tasks.digits import Digits  # noqa: PLC0415

        return Digits(spec)
    if spec.task == "causal-lm":
        from worker.tasks.causal_lm import CausalLM  # noqa: PLC0415

        return CausalLM(spec)
    if spec.task == "teacher-logits":
        from worker.tasks.teacher_logits import TeacherLogits  # noqa: PLC0415

        return TeacherLogits(spec)
    if spec.task == "distil":
        from worker.tasks.distil import Distil  # noqa: PLC0415

        return Distil(spec)
    if spec.task == "dpo":
        from worker.tasks.dpo import Dpo  # noqa: PLC0415

        return Dpo(spec)
    from worker.tasks.classify import Classify  # noqa: PLC0415

    return Classify(spec)
