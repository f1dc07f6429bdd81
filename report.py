"""Report on a file of trajectories, or on the folder of a training run.

`trajectories=FILE` (of infer.py) prints DeepSearch-RL's statistics and writes trajectory_stats.md
and .json (see `statistics`), and the successes that pass the filters as trajectory_success.jsonl
and, on request, openai.jsonl or swift.jsonl.
`run=FOLDER` (of grpo.py or sft.py) writes report.html there (scoring/run_page.py).
"""

from __future__ import annotations

import os
import statistics as stats
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Callable, Iterable, Literal, Sequence

from config import ConfigError, Only, at_least
from config import run as run_entry
from data import DataError, read_jsonl, read_questions
from episodes import trajectories
from reward import ANSWER_METRICS
from runs import atomic_write, claim_folder, write_json, write_jsonl
from scoring.answers import check_types
from scoring.ranking import bootstrap_interval
from scoring.run_page import run_page
from scoring.tables import markdown_table


STATISTICS = Only("trajectories")


@dataclass
class ReportConfig:
    trajectories: str = ""
    """trajectory.jsonl to report on"""
    run: str = ""
    """or folder of a training run, for report.html"""
    questions: Annotated[str, STATISTICS] = ""
    """file of all questions; one without a trajectory is a failure"""
    out: Annotated[str, STATISTICS] = ""
    """folder to write to; empty: that of the trajectories"""
    title: str = ""
    """heading; empty: the folder's name"""
    success: Annotated[Literal["em", "f1"], STATISTICS] = "em"
    """success criterion: exact match, or F1 >= 0.8"""
    per_question: Annotated[int | None, at_least(1), STATISTICS] = None
    """successes to keep per question, in file order; null: all"""
    well_formed: Annotated[bool, STATISTICS] = False
    """keep only well-formed successes"""
    min_calls: Annotated[int, at_least(0), STATISTICS] = 0
    """keep only successes with at least this many tool calls"""
    balance_by: Annotated[Literal["none", "rounds", "tool_calls", "type"], STATISTICS] = "none"
    """keep at most `cap` successes per class; type: question type"""
    cap: Annotated[int | None, at_least(1), STATISTICS] = None
    """most successes per class of balance_by"""
    seed: Annotated[int, STATISTICS] = 0
    """seed for drawing `cap` of a class"""
    export: Annotated[list[Literal["openai", "swift"]], STATISTICS] = field(default_factory=list)
    """also write kept rows as OpenAI messages or for ms-swift"""


# --------------------------------------------------------------------------------------- statistics

CLASSES = ("all", "success", "failure")
TOKENS = ("prompt", "completion", "total")
SHARES = ("well_formed", "gold_recall", "all_gold")


def moments(values: Iterable[float]) -> dict[str, float]:
    """{"mean", "stdev" (of the sample)}; 0 without values."""
    values = list(values) or [0.0]
    return {"mean": stats.fmean(values), "stdev": stats.stdev(values) if values[1:] else 0.0}


def statistics(rows: list[dict], rule: str, missing: Sequence[str] = ()) -> dict:
    """The figures of trajectory_stats.json under DeepSearch-RL's names.

    rows: from `read_rows`; missing: ids of questions without a row. These and technical failures
    are failures that score 0. A round is a model turn, `reasoning` is in characters, and
    tokens_all_turns counts the prompt in every round.
    """
    won = {name: [trajectories.succeeded(row, name) for row in rows] for name in ("em", "f1")}
    good = [row for row, success in zip(rows, won[rule]) if success]
    failed = [row for row, success in zip(rows, won[rule]) if not success]
    classes = dict(zip(CLASSES, (rows, good, failed)))

    def spread(value: Callable[[dict], float | None]) -> dict[str, dict]:
        return {name: moments(value(row) or 0 for row in part) for name, part in classes.items()}

    def counts(value: Callable[[dict], int | str | None]) -> dict[str, dict[str, int]]:
        known = {name: [v for v in map(value, p) if v is not None] for name, p in classes.items()}
        return {name: Counter(map(str, sorted(values))) for name, values in known.items()}

    def tokens(usage: Callable[[dict], dict]) -> dict[str, dict]:
        return {k: spread(lambda row: usage(row).get(f"{k}_tokens")) for k in TOKENS}

    thoughts = [message.get("reasoning_content") for row in rows for message in row["messages"]]
    lengths = [len(text) for text in thoughts if text is not None]
    figures = {
        "total": len(rows) + len(missing),
        "success_count": len(good),
        "failure_count": len(failed) + len(missing),
        "success_em": sum(won["em"]),
        "success_f1": sum(won["f1"]),
        "rule": rule,
        "technical_failures": sum(bool(row.get("error")) for row in rows),
        "missing": len(missing),
        "searches": {"total": sum(row.get("searches") or 0 for row in rows)},
        "metrics": _metrics(rows, missing),
        "tokens_last_turn": tokens(_usage),
        "tokens_all_turns": tokens(lambda row: row.get("all_turns_tokens") or {}),
        "reasoning": moments(lengths) | {"count": len(lengths)},
        "status": counts(lambda row: row.get("status") or None),
    }
    for key, value in (("rounds", trajectories.rounds), ("tool_calls", trajectories.tool_calls)):
        figures[key] = spread(value) | {
            "distribution": counts(value),
            "total": sum(map(value, rows)),
        }
    for key in SHARES:
        known = [float(row[key]) for row in rows if row.get(key) is not None]
        figures[key] = stats.fmean(known) if known else None
    return figures


def _usage(row: dict) -> dict:
    return (row.get("response_meta") or {}).get("usage") or {}


def _metrics(rows: list[dict], missing: Sequence[str]) -> dict:
    """Metric → mean, stdev and `ci95`; missing questions score 0."""
    zero = dict.fromkeys(ANSWER_METRICS, 0.0)
    scores, owner = {key: zero for key in missing}, {key: key for key in missing}
    for row in rows:
        found = {} if row.get("error") else row.get("metric_score") or {}
        name = f"rollout {row['rollout_id']}"
        scores[name] = {metric: float(found.get(metric) or 0) for metric in zero}
        owner[name] = trajectories.question_key(row)
    interval = bootstrap_interval(scores, owner)
    return {
        name: moments(s[name] for s in scores.values()) | {"ci95": interval[name]} for name in zero
    }


# ------------------------------------------------------------------------------------------- tables


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.1f} %)" if total else str(count)


def _spread(part: dict, digits: int) -> str:
    return f"{part['mean']:.{digits}f} ± {part['stdev']:.{digits}f}"


def _distribution(counts: dict[str, dict[str, int]]) -> list[list[str]]:
    parts, widest = [counts[c] for c in CLASSES], max(counts["all"].values(), default=1)
    rows = []
    for value, n in counts["all"].items():
        shares = (_share(part.get(value, 0), sum(part.values())) for part in parts)
        rows.append([value, *shares, "█" * round(24 * n / widest)])
    return rows


def markdown(title: str, s: dict) -> str:
    """The tables in Markdown; s: from `statistics`."""
    summary = [["a success is", {"em": "EM = 1", "f1": "F1 >= 0.8"}[s["rule"]]]]
    for key, value in s.items():
        if isinstance(value, int):
            summary.append([key.replace("_", " "), _share(value, s["total"])])
        elif isinstance(value, float):
            summary.append([key.replace("_", " "), f"{100 * value:.1f} %"])
    summary.append(["tool calls in all", str(s["tool_calls"]["total"])])
    summary.append(["searches in all", str(s["searches"]["total"])])
    summary.append(["characters of a thought", _spread(s["reasoning"], 0)])
    answers = []
    for name, m in s["metrics"].items():
        ci = "–" if m["ci95"] is None else "[{:.3f}, {:.3f}]".format(*m["ci95"])
        answers.append([name, _spread(m, 3), ci])
    spreads = {"rounds": s["rounds"], "tool calls": s["tool_calls"]}
    spreads |= {f"{k} tokens, last turn": part for k, part in s["tokens_last_turn"].items()}
    spreads |= {f"{k} tokens, all turns": part for k, part in s["tokens_all_turns"].items()}
    rows = [[name, *(_spread(part[c], 2) for c in CLASSES)] for name, part in spreads.items()]
    parts = [f"# {title}", "## Summary", markdown_table(["", ""], summary)]
    parts += ["## Answers", markdown_table(["", "mean ± stdev", "95 % interval"], answers)]
    parts += ["## Conversation", markdown_table(["", *CLASSES], rows)]
    for name, counts in (
        ("Rounds", s["rounds"]["distribution"]),
        ("Tool calls", s["tool_calls"]["distribution"]),
        ("Ends", s["status"]),
    ):
        parts += [f"## {name}", markdown_table(["", *CLASSES, ""], _distribution(counts))]
    return "\n\n".join(parts) + "\n"


# --------------------------------------------------------------------------- a file of trajectories

NUMBERS = dict.fromkeys((*ANSWER_METRICS, *(f"{name}_tokens" for name in TOKENS)), (int, float))
FIELDS = ("metric_score", "all_turns_tokens", "response_meta", "metadata")
KINDS = dict.fromkeys(FIELDS, (dict,)) | dict.fromkeys(SHARES, (bool, int, float))
KINDS |= {"rounds": (int,), "searches": (int,), "status": (str,)}


def read_rows(cfg: ReportConfig) -> tuple[list[dict], list[str]]:
    """(trajectories, ids of questions without one). DataError: invalid field or id."""
    rows = trajectories.read_trajectories(cfg.trajectories)
    known = {q.id: q for q in read_questions(cfg.questions)} if cfg.questions else {}
    for row in rows:
        location = f"{cfg.trajectories}: rollout {row['rollout_id']!r}"
        check_types(location, row, KINDS)
        check_types(location, row.get("response_meta") or {}, {"usage": (dict,)})
        for part in (row.get("metric_score"), row.get("all_turns_tokens"), _usage(row)):
            check_types(location, part or {}, NUMBERS)
        id_ = str(row.get("id"))
        if known and id_ not in known:
            raise DataError(
                f"{location}: question {row.get('id')!r} is not in {cfg.questions}; give its file"
            )
        if known:
            row["metadata"] = known[id_].metadata
    return rows, sorted(known.keys() - {str(row.get("id")) for row in rows})


def choose(rows: list[dict], cfg: ReportConfig) -> list[dict]:
    """The successes to keep. DataError: no row has a type to balance by."""
    kept = [
        row
        for row in rows
        if trajectories.succeeded(row, cfg.success)
        and trajectories.tool_calls(row) >= cfg.min_calls
        and (row.get("well_formed") or not cfg.well_formed)
    ]
    if cfg.per_question is not None:
        kept = trajectories.first_of_each(kept, cfg.per_question)
    if cfg.balance_by == "none":
        return kept
    if cfg.balance_by == "type" and kept and not any(map(trajectories.question_type, kept)):
        raise DataError(
            f"{cfg.trajectories}: no row has metadata.question_type or metadata.type; give "
            "questions=FILE that has it"
        )
    return trajectories.balance(kept, cfg.balance_by, cfg.cap, cfg.seed)


def report_trajectories(cfg: ReportConfig) -> dict:
    """Prints tables, writes files; returns the main figures."""
    above = os.path.dirname(os.path.abspath(cfg.trajectories))
    folder, title = cfg.out or above, cfg.title or os.path.basename(above)
    claim_folder(folder, "report.py")
    rows, missing = read_rows(cfg)
    kept = choose(rows, cfg)
    found = statistics(rows, cfg.success, missing)
    text = markdown(title, found)
    print(text, flush=True)
    figures = {"title": title, "trajectories": os.path.basename(cfg.trajectories)} | found
    write_json(os.path.join(folder, "trajectory_stats.json"), figures)
    with atomic_write(os.path.join(folder, "trajectory_stats.md")) as f:
        f.write(text)
    names = {row["rollout_id"] for row in kept}
    own = ({"rollout_id": f"line {n}"} | row for n, row in read_jsonl(cfg.trajectories))
    outputs = {"trajectory_success.jsonl": (row for row in own if row["rollout_id"] in names)}
    for form in cfg.export:
        write = {"openai": trajectories.to_openai, "swift": trajectories.to_swift}[form]
        outputs[f"{form}.jsonl"] = map(write, kept)
    for name, lines in outputs.items():
        write_jsonl(os.path.join(folder, name), lines)
    means = {key: found["metrics"][key]["mean"] for key in ("em", "f1")}
    means |= {key: found[key]["all"]["mean"] for key in ("rounds", "tool_calls")}
    counts = {"total": found["total"], "success": found["success_count"], "kept": len(kept)}
    files = ["trajectory_stats.json", "trajectory_stats.md", *outputs]
    return {"out": folder, "files": files} | counts | means


# -------------------------------------------------------------------------------------- entry point


def check(cfg: ReportConfig) -> None:
    """Raises ConfigError for invalid settings."""
    if bool(cfg.trajectories) == bool(cfg.run):
        raise ConfigError("give trajectories=FILE or run=FOLDER, one of them")
    if cfg.run and not os.path.isdir(cfg.run):
        raise ConfigError(f"run={cfg.run} is no folder; name the folder of a training run")
    if (cfg.balance_by == "none") != (cfg.cap is None):
        raise ConfigError(f"balance_by={cfg.balance_by} and cap={cfg.cap}: set both, or neither")
    folder = cfg.out or os.path.dirname(cfg.trajectories)
    own = os.path.abspath(os.path.join(folder, "trajectory_success.jsonl"))
    if own == os.path.abspath(cfg.trajectories):
        raise ConfigError(f"the successes would replace {own}; give another out=FOLDER")


def main(cfg: ReportConfig) -> dict:
    """Reports on trajectories or a run; returns what was written."""
    check(cfg)
    return {"report": run_page(cfg.run, cfg.title)} if cfg.run else report_trajectories(cfg)


if __name__ == "__main__":
    run_entry(ReportConfig, main)
