"""Figures of a training step from its rollouts as they are written to disk, the lines that a run
prints, and the signs of a collapsed policy.

A row is one rollout: group, reward (None: it failed for a technical reason), advantage,
well_formed, tokens, end; rank and rewrite, or `episodes.episode.episode_figures`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float | None]) -> float:
    """The mean of what is there and finite; NaN where nothing is."""
    there = [v for v in values if v is not None and math.isfinite(v)]
    return sum(there) / len(there) if there else math.nan


def step_figures(rows: list[dict]) -> dict[str, float]:
    """Reward, format, ranks or answers, lengths, flat groups and failures of a step (all ranks)."""
    scored = [r for r in rows if r["reward"] is not None]
    flat: dict[int, bool] = {}
    for r in scored:
        flat[r["group"]] = flat.get(r["group"], True) and r["advantage"] == 0
    n, rewards = max(1, len(scored)), [r["reward"] for r in scored]
    return {
        "reward": sum(rewards) / n,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "format_rate": sum(r["well_formed"] for r in scored) / n,
        **(answer_means(scored) if rows and "f1" in rows[0] else rank_means(scored)),
        "flat_groups": sum(flat.values()) / max(1, len(flat)),
        "response_tokens": mean([r["tokens"] for r in rows]),
        "length_stops": mean([r["end"] == "length" for r in rows]),
        "failed": len(rows) - len(scored),
    }


def rank_means(rows: list[dict]) -> dict[str, float]:
    """Retrieval by the rewrites of a step, and their length in words."""
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
    """Means of episodes' figures (NaN where none has one), and the share that ended in each way."""
    ends = {f"end_{end}": mean([row["end"] == end for row in rows]) for end in ENDS}
    return {key: mean([row[key] for row in rows]) for key in ANSWER_KEYS} | ends


# figure, its best before, when it tells of a collapse (entropy: babble), in words
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
    """Why the run should stop (SIGNS), by its last `window` steps against the best window before.

    Figures that are not finite are left out of a window's mean.
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
    """The line that a step prints; `left`: the time that the others take."""
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
    """The line of a validation; `best`: the best value and its step so far."""
    keys = ("mrr", "ndcg@3", "recall@10", "recall@100")
    if "dev_f1" in figures:
        keys = ("f1", "em", "gold_recall", "all_gold", "searches")
    shown = " | ".join(f"{key} {figures[f'dev_{key}']:.4f}" for key in (*keys, "format_rate"))
    return (
        f"validation {step:05d}/{steps:05d} | {shown} | best {best['value']:.4f} at "
        f"{best['step']} | {seconds:.1f}s"
    )
