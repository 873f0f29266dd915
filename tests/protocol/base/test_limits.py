import pytest

from protocol.base.limits import byte_size


@pytest.mark.parametrize(
    ("count", "expected_text"),
    [(0, "0.0 MiB"), (1 << 19, "0.5 MiB"), (500 << 20, "500.0 MiB"), (3 << 29, "1.50 GiB")],
)
def test_byte_size_is_human_readable(count, expected_text):
    assert byte_size(count) == expected_text
