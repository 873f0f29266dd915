"""The lines that a starting coordinator prints: the commands to join, and to see the status.

The join token is printed only to a terminal. Other output (a service's log, a file) says how to get
the token instead.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.listening import address_from_here, is_loopback, reachable_addresses
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
    options = (["--plaintext"] if plaintext else []) + ([script] if script else [])

    def worker_command(reachable_at: str) -> str:
        return shlex.join(["worker", "--coordinator", format_address(reachable_at, port), *options])

    yield f"listening for workers: {worker_command(address_from_here(host))}"
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
        yield f"  {home} {worker_command(reachable_host)}"
        return
    if to_terminal:
        token = shlex.quote(credentials.join_token().reveal())
    else:
        token = f'"$({_token_over_ssh(reachable_host, credentials)})"'
    yield "on another machine, in one line:"
    yield f"  SAMESTEP_TOKEN={token} {worker_command(reachable_host)}"
    if others:
        yield f"  or at {', '.join(format_address(other, port) for other in others)}"
    if name and "%" not in reachable_host:
        yield f"(on the same network it is found without its address, as {name!r})"


def _token_over_ssh(host: str, credentials: CoordinatorCredentials) -> str:
    """Return the ssh command that prints the join token; as root for a service, whose user cannot
    log in."""
    if not os.environ.get("STATE_DIRECTORY"):
        return f"ssh {shlex.quote(host)} coordinator token show"
    home = str(credentials.home)
    remote_command = f"SAMESTEP_HOME={shlex.quote(home)} coordinator token show"
    if shlex.quote(home) != home:  # the shell there parses the command too
        remote_command = shlex.quote(remote_command)
    return f"ssh {shlex.quote(f'root@{host}')} {remote_command}"


def status_line(control: tuple[str, int], token: str, *, to_terminal: bool) -> str:
    """Return the line with the status command and the page's URL; the URL has the control token
    only if the output is a terminal.

    Browsers do not send the fragment of a URL, so the token is in no request and no log.
    """
    address = format_address(*control)
    fragment = f"#token={token}" if to_terminal else ""
    command = shlex.join(["coordinator", "status", "--control", address])
    return f"status: {command}   (page: http://{address}/{fragment})"
