"""Plot measurements as SVG text: panels of lines in a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

_LEFT, _TOP, _GAP = 50, 46, 16
_TICK_LABEL_HEIGHT: Final = 18
"""Height of the x axis's tick labels below a panel."""


class Axis(NamedTuple):
    """The range of an axis, and its ticks: values and their labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Line(NamedTuple):
    """The points of a line, and the CSS of its stroke."""

    points: Sequence[tuple[float, float]]
    style: str


class Panel(NamedTuple):
    """Lines over two axes; the panels of a row share the vertical axis."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]


def draw_panels(
    title: str,
    rows: Sequence[Sequence[Panel]],
    *,
    legend: Sequence[tuple[str, str]],
    x_name: str,
    panel_size: tuple[int, int],
) -> str:
    """Return the SVG of all panels.

    Args:
        title: Description for screen readers.
        rows: Rows of panels, from the top; all have the same length.
        legend: Labels, and the style of their lines.
        x_name: Label of all x axes.
        panel_size: Width and height in SVG units, about pixels.
    """
    panel_width, panel_height = panel_size
    legend_x = [_LEFT]
    for label, _ in legend:
        legend_x.append(legend_x[-1] + 44 + 7 * len(label))
    width = max(_LEFT + len(rows[0]) * (panel_width + _GAP), legend_x[-1])
    row_height = panel_height + _TICK_LABEL_HEIGHT + _GAP
    height = _TOP + len(rows) * row_height + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text { font: 11px sans-serif }</style>",
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<clipPath id="panel"><rect width="{panel_width}" height="{panel_height}"/></clipPath>',
    ]
    for x, (label, style) in zip(legend_x, legend, strict=False):
        parts.append(f'<path d="M{x} 12h26" style="fill:none;stroke-width:2;{style}"/>')
        parts.append(f'<text x="{x + 32}" y="16">{escape(label)}</text>')
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            panel_left, panel_top = _LEFT + column * (panel_width + _GAP), _TOP + row * row_height
            parts.append(f'<g transform="translate({panel_left} {panel_top})">')
            parts += _panel(panel, panel_width, panel_height, is_first=not column)
            parts.append("</g>")
    parts.append(f'<text x="{width / 2}" y="{height - 5}" text-anchor="middle">{x_name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, panel_width: int, panel_height: int, *, is_first: bool) -> Iterator[str]:
    def position(x: float, y: float) -> str:
        left, top = panel_width * panel.x.fraction(x), panel_height * (1 - panel.y.fraction(y))
        return f"{left:.1f},{top:.1f}"

    yield f'<text y="-5">{escape(panel.title)}</text>'
    yield f'<rect width="{panel_width}" height="{panel_height}" fill="none" stroke="#999"/>'
    for value, label in panel.y.ticks if is_first else ():
        y = panel_height * (1 - panel.y.fraction(value)) + 4
        yield f'<text x="-4" y="{y:.1f}" text-anchor="end">{label}</text>'
    for value, label in panel.x.ticks:
        x = panel_width * panel.x.fraction(value)
        yield f'<text x="{x:.1f}" y="{panel_height + 12}" text-anchor="middle">{label}</text>'
    for line in panel.lines:
        coordinates = " ".join(position(*point) for point in line.points)
        style = f"fill:none;stroke-width:2;{line.style}"
        yield f'<polyline points="{coordinates}" clip-path="url(#panel)" style="{style}"/>'
