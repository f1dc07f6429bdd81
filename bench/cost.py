"""What the paper's GRPO runs cost on one and eight cards, as arithmetic from committed JSON: the tables of docs/cost.md.

    python bench/cost.py

Steps are those of the paper: whole batches of an epoch's turns (sources/published.yaml) × the epochs of the run's YAML in
configs/.  A step is what its tokens take at the rates of a whole step measured on one card (RATES), the gold ranks of its
responses, their encoding, and a weight sync.  Phases divide by the number of cards, the update also by the efficiency that
two cards had; the sync does not divide.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
RATES = {"H100": ("step_3b_vllm", "vllm"), "H200": ("step_3b_h200", "torch")}  # file and engine
RUNS = {"topiocqa": "TopiOCQA", "qrecc": "QReCC"}
CARDS = (1, 8)


def read(name: str) -> dict:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


def rates(card: str) -> dict[str, float]:
    """Tokens a second of the phases of a measured step, and the seconds of its sync."""
    name, engine = RATES[card]
    f = read(name)
    s = f["ours"][engine]
    unique = f["prompts"] * (f["prompt_len"] + f["responses"] * (f["new"] - 1))
    return {
        "sample": f["prompts"] * f["responses"] * f["new"] / s["phases"]["sample"],
        "reference": unique / s["phases"]["reference"],
        "update": unique / s["phases"]["update"],
        "sync": s["phases"]["sync"],
    }


def run_sizes(name: str) -> dict[str, int]:
    """Steps, tokens and searches of one run; lengths are those of bench/update.py, which has the paper's."""
    counts = yaml.safe_load((ROOT / "sources/published.yaml").read_text())[name]["counts"]
    cfg = yaml.safe_load((ROOT / f"configs/{name}-qwen3b-grpo.yaml").read_text())
    prompts, group, lengths = cfg["prompts_per_step"], cfg["group_size"], read("update_3b_two")
    prompt, response = lengths["prompt_tokens"], lengths["response_tokens"]
    return {
        "prompts": prompts,
        "group": group,
        "steps": counts["train_turns"] // prompts * cfg["epochs"],
        "sampled": prompts * group * response,
        "unique": prompts * (prompt + group * (response - 1)),
        "passages": counts["passages"],
        "turns": counts["train_turns"],
        "response": response,
    }


def step_seconds(size: dict[str, int], rate: dict[str, float], cards: int) -> dict[str, float]:
    """Seconds of every phase of a step."""
    kernel, encode = read("gold_ranks"), read("encode")
    pair = read("update_3b_two")["settings"][0]
    efficiency = pair["against"]["throughput_ratio"] / 2 if cards > 1 else 1.0
    searches = size["prompts"] * size["group"]
    ranks = next(s for s in kernel["sizes"] if s["queries"] == 2048)["gold_ranks_call_ms"] / 1e3
    return {
        "sample": size["sampled"] / rate["sample"] / cards,
        "search": (
            searches / encode["steady_passages_s"]
            + ranks * searches / 2048 * size["passages"] / kernel["passages"]
        )
        / cards,
        "reference": size["unique"] / rate["reference"] / cards,
        "update": size["unique"] / rate["update"] / cards / efficiency,
        "sync": rate["sync"],
    }


def row(title: str, card: str, cards: int, steps: int, phases: dict[str, float]) -> str:
    """A row of the first table."""
    step = sum(phases.values())
    hours = step * steps / 3600
    cells = [title, card, cards, *(f"{s:.2f} s" for s in phases.values()), f"{step:.1f} s"]
    cells += [f"{steps:,}", f"{hours:.1f}", f"{hours * cards:.0f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def page(scaling: Path = ROOT / "bench/results/scaling") -> str:
    """Both tables; TopiOCQA's step where bench/scaling.sh has measured it whole (`paper_N`) as well."""
    head = "run card cards sampling search reference update sync step steps hours GPU-hours".split()
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, title in RUNS.items():
        size = run_sizes(name)
        title += f", {size['prompts']} × {size['group']}"
        for card in RATES:
            for cards in CARDS:
                phases = step_seconds(size, rates(card), cards)
                out.append(row(title, card, cards, size["steps"], phases))
    for path in sorted(scaling.glob("paper_*.json")):
        f = json.loads(path.read_text())
        (s,) = f["ours"].values()
        phases = {p: s["phases"][p] for p in ("sample", "reward", "reference", "update", "sync")}
        steps = run_sizes("topiocqa")["steps"]
        out.append(row(f"TopiOCQA, `{path.stem}`", f["card"], f["processes"], steps, phases))
    encode = read("encode")
    out += [
        "",
        "| before it | index: hours to encode, 1 / 8 cards | the warm-up's responses: hours to sample, 1 / 8 H200s |",
        "|---|---|---|",
    ]
    for name, title in RUNS.items():
        size = run_sizes(name)
        index = [
            (size["passages"] / encode["steady_passages_s"] / n + encode["seconds_to_first_window"])
            / 3600
            for n in CARDS
        ]
        sample = [
            size["turns"] * size["response"] / rates("H200")["sample"] / n / 3600 for n in CARDS
        ]
        cells = [
            title,
            " / ".join(f"{h:.2f}" for h in index),
            " / ".join(f"{h:.2f}" for h in sample),
        ]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


if __name__ == "__main__":
    print(page())
