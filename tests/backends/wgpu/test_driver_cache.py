"""Drivers cache compiled shaders in a user directory, so the second start compiles none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import ROOT

COMPUTE_GRADIENT = (
    "from backends.device_trial import is_gradient_right\nassert is_gradient_right('vulkan', 0)\n"
)


def cache_files_after_start(cache: Path, **variables: str) -> dict[str, tuple[int, int]]:
    """Compute a gradient in a new process; return size and mtime (ns) of all files in the cache.

    `variables` are environment variables of the process.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MESA_")
    }
    environment |= {"HOME": str(cache / "home"), "XDG_CACHE_HOME": str(cache), **variables}
    subprocess.run([sys.executable, "-c", COMPUTE_GRADIENT], cwd=ROOT, env=environment, check=True)
    return {
        str(file.relative_to(cache)): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in cache.rglob("*")
        if file.is_file()
    }


@pytest.mark.slow
def test_the_second_start_compiles_nothing(tmp_path):
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    if not available[0].software:
        pytest.skip("this test knows only the cache of Mesa's drivers")
    without_cache = cache_files_after_start(tmp_path / "none", MESA_SHADER_CACHE_DISABLE="true")
    first = cache_files_after_start(tmp_path / "cache")
    second = cache_files_after_start(tmp_path / "cache")
    assert not without_cache
    assert len(first) > 1
    assert second == first, "a driver writes the shaders that it compiles"


def environment_variables(text: str) -> dict[str, str]:
    """Return the environment variables that a systemd unit or a Containerfile sets."""
    lines = re.findall(r"^(?:Environment=|ENV |    )(\S+=.*)$", text, re.MULTILINE)
    assignments = [word for line in lines for word in line.rstrip("\\").split() if "=" in word]
    return dict(assignment.split("=", 1) for assignment in assignments)


def test_services_and_containers_persist_the_cache():
    unit = (ROOT / "deploy/systemd/samestep-worker@.service").read_text()
    assert "CacheDirectory=samestep-worker\n" in unit
    image = (ROOT / "deploy/worker.Containerfile").read_text()
    # NVIDIA's driver does not create the directory that a variable names, so it must exist.
    for variable in ("XDG_CACHE_HOME", "__GL_SHADER_DISK_CACHE_PATH"):
        assert environment_variables(unit)[variable] == "%C/samestep-worker"
        assert environment_variables(image)[variable] == "/var/cache/samestep"
    assert "\nVOLUME /var/cache/samestep\n" in image
