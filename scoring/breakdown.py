"""Where in a conversation a system gains: queries grouped by turn depth and by topic switch, and a plot of the groups.

A file of its own because it is about conversations and drawing, while `evaluate.py` is about scores, and writes what
these functions say as tables, JSON and SVG.  The plots are SVG text made here: no plotting package needed.
"""

from __future__ import annotations

from html import escape

from data import read_corpus, Turn

DEEP = 10  # turns beyond it share one group: few conversations are that long


def by_depth(turns: list[Turn]) -> dict[str, str]:
    """Query id → "1", "2", … "10", "11+": the turn's number within its conversation."""
    return {turn.query_id: str(turn.turn) if turn.turn <= DEEP else f"{DEEP + 1}+" for turn in turns}


def by_topic(turns: list[Turn], titles: dict[str, str]) -> dict[str, str]:
    """Query id → "first turn", "same topic", "topic switch" or "unknown", against the turn before in the file.

    The data's own `topic` decides where turns have one (TopiOCQA).  Elsewhere the titles of the gold passages do, by
    passage id: a switch is a turn whose golds share no title with those of the turn before; unknown where either has
    no titled gold.  A turn that the file left out (QReCC: without gold) can't be compared with.
    """
    def topics(turn: Turn) -> set[str]:
        if turn.extra.get("topic"):
            return {str(turn.extra["topic"])}
        return {titles[g] for g in turn.gold_ids if titles.get(g)}

    labels: dict[str, str] = {}
    before: dict[str, Turn] = {}
    for turn in sorted(turns, key=lambda t: t.turn):
        last = before.get(turn.conversation_id)
        before[turn.conversation_id] = turn
        if last is None:
            labels[turn.query_id] = "first turn" if not turn.context else "unknown"
        elif not topics(last) or not topics(turn):
            labels[turn.query_id] = "unknown"
        else:
            labels[turn.query_id] = "same topic" if topics(last) & topics(turn) else "topic switch"
    return labels


def gold_titles(corpus: str, turns: list[Turn]) -> dict[str, str]:
    """Passage id → title of the turns' gold passages, from a corpus file read once; the untitled left out."""
    golds = {g for turn in turns for g in turn.gold_ids}
    return {p.id: p.title for p in read_corpus(corpus) if p.id in golds and p.title}


def order(label: str) -> tuple:
    """Sort key of the labels above: numbers as numbers, then the topics in reading order."""
    topics = ("first turn", "same topic", "topic switch", "unknown")
    return (0, int(label.rstrip("+"))) if label[0].isdigit() else (1, topics.index(label))


COLOURS = ("#1b6ca8", "#c8553d", "#3c8d5a", "#8a5aa8", "#b08a1e", "#4a4a4a", "#d0679d", "#2a9d9d")


def plot(title: str, labels: list[str], series: dict[str, list[tuple[float, list[float] | None]]]) -> str:
    """An SVG picture: for every system a point with its interval above each label, in percent, joined by a line.

    series: system → one (value, [low, high] or None) a label, as shares of 1.
    """
    width, height, left, top, bottom = 760, 420, 50, 40, 60
    step = (width - left - 20) / max(len(labels), 1)
    highest = max([v for points in series.values() for value, ci in points for v in (value, *(ci or ()))], default=0.0)
    most = min(1.0, (int(highest * 10) + 1) / 10)

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - min(value, most) / most)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 18 * len(series)}" '
             'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>',
             f'<text x="{left}" y="22" font-size="14">{escape(title)}</text>']
    for tick in range(int(round(most * 10)) + 1):
        at = y(tick / 10)
        parts += [f'<line x1="{left}" x2="{width - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>',
                  f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{tick * 10}</text>']
    for i, label in enumerate(labels):
        parts.append(f'<text x="{left + step * (i + 0.5):.1f}" y="{height - bottom + 20}" text-anchor="middle">'
                     f'{escape(label)}</text>')
    for n, (system, points) in enumerate(series.items()):
        colour, shift = COLOURS[n % len(COLOURS)], (n - (len(series) - 1) / 2) * min(8, step / (len(series) + 1))
        at = [(left + step * (i + 0.5) + shift, value, ci) for i, (value, ci) in enumerate(points)]
        parts.append(f'<polyline fill="none" stroke="{colour}" points="'
                     + " ".join(f"{x:.1f},{y(value):.1f}" for x, value, _ in at) + '"/>')
        for x, value, ci in at:
            if ci:
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(ci[0]):.1f}" y2="{y(ci[1]):.1f}" '
                             f'stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>')
        parts += [f'<rect x="{left}" y="{height + 18 * n - 22}" width="10" height="10" fill="{colour}"/>',
                  f'<text x="{left + 16}" y="{height + 18 * n - 13}">{escape(system)}</text>']
    return "\n".join([*parts, "</svg>", ""])
