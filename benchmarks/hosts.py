"""Hosts on one machine: network namespaces, each with a link of a given speed to one switch.

A link is a pair of virtual Ethernet devices; `tc tbf` holds both directions to the link's speed,
and the kernel counts what goes through. Needs root, `ip`, `tc` and `nsenter`. Names are of this
process, and everything is gone when the network is closed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_CLONE_NEWNET: Final = 0x40000000
_DEVICE: Final = "eth0"
_BURST: Final = "256kb"
_LATENCY: Final = "100ms"
"""What a link's queue may hold before it drops."""


def why_not() -> str:
    """Why no hosts can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts of their own need root: network namespaces and traffic control"
    missing = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"hosts of their own need the commands {', '.join(missing)} (iproute2, util-linux)"
    try:
        Network([1000]).__enter__().__exit__(None, None, None)
    except RuntimeError as error:
        return f"no hosts can be made here: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace.

    Attributes:
        name: Of the namespace.
        address: Its only one, besides loopback.
        mbit: Its link's speed in each direction, Mbit/s.
    """

    name: str
    address: str
    mbit: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it is run there."""
        return ("nsenter", f"--net={self._path}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets of this thread are opened there meanwhile."""
        with Path("/proc/self/ns/net").open("rb") as outside, self._path.open("rb") as within:
            _set_namespace(within.fileno())
            try:
                yield
            finally:
                _set_namespace(outside.fileno())

    def counted_bytes(self) -> tuple[int, int]:
        """What has gone out of this host and come in so far, Ethernet headers included."""
        answer = _run("ip", "-j", "-s", "-n", self.name, "link", "show", "dev", _DEVICE)
        counters = json.loads(answer)[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    @property
    def _path(self) -> Path:
        return Path("/run/netns") / self.name


class Network:
    """So many hosts at one switch.

    Attributes:
        hosts: One for each speed, in order.

    Args:
        mbits: The speed of each host's link, Mbit/s.
    """

    def __init__(self, mbits: Sequence[int]) -> None:
        mark = f"ss{os.getpid()}"
        self._switch = f"{mark}s"
        self.hosts = tuple(
            Host(f"{mark}h{index}", f"10.77.0.{index + 1}", mbit)
            for index, mbit in enumerate(mbits)
        )

    def __enter__(self) -> Self:
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for index, host in enumerate(self.hosts):
                self._add(host, f"port{index}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _add(self, host: Host, port: str) -> None:
        _run("ip", "netns", "add", host.name)
        _run(
            "ip", "link", "add", _DEVICE, "netns", host.name,
            "type", "veth", "peer", "name", port, "netns", self._switch,
        )  # fmt: skip
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", _DEVICE)
        _run("ip", "-n", host.name, "link", "set", "lo", "up")
        _run("ip", "-n", host.name, "link", "set", _DEVICE, "up")
        for namespace, device in ((host.name, _DEVICE), (self._switch, port)):
            _run(
                "tc", "-n", namespace, "qdisc", "add", "dev", device, "root",
                "tbf", "rate", f"{host.mbit}mbit", "burst", _BURST, "latency", _LATENCY,
            )  # fmt: skip

    def _remove(self) -> None:
        for name in (*(host.name for host in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S603, S607 -- our own names


def _set_namespace(descriptor: int) -> None:
    """This thread's network becomes the one behind the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _run(*command: str) -> str:
    """The command's output.

    Raises:
        RuntimeError: It failed; with its words.
    """
    done = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 -- our own commands
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
