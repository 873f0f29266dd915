"""The exchange of a step between hosts with links of given speeds, against gloo's all-reduce.

`python -m benchmarks.shaped [ROW ...] [--rounds N] [--turns N] [--ways WAY ...] [--bfloat16]`.
Hosts are network namespaces of this machine (`benchmarks.hosts`, needs root). Coordinator and first
worker share a host, whose only path to the others is its link. samestep runs the real commands with
TLS, as in `benchmarks.sync`, as a star and sharded; gloo runs on the same hosts, alternating. All
hosts share this machine's processor, so on a fast link the processor is the limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.cluster import Cluster, Interval
from benchmarks.hosts import Host, Network, why_not
from benchmarks.machine import print_heading, print_table
from benchmarks.ranks import Ranks, spans_us
from benchmarks.sync import Case
from benchmarks.timeline import Timeline, step_times
from protocol.exact.reduction.bfloat16 import ELEMENT_BYTES
from protocol.spec.sections.exchange import Precision, Topology

_WAYS: Final[tuple[Topology, ...]] = ("star", "sharded")
_WARMING_ROUNDS: Final = 4
"""Members find each other meanwhile."""


@dataclass(frozen=True, slots=True)
class Row:
    """Workers on hosts, and what they average.

    Attributes:
        mbits: The speed of each host's link, Mbit/s.
        on: For each worker the number of its host.
        case: What is averaged.
    """

    mbits: tuple[int, ...]
    on: tuple[int, ...]
    case: Case

    def limit_ms(self, way: str) -> float:
        """What the wires allow."""
        return self.star_limit_ms() if way == "star" else self.ring_limit_ms()

    def star_limit_ms(self) -> float:
        """What the wires allow: all payloads to the first host, and all averages from it.

        Both directions at once; the last average must wait for the last payload, which is as
        small as one likes.
        """
        payload_bits = self.case.payload_bytes * 2 * ELEMENT_BYTES[self.case.precision]
        away = [sum(on == host for on in self.on) for host in range(len(self.mbits))]
        away[0] = len(self.on) - away[0]
        loads = zip(away, self.mbits, strict=True)
        return max(count * payload_bits / (mbit * 1e3) for count, mbit in loads)

    def ring_limit_ms(self) -> float:
        """What the wires allow where each host sends and receives 2 (N-1)/N payloads."""
        hosts = len(self.mbits)
        payload_bits = self.case.payload_bytes * 2 * ELEMENT_BYTES[self.case.precision]
        return 2 * (hosts - 1) / hosts * payload_bits / (min(self.mbits) * 1e3)


def _apart(hosts: int, mbit: int, blocks: int, block_bytes: int, quiet_ms: float) -> Row:
    """One worker on each of so many equal hosts."""
    case = Case(hosts, blocks, block_bytes, quiet_ms)
    return Row((mbit,) * hosts, tuple(range(hosts)), case)


_SMALL: Final = (6, 883_332)
"""5.3 MB, as in LoRA of a small encoder."""
_LARGE: Final = (12, 8_333_332)
"""100 MB in twelve layers."""

ROWS: Final[dict[str, Row]] = {
    "seed": Row((1000, 1000), (0, 0, 1), Case(3, *_SMALL, 250)),
    "3x1g": _apart(3, 1000, *_SMALL, 250),
    "2x1g": _apart(2, 1000, *_SMALL, 250),
    "4x1g": _apart(4, 1000, *_SMALL, 300),
    "8x1g": _apart(8, 1000, *_SMALL, 700),
    "3x100m": _apart(3, 100, *_SMALL, 1500),
    "4x100m": _apart(4, 100, *_SMALL, 2000),
    "8x100m": _apart(8, 100, *_SMALL, 5000),
    "4x10g": _apart(4, 10_000, *_LARGE, 2000),
    "slow": Row((1000, 1000, 1000, 60), (0, 1, 2, 3), Case(4, *_SMALL, 1000)),
}
"""`seed`: two workers beside the coordinator and one over a link; `slow`: one host of 60 Mbit/s."""


@dataclass(frozen=True, slots=True)
class Turns:
    """All turns of one way.

    Attributes:
        ms: Of each round: over all ranks, from the first start to the last end.
        out_mb: What went out of the first host, MB per round, start and end of a run included.
        in_mb: What came in.
        coordinator_mb: What the coordinator's process received and sent.
    """

    ms: list[float]
    out_mb: float
    in_mb: float
    coordinator_mb: float = 0.0


def measure(row: Row, ways: Sequence[Topology], rounds: int, turns: int) -> dict[str, Turns]:
    """gloo, and ours in each way to the last average, by turns; warming rounds not counted."""
    intervals: dict[Topology, list[Interval]] = {way: [] for way in ways}
    gloo_us: list[float] = []
    counted: dict[str, list[int]] = {"gloo": [0, 0], **{way: [0, 0] for way in ways}}
    passed: dict[str, int] = dict.fromkeys(ways, 0)
    rounds_in_all = rounds + _WARMING_ROUNDS
    worker = ["benchmarks.ready_worker", "--quiet-ms", str(row.case.quiet_ms)]
    command = {
        "do": "all_reduce", "payload_bytes": row.case.payload_bytes, "rounds": rounds_in_all,
        "quiet_ms": row.case.quiet_ms,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, Network(row.mbits) as network:
        directory = Path(name)
        places = [network.hosts[host] for host in row.on]
        devices = Counter(row.on)  # those of one host are one worker
        ours = Cluster(
            [[*worker, "--devices", str(count)] for count in devices.values()],
            directory / "ours",
            hosts=[network.hosts[host] for host in devices],
            expected=row.case.workers,
        )
        with ours, Ranks(row.case.workers, directory / "gloo", places) as ranks:
            for _ in range(turns):
                for way in ways:
                    before = sum(ours.through_coordinator())
                    with _counting(network.hosts[0], counted[way]):
                        spec = replace(row.case, way=way).run_spec(rounds_in_all)
                        intervals[way].append(ours.run(spec))
                    passed[way] += sum(ours.through_coordinator()) - before
                with _counting(network.hosts[0], counted["gloo"]):
                    gloo_us += spans_us(ranks.ask(command))[_WARMING_ROUNDS:]
        timelines = ours.timelines()
    in_all = turns * rounds_in_all * 1e6
    out_mb, in_mb = (n / in_all for n in counted["gloo"])
    turns_by_way = {"gloo": Turns([us / 1e3 for us in gloo_us], out_mb, in_mb)}
    for way in ways:
        ms = _averaged_ms(timelines, intervals[way], row.case.workers)
        out_mb, in_mb = (n / in_all for n in counted[way])
        turns_by_way[way] = Turns(ms, out_mb, in_mb, passed[way] / in_all)
    return turns_by_way


@contextmanager
def _counting(host: Host, into: list[int]) -> Iterator[None]:
    """Add what goes out of the host and comes in meanwhile."""
    before = host.counted_bytes()
    yield
    for way, (after, start) in enumerate(zip(host.counted_bytes(), before, strict=True)):
        into[way] += after - start


def _averaged_ms(
    timelines: Sequence[Timeline], intervals: Sequence[Interval], workers: int
) -> list[float]:
    """From the first payload sent to the last averaged chunk received, where all took part."""
    return [
        (step.last_receive_us - step.first_send_us) / 1e3
        for run in intervals
        for step in step_times(timelines, run.start_us, run.end_us)[_WARMING_ROUNDS:]
        if step.senders == workers
    ]


def lines(name: str, row: Row, turns: dict[str, Turns]) -> list[list[str]]:
    """The lines of the table for one row."""
    reference = median(turns["gloo"].ms)
    return [
        [f"{name}, {row.case.payload_bytes / 1e6:.1f} MB: {way}", str(len(each.ms)),
         f"{min(each.ms):.1f}", f"{median(each.ms):.1f}", f"{median(each.ms) / reference:.2f}",
         f"{row.limit_ms(way):.1f}", f"{each.out_mb:.1f}", f"{each.in_mb:.1f}",
         f"{each.coordinator_mb:.1f}" if way != "gloo" else ""]
        for way, each in turns.items()
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; none: all")
    parser.add_argument("--rounds", type=int, default=10, help="in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=_WAYS)
    parser.add_argument("--bfloat16", action="store_true", help="ours in both directions")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"expected rows of {', '.join(ROWS)}, got {', '.join(unknown)}")
    if reason := why_not():
        print(f"skipped: {reason}")
        sys.exit(0)
    print_heading("Mean of N workers' gradients over links of given speeds, per round, over ranks")
    precision: Precision = "bfloat16" if options.bfloat16 else "float32"
    table: list[list[str]] = []
    for name in options.rows or ROWS:
        row = replace(ROWS[name], case=replace(ROWS[name].case, precision=precision))
        table += lines(name, row, measure(row, options.ways, options.rounds, options.turns))
    head = ["what", "rounds", "min ms", "median ms", "ratio", "wires ms", "out MB", "in MB"]
    head.append("coordinator MB")
    print_table(head, table)
    print(f"load {os.getloadavg()[0]:.1f}, congestion control {_congestion_control()}")


def _congestion_control() -> str:
    """What TCP does here, on the hosts too: flows that share a link fare unlike by it."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


if __name__ == "__main__":
    main()
