"""Every task with every launch method: the digest of one undisturbed worker.

The slow tests have the whole table, the default suite a few pairs of very different tasks.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.spec.manifest import CaptureLayout
from tests import processes
from tests.cluster import Cluster
from tests.samestep.scripts import HEAD, RunningScript, close, standard_error_of
from tests.sample_capture import write_capture
from tests.small_chat import write_chat_run, write_dpo_run
from tests.small_decoder import write_decoder_run

STEPS = 3
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
BATCH = {"samples": 8, "microbatch": 2}


def write_run(directory: Path, **document: Any) -> Path:
    path = directory / "run.yaml"
    path.write_text(json.dumps({"seed": 7, "steps": STEPS, "batch": BATCH, **document}))
    return path


def teacher_run(directory: Path) -> Path:
    text = directory / "text.txt"
    text.write_text("".join(f"{n} and {n % 7} is {n + n % 7}.\n" for n in range(120)))
    return write_run(
        directory, task="teacher-logits", model={"config": LLAMA}, tokenizer={"vocab_size": 300},
        data={"train": str(text), "max_tokens": 32}, capture={"top_k": 16},
    )  # fmt: skip


def student_run(directory: Path) -> Path:
    layout = CaptureLayout(tokens=12, vocabulary=50, top_k=4)
    logits = write_capture(directory / "teacher", layout, 3, steps_per_file=4)
    return write_run(
        directory, task="distil", model={"config": LLAMA},
        data={"train": str(logits), "holdout": 0.25},
    )  # fmt: skip


def quantized_decoder_run(directory: Path, **model: Any) -> Path:
    """Write a causal-lm run with these changes of its section `model`."""
    path = write_decoder_run("causal-lm", directory, steps=STEPS)
    document = json.loads(path.read_text())
    document["model"] |= model
    path.write_text(json.dumps(document))
    return path


REPLICAS = {"count": 2, "inner_steps": 2}
TASKS: dict[str, Callable[[Path], Path]] = {
    "regress": lambda d: write_run(d, task="regress", regress={"samples": 64}),
    "digits": lambda d: write_run(d, task="digits", digits={"hidden": [8, 8], "dropout": 0.1}),
    "classify": lambda d: write_decoder_run("classify", d, steps=STEPS),
    "causal-lm, base in int8": quantized_decoder_run,
    "causal-lm, in float16": lambda d: quantized_decoder_run(
        d, base_dtype="float32", precision="float16"
    ),
    "chat": lambda d: write_chat_run(d, steps=STEPS),
    "dpo": lambda d: write_dpo_run(d, steps=STEPS),
    "teacher-logits": teacher_run,
    "distil": student_run,
    "a custom task": lambda d: write_run(d, task="tests.frozen_base_task:FrozenBase"),
    "buffers that forward changes": lambda d: write_run(
        d, task="tests.buffers_task:BuffersTask", batch=BATCH | {"unit": "microbatch"}
    ),
    "replicas": lambda d: write_run(d, task="regress", regress={"samples": 64}, replicas=REPLICAS),
    "canonical": lambda d: write_run(d, task="digits", arithmetic={"mode": "canonical"}),
}

ANY_PORT = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0")


def digest_in(out: Path) -> object:
    """Return the digest of the weights; of a capture, of the files with logits."""
    result = json.loads((out / "result.json").read_text())
    assert result["outcome"] == "finished"
    assert result["exact"]
    exported = result["exported"]
    logits = {name: digest for name, digest in exported.items() if name.startswith("logits/")}
    return logits or result["weights_digest"]


def run_locally(directory: Path, run: Path, devices: int, *extra_arguments: str) -> object:
    out = directory / "out"
    completed = processes.run_to_end(
        "coordinator", *ANY_PORT, "--run", str(run), "--out", str(out),
        "--local-workers", str(devices), "--backend", "cpu", *extra_arguments,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert "Traceback" not in completed.stderr
    return digest_in(out)


def run_on_one_device(directory: Path, run: Path) -> object:
    return run_locally(directory, run, 1)


def run_on_two_devices(directory: Path, run: Path) -> object:
    return run_locally(directory, run, 2)


def run_on_two_workers(directory: Path, run: Path) -> object:
    with Cluster(directory, "--expect-workers", "2", "--run", str(run)) as cluster:
        for name in ("ann", "bob"):
            cluster.start_worker(name, "--backend", "cpu")
        cluster.result()
        return digest_in(directory / "out")


def resume_run(directory: Path, run: Path) -> object:
    """Kill the coordinator after the worker's first step, and start both again."""
    with Cluster(directory, "--expect-workers", "1", "--run", str(run)) as cluster:
        hold = cluster.start_paused_worker("ann", 1, "--backend", "cpu")
        hold.wait_until_paused()
        cluster.coordinator.send_signal(signal.SIGKILL)
        cluster.wait_for_exit(cluster.coordinator)
    return run_locally(directory, run, 1, "--resume")


def submit_run(directory: Path, run: Path) -> object:
    with Cluster(directory, "--expect-workers", "2") as cluster:
        cluster.start_worker("ann", "--backend", "cpu", "--gpus", "0,1")
        control = ("--control", cluster.address["control"])
        submission = processes.run_to_end("coordinator", "submit", str(run), *control)
        assert submission.returncode == 0, submission.stderr
        cluster.wait_for("run_ended")
        (out,) = [path.parent for path in directory.rglob("result.json")]
        return digest_in(out)


LAUNCH_METHODS = {
    "two devices": run_on_two_devices,
    "two workers": run_on_two_workers,
    "resumed": resume_run,
    "submitted": submit_run,
}
QUICK = {("distil", "two devices"), ("replicas", "submitted"), ("teacher-logits", "resumed")}


def table() -> list[Any]:
    return [
        pytest.param(
            task,
            launch,
            marks=() if (task, launch) in QUICK else pytest.mark.slow,
            id=f"{task}, {launch}",
        )
        for task in TASKS
        for launch in LAUNCH_METHODS
    ]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory) -> Callable[[str], tuple[Path, object]]:
    """Return a function that gives the run spec of a task and the digest of one worker."""
    references: dict[str, tuple[Path, object]] = {}

    def find(task: str) -> tuple[Path, object]:
        if task not in references:
            directory = tmp_path_factory.mktemp("undisturbed")
            run = TASKS[task](directory)
            references[task] = run, run_on_one_device(directory, run)
        return references[task]

    return find


@pytest.mark.parametrize(("task", "launch"), table())
def test_digest_equals_one_undisturbed_worker(tmp_path, reference_of, task, launch):
    run, digest = reference_of(task)
    assert LAUNCH_METHODS[launch](tmp_path, run) == digest


SCRIPT = (
    HEAD
    + """
import os
options = {name: eval(os.environ.get(name, "None")) for name in ("workers", "control", "resume")}
options = {name: value for name, value in options.items() if value is not None}
if not options.get("control"):
    options["directory"] = "out"
result = samestep.fit(task, steps=3, batch=8, microbatch=2, device="cpu", **options)
print("digest", result.digest, flush=True)
"""
)


def script_digest(output: str) -> str:
    (digest,) = re.findall(r"^digest (\w{64})$", output, re.MULTILINE)
    return str(digest)


def write_script(directory: Path) -> Path:
    path = directory / "train.py"
    path.write_text(SCRIPT)
    return path


def run_script(directory: Path, **environment: str) -> str:
    process = processes.start(
        "tests.plain_script", str(write_script(directory)), cwd=directory, environment=environment
    )
    output, error_text = process.communicate(timeout=processes.PATIENCE_S)
    assert process.wait() == 0, error_text
    return script_digest(output)


def run_joined_script(directory: Path, workers: int, *arguments: str) -> str:
    script = RunningScript(write_script(directory), {"workers": str(workers)})
    other = script.start_worker("other", "--backend", "cpu", *arguments)
    digest = script_digest(script.wait_for_success())
    assert other.wait(processes.PATIENCE_S) == 0, standard_error_of(other)
    close(other)
    return digest


def join_script_with_a_worker(directory: Path) -> str:
    return run_joined_script(directory, 2, "train.py")


def join_script_with_two_devices(directory: Path) -> str:
    return run_joined_script(directory, 3, "--accept-scripts", "--gpus", "0,1")


def kill_and_resume_script(directory: Path) -> str:
    script = RunningScript(write_script(directory), {"workers": "2"})
    hold, other = script.start_paused_worker("other", 1)
    hold.wait_until_paused()
    script.process.send_signal(signal.SIGKILL)
    script.process.wait(processes.PATIENCE_S)
    other.kill()
    other.wait()
    hold.close()
    close(script.process, other)
    return run_script(directory, resume="True")


def submit_script(directory: Path) -> str:
    with Cluster(directory / "service", "--expect-workers", "1") as cluster:
        return run_script(directory, control=repr(cluster.address["control"]))


@pytest.fixture(scope="module")
def script_reference(tmp_path_factory) -> str:
    return run_script(tmp_path_factory.mktemp("script"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        join_script_with_a_worker,
        join_script_with_two_devices,
        kill_and_resume_script,
        submit_script,
    ],
)
def test_script_has_the_digest_of_its_undisturbed_run(tmp_path, script_reference, launch):
    assert launch(tmp_path) == script_reference
