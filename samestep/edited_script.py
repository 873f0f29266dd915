"""Messages of `fit` about a run that an edited script resumes."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.spec.cross_check import CrossCheck
from samestep.coordinator_subprocess import Line, show
from samestep.existing_run import ExistingRun
from samestep.result import OnLog
from samestep.script import Call


def report_edit(call: Call, existing_run: ExistingRun, cross_check: CrossCheck) -> bool:
    """Report how an edited script differs.

    Args:
        call: The call that resumes the run.
        existing_run: The run, before it continues.
        cross_check: What the script's task reads and computes now.

    Returns:
        Whether the code or a constant differs, so that `resume="edited"` accepts an edit.
    """
    own_script = f"workers that join need the run's own script, {existing_run.script_file!r}"
    if edit := existing_run.accepted_edit(call.script, cross_check):
        show(Line(f"samestep: {edit}; {own_script}", is_error=True))
    elif call.script.digest != call.run_script.digest:
        show(Line(
            f"the run in {str(existing_run.directory)!r} continues with the edited script, whose "
            f"code is the same; {own_script}"
        ))  # fmt: skip
    return bool(edit)


def with_gradient_report(call: Call, existing_run: ExistingRun, on_log: OnLog | None) -> OnLog:
    """Return an `on_log` that, at the first step, reports if gradients are computed differently.

    A worker's numerics profile covers the gradients at the initial weights. So a profile that no
    earlier step of the run had shows that the edit, or another change, has changed the gradients.

    Args:
        call: The call that resumes the run.
        existing_run: The run, before it continues.
        on_log: The user's function, which the result also calls; None if there is none.
    """
    earlier_profiles = existing_run.numerics_profiles()
    is_first_step = True

    def add_row(row: Mapping[str, float]) -> None:
        nonlocal is_first_step
        if is_first_step and "loss" in row:
            is_first_step = False
            if not existing_run.numerics_profiles() <= earlier_profiles:
                text = _describe_gradient_change(call, existing_run, int(row["step"]))
                show(Line(text, is_error=True))
        if on_log is not None:
            on_log(row)

    return add_row


def _describe_gradient_change(call: Call, existing_run: ExistingRun, step: int) -> str:
    return (
        f"samestep: from step {step} on, the gradients are not computed as before, and the result "
        "is not that of one script: the edit changes what is trained, or this machine, its device "
        "or its packages differ from those of earlier steps; for the result of one script, begin "
        f"in another directory, with this script or after cp {existing_run.script_file} "
        f"{call.script.path}"
    )
