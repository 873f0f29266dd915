"""A fault in shaders that naga accepts: a local value hides a name of the module.

If a buffer and a local value share a name, code below the value that means the buffer reads the
value. Where the types allow it, the result is a wrong number and no error.
"""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from backends.wgpu.device.device import Device
from backends.wgpu.shaders.dispatch import Shader

_OF_THE_MODULE: Final = re.compile(
    r"(?:@binding\(\d+\) |^)(?:var<[^>]*>|fn|const|alias|struct) (\w+)", re.MULTILINE
)
_OF_A_BODY: Final = re.compile(r"\b(?:let|var) (\w+)")


def hidden_names(source: str) -> set[str]:
    """Return names that a module defines twice, or that a body reuses for a local value."""
    names = _OF_THE_MODULE.findall(source)
    twice = {name for name in names if names.count(name) > 1}
    return twice | {*names} & {*_OF_A_BODY.findall(source)}


class CheckedDevice(Device):
    """Fails a test whose kernels hide names, even if the test expects a refusal."""

    def _pipeline(self, shader: Shader, label: str) -> tuple[Any, Any]:
        if shader.source not in self._pipelines and (hidden := hidden_names(shader.source)):
            pytest.fail(f"{label}: {sorted(hidden)} of its module are hidden or there twice")
        return super()._pipeline(shader, label)
