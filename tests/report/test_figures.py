"""What pictures are drawn from: places on axes, times of steps, thinned lines."""

from __future__ import annotations

import re

import pytest

from fleetune.report.axes import fixed_axis, make_axis, round_step, tick_text
from fleetune.report.figures import thinned, time_at
from fleetune.report.html import Html, element, joined
from fleetune.report.plots import Bar, Bars, Chart, Line, Point, bar_chart, line_chart
from fleetune.report.turns import Turn
from tests.report.records import a_record


@pytest.mark.parametrize(("values", "from_zero", "ticks"), [
    ([1.0, 3.2], True, (0.0, 1.0, 2.0, 3.0, 4.0)),
    ([0.71, 0.79], False, (0.7, 0.72, 0.74, 0.76, 0.78, 0.8)),
    ([5.0], True, (0.0, 2.0, 4.0, 6.0)),
    ([0.0], True, (0.0, 0.25, 0.5, 0.75, 1.0)),
    ([], True, (0.0, 0.25, 0.5, 0.75, 1.0)),
    ([-0.4, 0.4], True, (-0.4, -0.2, 0.0, 0.2, 0.4)),
])  # fmt: skip
def test_axes_end_at_round_numbers(values: list[float], from_zero: bool, ticks: tuple[float, ...]) -> None:
    axis = make_axis(values, 0, 100, from_zero=from_zero)
    assert axis.ticks == pytest.approx(ticks)
    assert (axis.at(axis.low), axis.at(axis.high)) == (0, 100)
    assert all(axis.low <= value <= axis.high for value in values)


def test_round_steps() -> None:
    assert [round_step(x) for x in (1.0, 1.01, 2.2, 2.6, 7.0, 0.03, 800.0)] == pytest.approx(
        [1, 2, 2.5, 5, 10, 0.05, 1000]
    )


def test_marks_at_given_places() -> None:
    axis = fixed_axis((1.0, 4.0, 2.0), 0, 100, margin=0.0)
    assert axis.ticks == (1.0, 2.0, 4.0)
    assert [axis.at(x) for x in axis.ticks] == pytest.approx([0, 100 / 3, 100])
    assert fixed_axis((2.0,), 0, 100, margin=0.1).at(2.0) == 50
    assert [tick_text(x) for x in (0.0, 0.25, 1500.0, 20000.0)] == ["0", "0.25", "1,500", "20k"]


def test_points_are_where_their_numbers_are() -> None:
    """A line from the low left to the high right, with an error bar at its end."""
    points = (Point(x=1, y=0), Point(x=2, y=3, deviation=1.0))
    chart = Chart(
        name="c", title="t", description="d", x_title="x", y_title="y", lines=(Line(label="l", points=points),)
    )
    svg = line_chart(chart)
    places = re.search(r'd="M([\d.]+) ([\d.]+) L([\d.]+) ([\d.]+)" class="line s0"', svg)
    assert places is not None
    x0, y0, x1, y1 = map(float, places.groups())
    assert x0 < x1
    assert y0 == 246.0  # the bottom of the picture
    assert y1 == pytest.approx(246 - 3 / 4 * (246 - 22))  # 3 of an axis from 0 to 4
    bar = re.search(rf"M{x1:.1f} ([\d.]+) L{x1:.1f} ([\d.]+) ", svg)
    assert bar is not None
    assert [float(y) for y in bar.groups()] == pytest.approx([246 - 2 / 4 * 224, 246 - 224])


def test_parts_of_a_bar_are_as_long_as_their_numbers() -> None:
    bars = (Bar(label="a", parts=(("x", 3.0), ("y", 1.0))), Bar(label="b", parts=(("y", 2.0),)))
    svg = bar_chart(Bars(name="b", title="t", description="d", bars=bars, parts=("x", "y")))
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="22" class="part', svg)]
    assert widths == pytest.approx([327.0, 109.0, 218.0])
    assert re.findall(r'class="part (p\d)"', svg) == ["p0", "p1", "p1"]


def test_times_of_steps() -> None:
    """One by one, as means of ten, and where only the whole was timed; of a run that went on, since it did."""
    record = a_record(step_s=0.5)
    turn = Turn(name="a", size="a", record=record)
    assert [time_at(turn, step) for step in (0, 1, 2, 11)] == pytest.approx([0.0, 2.5, 3.0, 7.5])
    record["time"]["step_s"] = {"steps_each": 10, "seconds": [0.7, 0.5]}
    assert [time_at(turn, step) for step in (5, 10, 11)] == pytest.approx([3.5, 7.0, 7.5])
    del record["time"]
    assert time_at(turn, 11) == pytest.approx(7.5)
    record["resumed_at_step"] = 1
    assert [time_at(turn, step) for step in (1, 6, 11)] == pytest.approx([0.0, 3.75, 7.5])


def test_thinned_lines_are_means_of_stretches() -> None:
    points = [(float(i), float(i % 2)) for i in range(100)]
    assert thinned(points, 100) == points
    assert thinned(points, 2) == [(24.5, 0.5), (74.5, 0.5)]


def test_elements_escape_what_is_no_markup() -> None:
    made = element(
        "a", "<&>", Html("<br/>"), None, class_='"x"', data_title="y", hidden=True, left=0.0, off=False, no=None
    )
    assert made == '<a class="&quot;x&quot;" data-title="y" hidden left="0">&lt;&amp;&gt;<br/></a>'
    assert joined(element("rect", x=1.5), "&") == '<rect x="1.5"/>&amp;'
