"""Checks of every request to the control port, before any handler sees the request.

A request must have a permitted method, a permitted host name (a foreign DNS name may resolve to
this machine), no origin on another site, and a bearer token. The control token is new at each start
of the coordinator and is not the join token: a worker may not halt a run. The reader token stays
across starts and opens only `READS`: metrics collectors may not send commands. There are no
cookies, so browsers add no credentials by themselves.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from coordinator.operator.page_server import PAGE_PATHS
from protocol.base.errors import UsageError
from protocol.machine.secret_file import control_token_file, state_home, write_secret

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

METHODS: Final = ("GET", "POST")
OPEN: Final = ("/healthz", *PAGE_PATHS)
"""Paths without a token: the health check, and the page's files, which contain no data."""
READS: Final = frozenset({
    "/readyz", "/status", "/metrics", "/events", "/runs", "/history", "/report",
})  # fmt: skip
"""Paths for the reader token: they change nothing and, unlike /join, show no secret."""
_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_PORT: Final = re.compile(r":[0-9]{1,5}$")
_SITES: Final = frozenset({"same-origin", "none"})


class Guard:
    """The checks of one control port.

    Attributes:
        token: The control token.
        reader_token: Returns the reader token; empty without one.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.reader_token: Callable[[], str] = str
        self._hosts = _HOSTS
        self._file: Path | None = None

    def publish_token(self, host: str, port: int) -> None:
        """Write the token to the file where this user's commands look for it.

        Raises:
            UsageError: The token cannot be written.
        """
        url_host = f"[{host}]" if ":" in host else host
        self._hosts = _HOSTS | {url_host}
        self._file = control_token_file(state_home(), f"{host}:{port}")
        write_secret(self._file, self.token + "\n")

    def restore_file(self) -> None:
        """Restore the token's file if it is missing and its directory exists."""
        if self._file is None:
            return
        with contextlib.suppress(UsageError, OSError):
            if not self._file.exists() and self._file.parent.parent.is_dir():
                write_secret(self._file, self.token + "\n")

    def close(self) -> None:
        """Remove the token's file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the response that refuses a request; None if it is permitted."""
        if request.method not in METHODS:
            return _refusal_response(
                405, f"expected one of {', '.join(METHODS)}, got another method"
            )
        name = request.headers.get("Host", "")
        if _PORT.sub("", name) not in self._hosts:
            return _refusal_response(403, "expected a loopback address as host, got another name")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{name}":
            return _refusal_response(403, "expected no other site's request, got a foreign origin")
        if request.headers.get("Sec-Fetch-Site", "none") not in _SITES:
            return _refusal_response(403, "expected no other site's request, got a cross-site one")
        if request.path in OPEN:
            return None
        token = _bearer(request)
        if hmac.compare_digest(token, self.token.encode()):
            return None
        reader_token = self.reader_token().encode()
        if reader_token and hmac.compare_digest(token, reader_token):
            if request.method == "GET" and request.path in READS:
                return None
            return _refusal_response(
                403, "expected the control token (coordinator token control), got the reader token"
            )
        response = _refusal_response(401, "expected the control token (Authorization: Bearer ...)")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response


def _bearer(request: web.Request) -> bytes:
    """Return the bearer token of a request; empty without one."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    # aiohttp keeps invalid UTF-8 as lone surrogates.
    return token.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


def _refusal_response(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason, "exit_code": 77}, status=status)
