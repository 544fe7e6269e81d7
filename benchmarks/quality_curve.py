"""Draw a metric against minutes of training as an SVG, with one curve per run.

    python benchmarks/quality_curve.py runs/sasrec=val --metric full/ndcg@10 --line 0.1821 --output curve.svg

`=val` or `=test` selects the lines of metrics.jsonl. Minutes count from the first line of the run, so a run that was
stopped and resumed shows its pause.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 380, 60, 30, 150, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#6d597a")


def points(run: Path, split: str, metric: str) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    start = lines[0]["time"]
    found = [((line["time"] - start) / 60, line[metric]) for line in lines if line["split"] == split]
    if not found:
        raise SystemExit(f"{run}/metrics.jsonl has no line of split '{split}' with '{metric}'.")
    return found


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between `low` and `high`."""
    steps = (size * 10.0**power for power in range(-4, 4) for size in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= most)
    first = -(-low // step)
    return [number * step for number in range(int(first), int(high / step) + 1)]


def drawn(curves: dict[str, list[tuple[float, float]]], metric: str, levels: list[float]) -> str:
    values = [value for curve in curves.values() for _, value in curve] + levels
    low, high, last = min(values), max(values), max(curve[-1][0] for curve in curves.values())
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def x(minutes: float) -> float:
        return _LEFT + minutes / last * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def text(at: tuple[float, float], words: str, more: str = "") -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" {more}>{words}</text>'

    def line(start: tuple[float, float], end: tuple[float, float], more: str) -> str:
        return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {more}/>'

    right = _WIDTH - _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        text((_LEFT, _TOP - 12), metric, 'font-weight="bold"'),
        text((right, _HEIGHT - 14), "minutes of training", 'text-anchor="end"'),
    ]
    for value in ticks(low, high, 8):
        parts.append(line((_LEFT, y(value)), (right, y(value)), 'stroke="#ddd"'))
        parts.append(text((_LEFT - 6, y(value) + 4), f"{value:.3g}", 'text-anchor="end"'))
    for minutes in ticks(0, last, 8):
        parts.append(text((x(minutes), _HEIGHT - _BOTTOM + 18), f"{minutes:g}", 'text-anchor="middle"'))
    for level in levels:
        parts.append(line((_LEFT, y(level)), (right, y(level)), 'stroke="#777" stroke-dasharray="5 4"'))
        parts.append(text((right + 6, y(level) + 4), f"{level:.4f}", 'fill="#777"'))
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        for one, other in pairwise(curve):
            parts.append(
                line((x(one[0]), y(one[1])), (x(other[0]), y(other[1])), f'stroke="{colour}" stroke-width="2"')
            )
        parts += [f'<circle cx="{x(m):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for m, v in curve]
        end = curve[-1]
        parts.append(text((x(end[0]) + 8, y(end[1]) - 6), f"{name} {end[1]:.4f}", f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN=SPLIT", help="a run directory and the split, val or test")
    parser.add_argument("--metric", default="full/ndcg@10")
    parser.add_argument("--line", type=float, action="append", default=[], help="draw a dashed line at this value")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    curves = {}
    for run, split in (entry.rsplit("=", 1) for entry in options.runs):
        curves[f"{Path(run).name}, {split}"] = points(Path(run), split, options.metric)
    options.output.write_text(drawn(curves, options.metric, options.line), encoding="utf-8")
    print(json.dumps({name: curve[-1][1] for name, curve in curves.items()}))


if __name__ == "__main__":
    main()
