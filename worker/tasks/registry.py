"""From a run spec to its task. What a task needs is imported only when it is asked for."""

from __future__ import annotations

from protocol.errors import DataError
from protocol.run_spec import RunSpec
from worker.tasks.base import Task


def build(spec: RunSpec) -> Task:
    """Build the task: read its data and model, so this may take seconds.

    Raises:
        DataError: Data, model source or an extra that the task needs is not there.
    """
    try:
        return _build(spec)
    except ModuleNotFoundError as error:
        extra = {"classify": "hf", "digits": "digits"}.get(spec.task, "worker")
        raise DataError(
            f"the task {spec.task!r} needs {error.name!r}; pip install 'samestep[{extra}]'"
        ) from None


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
    from worker.tasks.classify import Classify  # noqa: PLC0415

    return Classify(spec)
