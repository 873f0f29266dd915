"""An operator's commands, sent to a coordinator's control port."""

from __future__ import annotations

from typing import Any

import aiohttp

from protocol.errors import Unreachable, error_for


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
    url = f"http://{control}{path}"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(method, url, json=document) as response,
        ):
            answer = await response.json()
            status = response.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unreachable(
            f"no coordinator answers at {control} ({type(error).__name__}); "
            "start one, or say where it is with --control HOST:PORT"
        ) from None
    if not isinstance(answer, dict):
        raise Unreachable(f"expected a coordinator at {control}, got another kind of answer")
    if status >= 400:
        raise error_for(answer.get("exit_code", 1), str(answer.get("error", f"HTTP {status}")))
    return answer
