"""Did a GRPO run learn?  Mean reward of the first and last ten steps with standard errors, and validation MRR, from metrics.jsonl.

python bench/trend.py bench/results/long_run_demo/metrics.jsonl …      prints one JSON line a file and writes trend.json beside it
"""

from __future__ import annotations

import json
import math
import os
import sys


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error of the mean (unbiased deviation / sqrt(n))."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def trend(path: str, window: int = 10) -> dict:
    """Figures of one run."""
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    rewards = [r["reward"] for r in rows if r["step"]]
    (first, e1), (last, e2) = mean_and_error(rewards[:window]), mean_and_error(rewards[-window:])
    dev = {r["step"]: r["dev_mrr"] for r in rows if "dev_mrr" in r}
    return {
        "file": path,
        "steps": len(rewards),
        "reward_first": round(first, 4),
        "reward_first_error": round(e1, 4),
        "reward_last": round(last, 4),
        "reward_last_error": round(e2, 4),
        "rise_in_errors": round((last - first) / math.hypot(e1, e2), 1),
        "format_rate_first": rows[1]["format_rate"],
        "format_rate_last": rows[-1]["format_rate"],
        "dev_mrr": dev,
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        result = trend(name)
        print(json.dumps(result))
        with open(os.path.join(os.path.dirname(name), "trend.json"), "w", encoding="utf-8") as out:
            json.dump(result, out, indent=1)
