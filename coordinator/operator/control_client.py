"""An operator's commands, sent to a coordinator's control port."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from protocol.base.address import format_address, parse_address
from protocol.base.errors import NotAuthorised, Unreachable, UsageError, error_for
from protocol.host.secret_file import control_token_file, read_secret, state_home
from protocol.wire import dial

_NAME_PATIENCE_S: Final = 5.0


def control_token(control: str) -> str:
    """The token of the control port at this address; empty if it is not to be found.

    It is in the file that `$SAMESTEP_CONTROL_TOKEN_FILE` names, for a coordinator elsewhere, or
    where a coordinator of the same user on this machine has put it.

    Raises:
        UsageError: The file cannot be read, others can read it too, or one that was named holds
            nothing.
    """
    named = os.environ.get("SAMESTEP_CONTROL_TOKEN_FILE")
    host, port = parse_address(control, "--control")
    address = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
    path = Path(named) if named else control_token_file(state_home(), address)
    token = read_secret(path)
    if named and not (token or "").strip():
        what = "is not there" if token is None else "is empty"
        raise UsageError(f"SAMESTEP_CONTROL_TOKEN_FILE: the token file {named!r} {what}")
    return (token or "").strip()


def _in_words(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer for {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return dial.described(error.os_error, format_address(error.host, error.port or 0)).found
    if isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return "what answers is something else"


class _Resolver(AbstractResolver):
    """Looks names up in a bounded time: aiohttp's own would be waited for at the process's end."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See aiohttp."""
        del family  # both
        return [
            ResolveResult(
                hostname=host, host=each.host, port=port, family=each.family, proto=0, flags=0
            )
            for each in await dial.resolve(host, port, _NAME_PATIENCE_S)
        ]

    async def close(self) -> None:
        """Nothing is held."""


async def request(
    control: str,
    method: str,
    path: str,
    document: dict[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """One request; the answer's document.

    Args:
        control: `host:port` of the control port.
        method: GET or POST.
        path: The route.
        document: Sent as JSON.
        timeout_s: How long an answer may take.

    Raises:
        Unreachable: Nothing answers there, or not a coordinator.
        SamestepError: What the coordinator answered, as the error it names.
    """
    url = f"http://{format_address(*parse_address(control, '--control'))}{path}"
    token = control_token(control)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=_Resolver()),
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as session,
            session.request(method, url, json=document, headers=headers) as response,
        ):
            answer = await response.json()
            status = response.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unreachable(
            f"no coordinator answers at {control} ({_in_words(error, timeout_s)}); "
            "start one, or say where it is with --control HOST:PORT"
        ) from None
    if not isinstance(answer, dict):
        raise Unreachable(f"expected a coordinator at {control}, got another kind of answer")
    if status == 401:
        raise NotAuthorised(
            f"the coordinator at {control} expects its control token, and none that fits is here; "
            "run this as the coordinator's user, or set SAMESTEP_CONTROL_TOKEN_FILE=FILE"
        )
    if status >= 400:
        raise error_for(answer.get("exit_code", 1), str(answer.get("error", f"HTTP {status}")))
    return answer
