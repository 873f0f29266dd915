import pytest

from coordinator.operator.status import Pace, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (41, "41 s"), (725, "12:05"), (11525, "3:12:05")]
)
def test_duration_format(seconds, text):
    assert format_duration(seconds) == text


def test_unknown_values_are_omitted():
    assert str(Pace(3.0, 51.2, None)) == "51.2 samples/s, 3 s elapsed"
    assert str(Pace(30.0, 51.2, 90.0)) == "51.2 samples/s, 30 s elapsed, about 1:30 left"
