"""Fixture for the environment of a process whose torch has the stand-in device."""

import pytest

from tests import standin


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    if reason := standin.why_missing():
        pytest.skip(reason)
    return standin.environment(tmp_path_factory.mktemp("standin") / "packages")
