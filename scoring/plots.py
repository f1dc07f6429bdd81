"""SVG plots: curves, stacked layers, intervals and dots.

plots.css has the colours.
"""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 390, 20, 164
POINTS = 300  # most points of a curve
Points = list[tuple[float, float]]


def asset(name: str) -> str:
    """The text of a file beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def number(value: float, percent: bool = False, digits: int = 3) -> str:
    if percent:
        shown = f"{100 * value:.{digits - 2}f}"
        return (shown.rstrip("0").rstrip(".") if "." in shown else shown) + " %"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.{digits}g}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.{max(0, digits - 3)}f}"
    return f"{value:.{digits - 2}e}".replace("e-0", "e-")


def labels(marks: Sequence[float], percent: bool = False) -> list[str]:
    """Format evenly spaced ticks, with as many digits as say where they are."""
    step, unit = (marks[-1] - marks[0]) / max(1, len(marks) - 1), 100 if percent else 1
    for digits in range(3, 16):
        names = [number(mark, percent, digits) for mark in marks]
        shown = (float(name.replace(",", "").removesuffix(" %")) / unit for name in names)
        if all(abs(x - mark) <= 0.01 * abs(step) for x, mark in zip(shown, marks)):
            break
    return names


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values that cover [low, high]."""
    rough = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * k for k in (1, 2, 2.5, 5, 10) if scale * k >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * n for n in range(first, last + 1)]


def thinned(points: Points) -> Points:
    """Average neighbours to get at most POINTS points."""
    size = max(1, math.ceil(len(points) / POINTS))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(column) / len(part) for column in zip(*part)) for part in parts]


@dataclass
class Series:
    """A curve; `band` holds (x, low, high)."""

    name: str
    points: Points
    dots: bool = False
    faint: bool = False
    band: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass
class Picture:
    """SVG body of WIDTH × `height`, with title, unit, key and read-out values."""

    title: str
    body: str
    unit: str = ""
    key: list[tuple[str, str]] = field(default_factory=list)  # (colour class, name)
    values: dict = field(default_factory=dict)  # for page.html's read-out
    height: int = HEIGHT

    def figure(self, note: str = "", alarm: bool = False) -> str:
        """Return an HTML figure; `note` says what to watch, `alarm` highlights it."""
        keys = "".join(
            f'<span class=key><svg viewBox="0 0 10 10"><rect class="{colour}" width="10" '
            f'height="10" rx="2"/></svg>{html.escape(name)}</span>'
            for colour, name in self.key
        )
        unit = f" <span class=unit>{html.escape(self.unit)}</span>" if self.unit else ""
        note = "Look here. " * alarm + note
        values = ""
        if self.values:
            data = html.escape(json.dumps(self.values, separators=(",", ":")))
            values = f' tabindex=0 data-values="{data}"'
        title = html.escape(self.title)
        return (
            f'<figure{" class=alarm" * alarm} aria-label="{title}"{values}><figcaption>'
            f"<b>{title}</b>{unit}{keys}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role=img aria-label="{title}">{self.body}'
            f"</svg><output>{html.escape(note)}</output></figure>"
        )


def text(x: float, y: float, words: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{html.escape(words)}</text>'


class Frame:
    """Maps data to SVG coordinates; `marks` are the labels of the y axis."""

    def __init__(self, xs: Sequence[float], values: Sequence[float], percent: bool = False):
        self.x0, self.x1 = min(xs), max(xs)
        low, high = min(values), max(values)
        if high - low < 1e-9 * max(abs(high), abs(low), 1e-9):
            low, high = (low - 0.5 * abs(low), high + 0.5 * abs(high)) if high else (0.0, 1.0)
        marks = ticks(low, high)
        self.marks = list(zip(marks, labels(marks, percent)))
        self.y0, self.y1 = marks[0], marks[-1]

    def x(self, value: float) -> float:
        if self.x1 == self.x0:
            return (LEFT + RIGHT) / 2
        return LEFT + 4 + (RIGHT - LEFT - 8) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - self.y0) / (self.y1 - self.y0)

    def axes(self) -> str:
        parts = []
        for mark, name in self.marks:
            y = self.y(mark)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
            parts.append(text(LEFT - 5, y + 4, name, "soft end"))
        for mark in ticks(self.x0, self.x1, 5) if self.x1 > self.x0 else [self.x0]:
            if self.x0 <= mark <= self.x1 and mark == round(mark):
                parts.append(text(self.x(mark), BOTTOM + 18, f"{mark:g}", "soft mid"))
        parts.append(text(LEFT - 5, BOTTOM + 18, "step", "soft end"))
        return "".join(parts)

    def values(self, series: dict[str, Points], percent: bool) -> dict:
        """Data for the cursor read-out."""
        rounded = {n: [[x, float(f"{y:.4g}")] for x, y in points] for n, points in series.items()}
        left, right = self.x(self.x0), self.x(self.x1)
        return {"left": left, "right": right, "percent": percent, "series": rounded}


def _path(points: Points) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def curves(
    title: str,
    series: Sequence[Series],
    percent: bool = False,
    unit: str = "",
    best: tuple[float, float] | None = None,
) -> Picture:
    """Plot curves over steps and mark the point `best`."""
    shown = [(4 if s.faint else i, s, thinned(s.points)) for i, s in enumerate(series)]
    bands = [edge for s in series for edge in s.band]
    xs = [x for _, _, points in shown for x, _ in points]
    ys = [y for _, _, points in shown for _, y in points] + [y for b in bands for y in b[1:]]
    frame = Frame(xs, ys, percent)
    parts = [frame.axes()]
    for i, s, points in shown:
        at = [(frame.x(x), frame.y(y)) for x, y in points]
        if s.band:
            edge = [(frame.x(x), frame.y(high)) for x, _, high in s.band]
            edge += [(frame.x(x), frame.y(low)) for x, low, _ in reversed(s.band)]
            parts.append(f'<path class="band f{i}" d="{_path(edge)}Z"/>')
        faint = " faint" * s.faint
        parts.append(f'<path class="curve s{i}{faint}" d="{_path(at)}"/>')
        if s.dots or len(at) == 1:
            dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in at)
            parts.append(f'<g class="f{i}">{"".join(dots)}</g>')
    if best:
        x, y = frame.x(best[0]), frame.y(best[1])
        end, dx = ("end", -9) if x > (LEFT + RIGHT) / 2 else ("", 9)
        label = f"best: {number(best[1], percent)} at step {best[0]:g}"
        parts.append(f'<circle class="best s0" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
        parts.append(text(x + dx, y - 9, label, end))
    key = [(f"f{i}", s.name) for i, s, _ in shown] if len(shown) > 1 else []
    values = frame.values({s.name: points for _, s, points in shown}, percent)
    return Picture(title, "".join(parts), unit, key, values)


def rolling(points: Points, window: int) -> tuple[Points, list[tuple[float, float, float]]]:
    """Return rolling means, and (x, low, high) of their 95 % intervals."""
    means, band = [], []
    for i in range(len(points)):
        near = [y for _, y in points[max(0, i - window // 2) : i + window // 2 + 1]]
        mean, error = mean_and_error(near)
        means.append((points[i][0], mean))
        band.append((points[i][0], mean - 1.96 * error, mean + 1.96 * error))
    return means, band


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error (0 for a single value)."""
    mean, n = sum(values) / len(values), len(values)
    squares = sum((v - mean) ** 2 for v in values)
    return mean, math.sqrt(squares / (n - 1) / n) if n > 1 else 0.0


def trend(title: str, points: Points, unit: str = "") -> Picture:
    """Plot a metric with its rolling mean and 95 % interval."""
    window = max(3, len(points) // 10 | 1)
    if len(points) < 2 * window:
        return curves(title, [Series(title, points, dots=True)], unit=unit)
    means, band = rolling(points, window)
    smooth = Series(f"mean of {window} steps, 95 %", means, band=band)
    return curves(title, [smooth, Series("a step", points, faint=True)], unit=unit)


def stack(
    title: str,
    steps: Sequence[int],
    layers: dict[str, Sequence[float]],
    percent: bool = False,
    colour: str = "f",
    unit: str = "",
) -> Picture:
    """Plot stacked layers by step, the first at the bottom.

    colour: f, or b for outcomes from good to bad. Unless `percent`, columns are cut at 1.2 times
    the 95th percentile.
    """
    columns = thinned(list(zip(steps, *layers.values())))
    steps, *values = zip(*columns)
    heights = sorted(map(sum, zip(*values)))
    common = heights[int(0.95 * (len(heights) - 1))]
    high = 1.0 if percent else min(heights[-1], 1.2 * common) or 1.0
    frame = Frame([steps[0] - 0.5, steps[-1] + 0.5], [0.0, high], percent)
    edges = [(a + b) / 2 for a, b in zip(steps, steps[1:])]
    edges = [steps[0] - 0.5, *edges, steps[-1] + 0.5]
    floor = [0.0] * len(steps)
    parts = []
    for i, layer in enumerate(values):
        top = [min(frame.y1, a + b) for a, b in zip(floor, layer)]
        corners = zip(top + floor[::-1], edges[1:] + edges[-2::-1])
        line = "".join(f"V{frame.y(y):.1f}H{frame.x(x):.1f}" for y, x in corners)
        start = f"M{frame.x(edges[0]):.1f} {frame.y(floor[0]):.1f}"
        parts.append(f'<path class="{colour}{i}" d="{start}{line}Z"/>')
        floor = top
    read = {name: list(zip(steps, layer)) for name, layer in zip(layers, values) if any(layer)}
    key = [(f"{colour}{i}", name) for i, name in enumerate(layers) if name in read]
    body = frame.axes() + "".join(parts)
    return Picture(title, body, unit, key, frame.values(read, percent))


def dots(
    title: str, points: Sequence[tuple[float, float, int]], names: list[tuple[float, str]]
) -> Picture:
    """Plot (step, height, band) as dots, equal ones side by side; `names` label the heights."""
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    heights = [y for y, _ in names]
    frame = Frame([first - 0.5, last + 0.5], heights)
    frame.marks, frame.y0, frame.y1 = names, min(heights) - 0.6, max(heights)
    steps = sorted({p[0] for p in points})
    room = min((b - a for a, b in zip(steps, steps[1:])), default=1) / max(1, frame.x1 - frame.x0)
    gap = min(7.0, (RIGHT - LEFT) * room / 9)
    placed: dict[tuple[float, float], int] = {}
    parts = [frame.axes()]
    for x, y, band in points:
        n = placed[x, y] = placed.get((x, y), -1) + 1
        shift = gap * ((n + 1) // 2) * (1 if n % 2 else -1)
        place = f'cx="{frame.x(x) + shift:.1f}" cy="{frame.y(y):.1f}"'
        parts.append(f'<circle class="dot b{band}" {place} r="4"/>')
    return Picture(title, "".join(parts))


def intervals(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[float, Sequence[float] | None]]]],
    names: Sequence[str] = (),
) -> Picture:
    """Plot shares; rows are (label, (value, (low, high) or None) for each of `names`)."""
    edges = [v for _, cells in rows for value, ci in cells for v in (value, *(ci or ()))]
    low, high = min(0.0, *edges), max(edges)
    marks = ticks(low, high if high > low else low + 1)

    def x(value: float) -> float:
        return 20 + (WIDTH - 40) * (value - marks[0]) / (marks[-1] - marks[0])

    tall = 24 + 11 * max(len(cells) for _, cells in rows)
    bottom, parts = tall * len(rows) + 4, []
    for mark, name in zip(marks, labels(marks, True)):
        parts.append(f'<path class="grid" d="M{x(mark):.1f} 0V{bottom}"/>')
        parts.append(text(x(mark), bottom + 16, name, "soft mid"))
    for n, (label, cells) in enumerate(rows):
        parts.append(text(20, tall * n + 16, label if len(label) < 32 else label[:30] + "…"))
        for i, (value, ci) in enumerate(cells):
            y = tall * n + 27 + 11 * i
            if ci:
                parts.append(f'<path class="whisker s{i}" d="M{x(ci[0]):.1f} {y}H{x(ci[1]):.1f}"/>')
            parts.append(f'<circle class="f{i}" cx="{x(value):.1f}" cy="{y}" r="4.5"/>')
            if len(cells) == 1:
                ends = f" [{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]" if ci else ""
                shown = f"{100 * value:.1f}{ends}"
                parts.append(text(WIDTH - 20, tall * n + 16, shown, "soft end"))
    key = [(f"f{i}", name) for i, name in enumerate(names)]
    return Picture(title, "".join(parts), "", key, height=bottom + 24)


def page(title: str, body: str, facts: dict | None = None, scripts: str = "") -> str:
    """Fill in page.html; `facts` and `scripts` are for the rollouts."""
    parts = {"title": html.escape(title), "body": body, "scripts": scripts}
    parts["style"] = asset("plots.css")
    parts["facts"] = json.dumps(facts or {}).replace("<", "\\u003c")
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], asset("page.html"))
