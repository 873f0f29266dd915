"""The planner's prediction of an exchange, for more hosts and faster links than this machine has.

`python -m benchmarks.planned [--plot FILE] [--computes-s S]` evaluates the model by which
`exchange.topology: auto` decides (`coordinator.run.exchange.times`): star, sharded, and runs with
replicas, whose rounds use a star. It needs no network. For rows of `benchmarks.shaped`, it prints
the prediction next to the measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.machine import print_heading, print_table
from benchmarks.plot import Axis, Line, Panel, draw_panels
from coordinator.run.exchange.times import MeshMember, Volume, predict_sharded_s, predict_star_s

_HOSTS: Final = (4, 8, 16, 32, 64)
_MBITS: Final = (100, 1_000, 10_000, 25_000)
_BYTES: Final = (5_300_000, 100_000_000, 540_000_000, 4_000_000_000)
_CHUNKS: Final = {5_300_000: 12, 100_000_000: 48, 540_000_000: 140, 4_000_000_000: 1000}
"""Approximate number of chunks by size of the gradients."""
_INNER_STEPS: Final = 100
_INT8: Final = 0.266
"""Bytes of a replica's difference in int8, relative to float32; averages are sent in 16 bits."""
_HIDDEN_SHARE: Final = 2 / 3
"""Share of the computing in which backward can hide an exchange."""
_ACCEPTABLE_SHARE: Final = 0.25
"""Share of the computing that an exchange may add before replicas are better."""


class Prediction(NamedTuple):
    """Seconds of a step's exchange by topology; with replicas, of a round per inner step."""

    star: float
    sharded: float
    replicas: float

    def best_topology(self, computes_s: float) -> str:
        """Return the faster synchronous topology, or replicas if that delays a step too much."""
        faster_s = min(self.star, self.sharded)
        if faster_s > (_HIDDEN_SHARE + _ACCEPTABLE_SHARE) * computes_s and self.replicas < faster_s:
            return "replicas"
        return "star" if self.star <= self.sharded else "sharded"


def equal_members(hosts: int, mbit: float) -> list[MeshMember]:
    """Return equal members, with the coordinator on the first one's host."""
    return [MeshMember(mbit, 1 / hosts, has_coordinator=host == 0) for host in range(hosts)]


def predict(hosts: int, mbit: float, payload_bytes: int) -> Prediction:
    """Return the prediction for equal hosts, in float32 in both directions."""
    members = equal_members(hosts, mbit)
    volume = Volume(payload_bytes, payload_bytes, _CHUNKS[payload_bytes])
    round_ = Volume(int(payload_bytes * _INT8), payload_bytes // 2, _CHUNKS[payload_bytes])
    return Prediction(
        predict_star_s(volume, members),
        predict_sharded_s(volume, members),
        predict_star_s(round_, members) / _INNER_STEPS,
    )


class Measurement(NamedTuple):
    """The fastest rounds of a row of `benchmarks.shaped` whose links were the limit."""

    hosts: int
    mbit: int
    star_ms: float
    sharded_ms: float


_MEASUREMENTS: Final = (
    Measurement(3, 100, 1071.5, 593.6),
    Measurement(4, 100, 1693.2, 671.8),
    Measurement(8, 100, 4037.5, 911.1),
)


def comparison_rows() -> Iterator[list[str]]:
    """Yield expected and measured milliseconds."""
    for measurement in _MEASUREMENTS:
        prediction = predict(measurement.hosts, measurement.mbit, _BYTES[0])
        for topology, measured_ms in (
            ("star", measurement.star_ms),
            ("sharded", measurement.sharded_ms),
        ):
            ms = 1e3 * getattr(prediction, topology)
            link, size = _link(measurement.mbit), _size(_BYTES[0])
            label = f"{measurement.hosts} hosts, {link}, {size}: {topology}"
            yield [label, f"{ms:.0f}", f"{measured_ms:.0f}", f"{ms / measured_ms:.2f}"]


def rows(computes_s: float) -> Iterator[list[str]]:
    """Yield the rows of the table: each link and size at 4, 16 and 64 hosts."""
    for mbit in _MBITS:
        for size in _BYTES:
            for hosts in (4, 16, 64):
                prediction = predict(hosts, mbit, size)
                seconds = [f"{value:.3g}" for value in prediction]
                label = f"{_link(mbit)}, {_size(size)}, {hosts} hosts"
                yield [label, *seconds, prediction.best_topology(computes_s)]


def two_levels_s(volume: Volume, hosts: int, mbit: float) -> float:
    """Return the seconds for groups with one coordinator each and a coordinator above them, at the
    best group size.

    The levels work on different pieces at the same time: the slower level determines the time, and
    then the last piece passes the other level.
    """
    times = []
    for group in (2**n for n in range(1, hosts.bit_length() - 1)):
        within_s = predict_star_s(volume, equal_members(group, mbit))
        between_s = predict_star_s(volume, equal_members(hosts // group, mbit))
        times.append(max(within_s, between_s) + min(within_s, between_s) / volume.chunks)
    return min(times)


def many_hosts_rows() -> Iterator[list[str]]:
    """Yield the rows of the table of 64 to 1,024 hosts: star, two levels of stars, and sharded."""
    for mbit in (1_000, 10_000, 100_000):
        for size in _BYTES[:3]:
            for hosts in (64, 256, 1_024):
                prediction = predict(hosts, mbit, size)
                volume = Volume(size, size, _CHUNKS[size])
                seconds = (prediction.star, two_levels_s(volume, hosts, mbit), prediction.sharded)
                label = f"{_link(mbit)}, {_size(size)}, {hosts} hosts"
                yield [label, *(f"{value:.3g}" for value in seconds)]


def _link(mbit: int) -> str:
    return f"{mbit / 1000:g} Gbit/s"


def _size(payload_bytes: int) -> str:
    gigabytes = payload_bytes / 1e9
    return f"{gigabytes:g} GB" if gigabytes >= 1 else f"{payload_bytes / 1e6:g} MB"


_LOW, _HIGH = -4, 5
"""Ends of the axis of seconds, as powers of ten."""
_STYLES: Final = {
    "star": "stroke:#c2410c",
    "sharded": "stroke:#1d4ed8",
    "replicas": "stroke:#15803d;stroke-dasharray:5 3",
}


def plot(computes_s: float) -> str:
    """Plot seconds of a step's exchange by hosts, both logarithmic; a panel per link and size."""
    names = {"replicas": f"replicas, a round's {_INNER_STEPS}th part"}
    return draw_panels(
        "Seconds of a step's exchange by number of hosts",
        [[_panel(mbit, size, computes_s) for mbit in _MBITS] for size in _BYTES],
        legend=[(names.get(topology, topology), style) for topology, style in _STYLES.items()],
        x_name="hosts",
        panel_size=(184, 116),
    )


def _panel(mbit: int, size: int, computes_s: float) -> Panel:
    by_hosts = [(hosts, predict(hosts, mbit, size)) for hosts in _HOSTS]
    best_topologies = " to ".join(
        dict.fromkeys(prediction.best_topology(computes_s) for _, prediction in by_hosts)
    )
    powers = range(_LOW, _HIGH + 1, 2)
    return Panel(
        f"{_size(size)}, {_link(mbit)}: {best_topologies}",
        Axis(_HOSTS[0], _HOSTS[-1], [(n, str(n)) for n in _HOSTS], logarithmic=True),
        Axis(10.0**_LOW, 10.0**_HIGH, [(10.0**n, f"{10.0**n:g} s") for n in powers], True),
        [
            Line([(n, computes_s) for n in _HOSTS], "stroke:#999;stroke-dasharray:2 3"),
            *(
                Line([(n, getattr(prediction, topology)) for n, prediction in by_hosts], style)
                for topology, style in _STYLES.items()
            ),
        ],
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, help="write an SVG to this file")
    parser.add_argument("--computes-s", type=float, default=1.0, help="compute time of each step")
    options = parser.parse_args()
    print_heading("Expected seconds of a step's exchange, by the planner's model")
    header = ["link, gradients, hosts", "star", "sharded", "replicas", "best"]
    print_table(header, list(rows(options.computes_s)))
    print_table(["on this machine", "expected ms", "measured ms", "ratio"], list(comparison_rows()))
    print_table(["many hosts", "star", "two levels of stars", "sharded"], list(many_hosts_rows()))
    if options.plot is not None:
        options.plot.write_text(plot(options.computes_s))


if __name__ == "__main__":
    main()
