"""The HTML report of a training run: results, health, timing and every rollout.

report.html loads nothing, except rollouts above PAGE_BYTES, on demand from report_rollouts/.
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import shutil
import statistics
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml
from tqdm import tqdm

from data import DataError, item_id, read_corpus, read_jsonl, read_lines, read_questions, read_turns
from runs import atomic_folder, atomic_write, read_json, read_metrics
from scoring import plots
from scoring.answers import check_types
from scoring.plots import Picture, Series, number

BESIDE = "report_rollouts"
SCORES = {"rank": (int,), "f1": (int, float), "reward": (int, float)}  # of a rollout
PAGE_BYTES = 16 << 20  # rollouts embedded at most
CORPUS_BYTES = 256 << 20  # larger corpora are not read
RANKS = ("rank 1", "rank 2–3", "rank 4–10", "rank 11–100", "not found", "malformed", "failed")
ANSWERS = ("F1 1", "F1 0.5 to 1", "F1 below 0.5", "", "F1 0", "malformed", "failed")
# name, and which value is better
GOALS = {
    "dev_mrr": ("dev MRR", max),
    "dev_f1": ("dev F1", max),
    "heldout_loss": ("heldout loss", min),
}
SHARES = re.compile(
    r"(dev_)?(mrr|hit|ndcg|recall|format|em$|f1|gold_recall|all_gold|end_)|flat_|clipped|length_s"
    r"|heldout_acc|think_d"
)
SHOWN = ("context", "question", "answer", "rewrite", "golden_answers")  # of a prompt


@dataclass
class Log:
    """The contents of a run folder."""

    folder: str
    series: dict[str, plots.Points]  # metric → finite (step, value) points
    config: dict
    settings: str
    shown: set[str] = field(default_factory=set)  # metrics already drawn
    ends: set[str] = field(default_factory=set)
    bands: dict[int, list[int]] = field(default_factory=dict)  # step → rollouts per band
    labels: tuple[str, ...] = RANKS
    rewards: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # id → (step, mean)
    prompts: dict[str, dict] = field(default_factory=dict)  # id → conversation, question, golds

    @property
    def steps(self) -> int:
        return max((int(points[-1][0]) for points in self.series.values()), default=0)


def read_log(folder: str) -> Log:
    """Read a run folder; DataError if no step is logged."""
    path = os.path.join(folder, "metrics.jsonl")
    settings = os.path.join(folder, "config.yaml")
    text = "\n".join(line for _, line in read_lines(settings)) if os.path.exists(settings) else ""
    rows = read_metrics(path)
    series: dict[str, plots.Points] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and type(value) in (int, float) and abs(value) < 1e300:
                series.setdefault(key, []).append((row["step"], value))
    if not series:
        raise DataError(f"{path}: no step is logged; give the folder of a run of grpo.py or sft.py")
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an invalid date
        config = None
    return Log(folder, series, config if isinstance(config, dict) else {}, text)


# --------------------------------------------------------------------------------------- rollouts


def band(row: dict) -> int | None:
    """The rollout's index in RANKS or ANSWERS, or None if its row has no score."""
    if row.get("reward") is None:
        return 6
    if not row.get("well_formed", True):
        return 5
    if "f1" in row:
        value = row["f1"] or 0
        return 4 if value <= 0 else 2 - bisect_left((0.5, 1.0), value + 1e-9)
    if "rank" not in row:
        return None
    return 4 if row["rank"] is None else bisect_left((1, 3, 10), row["rank"])


def step_files(folder: str) -> dict[int, str]:
    """Map steps to rollout files."""
    inside = os.path.join(folder, "rollouts")
    names = sorted(os.listdir(inside)) if os.path.isdir(inside) else []
    found = filter(None, (re.fullmatch(r"step_(\d+)\.jsonl", name) for name in names))
    return {int(match[1]): os.path.join(inside, match[0]) for match in found}


def groups(path: str) -> list[dict]:
    """Read a step's groups as {id, rows}, with a `band` in each row."""
    found: dict[tuple, dict] = {}
    for line, row in read_jsonl(path):
        check_types(f"{path}:{line}", row, SCORES)
        name = str(row.pop("query_id", ""))
        key = (name, str(row.pop("group", "")))
        found.setdefault(key, {"id": name, "rows": []})["rows"].append(row | {"band": band(row)})
    return list(found.values())


def packed(log: Log) -> Iterator[tuple[int, str]]:
    """Yield (step, base64 of the zlib-compressed JSON rollouts); update `log`."""
    for step, path in step_files(log.folder).items():
        counts = log.bands[step] = [0] * len(RANKS)
        parts = groups(path)
        for group in parts:
            group |= {"prompt": log.prompts.get(group["id"])}
            rewards = [r["reward"] for r in group["rows"] if r.get("reward") is not None]
            if rewards:
                seen = log.rewards.setdefault(group["id"], [])
                seen.append((step, sum(rewards) / len(rewards)))
            for row in group["rows"]:
                log.ends.add(str(row.get("end", "")))
                log.labels = ANSWERS if "f1" in row else log.labels
                if row["band"] is not None:
                    counts[row["band"]] += 1
        data = json.dumps(parts, separators=(",", ":")).encode()
        yield step, base64.b64encode(zlib.compress(data)).decode()


def read_prompts(config: dict) -> dict[str, dict]:
    """Map prompt ids to conversation, question and golds; {} if `train` can't be read."""
    read = read_turns if config.get("task", "rewrite") == "rewrite" else read_questions
    try:
        items = read(str(config.get("train") or ""))
    except (OSError, DataError):
        return {}
    golds = {item_id(item): getattr(item, "gold_ids", []) for item in items}
    texts = gold_texts(config.get("retriever") or {}, {g for own in golds.values() for g in own})
    prompts = {}
    for item in items:
        prompt = {key: value for key, value in vars(item).items() if key in SHOWN and value}
        known = [{"id": gold, **texts.get(gold, {})} for gold in golds[item_id(item)]]
        prompts[item_id(item)] = prompt | {"golds": known}
    return prompts


def gold_texts(retriever: dict, golds: set[str]) -> dict[str, dict]:
    """Map passage ids to title and text; {} if the corpus is unreadable or too large."""
    if not golds:
        return {}
    try:
        corpus, index = retriever.get("corpus"), retriever.get("index")
        if not corpus and index:
            with open(os.path.join(index, "config.yaml"), encoding="utf-8") as f:
                corpus = yaml.safe_load(f)["corpus"]
        if os.path.getsize(corpus) > CORPUS_BYTES:
            return {}
        passages = (p for p in read_corpus(corpus) if p.id in golds)
        return {p.id: {"title": p.title, "text": p.text} for p in passages}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return {}


# --------------------------------------------------------------------------------------- sections


def is_share(key: str) -> bool:
    return SHARES.match(key) is not None


def tenth(points: plots.Points, last: bool = False) -> list[float]:
    """The first or last tenth of the values: at least 4, or half of fewer than 8."""
    n = max(1, len(points) // 10, min(4, len(points) // 2))
    return [y for _, y in (points[-n:] if last else points[:n])]


def pictures(log: Log, section: str, first: str = "") -> str:
    """Plot a section of watched.yaml after the HTML `first`; list constant metrics as text."""
    parts, still = [], []
    for heading, items in yaml.safe_load(plots.asset("watched.yaml"))[section].items():
        shown, first = [first] * bool(first), ""
        for item in items:
            there = {key: log.series[key] for key in item["figures"] if key in log.series}
            log.shown.update(there)
            low, high = item.get("sound", (-math.inf, math.inf))
            now = [statistics.fmean(tenth(points, last=True)) for points in there.values()]
            alarm = not all(low <= value <= high for value in now)
            if not alarm and all(len({y for _, y in points}) == 1 for points in there.values()):
                still += [f"{key} {number(points[0][1])}" for key, points in there.items()]
                continue
            series = [Series(k, points, k.startswith("dev_")) for k, points in there.items()]
            share = all(map(is_share, there))
            picture = plots.curves(item["title"], series, share, item.get("unit", ""))
            shown.append(picture.figure(item.get("note", ""), alarm))
        heading = f"<h3>{heading}</h3>" if heading else ""
        parts.append(f"{heading}<div class=grid>{''.join(shown)}</div>" if shown else "")
    if still:
        parts.append(f"<p>Always the same: {html.escape(', '.join(still))}.</p>")
    return "".join(parts)


def tile(name: str, start: str, end: str, note: str) -> str:
    change = f"<span>{start} →</span> {end}" if start else end
    large = f"<h3>{name}</h3><p class=large>{change}</p>"
    return f"<div class=tile>{large}<p>{html.escape(note)}</p></div>"


def worked(log: Log) -> str:
    """Tiles and curves that show whether training worked."""
    tiles, drawn = [], []
    if goal := next((key for key in GOALS if key in log.series), None):
        log.shown.add(goal)
        points, share, (name, choose) = log.series[goal], is_share(goal), GOALS[goal]
        best, once, end = choose(points, key=lambda point: point[1]), len(points) == 1, points[-1]
        last = (
            f"; {number(end[1], share)} at the last, {end[0]}" if end[0] > best[0] else ", the last"
        )
        note = f"best at step {best[0]}{last}"
        if best == points[0]:
            note = "a single validation" if once else f"no better than at first; {note}"
        start = "" if once else number(points[0][1], share)
        tiles.append(tile(name, start, number(best[1], share), note))
        line = [Series(goal, points, dots=True)]
        drawn.append(plots.curves(name, line, share, best=None if once else best))
    if reward := log.series.get("reward"):
        log.shown.add("reward")
        (a, e), (b, f) = (plots.mean_and_error(tenth(reward, last)) for last in (False, True))
        n, error = len(tenth(reward)), 1.96 * math.hypot(e, f)
        note = f"mean of the first and of the last {n} of {len(reward)} steps"
        note += f": {b - a:+.2f} ± {error:.2f} (95 %)" * (n > 3)
        once = len(reward) == 1
        tiles.append(tile("reward", "" if once else f"{a:.2f}", f"{b:.2f}", note))
        drawn.append(plots.trend("Reward", reward, "mean of the rollouts"))
    names = {"format_rate": "format rate", "hit@1": "at rank 1", "em": "exact match"}
    for key, name in names.items():
        if points := log.series.get(key):
            a, b = (number(statistics.fmean(tenth(points, last)), True) for last in (False, True))
            tiles.append(tile(name, a if len(points) > 1 else "", b, "of the sampled responses"))
    figures = "".join(picture.figure() for picture in drawn)
    above = f"<div class=tiles>{''.join(tiles)}</div>" if tiles else ""
    return above + pictures(log, "Did it work?", figures)


def changed(log: Log) -> str:
    """Outcomes of the responses by step, and a few prompts followed over steps."""
    shares = ""
    if steps := [step for step, counts in log.bands.items() if any(counts)]:
        parts = [[n / sum(log.bands[step]) for n in log.bands[step]] for step in steps]
        layers = dict(zip(log.labels, zip(*parts)))
        title = "Ranks of the gold passage" if log.labels is RANKS else "Scores of the answers"
        picture = plots.stack(title, steps, layers, True, "b", "share of the rollouts")
        shares = picture.figure("From good, at the bottom, to bad.")
    cases = reversed(choose_followed(log).items())
    followed = "".join(followed_section(log, words, name) for name, words in cases)
    if followed:
        followed = f"<h3>Prompts followed through the steps</h3>{followed}"
    return pictures(log, "What changed?", shares) + followed


def choose_followed(log: Log) -> dict[str, str]:
    """Choose three frequent prompts by change in reward; returns id → description."""
    most = max(map(len, log.rewards.values()), default=0)
    often = [name for name, seen in log.rewards.items() if len(seen) >= max(2, most / 2)]
    often.sort(key=lambda name: log.rewards[name][0][1] - log.rewards[name][-1][1])
    if not often:
        return {}
    chosen = {often[len(often) // 2]: "a typical one", often[-1]: "the one that lost most"}
    return chosen | {often[0]: "the one that gained most"}


def reward_of(row: dict) -> float:
    reward = row.get("reward")
    return -math.inf if reward is None else reward


def appearances(log: Log, name: str) -> dict[int, list[dict]]:
    """Map steps to the prompt's responses, best reward first."""
    files, found = step_files(log.folder), {}
    for step in dict.fromkeys(step for step, _ in log.rewards[name]):
        rows = [row for g in groups(files[step]) if g["id"] == name for row in g["rows"]]
        found[step] = sorted(rows, key=reward_of, reverse=True)
    return found


def followed_picture(found: dict[int, list[dict]], title: str) -> Picture:
    """Plot every response as a dot, by step and by rank or F1."""
    names = [(0, "1"), (-1, "2–3"), (-2, "4–10"), (-3, "–100"), (-4, "none"), (-5, "form")]
    shown = [(step, row) for step, rows in found.items() for row in rows]
    if any("f1" in row for _, row in shown):
        names = [(0, "F1 1"), (-1, "≥ 0.5"), (-2, "> 0"), (-4, "0"), (-5, "form")]
    bands = [(step, row["band"]) for step, row in shown if row["band"] is not None]
    return plots.dots(title, [(step, -min(band, 5), band) for step, band in bands], names)


def wording(row: dict) -> str:
    """The response's text, shortened."""
    return str(row.get("rewrite") or row.get("prediction") or row.get("response") or "")[:300]


def followed_section(log: Log, words: str, name: str) -> str:
    """HTML of a followed prompt: its responses as dots, the median one as text."""
    found, prompt = appearances(log, name), log.prompts.get(name, {})
    lines = []
    for step, rows in found.items():
        row = rows[len(rows) // 2]
        chip = ""
        if row["band"] is not None:
            label = f"rank {row['rank']}" if row.get("rank") else log.labels[row["band"]]
            chip = f'<span class="chip b{row["band"]}">{label}</span>'
        lines.append(f"<li value={step}>{chip} <q dir=auto>{html.escape(wording(row))}</q></li>")
    every = max(1, math.ceil(len(lines) / 10))
    kept = lines[:-1:every] + lines[-1:]
    said = [f"{question} — {answer}" for question, answer in prompt.get("context", ())]
    asked = "".join(f"<p class=quiet dir=auto>{html.escape(line)}</p>" for line in said)
    title = html.escape(str(prompt.get("question") or name))
    known = any(row["band"] is not None for rows in found.values() for row in rows)
    picture = followed_picture(found, "All its responses").figure() if known else ""
    return (
        f"<details{' open' * words.endswith('gained most')}><summary>{words}: <b dir=auto>{title}"
        f"</b></summary><div class=grid><div>{asked}{picture}</div><div><p>What the "
        f"middle one of its responses said, at step</p><ol>{''.join(kept)}</ol></div></div>"
        "</details>"
    )


def timing(log: Log) -> str:
    """A chart and a table of the seconds of each phase."""
    # seconds_search is a part of seconds_sample
    names = [k for k in log.series if k.startswith("seconds") and k != "seconds_search"]
    if not names:
        return ""
    log.shown.update(names)
    values = {name: dict(log.series[name]) for name in names}
    steps = sorted({int(x) for seconds in values.values() for x in seconds})
    layers = {
        name.removeprefix("seconds_"): [seconds.get(step, 0.0) for step in steps]
        for name, seconds in values.items()
    }
    whole = sum(map(sum, layers.values())) or 1.0
    rows = "".join(
        f"<tr><th scope=row>{name}<td>{number(sum(layer) / whole, True)}<td>"
        f"{number(statistics.median(layer))} s<td>{tqdm.format_interval(sum(layer))}"
        for name, layer in layers.items()
    )
    picture = plots.stack("Seconds of a step", steps, layers, unit="s").figure(
        "Columns that stand out, such as a first step that compiles, are cut off."
    )
    head = "<tr><th scope=col>phase<th scope=col>share<th scope=col>median<th scope=col>time"
    foot = f"<tr><th scope=row>all<td>100 %<td><td>{tqdm.format_interval(whole)}"
    return f"<div class=grid>{picture}<table>{head}{rows}{foot}</table></div>"


def others(log: Log) -> str:
    """Collapsed curves of the metrics not shown above."""
    names = [key for key in log.series if key not in log.shown]
    drawn = (plots.curves(k, [Series(k, log.series[k])], is_share(k)) for k in names)
    figures = "".join(picture.figure() for picture in drawn)
    folded = "<details><summary>All other figures</summary><div class=grid>"
    return f"{folded}{figures}</div></details>" if names else ""


def heading(log: Log) -> str:
    """A line on the task, model, batch size and progress."""
    c = log.config
    size = f"{c.get('prompts_per_step')} prompts × {c.get('group_size')} responses a step"
    facts = [c.get("task", ""), c.get("model", ""), size * ("group_size" in c)]
    try:
        note = read_json(os.path.join(log.folder, "exit.json")) or {}
    except DataError:
        note = {}
    if note:
        state = f"it ended with status {note.get('status')}: {note.get('reason')}"
    elif os.path.isdir(os.path.join(log.folder, "final")):
        state = "finished"
    else:
        state = "no end is recorded: it is running, or was killed"
    planned = f" of {c['steps']}" if c.get("steps") else ""
    line = "; ".join([*map(str, filter(None, facts)), f"{log.steps}{planned} steps", state])
    return f"<p>{html.escape(line)}</p>"


# --------------------------------------------------------------------------------------- the page


def run_page(folder: str, title: str = "") -> str:
    """Write report.html and return its path; DataError if no step is logged."""
    log = read_log(folder)
    log.prompts = read_prompts(log.config) if step_files(folder) else {}
    chunks = dict(packed(log))
    sections = {
        "Did it work?": worked(log),
        "What changed?": changed(log),
        "Is it healthy?": pictures(log, "Is it healthy?"),
        "Where does the time go?": timing(log),
        "The rollouts": plots.asset("browser.html") if chunks else "",
    }
    body = heading(log) + "".join(f"<h2>{h}</h2>{part}" for h, part in sections.items() if part)
    body += others(log)
    if log.settings:
        pre = f"<pre tabindex=0>{html.escape(log.settings)}</pre>"
        body += f"<details><summary>Settings</summary>{pre}</details>"
    scripts = {step: f'rollouts[{step}]="{text}"' for step, text in chunks.items()}
    beside = os.path.join(folder, BESIDE)
    if large := sum(map(len, scripts.values())) > PAGE_BYTES:
        with atomic_folder(beside) as whole:
            for step, script in scripts.items():
                with atomic_write(os.path.join(whole, f"{step}.js")) as f:
                    f.write(script)
    inline = "" if large else "\n".join(f"<script>{s}</script>" for s in scripts.values())
    facts = {"steps": list(scripts), "labels": log.labels, "ends": sorted(log.ends - {""})}
    page = os.path.join(folder, "report.html")
    with atomic_write(page) as f:
        name = title or os.path.basename(os.path.abspath(folder))
        f.write(plots.page(name, body, facts | {"beside": BESIDE}, inline))
    if not large:
        shutil.rmtree(beside, ignore_errors=True)
    return page
