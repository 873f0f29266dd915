"""A task class of the user's own, installed on every worker: `task: "my_package:MyTask"`.

The run spec names it, and whoever may submit a run may so have an installed module imported here;
what is called must be a class with a task's methods.
"""

from __future__ import annotations

import importlib

from protocol.base.errors import DataError
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from worker.tasks.base import Task
from worker.tasks.modes import with_modes_kept

_METHODS = ("initial_parameters", "batch", "evaluation_batch")


def build_own(spec: RunSpec) -> Task:
    """Import the class and call it with the run spec.

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
