"""Runs with replicas: what they cost in quality, and how busy they keep machines on slow links.

    python -m benchmarks.replicas loss [--inner-steps-in-all N] [--first N] [--out DIR]
    python -m benchmarks.replicas utilisation [--share N] [--rounds N]

`loss` trains `small-llama` synchronously and with K replicas, H inner steps and a codec, all on the
same number of tokens; it writes each result as soon as it is there, and goes on where it was
interrupted. `utilisation` needs root: four hosts with links of a given speed (`benchmarks.hosts`),
devices that only wait, and a state of 540 MB and its inner steps divided by `--share`: all that
decides the figure shrinks alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import Cluster, scripted
from benchmarks.hosts import Network, why_not
from benchmarks.machine import print_heading, print_table

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


@dataclass(frozen=True, slots=True)
class Case:
    """One training; `inner_steps` 0 is the synchronous run on as many tokens."""

    replicas: int
    inner_steps: int
    inner_state: str = "carry"
    codec: str = "float32"

    @property
    def name(self) -> str:
        if not self.inner_steps:
            return f"synchronous, batch of {self.replicas}"
        return f"K={self.replicas} H={self.inner_steps} {self.inner_state} {self.codec}"

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
            f"inner_state: {self.inner_state}, codec: {self.codec}}}"
        )


def cases(total: int) -> list[Case]:
    """All that is compared, the most telling first; only those of whole rounds."""
    found = []
    for replicas in (2, 4):
        found.append(Case(replicas, 0))
        for inner_steps in (30, 100, 500):
            found += [Case(replicas, inner_steps), Case(replicas, inner_steps, "reset")]
            found += [
                Case(replicas, inner_steps, "carry", codec) for codec in ("int8", "int4", "topk")
            ]
    return [case for case in found if total >= 2 * max(case.inner_steps, 1)]


def trained(case: Case, total: int, directory: Path) -> dict[str, Any]:
    """Train; gives the held-out loss at the end and on the way, by tokens."""
    command = [
        sys.executable, "-m", "coordinator", "--run", str(_SPEC), "--expect-workers", "1",
        "--local-workers", "1", "--out", str(directory),
    ]  # fmt: skip
    for setting in case.settings(total):
        command += ["--set", setting]
    subprocess.run(command, check=True, cwd=_ROOT, stdout=subprocess.DEVNULL)  # noqa: S603
    (journal,) = directory.rglob("journal.jsonl")
    a_step = case.replicas * max(case.inner_steps, 1) * _BATCH * _TOKENS
    curve = []
    for line in journal.read_text().splitlines():
        record = json.loads(line)
        record = record.get("record", record)
        if record.get("kind") == "evaluation":
            loss = record["metrics"].get("loss_per_token")
            curve.append((record["step"] * a_step, loss))
    return {"curve": curve, "tokens": total * case.replicas * _BATCH * _TOKENS}


def measure_loss(total: int, out: Path, first: int | None = None) -> None:
    """All cases, or the first so many, each once."""
    out.mkdir(parents=True, exist_ok=True)
    for case in cases(total)[:first]:
        kept = out / f"{case.name.replace(' ', '_').replace(',', '')}-{total}.json"
        if kept.exists():
            continue
        with tempfile.TemporaryDirectory() as name:
            result = trained(case, total, Path(name))
        kept.write_text(json.dumps({"case": asdict(case), **result}) + "\n")
    show(total, out)


def show(total: int, out: Path) -> None:
    """A table of all that is there, and a plot beside it."""
    curves: dict[str, list[tuple[float, float]]] = {}
    rows: list[list[str]] = []
    base: dict[int, float] = {}
    for case in cases(total):
        kept = out / f"{case.name.replace(' ', '_').replace(',', '')}-{total}.json"
        if not kept.exists():
            continue
        result = json.loads(kept.read_text())
        curve = [(float(x), float(y)) for x, y in result["curve"] if y is not None]
        curves[case.name] = curve
        loss = curve[-1][1]
        base.setdefault(case.replicas, loss)
        worse = f"{100 * (loss / base[case.replicas] - 1):+.2f} %"
        rows.append([case.name, f"{result['tokens'] / 1e6:.2f} M", f"{loss:.4f}", worse])
    print_heading("loss on held-out text, against the synchronous run on as many tokens")
    print_table(["run", "tokens", "loss", "against it"], rows)
    plot = out / "loss.svg"
    plot.write_text(drawn(curves))
    print(f"curves: {plot}")


def drawn(curves: dict[str, list[tuple[float, float]]]) -> str:
    """Loss by tokens, a line for each run, as SVG text."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "<svg xmlns='http://www.w3.org/2000/svg'/>"
    (left, right), (low, high) = (
        (min(p[axis] for p in points), max(p[axis] for p in points)) for axis in (0, 1)
    )

    def at(point: tuple[float, float]) -> str:
        x = 60 + 640 * (point[0] - left) / (right - left or 1)
        y = 400 - 370 * (point[1] - low) / (high - low or 1)
        return f"{x:.1f},{y:.1f}"

    parts = ["<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1000 440' font-size='12'>"]
    for number, (name, curve) in enumerate(curves.items()):
        colour = f"hsl({number * 360 // len(curves)},70%,40%)"
        line = " ".join(map(at, curve))
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}'/>")
        parts.append(f"<text x='710' y='{20 + 16 * number}' fill='{colour}'>{escape(name)}</text>")
    parts.append(f"<text x='60' y='430'>tokens: {left:g} to {right:g}</text>")
    parts.append(f"<text x='4' y='20'>loss: {low:.3f} to {high:.3f}</text></svg>")
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Link:
    """How a round travels."""

    mbit: int
    codec: str
    averages: str


LINKS: Final = (
    Link(1000, "float32", "float32"), Link(1000, "int8", "int8"),
    Link(100, "int8", "int8"), Link(100, "int4", "int4"),
)  # fmt: skip


def busy(link: Link, share: int, rounds: int, directory: Path) -> tuple[float, float]:
    """The share of time in which the four devices compute, and bytes sent by each a round."""
    inner_ms, block = _INNER_MS / share, _STATE_BYTES // share // 12 // 4 * 4
    spec = {
        "name": "replicas", "task": "scripted",
        "scripted": {"blocks": 12, "block_bytes": block},
        "batch": {"samples": 1, "microbatch": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "replicas": {
            "count": 4, "inner_steps": _H, "codec": link.codec, "averages": link.averages,
        },
        "checkpoint": {"every": 0},
    }  # fmt: skip
    with Network([link.mbit] * 4) as network:
        cluster = Cluster([scripted(inner_ms)] * 4, directory, hosts=network.hosts)
        with cluster:
            took, sent = [], []
            for steps in (1, 1 + rounds):
                before = [host.counted_bytes()[0] for host in network.hosts]
                interval = cluster.run({**spec, "steps": steps})
                took.append((interval.end_us - interval.start_us) / 1e3)
                after = [host.counted_bytes()[0] for host in network.hosts]
                sent.append(sum(after[1:]) - sum(before[1:]))
    round_ms = (took[1] - took[0]) / rounds
    return _H * inner_ms / round_ms, (sent[1] - sent[0]) / rounds / 3


def measure_utilisation(share: int, rounds: int) -> None:
    """Each kind of link once."""
    if reason := why_not():
        sys.exit(reason)
    print_heading(f"devices at work, 4 hosts, state of 540 MB and 664 ms a step, both over {share}")
    rows = []
    for link in LINKS:
        with tempfile.TemporaryDirectory() as name:
            part, sent = busy(link, share, rounds, Path(name))
        print(link, f"{100 * part:.1f} %", flush=True)
        title = f"{link.mbit} Mbit/s, {link.codec} up, {link.averages} down"
        rows.append([title, f"{100 * part:.1f} %", f"{sent / 1e6:.2f} MB"])
    print_table(["link and codecs", "computing", "sent a round by each"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("what", choices=["loss", "show", "utilisation"])
    parser.add_argument("--inner-steps-in-all", type=int, default=2000)
    parser.add_argument("--first", type=int, help="no more cases than these")
    parser.add_argument("--out", type=Path, default=Path("replicas"))
    parser.add_argument("--share", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    match given.what:
        case "loss":
            measure_loss(given.inner_steps_in_all, given.out, given.first)
        case "show":
            show(given.inner_steps_in_all, given.out)
        case _:
            measure_utilisation(given.share, given.rounds)


if __name__ == "__main__":
    main()
