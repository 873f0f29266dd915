"""A user's task that has every method of a task, but cannot be constructed."""

from __future__ import annotations

from protocol.spec.run_spec import RunSpec


class Broken:
    def __init__(self, spec: RunSpec) -> None:
        raise KeyError(f"no luck today with {spec.name}")

    def initial_parameters(self) -> None: ...

    def batch(self, samples: object) -> None: ...

    def evaluation_batch(self, part: int) -> None: ...
