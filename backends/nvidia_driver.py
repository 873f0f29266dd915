"""Which of NVIDIA's drivers a torch needs: that depends on the CUDA it was built with."""

from __future__ import annotations

from typing import Final

from packaging.version import InvalidVersion, Version

LEAST: Final = {11: "450", 12: "525", 13: "580"}
"""By CUDA's major version, the oldest driver on Linux that runs all of its minor versions.

Table 1 of NVIDIA's "CUDA Compatibility".
"""
LOCKED_CUDA: Final = 13
"""Of the torch in `requirements/cuda.txt`, whose heading names its driver to scripts."""


def least_driver(cuda: str | None) -> str:
    """The oldest driver that will do.

    Args:
        cuda: As in `torch.version.cuda`, such as "13.0". None for a torch that has none, or no
            torch: then it is about the one that would be installed.

    Returns:
        A version; empty for a CUDA that is not known here.
    """
    major = LOCKED_CUDA if cuda is None else int(cuda.split(".")[0])
    return LEAST.get(major, "")


def is_older(driver: str, least: str) -> bool:
    """Whether a driver will not do. What cannot be compared is taken to do: torch has its say."""
    try:
        return Version(driver) < Version(least)
    except InvalidVersion:
        return False
