"""Figures of a report: SVG and HTML without scripts, whose size depends on what a screen shows and not on the data."""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from recmill.observe.printed import escaped
from recmill.observe.progress import human_rate

Point = tuple[float, float]
Scale = Callable[[float], float]

MAX_SERIES = 8  # colours and dashes that can be told apart
_POINTS = 200  # stretches of a curve, each drawn from its lowest to its highest point: about two pixels
_MARKED = 40  # points of a curve that are few enough for a dot each
_WIDTH, _HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 408, 12, 194
_LEVELS = 8  # shades of a heat map


def text(value: object) -> str:
    """Return any value as text of a page: nothing in it can become markup or change the writing direction."""
    return html.escape(escaped(str(value), keep="\n\t"))


class Curve:
    """The lowest and highest of neighbouring points, so that peaks stay visible however many points there are."""

    def __init__(self) -> None:
        self._stretches: list[tuple[Point, Point]] = []  # by their y: lowest, highest
        self._size = 1  # points of a stretch
        self._open = 0  # points of the last one
        self.first: Point | None = None
        self.last: Point | None = None

    def add(self, x: float, y: float) -> None:
        """Add a point to the right of all others; a point that is not finite is left out."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self.last = point = (float(x), float(y))
        if self._open == self._size or self.first is None:
            self.first = self.first or point
            if len(self._stretches) == 2 * _POINTS:
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [_merged(a, b) for a, b in pairs]
                self._size *= 2
            self._stretches.append((point, point))
            self._open = 1
            return
        self._open += 1
        self._stretches[-1] = _merged(self._stretches[-1], (point, point))

    @property
    def points(self) -> list[Point]:
        """The points to draw, with the first and the last of all."""
        if self.first is None or self.last is None:
            return []
        return sorted({self.first, self.last, *(point for stretch in self._stretches for point in stretch)})


def _merged(a: tuple[Point, Point], b: tuple[Point, Point]) -> tuple[Point, Point]:
    return min(a[0], b[0], key=lambda point: point[1]), max(a[1], b[1], key=lambda point: point[1])


@dataclass(frozen=True)
class Series:
    name: str
    curve: Curve
    style: int  # number of its colour and dash


@dataclass(frozen=True)
class Chart:
    """A figure of lines. `marks`: vertical lines and their labels; `epochs`: where each begins; `best`: a point."""

    title: str
    series: Sequence[Series]
    x: str = "step"  # or "time": seconds
    unit: str = ""
    from_zero: bool = False
    marks: Sequence[tuple[float, str]] = ()
    epochs: Mapping[int, float] = field(default_factory=dict)
    best: Sequence[tuple[Point, int]] = ()  # with the style of their series


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    raw = (high - low) / max(count, 1)
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * size for size in (1, 2, 5) if power * size >= 0.7 * raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, first + 20) if number * step <= high + 1e-9 * step]


def _tick_texts(values: Sequence[float]) -> list[str]:
    """Return numbers with as many digits as tell them apart."""
    step = abs(values[1] - values[0]) if len(values) > 1 else abs(values[0]) or 1.0
    if max(map(abs, values)) >= 1000:
        return [human_rate(value) if value >= 0 else f"-{human_rate(-value)}" for value in values]
    digits = min(max(0, -math.floor(math.log10(step) + 1e-9)), 6) if step >= 1e-6 else -1
    return [f"{value:.{digits}f}" if digits >= 0 else f"{value:.1e}" for value in values]


def clock_text(seconds: float) -> str:
    """Return a time of an axis: 40 s, 1.5 min or 2 h."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def line_chart(chart: Chart) -> str:
    """Draw a figure of lines; empty if no line has a point."""
    drawn = [(one, points) for one in chart.series if (points := one.curve.points)]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x in (points[0][0], points[-1][0])]
    ys = [y for _, points in drawn for _, y in points]
    x_low, x_high = min(0.0, *xs), max(xs)
    low, high = min([0.0] if chart.from_zero else ys), max(ys)
    low, high = (low, high) if high > low else (low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05)
    low, high = low - (0 if chart.from_zero else 0.05 * (high - low)), high + 0.05 * (high - low)

    def at_x(x: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (x - x_low) / ((x_high - x_low) or 1)

    def at_y(y: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (y - low) / (high - low)

    parts = [*_grid(chart, (x_low, x_high), (low, high), at_x, at_y)]
    for one, points in drawn:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        if len(points) > 1:
            parts.append(f'<polyline class="mark line s{one.style % MAX_SERIES}" points="{path}"/>')
        if len(points) <= _MARKED:
            parts += [
                f'<circle class="mark dot s{one.style % MAX_SERIES}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.2">'
                f"<title>{text(one.name)}: {y:.6g} at {text(_x_text(chart, x))}</title></circle>"
                for x, y in points
            ]
    for (x, y), style in chart.best:
        where = f'cx="{at_x(x):.1f}" cy="{at_y(y):.1f}"'
        parts.append(f'<circle class="best s{style % MAX_SERIES}" {where} r="5"><title>best: {y:.6g}</title></circle>')
    unit = f' <span class="unit">{text(chart.unit)}</span>' if chart.unit else ""
    keys = legend((one.name, f"s{one.style % MAX_SERIES}") for one, _ in drawn) if len(drawn) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{text(chart.title)}{unit}</figcaption>{keys}'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(chart.title)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _x_text(chart: Chart, x: float) -> str:
    return clock_text(x) if chart.x == "time" else f"step {x:,.0f}"


def _grid(chart: Chart, xs: Point, ys: Point, at_x: Scale, at_y: Scale) -> Iterable[str]:
    """Yield grid lines with their labels, and the marks of epochs and restarts."""
    rows = ticks(*ys, 4)
    for y, label in zip(rows, _tick_texts(rows), strict=True):
        yield f'<path class="grid" d="M{_LEFT} {at_y(y):.1f}H{_RIGHT}"/>'
        yield f'<text class="tick y" x="{_LEFT - 6}" y="{at_y(y) + 3.5:.1f}">{label}</text>'
    columns = _time_ticks(xs[1]) if chart.x == "time" else ticks(*xs, 5)
    labels = [clock_text(x) for x in columns] if chart.x == "time" else _tick_texts(columns)
    for x, label in zip(columns, labels, strict=True):
        yield f'<path class="axis" d="M{at_x(x):.1f} {_BOTTOM}v4"/>'
        yield f'<text class="tick" x="{min(at_x(x), _RIGHT - 10):.1f}" y="{_BOTTOM + 17}">{label}</text>'
    yield f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>'
    every = math.ceil(len(chart.epochs) / 12)
    for number, x in chart.epochs.items():
        if number % every == 0 and xs[0] < x < xs[1]:
            yield f'<path class="epoch" d="M{at_x(x):.1f} {_BOTTOM}v-6"><title>epoch {number:,} begins</title></path>'
    for x, label in chart.marks:
        yield f'<path class="restart" d="M{at_x(x):.1f} {_TOP}V{_BOTTOM}"><title>{text(label)}</title></path>'


def _time_ticks(seconds: float) -> list[float]:
    """Return round times: of seconds, minutes or hours."""
    unit = next((size for size in (3600.0, 60.0) if seconds >= 2 * size), 1.0)
    return [unit * value for value in ticks(0, seconds / unit, 5)]


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Return a list of names, each beside a sample of its colour; classes s0, s1, ... are lines."""
    items = []
    for name, kind in names:
        is_line = kind[:1] == "s" and kind[1:].isdigit()
        shape = (
            f'<path class="line {kind}" d="M0 5H22"/>' if is_line else f'<rect class="{kind}" width="10" height="10"/>'
        )
        items.append(f'<li><svg class="key" width="{22 if is_line else 10}" height="10">{shape}</svg>{text(name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _part(name: str) -> str:
    """Return the CSS class that colours a part of a step or of a run."""
    return f"p-{name.replace(' ', '-')}"


def _rows(title: str, names: Iterable[str], rows: Sequence[tuple[str, str, str]], axis: Sequence[str] = ()) -> str:
    """Return a figure with a row for each (label, picture, total), and labels of equal distance below."""
    keys = legend((name, _part(name)) for name in names) if names else ""
    scale = "".join(f"<span>{text(label)}</span>" for label in axis)
    rows = [*rows, ("", f'<span class="scale">{scale}</span>', "")] if axis else rows
    lines = [
        f'<div class="row"><b>{text(label)}</b>{picture}<em>{text(total)}</em></div>' for label, picture, total in rows
    ]
    return f'<figure class="bars"><figcaption>{text(title)}</figcaption>{keys}{"".join(lines)}</figure>'


def bars(title: str, rows: Sequence[tuple[str, Mapping[str, float], str]]) -> str:
    """Draw one bar for each (label, seconds by part, total as text), divided by the shares of its parts."""
    shown = dict.fromkeys(name for _, parts, _ in rows for name, spent in parts.items() if spent > 0)
    lines = []
    for label, parts, total in rows:
        whole = sum(parts.values()) or 1.0
        pieces = []
        for name in (name for name in shown if parts.get(name, 0.0) > 0):
            share = 100 * parts[name] / whole
            inside = f"{share:.0f} %" if share >= 7 else ""
            tip = f"{text(name)} {share:.1f} %"
            pieces.append(f'<i class="mark {_part(name)}" style="width:{share:.3f}%" title="{tip}">{inside}</i>')
        lines.append((label, f'<span class="bar">{"".join(pieces)}</span>', total))
    return _rows(title, shown, lines) if shown else ""


Intervals = Mapping[str, Sequence[tuple[float, float]]]  # by name, from and to, as shares of the width


def lanes(title: str, rows: Sequence[tuple[str, Intervals]], axis: Sequence[str]) -> str:
    """Draw what happened when, one lane for each (label, intervals)."""
    names = dict.fromkeys(name for _, found in rows for name, intervals in found.items() if intervals)
    lines = []
    for label, found in rows:
        paths = []
        for name in (name for name in names if found.get(name)):
            sizes = [(round(1e4 * start), max(round(1e4 * (end - start)), 4)) for start, end in found[name]]
            boxes = "".join(f"M{start} 0h{width}v1h-{width}z" for start, width in sizes)
            paths.append(f'<path class="mark {_part(name)}" d="{boxes}"><title>{text(name)}</title></path>')
        lines.append((label, _strip(10_000, paths), ""))
    return _rows(title, names, lines, axis) if names else ""


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[float], str]], axis: Sequence[str], highest: float) -> str:
    """Draw a row of cells for each (label, values up to `highest`, total), stronger for higher; NaN has no cell."""
    lines = []
    for label, values, total in rows:
        by_level: dict[int, list[int]] = {}
        for column, value in enumerate(values):
            if math.isfinite(value):
                by_level.setdefault(min(round(_LEVELS * value / (highest or 1)), _LEVELS), []).append(column)
        paths = []
        for level, columns in by_level.items():
            cells = "".join(f"M{column} 0h1v1h-1z" for column in columns)
            paths.append(f'<path class="mark heat" style="opacity:{0.05 + 0.95 * level / _LEVELS:.2f}" d="{cells}"/>')
        lines.append((label, _strip(len(values), paths), total))
    return _rows(title, (), lines, axis) if any("<path" in strip for _, strip, _ in lines) else ""


def _strip(width: int, paths: Sequence[str]) -> str:
    return f'<svg class="bar" viewBox="0 0 {width} 1" preserveAspectRatio="none">{"".join(paths)}</svg>'
