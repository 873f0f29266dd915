"""A run spec like those that `fit` creates."""

from __future__ import annotations

from protocol.spec.run_spec import parse_run_spec

SPEC = parse_run_spec({
    "task": "samestep.script:FitTask", "steps": 1, "batch": {"samples": 4, "microbatch": 2},
    "optimizer": {"name": "sgd", "lr": 0.1},
})  # fmt: skip
