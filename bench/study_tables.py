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
    rows = dict(LABELS)
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
    head = ["arm", "data", "lr", "records", "steps", "dev MRR, warm-up", "best (step)", "minutes"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, arm in figures["arms"].items():
        if dev := arm.get("dev"):
            step = max(dev, key=dev.get)
            lines.append(
                f"| {name} | {' + '.join(arm['sets'])}, seed {arm['seed']} | {arm['lr']:g} | "
                f"{arm['records']} | {len(arm['reward'])} | {100 * dev['0']:.1f} | "
                f"{100 * dev[step]:.1f} ({step}) | "
                f"{sum(command['seconds'] for command in arm['commands']) / 60:.1f} |"
            )
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
    print(arms_table(figures))
    for metric, title in (("mrr", "MRR"), ("recall@10", "Recall@10")):
        for engine in engines(figures):
            print(f"\n{title}, test splits, percent with 95 % intervals by conversation\n")
            print(table(figures, engine, labels(figures, engine), metric))


if __name__ == "__main__":
    main(*sys.argv[1:])
