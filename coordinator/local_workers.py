"""Workers on this machine, started and ended together with a one-run coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Final

from coordinator.members.listening import from_here

_END_TIMEOUT_S: Final = 10.0


class LocalWorkers:
    """Child processes that run `worker` against this coordinator.

    Args:
        address: Where the coordinator listens.
        backend: Of each worker.
        devices: By number or part of their name, dealt out in turn.
        token_file: What they join with: they are told where it is, not what it holds.
        plaintext: Without TLS.
    """

    def __init__(
        self,
        address: tuple[str, int],
        backend: str,
        devices: tuple[int | str, ...],
        token_file: Path,
        *,
        plaintext: bool = False,
    ) -> None:
        self._address = f"{from_here(address[0])}:{address[1]}"
        self._options = ["--plaintext"] if plaintext else []
        self._environment = {**os.environ, "SAMESTEP_TOKEN_FILE": str(token_file)}
        self._environment.pop("SAMESTEP_TOKEN", None)
        self._backend = backend
        self._devices = devices
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, count: int) -> None:
        """Start so many; each imports its task in parallel with the others."""
        for index in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "worker", "--coordinator", self._address,
                "--name", f"local-{index}", "--quiet", "--backend", self._backend,
                "--gpus", str(self._devices[index % len(self._devices)]),
                *self._options, stdin=asyncio.subprocess.DEVNULL, env=self._environment,
            )  # fmt: skip
            self._processes.append(process)

    async def all_ended(self) -> list[int]:
        """Wait until none is left; their exit codes."""
        return [await process.wait() for process in self._processes]

    async def stop(self) -> None:
        """End those that are still there: first asked, then made."""
        running = [p for p in self._processes if p.returncode is None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.all_ended(), _END_TIMEOUT_S)
            return
        for signal_name in ("terminate", "kill"):
            for process in running:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        getattr(process, signal_name)()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.all_ended(), _END_TIMEOUT_S)
                return
