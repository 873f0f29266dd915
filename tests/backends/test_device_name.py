import pytest

from backends.device_name import parse_device_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda0", ("cuda", 0)),
        ("cuda12", ("cuda", 12)),
        ("vulkan1", ("vulkan", 1)),
        ("cpu0", ("cpu", 0)),
        ("cuda", ("cuda", None)),
        ("auto", ("auto", None)),
        ("scripted:20", ("scripted:20", None)),
        ("abacus7", ("abacus7", None)),
        ("cuda-1", ("cuda-1", None)),
        ("cuda0x", ("cuda0x", None)),
    ],
)
def test_a_number_is_taken_off_a_device_s_name(name, expected):
    assert parse_device_name(name) == expected
