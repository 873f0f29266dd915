"""Vulkan drivers that lose their device, or run out of memory, when a test asks for it.

Nothing of the product is replaced: a Vulkan layer, compiled from `faulty_vulkan.c`, sits between
the loader and the real driver and then returns the driver's error codes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Self

import pytest

LAYER = "VK_LAYER_SAMESTEP_faulty"


class FaultyVulkan:
    """One process's driver; the two files say what has happened to it.

    Attributes:
        environment: What the process must be started with.
    """

    def __init__(self, layer: Path, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._lost, self._full = directory / "lost", directory / "full"
        self.environment = {
            "VK_LAYER_PATH": str(layer),
            "VK_INSTANCE_LAYERS": LAYER,
            "FAULTY_VULKAN_LOST": str(self._lost),
            "FAULTY_VULKAN_FULL": str(self._full),
            "RUST_BACKTRACE": "0",
        }

    def lose(self) -> Self:
        """What is submitted or waited for from now on fails: the device is lost."""
        self._lost.touch()
        return self

    def fill(self) -> Self:
        """No memory is to be had from now on."""
        self._full.touch()
        return self


def compiled_layer(directory: Path) -> Path:
    """The folder for VK_LAYER_PATH; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) here")
    library = directory / "libfaulty_vulkan.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    manifest = {
        "file_format_version": "1.1.0",
        "layer": {
            "name": LAYER,
            "type": "GLOBAL",
            "library_path": str(library),
            "api_version": "1.3.0",
            "implementation_version": "1",
            "description": "Fails once a file exists",
            "functions": {
                "vkGetInstanceProcAddr": "faulty_instance_lookup",
                "vkGetDeviceProcAddr": "faulty_device_lookup",
            },
        },
    }
    (directory / "faulty_vulkan.json").write_text(json.dumps(manifest))
    return directory
