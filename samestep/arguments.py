"""The arguments of `fit`, looked at in one place before anything is built or started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from protocol.base.device_name import parse_devices
from protocol.base.errors import DataError, UsageError
from protocol.base.fields import Bounded
from protocol.spec.run_spec_text import expected_words
from samestep.refusals import check_precision

_WORKERS: Final = "SAMESTEP_EXPECT_WORKERS"
_BACKEND: Final = "SAMESTEP_BACKEND"


def _plain_int(value: Any) -> Any:
    """NumPy's whole numbers are whole numbers; True is none."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _keys_and_values(value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    raise ValueError("expected keys and values")


def _directory(value: Any) -> Any:
    if value is None or isinstance(value, Path) or (isinstance(value, str) and value):
        return value
    raise ValueError("expected a path")


def _device(value: str) -> str:
    named_device(value, "device")
    return value


Count = Annotated[Bounded, Field(ge=1), BeforeValidator(_plain_int)]
Every = Annotated[Bounded, Field(ge=0), BeforeValidator(_plain_int)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_plain_int)]
Epochs = Annotated[float, Field(gt=0.0), BeforeValidator(_plain_int)]
Named = Annotated[str, Field(min_length=1)]
Keys = Annotated[Any, AfterValidator(_keys_and_values)]


class Arguments(BaseModel):
    """Of a call of `fit`: see there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    options: Keys
    steps: Count | None
    epochs: Epochs | None
    batch: Count
    microbatch: Count | None
    optimizer: Any
    seed: Seed
    evaluate_every: Every
    precision: Annotated[Any, AfterValidator(check_precision)]
    workers: Count | None
    device: Annotated[Named, AfterValidator(_device)] | None
    directory: Annotated[Any, AfterValidator(_directory)]
    resume: bool
    control: Named | None
    name: Named | None
    settings: Keys

    @classmethod
    def of(cls, **given: object) -> Self:
        """All of them.

        Raises:
            DataError: One is not what it should be: which, what was expected, and what came.
        """
        try:
            arguments = cls.model_validate(given)
        except ValidationError as error:
            one = error.errors()[0]
            shown = " ".join(repr(one["input"]).split())[:100]
            raise DataError(f"{one['loc'][0]}: {expected_words(one)}, got {shown}") from None
        if (arguments.steps is None) == (arguments.epochs is None):
            raise DataError("expected either steps= or epochs=: how long is to be trained?")
        return arguments

    @property
    def expected_workers(self) -> int:
        """How many a run begins with; $SAMESTEP_EXPECT_WORKERS where the call does not say.

        Raises:
            UsageError: That is no such number.
        """
        said = os.environ.get(_WORKERS)
        if self.workers is not None or not said:
            return 1 if self.workers is None else self.workers
        if said.isascii() and said.isdigit() and int(said) >= 1:
            return int(said)
        raise UsageError(f"{_WORKERS}: expected a whole number of at least 1, got {said!r}")

    @property
    def backend(self) -> tuple[str, int | str | None]:
        """Of this process's worker, and which device of its kind; None for the first.

        Raises:
            UsageError: $SAMESTEP_BACKEND, where the call does not say, names none.
        """
        if self.device is not None:
            return named_device(self.device, "device")
        return named_device(os.environ.get(_BACKEND) or "auto", _BACKEND)

    @property
    def served(self) -> str | None:
        """The control port of a serving coordinator that gets the run."""
        return self.control or os.environ.get("SAMESTEP_CONTROL") or None


def named_device(name: str, where: str) -> tuple[str, int | str | None]:
    """Backend, and which device of its kind; None for the first.

    Args:
        name: As in `--backend`.
        where: Who says so, for an error.

    Raises:
        UsageError: It names none, or several.
    """
    try:
        backend, devices = parse_devices(name, "")
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if len(devices) > 1:
        raise UsageError(f"{where}: expected one device, which is this process's, got {name!r}")
    return backend, devices[0] if devices else None
