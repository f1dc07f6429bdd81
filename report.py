"""Report on a file of trajectories, or on the folder of a training run.

`trajectories=FILE` (infer.py's trajectory.jsonl): the statistics of DeepSearch-RL's boxes on the terminal, and in `out`

    trajectory_stats.json     the same figures; `statistics` documents the schema
    trajectory_stats.md       the same tables in Markdown
    trajectory_stats.png      distributions, where matplotlib is installed
    trajectory_success.jsonl  the successful rows, unchanged; `well_formed`, `min_calls`, `per_question`, `balance_by`
                              and `cap` leave fewer of them
    openai.jsonl, swift.jsonl the same rows as `export` names them, for other trainers

`run=FOLDER` (of grpo.py or sft.py): `report.html` in that folder, one page without anything to load: a curve of every
figure in metrics.jsonl, the settings, and what the policy wrote at first and at last.

Definitions: rounds = turns of the model; tool calls = calls over all its turns; last turn = tokens of the last request;
all turns = the sum over requests, so a prompt counts again in every round; success = EM 1, or F1 >= 0.8 (`success`);
stdev is the sample's (n - 1; 0 for fewer than two); percentages are of a column's own total.  A rollout that failed for
a technical reason, and a question without a row, count as failures with scores of 0.
"""

from __future__ import annotations

import html
import json
import os
import statistics as stats
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable, Iterable, Literal

import data
from config import ConfigError, run as run_entry
from data import DataError
from episodes import trajectories
from reward import ANSWER_METRICS
from runs import atomic_write, write_jsonl
from scoring.ranking import bootstrap_interval


@dataclass
class ReportConfig:
    trajectories: str = ""
    """trajectory.jsonl to report on"""
    run: str = ""
    """or: folder of a training run, to write report.html into"""
    questions: str = ""
    """questions that the trajectories answer: those without a row count as failures; brings their types too"""
    out: str = ""
    """folder to write to; empty: the one that holds the trajectories"""
    title: str = ""
    """heading; empty: the name of the folder"""
    success: Literal["em", "f1"] = "em"
    """what a success is: an exact match, or F1 >= 0.8"""
    per_question: int | None = None
    """keep so many successful rollouts of a question, the first ones; null: all"""
    well_formed: bool = False
    """keep only successes that keep the task's form (`well_formed` of infer.py's rows)"""
    min_calls: int = 0
    """keep only successes with at least so many tool calls"""
    balance_by: Literal["none", "rounds", "tool_calls", "type"] = "none"
    """keep at most `cap` successes of each number of rounds, of tool calls, or question type"""
    cap: int | None = None
    """of balance_by"""
    seed: int = 0
    """of the draw among more than `cap`"""
    export: list[Literal["openai", "swift"]] = field(default_factory=list)
    """forms in which the kept rows are written too: OpenAI's messages, ms-swift's"""


# ---------------------------------------------------------------------------------------------------------- statistics

def moments(values: Iterable[float]) -> dict[str, float]:
    """{"mean", "stdev"}; zeros for no values."""
    values = list(values)
    return {"mean": stats.fmean(values) if values else 0.0, "stdev": stats.stdev(values) if len(values) > 1 else 0.0}


def statistics(rows: list[dict], rule: trajectories.Rule, missing: Iterable[str] = ()) -> dict:
    """The figures of a list of trajectories; `missing`: ids of questions that have none.

    total, success_count, failure_count, success_em, success_f1, technical_failures, missing   counts
    rule                                                     "em" or "f1": what success means below
    rounds, tool_calls, tokens_last_turn.{prompt,completion,total}, tokens_all_turns.{…}
                                                             {all, success, failure} → {mean, stdev}
    rounds.distribution, tool_calls.distribution             {all, success, failure} → value (a string) → count
    tool_calls.total, searches.total                         of all rows; searches: calls that were carried out
    metrics.{em,f1,acc,precision,recall}                     {mean, stdev, ci95}: the bootstrap interval over questions
    reasoning                                                {mean, stdev, count}: characters of a message's reasoning
    well_formed, gold_recall, all_gold                       mean over the rows that have it: format, share of the gold
                                                             passages retrieved, all of them; null where none has it
    status.{all,success,failure}                             how the episode ended → count, of the rows that say so
    """
    good = {i for i, row in enumerate(rows) if trajectories.succeeded(row, rule)}
    classes = {"all": rows, "success": [r for i, r in enumerate(rows) if i in good],
               "failure": [r for i, r in enumerate(rows) if i not in good]}

    def spread(value: Callable[[dict], float]) -> dict:
        return {name: moments(map(value, members)) for name, members in classes.items()}

    def counted(value: Callable[[dict], int]) -> dict:
        return spread(value) | {"distribution": {
            name: {str(k): n for k, n in sorted(Counter(map(value, members)).items())}
            for name, members in classes.items()}}

    def tokens(usage: Callable[[dict], dict | None]) -> dict:
        return {kind: spread(lambda row: (usage(row) or {}).get(f"{kind}_tokens", 0))
                for kind in ("prompt", "completion", "total")}

    missing = list(missing)
    zero = dict.fromkeys(ANSWER_METRICS, 0.0)
    scores = {row["rollout_id"]: zero | ({} if row.get("error") else row.get("metric_score") or {}) for row in rows}
    scores = {key: {name: s[name] for name in ANSWER_METRICS} for key, s in scores.items()}
    owner = {row["rollout_id"]: trajectories.question_key(row) for row in rows}
    scores |= {f"missing {key}": zero for key in missing}
    owner |= {f"missing {key}": key for key in missing}
    interval = bootstrap_interval(scores, owner)
    reasoning = [len(m["reasoning_content"]) for row in rows for m in row["messages"]
                 if isinstance(m.get("reasoning_content"), str)]
    known = {key: [float(row[key]) for row in rows if row.get(key) is not None]
             for key in ("well_formed", "gold_recall", "all_gold")}
    return {
        "total": len(scores), "success_count": len(good), "failure_count": len(scores) - len(good),
        "success_em": sum(trajectories.succeeded(row, "em") for row in rows),
        "success_f1": sum(trajectories.succeeded(row, "f1") for row in rows), "rule": rule,
        "technical_failures": sum(bool(row.get("error")) for row in rows), "missing": len(missing),
        "rounds": counted(trajectories.rounds),
        "tool_calls": counted(trajectories.tool_calls) | {"total": sum(map(trajectories.tool_calls, rows))},
        "searches": {"total": sum(row.get("searches") or 0 for row in rows)},
        "metrics": {name: moments(s[name] for s in scores.values()) | {"ci95": interval[name]}
                    for name in ANSWER_METRICS},
        "tokens_last_turn": tokens(lambda row: (row.get("response_meta") or {}).get("usage")),
        "tokens_all_turns": tokens(lambda row: row.get("all_turns_tokens")),
        "reasoning": moments(reasoning) | {"count": len(reasoning)},
        **{key: stats.fmean(values) if values else None for key, values in known.items()},
        "status": {name: dict(Counter(row["status"] for row in members if row.get("status")).most_common())
                   for name, members in classes.items()}}


# ------------------------------------------------------------------------------------------------------ boxes of text

Table = tuple[str, list[str], list[list[str]]]  # title, heads of the columns, rows


def tables(s: dict) -> list[Table]:
    """The boxes of a report, in DeepSearch-RL's order."""
    columns = ["", "all", "success", "failure"]

    def line(name: str, part: dict, digits: int) -> list[str]:
        return [name, *(f"{part[c]['mean']:.{digits}f} ± {part[c]['stdev']:.{digits}f}" for c in columns[1:])]

    def share(count: int, total: int) -> str:
        return f"{count} ({100 * count / total:.1f} %)" if total else str(count)

    def token_box(title: str, part: dict) -> Table:
        return title, columns, [line(kind, part[kind], 0) for kind in ("prompt", "completion", "total")]

    def distribution(title: str, part: dict) -> Table:
        counts = part["distribution"]
        totals = [sum(counts[c].values()) for c in columns[1:]]
        widest = max(counts["all"].values(), default=1)
        return title, [*columns, ""], [
            [value, *(share(counts[c].get(value, 0), t) for c, t in zip(columns[1:], totals)),
             "█" * round(24 * n / widest)] for value, n in counts["all"].items()]

    total, metrics = s["total"], s["metrics"]
    summary = [["trajectories", str(total)],
               [f"success ({'EM = 1' if s['rule'] == 'em' else 'F1 >= 0.8'})", share(s["success_count"], total)],
               ["failure", share(s["failure_count"], total)], ["EM = 1", share(s["success_em"], total)],
               ["F1 >= 0.8", share(s["success_f1"], total)],
               ["failed for a technical reason", share(s["technical_failures"], total)]]
    summary += [["questions without a row", share(s["missing"], total)]] * bool(s["missing"])
    for key, name in (("well_formed", "well formed"), ("gold_recall", "gold passages retrieved"),
                      ("all_gold", "all gold passages retrieved")):
        summary += [[name, f"{100 * s[key]:.1f} %"]] if s[key] is not None else []
    scores = [[name, f"{m['mean']:.3f} ± {m['stdev']:.3f}",
               "–" if m["ci95"] is None else "[{:.3f}, {:.3f}]".format(*m["ci95"])] for name, m in metrics.items()]
    thoughts = s["reasoning"]
    dynamics = [line("rounds", s["rounds"], 2), line("tool calls", s["tool_calls"], 2),
                ["tool calls in all", str(s["tool_calls"]["total"]), "", ""],
                ["searches in all", str(s["searches"]["total"]), "", ""],
                ["reasoning, characters", f"{thoughts['mean']:.0f} ± {thoughts['stdev']:.0f}",
                 f"{thoughts['count']} messages", ""]]
    ends = [[f"ended: {end}", *(str(s["status"][c].get(end, 0)) for c in columns[1:])] for end in s["status"]["all"]]
    return [("Summary", ["", ""], summary), ("Answers", ["", "mean ± stdev", "95 % interval"], scores),
            ("Conversation", columns, dynamics + ends), token_box("Tokens, last turn", s["tokens_last_turn"]),
            token_box("Tokens, all turns (a prompt counts again in every round)", s["tokens_all_turns"]),
            distribution("Rounds", s["rounds"]), distribution("Tool calls", s["tool_calls"])]


def box(table: Table) -> str:
    """A table as a box of text."""
    title, heads, rows = table
    lines = ([heads] if any(heads) else []) + rows
    widths = [max(len(row[i]) for row in lines) for i in range(len(heads))]
    body = ["  ".join(cell.ljust(w) if i in (0, 4) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in lines]
    width = max(len(title) + 2, *map(len, body))
    return "\n".join([f"╭─ {title} " + "─" * (width - len(title) - 1) + "╮", *(f"│ {b.ljust(width)} │" for b in body),
                      "╰" + "─" * (width + 2) + "╯"])


def markdown(title: str, found: list[Table]) -> str:
    """The same tables in Markdown."""
    parts = [f"# {title}"]
    for name, heads, rows in found:
        parts += [f"\n## {name}\n", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        parts += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(parts) + "\n"


def plot(s: dict, title: str, path: str) -> bool:
    """Distributions of rounds and tool calls, split by success, as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, name in zip(axes, ("rounds", "tool_calls")):
        counts = s[name]["distribution"]
        values = list(counts["all"])
        success, failure = ([counts[c].get(v, 0) for v in values] for c in ("success", "failure"))
        axis.bar(values, success, label="success", color="#2a7f62")
        axis.bar(values, failure, bottom=success, label="failure", color="#c9c9c9")
        axis.set_xlabel(name.replace("_", " "))
        axis.set_ylabel("trajectories")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.suptitle(title)
    with atomic_write(path, "wb") as f:
        figure.savefig(f, format="png", dpi=150)
    pyplot.close(figure)
    return True


# ------------------------------------------------------------------------------------------------ a file of trajectories

def choose(rows: list[dict], cfg: ReportConfig) -> list[dict]:
    """The successful rows that are kept.  DataError where a balance by type finds no type."""
    kept = [row for row in rows if trajectories.succeeded(row, cfg.success)]
    kept = [row for row in kept if trajectories.tool_calls(row) >= cfg.min_calls]
    if cfg.well_formed:
        kept = [row for row in kept if row.get("well_formed")]
    if cfg.per_question is not None:
        kept = trajectories.first_of_each(kept, cfg.per_question)
    if cfg.balance_by == "type" and kept and not any(map(trajectories.question_type, kept)):
        raise DataError(f"{cfg.trajectories}: no row has metadata.question_type or metadata.type; give the questions "
                        "that have it with questions=FILE, or balance by rounds or tool_calls")
    return kept if cfg.balance_by == "none" else trajectories.balance(kept, cfg.balance_by, cfg.cap, cfg.seed)


def report_trajectories(cfg: ReportConfig) -> dict:
    """Print the boxes and write the files; returns the figures of the last line."""
    rows = trajectories.read_trajectories(cfg.trajectories)
    missing: list[str] = []
    if cfg.questions:
        known = {q.id: q for q in data.read_questions(cfg.questions)}
        if odd := [row["id"] for row in rows if row.get("id") not in known]:
            raise DataError(f"{cfg.trajectories}: question {odd[0]!r} is not in {cfg.questions}; give the file that "
                            "these trajectories answer")
        answered = {row["id"] for row in rows}
        missing = [key for key in known if key not in answered]
    kept = choose([row | {"metadata": known[row["id"]].metadata} for row in rows] if cfg.questions else rows, cfg)
    folder = cfg.out or os.path.dirname(os.path.abspath(cfg.trajectories))
    title = cfg.title or os.path.basename(os.path.dirname(os.path.abspath(cfg.trajectories)))
    found = statistics(rows, cfg.success, missing)
    boxes = tables(found)
    print(title)
    for table in boxes:
        print(box(table), flush=True)

    def place(name: str) -> str:
        return os.path.join(folder, name)

    with atomic_write(place("trajectory_stats.json")) as f:
        json.dump({"title": title, "trajectories": os.path.basename(cfg.trajectories)} | found, f, indent=1)
    with atomic_write(place("trajectory_stats.md")) as f:
        f.write(markdown(title, boxes))
    files = ["trajectory_stats.json", "trajectory_stats.md", "trajectory_success.jsonl"]
    names = {row["rollout_id"] for row in kept}
    own = [row for number, row in _own_rows(cfg.trajectories) if row["rollout_id"] in names]
    write_jsonl(place("trajectory_success.jsonl"), own)
    if plot(found, title, place("trajectory_stats.png")):
        files.append("trajectory_stats.png")
    else:
        print("no trajectory_stats.png: matplotlib is not installed")
    for form in cfg.export:
        write = {"openai": trajectories.to_openai, "swift": trajectories.to_swift}[form]
        write_jsonl(place(f"{form}.jsonl"), map(write, kept))
        files.append(f"{form}.jsonl")
    return {"out": folder, "files": files, "total": found["total"], "success": found["success_count"],
            "kept": len(kept), "em": found["metrics"]["em"]["mean"], "f1": found["metrics"]["f1"]["mean"],
            "rounds": found["rounds"]["all"]["mean"], "tool_calls": found["tool_calls"]["all"]["mean"]}


def _own_rows(path: str) -> Iterable[tuple[int, dict]]:
    """The rows as they are in the file, each with the rollout_id that `read_trajectories` gives it."""
    for number, row in data.read_jsonl(path):
        yield number, {"rollout_id": f"line {number}"} | row


# --------------------------------------------------------------------------------------------------------- a run's page

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
figure{display:inline-block;margin:0 1rem 1rem 0}figcaption{font-weight:600}svg{background:#fafafa}
pre{background:#f5f5f5;padding:.7rem;white-space:pre-wrap;overflow-wrap:anywhere}table{border-collapse:collapse}
td,th{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #ddd}"""


def curve(name: str, points: list[tuple[float, float]], width: int = 340, height: int = 150) -> str:
    """A figure with one line through (step, value) points, as inline SVG."""
    xs, ys = zip(*points)
    low, high = min(ys), max(ys)
    span_x, span_y = max(xs) - min(xs) or 1, high - low or 1
    left, top, w, h = 52, 8, width - 62, height - 30

    def at(x: float, y: float) -> str:
        return f"{left + w * (x - min(xs)) / span_x:.1f},{top + h * (1 - (y - low) / span_y):.1f}"

    line = (f'<polyline fill="none" stroke="#2a6f97" stroke-width="1.5" points="{" ".join(at(*p) for p in points)}"/>'
            if len(points) > 1 else "")
    dots = "".join('<circle r="2.2" fill="#2a6f97" cx="{}" cy="{}"/>'.format(*at(*p).split(",")) for p in points
                   ) if len(points) <= 40 else ""
    texts = [(left - 4, top + 8, "end", f"{high:.4g}"), (left - 4, top + h, "end", f"{low:.4g}"),
             (left, height - 6, "start", f"{min(xs):g}"), (left + w, height - 6, "end", f"step {max(xs):g}")]
    labels = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11">{text}</text>'
                     for x, y, anchor, text in texts)
    frame = f'<rect x="{left}" y="{top}" width="{w}" height="{h}" fill="none" stroke="#ddd"/>'
    return (f'<figure><figcaption>{html.escape(name)}</figcaption><svg width="{width}" height="{height}" role="img" '
            f'aria-label="{html.escape(name)}">{frame}{line}{dots}{labels}</svg></figure>')


def _numbers(rows: list[dict], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in rows
            if isinstance(row.get(key), (int, float)) and not isinstance(row[key], bool)]


def run_page(folder: str, title: str = "") -> str:
    """Write `report.html` into a run's folder; returns its path.  DataError where there is no metrics.jsonl."""
    path = os.path.join(folder, "metrics.jsonl")
    rows = [row for _, row in data.read_jsonl(path) if isinstance(row.get("step"), int)]
    if not rows:
        raise DataError(f"{path}: no step is logged yet; report on a run that has taken one")
    keys = [k for k in dict.fromkeys(k for row in rows for k in row) if k != "step"]
    series = {key: points for key in keys if (points := _numbers(rows, key))}
    title = title or os.path.basename(os.path.abspath(folder))
    first_last = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{p[0][1]:.5g}</td><td>{min(y for _, y in p):.5g}</td>"
        f"<td>{max(y for _, y in p):.5g}</td><td>{p[-1][1]:.5g}</td></tr>" for key, p in series.items())
    parts = ["<!doctype html><html lang=en><meta charset=utf-8>", f"<title>{html.escape(title)}</title>",
             f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>", f"<p>{rows[-1]['step']} steps.</p><h2>Curves</h2>",
             *(curve(key, points) for key, points in series.items()),
             f"<h2>Figures</h2><table><tr><th></th><th>first</th><th>lowest</th><th>highest</th><th>last</th></tr>"
             f"{first_last}</table>"]
    samples = os.path.join(folder, "rollouts")
    names = sorted(n for n in os.listdir(samples) if n.endswith(".jsonl")) if os.path.isdir(samples) else []
    for name in dict.fromkeys(names[:1] + names[-1:]):
        found = [row for _, row in data.read_jsonl(os.path.join(samples, name))]
        scored = sorted((r for r in found if r.get("reward") is not None), key=lambda r: r["reward"])
        parts.append(f"<h2>Rollouts, {html.escape(name.removesuffix('.jsonl').replace('_', ' '))}</h2>")
        for label, some in (("lowest reward", scored[:1]), ("in the middle", scored[len(scored) // 2:][:1]),
                            ("highest reward", scored[-1:])):
            for row in some:
                rest = ", ".join(f"{k} {v}" for k, v in row.items()
                                 if k != "response" and isinstance(v, (int, float, str, bool)) and len(str(v)) < 40)
                parts.append(f"<h3>{label}</h3><p>{html.escape(rest)}</p><pre>{html.escape(str(row.get('response')))}"
                             "</pre>")
    settings = os.path.join(folder, "config.yaml")
    if os.path.exists(settings):
        parts.append("<h2>Settings</h2><pre>" + html.escape("\n".join(line for _, line in data.read_lines(settings)))
                     + "</pre>")
    page = os.path.join(folder, "report.html")
    with atomic_write(page) as f:
        f.write("\n".join(parts) + "\n</html>\n")
    return page


# --------------------------------------------------------------------------------------------------------- entry point

def check(cfg: ReportConfig) -> None:
    """Raise ConfigError for settings that cannot work, before anything is read."""
    if bool(cfg.trajectories) == bool(cfg.run):
        raise ConfigError("give trajectories=FILE or run=FOLDER, one of them")
    if cfg.run and not os.path.isdir(cfg.run):
        raise ConfigError(f"run={cfg.run} is no folder; name the folder of a run of grpo.py or sft.py")
    if (cfg.balance_by == "none") != (cfg.cap is None):
        raise ConfigError(f"balance_by={cfg.balance_by} and cap={cfg.cap}: set both, or neither")
    if cfg.min_calls < 0:
        raise ConfigError(f"min_calls={cfg.min_calls}; it must be at least 0")
    for name in ("cap", "per_question"):
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise ConfigError(f"{name}={getattr(cfg, name)}; it must be at least 1, or null")
    if os.path.basename(cfg.trajectories) == "trajectory_success.jsonl" and not cfg.out:
        raise ConfigError(f"the successes among {cfg.trajectories} would take its own name; give out=FOLDER")
    if cfg.out and os.path.exists(cfg.out) and not os.path.isdir(cfg.out):
        raise ConfigError(f"out={cfg.out} is a file; name a folder")


def main(cfg: ReportConfig) -> dict:
    """Report on trajectories or on a run; returns what was found and written."""
    check(cfg)
    if cfg.run:
        return {"report": run_page(cfg.run, cfg.title)}
    return report_trajectories(cfg)


if __name__ == "__main__":
    run_entry(ReportConfig, main)
