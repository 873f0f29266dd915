"""A coordinator's service in the test's event loop, with real workers on real sockets.

Nothing here waits for a fixed time: it waits for events of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from backends.base.interface import Backend
from backends.scripted import ScriptedBackend
from coordinator.run.outputs.events import Event
from coordinator.service.events import event_fields
from coordinator.service.service import Service, Settings
from protocol.base.errors import ExitCode
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.cluster import PATIENCE_S
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Client, Target
from worker.shell.engine import BackendFactory
from worker.tasks.base.task import Task
from worker.tasks.registry import build

RETRY_FOR_S = 20.0
"""How long a worker tries to join: less than a test's timeout."""


def scripted_spec(**changes: object) -> RunSpec:
    """Return a short run's spec without a model: 8 microbatches a step, 3 blocks of 16 elements."""
    return parse_run_spec(
        {
            "name": "scripted",
            "task": "scripted",
            "seed": 3,
            "steps": 4,
            "batch": {"samples": 8, "microbatch": 1},
            "scripted": {"blocks": 3, "block_bytes": 64, "samples": 64},
            **changes,
        }
    )


class ScriptedFactory:
    """The backend factory of a worker with a scripted device."""

    def __init__(self, microbatch_ms: float = 0.0) -> None:
        self._backend = ScriptedBackend(microbatch_ms)

    def backend(self) -> Backend:
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        return build(spec)


class LiveService:
    """A service, and the workers that a test adds."""

    def __init__(self, directory: Path, expect_workers: int) -> None:
        settings = Settings(("127.0.0.1", 0), expect_workers, directory, once=False)
        self.service = Service(settings)
        self.service.event_sinks.append(self)
        self.events: list[dict[str, Any]] = []
        self.workers: dict[str, asyncio.Task[ExitCode]] = {}
        self.clients: list[Client] = []
        self.changed = asyncio.Event()

    @property
    def port(self) -> int:
        return self.service.address[1]

    def emit(self, event: Event, run_id: str = "") -> None:
        self.events.append({"event": event.name, **event_fields(event, run_id)})
        self.changed.set()

    def start_worker(
        self,
        name: str,
        client_type: type[Client] = Client,
        backend_factory: BackendFactory | None = None,
        cache: Path | None = None,
    ) -> Client:
        """Start the product's worker, or a class derived from it."""
        target = Target("127.0.0.1", self.port, name, "scripted", RETRY_FOR_S)
        client = client_type(
            target,
            backend_factory or ScriptedFactory(),
            WorkerCredentials(),
            lambda _: None,
            cache=cache,
        )
        self.workers[name] = asyncio.create_task(client.serve())
        self.clients.append(client)
        return client

    def find_event(self, event: str, **fields: object) -> dict[str, Any] | None:
        for candidate in self.events:
            if candidate["event"] == event and fields.items() <= candidate.items():
                return candidate
        return None

    def events_named(self, event: str) -> list[dict[str, Any]]:
        return [document for document in self.events if document["event"] == event]

    async def wait_for(self, event: str, **fields: object) -> dict[str, Any]:
        """Return the first event of this name with these fields; wait if there is none yet."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (event_fields := self.find_event(event, **fields)) is None:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"no {event} {fields} in {self.events}") from None
        return event_fields

    async def result(self, run_id: str) -> dict[str, Any]:
        """Wait for a run to finish; return its result."""
        run_end = await self.wait_for("run_ended", run_id=run_id)
        assert run_end["outcome"] == "finished", run_end
        assert self.service.finished is not None
        return dict(self.service.finished.result)


@contextlib.asynccontextmanager
async def live_service(directory: Path, expect_workers: int) -> AsyncIterator[LiveService]:
    """Run a service within a `with` block; at its end all workers have ended too."""
    live = LiveService(directory, expect_workers)
    await live.service.start()
    try:
        yield live
    finally:
        await live.service.stop()
        for client in live.clients:
            client.drain()  # otherwise it searches for another coordinator
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*live.workers.values(), return_exceptions=True)


async def run_undisturbed(directory: Path, spec: RunSpec) -> dict[str, Any]:
    """Run with one worker and no fault; return the result."""
    async with live_service(directory, 1) as live:
        live.start_worker("w0")
        return await live.result(live.service.submit(spec))
