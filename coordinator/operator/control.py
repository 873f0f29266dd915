"""The control port: health, status, events and an operator's commands, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.files.blob_index import find_blobs
from coordinator.members.acceptor import CoordinatorAcceptor
from coordinator.members.listening import require_loopback
from coordinator.operator.control_guard import OPEN, Guard, Handler
from coordinator.operator.event_stream import EventStream
from coordinator.operator.metrics import ServiceMetrics
from coordinator.operator.page_server import PageServer
from coordinator.operator.request_limiter import RequestLimiter
from coordinator.operator.status import able_workers, status_document, waited_for_now
from coordinator.run.inputs import ContinueRun, FailRun, HaltRun, SaveState
from coordinator.run.outputs.events import Event
from coordinator.run.run import RunPhase
from coordinator.service.events import event_fields
from coordinator.service.service import Service
from protocol.base import limits
from protocol.base.errors import QueueFull, SamestepError, UsageError
from protocol.spec.run_spec import parse_run_spec

# Invalid HTTP is answered with 400; logging each request would let anyone fill the log.
_SILENT: Final = logging.getLogger("samestep.control")
_LOG: Final = logging.getLogger(__name__)
_SILENT.setLevel(logging.CRITICAL + 1)

Model = TypeVar("Model", bound=BaseModel)


class _Submission(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    run: dict[str, Any]
    overrides: list[str] = []


class _Continuation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    skip_step: bool = False


class _Resumption(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    run_id: str
    from_step: int | None = None
    changes: tuple[str, ...] = ()


class ControlPort:
    """Serves one `Service`; an event sink for the event stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stream = EventStream(first_id=time.time_ns() // 1000)
        self._runner: web.AppRunner | None = None
        self._acceptor: CoordinatorAcceptor | None = None
        self.request_limiter: RequestLimiter
        self._metrics = ServiceMetrics(service)
        self.guard = Guard()
        self.address = ("", 0)

    async def start(self, host: str, port: int) -> None:
        """Start listening.

        Raises:
            UsageError: The address is in use, or open to other machines.
        """
        require_loopback(host, "--control")
        app = web.Application(client_max_size=limits.RUN_SPEC_BYTES, middlewares=[self._guarded])
        PageServer(self._service).add_routes(app.router)
        app.router.add_get("/healthz", self._healthz, allow_head=False)
        app.router.add_get("/readyz", self._readyz, allow_head=False)
        app.router.add_get("/status", self._status, allow_head=False)
        app.router.add_get("/metrics", self._metrics_page, allow_head=False)
        app.router.add_get("/events", self._events, allow_head=False)
        app.router.add_post("/submit", self._submit)
        app.router.add_post("/halt", self._halt)
        app.router.add_post("/continue", self._continue)
        app.router.add_post("/checkpoint", self._checkpoint)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/give-up", self._give_up)
        app.router.add_post("/resume", self._resume)
        self._runner = web.AppRunner(
            app, handle_signals=False, shutdown_timeout=1.0, access_log=None, logger=_SILENT
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self.request_limiter = RequestLimiter(self._runner.server)
        credentials = self._service.credentials
        self.guard.reader_token = lambda: credentials.reader_token
        self._acceptor = CoordinatorAcceptor(self.request_limiter.make_protocol, None)
        await self._acceptor.open("--control", host, port)
        self.address = self._acceptor.address
        self.guard.publish_token(*self.address)

    async def stop(self) -> None:
        """Close the port and every event stream."""
        self._stream.end()
        if self._acceptor is not None:
            self._acceptor.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self.guard.close()

    def emit(self, event: Event, run_id: str = "") -> None:
        """Pass an event on to every reader; see `EventSink`."""
        self._stream.publish(event.name, event_fields(event, run_id))

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self.guard.refusal(request)
        if refusal is not None:
            return refusal
        if request.path not in OPEN:
            self.request_limiter.trust(request.protocol)
        return await _errors_as_json(request, handler)

    async def _healthz(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"ok": True})

    async def _readyz(self, request: web.Request) -> web.Response:
        del request
        service = self._service
        if len(able_workers(service)) >= service.settings.expect_workers:
            return web.json_response({"ready": True})
        answer: dict[str, object] = {"ready": False}
        if service.current is not None:
            answer["waiting_for"] = waited_for_now(service).words
        return web.json_response(answer, status=503)

    async def _status(self, request: web.Request) -> web.Response:
        del request
        return web.json_response(status_document(self._service, time.monotonic()))

    async def _metrics_page(self, request: web.Request) -> web.Response:
        del request
        page = generate_latest(self._metrics.registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Stream events as server-sent events; see `event_stream`."""
        start = self._stream.start_after(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream.follow(start, response.write)
        return response

    async def _submit(self, request: web.Request) -> web.Response:
        if self._service.settings.once:
            return _conflict(
                "this coordinator executes one run and then exits; to submit runs, start one "
                "without --run"
            )
        submission = await _body(request, _Submission)
        # In a thread: YAML of the largest permitted size takes seconds.
        spec = await asyncio.to_thread(
            parse_run_spec, submission.run, submission.overrides, notify=_LOG.warning
        )
        blobs = await find_blobs(spec, self._service.permitted_files)
        run_id = self._service.submit(spec, blobs=blobs)
        return web.json_response({"run_id": run_id})

    async def _halt(self, request: web.Request) -> web.Response:
        del request
        current = self._service.current
        if current is not None and current.run.phase is RunPhase.HALTED:
            return _conflict(f"the run is halted already: {current.run.reason}")
        phases = (RunPhase.TRAINING, RunPhase.EVALUATING)
        if current is None or current.run.phase not in phases:
            return _conflict("no run is in progress")
        current.execute_command(HaltRun("halted by the operator"))
        return web.json_response({"phase": current.run.phase.value})

    async def _continue(self, request: web.Request) -> web.Response:
        continuation = await _body(request, _Continuation)
        current = self._service.current
        if current is None or current.run.phase is not RunPhase.HALTED:
            return _conflict("no run is halted")
        current.execute_command(ContinueRun(continuation.skip_step))
        return web.json_response({"phase": current.run.phase.value})

    async def _checkpoint(self, request: web.Request) -> web.Response:
        """Request a checkpoint and answer at once; `/events` reports when it is done."""
        del request
        current = self._service.current
        if current is None or not current.run.has_state:
            return _conflict("no run has state to save yet")
        current.execute_command(SaveState())
        return web.json_response({"step": current.run.steps_committed})

    async def _drain(self, request: web.Request) -> web.Response:
        del request
        self._service.drain()
        return web.json_response({"draining": True})

    async def _give_up(self, request: web.Request) -> web.Response:
        """End the run in progress; the next one begins, and this one can be resumed."""
        del request
        current = self._service.current
        if current is None or current.outcome is not None:
            return _conflict("no run is in progress")
        run, reason = current.run, "given up by the operator"
        if run.phase is RunPhase.HALTED:
            reason += f", when halted: {run.reason}"
        current.execute_command(FailRun(reason))
        document = {
            "run_id": run.run_id,
            "step": run.steps_committed,
            "directory": str(current.directory),
        }
        return web.json_response({**document, "serving": not self._service.settings.once})

    async def _resume(self, request: web.Request) -> web.Response:
        if self._service.settings.once:
            return _conflict(
                "this coordinator executes one run and then exits; to submit runs, start one "
                "without --run"
            )
        resumption = await _body(request, _Resumption)
        run_id = await self._service.resume_by_name(
            resumption.run_id, resumption.from_step, resumption.changes
        )
        if run_id is None:
            return _conflict(f"run {resumption.run_id!r} has finished; there is nothing to resume")
        return web.json_response({"run_id": run_id})


async def _body(request: web.Request, model: type[Model]) -> Model:
    document = await request.read()
    try:
        return model.model_validate_json(document or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{request.path}: {first['msg']} at {location or 'the document'!r}"
        ) from None


def _conflict(reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=409)


async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SamestepError as error:
        document = {"error": str(error), "exit_code": int(error.exit_code)}
        return web.json_response(document, status=429 if isinstance(error, QueueFull) else 400)
    except web.HTTPException as error:
        return web.json_response({"error": error.reason}, status=error.status)
    except Exception as error:  # noqa: BLE001 -- reported instead of a broken connection
        return web.json_response({"error": f"internal error: {error!r}"}, status=500)
