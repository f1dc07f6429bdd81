"""Retrieval metrics of TREC runs, or of rewrites and an index: MRR, MRR@3, NDCG@3, Recall@5/10/20/100, with intervals.

    python evaluate.py run=mine.trec qrels=test.qrels
    python evaluate.py run=mine.trec baseline=raw.trec qrels=test.qrels          # with a paired test
    python evaluate.py rewrites=rewrites.jsonl query=question,rewrite turns=test.jsonl retriever.index=index
    python evaluate.py --config cross.yaml          # several data sets and retrievers: `sets` and `retrievers`
    python evaluate.py answers=trajectory.jsonl questions=test.jsonl qrels=test.qrels     # EM, F1, … (answers.py)

The rules by which it measures stand at the top of `measures.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from config import ConfigError, run as run_entry, save_config
from data import DataError, read_jsonl, read_questions, read_turns, Turn, with_gold
from retriever import open_retriever, RetrieverConfig
from reward import all_gold
from runs import atomic_write
from scoring import answers
from scoring import breakdown
from scoring.ranking import (  # noqa: F401  some are this module's names, too
                             best_passages, bootstrap_interval, DEPTH, evaluate_run, matrix,
                             METRICS, paired_test, paper_protocol, PRINTED, Qrels, rank_results,
                             read_qrels, read_run, Run, score_run, Scores, write_qrels, write_run)


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


# ---------------------------------------------------------------------------------------------- entry point


@dataclass
class EvaluateConfig:
    answers: str | list[str] = ""
    """instead of runs: files of predicted answers to `questions` (trajectory.jsonl of infer.py, or id and prediction),
    separated by commas; `qrels`, `baseline` (a file of answers too), `sample`, `samples`, `seed` and `out` apply"""
    questions: str = ""
    """questions file (JSONL) with the golden answers; without `answers`, the questions themselves can be searched
    (query=question), which adds all_gold@10: the share of questions whose gold passages all are in the first ten"""
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
    """results per query; those beyond 100 never count (with documents=true: beyond 100 documents; take k=1000)"""
    documents: bool = False
    """qrels judge documents and passage ids are DOCUMENT-N (CAsT 2021): score a document by its best passage"""
    relevant_from: int = 1
    """lowest gain that is relevant to MRR and recall (TREC CAsT 2020 and 2021 are often scored with 2)"""
    breakdown: bool = True
    """with `turns`: metrics by turn depth and by topic switch too; written to `out`, with plots"""
    corpus: str = ""
    """corpus whose titles tell topic switches where turns have no topic; unset: retriever.corpus"""
    sets: str | list[str] = ""
    """cross evaluation: names of data sets, separated by commas; each takes the place of @set in every path"""
    retrievers: dict[str, RetrieverConfig] = field(default_factory=dict)
    """cross evaluation: retrievers by name, instead of `retriever`; NAME/SET stands for NAME on that data set"""
    cluster: Literal["auto", "conversation", "query"] = "auto"
    """what intervals and tests draw as a whole; auto: conversations where `turns` is given, else queries"""
    samples: int = 10_000
    """bootstrap samples and sign flips"""
    seed: int = 0
    """seed of both"""
    out: str = ""
    """folder for table.md, metrics.json (all intervals, tests and groups), plots, config.yaml and the searched runs"""


QUERY_TEXTS = {
    "question": lambda turn: turn.question,
    "rewrite": lambda turn: turn.rewrite,  # a human's; a turn without one counts as missing
    # the question, then the history from its end: what an encoder's length limit cuts off is the oldest
    "context": lambda turn: " ".join([turn.question, *(text for pair in reversed(turn.context) for text in pair)]),
}


def _listed(value: str | list[str]) -> list[str]:
    return [part.strip() for part in (value.split(",") if isinstance(value, str) else value) if part.strip()]


def _check(cfg: EvaluateConfig) -> None:
    """Refuse what cannot be scored before anything is read."""
    searched = _listed(cfg.rewrites) + _listed(cfg.query)
    if not searched and not _listed(cfg.run):
        raise ConfigError("nothing to score: give run=FILE and qrels=FILE, or turns=FILE and rewrites=FILE")
    if searched and not cfg.turns and not cfg.questions:
        raise ConfigError(f"{searched[0]} has to be searched, which needs turns=FILE and an index (retriever.…)")
    if cfg.questions and (cfg.turns or cfg.rewrites or not cfg.qrels or _listed(cfg.query) not in ([], ["question"])):
        raise ConfigError("questions go with qrels=FILE and query=question, or with answers=FILE; turns, rewrites and "
                          "other queries are of conversations")
    if not cfg.qrels and not cfg.turns:
        raise ConfigError("no judgments: give qrels=FILE, or turns=FILE, whose gold_ids are then used")
    if unknown := [name for name in _listed(cfg.query) if name not in QUERY_TEXTS]:
        raise ConfigError(f"query={unknown[0]!r} is unknown; there are {', '.join(QUERY_TEXTS)}")
    if cfg.cluster == "conversation" and not cfg.turns:
        raise ConfigError("cluster=conversation needs turns=FILE, which says what belongs together")
    if cfg.out and not os.path.isdir(cfg.out) and os.path.exists(cfg.out):
        raise ConfigError(f"out={cfg.out} is a file; name a folder")
    if cfg.documents and not cfg.qrels:
        raise ConfigError("documents=true needs qrels=FILE, the judgments of documents")
    if cfg.relevant_from < 1:
        raise ConfigError(f"relevant_from is {cfg.relevant_from}; a relevant gain is at least 1")
    if cfg.k < 1 or cfg.samples < 1:
        raise ConfigError(f"k is {cfg.k} and samples is {cfg.samples}; both must be at least 1")


def read_rewrites(path: str, sample: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """(query id → rewrite, query id → status) of a rewrites file; of several samples of a turn, the one of that number.

    A line without a status has "unknown".
    """
    rewrites: dict[str, str] = {}
    status: dict[str, str] = {}
    for number, row in read_jsonl(path):
        query, rewrite = row.get("query_id"), row.get("rewrite")
        if not isinstance(query, str) or not isinstance(rewrite, str):
            raise DataError(f"{path}:{number}: query_id is {query!r}, rewrite is {rewrite!r}; both must be strings")
        if row.get("sample", 0) != sample:
            continue
        if query in rewrites:
            raise DataError(f"{path}:{number}: query_id {query!r} occurs a second time; number the rewrites (`sample`)")
        rewrites[query] = rewrite
        status[query] = str(row.get("status", "unknown"))
    if not rewrites:
        raise DataError(f"{path}: no rewrites with sample {sample}; the file must hold at least one")
    return rewrites, status


def _title(path: str, taken: dict) -> str:
    """A file's name without its ending; the whole path where that name is taken."""
    title = os.path.splitext(os.path.basename(path))[0]
    if title in taken and path in taken:
        raise ConfigError(f"{path} is named once more; once as baseline and once as run is enough")
    return path if title in taken else title


def _search_all(
    cfg: EvaluateConfig, turns: list[Turn], qrels: Qrels, taken: dict[str, Run]
) -> tuple[dict[str, Run], dict[str, dict]]:
    """Search what `query` and `rewrites` name, for the judged turns: (system → run, system → query → status)."""
    queries: dict[str, list[str | None]] = {}
    status: dict[str, dict[str, str]] = {}
    judged = [turn for turn in turns if turn.query_id in qrels]
    if not judged:
        raise DataError(f"{cfg.turns or cfg.questions} and {cfg.qrels} have no query in common; use the qrels of these "
                        "queries")
    for name in _listed(cfg.query):
        texts = [QUERY_TEXTS[name](turn) for turn in judged]
        if not any(texts) and len(_listed(cfg.query) + _listed(cfg.rewrites)) > 1:  # TopiOCQA has no human rewrites
            print(f"query={name}: no turn of {cfg.turns or cfg.questions} has a {name}; left out", file=sys.stderr)
        else:
            queries[name if cfg.questions else f"turns: {name}"] = texts
    for path in _listed(cfg.rewrites):
        title = _title(path, taken | queries)
        rewrites, status[title] = read_rewrites(path, cfg.sample)
        queries[title] = [rewrites.get(turn.query_id) for turn in judged]
    for title, texts in queries.items():
        if not any(texts):
            raise DataError(f"{title}: no query for any of the {len(judged)} judged turns; it must match {cfg.turns}")
    retriever = open_retriever(cfg.retriever)
    if not cfg.qrels:
        with_gold(judged, retriever.passage_ids, cfg.turns)  # the wrong index is an error, not a low score
    return {title: _search(retriever, judged, texts, cfg.k) for title, texts in queries.items()}, status


def score(cfg: EvaluateConfig) -> dict:
    """Score every system, print the tables, write `out`; the last system's metrics, and all systems' details.

    A system's row holds METRICS, `queries`, `missing`, `extra` (rule 1), `status` counts of a rewrites file, `ci`,
    `paper` (rule 7; of turns), `paired` (against the first system) and `groups` (kind → label → metrics, queries, ci).
    """
    _check(cfg)
    turns = read_turns(cfg.turns) if cfg.turns else []
    qrels = read_qrels(cfg.qrels) if cfg.qrels else _gold([turn for turn in turns if turn.gold_ids])
    if not cfg.qrels and len(qrels) < len(turns):
        print(f"{cfg.turns}: {len(turns) - len(qrels)} of {len(turns)} turns have no gold passage and are not scored",
              file=sys.stderr)
    asked = [Turn(q.id, q.id, 1, [], q.question, []) for q in read_questions(cfg.questions)] if cfg.questions else turns
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
    searched, status = _search_all(cfg, asked, qrels, runs) if searching else ({}, {})
    runs |= searched
    if cfg.documents:
        runs = {title: best_passages(run) for title, run in runs.items()}

    clusters = {turn.query_id: turn.conversation_id for turn in turns} if cfg.cluster != "query" else {}
    groups = _groups(cfg, turns, qrels)
    scores = {title: score_run(run, qrels, cfg.relevant_from) for title, run in runs.items()}
    first, systems = next(iter(runs)), {}
    for title, run in runs.items():
        said = {query: word for query, word in status.get(title, {}).items() if query in qrels}
        row = evaluate_run(run, qrels, cfg.relevant_from)
        row["extra"] = len(status.get(title, run).keys() - qrels.keys())
        row |= {"status": dict(Counter(said.values()))} if said else {}
        row["ci"] = bootstrap_interval(scores[title], clusters, cfg.samples, cfg.seed)
        if cfg.questions:
            row["all_gold@10"] = _all_gold(run, qrels)
        else:
            unparsed = {query for query, word in said.items() if word not in ("ok", "unknown")}
            row["paper"] = paper_protocol(scores[title], run, unparsed)
        if title != first:
            row["paired"] = paired_test(scores[title], scores[first], clusters, cfg.samples, cfg.seed)
        if groups:
            row["groups"] = {k: _score_groups(scores[title], labels, clusters, cfg) for k, labels in groups.items()}
        systems[title] = row
    result = {"system": title} | row | {"ci_unit": "conversation" if clusters else "query"}
    if len(systems) > 1:
        result |= {"baseline": first, "systems": systems}
    drawn = len({clusters.get(query, query) for query in qrels})
    table = _table(systems, first, f"{result['ci_unit']} ({drawn} of them)")
    for kind in groups:
        table += "\n\n" + _group_table(kind, systems)
    print(table)
    if cfg.out:
        for title, run in searched.items():
            write_run(os.path.join(cfg.out, re.sub(r"[^\w.-]+", "_", title) + ".trec"), run)
        texts = {"table.md": table, "metrics.json": json.dumps(result, ensure_ascii=False, indent=1)}
        for kind in groups:
            texts[f"{kind}.svg"] = _group_plot(kind, systems)
        for name, text in texts.items():
            with atomic_write(os.path.join(cfg.out, name)) as f:
                f.write(text + "\n")
        save_config(cfg, os.path.join(cfg.out, "config.yaml"))
    return result


def _all_gold(run: Run, qrels: Qrels, k: int = 10) -> float:
    """Share of the queries with a gold passage whose gold passages all are in the first k results."""
    golds = {query: [passage for passage, gain in gains.items() if gain > 0] for query, gains in qrels.items()}
    judged = [query for query in golds if golds[query]]
    first = {query: [passage for passage, _ in rank_results(query, run.get(query, []))[:k]] for query in judged}
    return sum(all_gold(first[query], golds[query]) for query in judged) / max(1, len(judged))


def short(row: dict) -> dict:
    """What of a system's row the last line of stdout repeats: its metrics and counts."""
    return {k: row[k] for k in (*METRICS, "all_gold@10", "queries", "missing", "extra", "status") if k in row}


def main(cfg: EvaluateConfig) -> dict:
    """Score what the config names; metrics by name, of the last system and of all, the rest being in `out`."""
    if _listed(cfg.answers):
        return score_answers(cfg)
    if _listed(cfg.sets) or cfg.retrievers:
        return cross(cfg)
    result = score(cfg)
    line = {"system": result["system"]} | short(result) | {"ci_unit": result["ci_unit"]}
    if "systems" in result:
        line |= {"baseline": result["baseline"], "systems": {t: short(row) for t, row in result["systems"].items()}}
    return line | ({"out": cfg.out} if cfg.out else {})


# ---------------------------------------------------------------------------------------------- groups of queries


def _groups(cfg: EvaluateConfig, turns: list[Turn], qrels: Qrels) -> dict[str, dict[str, list[str]]]:
    """Kind of group → label → judged queries; a kind with less than two labels beside "unknown" is left out."""
    if not cfg.breakdown or not turns:
        return {}
    corpus = cfg.corpus or cfg.retriever.corpus
    needed = corpus and not all(turn.extra.get("topic") for turn in turns)
    titles = breakdown.gold_titles(corpus, turns) if needed else {}
    out: dict[str, dict[str, list[str]]] = {}
    for kind, labels in (("depth", breakdown.by_depth(turns)), ("topic", breakdown.by_topic(turns, titles))):
        found: dict[str, list[str]] = {}
        for query in qrels:
            if query in labels:
                found.setdefault(labels[query], []).append(query)
        if len(found.keys() - {"unknown"}) > 1:
            out[kind] = {label: found[label] for label in sorted(found, key=breakdown.order)}
    return out


def _score_groups(scores: Scores, labels: dict[str, list[str]], clusters: dict[str, str], cfg: EvaluateConfig) -> dict:
    """Label → means of METRICS, `queries` and `ci`, over the queries of that label."""
    out = {}
    for label, queries in labels.items():
        part = {query: scores[query] for query in queries}
        names, values = matrix(part)
        ci = bootstrap_interval(part, clusters, min(cfg.samples, 2000), cfg.seed)
        out[label] = dict(zip(names, values.mean(axis=0).tolist())) | {"queries": len(part), "ci": ci}
    return out


KINDS = {"depth": "turn of the conversation", "topic": "topic, against the turn before"}


def _group_table(kind: str, systems: dict[str, dict]) -> str:
    """Markdown: MRR of every system in every group of a kind, in percent with intervals."""
    groups = next(iter(systems.values()))["groups"][kind]
    lines = [f"| MRR by {KINDS[kind]} | " + " | ".join(f"{label} ({row['queries']})" for label, row in groups.items())
             + " |", "|---" * (len(groups) + 1) + "|"]
    for title, row in systems.items():
        cells = [_cell(group["mrr"], group["ci"]["mrr"], ".1f") for group in row["groups"][kind].values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _group_plot(kind: str, systems: dict[str, dict]) -> str:
    groups = next(iter(systems.values()))["groups"][kind]
    labels = [f"{label} ({row['queries']})" for label, row in groups.items()]
    series = {title: [(group["mrr"], group["ci"]["mrr"]) for group in row["groups"][kind].values()]
              for title, row in systems.items()}
    return breakdown.plot(f"MRR (percent) by {KINDS[kind]}; in brackets: queries", labels, series)


# ---------------------------------------------------------------------------------------------- cross evaluation


def _placed(value: Any, name: str) -> Any:
    """`value` with @set replaced by the data set's name in every text inside."""
    if isinstance(value, str):
        return value.replace("@set", name)
    if isinstance(value, list):
        return [_placed(part, name) for part in value]
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{f.name: _placed(getattr(value, f.name), name)
                                             for f in dataclasses.fields(value)})
    return value


def cross(cfg: EvaluateConfig) -> dict:
    """Every data set with every retriever: one table of all; each cell's own files go to `out`/SET-RETRIEVER."""
    sets = _listed(cfg.sets) or [""]
    names = [name for name in cfg.retrievers if "/" not in name] or [""]
    for name in cfg.retrievers:
        base, slash, place = name.partition("/")
        if slash and (base not in cfg.retrievers or place not in sets):
            raise ConfigError(f"retrievers.{name} overrides {base!r} on data set {place!r}, but there are retrievers "
                              f"{', '.join(names)} and sets {', '.join(sets)}")
    plain = dataclasses.replace(cfg, sets="", retrievers={})
    if len(sets) > 1 and not any("@set" in str(v) for v in (cfg.turns, cfg.qrels, cfg.run)):
        raise ConfigError(f"{len(sets)} sets, but @set occurs in none of turns, qrels and run; write it where the "
                          "data set's name stands in the paths")
    jobs = {}
    for place in sets:
        for name in names:
            retriever = cfg.retrievers.get(f"{name}/{place}", cfg.retrievers.get(name, cfg.retriever))
            cell = _placed(dataclasses.replace(plain, retriever=retriever, out=""), place)
            title = "/".join(filter(None, (place, name)))
            jobs[title] = dataclasses.replace(cell, out=cfg.out and os.path.join(cfg.out, title.replace("/", "-")))
            _check(jobs[title])
    details, rows = {}, [f"| set, retriever | system | {_NAMES} | queries |", "|---" * (len(METRICS) + 3) + "|"]
    for title, job in jobs.items():
        print(f"\n{title}\n")
        result = score(job)
        details[title] = result.get("systems") or {result["system"]: result}
        for system, row in details[title].items():
            cells = [_cell(row[m], row["ci"][m], ".1f") for m in METRICS]
            rows.append(f"| {title} | {system} | {' | '.join(cells)} | {row['queries']} |")
    table = "\n".join(rows)
    print(f"\nAll, in percent with 95 % intervals:\n\n{table}")
    if cfg.out:
        text = json.dumps({"cells": details}, ensure_ascii=False, indent=1)
        for name, content in (("table.md", table), ("metrics.json", text)):
            with atomic_write(os.path.join(cfg.out, name)) as f:
                f.write(content + "\n")
        save_config(cfg, os.path.join(cfg.out, "config.yaml"))
    cells = {title: {system: {m: round(row[m], 4) for m in PRINTED} | {"queries": row["queries"]}
                     for system, row in systems.items()} for title, systems in details.items()}
    return {"cells": cells} | ({"out": cfg.out} if cfg.out else {})


# ---------------------------------------------------------------------------------------------- answers


def _check_answers(cfg: EvaluateConfig) -> None:
    """Refuse what cannot be scored before anything is read."""
    if not cfg.questions:
        raise ConfigError("answers need questions=FILE, which has the golden answers")
    for name in ("run", "rewrites", "query", "turns", "sets"):
        if value := getattr(cfg, name):
            raise ConfigError(f"{name}={value} does not go with answers; score them in two calls")
    if cfg.out and not os.path.isdir(cfg.out) and os.path.exists(cfg.out):
        raise ConfigError(f"out={cfg.out} is a file; name a folder")
    if cfg.samples < 1:
        raise ConfigError(f"samples is {cfg.samples}; it must be at least 1")


def score_answers(cfg: EvaluateConfig) -> dict:
    """Score files of answers (rules in answers.py), print the table, write `out` with FlashRAG's files; all means.

    A system's row holds reward.ANSWER_METRICS, where known `well_formed`, `searches`, `gold_recall`, `all_gold`, then
    `questions`, `missing`, `errors`, `extra`, `judged`, `ci`, `paired` against the first system, and `types` (the
    question's type → means, queries, ci) where questions have more than one.
    """
    _check_answers(cfg)
    questions = read_questions(cfg.questions)
    qrels = read_qrels(cfg.qrels) if cfg.qrels else {}
    golds = {query: [passage for passage, gain in gains.items() if gain > 0] for query, gains in qrels.items()}
    if cfg.qrels and not any(golds.get(question.id) for question in questions):
        raise DataError(f"{cfg.qrels} judges no question of {cfg.questions}; give the qrels of these questions")
    found: dict[str, dict[str, answers.Prediction]] = {}
    for path in _listed(cfg.baseline) + _listed(cfg.answers):
        predictions = answers.read_predictions(path, cfg.sample)
        if not predictions.keys() & {question.id for question in questions}:
            raise DataError(f"{path} and {cfg.questions} have no question in common (for example "
                            f"{next(iter(predictions))!r} and {questions[0].id!r}); use the questions of these answers")
        found[_title(path, found)] = predictions
    groups = {title: answers.score_predictions(predictions, questions, golds) for title, predictions in found.items()}
    first, systems, types = next(iter(found)), {}, answers.by_type(questions)
    for title, predictions in found.items():
        row: dict = {"ci": {}, "paired": {}}
        for kind, scores in groups[title].items():
            if not scores:
                continue
            names, values = matrix(scores)
            row |= dict(zip(names, values.mean(axis=0).tolist()))
            row["ci"] |= bootstrap_interval(scores, None, cfg.samples, cfg.seed)
            other = groups[first][kind]
            both = [query for query in scores if query in other]
            if title != first and both:
                shared = [name for name in names if name in other[both[0]]]
                pair = [{query: {name: of[query][name] for name in shared} for query in both} for of in (scores, other)]
                row["paired"] |= paired_test(*pair, None, cfg.samples, cfg.seed)
        row |= answers.count_predictions(predictions, questions) | {"judged": len(groups[title]["golds"])}
        row |= {"types": _score_groups(groups[title]["answers"], types, {}, cfg)} if types else {}
        systems[title] = row
    result = {"system": title} | row | ({"baseline": first, "systems": systems} if len(systems) > 1 else {})
    table = _answer_table(systems, first)
    print(table)
    if cfg.out:
        for title in found:
            folder = cfg.out if len(found) == 1 else os.path.join(cfg.out, re.sub(r"[^\w.-]+", "_", title))
            answers.write_flashrag(folder, cfg.questions, found[title], groups[title]["answers"])
        for name, text in (("table.md", table), ("metrics.json", json.dumps(result, ensure_ascii=False, indent=1))):
            with atomic_write(os.path.join(cfg.out, name)) as f:
                f.write(text + "\n")
        save_config(cfg, os.path.join(cfg.out, "config.yaml"))
    plain = {title: {k: v for k, v in row.items() if k not in ("ci", "paired", "types")}
             for title, row in systems.items()}
    line = {"system": title} | plain[title] | {"ci_unit": "query"}
    return line | ({"baseline": first, "systems": plain} if len(systems) > 1 else {}) | (
        {"out": cfg.out} if cfg.out else {})


ANSWER_NAMES = {"em": "EM", "f1": "F1", "acc": "acc", "precision": "precision", "recall": "recall",
                "well_formed": "well-formed", "gold_recall": "gold recall", "all_gold": "all gold",
                "searches": "searches"}


def _answer_table(systems: dict[str, dict], first: str) -> str:
    """Markdown: what is known of every system, with intervals; below, differences from the first system with p."""
    names = [name for name in ANSWER_NAMES if any(name in row for row in systems.values())]

    def cell(name: str, value: float | None, ci: list[float] | None, sign: str = "") -> str:
        if value is None:
            return "–"
        if name != "searches":
            return _cell(value, ci, f"{sign}.1f")
        return f"{value:{sign}.2f}" + (f" [{ci[0]:{sign}.2f}, {ci[1]:{sign}.2f}]" if ci else "")

    head = " | ".join(ANSWER_NAMES[name] for name in names)
    top = [f"| system | {head} | questions | missing | errors |", "|---" * (len(names) + 4) + "|"]
    below = [f"| minus {first} | {head} |", "|---" * (len(names) + 1) + "|"]
    notes = []
    for title, row in systems.items():
        cells = [cell(name, row.get(name), row["ci"].get(name)) for name in names]
        top.append(f"| {title} | {' | '.join(cells)} | {row['questions']} | {row['missing']} | {row['errors']} |")
        if row["paired"]:
            tests = [(name, row["paired"].get(name)) for name in names]
            cells = [cell(name, test["difference"], test["ci"], "+") + f" p={test['p']:.4f}" if test else "–"
                     for name, test in tests]
            below.append(f"| {title} | {' | '.join(cells)} |")
        if row["judged"]:
            notes += ["", f"{title}: gold recall and all gold over the {row['judged']} judged questions."]
        if row["missing"]:
            notes += ["", f"{title}: {row['missing']} of {row['questions']} questions have no prediction and count 0."]
        if row["extra"]:
            notes += ["", f"{title}: {row['extra']} predictions are for other questions and were ignored."]
    types = systems[first].get("types", {})
    labels = " | ".join(f"{label} ({row['queries']})" for label, row in types.items())
    by_type = ["", f"| F1 by type of question | {labels} |", "|---" * (len(types) + 1) + "|"] if types else []
    for title, row in systems.items() if types else ():
        cells = [_cell(part["f1"], part["ci"]["f1"], ".1f") for part in row["types"].values()]
        by_type.append(f"| {title} | {' | '.join(cells)} |")
    middle = ["", "Percent (searches: their number) with 95 % bootstrap intervals, drawn by question."]
    return "\n".join(top + middle + (["", *below] if len(systems) > 1 else []) + by_type + notes)


# ---------------------------------------------------------------------------------------------- tables


_NAMES = " | ".join(m.replace("recall", "Recall").replace("mrr", "MRR").replace("ndcg", "NDCG") for m in METRICS)


def _cell(value: float, ci: list[float] | None, form: str) -> str:
    return f"{100 * value:{form}}" + (f" [{100 * ci[0]:{form}}, {100 * ci[1]:{form}}]" if ci else "")


def _table(systems: dict[str, dict], first: str, unit: str) -> str:
    """Markdown: metrics in percent with intervals; below, the paper's protocol, then differences from the first."""
    rules, notes = "|---" * (len(METRICS) + 1), []
    top = [f"| system | {_NAMES} | queries | missing |", rules + "|---|---|"]
    below = [f"| minus {first} | {_NAMES} |", rules + "|"]
    paper = ["| as the paper's scripts count | " + " | ".join(PRINTED.values()) + " | queries averaged |",
             "|---" * (len(PRINTED) + 2) + "|"]
    for title, row in systems.items():
        if "paper" in row:
            shares = " | ".join(f"{100 * row['paper'][name]:.1f}" for name in PRINTED.values())
            paper.append(f"| {title} | {shares} | {row['paper']['queries']} |")
        cells = [_cell(row[m], row["ci"][m], ".1f") for m in METRICS]
        top.append(f"| {title} | {' | '.join(cells)} | {row['queries']} | {row['missing']} |")
        if "paired" in row:
            tests = [row["paired"][m] for m in METRICS]
            cells = [f"{_cell(test['difference'], test['ci'], '+.1f')} p={test['p']:.4f}" for test in tests]
            below.append(f"| {title} | {' | '.join(cells)} |")
        if "all_gold@10" in row:
            share = 100 * row["all_gold@10"]
            notes += ["", f"{title}: all gold passages are in the first ten for {share:.1f} % of the queries."]
        if row["missing"]:
            notes += ["", f"{title}: {row['missing']} of {row['queries']} queries have no results and count 0."]
        if row["extra"]:
            notes += ["", f"{title}: {row['extra']} queries of the run are not in the qrels and were ignored."]
        if "status" in row:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(row["status"].items()))
            notes += ["", f"{title}: rewrites by status: {counts}."]
    middle = ["", f"Percent with 95 % bootstrap intervals, drawn by {unit}."]
    if len(paper) > 2:
        middle += ["", *paper, "", "There \"MRR@3\" is the MRR above; queries without results, or whose response did "
                                   "not parse, are left out of the mean."]
    return "\n".join(top + middle + (["", *below] if len(systems) > 1 else []) + notes)


if __name__ == "__main__":
    run_entry(EvaluateConfig, main)
