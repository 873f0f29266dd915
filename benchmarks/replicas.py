"""Runs with replicas: their loss, their traffic, and how busy they keep machines on slow links.

    python -m benchmarks.replicas loss [--inner-steps-in-all N] [--first N] [--out DIR]
    python -m benchmarks.replicas utilization [--share N] [--rounds N]
    python -m benchmarks.replicas traffic [--share N] [--rounds N]

`loss` trains `small-llama` synchronously and with K replicas, H inner steps and a codec, all on the
same number of tokens. It writes each result as soon as it exists, and continues where it was
interrupted. The others use four workers whose devices only wait. `utilization` needs root, for
hosts with links of a given speed (`benchmarks.hosts`); it divides a state of 540 MB and its inner
steps by `--share`, so everything that determines the result shrinks alike. `traffic` counts what
passes the coordinator's connections per sample.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import Cluster, run_to_end, scripted
from benchmarks.hosts import Network, why_not
from benchmarks.machine import print_heading, print_table
from benchmarks.plot import Axis, Line, Panel, drawn
from coordinator.storage.directory.journal import evaluations

_ROOT: Final = Path(__file__).parents[1]
_SPEC: Final = _ROOT / "deploy" / "runs" / "small-llama.yaml"
_BATCH: Final = 12
"""Samples of a replica in an inner step."""
_TOKENS: Final = 64
"""Of a sample."""
_STATE_BYTES: Final = 540_000_000
_INNER_MS: Final = 664.0
"""32k tokens, 135 M parameters, 40 TFLOP/s."""
_H: Final = 500
_HOSTS: Final = 4
_STEP_MS: Final = 100.0
"""Of a device in a step or round whose traffic is counted: so long that each worker has its part.
Two samples of one worker travel as one sum, and the step would send less than others do."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training; `inner_steps` 0 is the synchronous run on as many tokens.

    Without `momentum` the outer update takes the average of all replicas as it is; with it, it is
    the run spec's default, Nesterov's of DiLoCo, which needs many rounds.
    """

    replicas: int
    inner_steps: int
    inner_state: str = "carry"
    codec: str = "float32"
    momentum: bool = False

    @property
    def name(self) -> str:
        if not self.inner_steps:
            return f"synchronous, batch of {self.replicas}"
        momentum = ", outer momentum" if self.momentum else ""
        return f"K={self.replicas} H={self.inner_steps} {self.inner_state} {self.codec}{momentum}"

    def settings(self, total: int) -> Iterator[str]:
        """Overrides of the run spec, for so many inner steps in all."""
        if not self.inner_steps:
            yield f"batch.samples={_BATCH * self.replicas}"
            yield f"steps={total}"
            yield f"evaluate_every={max(1, total // 10)}"
            return
        rounds = total // self.inner_steps
        yield f"batch.samples={_BATCH}"
        yield f"steps={rounds}"
        yield f"evaluate_every={max(1, rounds // 10)}"
        yield (
            f"replicas={{count: {self.replicas}, inner_steps: {self.inner_steps}, "
            f"inner_state: {self.inner_state}, codec: {self.codec}"
            f"{'' if self.momentum else ', outer: {lr: 1.0, momentum: 0.0}'}}}"
        )


def cases(total: int) -> list[Case]:
    """All that is compared, the most telling first; only those of whole rounds."""
    all_cases = [Case(2, 0)]
    all_cases += [Case(2, inner_steps) for inner_steps in (100, 500, 30)]
    all_cases += [Case(2, inner_steps, momentum=True) for inner_steps in (30, 100, 500)]
    all_cases += _codecs(2, 100)
    all_cases += [Case(2, inner_steps, "reset") for inner_steps in (100, 500, 30)]
    all_cases += [Case(4, 0), *(Case(4, inner_steps) for inner_steps in (100, 500, 30))]
    all_cases += [*_codecs(2, 500), *_codecs(2, 30)]
    all_cases += [Case(4, inner_steps, "reset") for inner_steps in (100, 500, 30)]
    all_cases += [case for inner_steps in (100, 500, 30) for case in _codecs(4, inner_steps)]
    return [case for case in all_cases if total >= 2 * max(case.inner_steps, 1)]


def _codecs(replicas: int, inner_steps: int) -> list[Case]:
    narrow = ("int8", "int4", "topk")
    return [Case(replicas, inner_steps, "carry", codec) for codec in narrow]


def trained(case: Case, total: int, directory: Path) -> dict[str, Any]:
    """Train; gives the held-out loss at the end and on the way, by tokens."""
    run_to_end(_SPEC, directory, [*case.settings(total)])
    a_step = case.replicas * max(case.inner_steps, 1) * _BATCH * _TOKENS
    measured = evaluations(directory / "journal.jsonl", total)
    curve = [(step * a_step, measured[step].get("loss_per_token")) for step in sorted(measured)]
    return {"curve": curve, "tokens": total * case.replicas * _BATCH * _TOKENS}


def measure_loss(total: int, out: Path, first: int | None = None) -> None:
    """All cases, or the first so many, each once."""
    out.mkdir(parents=True, exist_ok=True)
    for case in cases(total)[:first]:
        result_path = out / f"{case.name.replace(' ', '_').replace(',', '')}-{total}.json"
        if result_path.exists():
            continue
        with tempfile.TemporaryDirectory() as name:
            result = trained(case, total, Path(name))
        result_path.write_text(json.dumps({"case": asdict(case), **result}) + "\n")
    show(total, out)


def show(total: int, out: Path) -> None:
    """A table of all that is there, and a plot beside it."""
    curves: dict[Case, list[tuple[float, float]]] = {}
    rows: list[list[str]] = []
    base: dict[int, float] = {}
    for case in cases(total):
        result_path = out / f"{case.name.replace(' ', '_').replace(',', '')}-{total}.json"
        if not result_path.exists():
            continue
        result = json.loads(result_path.read_text())
        curve = [(float(x), float(y)) for x, y in result["curve"] if y is not None]
        curves[case] = curve
        loss = curve[-1][1]
        base.setdefault(case.replicas, loss)
        worse = f"{100 * (loss / base[case.replicas] - 1):+.2f} %"
        rows.append([case.name, f"{result['tokens'] / 1e6:.2f} M", f"{loss:.4f}", worse])
    print_heading("loss on held-out text, against the synchronous run on as many tokens")
    print_table(["run", "tokens", "loss", "against it"], rows)
    plot = out / "loss.svg"
    plot.write_text(plotted(curves))
    print(f"curves: {plot}")


_COLORS: Final = {0: "#111", 30: "#c2410c", 100: "#1d4ed8", 500: "#15803d"}
_DASHES: Final = {
    "moments reset": "6 3", "int8": "2 2", "int4": "9 2 2 2", "topk": "1 4",
    "outer momentum": "14 4",
}  # fmt: skip
_PLOTTED_LOSS: Final = (3.5, 5.5)


def plotted(curves: Mapping[Case, Sequence[tuple[float, float]]]) -> str:
    """Loss by tokens as SVG text, a panel for each number of replicas."""
    low, high = _PLOTTED_LOSS
    marks = [(low + n / 2, f"{low + n / 2:g}") for n in range(int(2 * (high - low)) + 1)]
    panels = []
    for replicas in sorted({case.replicas for case in curves}):
        curves_shown = {case: curve for case, curve in curves.items() if case.replicas == replicas}
        most = max(x for curve in curves_shown.values() for x, _ in curve)
        millions = [(n * 1e6, f"{n} M") for n in range(int(most / 1e6) + 1)]
        lines = [Line(curve, _style(case)) for case, curve in curves_shown.items()]
        axes = Axis(0.0, most, millions), Axis(low, high, marks)
        panels.append(Panel(f"{replicas} replicas, or their batch in one", *axes, lines))
    inner = {n: f"H={n}" if n else "synchronous" for n in _COLORS}
    return drawn(
        "Held-out loss by tokens",
        [panels],
        legend=[
            *((inner[n], f"stroke:{color}") for n, color in _COLORS.items()),
            *((name, f"stroke:#555;stroke-dasharray:{dash}") for name, dash in _DASHES.items()),
        ],
        x_name="tokens",
        panel_size=(390, 320),
    )


def _style(case: Case) -> str:
    kind = "moments reset" if case.inner_state == "reset" else case.codec
    dash = _DASHES.get("outer momentum" if case.momentum else kind)
    dashed = f";stroke-dasharray:{dash}" if dash else ""
    return f"stroke:{_COLORS[case.inner_steps]}{dashed}"


@dataclass(frozen=True, slots=True)
class Way:
    """How a round travels; without a codec the run is synchronous."""

    codec: str = ""
    averages: str = ""

    @property
    def title(self) -> str:
        if not self.codec:
            return "synchronous, float32"
        return f"H={_H} {self.codec} up, {self.averages} down"

    @property
    def inner_steps(self) -> int:
        """Of a step of the run."""
        return _H if self.codec else 1

    def spec(self, share: int) -> dict[str, Any]:
        """Of four workers, each of which computes one sample in an inner step."""
        block = _STATE_BYTES // share // 12 // 4 * 4
        document: dict[str, Any] = {
            "name": "replicas", "task": "scripted",
            "scripted": {"blocks": 12, "block_bytes": block},
            "batch": {"samples": 1 if self.codec else _HOSTS, "microbatch": 1},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "checkpoint": {"every": 0},
            "evaluate_every": 0,
        }  # fmt: skip
        if self.codec:
            document["replicas"] = {
                "count": _HOSTS, "inner_steps": _H,
                "codec": self.codec, "averages": self.averages,
            }  # fmt: skip
        return document


ON_LINKS: Final = (
    (1000, Way()), (1000, Way("float32", "float32")), (1000, Way("int8", "int8")),
    (100, Way()), (100, Way("int8", "int8")), (100, Way("int4", "int4")),
)  # fmt: skip
WAYS: Final = (
    Way(), Way("float32", "float32"), Way("bfloat16", "bfloat16"), Way("int8", "int8"),
    Way("int4", "int4"), Way("topk", "int4"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """What one step takes, of a run or of its rounds; bytes are those of one host's link."""

    ms: float
    sent_bytes: float
    received_bytes: float


def a_step(spec: dict[str, Any], mbit: int, inner_ms: float, steps: int, directory: Path) -> Step:
    """A run of so many steps more than one, less one of one step, divided by them.

    Args:
        spec: The run's, but for its steps.
        mbit: Speed of each host's link.
        inner_ms: Of a microbatch on a device.
        steps: How many.
        directory: An empty one.
    """
    with Network([mbit] * _HOSTS) as network:
        cluster = Cluster([scripted(inner_ms)] * _HOSTS, directory, hosts=network.hosts)
        with cluster:
            measurements = []
            for count in (1, 1 + steps):
                before = [host.counted_bytes() for host in network.hosts]
                interval = cluster.run({**spec, "steps": count})
                after = [host.counted_bytes() for host in network.hosts]
                # The coordinator is on the first one's host, and that worker's bytes on no link.
                sent, received = (
                    sum(new[way] - old[way] for new, old in zip(after[1:], before[1:], strict=True))
                    for way in (0, 1)
                )
                measurements.append((interval.end_us - interval.start_us, sent, received))
    took_us, sent, received = (b - a for a, b in zip(*measurements, strict=True))
    hosts = _HOSTS - 1
    return Step(took_us / 1e3 / steps, sent / steps / hosts, received / steps / hosts)


def measure_utilization(share: int, rounds: int) -> None:
    """Each kind of link once."""
    if reason := why_not():
        sys.exit(reason)
    print_heading(f"devices at work, 4 hosts, state of 540 MB and 664 ms a step, both over {share}")
    rows = []
    inner_ms = _INNER_MS / share
    for mbit, way in ON_LINKS:
        with tempfile.TemporaryDirectory() as name:
            steps = rounds if way.codec else 5 * rounds  # they are so much shorter
            step = a_step(way.spec(share), mbit, inner_ms, steps, Path(name))
        part = f"{100 * way.inner_steps * inner_ms / step.ms:.1f} %"
        print(mbit, way.title, part, flush=True)
        rows.append([f"{mbit} Mbit/s, {way.title}", part, f"{step.sent_bytes / 1e6:.2f} MB"])
    print_table(["link and codecs", "computing", "sent a round or step by each"], rows)


def measure_traffic(share: int, rounds: int) -> None:
    """Bytes of a sample that pass through the coordinator, against a synchronous run."""
    print_heading(f"bytes through the coordinator for a sample, state of 540 MB over {share}")
    rows = []
    base = 0.0
    for way in WAYS:
        with tempfile.TemporaryDirectory() as name:
            moved = through_coordinator(way, share, rounds, Path(name)) / way.inner_steps
        base = base or moved
        print(way.title, f"1/{base / moved:.0f}", flush=True)
        rows.append([way.title, f"{moved / _HOSTS / 1e3:.2f} kB", f"1/{base / moved:.0f}"])
    print_table(["run", "to and from it", "against it"], rows)


def through_coordinator(way: Way, share: int, steps: int, directory: Path) -> float:
    """Bytes of a step, both ways, over all workers: of so many steps beyond a first run of one."""
    totals = []
    device = scripted(_STEP_MS / way.inner_steps)
    with Cluster([device] * _HOSTS, directory) as cluster:
        for count in (1, 1 + steps):
            before = sum(cluster.through_coordinator())
            cluster.run({**way.spec(share), "steps": count})
            totals.append(sum(cluster.through_coordinator()) - before)
    return (totals[1] - totals[0]) / steps


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("what", choices=["loss", "show", "utilization", "traffic"])
    parser.add_argument("--inner-steps-in-all", type=int, default=2000)
    parser.add_argument("--first", type=int, help="no more cases than these")
    parser.add_argument("--out", type=Path, default=Path("replicas"))
    parser.add_argument("--share", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    match options.what:
        case "loss":
            measure_loss(options.inner_steps_in_all, options.out, options.first)
        case "show":
            show(options.inner_steps_in_all, options.out)
        case "traffic":
            measure_traffic(options.share, options.rounds)
        case _:
            measure_utilization(options.share, options.rounds)


if __name__ == "__main__":
    main()
