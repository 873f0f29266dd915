"""Builds the kernels (`protocol/exact/kernels`) beside their sources before files are packed.

By the package `ziglang`, for every processor that they serve, or by `cc` for this one. Where
neither is there, samestep is installed without: numpy does the same work, with the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from protocol.base.errors import SamestepError
from protocol.machine.compiler import build_kernels


class BuildWithKernels(build_py):
    """`build_py`, for wheels and editable installations."""

    def run(self) -> None:
        try:
            build_kernels()
        except SamestepError as error:
            self.warn(f"samestep is installed without native kernels: {error}")
        super().run()


setup(cmdclass={"build_py": BuildWithKernels})
