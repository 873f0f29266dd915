"""Build the native kernels (`protocol/exact/kernels`) beside their sources, before packaging.

The package `ziglang` compiles them for every supported processor, `cc` for this machine's only. If
neither is installed, samestep is installed without kernels; numpy computes the same bits.
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
    """Build the kernels, then run `build_py`: for wheels and editable installations."""

    def run(self) -> None:
        try:
            build_kernels()
        except SamestepError as error:
            self.warn(f"samestep is installed without native kernels: {error}")
        super().run()


setup(cmdclass={"build_py": BuildWithKernels})
