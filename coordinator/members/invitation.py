"""The lines that a starting coordinator prints: how workers join, and where its status is.

The join token is printed only to a terminal. Other output (a service's log, a file) says how to get
the token instead.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.listening import from_here, is_loopback, reachable_addresses
from protocol.base.address import format_address


def invitation(
    credentials: CoordinatorCredentials,
    address: tuple[str, int],
    *,
    name: str,
    plaintext: bool,
    to_terminal: bool,
    script: str | None = None,
) -> Iterator[str]:
    """Yield lines with the command for a worker on this machine, and for one on another machine.

    Args:
        credentials: The coordinator's credentials, with the join token.
        address: The address that the coordinator listens on.
        name: The name that the coordinator announces on the network; empty: it announces none.
        plaintext: Whether the coordinator runs without TLS.
        to_terminal: Whether the output is a terminal.
        script: The script that workers run. Empty for a notebook, which workers cannot run: no
            lines are yielded.
    """
    if script == "":
        return
    host, port = address
    option = (" --plaintext" if plaintext else "") + (f" {script}" if script else "")
    local_address = format_address(from_here(host), port)
    yield f"listening for workers: worker --coordinator {local_address}{option}"
    if plaintext:
        yield "NOT ENCRYPTED (--plaintext): all that workers send can be read and changed"
    if is_loopback(host):
        return
    reachable_host, *others = reachable_addresses(host) or [""]
    if not reachable_host:
        yield "other machines cannot reach this one: it is on no network (ip addr)"
        return
    if os.environ.get("SLURM_JOB_ID"):  # ssh to nodes is rarely allowed, and they share a home
        yield "on another node of this cluster, in one line:"
        home = f"SAMESTEP_HOME={shlex.quote(str(credentials.home))}"
        yield f"  {home} worker --coordinator {format_address(reachable_host, port)}{option}"
        return
    if to_terminal:
        token = credentials.join_token().reveal()
    else:
        token = f'"$({_over_ssh(reachable_host, credentials)} token show)"'
    yield "on another machine, in one line:"
    reachable_at = format_address(reachable_host, port)
    yield f"  SAMESTEP_TOKEN={token} worker --coordinator {reachable_at}{option}"
    if others:
        yield f"  or at {', '.join(format_address(other, port) for other in others)}"
    if name and "%" not in reachable_host:
        yield f"(on the same network it is found without its address, as {name!r})"


def _over_ssh(host: str, credentials: CoordinatorCredentials) -> str:
    """Return the ssh command; as root for a service, whose user cannot log in."""
    if os.environ.get("STATE_DIRECTORY"):
        return f"ssh root@{host} SAMESTEP_HOME={credentials.home} coordinator"
    return f"ssh {host} coordinator"


def status_line(control: tuple[str, int], token: str, *, to_terminal: bool) -> str:
    """Return the line that says how to see the status; with the control token only to a terminal.

    Browsers do not send the fragment of a URL, so the token is in no request and no log.
    """
    address = format_address(*control)
    fragment = f"#token={token}" if to_terminal else ""
    return f"status: coordinator status --control {address}   (page: http://{address}/{fragment})"
