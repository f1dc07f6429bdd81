"""How a GRPO run went: mean reward of its first and last ten steps with standard errors, its figures on dev, its health.

python bench/trend.py bench/results/long_run_demo …      a run's folder; prints one JSON line a run and writes trend.json into it
python bench/trend.py out=bench/results/health.json runs/health/*/grpo      all in one file
"""

from __future__ import annotations

import json
import math
import os
import sys

WINDOW = 10
DEV = ("dev_mrr", "dev_f1", "dev_all_gold")
HEALTH = """reward format_rate end_answered entropy kl flat_groups response_tokens think_words think_distinct
searches all_gold positive_logprob engine_gap effective_samples grad_norm""".split()


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error of the mean (unbiased deviation / sqrt(n))."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def trend(folder: str) -> dict:
    """Figures of one run."""
    with open(f"{folder}/metrics.jsonl", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    steps = [row for row in rows if row["step"]]
    if len(steps) < 2:
        sys.exit(f"{folder}: fewer than two steps")
    rewards = [row["reward"] for row in steps]
    (first, e1), (last, e2) = mean_and_error(rewards[:WINDOW]), mean_and_error(rewards[-WINDOW:])
    windows = [steps[i : i + WINDOW] for i in range(0, len(steps), WINDOW)]
    return {
        "run": folder,
        "steps": len(rewards),
        "reward_first": round(first, 4),
        "reward_first_error": round(e1, 4),
        "reward_last": round(last, 4),
        "reward_last_error": round(e2, 4),
        "rise_in_errors": round((last - first) / (math.hypot(e1, e2) or math.inf), 1),
        **{
            key: {r["step"]: r[key] for r in rows if key in r}
            for key in DEV
            if any(key in r for r in rows)
        },
        "means_of_ten_steps": {
            key: [mean(row[key] for row in window) for window in windows]
            for key in HEALTH
            if key in steps[0]
        },
        "stopped": stop_reason(folder),
    }


def mean(values) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def stop_reason(folder: str) -> str | None:
    """Why the run stopped itself; None where it ended well, or was ended."""
    try:
        with open(f"{folder}/exit.json", encoding="utf-8") as f:
            note = json.load(f)
            return note["reason"] if note["status"] == 3 else None
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    out = [word for word in sys.argv[1:] if word.startswith("out=")]
    runs = [trend(folder.rstrip("/")) for folder in sys.argv[1:] if folder not in out]
    for run in runs:
        print(json.dumps(run))
        if not out:
            with open(os.path.join(run["run"], "trend.json"), "w", encoding="utf-8") as f:
                json.dump(run, f, indent=1)
    if out:
        with open(out[0].removeprefix("out="), "w", encoding="utf-8") as f:
            json.dump(runs, f, separators=(",", ":"))
