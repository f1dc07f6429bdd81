"""The tables of bench/study.py, and an adapter's card, from its committed figures.

python bench/study_tables.py [FIGURES.json]
"""

from __future__ import annotations

import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIGURES = os.path.join(ROOT, "bench", "results", "study", "figures.json")
SETS = ("squad", "mtrag", "demo", "canard")
LABELS = {
    "question": "raw question",
    "best rule": "best rule",
    "rewrite": "given rewrite",
    "base-zero": "base model, zero-shot",
    "base": "base model, few-shot",
    "given": "fine-tuned on given rewrites, mix",
}


def read_figures(path: str = FIGURES) -> dict:
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def percent(values: list[float]) -> str:
    mean, low, high = (100 * value for value in values)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def engines(figures: dict) -> list[str]:
    return list(dict.fromkeys(key.partition("/")[2] for key in figures["cells"]))


def labels(figures: dict, engine: str) -> dict[str, str]:
    """System → label of its row, in the order of the tables; warm-ups with the first engine alone."""
    there = figures["cells"][f"{SETS[0]}/{engine}"]
    rows = {name: label for name, label in LABELS.items() if name in there}
    for name, arm in figures["arms"].items():
        if "dev" in arm:
            if engine == engines(figures)[0] and not arm.get("start"):
                rows[f"{name}-warmup"] = f"{name}: warm-up"
            rows[f"{name}-grpo"] = f"{name}: + GRPO"
    return rows


def table(figures: dict, engine: str, rows: dict[str, str], metric: str = "mrr") -> str:
    """Rows of systems (name → label), columns of test sets; percent with 95 % intervals."""
    lines = [f"| {engine} | {' | '.join(SETS)} |", "|---" * (len(SETS) + 1) + "|"]
    for system, label in rows.items():
        found = [figures["cells"][f"{name}/{engine}"][system] for name in SETS]
        shown = [percent(f[metric]) + (f" ({f['rule']})" if "rule" in f else "") for f in found]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def arms_table(figures: dict) -> str:
    """What each arm was trained with, what dev chose, and how long it had the shared card."""
    head = ["arm", "data", "lr", "records", "steps", "dev MRR, start", "best (step)", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, arm in figures["arms"].items():
        if dev := arm.get("dev"):
            step = max(dev, key=dev.get)
            lines.append(
                f"| {name} | {' + '.join(arm['sets'])}, seed {arm['seed']} | {arm['lr']:g} | "
                f"{'' if arm.get('start') else arm['records']} | {len(arm['reward'])} | "
                f"{100 * dev['0']:.1f} | "
                f"{100 * dev[step]:.1f} ({step}) | "
                f"{sum(command['seconds'] for command in arm['commands']) / 60:.1f} |"
            )
    return "\n".join(lines)


def ablation_table(figures: dict) -> str:
    """MRR with BM25 of GRPO with one setting changed, and on squad the difference to the usual
    setting after the same warm-up; how many rewrites on squad are questions."""
    head = ["arm", "dev (step)", "squad", "difference", *SETS[1:], "questions"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, arm in figures["arms"].items():
        cells = [figures["cells"][f"{set_}/BM25"][f"{name}-grpo"] for set_ in SETS]
        step = max((step for step in arm["dev"] if step != "0"), key=arm["dev"].get)
        against = cells[0].get("against")
        low, high = against["ci"] if against else (0, 0)
        row = [
            name,
            f"{100 * arm['dev'][step]:.1f} ({step})",
            percent(cells[0]["mrr"]),
            f"{100 * against['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            if against
            else "",
            *(f"{100 * cell['mrr'][0]:.1f}" for cell in cells[1:]),
            f"{100 * cells[0]['questions']:.0f} %",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


SEARCHES = {
    "question, first 2": "the question, its first 2",
    "question, first 4": "the question, its first 4",
    "once": "shown one search",
    "once-all": "+ GRPO, all gold",
    "once-penalty": "+ GRPO, penalty",
    "twice": "shown two searches",
    "twice-none": "+ GRPO, answer alone",
    "twice-recall": "+ GRPO, gold recall",
    "twice-all": "+ GRPO, all gold",
    "foreign": "the same, foreign passages",
    "empty": "the same, no passages",
}


def searches_table(figures: dict) -> str:
    """Of every system and set: questions with all gold passages found, F1, searches."""
    sets = dict.fromkeys(key.partition("/")[0] for key in figures["cells"])
    lines = [f"| system | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    for system, label in SEARCHES.items():
        row = []
        for name in sets:
            cell = figures["cells"][f"{name}/{system}"]
            row.append(percent(cell["all_gold"]))
            if "f1" in cell:
                row[-1] += f"; {100 * cell['f1'][0]:.1f}; {cell['searches'][0]:.2f}"
        lines.append(f"| {label} | {' | '.join(row)} |")
    return "\n".join(lines)


def card(figures: dict, folder: str, name: str) -> str:
    """The README of the adapter of arm `name` in `folder`."""
    arm = figures["arms"][name]
    rows = {key: LABELS[key] for key in ("question", "best rule", "rewrite")}
    rows |= {f"{name}-warmup": "the adapter after its warm-up", f"{name}-grpo": "**the adapter**"}
    rows["mix-grpo"] = "all weights trained, same data and time"
    formed = [(s, figures["cells"][f"{s}/BM25"][f"{name}-grpo"]["well_formed"]) for s in SETS]
    with open(f"{ROOT}/bench/study_card.md", encoding="utf-8") as f:
        return f.read().format(
            folder=folder,
            arm=name,
            rank=arm["rank"],
            records=arm["records"],
            step=max(arm["dev"], key=arm["dev"].get),
            card=figures["machine"]["card"],
            tables="\n\n".join(table(figures, engine, rows) for engine in engines(figures)),
            well_formed=", ".join(f"{name} {100 * share:.1f} %" for name, share in formed),
        )


def main(path: str = FIGURES) -> None:
    figures = read_figures(path)
    if "hotpotqa/twice" in figures["cells"]:
        return print(searches_table(figures))
    if "kl0" in figures["arms"]:
        return print(ablation_table(figures))
    print(arms_table(figures))
    for metric, title in (("mrr", "MRR"), ("recall@10", "Recall@10")):
        for engine in engines(figures):
            print(f"\n{title}, test splits, percent with 95 % intervals by conversation\n")
            print(table(figures, engine, labels(figures, engine), metric))


if __name__ == "__main__":
    main(*sys.argv[1:])
