"""Pictures of a report as SVG: lines with error bars, and bars of parts. They need no colour to be read.

A series is told from another by dash and marker, a part by its hatch; colours come from the page's style, light or
dark. Each picture has a title and a description, and the page puts a table of its numbers behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetune.report.axes import Axis, fixed_axis, make_axis, tick_text
from fleetune.report.html import Html, element, joined

WIDTH, HEIGHT = 440.0, 290.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 22.0, 22.0, 44.0
DASHES = (None, "7 4", "2 3", "10 3 2 3", "12 5", "4 2 1 2")
NUM_STYLES, NUM_LOOKS = 6, 9
"""Looks of series, and of parts; later ones begin again."""
BAR_HEIGHT, BAR_STEP, BAR_TOP = 22.0, 58.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place of a line."""

    x: float
    y: float
    deviation: float | None = None
    """Drawn as an error bar, up and down."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series of points."""

    label: str
    points: tuple[Point, ...]
    is_ideal: bool = False
    """What would be if nothing were lost: drawn faintly, without markers."""
    has_markers: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines on two axes."""

    name: str
    """For ids: letters and hyphens."""
    title: str
    description: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[float, ...] | None = None
    """Marks of the x axis, as the sizes; None: round numbers."""
    y_from_zero: bool = True


def line_chart(chart: Chart) -> Html:
    """A picture of lines."""
    points = [point for line in chart.lines for point in line.points]
    values = [p.y + sign * (p.deviation or 0.0) for p in points for sign in (-1, 1)]
    y = make_axis(values, HEIGHT - _BOTTOM, _TOP, from_zero=chart.y_from_zero)
    if chart.x_ticks is not None:
        x = fixed_axis(chart.x_ticks, _LEFT, WIDTH - _RIGHT, margin=0.08)
    else:
        x = make_axis([p.x for p in points], _LEFT, WIDTH - _RIGHT, from_zero=True)
    drawn = [_drawn(line, style, x, y) for style, line in styled(chart.lines)]
    return _picture(chart.name, chart.title, chart.description, HEIGHT, joined(_grid(chart, x, y), *drawn))


def styled(lines: Sequence[Line]) -> list[tuple[int, Line]]:
    """Each line with the number of its look; the ideal line has its own and takes none of the others'."""
    measured = [line for line in lines if not line.is_ideal]
    return [(0 if line.is_ideal else measured.index(line) % NUM_STYLES, line) for line in lines]


def _picture(name: str, title: str, description: str, height: float, content: Html) -> Html:
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        content,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_="picture",
    )


def _grid(chart: Chart, x: Axis, y: Axis) -> Html:
    bottom, parts = HEIGHT - _BOTTOM, []
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(element("text", tick_text(tick), x=_LEFT - 6, y=at + 4, text_anchor="end"))
    for tick in x.ticks:
        at = x.at(tick)
        parts.append(element("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(element("text", tick_text(tick), x=at, y=bottom + 17, text_anchor="middle"))
    parts.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(element("text", chart.x_title, x=middle, y=HEIGHT - 8, text_anchor="middle", class_="name"))
    parts.append(element("text", chart.y_title, x=4.0, y=12.0, class_="name"))
    return joined(*parts)


def _drawn(line: Line, style: int, x: Axis, y: Axis) -> Html:
    places = [(x.at(p.x), y.at(p.y)) for p in line.points]
    path = "M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    if line.is_ideal:
        return element("path", d=path, class_="line ideal", stroke_dasharray="1 4")
    parts = [element("path", d=path, class_=f"line s{style}", stroke_dasharray=DASHES[style])] if places[1:] else []
    for point, (px, py) in zip(line.points, places, strict=True):
        if point.deviation:
            parts.append(_error_bar(px, y.at(point.y - point.deviation), y.at(point.y + point.deviation), style))
        if line.has_markers or len(places) == 1:
            parts.append(marker(style, px, py))
    return element("g", *parts)


def _error_bar(x: float, low: float, high: float, style: int) -> Html:
    caps = f"M{x:.1f} {low:.1f} L{x:.1f} {high:.1f} M{x - 4:.1f} {low:.1f} h8 M{x - 4:.1f} {high:.1f} h8"
    return element("path", d=caps, class_=f"line s{style}")


def marker(style: int, x: float, y: float) -> Html:
    """The sign of a series, about 8 wide."""
    shapes = (
        f"M{x - 4:.1f} {y:.1f} a4 4 0 1 0 8 0 a4 4 0 1 0 -8 0",
        f"M{x - 4:.1f} {y - 4:.1f} h8 v8 h-8 z",
        f"M{x:.1f} {y - 5:.1f} l5 9 h-10 z",
        f"M{x:.1f} {y - 5.5:.1f} l5.5 5.5 l-5.5 5.5 l-5.5 -5.5 z",
        f"M{x - 5:.1f} {y - 4:.1f} h10 l-5 9 z",
        f"M{x - 4.5:.1f} {y - 1.5:.1f} h3 v-3 h3 v3 h3 v3 h-3 v3 h-3 v-3 h-3 z",
    )
    return element("path", d=shapes[style], class_=f"mark s{style}")


def line_legend(lines: Sequence[Line]) -> Html:
    """The looks of lines with their labels, as a list that wraps."""
    items = []
    for style, line in styled(lines):
        look = "line ideal" if line.is_ideal else f"line s{style}"
        dash = "1 4" if line.is_ideal else DASHES[style]
        stroke = element("path", d="M1 8 H33", class_=look, stroke_dasharray=dash)
        sign = None if line.is_ideal or not line.has_markers else marker(style, 17.0, 8.0)
        sample = element("svg", stroke, sign, viewBox="0 0 34 16", width="34", height="16", aria_hidden="true")
        items.append(element("li", sample, line.label))
    return element("ul", *items, class_="legend")


# ---- bars of parts


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: parts that add up."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """Name and size, from the left."""
    total_text: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars below each other, on one scale."""

    name: str
    title: str
    description: str
    bars: tuple[Bar, ...]
    parts: tuple[str, ...] = field(default=())
    """Names of all parts, in the order of their looks."""


def bar_chart(chart: Bars) -> Html:
    """A picture of bars."""
    most = max(sum(max(0.0, size) for _, size in bar.parts) for bar in chart.bars) or 1.0
    drawn = [_bar(bar, chart.parts, i, (WIDTH - 4.0) / most) for i, bar in enumerate(chart.bars)]
    height = BAR_TOP + BAR_STEP * len(chart.bars)
    return _picture(chart.name, chart.title, chart.description, height, joined(*drawn))


def _bar(bar: Bar, names: Sequence[str], number: int, scale: float) -> Html:
    top = BAR_TOP + number * BAR_STEP
    parts = [
        element("text", bar.label, x=2.0, y=top + 8, class_="name"),
        element("text", bar.total_text, x=WIDTH - 2, y=top + 8, text_anchor="end"),
    ]
    left = 2.0
    for name, size in bar.parts:
        width = max(0.0, size) * scale
        look = names.index(name) % NUM_LOOKS
        place = {"x": left, "y": top + 15, "width": width, "height": BAR_HEIGHT}
        parts.append(element("rect", **place, class_=f"part p{look}"))
        parts.append(element("rect", **place, fill=f"url(#hatch-{look})", class_="hatch"))
        left += width
    return element("g", *parts)


def hatches() -> Html:
    """The hatches of parts, once a page: plain, diagonals, dots, horizontals, verticals, crosses, rhombs, zigzags."""
    lines = (
        None, "M0 8 L8 0", "M2 2 h1 v1 h-1 z M6 6 h1 v1 h-1 z", "M0 0 L8 8", "M0 2 H8 M0 6 H8", "M2 0 V8 M6 0 V8",
        "M0 4 H8 M4 0 V8", "M0 4 L4 0 L8 4 L4 8 z",
        "M0 6 L4 2 L8 6",
    )  # fmt: skip
    patterns = [
        element(
            "pattern", None if d is None else element("path", d=d, class_="hatching"),
            id=f"hatch-{i}", width="8", height="8", patternUnits="userSpaceOnUse",
        )
        for i, d in enumerate(lines)
    ]  # fmt: skip
    return element("svg", element("defs", *patterns), width="0", height="0", aria_hidden="true", class_="hidden")


def bar_legend(names: Sequence[str]) -> Html:
    """The looks of parts with their names."""
    items = []
    for i, name in enumerate(names):
        look, place = i % NUM_LOOKS, {"x": 1.0, "y": 1.0, "width": 20.0, "height": 14.0}
        sample = element(
            "svg", element("rect", **place, class_=f"part p{look}"),
            element("rect", **place, fill=f"url(#hatch-{look})", class_="hatch"),
            viewBox="0 0 22 16", width="22", height="16", aria_hidden="true",
        )  # fmt: skip
        items.append(element("li", sample, name))
    return element("ul", *items, class_="legend")
