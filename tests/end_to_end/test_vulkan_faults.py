"""Vulkan workers that are killed, join late, or lose their device: the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import RUNS, Cluster
from tests.commands import run_command
from tests.faulty_vulkan import FaultyVulkan, compile_layer
from tests.small_decoder import write_decoder_run

DIGITS = (
    "--run", str(RUNS / "digits.yaml"), "--set", "steps=12", "--set", "evaluate_every=0",
    "--set", "digits.hidden=[16]", "--set", "batch.samples=24",
)  # fmt: skip
VULKAN = ("--backend", "vulkan")


@pytest.fixture(autouse=True, scope="module")
def _require_device():
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)


@pytest.fixture(
    scope="module",
    params=[
        "digits",
        pytest.param("classify", marks=pytest.mark.slow),
        pytest.param("causal-lm", marks=[pytest.mark.slow, pytest.mark.release]),
    ],
)
def run_options(request, tmp_path_factory) -> tuple[str, ...]:
    """Return the options of a digits run, or of a small Llama with LoRA."""
    if request.param == "digits":
        return DIGITS
    directory = tmp_path_factory.mktemp(request.param)
    return ("--run", str(write_decoder_run(request.param, directory, steps=30)))


@pytest.fixture(scope="module")
def reference(run_options, tmp_path_factory) -> dict[str, Any]:
    """Return the result of one undisturbed worker."""
    with Cluster(
        tmp_path_factory.mktemp("alone"), "--expect-workers", "1", *run_options
    ) as cluster:
        cluster.start_worker("w0", *VULKAN)
        return cluster.result()


def has_reference_result(cluster: Cluster, reference: dict[str, Any]) -> bool:
    """Audit a run; return whether it has the reference result."""
    result = cluster.result()
    audit = run_command("coordinator", "audit", str(cluster.directory / "out"))
    assert audit.returncode == 0, audit.stdout
    assert "samples covered exactly once" in audit.stdout
    assert audit.stdout.rstrip().endswith("sound")
    keys = ("exact", "weights_digest", "losses", "eval")
    return [result[key] for key in keys] == [reference[key] for key in keys]


def part_of_the_device_name() -> str:
    """Return a part of the name of the device that a worker uses by default."""
    adapter_list = adapters()
    assert not isinstance(adapter_list, str)
    return adapter_list[0].name.split()[0].upper()


def error_lines(cluster: Cluster, name: str) -> list[str]:
    """Wait for a worker to fail; return the lines of its standard error."""
    worker = cluster.workers[name]
    assert cluster.wait_for_exit(worker) == 1
    assert worker.stderr is not None
    error_text = worker.stderr.read()
    assert "Traceback" not in error_text, error_text
    return error_text.splitlines()


@pytest.mark.slow
def test_killed_and_late_workers_do_not_change_the_result(tmp_path, run_options, reference):
    with Cluster(tmp_path, "--expect-workers", "2", *run_options) as cluster:
        first, second = (cluster.start_paused_worker(f"w{n}", 6, *VULKAN) for n in range(2))
        first.wait_until_paused()
        second.wait_until_paused()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        # The newcomer needs seconds to import; the run waits for it, or would finish first.
        cluster.start_worker("late", *VULKAN, "--gpus", part_of_the_device_name())
        join_event = cluster.wait_for("worker_joined", worker="late")
        first.release()
        assert join_event["step"] < len(reference["losses"])
        assert has_reference_result(cluster, reference)
        assert cluster.has_reassigned_work(), cluster.event_names()
        assert cluster.result()["workers"]["late"] > 0


def test_lost_and_full_devices_do_not_change_the_result(
    tmp_path, tmp_path_factory, run_options, reference
):
    layer = compile_layer(tmp_path_factory.mktemp("layer"))
    faulty_devices = {
        name: FaultyVulkan(layer, tmp_path / name) for name in ("lost", "full", "never")
    }
    faulty_devices["never"].fill_memory()
    with Cluster(tmp_path / "run", "--expect-workers", "3", *run_options) as cluster:
        steady = cluster.start_paused_worker("steady", "4,8", *VULKAN)
        victim = cluster.start_paused_worker(
            "lost", 8, *VULKAN, environment=faulty_devices["lost"].environment
        )
        for name in ("full", "never"):
            cluster.start_worker(name, *VULKAN, environment=faulty_devices[name].environment)
        steady.wait_until_paused()
        faulty_devices["full"].fill_memory()
        steady.release()
        cluster.wait_for("worker_lost", worker="full")
        # Otherwise the steady worker would take over the other's pending work.
        steady.wait_until_paused()
        victim.wait_until_paused()
        faulty_devices["lost"].lose_device()
        victim.release()
        cluster.wait_for("worker_lost", worker="lost")
        steady.release()
        assert has_reference_result(cluster, reference)
        assert cluster.has_reassigned_work(), cluster.event_names()

        (line,) = error_lines(cluster, "never")
        assert "cannot be opened" in line
        (line,) = error_lines(cluster, "full")
        assert "failed: out of memory" in line
        # wgpu can only end the process, and prints its own message first.
        line = error_lines(cluster, "lost")[-1]
        assert line.startswith("worker: device ")
        assert "loses the device" in line
