"""Vulkan workers that are killed, come late, or lose their device: the same bits all the same."""

from __future__ import annotations

from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import RUNS, Cluster
from tests.commands import called
from tests.faulty_vulkan import FaultyVulkan, compiled_layer
from tests.small_decoder import decoder_run

DIGITS = (
    "--run", str(RUNS / "digits.yaml"), "--set", "steps=12", "--set", "evaluate_every=0",
    "--set", "digits.hidden=[16]", "--set", "batch.samples=24",
)  # fmt: skip
VULKAN = ("--backend", "vulkan")


@pytest.fixture(autouse=True, scope="module")
def _a_device_is_there():
    if isinstance(why := adapters(), str):
        pytest.skip(why)


@pytest.fixture(
    scope="module",
    params=[
        "digits",
        pytest.param("classify", marks=pytest.mark.slow),
        pytest.param("causal-lm", marks=[pytest.mark.slow, pytest.mark.release]),
    ],
)
def job(request, tmp_path_factory) -> tuple[str, ...]:
    """Digits, or a small Llama with LoRA."""
    if request.param == "digits":
        return DIGITS
    directory = tmp_path_factory.mktemp(request.param)
    return ("--run", str(decoder_run(request.param, directory, steps=30)))


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory) -> dict[str, Any]:
    """The result of one worker whom nothing disturbs."""
    with Cluster(tmp_path_factory.mktemp("alone"), "--expect-workers", "1", *job) as cluster:
        cluster.worker("w0", *VULKAN)
        return cluster.result()


def is_undisturbed(cluster: Cluster, alone: dict[str, Any]) -> bool:
    """Whether a run ended as if nothing had happened, and says so itself."""
    result = cluster.result()
    audited = called("coordinator", "audit", str(cluster.directory / "out"))
    assert audited.returncode == 0, audited.stdout
    assert "samples covered exactly once" in audited.stdout
    assert audited.stdout.rstrip().endswith("sound")
    same = ("exact", "weights_digest", "losses", "eval")
    return [result[key] for key in same] == [alone[key] for key in same]


def part_of_the_name() -> str:
    """Of the device that a worker takes which is told none."""
    adapter_list = adapters()
    assert not isinstance(adapter_list, str)
    return adapter_list[0].name.split()[0].upper()


def last_words(cluster: Cluster, name: str) -> list[str]:
    """What a worker that has failed wrote on standard error."""
    worker = cluster.workers[name]
    assert cluster.wait_for_exit(worker) == 1
    assert worker.stderr is not None
    error_text = worker.stderr.read()
    assert "Traceback" not in error_text, error_text
    return error_text.splitlines()


@pytest.mark.slow
def test_one_is_killed_in_the_middle_of_a_step_and_another_comes_late(tmp_path, job, alone):
    with Cluster(tmp_path, "--expect-workers", "2", *job) as cluster:
        first, second = (cluster.held_worker(f"w{n}", 6, *VULKAN) for n in range(2))
        first.reached()
        second.reached()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        # The newcomer needs seconds to import; the run waits for it, or would be over before.
        cluster.worker("late", *VULKAN, "--gpus", part_of_the_name())
        joined = cluster.wait_for("worker_joined", worker="late")
        first.release()
        assert joined["step"] < len(alone["losses"])
        assert is_undisturbed(cluster, alone)
        assert cluster.handed_over(), cluster.events()
        assert cluster.result()["workers"]["late"] > 0


def test_devices_are_lost_and_run_out_of_memory(tmp_path, tmp_path_factory, job, alone):
    layer = compiled_layer(tmp_path_factory.mktemp("layer"))
    faulty = {name: FaultyVulkan(layer, tmp_path / name) for name in ("lost", "full", "never")}
    faulty["never"].fill()
    with Cluster(tmp_path / "run", "--expect-workers", "3", *job) as cluster:
        steady = cluster.held_worker("steady", "4,8", *VULKAN)
        lost = cluster.held_worker("lost", 8, *VULKAN, environment=faulty["lost"].environment)
        for name in ("full", "never"):
            cluster.worker(name, *VULKAN, environment=faulty[name].environment)
        steady.reached()
        faulty["full"].fill()
        steady.release()
        cluster.wait_for("worker_lost", worker="full")
        steady.reached()  # or it would take over what the other one keeps it waiting for
        lost.reached()
        faulty["lost"].lose()
        lost.release()
        cluster.wait_for("worker_lost", worker="lost")
        steady.release()
        assert is_undisturbed(cluster, alone)
        assert cluster.handed_over(), cluster.events()

        (line,) = last_words(cluster, "never")
        assert "cannot be opened" in line
        (line,) = last_words(cluster, "full")
        assert "failed: out of memory" in line
        # wgpu has no way but to end the process, and says something itself before.
        line = last_words(cluster, "lost")[-1]
        assert line.startswith("worker: device ")
        assert "loses the device" in line
