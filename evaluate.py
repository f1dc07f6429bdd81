"""Retrieval metrics of TREC runs, or of rewrites and an index: MRR, MRR@3, NDCG@3, Recall@5/10/20/100, with intervals.

    python evaluate.py run=mine.trec qrels=test.qrels
    python evaluate.py run=mine.trec baseline=raw.trec qrels=test.qrels          # with a paired test
    python evaluate.py rewrites=rewrites.jsonl query=question,rewrite turns=test.jsonl retriever.index=index

pytrec_eval computes the numbers. What this file decides around it (the original system differs in 1, 3 and 4):

1. Means are over ALL queries of the qrels. One without any result (absent from the run, or with an empty list: a TREC
   file cannot tell them apart) scores zero and is counted as `missing`. One whose qrels have no gain > 0 scores zero
   too. Queries of the run that the qrels do not know are ignored and counted as `extra`.
2. Relevant means gain > 0. `ndcg@3` uses the gains, and its ideal ranking comes from the qrels.
3. `mrr` looks at the first 100 results, `mrr@3` at the first three. (The paper prints the former as the latter.)
4. Results are ranked by score, higher first, in double precision; equal scores by passage id, descending, as trec_eval
   does. pytrec_eval is handed that ranking, not the scores, because it keeps scores in single precision.
5. Intervals are percentile bootstraps. Turns of one conversation are not independent: where a turns file says which
   belong together, whole conversations are drawn; from run and qrels alone, single queries. The report says which.
6. Two systems are compared on the same queries: a two-sided sign-flip (paired randomisation) test and a bootstrap
   interval of the difference, over the same units. There is no correction for testing seven metrics.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytrec_eval

from config import ConfigError, save_config
from config import run as run_entry
from data import DataError, Turn, atomic_write, read_jsonl, read_lines, read_turns, with_gold
from retriever import RetrieverConfig, open_retriever

Run = dict[str, list[tuple[str, float]]]  # query id → (passage id, score)
Qrels = dict[str, dict[str, int]]  # query id → passage id → gain
Scores = dict[str, dict[str, float]]  # query id → metric → value

METRICS = ("mrr", "mrr@3", "ndcg@3", "recall@5", "recall@10", "recall@20", "recall@100")
DEPTH = 100  # results of a query that count

# ---------------------------------------------------------------------------------------------- files


def _columns(path: str, names: str) -> Iterator[tuple[str, list[str]]]:
    """("file:line", columns) of a TREC file; any blanks and tabs between columns, empty lines passed over."""
    expected, where = len(names.split()), ""
    for number, line in read_lines(path):
        columns = re.split(r"[ \t]+", line.strip(" \t\r"))
        if columns == [""]:
            continue
        where = f"{path}:{number}"
        if len(columns) != expected:
            raise DataError(f"{where}: {len(columns)} columns in {line[:60]!r}; there must be {expected}: {names}")
        yield where, columns
    if not where:
        raise DataError(f"{path}: the file is empty; it needs lines of {expected} columns: {names}")


def read_qrels(path: str) -> Qrels:
    """Judgments from a TREC file of four columns. Ids stay strings ("007" is not "7"), gains are whole numbers.

    DataError names file, line and reason: missing or empty file, wrong columns, a passage judged twice for one query.
    """
    qrels: Qrels = {}
    for where, (query, _, passage, gain) in _columns(path, "query-id 0 passage-id gain"):
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", gain):
            raise DataError(f"{where}: gain {gain!r} is not a whole number; write 0, 1, 2, …")
        if passage in qrels.setdefault(query, {}):
            raise DataError(f"{where}: passage {passage!r} is judged a second time for query {query!r}; keep one line")
        qrels[query][passage] = int(gain)
    return qrels


def read_run(path: str) -> Run:
    """A TREC run of six columns as query id → [(passage id, score)], best first by rule 4 of this file.

    The rank column is not read, as in trec_eval. DataError names file, line and reason: missing or empty file, wrong
    columns, a score that is no number, a passage listed twice for one query.
    """
    run: dict[str, dict[str, float]] = {}
    for where, (query, _, passage, _, text, _) in _columns(path, "query-id Q0 passage-id rank score tag"):
        try:
            score = float(text)
        except ValueError:
            score = float("nan")
        if score != score:
            raise DataError(f"{where}: score {text!r} is not a number; results are ordered by it")
        if passage in run.setdefault(query, {}):
            raise DataError(f"{where}: passage {passage!r} is listed a second time for query {query!r}; keep one line")
        run[query][passage] = score
    return {query: rank_results(query, list(results.items())) for query, results in run.items()}


def rank_results(query: str, results: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Results of one query, best first: score descending, then passage id descending (by code point, as UTF-8 sorts).

    DataError: a NaN score, or a passage that occurs twice.
    """
    ranked = sorted(((passage, float(score)) for passage, score in results), key=lambda r: (r[1], r[0]), reverse=True)
    if any(score != score for _, score in ranked):
        raise DataError(f"query {query!r} has a result with score NaN, which is a failed search: search it again")
    passage, times = Counter(passage for passage, _ in ranked).most_common(1)[0] if ranked else ("", 1)
    if times > 1:
        raise DataError(f"passage {passage!r} occurs {times} times in the results of query {query!r}; list it once")
    return ranked


def _write_rows(path: str, rows: Iterator[tuple]) -> None:
    with atomic_write(path) as f:
        for row in rows:
            for column in map(str, row):
                if column.split() != [column]:
                    raise DataError(f"{path}: {column!r} cannot be a column of a TREC file; remove its blanks")
            f.write(" ".join(map(str, row)) + "\n")


def write_run(path: str, run: Run, tag: str = "nanosearch-r1") -> None:
    """Write a TREC run, best first, whole or not at all. Scores keep all their digits: reading back keeps the order.

    A query without results has no line, since a TREC file cannot hold it; scoring counts it as missing either way.
    """
    ranked = ((query, enumerate(rank_results(query, results), 1)) for query, results in run.items())
    _write_rows(path, ((query, "Q0", passage, rank, repr(score), tag)
                       for query, results in ranked for rank, (passage, score) in results))


def write_qrels(path: str, qrels: Qrels) -> None:
    """Write judgments as a TREC file of four columns, whole or not at all."""
    _write_rows(path, ((query, 0, passage, gain) for query, gains in qrels.items() for passage, gain in gains.items()))


# ---------------------------------------------------------------------------------------------- metrics


def score_run(run: Run, qrels: Qrels) -> Scores:
    """Every query of the qrels → {metric: value} for METRICS, in the order of the qrels (rules 1 to 4 of this file)."""
    relevant: Qrels = {}
    ranking: dict[str, dict[str, float]] = {}
    for query, gains in qrels.items():
        if any(gain != int(gain) for gain in gains.values()):
            raise DataError(f"query {query!r} has a gain that is not a whole number: {gains}; use 0, 1, 2, …")
        # Only queries with something to find: empty judgments spoiled the queries behind them (pytrec_eval issue 49).
        if run.get(query) and any(gain > 0 for gain in gains.values()):
            relevant[query] = {passage: int(gain) for passage, gain in gains.items()}
            ranked = rank_results(query, run[query])[:DEPTH]
            ranking[query] = {passage: float(DEPTH - i) for i, (passage, _) in enumerate(ranked)}
    evaluator = pytrec_eval.RelevanceEvaluator(relevant, {"recip_rank", "ndcg_cut.3", "recall.5,10,20,100"})
    found = evaluator.evaluate(ranking) if ranking else {}

    scores = {query: dict.fromkeys(METRICS, 0.0) for query in qrels}
    for query, row in found.items():
        first = row["recip_rank"]
        recalls = (row[f"recall_{k}"] for k in (5, 10, 20, 100))
        scores[query] = dict(zip(METRICS, (first, first if first >= 1 / 3 else 0.0, row["ndcg_cut_3"], *recalls)))
    return scores


def evaluate_run(run: Run, qrels: Qrels) -> dict[str, float]:
    """Means of METRICS over all queries of the qrels, their number (`queries`), those without a result (`missing`)."""
    names, values = _matrix(score_run(run, qrels))
    counts = {"queries": len(qrels), "missing": sum(not run.get(query) for query in qrels)}
    return dict(zip(names, values.mean(axis=0).tolist())) | counts


def _gold(turns: list[Turn]) -> Qrels:
    return {turn.query_id: dict.fromkeys(turn.gold_ids, 1) for turn in turns}


def _search(retriever: Any, turns: list[Turn], queries: list[str | None], k: int) -> Run:
    if len(queries) != len(turns):
        raise ValueError(f"{len(queries)} queries for {len(turns)} turns; give one query a turn")
    run: Run = {turn.query_id: [] for turn in turns}
    if len(run) < len(turns):
        raise DataError(f"{len(turns) - len(run)} of {len(turns)} turns repeat a query_id; query ids must be unique")
    asked = [(turn.query_id, query) for turn, query in zip(turns, queries) if query and query.strip()]
    results = retriever.search([query for _, query in asked], k) if asked else []
    if len(results) != len(asked):
        raise RuntimeError(f"the retriever answered {len(results)} of {len(asked)} queries; results are positional")
    return run | {query_id: list(found) for (query_id, _), found in zip(asked, results)}


# ---------------------------------------------------------------------------------------------- intervals and tests


def _matrix(scores: Scores) -> tuple[list[str], np.ndarray]:
    """(metric names (m), values (Q, m)) of per-query scores."""
    if not scores:
        raise DataError("there are no queries to average over; the qrels must hold at least one")
    names = list(next(iter(scores.values())))
    return names, np.array([[row[name] for name in names] for row in scores.values()])


def _units(scores: Scores, values: np.ndarray, clusters: dict[str, str] | None) -> tuple[np.ndarray, np.ndarray]:
    """(sums (C, m), sizes (C)) over what is drawn as a whole: the queries of one cluster, or a query alone."""
    clusters = clusters or {}
    labels = [(True, clusters[query]) if query in clusters else (False, query) for query in scores]
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    index = np.array([number[label] for label in labels])
    sums = np.zeros((len(number), values.shape[1]))
    np.add.at(sums, index, values)
    return sums, np.bincount(index).astype(float)


def _chunks(samples: int, count: int) -> Iterator[int]:
    """`samples` in pieces, so that the (drawn, C) arrays of a piece take some megabytes."""
    size = max(1, 500_000 // count)
    yield from (min(size, samples - start) for start in range(0, samples, size))


def _bootstrap(sums: np.ndarray, sizes: np.ndarray, samples: int, seed: int) -> list[list[float] | None]:
    """Per column of `sums`, [low, high] of sums.sum() / sizes.sum() when C units are drawn anew, with replacement."""
    count = len(sums)
    if count < 2:
        return [None] * sums.shape[1]
    generator = np.random.default_rng(seed)
    means = []
    for drawn in _chunks(samples, count):
        picks = generator.integers(0, count, (drawn, count)) + np.arange(drawn)[:, None] * count
        times = np.bincount(picks.ravel(), minlength=drawn * count).reshape(drawn, count).astype(float)  # (drawn, C)
        means.append(times @ sums / (times @ sizes)[:, None])  # (drawn, m)
    return np.quantile(np.concatenate(means), [0.025, 0.975], axis=0).T.tolist()


def bootstrap_interval(
    scores: Scores, clusters: dict[str, str] | None = None, samples: int = 10_000, seed: int = 0
) -> dict[str, list[float] | None]:
    """Metric → [low, high]: the 95 % percentile bootstrap interval of the mean of per-query scores (of `score_run`).

    clusters: query id → conversation id; whole conversations are drawn then. None where there is one unit only.
    """
    names, values = _matrix(scores)
    return dict(zip(names, _bootstrap(*_units(scores, values, clusters), samples, seed)))


def paired_test(
    scores: Scores, baseline: Scores, clusters: dict[str, str] | None = None, samples: int = 10_000, seed: int = 0
) -> dict[str, dict]:
    """Metric → {"difference", "ci": [low, high] or None, "p"}: mean of `scores` minus mean of `baseline`, same queries.

    p is two-sided, from sign flips: if the systems were exchangeable, the difference of each unit (a query; with
    `clusters` a conversation) could have either sign. p = (1 + flips as far from 0 as observed) / (1 + samples).
    """
    if scores.keys() != baseline.keys():
        odd = next(iter(scores.keys() ^ baseline.keys()))
        raise DataError(f"query {odd!r} is scored for one system only; score both against the same qrels")
    names, values = _matrix(scores)
    differences = values - np.array([[baseline[query][name] for name in names] for query in scores])
    sums, sizes = _units(scores, differences, clusters)
    observed = sums.sum(axis=0)  # (m)
    generator = np.random.default_rng(seed)
    as_far = np.zeros(len(names))
    for drawn in _chunks(samples, len(sums)):
        signs = generator.integers(0, 2, (drawn, len(sums)), dtype=np.int8) * 2.0 - 1.0  # (drawn, C)
        as_far += (np.abs(signs @ sums) >= np.abs(observed) - 1e-9).sum(axis=0)  # equal up to the rounding of sums
    columns = zip(names, (observed / sizes.sum()).tolist(), _bootstrap(sums, sizes, samples, seed), as_far.tolist())
    return {name: {"difference": d, "ci": ci, "p": (1 + flips) / (1 + samples)} for name, d, ci, flips in columns}


# ---------------------------------------------------------------------------------------------- entry point


@dataclass
class EvaluateConfig:
    run: str | list[str] = ""
    """TREC run files to score, separated by commas"""
    qrels: str = ""
    """TREC qrels file; without one, the gold passages of `turns` are the qrels"""
    baseline: str = ""
    """TREC run file that the others are compared with; without one, they are compared with the first system"""
    turns: str = ""
    """turns file (JSONL): needed to search, and for intervals by conversation"""
    rewrites: str | list[str] = ""
    """JSONL files with query_id and rewrite (infer.py writes them), separated by commas; searched with `retriever`"""
    sample: int = 0
    """which sample to score where a rewrites file has several of a turn"""
    query: str | list[str] = ""
    """baselines to search, from the turns themselves, separated by commas: question, rewrite, context"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the index to search"""
    k: int = DEPTH
    """results per query; those beyond 100 never count"""
    cluster: Literal["auto", "conversation", "query"] = "auto"
    """what intervals and tests draw as a whole; auto: conversations where `turns` is given, else queries"""
    samples: int = 10_000
    """bootstrap samples and sign flips"""
    seed: int = 0
    """seed of both"""
    out: str = ""
    """folder for table.md, metrics.json, config.yaml and the runs that were searched; without it nothing is written"""


QUERY_TEXTS = {
    "question": lambda turn: turn.question,
    "rewrite": lambda turn: turn.rewrite,  # a human's; a turn without one counts as missing
    "context": lambda turn: " ".join([text for pair in turn.context for text in pair] + [turn.question]),
}


def _listed(value: str | list[str]) -> list[str]:
    return [part.strip() for part in (value.split(",") if isinstance(value, str) else value) if part.strip()]


def _check(cfg: EvaluateConfig) -> None:
    """Refuse what cannot be scored before anything is read."""
    searched = _listed(cfg.rewrites) + _listed(cfg.query)
    if not searched and not _listed(cfg.run):
        raise ConfigError("nothing to score: give run=FILE and qrels=FILE, or turns=FILE and rewrites=FILE")
    if searched and not cfg.turns:
        raise ConfigError(f"{searched[0]} has to be searched, which needs turns=FILE and an index (retriever.…)")
    if not cfg.qrels and not cfg.turns:
        raise ConfigError("no judgments: give qrels=FILE, or turns=FILE, whose gold_ids are then used")
    if unknown := [name for name in _listed(cfg.query) if name not in QUERY_TEXTS]:
        raise ConfigError(f"query={unknown[0]!r} is unknown; there are {', '.join(QUERY_TEXTS)}")
    if cfg.cluster == "conversation" and not cfg.turns:
        raise ConfigError("cluster=conversation needs turns=FILE, which says what belongs together")
    if cfg.out and not os.path.isdir(cfg.out) and os.path.exists(cfg.out):
        raise ConfigError(f"out={cfg.out} is a file; name a folder")
    if cfg.k < 1 or cfg.samples < 1:
        raise ConfigError(f"k is {cfg.k} and samples is {cfg.samples}; both must be at least 1")


def read_rewrites(path: str, sample: int = 0) -> tuple[dict[str, str], dict[str, int]]:
    """(query id → rewrite, status → count) of a rewrites file; of several samples of a turn, the one of that number."""
    rewrites: dict[str, str] = {}
    status: Counter[str] = Counter()
    for number, row in read_jsonl(path):
        query, rewrite = row.get("query_id"), row.get("rewrite")
        if not isinstance(query, str) or not isinstance(rewrite, str):
            raise DataError(f"{path}:{number}: query_id is {query!r}, rewrite is {rewrite!r}; both must be strings")
        if row.get("sample", 0) != sample:
            continue
        if query in rewrites:
            raise DataError(f"{path}:{number}: query_id {query!r} occurs a second time; number the rewrites (`sample`)")
        rewrites[query] = rewrite
        status[str(row.get("status", "unknown"))] += 1
    if not rewrites:
        raise DataError(f"{path}: no rewrites with sample {sample}; the file must hold at least one")
    return rewrites, dict(status)


def _title(path: str, taken: dict) -> str:
    """A file's name without its ending; the whole path where that name is taken."""
    title = os.path.splitext(os.path.basename(path))[0]
    return path if title in taken else title


def _search_all(
    cfg: EvaluateConfig, turns: list[Turn], qrels: Qrels, taken: dict[str, Run]
) -> tuple[dict[str, Run], dict[str, dict]]:
    """Search what `query` and `rewrites` name, for the judged turns: (system → run, system → {"status": counts})."""
    queries: dict[str, list[str | None]] = {}
    status: dict[str, dict] = {}
    judged = [turn for turn in turns if turn.query_id in qrels]
    if not judged:
        raise DataError(f"{cfg.turns} and {cfg.qrels} have no query in common; use the qrels of these turns")
    for name in _listed(cfg.query):
        queries[f"turns: {name}"] = [QUERY_TEXTS[name](turn) for turn in judged]
    for path in _listed(cfg.rewrites):
        title = _title(path, taken | queries)
        rewrites, counts = read_rewrites(path, cfg.sample)
        status[title] = {"status": counts}
        queries[title] = [rewrites.get(turn.query_id) for turn in judged]
    for title, texts in queries.items():
        if not any(texts):
            raise DataError(f"{title}: no query for any of the {len(judged)} judged turns; it must match {cfg.turns}")
    retriever = open_retriever(cfg.retriever)
    if not cfg.qrels:
        with_gold(judged, retriever.passage_ids, cfg.turns)  # the wrong index is an error, not a low score
    return {title: _search(retriever, judged, texts, cfg.k) for title, texts in queries.items()}, status


def main(cfg: EvaluateConfig) -> dict:
    """Score every system, print the table and the comparisons; returns the last system's metrics, with all beside."""
    _check(cfg)
    turns = read_turns(cfg.turns) if cfg.turns else []
    qrels = read_qrels(cfg.qrels) if cfg.qrels else _gold([turn for turn in turns if turn.gold_ids])
    if not qrels:
        raise DataError(f"{cfg.turns}: no turn has a gold passage; give qrels=FILE")
    runs: dict[str, Run] = {}
    for path in _listed(cfg.baseline) + _listed(cfg.run):
        run = read_run(path)
        if not run.keys() & qrels.keys():
            raise DataError(f"{path} and {cfg.qrels or cfg.turns} have no query in common (for example "
                            f"{next(iter(run))!r} and {next(iter(qrels))!r}); use the qrels of this run")
        runs[_title(path, runs)] = run
    searching = _listed(cfg.rewrites) + _listed(cfg.query)
    searched, status = _search_all(cfg, turns, qrels, runs) if searching else ({}, {})
    runs |= searched

    clusters = {turn.query_id: turn.conversation_id for turn in turns} if cfg.cluster != "query" else {}
    scores = {title: score_run(run, qrels) for title, run in runs.items()}
    first, systems = next(iter(runs)), {}
    for title, run in runs.items():
        row = evaluate_run(run, qrels) | {"extra": len(run.keys() - qrels.keys())} | status.get(title, {})
        row["ci"] = bootstrap_interval(scores[title], clusters, cfg.samples, cfg.seed)
        if title != first:
            row["paired"] = paired_test(scores[title], scores[first], clusters, cfg.samples, cfg.seed)
        systems[title] = row
    result = {"system": title} | row | {"ci_unit": "conversation" if clusters else "query"}
    if len(systems) > 1:
        result |= {"baseline": first, "systems": systems}
    drawn = len({clusters.get(query, query) for query in qrels})
    table = _table(systems, first, f"{result['ci_unit']} ({drawn} of them)")
    print(table)
    if cfg.out:
        for title, run in searched.items():
            write_run(os.path.join(cfg.out, re.sub(r"[^\w.-]+", "_", title) + ".trec"), run)
        for name, text in (("table.md", table), ("metrics.json", json.dumps(result, ensure_ascii=False, indent=1))):
            with atomic_write(os.path.join(cfg.out, name)) as f:
                f.write(text + "\n")
        save_config(cfg, os.path.join(cfg.out, "config.yaml"))
    if len(systems) > 1:  # the line on stdout stays readable: intervals and tests of every system are in metrics.json
        result["systems"] = {title: {k: v for k, v in row.items() if k not in ("ci", "paired")}
                             for title, row in systems.items()}
    return result


def _table(systems: dict[str, dict], first: str, unit: str) -> str:
    """Markdown: metrics in percent with 95 % intervals; below, differences from the first system with p."""

    def cell(value: float, ci: list[float] | None, form: str) -> str:
        return f"{100 * value:{form}}" + (f" [{100 * ci[0]:{form}}, {100 * ci[1]:{form}}]" if ci else "")

    names = " | ".join(m.replace("recall", "Recall").replace("mrr", "MRR").replace("ndcg", "NDCG") for m in METRICS)
    rules, notes = "|---" * (len(METRICS) + 1), []
    top = [f"| system | {names} | queries | missing |", rules + "|---|---|"]
    below = [f"| minus {first} | {names} |", rules + "|"]
    for title, row in systems.items():
        cells = [cell(row[m], row["ci"][m], ".1f") for m in METRICS]
        top.append(f"| {title} | {' | '.join(cells)} | {row['queries']} | {row['missing']} |")
        if "paired" in row:
            tests = [row["paired"][m] for m in METRICS]
            cells = [f"{cell(test['difference'], test['ci'], '+.1f')} p={test['p']:.4f}" for test in tests]
            below.append(f"| {title} | {' | '.join(cells)} |")
        if row["extra"]:
            notes += ["", f"{title}: {row['extra']} queries of the run are not in the qrels and were ignored."]
        if "status" in row:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(row["status"].items()))
            notes += ["", f"{title}: rewrites by status: {counts}."]
    middle = ["", f"Percent with 95 % bootstrap intervals, drawn by {unit}."]
    return "\n".join(top + middle + (["", *below] if len(systems) > 1 else []) + notes)


if __name__ == "__main__":
    run_entry(EvaluateConfig, main)
