"""Detect local values that hide a name of the shader module, which naga accepts.

If a local value has a buffer's name, later code reads the value instead of the buffer. If the types
match, the result is a wrong number without an error.
"""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from backends.wgpu.device.device import Device
from backends.wgpu.shaders.dispatch import Shader

_MODULE_NAME: Final = re.compile(
    r"(?:@binding\(\d+\) |^)(?:var<[^>]*>|fn|const|alias|struct) (\w+)", re.MULTILINE
)
_LOCAL_NAME: Final = re.compile(r"\b(?:let|var) (\w+)")


def hidden_names(source: str) -> set[str]:
    """Return names that a module defines twice, or that a function reuses for a local value."""
    names = _MODULE_NAME.findall(source)
    duplicates = {name for name in names if names.count(name) > 1}
    return duplicates | {*names} & {*_LOCAL_NAME.findall(source)}


class CheckedDevice(Device):
    """Fails a test if a shader hides a name, even if the test expects an error."""

    def _pipeline(self, shader: Shader, label: str) -> tuple[Any, Any]:
        if shader.source not in self._pipelines and (hidden := hidden_names(shader.source)):
            pytest.fail(f"{label}: its module's {sorted(hidden)} are hidden or defined twice")
        return super()._pipeline(shader, label)
