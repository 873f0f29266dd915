"""One device of a multi-device worker like `benchmarks.ready_worker`. Not run by hand."""

from __future__ import annotations

from benchmarks.ready_worker import ReadyDevice
from worker.device_process import main


def ready(quiet_ms: str, *others: object) -> ReadyDevice:
    """A device that is quiet for so long."""
    del others
    return ReadyDevice(float(quiet_ms))


if __name__ == "__main__":
    main(ready)
