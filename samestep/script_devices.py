"""`samestep.fit` on several devices of a machine: each has a process that runs the script too.

A model consists of the script's objects, which cannot be sent to another process. Instead each
device's process runs the script from its beginning. In that process, an earlier call of `fit`
returns the same result as in the user's process, read from the run's directory. In the call in
progress, it computes for the worker of the user's process, and ends with that worker. So the code
after the call runs only in the user's process.

The output of the script in a device's process is buffered until the task is built, and then
dropped, because the user's process prints the same. If a device's process does not reach the call
within a time limit, the call fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.errors import UsageError
from protocol.cli.output import say
from samestep.generator_states import AT_IMPORT, GeneratorStates
from samestep.script import Call
from worker.shell.device_processes import DeviceProcesses
from worker.shell.group_engine import DeviceSet
from worker.shell.script_phase import ScriptLimits

_VARIABLE: Final = "SAMESTEP_SCRIPT_START"
_MODULE: Final = "samestep.device_process"
_MAX_SLOWDOWN: Final = 10
"""How many times longer than this process a device's process may take to reach the call: all of
them load data at the same time."""
_START_TIME_FIELD: Final = 19
"""Index of `starttime` after the command's name in /proc/PID/stat: see proc(5)."""


@dataclass(frozen=True, slots=True)
class ScriptStart:
    """How a device's process runs the script.

    Attributes:
        file: The script's path.
        module: Name of the module if the script was started with `python -m`; else empty.
        arguments: `sys.argv`.
        search_path: `sys.path`.
        position: The call of `fit` that the devices compute, counted from 1 in this process.
        number: The call's number in the run spec; a resumed run has the number of its first start.
        directories: The run's directory of each earlier call, in order.
        generators: The initial states of the global generators.
        digest: Digest of the script.
        stands_for: Digests of the run's script and of the modules beside it, if this script was
            edited since the run began; else empty.
    """

    file: str
    module: str
    arguments: list[str]
    search_path: list[str]
    position: int
    number: int
    directories: list[str]
    generators: GeneratorStates
    digest: str
    stands_for: list[str | None]

    @staticmethod
    def of(call: Call) -> ScriptStart:
        """Describe how this process was started, and its earlier calls of `fit`.

        Raises:
            UsageError: Another process cannot run the script up to this call.
        """
        if call.script.path is None:
            raise UsageError(
                "device: expected a script, which the processes of several devices run too, got a "
                "notebook: write the model to a script, or name one device"
            )
        earlier = range(1, call.position)
        missing = [number for number in earlier if number not in call.directories]
        if missing:
            raise UsageError(
                "device: expected a finished run in a directory of this machine from each earlier "
                "fit of the script, as the processes of several devices read its result, got none "
                f"from call {missing[0]}: move this fit to a script of its own, or name one device"
            )
        first = call.stands_for
        stands_for = [] if first is None else [first.digest, first.first_modules]
        started_as = getattr(sys.modules["__main__"], "__spec__", None)
        name = "" if started_as is None else started_as.name
        return ScriptStart(
            str(call.script.path), "" if name == "__main__" else name, sys.argv, sys.path,
            call.position, call.number, [str(call.directories[number]) for number in earlier],
            AT_IMPORT, call.script.digest, stands_for,
        )  # fmt: skip

    def apply(self, call: Call) -> None:
        """Give the call in this process the number and script of the call that devices compute."""
        call.number = self.number
        if self.stands_for and call.script.digest == self.digest:
            digest, modules = self.stands_for
            call.stands_for = replace(call.script, digest=str(digest), first_modules=modules)

    @staticmethod
    def take() -> ScriptStart:
        """Read the start from the environment, and remove it there, so that the script's child
        processes do not inherit it."""
        document = json.loads(os.environ.pop(_VARIABLE))
        generators = GeneratorStates(**document.pop("generators"))
        return ScriptStart(**document, generators=generators)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `take` reads."""
        return {_VARIABLE: json.dumps(asdict(self))}


def devices_of(call: Call, backend: str, devices: Sequence[int | str]) -> DeviceSet:
    """Return the devices of a call of `fit`, each by number or part of its name.

    Raises:
        UsageError: Several processes cannot share memory here, or cannot run the script.
    """
    by_name: dict[str, int | str | None] = {f"{backend}{device}": device for device in devices}
    variables = ScriptStart.of(call).variables()
    timeout_s = max(limits.SCRIPT_TIMEOUT_S, _MAX_SLOWDOWN * _process_age_s())
    script = ScriptLimits(f"call {call.position} of fit", timeout_s, _show)
    processes = DeviceProcesses(
        by_name, backend, _discard, module=_MODULE, variables=variables, script=script
    )
    return DeviceSet(list(by_name), processes, _discard)


def _process_age_s() -> float:
    """Return the time since this process was started; 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux, where `DeviceProcesses` refuses several devices
        return 0.0
    start_s = int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_s


def _show(text: str) -> None:
    say(text, sys.stderr)


def _discard(text: str) -> None:
    """Drop a line: the coordinator reports this worker's devices too."""
