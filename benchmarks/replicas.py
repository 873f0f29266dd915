"""Runs with replicas: their loss, their traffic, and how busy they keep machines on slow links.

    python -m benchmarks.replicas loss [--inner-steps-in-all N] [--first N] [--out DIR]
    python -m benchmarks.replicas show [--inner-steps-in-all N] [--out DIR]
    python -m benchmarks.replicas utilization [--share N] [--rounds N]
    python -m benchmarks.replicas traffic [--share N] [--rounds N]

`loss` trains `small-llama` synchronously and with K replicas, H inner steps and a codec, all on the
same number of tokens. It writes each result at once, and continues an interrupted measurement.
`show` prints these results and trains no model. The other commands use four workers whose devices
only wait. `utilization` needs root, for hosts with links of limited speed (`benchmarks.hosts`); it
divides a state of 540 MB and its inner steps by `--share`, so all times that determine the result
shrink alike. `traffic` counts the bytes on the coordinator's connections per sample.
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

from benchmarks.cluster import Cluster, run_to_end, scripted_worker
from benchmarks.hosts import Network, why_unavailable
from benchmarks.machine import print_heading, print_table
from benchmarks.plot import Axis, Line, Panel, draw_panels
from coordinator.storage.directory.journal import read_evaluations

_ROOT: Final = Path(__file__).parents[1]
_SPEC: Final = _ROOT / "deploy" / "runs" / "small-llama.yaml"
_BATCH: Final = 12
"""Samples per replica in an inner step."""
_TOKENS: Final = 64
"""Tokens of a sample."""
_STATE_BYTES: Final = 540_000_000
_INNER_MS: Final = 664.0
"""Duration of an inner step on 32k tokens, with 135 M parameters at 40 TFLOP/s."""
_ROUND_INNER_STEPS: Final = 500
_HOSTS: Final = 4
_STEP_MS: Final = 100.0
"""Time of a device in a step or round whose traffic is counted: long enough that each worker
computes its own sample. One worker with two samples would send their sum, which is fewer bytes.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A training configuration; `inner_steps` 0: a synchronous run on the same number of tokens.

    Without `momentum` the outer update adopts the average of all replicas. With it the outer update
    is the run spec's default, DiLoCo's Nesterov momentum, which needs many rounds.
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
        """Return overrides of the run spec, for a total number of inner steps."""
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
    """Return the cases that have at least two rounds, the most informative first."""
    all_cases = [Case(2, 0)]
    all_cases += [Case(2, inner_steps) for inner_steps in (100, 500, 30)]
    all_cases += [Case(2, inner_steps, momentum=True) for inner_steps in (30, 100, 500)]
    all_cases += _lossy_cases(2, 100)
    all_cases += [Case(2, inner_steps, "reset") for inner_steps in (100, 500, 30)]
    all_cases += [Case(4, 0), *(Case(4, inner_steps) for inner_steps in (100, 500, 30))]
    all_cases += [*_lossy_cases(2, 500), *_lossy_cases(2, 30)]
    all_cases += [Case(4, inner_steps, "reset") for inner_steps in (100, 500, 30)]
    all_cases += [case for inner_steps in (100, 500, 30) for case in _lossy_cases(4, inner_steps)]
    return [case for case in all_cases if total >= 2 * max(case.inner_steps, 1)]


def _lossy_cases(replicas: int, inner_steps: int) -> list[Case]:
    lossy_codecs = ("int8", "int4", "topk")
    return [Case(replicas, inner_steps, "carry", codec) for codec in lossy_codecs]


def train_case(case: Case, total: int, directory: Path) -> dict[str, Any]:
    """Train a case; return its evaluation losses by number of tokens, and all tokens trained."""
    run_to_end(_SPEC, directory, [*case.settings(total)])
    tokens_per_step = case.replicas * max(case.inner_steps, 1) * _BATCH * _TOKENS
    evaluations_by_step = read_evaluations(directory / "journal.jsonl", total)
    curve = [
        (step * tokens_per_step, evaluations_by_step[step].get("loss_per_token"))
        for step in sorted(evaluations_by_step)
    ]
    return {"curve": curve, "tokens": total * case.replicas * _BATCH * _TOKENS}


def measure_loss(total: int, out: Path, count: int | None = None) -> None:
    """Train all cases, or the first `count`, each once."""
    out.mkdir(parents=True, exist_ok=True)
    for case in cases(total)[:count]:
        result_path = out / f"{case.name.replace(' ', '_').replace(',', '')}-{total}.json"
        if result_path.exists():
            continue
        with tempfile.TemporaryDirectory() as name:
            result = train_case(case, total, Path(name))
        result_path.write_text(json.dumps({"case": asdict(case), **result}) + "\n")
    print_results(total, out)


def print_results(total: int, out: Path) -> None:
    """Print a table of all results, and write a plot."""
    curves: dict[Case, list[tuple[float, float]]] = {}
    rows: list[list[str]] = []
    synchronous_loss: dict[int, float] = {}
    for case in cases(total):
        result_path = out / f"{case.name.replace(' ', '_').replace(',', '')}-{total}.json"
        if not result_path.exists():
            continue
        result = json.loads(result_path.read_text())
        curve = [(float(x), float(y)) for x, y in result["curve"] if y is not None]
        curves[case] = curve
        loss = curve[-1][1]
        synchronous_loss.setdefault(case.replicas, loss)
        excess = f"{100 * (loss / synchronous_loss[case.replicas] - 1):+.2f} %"
        rows.append([case.name, f"{result['tokens'] / 1e6:.2f} M", f"{loss:.4f}", excess])
    print_heading("evaluation loss, against the synchronous run on the same number of tokens")
    print_table(["run", "tokens", "loss", "to synchronous"], rows)
    plot = out / "loss.svg"
    plot.write_text(plot_curves(curves))
    print(f"curves: {plot}")


_COLORS: Final = {0: "#111", 30: "#c2410c", 100: "#1d4ed8", 500: "#15803d"}
_DASHES: Final = {
    "moments reset": "6 3", "int8": "2 2", "int4": "9 2 2 2", "topk": "1 4",
    "outer momentum": "14 4",
}  # fmt: skip
_PLOTTED_LOSS: Final = (3.5, 5.5)


def plot_curves(curves: Mapping[Case, Sequence[tuple[float, float]]]) -> str:
    """Return loss by tokens as SVG text, a panel for each number of replicas."""
    lowest, highest = _PLOTTED_LOSS
    loss_ticks = [
        (lowest + tick / 2, f"{lowest + tick / 2:g}")
        for tick in range(int(2 * (highest - lowest)) + 1)
    ]
    panels = []
    for replicas in sorted({case.replicas for case in curves}):
        curves_shown = {case: curve for case, curve in curves.items() if case.replicas == replicas}
        max_tokens = max(x for curve in curves_shown.values() for x, _ in curve)
        token_ticks = [(tick * 1e6, f"{tick} M") for tick in range(int(max_tokens / 1e6) + 1)]
        lines = [Line(curve, _style(case)) for case, curve in curves_shown.items()]
        axes = Axis(0.0, max_tokens, token_ticks), Axis(lowest, highest, loss_ticks)
        panels.append(Panel(f"{replicas} replicas, or one with their batch", *axes, lines))
    inner_labels = {
        inner_steps: f"H={inner_steps}" if inner_steps else "synchronous" for inner_steps in _COLORS
    }
    return draw_panels(
        "Held-out loss by tokens",
        [panels],
        legend=[
            *(
                (inner_labels[inner_steps], f"stroke:{color}")
                for inner_steps, color in _COLORS.items()
            ),
            *((name, f"stroke:#555;stroke-dasharray:{dash}") for name, dash in _DASHES.items()),
        ],
        x_name="tokens",
        panel_size=(390, 320),
    )


def _style(case: Case) -> str:
    variant = "moments reset" if case.inner_state == "reset" else case.codec
    dash = _DASHES.get("outer momentum" if case.momentum else variant)
    dash_style = f";stroke-dasharray:{dash}" if dash else ""
    return f"stroke:{_COLORS[case.inner_steps]}{dash_style}"


@dataclass(frozen=True, slots=True)
class RoundCodec:
    """The codecs of a round's messages; without a codec the run is synchronous."""

    codec: str = ""
    averages: str = ""

    @property
    def title(self) -> str:
        if not self.codec:
            return "synchronous, float32"
        return f"H={_ROUND_INNER_STEPS} {self.codec} up, {self.averages} down"

    @property
    def inner_steps(self) -> int:
        """Return the inner steps in a step of the run."""
        return _ROUND_INNER_STEPS if self.codec else 1

    def spec(self, share: int) -> dict[str, Any]:
        """Return a run spec for four workers with one sample each per inner step."""
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
                "count": _HOSTS, "inner_steps": _ROUND_INNER_STEPS,
                "codec": self.codec, "averages": self.averages,
            }  # fmt: skip
        return document


LINK_CASES: Final = (
    (1000, RoundCodec()), (1000, RoundCodec("float32", "float32")),
    (1000, RoundCodec("int8", "int8")),
    (100, RoundCodec()), (100, RoundCodec("int8", "int8")), (100, RoundCodec("int4", "int4")),
)  # fmt: skip
ROUND_CODECS: Final = (
    RoundCodec(), RoundCodec("float32", "float32"), RoundCodec("bfloat16", "bfloat16"),
    RoundCodec("int8", "int8"), RoundCodec("int4", "int4"), RoundCodec("topk", "int4"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step or round; bytes are those of one host's link."""

    ms: float
    sent_bytes: float
    received_bytes: float


def measure_step(
    spec: dict[str, Any], mbit: int, inner_ms: float, steps: int, directory: Path
) -> StepCost:
    """Measure a step: the difference between a run of many steps and one of one step, per step.

    Args:
        spec: The run spec, without its steps.
        mbit: Speed of each host's link.
        inner_ms: Time of a microbatch on a device.
        steps: Number of steps.
        directory: An empty directory.
    """
    with Network([mbit] * _HOSTS) as network:
        cluster = Cluster([scripted_worker(inner_ms)] * _HOSTS, directory, hosts=network.hosts)
        with cluster:
            measurements = []
            for count in (1, 1 + steps):
                bytes_before = [host.counted_bytes() for host in network.hosts]
                interval = cluster.run({**spec, "steps": count})
                bytes_after = [host.counted_bytes() for host in network.hosts]
                # The coordinator is on the first host, whose worker's bytes use no link.
                sent_bytes, received_bytes = (
                    sum(
                        new_count[direction] - old_count[direction]
                        for new_count, old_count in zip(
                            bytes_after[1:], bytes_before[1:], strict=True
                        )
                    )
                    for direction in (0, 1)
                )
                measurements.append(
                    (interval.end_us - interval.start_us, sent_bytes, received_bytes)
                )
    took_us, sent_bytes, received_bytes = (
        longer - shorter for shorter, longer in zip(*measurements, strict=True)
    )
    hosts = _HOSTS - 1
    return StepCost(
        took_us / 1e3 / steps, sent_bytes / steps / hosts, received_bytes / steps / hosts
    )


def measure_utilization(share: int, rounds: int) -> None:
    """Measure each case of `LINK_CASES` once."""
    if reason := why_unavailable():
        sys.exit(reason)
    print_heading(f"devices at work, 4 hosts, state of 540 MB and 664 ms a step, both over {share}")
    rows = []
    inner_ms = _INNER_MS / share
    for mbit, codec in LINK_CASES:
        with tempfile.TemporaryDirectory() as name:
            steps = rounds if codec.codec else 5 * rounds  # synchronous steps are shorter
            step = measure_step(codec.spec(share), mbit, inner_ms, steps, Path(name))
        part = f"{100 * codec.inner_steps * inner_ms / step.ms:.1f} %"
        print(mbit, codec.title, part, flush=True)
        rows.append([f"{mbit} Mbit/s, {codec.title}", part, f"{step.sent_bytes / 1e6:.2f} MB"])
    print_table(["link and codecs", "computing", "sent per round or step and host"], rows)


def measure_traffic(share: int, rounds: int) -> None:
    """Print the bytes per sample that pass through the coordinator, against a synchronous run."""
    print_heading(f"bytes through the coordinator for a sample, state of 540 MB over {share}")
    rows = []
    synchronous_bytes = 0.0
    for codec in ROUND_CODECS:
        with tempfile.TemporaryDirectory() as name:
            moved_bytes = (
                coordinator_bytes_per_step(codec, share, rounds, Path(name)) / codec.inner_steps
            )
        synchronous_bytes = synchronous_bytes or moved_bytes
        print(codec.title, f"1/{synchronous_bytes / moved_bytes:.0f}", flush=True)
        rows.append(
            [
                codec.title,
                f"{moved_bytes / _HOSTS / 1e3:.2f} kB",
                f"1/{synchronous_bytes / moved_bytes:.0f}",
            ]
        )
    print_table(["run", "to and from the coordinator", "to synchronous"], rows)


def coordinator_bytes_per_step(codec: RoundCodec, share: int, steps: int, directory: Path) -> float:
    """Return a step's bytes in both directions over all workers: a long run minus a run of one
    step."""
    totals = []
    device = scripted_worker(_STEP_MS / codec.inner_steps)
    with Cluster([device] * _HOSTS, directory) as cluster:
        for count in (1, 1 + steps):
            bytes_before = sum(cluster.coordinator_traffic())
            cluster.run({**codec.spec(share), "steps": count})
            totals.append(sum(cluster.coordinator_traffic()) - bytes_before)
    return (totals[1] - totals[0]) / steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the module documents it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("what", choices=["loss", "show", "utilization", "traffic"])
    parser.add_argument("--inner-steps-in-all", type=int, default=2000)
    parser.add_argument("--first", type=int, help="limit for the number of cases")
    parser.add_argument("--out", type=Path, default=Path("replicas"))
    parser.add_argument("--share", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    match options.what:
        case "loss":
            measure_loss(options.inner_steps_in_all, options.out, options.first)
        case "show":
            print_results(options.inner_steps_in_all, options.out)
        case "traffic":
            measure_traffic(options.share, options.rounds)
        case _:
            measure_utilization(options.share, options.rounds)


if __name__ == "__main__":
    main()
