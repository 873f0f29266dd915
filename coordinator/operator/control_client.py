"""An operator's commands, sent to a coordinator's control port."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from protocol.base.address import format_address, parse_address
from protocol.base.errors import NotAuthorized, Unreachable, UsageError, error_for
from protocol.base.option_names import option
from protocol.machine.secret_file import control_token_file, read_secret, state_home
from protocol.wire import dial

_NAME_PATIENCE_S: Final = 5.0


def control_token(control: str) -> str:
    """Return the token of the control port at this address; empty if this machine has none.

    The token is in the file that `$SAMESTEP_CONTROL_TOKEN_FILE` names, for a coordinator on another
    machine; or in the file that a coordinator of the same user on this machine wrote.

    Raises:
        UsageError: The file cannot be read, other users can read it, or the named file is missing
            or empty.
    """
    token_file = os.environ.get("SAMESTEP_CONTROL_TOKEN_FILE")
    host, port = parse_address(control, option("--control"))
    address = f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
    path = Path(token_file) if token_file else control_token_file(state_home(), address)
    token = read_secret(path)
    if token_file and not (token or "").strip():
        fault = "does not exist" if token is None else "is empty"
        raise UsageError(f"SAMESTEP_CONTROL_TOKEN_FILE: the token file {token_file!r} {fault}")
    return (token or "").strip()


def _describe(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer for {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return dial.as_dial_error(
            error.os_error, format_address(error.host, error.port or 0)
        ).observation
    if isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return "something else answers there"


class _Resolver(AbstractResolver):
    """Resolves names in bounded time: aiohttp's resolver would delay the end of the process."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See aiohttp."""
        del family  # both
        return [
            ResolveResult(
                hostname=host, host=address.host, port=port, family=address.family, proto=0, flags=0
            )
            for address in await dial.resolve(host, port, _NAME_PATIENCE_S)
        ]

    async def close(self) -> None:
        """Do nothing: nothing is open."""


async def request(
    control: str,
    method: str,
    path: str,
    document: dict[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """Send one request; return the answer's document.

    Args:
        control: `host:port` of the control port.
        method: GET or POST.
        path: The route.
        document: Sent as JSON.
        timeout_s: How long the answer may take.

    Raises:
        Unreachable: Nothing answers at the address, or no coordinator does.
        SamestepError: The error in the coordinator's answer.
    """
    url = f"http://{format_address(*parse_address(control, option('--control')))}{path}"
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
            f"no coordinator answers at {control} ({_describe(error, timeout_s)}); "
            f"start one, or name its address with {option('--control HOST:PORT')}"
        ) from None
    if not isinstance(answer, dict):
        raise Unreachable(
            f"expected a coordinator at {control}, got an answer from another service; name the "
            f"coordinator's address with {option('--control HOST:PORT')}"
        )
    if status == 401:
        raise NotAuthorized(
            f"the coordinator at {control} expects its control token, which this machine lacks "
            "or has in an older version; run this as the coordinator's user, or set "
            "SAMESTEP_CONTROL_TOKEN_FILE=FILE"
        )
    if status >= 400:
        raise error_for(answer.get("exit_code", 1), str(answer.get("error", f"HTTP {status}")))
    return answer
