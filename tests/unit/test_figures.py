import re

import pytest

from recmill.observe.figures import Chart, Curve, Series, bars, heat_map, lanes, line_chart, ticks


def curve_of(values: list[float]) -> Curve:
    curve = Curve()
    for x, y in enumerate(values):
        curve.add(x, y)
    return curve


def test_a_long_curve_keeps_its_peaks_its_ends_and_a_bounded_number_of_points() -> None:
    values = [1.0] * 100_000
    values[12_345], values[77_777], values[-1] = 99.0, -99.0, 5.0
    points = curve_of(values).points
    assert len(points) <= 802
    assert {(0, 1.0), (12_345, 99.0), (77_777, -99.0), (99_999, 5.0)} <= set(points)
    assert points == sorted(points)


def test_a_short_curve_is_drawn_as_it_is_without_what_is_no_number() -> None:
    assert curve_of([3.0, float("nan"), 1.0, float("inf"), 2.0]).points == [(0, 3.0), (2, 1.0), (4, 2.0)]
    assert curve_of([]).points == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 100, [0, 20, 40, 60, 80, 100]), (0.79, 0.80, [0.79, 0.792, 0.794, 0.796, 0.798, 0.8]), (3, 3, [3])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_a_chart_places_the_highest_point_above_the_lowest_and_names_its_lines_as_text() -> None:
    drawn = line_chart(Chart("a & b", [Series("<i>x</i>", curve_of([1, 3]), 0), Series("y", curve_of([2, 2]), 1)]))
    assert "<figcaption>a &amp; b</figcaption>" in drawn
    assert "&lt;i&gt;x&lt;/i&gt;" in drawn and "<i>" not in drawn
    (first, last), _ = [re.findall(r"[\d.]+,([\d.]+)", points) for points in re.findall(r'points="(.*?)"', drawn)]
    assert float(first) > float(last)  # y grows downwards
    assert line_chart(Chart("empty", [Series("x", Curve(), 0)])) == ""


def test_bars_are_as_wide_as_the_shares_of_their_parts() -> None:
    drawn = bars("step", [("rank 0", {"input": 1.0, "forward": 3.0, "sync": 0.0}, "4 s")])
    assert re.findall(r"width:([\d.]+)%", drawn) == ["25.000", "75.000"]
    assert "sync" not in drawn
    assert bars("nothing", [("rank 0", {"input": 0.0}, "")]) == ""


def test_lanes_and_heat_maps_have_a_mark_for_each_name_and_shade() -> None:
    drawn = lanes("run", [("rank 0", {"save": [(0.0, 0.5), (0.75, 1.0)], "test": []})], ["0 s", "4 s"])
    assert re.findall(r' d="(.*?)"', drawn) == ["M0 0h5000v1h-5000zM7500 0h2500v1h-2500z"]
    shades = heat_map("waits", [("rank 0", [0.0, 0.5, 0.5, float("nan")], "")], ["a"], 0.5)
    assert re.findall(r'opacity:([\d.]+)" d="(.*?)"', shades) == [
        ("0.05", "M0 0h1v1h-1z"),
        ("1.00", "M1 0h1v1h-1zM2 0h1v1h-1z"),
    ]
