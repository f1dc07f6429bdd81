"""Tables and a page of scored systems: title → row of evaluate.py's metrics.json."""

from __future__ import annotations

import html

from scoring import plots
from scoring.ranking import METRICS, PRINTED

# key → column head, in table order
NAMES = {m: m.capitalize() if m.startswith("recall") else m.upper() for m in METRICS} | {
    head.lower().replace(" ", "_").replace("-", "_"): head
    for head in ("all gold@10", "EM", "F1", "judge", "acc", "precision", "recall", "well-formed")
    + ("gold recall", "all gold", "searches")
}
COUNTS = ("queries", "questions", "missing", "errors", "cut")
KINDS = {
    "depth": "turn of the conversation",
    "topic": "topic, against the turn before",
    "type": "type of question",
}
NOTES = {
    "missing": "{missing} of {total} {what} have no results and count 0.",
    "extra": "{extra} further {what} are not judged and were ignored.",
    "cut": "{cut} queries were longer than the retriever takes, and cut.",
    "cut_passages": "{cut_passages} passages are longer than the encoder reads, and cut.",
    "unjudged": "judge without {unjudged} {what}, of which it gave no verdict.",
    "judged": "gold recall and all gold over the {judged} judged questions.",
}


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines).replace("| --- ", "|---")


def cell(name: str, value: float | None, ci: list[float] | None, sign: str = "") -> str:
    """Format a metric and its interval in percent (`searches` as a number)."""
    if value is None:
        return "–"
    scale, form = (1, f"{sign}.2f") if name == "searches" else (100, f"{sign}.1f")
    interval = f" [{scale * ci[0]:{form}}, {scale * ci[1]:{form}}]" if ci else ""
    return f"{scale * value:{form}}{interval}"


def _difference(name: str, test: dict | None) -> str:
    if test is None:
        return "–"
    return cell(name, test["difference"], test["ci"], "+") + f" p={test['p']:.4f}"


def tables(rows: dict[str, dict], note: str) -> str:
    """Return Markdown: means, the paper's protocol, paired differences and notes.

    note: end of the sentence on intervals.
    """
    names = [name for name in NAMES if any(name in row for row in rows.values())]
    counts = [name for name in COUNTS if any(name in row for row in rows.values())]
    heads, titles = [NAMES[name] for name in names], list(rows)
    top, below, paper, notes = [], [], [], []
    for title, before, row in zip(titles, ["", *titles], rows.values()):
        cells = [cell(name, row.get(name), row["ci"].get(name)) for name in names]
        top.append([title, *cells, *(str(row.get(name, "–")) for name in counts)])
        for key, label in (("paired", title), ("paired_before", f"{title}, minus {before}")):
            if key in row:
                below.append([label, *(_difference(n, row[key].get(n)) for n in names)])
        if "paper" in row:
            shares = [f"{100 * row['paper'][name]:.1f}" for name in PRINTED.values()]
            paper.append([title, *shares, str(row["paper"]["queries"])])
        notes += [f"{title}: {note}" for note in _notes(row)]
    percent = "Percent (searches: their number)" if "searches" in names else "Percent"
    parts = [
        markdown_table(["system", *heads, *counts], top),
        f"{percent} with 95 % bootstrap intervals{note}",
    ]
    if paper:
        head = ["as the paper's scripts count", *PRINTED.values(), "queries averaged"]
        parts.append(markdown_table(head, paper))
        parts.append(
            'There "MRR@3" is the MRR above; queries without results, or whose response did not '
            "parse, are left out of the mean."
        )
    if below:
        parts.append(markdown_table([f"minus {titles[0]}", *heads], below))
    return "\n\n".join(parts + notes)


def _notes(row: dict) -> list[str]:
    what = "queries" if "queries" in row else "questions"
    notes = [NOTES[k].format(**row, total=row[what], what=what) for k in NOTES if row.get(k)]
    if "status" in row:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(row["status"].items()))
        notes.append(f"rewrites by status: {counts}.")
    return notes


def group_table(kind: str, rows: dict[str, dict], metric: str) -> str:
    """Return a Markdown table of a metric by system and query group."""
    labels = [f"{k} ({v['queries']})" for k, v in next(iter(rows.values()))["groups"][kind].items()]
    body = [
        [title, *(cell(metric, g[metric], g["ci"][metric]) for g in row["groups"][kind].values())]
        for title, row in rows.items()
    ]
    return markdown_table([f"{NAMES[metric]} by {KINDS[kind]}", *labels], body)


def html_table(markdown: str) -> str:
    """Convert a `markdown_table` to HTML."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in markdown.splitlines())
    cells = "".join(f"<th scope=col>{html.escape(name)}" for name in head)
    lines = [f"<tr>{cells}"]
    for label, *values in rows:
        cells = "".join(f"<td>{html.escape(value)}" for value in values)
        lines.append(f"<tr><th scope=row>{html.escape(label)}{cells}")
    return f"<div class=wide tabindex=0><table>{''.join(lines)}</table></div>"


def tables_page(title: str, text: str, rows: dict[str, dict]) -> str:
    """Return an HTML page: plots with intervals, then the tables of `text`.

    Plots by query group show the first and the last four systems.
    """
    shown = [
        name
        for name in ("mrr", "ndcg@3", "recall@10", "f1", "em")
        if all(name in row for row in rows.values())
    ]
    pictures = [
        plots.intervals(
            NAMES[name],
            [(title, [(row[name], row["ci"].get(name))]) for title, row in rows.items()],
        )
        for name in shown
    ]
    few = list(rows)[:1] + list(rows)[1:][-4:]
    for kind, labels in next(iter(rows.values())).get("groups", {}).items():
        parts = [
            (f"{label} ({group['queries']})", [rows[s]["groups"][kind][label] for s in few])
            for label, group in labels.items()
        ]
        cells = [(label, [(g[shown[0]], g["ci"].get(shown[0])) for g in of]) for label, of in parts]
        pictures.append(plots.intervals(f"{NAMES[shown[0]]} by {KINDS[kind]}", cells, few))
    figures = "".join(picture.figure() for picture in pictures)
    lines = [
        html_table(part) if part.startswith("|") else f"<p>{html.escape(part)}</p>"
        for part in text.split("\n\n")
    ]
    note = "<p>Percent with 95 % intervals; where bars overlap, the paired tests below decide.</p>"
    return plots.page(
        title, f"{note}<div class=grid>{figures}</div><h2>Tables</h2>{''.join(lines)}"
    )
