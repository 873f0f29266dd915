"""What naga does not say of a shader: a name of the module that a value of a body hides.

A buffer and a value of one name are two things in one text: what reads the buffer below the value
reads the value, and where the types allow it that is a wrong number and no error.
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
    """Names that a shader's module has twice, or that a body takes for a value of its own."""
    names = _OF_THE_MODULE.findall(source)
    twice = {name for name in names if names.count(name) > 1}
    return twice | {*names} & {*_OF_A_BODY.findall(source)}


class CheckedDevice(Device):
    """Ends a test whose kernels have such names, also where it expects a refusal."""

    def _pipeline(self, shader: Shader, label: str) -> tuple[Any, Any]:
        if shader.source not in self._pipelines and (hidden := hidden_names(shader.source)):
            pytest.fail(f"{label}: {sorted(hidden)} of its module are hidden or there twice")
        return super()._pipeline(shader, label)
