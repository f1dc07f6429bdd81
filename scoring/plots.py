"""Tables in Markdown and charts in SVG: the one module that draws."""

from __future__ import annotations

import math
from html import escape

from scoring.ranking import METRICS, PRINTED

Point = tuple[float, float, list[float] | None]  # x, y, [low, high] of y or None

COLOURS = ("#1b6ca8", "#c8553d", "#3c8d5a", "#8a5aa8", "#b08a1e", "#4a4a4a", "#d0679d", "#2a9d9d")


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("| --- ", "|---")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) that span [low, high]."""
    rough = (high - low or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


class _Frame:
    """Where values lie in the picture."""

    def __init__(self, xs: list[float], ys: list[float], width: int, height: int):
        self.left, self.right, self.top, self.bottom = 54, width - 20, 34, height - 40
        self.ticks, self.low, self.high = ticks(min(ys), max(ys)), min(xs), max(xs)

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        first, last = self.ticks[0], self.ticks[-1]
        return self.bottom - (self.bottom - self.top) * (value - first) / (last - first)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, x2: float, y1: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def chart(
    title: str,
    series: dict[str, list[Point]],
    labels: list[str] | None = None,
    width: int = 760,
    height: int = 420,
) -> str:
    """An SVG picture with one line a series, through points with their intervals.

    labels: of the places x = 0, 1, 2, …, with the y axis from 0; without them x is a number.
    Names of series stand below where there are several.
    """
    points = [point for line in series.values() for point in line]
    ys = [v for _, y, interval in points for v in (y, *(interval or ()))] + [0.0] * bool(labels)
    xs = [-0.5, len(labels) - 0.5] if labels else [x for x, _, _ in points]
    frame = _Frame(xs, ys or [0.0], width, height)
    legend = 18 * len(series) if len(series) > 1 else 0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + legend}" '
        f'width="{width}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{frame.left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in frame.ticks:
        parts.append(_line(frame.left, frame.right, frame.y(tick), frame.y(tick), "#ddd"))
        parts.append(_text(frame.left - 6, frame.y(tick) + 4, f"{tick:.4g}", "end"))
    if labels:
        parts += [
            _text(frame.x(i), frame.bottom + 18, label, "middle") for i, label in enumerate(labels)
        ]
    else:
        parts.append(_text(frame.left, frame.bottom + 18, f"{frame.low:g}"))
        parts.append(_text(frame.right, frame.bottom + 18, f"step {frame.high:g}", "end"))
    for n, (name, line) in enumerate(series.items()):
        colour = COLOURS[n % len(COLOURS)]
        shift = 8 * (n - (len(series) - 1) / 2) if labels else 0  # intervals side by side
        places = [(frame.x(x) + shift, frame.y(y), interval) for x, y, interval in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{path}"/>')
        for x, y, interval in places if len(places) <= 40 else ():
            if interval:
                parts.append(_line(x, x, frame.y(interval[0]), frame.y(interval[1]), colour))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        if legend:
            y = height + 18 * n
            parts.append(
                f'<rect x="{frame.left}" y="{y - 10}" width="10" height="10" fill="{colour}"/>'
            )
            parts.append(_text(frame.left + 16, y, name))
    return "\n".join([*parts, "</svg>"])


# -------------------------------------------------------------------------------- tables of systems

# the columns of every table, in this order; all in percent but the last
NAMES = {
    **{
        m: m.replace("recall", "Recall").replace("mrr", "MRR").replace("ndcg", "NDCG")
        for m in METRICS
    },
    "all_gold@10": "all gold@10",
    "em": "EM",
    "f1": "F1",
    "acc": "acc",
    "precision": "precision",
    "recall": "recall",
    "well_formed": "well-formed",
    "gold_recall": "gold recall",
    "all_gold": "all gold",
    "searches": "searches",
}
COUNTS = ("queries", "questions", "missing", "errors", "cut")
KINDS = {
    "depth": "turn of the conversation",
    "topic": "topic, against the turn before",
    "type": "type of question",
}
FEW = 50  # units, below which the table says that percentile intervals are a little narrow


def cell(name: str, value: float | None, ci: list[float] | None, sign: str = "") -> str:
    if value is None:
        return "–"
    scale, form = (1, f"{sign}.2f") if name == "searches" else (100, f"{sign}.1f")
    interval = f" [{scale * ci[0]:{form}}, {scale * ci[1]:{form}}]" if ci else ""
    return f"{scale * value:{form}}{interval}"


def tables(rows: dict[str, dict], unit: str, units: int) -> str:
    """Markdown: means with intervals; the paper's protocol; differences with p; notes on counts."""
    names = [name for name in NAMES if any(name in row for row in rows.values())]
    counts = [name for name in COUNTS if any(name in row for row in rows.values())]
    heads, first = [NAMES[name] for name in names], next(iter(rows))
    top, below, paper, notes = [], [], [], []
    before = ""
    for title, row in rows.items():
        cells = [cell(name, row.get(name), row["ci"].get(name)) for name in names]
        top.append([title, *cells, *(str(row.get(name, "–")) for name in counts)])
        for key, label in (("paired", title), ("paired_before", f"{title}, minus {before}")):
            if key in row:
                tests = [(name, row[key].get(name)) for name in names]
                below.append([label, *(_difference(name, test) for name, test in tests)])
        if "paper" in row:
            shares = [f"{100 * row['paper'][name]:.1f}" for name in PRINTED.values()]
            paper.append([title, *shares, str(row["paper"]["queries"])])
        notes += [f"{title}: {note}" for note in _notes(row)]
        before = title
    percent = "Percent (searches: their number)" if "searches" in names else "Percent"
    few = " Percentile intervals of so few are slightly too narrow." if units < FEW else ""
    parts = [
        markdown_table(["system", *heads, *counts], top),
        f"{percent} with 95 % bootstrap intervals, drawn by {unit} ({units} of them).{few}",
    ]
    if paper:
        head = ["as the paper's scripts count", *PRINTED.values(), "queries averaged"]
        parts.append(markdown_table(head, paper))
        parts.append(
            'There "MRR@3" is the MRR above; queries without results, or whose response did not '
            "parse, are left out of the mean."
        )
    if below:
        parts.append(markdown_table([f"minus {first}", *heads], below))
    return "\n\n".join(parts + notes)


def _difference(name: str, test: dict | None) -> str:
    if test is None:
        return "–"
    return cell(name, test["difference"], test["ci"], "+") + f" p={test['p']:.4f}"


def _notes(row: dict) -> list[str]:
    total = row.get("queries", row.get("questions"))
    what = "queries" if "queries" in row else "questions"
    notes = []
    if row["missing"]:
        notes.append(f"{row['missing']} of {total} {what} have no results and count 0.")
    if row["extra"]:
        notes.append(f"{row['extra']} further {what} are not judged and were ignored.")
    if row.get("cut"):
        notes.append(f"{row['cut']} queries were longer than the retriever takes, and cut.")
    if row.get("cut_passages"):
        notes.append(f"{row['cut_passages']} passages are longer than the encoder reads, and cut.")
    if row.get("judged"):
        notes.append(f"gold recall and all gold over the {row['judged']} judged questions.")
    if "status" in row:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(row["status"].items()))
        notes.append(f"rewrites by status: {counts}.")
    return notes


def _labels(kind: str, rows: dict[str, dict]) -> list[str]:
    groups = next(iter(rows.values()))["groups"][kind]
    return [f"{label} ({group['queries']})" for label, group in groups.items()]


def group_table(kind: str, rows: dict[str, dict], metric: str) -> str:
    body = []
    for title, row in rows.items():
        groups = row["groups"][kind].values()
        body.append(
            [title, *(cell(metric, group[metric], group["ci"][metric]) for group in groups)]
        )
    return markdown_table([f"{NAMES[metric]} by {KINDS[kind]}", *_labels(kind, rows)], body)


def group_chart(kind: str, rows: dict[str, dict], metric: str) -> str:
    series = {}
    for title, row in rows.items():
        series[title] = [
            (i, 100 * group[metric], group["ci"][metric] and [100 * v for v in group["ci"][metric]])
            for i, group in enumerate(row["groups"][kind].values())
        ]
    title = f"{NAMES[metric]} (percent) by {KINDS[kind]}; in brackets: queries"
    return chart(title, series, _labels(kind, rows))
