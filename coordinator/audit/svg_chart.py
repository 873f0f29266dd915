"""Line charts as SVG text: nothing to load, nothing that runs."""

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
"""Fewer points need no average."""
_WHOLE: Final = 1e15
"""Beyond, every float is a whole number."""


def line_chart(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    stairs: bool = False,
    smooth: bool = False,
) -> str:
    """Draw a line through points, with axes from the smallest to the largest value.

    An axis whose values are all whole numbers has only such marks.

    Args:
        points: In order of x. A value that is not finite makes a gap.
        x_label: The label of x, with its unit.
        y_label: The label of y, with its unit.
        stairs: Values hold until the next point, and the axis of y shows zero.
        smooth: Also draw their exponential average.
    """
    title = escape(f"{y_label} by {x_label}")
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return f'<p class="empty">{title}: no values</p>'
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    low = min(0.0, *ys) if stairs else min(ys)
    y_axis = _Axis(low, max(ys), HEIGHT - _BOTTOM, _TOP)
    x_axis.whole, y_axis.whole = all(map(_is_whole, xs)), all(map(_is_whole, ys))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        *_grid(x_axis, y_axis),
    ]
    drawn_points = points if stairs else _thinned(points)
    corners = (_stairs(run) if stairs else run for run in _runs(drawn_points))
    parts += [_line(line_points, x_axis, y_axis, "line") for line_points in corners]
    if smooth and len(finite) > _SMOOTHED_FROM:
        parts.append(_line(_thinned(_smoothed(finite)), x_axis, y_axis, "smooth"))
    rotation = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)"'
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts += [
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text {rotation} text-anchor="middle">{escape(y_label)}</text>',
        "</svg>",
    ]
    return "\n".join(parts)


def _line(points: Sequence[Point], x_axis: _Axis, y_axis: _Axis, kind: str) -> str:
    corners = [f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points]
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
        whole: Whether its marks are whole numbers.
    """

    whole = False

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        size = max(abs(low), abs(high))
        if high - low <= 1e-9 * size or low == high:
            # Too close to tell apart, or one value alone.
            margin = 0.5 if size < 1e6 else size * 1e-6
            low, high = low - margin, high + margin
        self.low, self.high = low, high
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return three to six round values for marks."""
        smallest_step = 1.0 if self.whole else sys.float_info.min
        raw = max((self.high - self.low) / 6, smallest_step)
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(m for m in (1, 2, 5, 10) if m * magnitude >= raw) * magnitude
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>',
        ]
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:.6g}</text>'
        )
    return parts


def _runs(points: Sequence[Point]) -> list[list[Point]]:
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


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return fewer points with the same outline: the lowest and highest of each interval."""
    if len(points) <= _MOST_POINTS:
        return points
    size = -(-len(points) // _COLUMNS)
    outline: list[Point] = []
    for at in range(0, len(points), size):
        part = [point for point in points[at : at + size] if math.isfinite(point[1])]
        if part:
            ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
            outline += sorted(ends)
    return outline
