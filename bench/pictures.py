"""The README's pictures, docs/learning.svg and docs/followed.svg, from committed figures.

python bench/pictures.py          draws them again, from bench/results/long_run_demo/metrics.jsonl and bench/results/followed.json
python bench/pictures.py RUN      first takes the prompt that gained most from a run's folder into followed.json
"""

from __future__ import annotations

import html
import json
import os
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from runs import read_metrics, write_json  # noqa: E402
from scoring import plots, run_page  # noqa: E402

METRICS = os.path.join(ROOT, "bench", "results", "long_run_demo", "metrics.jsonl")
FOLLOWED = os.path.join(ROOT, "bench", "results", "followed.json")
SHOWN = 7  # lines of text


def standalone(pictures: list[plots.Picture], label: str) -> str:
    """Return an SVG file of pictures side by side; `label` is its aria-label."""
    parts = []
    for n, picture in enumerate(pictures):
        x = n * (plots.WIDTH + 20)
        parts.append(plots.text(x + 6, 20, picture.title, "head"))
        parts.append(plots.text(x + plots.WIDTH - 10, 20, picture.unit, "soft end"))
        left = x + 6.0
        for colour, name in picture.key:
            parts.append(f'<rect class="{colour}" x="{left}" y="31" width="10" height="10"/>')
            parts.append(plots.text(left + 15, 41, name, "soft"))
            left += 32 + 6.4 * len(name)
        parts.append(f'<g transform="translate({x} 48)">{picture.body}</g>')
    width, height = len(pictures) * (plots.WIDTH + 20) - 20, 56 + max(p.height for p in pictures)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img" aria-label="{html.escape(label)}"><style>{plots.asset("plots.css")}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def learning() -> str:
    rows = read_metrics(METRICS)
    reward = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    dev = [(row["step"], row["dev_mrr"]) for row in rows if "dev_mrr" in row]
    best = max(dev, key=lambda point: point[1])
    line = plots.Series("dev MRR", dev, dots=True)
    pictures = [
        plots.trend("Reward", reward, "mean of 256 responses a step"),
        plots.curves("MRR on held-out conversations", [line], True, "greedy", best),
    ]
    label = (
        f"Over {len(reward)} steps the reward rises from {reward[0][1]:.2f} to {reward[-1][1]:.2f}."
    )
    return standalone(pictures, label)


def take(folder: str) -> None:
    """Write FOLLOWED from a run's rollouts."""
    log = run_page.read_log(folder)
    log.prompts = run_page.read_prompts(log.config)
    for _ in run_page.packed(log):
        pass
    name = next(n for n, w in run_page.choose_followed(log).items() if w.endswith("gained most"))
    kept = ("rewrite", "rank", "reward", "well_formed", "band")
    found = {
        step: [{key: row.get(key) for key in kept} for row in rows]
        for step, rows in run_page.appearances(log, name).items()
    }
    prompt = {k: v for k, v in log.prompts.get(name, {}).items() if k in ("context", "question")}
    size = {key: log.config.get(key) for key in ("prompts_per_step", "group_size", "lr")}
    case = {"query_id": name, **prompt, "steps": log.steps, **size, "responses": found}
    write_json(FOLLOWED, case)


def quotes(found: dict[int, list[dict]], title: str) -> plots.Picture:
    """The middle one of the responses, by reward, at a few of the steps."""
    lines = list(found.items())
    places = {round(i * (len(lines) - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    lines = [lines[i] for i in sorted(places)]
    parts, y = [], 14
    for step, rows in lines:
        row = rows[len(rows) // 2]
        label = f"rank {row['rank']}" if row["rank"] else run_page.RANKS[row["band"]]
        parts.append(plots.text(0, y, f"step {step}", "soft"))
        parts.append(f'<circle class="b{row["band"]}" cx="62" cy="{y - 4}" r="5"/>')
        parts.append(plots.text(74, y, label, "soft"))
        for part in textwrap.wrap(run_page.wording(row), 38)[:2]:
            parts.append(plots.text(150, y, part))
            y += 17
        y += 7
    return plots.Picture(title, "".join(parts), height=y)


def followed() -> str:
    with open(FOLLOWED, encoding="utf-8") as f:
        case = json.load(f)
    found = {int(step): rows for step, rows in case["responses"].items()}
    title = "Rank of the gold passage, all responses"
    dots = run_page.followed_picture(found, title)
    said = quotes(found, f"“{case['question']}”, rewritten")
    label = f"The rewrites of {case['question']!r} over the steps."
    return standalone([dots, said], label)


if __name__ == "__main__":
    if sys.argv[1:]:
        take(sys.argv[1])
    for name, draw in (("learning", learning), ("followed", followed)):
        with open(os.path.join(ROOT, "docs", f"{name}.svg"), "w", encoding="utf-8") as out:
            out.write(draw())
