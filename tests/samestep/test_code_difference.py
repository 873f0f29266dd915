"""The first difference in code between two versions of a script, without comments and layout."""

from __future__ import annotations

import pytest

from samestep.code_difference import first_difference


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ("lr = 1  # slow\n", "# faster\n\nlr = (1)\n", ""),
        ("# slow\nlr = 1\n", "# fast\n\nlr = 2\n", "line 2 was 'lr = 1', is 'lr = 2'"),
        ("a = 1\nb = 2\n", "a = 1\nprint(a)\nb = 2\n", "line 2 is now 'print(a)'"),
        ("a = 1\nb = 2\n", "b = 2\n", "line 1 was 'a = 1'"),
        ("a = [\n  1,\n]\n", "a = [\n  1,  # one\n  2,\n]\n", "line 3 is now '2,'"),
        (
            "def f(x):\n    # square\n    return x**2\n",
            "def f(x):\n\n    # fourth\n    return x**4\n",
            "line 3 was 'return x**2', is 'return x**4'",
        ),
        ("if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n", "line 3 is now 'c()'"),
        ("x + y\n", "x - y\n", "line 1 was 'x + y', is 'x - y'"),
        (
            # A form feed and a file separator, which end a line for `str.splitlines` only.
            "\x0c\na = 1\nb = '\x1c'\nc = 3\n",
            "\x0c\na = 1\nb = '\x1c'\nc = 4\n",
            "line 4 was 'c = 3', is 'c = 4'",
        ),
        ("a = 1\r\n\x0cb = 2\r\n", "a = 1\r\n\x0cb = 3\r\n", "line 2 was 'b = 2', is 'b = 3'"),
        ("print 1\n", "print(1)\n", "its content differs"),
    ],
)
def test_first_difference_ignores_comments_and_layout(before, now, difference):
    assert first_difference(before, now) == difference
