"""Vulkan drivers that lose their device, or run out of memory, at a test's command.

The product runs unchanged: a Vulkan layer, compiled from `faulty_vulkan.c`, sits between the loader
and the real driver, and returns the driver's error codes.
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
    """The driver of one process; two files control its faults.

    Attributes:
        environment: Environment for the process.
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

    def lose_device(self) -> Self:
        """Make every later submission and wait fail: the device is lost."""
        self._lost.touch()
        return self

    def fill_memory(self) -> Self:
        """Make every later allocation fail."""
        self._full.touch()
        return self


def compile_layer(directory: Path) -> Path:
    """Compile the layer and return the folder for VK_LAYER_PATH; skip the test without a C
    compiler."""
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
