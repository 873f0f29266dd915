"""The location of the caches."""

import os
from pathlib import Path

from protocol.machine.cache_directory import cache_directory


def test_cache_directory_follows_the_environment():
    variables = {"SAMESTEP_CACHE": "/a", "CACHE_DIRECTORY": "/b:/c", "XDG_CACHE_HOME": "/d"}
    assert cache_directory(variables) == Path("/a")
    assert cache_directory({**variables, "SAMESTEP_CACHE": ""}) == Path("/b")
    assert cache_directory({"XDG_CACHE_HOME": "/d"}) == Path("/d/samestep")
    assert cache_directory({"XDG_CACHE_HOME": "d"}) == Path("~/.cache/samestep").expanduser()
    assert cache_directory({"SAMESTEP_CACHE": "here"}) == Path(os.getcwd()) / "here"  # noqa: PTH109
