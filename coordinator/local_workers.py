"""Workers on this machine, started and ended together with a one-run coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Final

from coordinator.members.listening import from_here
from protocol.base.address import format_address
from protocol.base.errors import ExitCode, RunFailed
from protocol.command.own_command import own_command, own_environment
from protocol.host.memory import killed_for_memory, killed_more

_END_TIMEOUT_S: Final = 10.0
RESTARTS: Final = 3
"""How often one that was killed is started again: what kills it once more is there to stay."""
_ORDERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Whoever sends these wants the process to end."""
_CANNOT_BEGIN: Final = (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.MISMATCH)


class LocalWorkers:
    """Child processes that run `worker` against this coordinator.

    One that a signal ended is started again: the system's killer of what takes too much memory
    may have meant another. One that ended by itself had its reason. A terminal's Ctrl-C is for the
    coordinator, which lets them finish the step and then go. All hold one end of a pipe, and
    end when the other does: a coordinator that is killed leaves none behind.

    Args:
        address: Where the coordinator listens.
        backend: Of each worker.
        devices: By number or part of their name, dealt out in turn; none: each takes the first.
        token_file: What they join with: they are told where it is, not what it holds.
        tell: Says to a person that one is started again.
        plaintext: Without TLS.
    """

    def __init__(
        self,
        address: tuple[str, int],
        backend: str,
        devices: tuple[int | str, ...],
        token_file: Path,
        tell: Callable[[str], None],
        *,
        plaintext: bool = False,
    ) -> None:
        self._command = [
            *own_command("worker"),
            "--coordinator", format_address(from_here(address[0]), address[1]),
            "--quiet", "--end-with-stdin", "--backend", backend,
            *(["--plaintext"] if plaintext else []),
        ]  # fmt: skip
        self._environment = {**own_environment(), "SAMESTEP_TOKEN_FILE": str(token_file)}
        self._environment.pop("SAMESTEP_TOKEN", None)
        self._devices = devices
        self._tell = tell
        self._processes: dict[str, Process] = {}
        self._kept: list[asyncio.Task[int]] = []
        self._ending = False
        self._killed = killed_for_memory()
        self._watched, self._held = os.pipe()  # open for as long as this process lives

    async def start(self, count: int) -> None:
        """Start so many: one by itself, several as the devices of one host."""
        if not count:
            return
        name = "local-0" if count == 1 else "local"
        devices = ",".join(map(str, self._devices))
        arguments = ["--name", name, *(["--gpus", devices] if devices else [])]
        arguments += ["--processes", str(count)] if count > 1 else []
        await self._begin(name, arguments)
        self._kept.append(asyncio.create_task(self._keep(name, arguments)))

    async def all_ended(self) -> list[int]:
        """Wait until none is left; their exit codes."""
        return list(await asyncio.gather(*map(asyncio.shield, self._kept)))

    @property
    def could_not_begin(self) -> int:
        """The exit code of all, if all ended because what they were given cannot be had, or is not
        what the run was begun with; else 0."""
        codes = {task.result() if task.done() else 0 for task in self._kept}
        return codes.pop() if len(codes) == 1 and codes <= set(_CANNOT_BEGIN) else 0

    async def stop(self) -> None:
        """End those that are still there: first asked, then made. Others may wait for a
        coordinator that goes on with the run; these were its own."""
        self._ending = True
        for end in ("terminate", "kill"):
            for process in self._processes.values():
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        getattr(process, end)()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.all_ended(), _END_TIMEOUT_S)
                return

    async def _begin(self, name: str, arguments: list[str]) -> Process:
        try:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *self._command, *arguments,
                stdin=self._watched, env=self._environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunFailed(
                f"--local-workers: a worker cannot be started with {self._command[0]!r}: "
                f"{error.strerror}; let this user run that, or start workers by themselves"
            ) from None
        return self._processes[name]

    async def _keep(self, name: str, arguments: list[str]) -> int:
        """Wait for the end of a worker, through its restarts; its last exit code."""
        code = await self._processes[name].wait()
        for restart in range(1, RESTARTS + 1):
            if code >= 0 or -code in _ORDERS or self._ending:
                break
            before, self._killed = self._killed, killed_for_memory()
            what = f"local worker {name!r} was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL and killed_more(before, self._killed):
                what = f"local worker {name!r} was killed by the kernel for memory (oom_kill)"
            self._tell(f"{what}; started again, {restart} of at most {RESTARTS} times")
            code = await (await self._begin(name, arguments)).wait()
        return code
