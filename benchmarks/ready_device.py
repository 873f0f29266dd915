"""One device of a multi-device worker whose gradients are ready-made, see `ready_worker`."""

from __future__ import annotations

from benchmarks.ready_worker import ReadyDevice
from worker.device_process import main


def create_device(quiet_ms: str, *_others: object) -> ReadyDevice:
    """Create a device that is idle for `quiet_ms` in each step."""
    del _others
    return ReadyDevice(float(quiet_ms))


if __name__ == "__main__":
    main(create_device)
