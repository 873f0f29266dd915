"""Line charts as SVG text, which loads nothing and runs nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape
from typing import Final

Point = tuple[float, float]

WIDTH: Final = 520
HEIGHT: Final = 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 42
_MOST_POINTS: Final = 1_500
_COLUMNS: Final = 500
_SMOOTHING: Final = 0.1
_SMOOTHED_FROM: Final = 20
"""With fewer points, no average is drawn."""
_WHOLE: Final = 1e15
"""Beyond this, every float is a whole number."""


def line_chart(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    stairs: bool = False,
    smooth: bool = False,
) -> str:
    """Draw a line through points, with axes from the smallest to the largest value.

    An axis whose values are all whole numbers has only whole numbers as marks.

    Args:
        points: The points in order of x. A value that is not finite makes a gap.
        x_label: The label of x, with its unit.
        y_label: The label of y, with its unit.
        stairs: Whether a value holds until the next point, and the y axis includes zero.
        smooth: Whether to draw the exponential average too.
    """
    title = escape(f"{y_label} by {x_label}")
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return f'<p class="empty">{title}: no values</p>'
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    low = min(0.0, *ys) if stairs else min(ys)
    y_axis = _Axis(low, max(ys), HEIGHT - _BOTTOM, _TOP)
    x_axis.is_whole, y_axis.is_whole = all(map(_is_whole, xs)), all(map(_is_whole, ys))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        *_grid(x_axis, y_axis),
    ]
    drawn_points = points if stairs else _thin_out(points)
    corners = (_stairs(run) if stairs else run for run in _split_at_gaps(drawn_points))
    parts += [_line(line_points, x_axis, y_axis, "line") for line_points in corners]
    if smooth and len(finite) > _SMOOTHED_FROM:
        parts.append(_line(_thin_out(_smoothed(finite)), x_axis, y_axis, "smooth"))
    rotation = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)"'
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts += [
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text {rotation} text-anchor="middle">{escape(y_label)}</text>',
        "</svg>",
    ]
    return "\n".join(parts)


def _line(points: Sequence[Point], x_axis: _Axis, y_axis: _Axis, kind: str) -> str:
    corners = [f"{x_axis.coordinate(x):.1f},{y_axis.coordinate(y):.1f}" for x, y in points]
    if len(corners) == 1:
        x, y = corners[0].split(",")
        return f'<circle class="{kind}" cx="{x}" cy="{y}" r="2"/>'
    return f'<polyline class="{kind}" points="{" ".join(corners)}"/>'


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the exponential average, as the page draws it."""
    level, smoothed = points[0][1], []
    for x, y in points:
        level += _SMOOTHING * (y - level)
        smoothed.append((x, level))
    return smoothed


def _is_whole(value: float) -> bool:
    return value.is_integer() and abs(value) < _WHOLE


class _Axis:
    """Maps values to coordinates on the drawing.

    Attributes:
        is_whole: Whether the axis's marks are whole numbers.
    """

    is_whole = False

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        size = max(abs(low), abs(high))
        if high - low <= 1e-9 * size or low == high:
            # Values that are too close to tell apart, or a single value.
            margin = 0.5 if size < 1e6 else size * 1e-6
            low, high = low - margin, high + margin
        self.low, self.high = low, high
        self._start, self._end = start, end

    def coordinate(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return three to six round values for marks."""
        smallest_step = 1.0 if self.is_whole else sys.float_info.min
        raw = max((self.high - self.low) / 6, smallest_step)
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(m for m in (1, 2, 5, 10) if m * magnitude >= raw) * magnitude
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.coordinate(tick)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>',
        ]
    for tick in x_axis.ticks():
        x = x_axis.coordinate(tick)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:.6g}</text>'
        )
    return parts


def _split_at_gaps(points: Sequence[Point]) -> list[list[Point]]:
    """Split the points where a value is not finite."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _stairs(points: Sequence[Point]) -> list[Point]:
    corners = [points[0]]
    for x, y in points[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners


def _thin_out(points: Sequence[Point]) -> Sequence[Point]:
    """Return fewer points with the same outline: the lowest and highest point of each interval."""
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-len(points) // _COLUMNS)
    outline: list[Point] = []
    for start in range(0, len(points), size):
        part = [point for point in points[start : start + size] if math.isfinite(point[1])]
        if part:
            ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
            outline += sorted(ends)
    return outline
