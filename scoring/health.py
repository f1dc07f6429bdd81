"""Metrics of a training step, log lines, and signs of a collapsed policy.

A row is a rollout as logged: group, response, reward (None: technical failure), advantage,
well_formed, tokens, end; and rank and rewrite, or `measure` of its task.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float | None]) -> float:
    """Average the finite values; NaN if there are none."""
    there = [v for v in values if v is not None and math.isfinite(v)]
    return sum(there) / len(there) if there else math.nan


def step_figures(rows: list[dict]) -> dict[str, float]:
    """Compute the metrics of a step from the rollouts of all ranks."""
    scored = [r for r in rows if r["reward"] is not None]
    groups = {r["group"] for r in scored}
    flat = groups - {r["group"] for r in scored if r["advantage"] != 0}
    n, rewards = max(1, len(scored)), [r["reward"] for r in scored]
    thoughts = [t for r in rows for t in re.findall(r"<think>([^<]*)</think>", r["response"])]
    words = " ".join(thoughts).split()
    return {
        "reward": sum(rewards) / n,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "format_rate": sum(r["well_formed"] for r in scored) / n,
        **(answer_means(scored) if rows and "f1" in rows[0] else rank_means(scored)),
        "flat_groups": len(flat) / max(1, len(groups)),
        "response_tokens": mean([r["tokens"] for r in rows]),
        "think_words": len(words) / max(1, len(rows)),
        "think_distinct": len(set(words)) / max(1, len(words)),
        "length_stops": mean([r["end"] == "length" for r in rows]),
        "failed": len(rows) - len(scored),
    }


def rank_means(rows: list[dict]) -> dict[str, float]:
    """Retrieval metrics and mean length in words of the rewrites."""
    n, ranks = max(1, len(rows)), [r["rank"] for r in rows if r["rank"] is not None]
    return {
        "hit@1": sum(k == 1 for k in ranks) / n,
        "hit@10": sum(k <= 10 for k in ranks) / n,
        "hit@100": len(ranks) / n,
        "mrr": sum(1 / k for k in ranks) / n,
        "rewrite_words": sum(len((r["rewrite"] or "").split()) for r in rows) / n,
    }


ANSWER_KEYS = ("em", "f1", "gold_recall", "all_gold", "searches", "notes", "rounds", "model_tokens")
ENDS = ("answered", "no_answer", "length", "rounds")  # of episodes that did not fail


def answer_means(rows: Sequence[dict]) -> dict[str, float]:
    """Average ANSWER_KEYS (NaN without values); add the share of each end."""
    ends = {f"end_{end}": mean([row["end"] == end for row in rows]) for end in ENDS}
    return {key: mean([row[key] for row in rows]) for key in ANSWER_KEYS} | ends


# metric, best of the earlier windows, test for collapse (high entropy: babble), words
SIGNS = (
    (
        "format_rate",
        max,
        lambda best, now: best > 0.2 and now < best / 2,
        "fell from {:.2f} to {:.2f}",
    ),
    ("reward", max, lambda best, now: best > 0.2 and now < best / 4, "fell from {:.3f} to {:.3f}"),
    (
        "entropy",
        min,
        lambda best, now: now > 3 * best + 0.5,
        "rose from {:.2f} to {:.2f} nats a token",
    ),
    ("kl", min, lambda best, now: now > 2, "rose from {:.2f} to {:.2f} nats a token"),
)


def collapse_reason(history: list[dict], window: int = 10) -> str | None:
    """Compare the last `window` steps with the best window before: why to stop (SIGNS), or None.

    Window means ignore values that are not finite.
    """
    if len(history) < 2 * window:
        return None
    starts = range(0, len(history) - 2 * window + 1, window)
    windows = [history[i : i + window] for i in starts] + [history[-window:]]
    for key, best_of, collapsed, words in SIGNS:
        *before, now = (mean([row[key] for row in rows]) for rows in windows)
        best = best_of(filter(math.isfinite, before), default=math.nan)
        if collapsed(best, now):
            return f"{key} {words.format(best, now)}"
    return None


PHASES = ("sample", "reward", "reference", "update", "sync")


def step_line(row: dict, steps: int, left: str) -> str:
    """Format the log line of a step; `left` is the remaining time."""
    keys = ("mrr", "hit@1") if "mrr" in row else ("f1", "em", "all_gold", "searches")
    keys = ("reward", *keys, "format_rate", "kl", "entropy", "flat_groups", "clipped")
    shown = " | ".join(f"{key} {row[key]:.3f}" for key in keys)
    took = " | ".join(f"{phase} {row[f'seconds_{phase}']:.1f}s" for phase in PHASES)
    return (
        f"step {row['step']:05d}/{steps:05d} | {shown} | response_tokens "
        f"{row['response_tokens']:.0f} | norm {row['grad_norm']:.2f} | lr {row['lr']:.2g} | {took} "
        f"| left {left}"
    )


def validation_line(figures: dict, step: int, steps: int, best: dict, seconds: float) -> str:
    """Format the log line of a validation; `best` has the best value and step."""
    keys = ("mrr", "ndcg@3", "recall@10", "recall@100")
    if "dev_f1" in figures:
        keys = ("f1", "em", "gold_recall", "all_gold", "searches")
    shown = " | ".join(f"{key} {figures[f'dev_{key}']:.4f}" for key in (*keys, "format_rate"))
    return (
        f"validation {step:05d}/{steps:05d} | {shown} | best {best['value']:.4f} at "
        f"{best['step']} | {seconds:.1f}s"
    )
