"""The exchange of a step between hosts with links of limited speed, against gloo's all-reduce.

`python -m benchmarks.shaped [ROW ...] [--rounds N] [--turns N] [--ways TOPOLOGY ...] [--bfloat16]`.
Hosts are network namespaces of this machine (`benchmarks.hosts`, needs root). Coordinator and first
worker share a host, whose only path to the other hosts is its link. samestep runs the real commands
with TLS, as in `benchmarks.sync`, as a star and sharded; gloo runs on the same hosts, alternating.
All hosts share this machine's processor, so on a fast link the processor is the limit.
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
from benchmarks.hosts import Host, Network, why_unavailable
from benchmarks.machine import print_heading, print_table
from benchmarks.ranks import Ranks, spans_us
from benchmarks.sync import Case
from benchmarks.timeline import Timeline, step_times
from protocol.exact.reduction.bfloat16 import ELEMENT_BYTES
from protocol.spec.sections.exchange import Precision, Topology

_TOPOLOGIES: Final[tuple[Topology, ...]] = ("star", "sharded")
_WARMUP_ROUNDS: Final = 4
"""Rounds that are not counted, in which workers connect to each other."""


@dataclass(frozen=True, slots=True)
class Row:
    """Workers on hosts, and the job whose gradients they average.

    Attributes:
        mbits: The speed of each host's link, Mbit/s.
        worker_hosts: The number of each worker's host.
        case: The job whose gradients are averaged.
    """

    mbits: tuple[int, ...]
    worker_hosts: tuple[int, ...]
    case: Case

    def limit_ms(self, topology: str) -> float:
        """Return the minimum milliseconds that the links allow."""
        return self.star_limit_ms() if topology == "star" else self.ring_limit_ms()

    def star_limit_ms(self) -> float:
        """Return the minimum milliseconds of a star: all payloads go to the first host, all
        averages come from it. Both directions overlap, except for one arbitrarily small payload.
        """
        payload_bits = self.case.payload_bytes * 2 * ELEMENT_BYTES[self.case.precision]
        workers_by_host = [
            sum(worker_host == host for worker_host in self.worker_hosts)
            for host in range(len(self.mbits))
        ]
        workers_by_host[0] = len(self.worker_hosts) - workers_by_host[0]
        loads = zip(workers_by_host, self.mbits, strict=True)
        return max(count * payload_bits / (mbit * 1e3) for count, mbit in loads)

    def ring_limit_ms(self) -> float:
        """Return the minimum milliseconds if each host sends and receives 2 (N-1)/N payloads."""
        hosts = len(self.mbits)
        payload_bits = self.case.payload_bytes * 2 * ELEMENT_BYTES[self.case.precision]
        return 2 * (hosts - 1) / hosts * payload_bits / (min(self.mbits) * 1e3)


def _separate_hosts(hosts: int, mbit: int, blocks: int, block_bytes: int, quiet_ms: float) -> Row:
    """Return a row with one worker on each of several equal hosts."""
    case = Case(hosts, blocks, block_bytes, quiet_ms)
    return Row((mbit,) * hosts, tuple(range(hosts)), case)


_SMALL_BLOCKS: Final = (6, 883_332)
"""5.3 MB, as in LoRA of a small encoder."""
_LARGE_BLOCKS: Final = (12, 8_333_332)
"""100 MB in twelve layers."""

ROWS: Final[dict[str, Row]] = {
    "seed": Row((1000, 1000), (0, 0, 1), Case(3, *_SMALL_BLOCKS, 250)),
    "3x1g": _separate_hosts(3, 1000, *_SMALL_BLOCKS, 250),
    "2x1g": _separate_hosts(2, 1000, *_SMALL_BLOCKS, 250),
    "4x1g": _separate_hosts(4, 1000, *_SMALL_BLOCKS, 300),
    "8x1g": _separate_hosts(8, 1000, *_SMALL_BLOCKS, 700),
    "3x100m": _separate_hosts(3, 100, *_SMALL_BLOCKS, 1500),
    "4x100m": _separate_hosts(4, 100, *_SMALL_BLOCKS, 2000),
    "8x100m": _separate_hosts(8, 100, *_SMALL_BLOCKS, 5000),
    "4x10g": _separate_hosts(4, 10_000, *_LARGE_BLOCKS, 2000),
    "slow": Row((1000, 1000, 1000, 60), (0, 1, 2, 3), Case(4, *_SMALL_BLOCKS, 1000)),
}
"""`seed`: two workers on the coordinator's host and one over a link; `slow`: one host of 60 Mbit/s.
"""


@dataclass(frozen=True, slots=True)
class SideMeasurement:
    """The measurements of one side over all turns.

    Attributes:
        ms: Duration of each round over all ranks, from the first start to the last end.
        out_mb: MB per round that the first host sent, including start and end of a run.
        in_mb: MB per round that the first host received.
        coordinator_mb: MB per round that the coordinator received and sent.
    """

    ms: list[float]
    out_mb: float
    in_mb: float
    coordinator_mb: float = 0.0


def measure(
    row: Row, topologies: Sequence[Topology], rounds: int, turns: int
) -> dict[str, SideMeasurement]:
    """Measure gloo, and samestep with each topology up to the last average, alternately."""
    intervals: dict[Topology, list[Interval]] = {topology: [] for topology in topologies}
    gloo_us: list[float] = []
    bytes_by_side: dict[str, list[int]] = {
        "gloo": [0, 0],
        **{topology: [0, 0] for topology in topologies},
    }
    coordinator_bytes: dict[str, int] = dict.fromkeys(topologies, 0)
    total_rounds = rounds + _WARMUP_ROUNDS
    worker = ["benchmarks.ready_worker", "--quiet-ms", str(row.case.quiet_ms)]
    command = {
        "do": "all_reduce", "payload_bytes": row.case.payload_bytes, "rounds": total_rounds,
        "quiet_ms": row.case.quiet_ms,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, Network(row.mbits) as network:
        directory = Path(name)
        rank_hosts = [network.hosts[host] for host in row.worker_hosts]
        devices = Counter(row.worker_hosts)  # devices of one host are one worker
        cluster = Cluster(
            [[*worker, "--devices", str(count)] for count in devices.values()],
            directory / "ours",
            hosts=[network.hosts[host] for host in devices],
            expected=row.case.workers,
        )
        with cluster, Ranks(row.case.workers, directory / "gloo", rank_hosts) as ranks:
            for _ in range(turns):
                for topology in topologies:
                    bytes_before = sum(cluster.coordinator_traffic())
                    with _counting(network.hosts[0], bytes_by_side[topology]):
                        spec = replace(row.case, topology=topology).run_spec(total_rounds)
                        intervals[topology].append(cluster.run(spec))
                    coordinator_bytes[topology] += sum(cluster.coordinator_traffic()) - bytes_before
                with _counting(network.hosts[0], bytes_by_side["gloo"]):
                    gloo_us += spans_us(ranks.run_commands(command))[_WARMUP_ROUNDS:]
        timelines = cluster.timelines()
    bytes_per_mb_and_round = turns * total_rounds * 1e6
    out_mb, in_mb = (byte_count / bytes_per_mb_and_round for byte_count in bytes_by_side["gloo"])
    turns_by_side = {"gloo": SideMeasurement([span_us / 1e3 for span_us in gloo_us], out_mb, in_mb)}
    for topology in topologies:
        ms = _exchange_ms(timelines, intervals[topology], row.case.workers)
        out_mb, in_mb = (
            byte_count / bytes_per_mb_and_round for byte_count in bytes_by_side[topology]
        )
        turns_by_side[topology] = SideMeasurement(
            ms, out_mb, in_mb, coordinator_bytes[topology] / bytes_per_mb_and_round
        )
    return turns_by_side


@contextmanager
def _counting(host: Host, totals: list[int]) -> Iterator[None]:
    """Add the bytes that the host sends and receives within a `with` block to the totals."""
    bytes_before = host.counted_bytes()
    yield
    for direction, (count, start_count) in enumerate(
        zip(host.counted_bytes(), bytes_before, strict=True)
    ):
        totals[direction] += count - start_count


def _exchange_ms(
    timelines: Sequence[Timeline], intervals: Sequence[Interval], workers: int
) -> list[float]:
    """Return the time from the first payload sent to the last average received, for steps in which
    all workers took part.
    """
    return [
        (step.last_receive_us - step.first_send_us) / 1e3
        for run in intervals
        for step in step_times(timelines, run.start_us, run.end_us)[_WARMUP_ROUNDS:]
        if step.senders == workers
    ]


def table_rows(name: str, row: Row, turns: dict[str, SideMeasurement]) -> list[list[str]]:
    """Return the rows of the table for one configuration."""
    reference = median(turns["gloo"].ms)
    return [
        [f"{name}, {row.case.payload_bytes / 1e6:.1f} MB: {side}", str(len(side_turns.ms)),
         f"{min(side_turns.ms):.1f}", f"{median(side_turns.ms):.1f}",
         f"{median(side_turns.ms) / reference:.2f}",
         f"{row.limit_ms(side):.1f}", f"{side_turns.out_mb:.1f}", f"{side_turns.in_mb:.1f}",
         f"{side_turns.coordinator_mb:.1f}" if side != "gloo" else ""]
        for side, side_turns in turns.items()
    ]  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"any of {', '.join(ROWS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=10, help="in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--ways", nargs="+", dest="topologies", choices=_TOPOLOGIES, default=_TOPOLOGIES
    )
    parser.add_argument("--bfloat16", action="store_true", help="for samestep, in both directions")
    options = parser.parse_args()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"expected rows of {', '.join(ROWS)}, got {', '.join(unknown)}")
    if reason := why_unavailable():
        print(f"skipped: {reason}")
        sys.exit(0)
    print_heading("Mean of N workers' gradients over links of limited speed, per round, over ranks")
    precision: Precision = "bfloat16" if options.bfloat16 else "float32"
    table: list[list[str]] = []
    for name in options.rows or ROWS:
        row = replace(ROWS[name], case=replace(ROWS[name].case, precision=precision))
        table += table_rows(
            name, row, measure(row, options.topologies, options.rounds, options.turns)
        )
    header = ["what", "rounds", "min ms", "median ms", "ratio", "link limit ms", "out MB", "in MB"]
    header.append("coordinator MB")
    print_table(header, table)
    print(f"load {os.getloadavg()[0]:.1f}, congestion control {_congestion_control()}")


def _congestion_control() -> str:
    """Return TCP's congestion control on this machine, which decides how flows share a link."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


if __name__ == "__main__":
    main()
