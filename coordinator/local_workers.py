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

from coordinator.members.listening import address_from_here
from protocol.base.address import format_address
from protocol.base.errors import ExitCode, RunFailed
from protocol.cli.command_line import child_environment, command_of
from protocol.machine.memory import count_oom_kills, has_new_kills

_END_TIMEOUT_S: Final = 10.0
RESTARTS: Final = 3
"""How often a killed worker is restarted: after that the cause is persistent."""
_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""
_CANNOT_BEGIN: Final = (ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.MISMATCH)


class LocalWorkers:
    """Child processes that run `worker` against this coordinator.

    A worker that a signal killed is restarted, up to `RESTARTS` times: the kernel's OOM killer may
    have chosen it because of another process. A worker that ended by itself, or after a signal that
    asks a process to end, is not restarted. A terminal's Ctrl-C reaches only the coordinator, which
    lets the workers finish a step in progress first. Each worker holds one end of a pipe, and ends
    when the other end closes: a killed coordinator leaves no workers.

    Args:
        address: Address of the coordinator.
        backend: Backend of each worker.
        devices: Devices, by number or part of their name; empty: the worker chooses.
        token_file: The file of the join token, which is passed instead of the token.
        tell: Prints a line about a restart.
        plaintext: Whether to connect without TLS.

    Attributes:
        name: The worker's name, once it has been started.
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
            *command_of("worker"),
            "--coordinator", format_address(address_from_here(address[0]), address[1]),
            "--quiet", "--end-with-stdin", "--backend", backend,
            *(["--plaintext"] if plaintext else []),
        ]  # fmt: skip
        self.name = ""
        self._environment = {**child_environment(), "SAMESTEP_TOKEN_FILE": str(token_file)}
        self._environment.pop("SAMESTEP_TOKEN", None)
        self._devices = devices
        self._tell = tell
        self._processes: dict[str, Process] = {}
        self._supervised: list[asyncio.Task[int]] = []
        self._ending = False
        self._killed = count_oom_kills()
        self._child_end, self._pipe_end = os.pipe()  # open for as long as this process lives

    async def start(self, count: int) -> None:
        """Start local workers: one process for one device, or one worker with several devices."""
        if not count:
            return
        self.name = "local-0" if count == 1 else "local"
        devices = ",".join(map(str, self._devices))
        arguments = ["--name", self.name, *(["--gpus", devices] if devices else [])]
        arguments += ["--processes", str(count)] if count > 1 else []
        await self._begin(self.name, arguments)
        self._supervised.append(asyncio.create_task(self._supervise(self.name, arguments)))

    async def all_ended(self) -> list[int]:
        """Wait until all workers have ended; return their exit codes."""
        return list(await asyncio.gather(*map(asyncio.shield, self._supervised)))

    @property
    def could_not_begin(self) -> int:
        """The common exit code if all workers ended because their inputs are missing or wrong;
        else 0."""
        codes = {task.result() if task.done() else 0 for task in self._supervised}
        return codes.pop() if len(codes) == 1 and codes <= set(_CANNOT_BEGIN) else 0

    async def stop(self) -> None:
        """End the remaining workers: terminate, then kill them."""
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
                stdin=self._child_end, env=self._environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunFailed(
                f"--local-workers: a worker cannot be started with {self._command[0]!r}: "
                f"{error.strerror}; let this user execute it, or start workers yourself"
            ) from None
        return self._processes[name]

    async def _supervise(self, name: str, arguments: list[str]) -> int:
        """Restart a worker that a signal kills; return its last exit code."""
        code = await self._processes[name].wait()
        for restart in range(1, RESTARTS + 1):
            if code >= 0 or -code in _END_SIGNALS or self._ending:
                break
            earlier_kills, self._killed = self._killed, count_oom_kills()
            event_text = f"local worker {name!r} was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL and has_new_kills(earlier_kills, self._killed):
                event_text = f"local worker {name!r} was killed by the kernel for memory (oom_kill)"
            self._tell(f"{event_text}; restarted, {restart} of at most {RESTARTS} times")
            code = await (await self._begin(name, arguments)).wait()
        return code
