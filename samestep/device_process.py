"""The process of one device of a `fit` with several devices.

It runs the script up to that call, and then computes for the worker.

See `samestep.script_devices`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from protocol.base.errors import DataError, SamestepError, describe_raised
from protocol.cli.output import tolerate_stream_failures
from samestep.script_devices import ScriptStart
from samestep.served_device import ServedDevice, set_served_device


def main() -> None:
    """Run the script; its call of `fit` serves the device and does not return."""
    tolerate_stream_failures("worker")
    arguments = sys.argv[1:]
    backend, device = arguments[4:6]
    requested_device = int(device) if device.isdecimal() else device or None
    served = ServedDevice(ScriptStart.take(), backend, requested_device, arguments)
    set_served_device(served)
    served.end_with_worker()
    served.hold_output()
    served.serve(_run_script(served.start, arguments[3]))


def _run_script(start: ScriptStart, device: str) -> SamestepError:
    """Run the script; return the error if it ends without reaching the call."""
    sys.argv, sys.path[:] = start.arguments, start.search_path
    start.generators.restore()
    try:
        if start.module:
            runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(start.file, run_name="__main__")
    except SamestepError as error:
        return error
    except BaseException as error:  # noqa: BLE001 -- the script may raise any error, or exit
        reason = f"raised {describe_raised(error)}"
    else:
        reason = "ended"
    return DataError(
        f"expected the script {Path(start.file).name!r} to reach call {start.position} of fit in "
        f"the process of {device} too, which runs it from its beginning, but it {reason}: let it "
        "do the same each time it runs, or name one device"
    )


if __name__ == "__main__":
    main()
