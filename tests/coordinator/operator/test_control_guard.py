"""Every route of the control port with every method, with and without a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.operator.control import ControlPort
from coordinator.operator.control_client import control_token, request
from coordinator.operator.page_server import PAGE_PATHS
from coordinator.service.events import Draining
from protocol.base import limits
from protocol.base.errors import ExitCode, NotAuthorized
from protocol.machine.secret_file import control_token_file, state_home, write_secret
from tests.commands import run_command
from tests.event_loop import on_uvloop
from tests.live_service import live_service

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
ROUTES = {
    "/": "GET", "/healthz": "GET", "/readyz": "GET", "/status": "GET", "/metrics": "GET",
    "/events": "GET", "/submit": "POST", "/halt": "POST", "/continue": "POST",
    "/checkpoint": "POST", "/drain": "POST", "/give-up": "POST", "/resume": "POST", "/runs": "GET",
    "/history": "GET", "/report": "GET", "/join": "GET", "/check": "POST", "/revoke": "POST",
    **dict.fromkeys(PAGE_PATHS, "GET"),
}  # fmt: skip
PUBLIC_ROUTES = {"/healthz", *PAGE_PATHS}
ANSWERS = {
    "/readyz": 503, "/submit": 400, "/halt": 409, "/continue": 409, "/checkpoint": 409,
    "/history": 400, "/report": 400, "/check": 400, "/revoke": 400,
    "/give-up": 409, "/resume": 400,
}  # fmt: skip
"""Status of each route without any run; all others: 200."""


@asynccontextmanager
async def port(directory: Path) -> AsyncIterator[ControlPort]:
    async with live_service(directory, 1) as live:
        control = ControlPort(live.service)
        await control.start("127.0.0.1", 0)
        try:
            yield control
        finally:
            await control.stop()


async def ask(control: ControlPort, method: str, path: str, **headers: str) -> int:
    """Return the status without reading the body, which may be endless."""
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{control.address[1]}{path}"
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url, headers=request_headers) as answer,
    ):
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Set-Cookie" not in answer.headers
        return answer.status


def token_header(control: ControlPort) -> dict[str, str]:
    return {"Authorization": f"Bearer {control.guard.token}"}


async def routes_of(control: ControlPort) -> dict[str, str]:
    assert control._runner is not None
    app: Any = control._runner.app
    return {route.resource.canonical: route.method for route in app.router.routes()}


@on_uvloop
async def test_route_table_is_complete(tmp_path):
    async with port(tmp_path) as control:
        assert await routes_of(control) == ROUTES


@pytest.mark.parametrize("path", [*ROUTES, "/nothing"])
@on_uvloop
async def test_request_without_a_token_is_refused(tmp_path, path):
    async with port(tmp_path) as control:
        for method in METHODS:
            if method not in ("GET", "POST"):
                expected = 405
            elif path in PUBLIC_ROUTES:
                expected = 200 if method == "GET" else 405
            else:
                expected = 401
            assert (method, await ask(control, method, path)) == (method, expected)
        assert not control._service._is_draining


@pytest.mark.parametrize("path", [*ROUTES, "/nothing"])
@on_uvloop
async def test_control_token_opens_every_route(tmp_path, path):
    async with port(tmp_path) as control:
        for method in METHODS:
            if method not in ("GET", "POST"):
                expected = 405
            elif path not in ROUTES:
                expected = 404
            else:
                expected = ANSWERS.get(path, 200) if method == ROUTES[path] else 405
            outcome = await ask(control, method, path, **token_header(control))
            assert (method, outcome) == (method, expected)


READ_ONLY_ROUTES = {"/readyz", "/status", "/metrics", "/events", "/runs", "/history", "/report"}


@pytest.mark.parametrize("path", [*ROUTES, "/nothing"])
@on_uvloop
async def test_reader_token_opens_read_only_routes(tmp_path, path):
    async with port(tmp_path) as control:
        reader = {"Authorization": f"Bearer {CoordinatorCredentials.open().reader_token}"}
        for method in METHODS:
            if method not in ("GET", "POST"):
                expected = 405
            elif path in PUBLIC_ROUTES:
                expected = 200 if method == "GET" else 405
            elif path in READ_ONLY_ROUTES and method == "GET":
                expected = ANSWERS.get(path, 200)
            else:
                expected = 403
            assert (method, await ask(control, method, path, **reader)) == (method, expected)
        assert not control._service._is_draining


@on_uvloop
async def test_reader_token_stays_until_it_is_replaced(tmp_path):
    credentials = CoordinatorCredentials.open()
    first = run_command("coordinator", "token", "reader").stdout.strip()
    assert first == credentials.reader_token
    async with port(tmp_path / "a") as control:
        metrics_route = ("GET", "/metrics")
        assert await ask(control, *metrics_route, Authorization=f"Bearer {first}") == 200
        assert control.guard.token != first
    async with port(tmp_path / "b") as control:
        assert await ask(control, *metrics_route, Authorization=f"Bearer {first}") == 200
        completed = await asyncio.to_thread(run_command, "coordinator", "token", "reader", "--new")
        control._service._check_secrets()
        second = completed.stdout.strip()
        assert await ask(control, *metrics_route, Authorization=f"Bearer {first}") == 401
        assert await ask(control, *metrics_route, Authorization=f"Bearer {second}") == 200
        path = credentials.token_file.with_name("reader.token")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for text in ("", "\n", "x"):
            path.write_text(text)
            control._service._check_secrets()
            assert await ask(control, *metrics_route, Authorization="Bearer") == 401
            assert await ask(control, *metrics_route, Authorization=f"Bearer {second}") == 200


@on_uvloop
async def test_deleted_control_token_is_written_again(tmp_path):
    async with port(tmp_path) as control:
        path = control.guard._file
        assert path is not None
        path.unlink()
        control.guard.restore_file()
        assert path.read_text() == control.guard.token + "\n"


@pytest.mark.parametrize("method", ["BREW", "CONNECT"])
@on_uvloop
async def test_unknown_method_is_an_invalid_request(tmp_path, method):
    async with port(tmp_path) as control:
        assert await ask(control, method, "/status", **token_header(control)) in (400, 405)


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in PUBLIC_ROUTES])
@on_uvloop
async def test_wrong_token_opens_nothing(tmp_path, path):
    async with port(tmp_path) as control:
        token, method = control.guard.token, ROUTES[path]
        join = CoordinatorCredentials.open().join_token().reveal()
        for wrong_token in (
            "", "Bearer", "Bearer ", f"Bearer {token[:-1]}", f"Bearer {token}x", f"Basic {token}",
            token, f"Bearer {join}", f"Bearer {join.partition('.')[2]}", "Bearer \u00e9",
        ):  # fmt: skip
            assert await ask(control, method, path, Authorization=wrong_token) == 401
            assert await ask(control, method, f"{path}?token={token}") == 401


@on_uvloop
async def test_binary_token_opens_nothing(tmp_path):
    async with port(tmp_path) as control:
        reader, writer = await asyncio.open_connection(*control.address)
        host = f"127.0.0.1:{control.address[1]}".encode()
        writer.write(b"GET /status HTTP/1.1\r\nHost: " + host + b"\r\n")
        writer.write(b"Authorization: Bearer \xff\xe9\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "127.0.0.1:{port}"),
        ("Host", "localhost:{port}"),
        ("Host", "localhost:9999"),  # the local end of a tunnel
        ("Host", "[::1]:{port}"),
        ("Origin", "http://127.0.0.1:{port}"),
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Site", "none"),
    ],
)
@on_uvloop
async def test_own_hosts_and_sites_are_answered(tmp_path, header, value):
    async with port(tmp_path) as control:
        request_headers = {**token_header(control), header: value.format(port=control.address[1])}
        for path, method in ROUTES.items():
            expected = ANSWERS.get(path, 200)
            assert (path, await ask(control, method, path, **request_headers)) == (path, expected)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Host", "evil.example:{port}"),
        ("Host", "127.0.0.1.evil.example"),
        ("Host", "localhost:80:80"),
        ("Host", ""),
        ("Origin", "http://evil.example"),
        ("Origin", "https://127.0.0.1:{port}"),
        ("Origin", "null"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ],
)
@on_uvloop
async def test_other_hosts_and_sites_are_refused(tmp_path, header, value):
    async with port(tmp_path) as control:
        request_headers = {**token_header(control), header: value.format(port=control.address[1])}
        for path, method in ROUTES.items():
            assert (path, await ask(control, method, path, **request_headers)) == (path, 403)


@on_uvloop
async def test_token_file_is_private_new_each_time_and_removed_at_the_end(tmp_path):
    tokens = set()
    for number in range(2):
        async with port(tmp_path / str(number)) as control:
            address = f"127.0.0.1:{control.address[1]}"
            path = control_token_file(state_home(), address)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            local = address.replace("127.0.0.1", "localhost")
            assert control_token(address) == control_token(local) == control.guard.token
            tokens.add(control.guard.token)
        assert not path.exists()
    assert len(tokens) == 2


@on_uvloop
async def test_command_without_a_token_names_the_remedy(tmp_path, monkeypatch):
    async with port(tmp_path) as control:
        address = f"127.0.0.1:{control.address[1]}"
        monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "another user's"))
        with pytest.raises(NotAuthorized, match="SAMESTEP_CONTROL_TOKEN_FILE") as error_info:
            await request(address, "GET", "/status")
        assert error_info.value.exit_code == ExitCode.NOT_AUTHORIZED
        token_file = tmp_path / "control.token"
        token_file.write_text(control.guard.token)
        token_file.chmod(0o600)
        monkeypatch.setenv("SAMESTEP_CONTROL_TOKEN_FILE", str(token_file))
        assert (await request(address, "GET", "/status"))["phase"] == "idle"


@asynccontextmanager
async def unfinished_requests(
    control: ControlPort, count: int
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open requests that never end and carry no token."""
    streams = [await asyncio.open_connection(*control.address) for _ in range(count)]
    for _, writer in streams:
        writer.write(b"POST /halt HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    yield [reader for reader, _ in streams]
    for _, writer in streams:
        writer.transport.abort()


async def is_closed_by_server(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


@on_uvloop
async def test_unfinished_requests_are_limited_and_block_nobody(tmp_path):
    async with port(tmp_path) as control:
        bearer = {"Authorization": f"Bearer {control.guard.token}"}
        async with aiohttp.ClientSession(headers=bearer) as operator:
            url = f"http://127.0.0.1:{control.address[1]}"
            flood = unfinished_requests(control, 3 * limits.CONTROL_CONNECTIONS)
            async with operator.get(f"{url}/events") as events, flood as readers:
                assert await is_closed_by_server(readers[0])
                assert len(control.request_limiter) <= limits.CONTROL_CONNECTIONS
                assert await ask(control, "GET", "/status", **bearer) == 200
                control.emit(Draining())
                assert b"draining" in await events.content.readuntil(b"\n\n")


@on_uvloop
async def test_client_without_a_token_is_disconnected_after_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 20)
    async with port(tmp_path) as control:
        async with unfinished_requests(control, 1) as (reader,):
            assert await is_closed_by_server(reader)
        assert not len(control.request_limiter)


@on_uvloop
async def test_connections_leave_descriptors_for_the_log(tmp_path):
    """Past the limit minus the reserve, a connection is closed, and a file can still be opened."""
    original_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with port(tmp_path) as control:
        next_descriptor = os.dup(0)
        os.close(next_descriptor)
        lowered_limit = next_descriptor + limits.RESERVED_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowered_limit, original_limit[1]))
        try:
            async with unfinished_requests(control, 1) as (reader,):
                assert await is_closed_by_server(reader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, original_limit)
        assert await ask(control, "GET", "/healthz") == 200


@pytest.mark.parametrize(("content", "text"), [(None, "does not exist"), ("\n", "is empty")])
def test_empty_control_token_file_is_named(tmp_path, content, text):
    path = tmp_path / "control.token"
    if content is not None:
        write_secret(path, content)
    for command in (("status",), ("token", "control")):
        completed = run_command(
            "coordinator", *command, environment={"SAMESTEP_CONTROL_TOKEN_FILE": str(path)}
        )
        assert completed.returncode == 2
        assert f"SAMESTEP_CONTROL_TOKEN_FILE: the token file '{path}' {text}" in completed.stderr
