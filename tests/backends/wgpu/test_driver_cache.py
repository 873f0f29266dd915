"""Drivers cache compiled shaders in a user directory, so the second start is warm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import ROOT

COMPUTES = (
    "from backends.device_trial import is_gradient_right\nassert is_gradient_right('vulkan', 0)\n"
)


def cache_files_after_a_start(cache: Path, **overrides: str) -> dict[str, tuple[int, int]]:
    """Return sizes and times of all files in the user's cache after a process has computed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MESA_")}
    environment |= {"HOME": str(cache / "home"), "XDG_CACHE_HOME": str(cache), **overrides}
    subprocess.run([sys.executable, "-c", COMPUTES], cwd=ROOT, env=environment, check=True)
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
        pytest.skip("only Mesa's drivers keep their shaders where this looks")
    without_cache = cache_files_after_a_start(tmp_path / "none", MESA_SHADER_CACHE_DISABLE="true")
    first = cache_files_after_a_start(tmp_path / "cache")
    second = cache_files_after_a_start(tmp_path / "cache")
    assert not without_cache
    assert len(first) > 1
    assert second == first, "what is compiled again is written again"


def settings(text: str) -> dict[str, str]:
    """Return the variables that a unit or container file sets."""
    lines = re.findall(r"^(?:Environment=|ENV |    )(\S+=.*)$", text, re.MULTILINE)
    words = [word for line in lines for word in line.rstrip("\\").split() if "=" in word]
    return dict(word.split("=", 1) for word in words)


def test_services_and_containers_persist_the_cache():
    unit = (ROOT / "deploy/systemd/samestep-worker@.service").read_text()
    assert "CacheDirectory=samestep-worker\n" in unit
    image = (ROOT / "deploy/worker.Containerfile").read_text()
    # NVIDIA's driver does not create the directory that a variable names, so it must exist.
    for variable in ("XDG_CACHE_HOME", "__GL_SHADER_DISK_CACHE_PATH"):
        assert settings(unit)[variable] == "%C/samestep-worker"
        assert settings(image)[variable] == "/var/cache/samestep"
    assert "\nVOLUME /var/cache/samestep\n" in image
