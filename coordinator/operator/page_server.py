"""Serves the page: its files, and the data that only the page requests.

The files contain no data and need no token; all data needs a token, like the rest of the port.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Final

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.audit.report import STYLE, report
from coordinator.members.invitation import invitation
from coordinator.operator.run_history import RunHistory
from coordinator.operator.run_list import RunList
from coordinator.service.service import Service
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base.errors import UsageError
from protocol.spec.run_spec import parse_run_spec_text

_LOG: Final = logging.getLogger(__name__)
_REPORT_STYLE: Final = b64encode(sha256(STYLE.encode()).digest()).decode()
"""The page shows the report, so the page's policy must permit the report's style."""
_POLICY: Final = (
    f"default-src 'none'; connect-src 'self'; style-src 'self' 'sha256-{_REPORT_STYLE}'; "
    "script-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_PATHS: Final = (
    "/", "/page/page.css", "/page/page.js", "/page/uPlot.min.css", "/page/uPlot.min.js",
)  # fmt: skip
"""Paths without a token."""
_HISTORIES: Final = 4


class _Revocation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str


class PageServer:
    """Serves the page of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runs_here = RunList(service.settings.directory, once=service.settings.once)
        self._histories: dict[Path, tuple[RunHistory, asyncio.Lock]] = {}

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the page's paths."""
        for path in PAGE_PATHS:
            router.add_get(path, self._file, allow_head=False)
        router.add_get("/runs", self._runs, allow_head=False)
        router.add_get("/history", self._history, allow_head=False)
        router.add_get("/report", self._report, allow_head=False)
        router.add_get("/join", self._join, allow_head=False)
        router.add_post("/check", self._check)
        router.add_post("/revoke", self._revoke)

    async def _file(self, request: web.Request) -> web.Response:
        name = Path(request.path).name or "index.html"
        text = (resources.files("coordinator.operator") / "page" / name).read_text("utf-8")
        headers = {
            "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
        }  # fmt: skip
        return web.Response(text=text, content_type=_TYPES[Path(name).suffix], headers=headers)

    async def _runs(self, request: web.Request) -> web.Response:
        """List the runs on disk, newest first, and the queued runs."""
        del request
        disk_runs = await asyncio.to_thread(self._runs_here.read)
        queued_ids = [instance.stored.run_id for instance in self._service.queue]
        runs = [
            run.document(changed_s) for run, changed_s in disk_runs if run.run_id not in queued_ids
        ]
        return web.json_response({"runs": runs, "queued": queued_ids})

    async def _directory(self, request: web.Request) -> Path:
        """Return the directory of the requested run; by default, of the current or the last run."""
        run_id = request.query.get("run")
        execution = self._service.current or self._service.finished
        if execution is not None and run_id in {None, execution.run.run_id}:
            return execution.directory
        if run_id is None:
            raise UsageError("expected a run, but there is none yet; submit one")
        for run, _ in await asyncio.to_thread(self._runs_here.read):
            if run.run_id == run_id:
                return run.directory
        raise UsageError(f"expected a run of this coordinator, got {run_id!r}; /runs lists them")

    async def _history(self, request: web.Request) -> web.Response:
        directory = await self._directory(request)
        if directory not in self._histories and len(self._histories) >= _HISTORIES:
            del self._histories[next(iter(self._histories))]
        journal = RunDirectory(directory).journal
        entry = self._histories.setdefault(directory, (RunHistory(journal), asyncio.Lock()))
        history, reading = entry
        async with reading:
            await asyncio.to_thread(history.read)
            return web.json_response(history.document(_number(request.query.get("after", "0"))))

    async def _report(self, request: web.Request) -> web.Response:
        directory = await self._directory(request)
        page = await asyncio.to_thread(report, directory)
        return web.Response(text=page, content_type="text/html")

    async def _join(self, request: web.Request) -> web.Response:
        """Return the lines to paste on a machine that joins."""
        del request
        settings = self._service.settings
        lines = invitation(
            self._service.credentials, self._service.address, name="",
            plaintext=settings.plaintext, to_terminal=True,
        )  # fmt: skip
        return web.json_response({"lines": [*lines]})

    async def _check(self, request: web.Request) -> web.Response:
        """Validate a run spec; return its document for submission."""
        try:
            text = (await request.read()).decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"the run spec is not UTF-8 at byte {error.start}; convert it to UTF-8"
            ) from None
        # In a thread: YAML of the largest permitted size takes seconds.
        spec = await asyncio.to_thread(
            parse_run_spec_text, text, origin="the run spec", notify=_LOG.warning
        )
        document = {"run": spec.model_dump(mode="json"), "steps": spec.known_steps}
        return web.json_response(document)

    async def _revoke(self, request: web.Request) -> web.Response:
        try:
            name = _Revocation.model_validate_json(await request.read()).name
        except ValidationError:
            raise UsageError('expected {"name": NAME OF A WORKER}') from None
        await asyncio.to_thread(self._service.credentials.revoke, name)
        return web.json_response({"revoked": name})


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"expected the number of a step after which to begin, got {text!r}")
    return int(text)
