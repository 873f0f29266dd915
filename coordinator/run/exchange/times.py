"""Predicted duration of a step's exchange, in a star and sharded, and measured step times.

Pure. `exchange.topology: auto` decides by both; `python -m benchmarks.planned` predicts the
duration for many hosts and compares it with measurements. The constants were measured
(benchmarks/README.md): the overhead of protocols, and the processor time per byte with TLS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_OVERHEAD_FACTOR: Final = 1.05
"""Factor of the overhead of Ethernet, IP, TCP, TLS and frames, on 1500-byte packets."""
_UNEVEN_FACTOR: Final = 1.17
"""Factor of a star: workers that share one link do not get equal parts of it, and a sum waits for
the last worker; meanwhile averages use the other direction of the same connections."""
_LOOP_S_PER_BYTE: Final = 0.9e-9
"""Time of the coordinator's event loop per byte in or out: TLS, checksum, sums."""
_LINK_S_PER_BYTE: Final = 0.6e-9
"""Processor time of a member per byte that it exchanges with another member."""
_MEMBER_CORES: Final = 4
"""Cores of a member that do not compute gradients."""
_FIXED_S: Final = 0.003
"""Time of messages without gradients, and of waking processes."""
_WINDOW_STEPS: Final = 8
_WINDOW_MS: Final = 5_000.0
"""A window has at least this many steps and milliseconds: the clock advances only with the ticks,
ten per second, so the error is two percent of 5 s."""
_SHARDED_WINDOWS: Final = 2
"""More than one window, since a single window may be slow for another reason."""
_SLOWER_FACTOR: Final = 1.05
"""Sharded steps that take longer than a star's by more than this factor lead back to the star."""


@dataclass(frozen=True, slots=True)
class MeshMember:
    """One member of the mesh; the model assumes that each member has a different host.

    Attributes:
        mbit: Speed of the host's link to the network in each direction, Mbit/s.
        share: The fraction of all chunks that the member owns where workers average; all shares
            sum to 1.
        has_coordinator: Whether the coordinator is on the same host.
    """

    mbit: float
    share: float
    has_coordinator: bool = False

    def send_s(self, sent_bytes: float) -> float:
        """Return the seconds to send this many bytes in one direction."""
        return _OVERHEAD_FACTOR * sent_bytes * 8e-6 / self.mbit


@dataclass(frozen=True, slots=True)
class Volume:
    """The data that is exchanged in a step.

    Attributes:
        up_bytes: Encoded size of all sums of one host.
        down_bytes: Encoded size of all averages, which each host receives.
        chunks: Number of chunks, sent in sequence: an average can be sent as soon as the sums of
            its chunk have arrived from all hosts.
    """

    up_bytes: int
    down_bytes: int
    chunks: int


def predict_star_s(volume: Volume, members: Sequence[MeshMember]) -> float:
    """Return the duration of an exchange in a star, in seconds: all hosts send their sums to the
    coordinator and receive all averages, in parallel."""
    away = [member for member in members if not member.has_coordinator]
    # Without a member on its machine, the coordinator's link is not measured: assume the fastest.
    at_center = [member for member in members if member.has_coordinator] or members
    center = max(at_center, key=lambda member: member.mbit)
    larger = max(volume.up_bytes, volume.down_bytes)
    wire_s = max([center.send_s(len(away) * larger), *(m.send_s(larger) for m in away)])
    last_s = max(
        [
            center.send_s(len(away) * volume.down_bytes),
            *(member.send_s(volume.down_bytes) for member in away),
        ]
    )
    loop_s = _LOOP_S_PER_BYTE * len(members) * (volume.up_bytes + volume.down_bytes)
    return _FIXED_S + max(_UNEVEN_FACTOR * (wire_s + last_s / volume.chunks), loop_s)


def predict_sharded_s(
    volume: Volume, members: Sequence[MeshMember], cores: float = _MEMBER_CORES
) -> float:
    """Return the duration of a sharded exchange, in seconds: sums go to the owners of chunks, and
    averages to all.

    Args:
        volume: The data that is exchanged.
        members: The members with their shares.
        cores: Cores of each member that process link traffic.
    """
    others = len(members) - 1
    # Without a member on its machine, the coordinator receives another copy of each average.
    extra = 0 if any(member.has_coordinator for member in members) else 1
    send_s = []
    for member in members:
        rest = 1 - member.share
        sent_bytes = rest * volume.up_bytes + member.share * (others + extra) * volume.down_bytes
        received_bytes = rest * volume.down_bytes + member.share * others * volume.up_bytes
        links_s = _LINK_S_PER_BYTE * (sent_bytes + received_bytes) / min(cores, 2 * max(others, 1))
        send_s.append(max(member.send_s(max(sent_bytes, received_bytes)), links_s))
    return _FIXED_S + max(send_s) * (1 + 1 / volume.chunks)


class StepTimes:
    """Measured times of steps, star and sharded, for one set of workers.

    A step's time includes forward and backward, which take equally long in both topologies.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all times, because the set of workers has changed."""
        self._windows_ms: dict[bool, list[float]] = {False: [], True: []}
        self._open_ms: list[float] = []
        self._sharded: bool | None = None

    def add(self, step_ms: float, *, sharded: bool) -> None:
        """Add a step; the first one after a change of topology does not count."""
        if self._sharded is not sharded:
            self._sharded, self._open_ms = sharded, []
            return
        self._open_ms.append(step_ms)
        if len(self._open_ms) >= _WINDOW_STEPS and sum(self._open_ms) >= _WINDOW_MS:
            mean_ms = sum(self._open_ms) / len(self._open_ms)
            window = [*self._windows_ms[sharded], mean_ms]
            self._windows_ms[sharded] = window[-_SHARDED_WINDOWS:]
            self._open_ms = []

    def reason_for_star(self) -> str:
        """Return why the measurements call for a star; empty if they do not."""
        star_ms, sharded_ms = self._windows_ms[False], self._windows_ms[True]
        if len(sharded_ms) < _SHARDED_WINDOWS:
            return ""
        sharded = f"{min(sharded_ms):.0f} ms"
        if not star_ms:
            return f"a star, to measure it: a sharded step took {sharded}"
        if min(sharded_ms) > _SLOWER_FACTOR * min(star_ms):
            return f"a star: its steps took {min(star_ms):.0f} ms, sharded ones {sharded}"
        return ""
