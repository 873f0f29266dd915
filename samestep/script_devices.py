"""`samestep.fit` on several devices of a machine: each has a process that runs the script too.

A model is made of objects of the script, which may hold anything, so it cannot be sent to another
process. Instead each device's process runs the script from its beginning. An earlier call of `fit`
returns what that call returned here, from its run's directory. In the call itself the process
computes what this process's worker says, and ends with it: what follows in the script runs once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from protocol.base.errors import UsageError
from samestep.generator_states import AT_IMPORT, GeneratorStates
from samestep.script import Call
from worker.shell.device_processes import DeviceProcesses
from worker.shell.group_engine import DeviceSet

_VARIABLE: Final = "SAMESTEP_SCRIPT_START"
_MODULE: Final = "samestep.device_process"


@dataclass(frozen=True, slots=True)
class ScriptStart:
    """How a device's process runs the script.

    Attributes:
        file: The script's path.
        module: Its name, where it was started with `python -m`; else empty.
        arguments: `sys.argv`.
        search_path: `sys.path`.
        position: Which call of `fit` the devices compute, counted from 1 in this process.
        number: Its number in the run spec; a resumed run has that of its first start.
        directories: The run's directory of each call before it.
        generators: What the global generators begin with.
        digest: Of the script.
        stands_for: Digests of the script of the run, and of the modules beside it, if this one was
            edited since the run began; else none.
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
        """How this process was started, and what it has done before a call.

        Raises:
            UsageError: Another process cannot do the same.
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
        """Make a call the one that the devices compute."""
        call.number = self.number
        if self.stands_for and call.script.digest == self.digest:
            digest, modules = self.stands_for
            call.stands_for = replace(call.script, digest=str(digest), first_modules=modules)

    @staticmethod
    def take() -> ScriptStart:
        """Take it out of the environment: the script's own children have no use for it."""
        document = json.loads(os.environ.pop(_VARIABLE))
        generators = GeneratorStates(**document.pop("generators"))
        return ScriptStart(**document, generators=generators)

    def variables(self) -> dict[str, str]:
        """What `take` reads."""
        return {_VARIABLE: json.dumps(asdict(self))}


def devices_of(call: Call, backend: str, devices: Sequence[int | str]) -> DeviceSet:
    """Return the devices of a call of `fit`, each by number or part of its name.

    Raises:
        UsageError: Several processes cannot share memory here, or cannot run the script.
    """
    by_name: dict[str, int | str | None] = {f"{backend}{device}": device for device in devices}
    variables = ScriptStart.of(call).variables()
    processes = DeviceProcesses(by_name, backend, _discard, module=_MODULE, variables=variables)
    return DeviceSet(list(by_name), processes, _discard)


def _discard(text: str) -> None:
    """Drop a line: the coordinator reports this worker's devices too."""
