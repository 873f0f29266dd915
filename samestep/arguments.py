"""The arguments of `fit`, validated in one place before anything is built or started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from protocol.base.device_name import parse_devices
from protocol.base.errors import DataError, UsageError
from protocol.base.fields import BoundedInt
from protocol.spec.sections.key_errors import expected_words
from samestep.optimizers import OptimizerArguments
from samestep.schedulers import Interval
from samestep.srun import SrunStep
from worker.scripts.checks import check_precision

EDITED: Final = "edited"
"""Value of `resume` for a script that was edited since the run began."""
_WORKERS_VARIABLE: Final = "SAMESTEP_EXPECT_WORKERS"
_BACKEND_VARIABLE: Final = "SAMESTEP_BACKEND"


def _plain_int(value: Any) -> Any:
    """Accept NumPy's integers as integers, but not True and False."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _check_mapping(value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    raise ValueError("expected keys and values")


def _check_directory(value: Any) -> Any:
    if value is None or isinstance(value, Path) or (isinstance(value, str) and value):
        return value
    raise ValueError("expected a path")


def _check_function(value: Any) -> Any:
    if value is None or callable(value):
        return value
    raise ValueError("expected a function")


def _check_resume(value: Any) -> Any:
    if isinstance(value, bool) or value == EDITED:
        return value
    raise ValueError(f'expected True, False or "{EDITED}"')


def _check_device(value: str) -> str:
    named_devices(value, "device")
    return value


Count = Annotated[BoundedInt, Field(ge=1), BeforeValidator(_plain_int)]
CountOrZero = Annotated[BoundedInt, Field(ge=0), BeforeValidator(_plain_int)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_plain_int)]
Epochs = Annotated[float, Field(gt=0.0), BeforeValidator(_plain_int)]
Name = Annotated[str, Field(min_length=1)]
OptionalMapping = Annotated[Any, AfterValidator(_check_mapping)]


class Arguments(BaseModel):
    """The arguments of one call of `fit`, which documents them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    options: OptionalMapping
    steps: Count | None
    epochs: Epochs | None
    batch: Count
    microbatch: Count | None
    optimizer: Any
    scheduler: Any = None
    scheduler_interval: Interval = "step"
    seed: Seed
    evaluate_every: CountOrZero
    precision: Annotated[Any, AfterValidator(check_precision)]
    workers: Count | None
    device: Annotated[Name, AfterValidator(_check_device)] | None
    directory: Annotated[Any, AfterValidator(_check_directory)]
    resume: Annotated[Any, AfterValidator(_check_resume)]
    control: Name | None
    name: Name | None
    settings: OptionalMapping
    on_log: Annotated[Any, AfterValidator(_check_function)] = None

    @classmethod
    def of(cls, **arguments: object) -> Self:
        """Validate all arguments.

        Raises:
            DataError: An argument is invalid; the message names it and the expected value.
        """
        try:
            validated = cls.model_validate(arguments)
        except ValidationError as error:
            detail = error.errors()[0]
            value_text = " ".join(repr(detail["input"]).split())[:100]
            raise DataError(
                f"{detail['loc'][0]}: {expected_words(detail)}, got {value_text}"
            ) from None
        if (validated.steps is None) == (validated.epochs is None):
            raise DataError("expected either steps= or epochs=, which say how long to train")
        return validated

    @property
    def optimizer_arguments(self) -> OptimizerArguments:
        """The arguments that define the optimizer."""
        extra = (self.settings or {}).get("optimizer")
        return OptimizerArguments(self.optimizer, self.scheduler, self.scheduler_interval, extra)

    @property
    def expected_workers(self) -> int:
        """Number of workers that the run waits for; each device of a worker counts as one.

        Default: $SAMESTEP_EXPECT_WORKERS, else the number of tasks of the srun step, else 1.

        Raises:
            UsageError: The variable is not a whole number of at least 1.
        """
        variable = os.environ.get(_WORKERS_VARIABLE)
        if self.workers is not None:
            return self.workers
        if not variable:
            step = SrunStep.of()
            return 1 if step is None else step.tasks
        if variable.isascii() and variable.isdigit() and int(variable) >= 1:
            return int(variable)
        raise UsageError(
            f"{_WORKERS_VARIABLE}: expected a whole number of at least 1, got {variable!r}"
        )

    @property
    def backend(self) -> tuple[str, int | str | None]:
        """Backend and first device of this process's worker; None: the backend's first device.

        Raises:
            UsageError: `device`, or without it $SAMESTEP_BACKEND, names no device.
        """
        backend, devices = self._named_devices
        device = devices[0] if devices else None
        step = SrunStep.of()
        return (backend, device) if step is None else step.device_of(backend, device)

    @property
    def several_devices(self) -> tuple[int | str, ...]:
        """The devices of this process's worker, if there are several; else empty.

        Raises:
            UsageError: See `backend`; or each task of an srun step would have several devices.
        """
        backend, devices = self._named_devices
        if len(devices) < 2:
            return ()
        if SrunStep.of() is not None:
            raise UsageError(
                f"device: expected one device for each task of an srun step, got {len(devices)} of "
                f"{backend}: start a task for each device (srun --ntasks), and leave device out"
            )
        return devices

    @property
    def _named_devices(self) -> tuple[str, tuple[int | str, ...]]:
        if self.device is not None:
            return named_devices(self.device, "device")
        return named_devices(os.environ.get(_BACKEND_VARIABLE) or "auto", _BACKEND_VARIABLE)

    @property
    def control_address(self) -> str | None:
        """Control port of the coordinator that the run is submitted to; None: start a coordinator
        here."""
        return self.control or os.environ.get("SAMESTEP_CONTROL") or None


def named_devices(name: str, source: str) -> tuple[str, tuple[int | str, ...]]:
    """Parse a device name into a backend and devices; without devices, the backend's first is used.

    Args:
        name: A name as in `--backend`.
        source: The argument or variable that contains the name, for errors.

    Raises:
        UsageError: There is no device of this name.
    """
    try:
        return parse_devices(name, "")
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
