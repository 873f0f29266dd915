"""A student's evaluation metrics with and without its teacher's logits, after equal steps.

SmolLM2-135M runs once over some of Python's own modules (deploy/runs/smollm2-teacher.yaml). Then a
small Llama (llama-student.yaml, with fewer and smaller steps) trains with the `distil.alpha` of
that file and with 0, which uses only the tokens, on the same samples in the same order. Results are
stored in the directory, and the command continues an interrupted measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.cluster import run_to_end
from benchmarks.machine import print_heading, print_table

_RUNS = Path(__file__).parents[1] / "deploy" / "runs"
_QUICK_SETTINGS = ("steps=40", "batch.samples=8", "evaluate_every=0", "threads=2")
"""A few minutes per seed: nearly all of a step is the vocabulary of 49,152 tokens."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train the student; `settings` are overrides of run spec keys."""

    name: str
    settings: tuple[str, ...] = ()


VARIANTS = (Variant("with"), Variant("without", ("distil.alpha=0",)))


def train_students(
    directory: Path, student: Path, seed: int, changes: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Train both variants with one seed; return the content of result.json by variant."""
    settings = (*changes, f"seed={seed}", f"data.train={directory / 'teacher' / 'logits'}")
    return {
        variant.name: run_to_end(
            student, directory / f"seed-{seed}-{variant.name}", (*settings, *variant.settings)
        )
        for variant in VARIANTS
    }


def row(seed: str, metrics: dict[str, dict[str, float]], minutes: float) -> list[str]:
    """Return a row of the table."""
    with_teacher, without_teacher = (metrics[variant.name] for variant in VARIANTS)
    return [
        seed,
        f"{with_teacher['perplexity']:.1f}",
        f"{without_teacher['perplexity']:.1f}",
        f"{with_teacher['perplexity'] / without_teacher['perplexity']:.3f}",
        f"{with_teacher['divergence_per_token']:.3f}",
        f"{without_teacher['divergence_per_token']:.3f}",
        f"{minutes:.1f}",
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path, help="directory of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--teacher", type=Path, default=_RUNS / "smollm2-teacher.yaml")
    parser.add_argument("--student", type=Path, default=_RUNS / "llama-student.yaml")
    parser.add_argument("--set", nargs="*", default=_QUICK_SETTINGS, help="keys of the student")
    options = parser.parse_args()
    print_heading("A student with and without its teacher's logits, at equal steps")
    directory = options.directory.resolve()
    capture_result = run_to_end(options.teacher, directory / "teacher", ())
    print(f"captured in {capture_result['wall_s'] / 60:.1f} minutes", flush=True)
    lines, metrics_by_seed = [], []
    for seed in options.seeds:
        results = train_students(directory, options.student, seed, options.set)
        metrics = {name: result["eval"] for name, result in results.items()}
        metrics_by_seed.append(metrics)
        minutes = sum(result["wall_s"] for result in results.values()) / 60
        lines.append(row(str(seed), metrics, minutes))
        print(f"seed {seed}: {lines[-1]}", flush=True)
    means = {
        variant.name: {
            name: mean(metrics[variant.name][name] for metrics in metrics_by_seed)
            for name in metrics_by_seed[0][variant.name]
        }
        for variant in VARIANTS
    }
    lines.append(row("mean, total minutes", means, sum(float(line[-1]) for line in lines)))
    header = [
        "seed",
        "perplexity with",
        "perplexity without",
        "ratio",
        "divergence with",
        "divergence without",
        "minutes",
    ]
    print_table(header, lines)


if __name__ == "__main__":
    main()
