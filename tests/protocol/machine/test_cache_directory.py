"""Where the caches are."""

import os
from pathlib import Path

from protocol.machine.cache_directory import cache_directory


def test_where_the_cache_is():
    every = {"SAMESTEP_CACHE": "/a", "CACHE_DIRECTORY": "/b:/c", "XDG_CACHE_HOME": "/d"}
    assert cache_directory(every) == Path("/a")
    assert cache_directory({**every, "SAMESTEP_CACHE": ""}) == Path("/b")
    assert cache_directory({"XDG_CACHE_HOME": "/d"}) == Path("/d/samestep")
    assert cache_directory({"XDG_CACHE_HOME": "d"}) == Path("~/.cache/samestep").expanduser()
    assert cache_directory({"SAMESTEP_CACHE": "here"}) == Path(os.getcwd()) / "here"  # noqa: PTH109
