"""Plot benchmarks as SVG text: panels of lines in a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

_LEFT, _TOP, _BETWEEN = 50, 46, 16
_MARKS: Final = 18
"""Below a panel, for the marks of its axis."""


class Axis(NamedTuple):
    """What it reaches from and to, and where it has marks with which words."""

    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Of the axis, from 0 to 1, up to there."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Line(NamedTuple):
    """Points, and CSS of a stroke."""

    points: Sequence[tuple[float, float]]
    style: str


class Panel(NamedTuple):
    """Lines over two axes; those of one row of panels share the upright one."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]


def drawn(
    title: str,
    rows: Sequence[Sequence[Panel]],
    *,
    legend: Sequence[tuple[str, str]],
    x_name: str,
    panel_size: tuple[int, int],
) -> str:
    """The whole.

    Args:
        title: For those who do not see it.
        rows: From above; each has as many panels.
        legend: Words, and the style of lines that they stand for.
        x_name: What all x axes show.
        panel_size: Wide and high, in SVG's units, which are about pixels.
    """
    wide, high = panel_size
    places = [_LEFT]
    for words, _ in legend:
        places.append(places[-1] + 44 + 7 * len(words))
    width = max(_LEFT + len(rows[0]) * (wide + _BETWEEN), places[-1])
    below = high + _MARKS + _BETWEEN
    height = _TOP + len(rows) * below + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text { font: 11px sans-serif }</style>",
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<clipPath id="panel"><rect width="{wide}" height="{high}"/></clipPath>',
    ]
    for x, (words, style) in zip(places, legend, strict=False):
        parts.append(f'<path d="M{x} 12h26" style="fill:none;stroke-width:2;{style}"/>')
        parts.append(f'<text x="{x + 32}" y="16">{escape(words)}</text>')
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            left, top = _LEFT + column * (wide + _BETWEEN), _TOP + row * below
            parts.append(f'<g transform="translate({left} {top})">')
            parts += _panel(panel, wide, high, first=not column)
            parts.append("</g>")
    parts.append(f'<text x="{width / 2}" y="{height - 5}" text-anchor="middle">{x_name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, wide: int, high: int, *, first: bool) -> Iterator[str]:
    def at(x: float, y: float) -> str:
        return f"{wide * panel.x.share(x):.1f},{high * (1 - panel.y.share(y)):.1f}"

    yield f'<text y="-5">{escape(panel.title)}</text>'
    yield f'<rect width="{wide}" height="{high}" fill="none" stroke="#999"/>'
    for value, words in panel.y.marks if first else ():
        y = high * (1 - panel.y.share(value)) + 4
        yield f'<text x="-4" y="{y:.1f}" text-anchor="end">{words}</text>'
    for value, words in panel.x.marks:
        x = wide * panel.x.share(value)
        yield f'<text x="{x:.1f}" y="{high + 12}" text-anchor="middle">{words}</text>'
    for line in panel.lines:
        places = " ".join(at(*point) for point in line.points)
        style = f"fill:none;stroke-width:2;{line.style}"
        yield f'<polyline points="{places}" clip-path="url(#panel)" style="{style}"/>'
