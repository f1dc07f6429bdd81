"""Retrieval metrics of runs and rewrites, scores of answers, with intervals and paired tests.

    python evaluate.py run=mine.trec baseline=raw.trec qrels=test.qrels
    python evaluate.py query=question,first+question rewrites=rewrites.jsonl turns=test.jsonl \\
        retriever.index=index
    python evaluate.py --config cross.yaml      # data sets and retrievers: `sets` and `retrievers`
    python evaluate.py answers=trajectory.jsonl questions=test.jsonl qrels=test.qrels

What the metrics mean stands in docs/metrics.md. `--help` lists every setting.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from config import ConfigError, at_least, build, check_ranges, save_config, to_dict
from config import run as run_entry
from data import DataError, Turn, _text, read_jsonl, read_questions, read_turns, with_gold
from runs import atomic_write, claim_folder
from scoring import answers, breakdown
from scoring.plots import NAMES, cell, group_chart, group_table, markdown_table, tables
from scoring.ranking import (  # noqa: F401  also names of this module
    DEPTH,
    METRICS,
    PRINTED,
    Qrels,
    Run,
    Scores,
    all_gold_scores,
    best_passages,
    bootstrap_interval,
    check_judgments,
    evaluate_run,
    matrix,
    paired_test,
    paper_protocol,
    rank_results,
    read_qrels,
    read_run,
    score_run,
    write_qrels,
    write_run,
)
from search.passages import RetrieverConfig


@dataclass
class EvaluateConfig:
    answers: str | list[str] = ""
    """files of predicted answers to `questions` (infer.py's, or id and prediction), by commas;
    `qrels`, `baseline` (a file of answers too), `sample`, `samples`, `seed` and `out` apply"""
    questions: str = ""
    """questions file (JSONL) with golden answers; without `answers` the questions themselves are
    searched (query=question), which adds all_gold@10"""
    run: str | list[str] = ""
    """TREC run files to score, separated by commas"""
    qrels: str = ""
    """TREC qrels file; without one, the gold passages of `turns` are the qrels"""
    baseline: str = ""
    """file that the others are compared with; without one, that is the first system"""
    turns: str = ""
    """turns file (JSONL): needed to search, and for intervals by conversation"""
    rewrites: str | list[str] = ""
    """JSONL files with query_id and rewrite (infer.py's), separated by commas; they are searched"""
    sample: int = 0
    """which sample to score where a file has several of a turn or question"""
    query: str | list[str] = ""
    """rules to search with, separated by commas: question, first (question of the conversation),
    first+question, previous+question, context (all of it), rewrite (the given one)"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the index to search"""
    k: Annotated[int, at_least(1)] = DEPTH
    """results per query; those beyond 100 never count (documents=true: beyond 100 documents)"""
    documents: bool = False
    """qrels judge documents, passage ids are DOCUMENT-N (CAsT 2021): score by the best passage"""
    relevant_from: Annotated[int, at_least(1)] = 1
    """lowest gain that is relevant to MRR and recall (CAsT 2020 and 2021 often take 2)"""
    breakdown: bool = True
    """with `turns`: metrics by turn depth and by topic switch too, with plots in `out`"""
    corpus: str = ""
    """corpus whose titles tell topic switches where turns have no topic; unset: retriever.corpus"""
    sets: str | list[str] = ""
    """cross evaluation: names of data sets, by commas; each takes the place of @set in paths"""
    retrievers: dict[str, RetrieverConfig] = field(default_factory=dict)
    """cross evaluation: retrievers by name; NAME/SET stands for NAME on that data set"""
    cluster: Literal["auto", "conversation", "query"] = "auto"
    """what intervals and tests draw as a whole; auto: conversations where there are turns"""
    samples: Annotated[int, at_least(1)] = 10_000
    """bootstrap samples and sign flips"""
    seed: int = 0
    """seed of both"""
    out: str = ""
    """folder for table.md, metrics.json (intervals, tests, groups), plots, config, searched runs"""


# the history from its end in "context": a length limit cuts off the oldest
QUERY_TEXTS = {
    "question": lambda t: t.question,
    "first": lambda t: t.context[0][0] if t.context else t.question,
    "first+question": lambda t: " ".join([q for q, _ in t.context[:1]] + [t.question]),
    "previous+question": lambda t: " ".join([q for q, _ in t.context[-1:]] + [t.question]),
    "context": lambda t: " ".join(
        [t.question, *(text for pair in t.context[::-1] for text in pair)]
    ),
    "rewrite": lambda t: t.rewrite,  # a turn without one counts as missing
}


def _listed(value: str | list[str]) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    return [part.strip() for part in parts if part.strip()]


def check(cfg: EvaluateConfig) -> None:
    """ConfigError for settings that cannot be scored, before anything is read."""
    check_ranges(cfg)
    if cfg.out:
        claim_folder(cfg.out, "evaluate.py")
    queries, rewrites = _listed(cfg.query), _listed(cfg.rewrites)
    if _listed(cfg.answers):
        if not cfg.questions:
            raise ConfigError("answers need questions=FILE, which has the golden answers")
        for name in ("run", "rewrites", "query", "turns", "sets"):
            if value := getattr(cfg, name):
                raise ConfigError(f"{name}={value} does not go with answers; score them apart")
        return
    if not queries and not rewrites and not _listed(cfg.run):
        raise ConfigError("nothing to score: give run=, rewrites=, query= or answers=")
    if unknown := [name for name in queries if name not in QUERY_TEXTS]:
        raise ConfigError(f"query={unknown[0]!r} is unknown; there are {', '.join(QUERY_TEXTS)}")
    if (rewrites or queries) and not cfg.turns and not cfg.questions:
        what = (rewrites + queries)[0]
        raise ConfigError(f"{what} has to be searched, which needs turns=FILE and an index")
    if cfg.questions and (cfg.turns or rewrites or not cfg.qrels or queries[:1] != ["question"]):
        raise ConfigError("questions go with qrels=FILE and query=question, or with answers=FILE")
    if cfg.documents and not cfg.qrels:
        raise ConfigError("documents=true needs qrels=FILE, the judgments of documents")
    if not cfg.qrels and not cfg.turns:
        raise ConfigError("no judgments: give qrels=FILE, or turns=FILE, whose gold_ids are used")
    if cfg.cluster == "conversation" and not cfg.turns:
        raise ConfigError("cluster=conversation needs turns=FILE, which says what belongs together")


# ------------------------------------------------------------------------------------------- search


def read_rewrites(path: str, sample: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """(query id → rewrite, query id → status, "unknown" without one) of a rewrites file.

    sample: its number, where a turn has several.
    """
    rewrites: dict[str, str] = {}
    status: dict[str, str] = {}
    for number, row in read_jsonl(path):
        query, rewrite = (_text(row, key, f"{path}:{number}") for key in ("query_id", "rewrite"))
        if row.get("sample", 0) != sample:
            continue
        if query in rewrites:
            raise DataError(
                f"{path}:{number}: query_id {query!r} occurs a second time; number them (`sample`)"
            )
        rewrites[query] = rewrite
        status[query] = str(row.get("status", "unknown"))
    if not rewrites:
        raise DataError(f"{path}: no rewrites with sample {sample}; there must be at least one")
    return rewrites, status


def search(retriever: Any, turns: list[Turn], queries: list[str | None], k: int) -> Run:
    """The run of one query a turn; None and blank ones are not searched."""
    run: Run = {turn.query_id: [] for turn in turns}
    asked = [(t.query_id, query) for t, query in zip(turns, queries) if query and query.strip()]
    results = retriever.search([query for _, query in asked], k) if asked else []
    if len(results) != len(asked):
        raise RuntimeError(f"the retriever answered {len(results)} of {len(asked)} queries")
    return run | {query: list(found) for (query, _), found in zip(asked, results)}


def _title(path: str, taken: dict) -> str:
    """A file's name without its ending; the whole path where that name is taken."""
    title = os.path.splitext(os.path.basename(path))[0]
    if title in taken and path in taken:
        raise ConfigError(f"{path} is named once more; once as baseline and once as run is enough")
    return path if title in taken else title


def _search_all(
    cfg: EvaluateConfig, turns: list[Turn], qrels: Qrels, systems: dict[str, System]
) -> None:
    """Search what `query` and `rewrites` name for the judged turns, and add it to `systems`."""
    source = cfg.turns or cfg.questions
    judged = [turn for turn in turns if turn.query_id in qrels]
    if not judged:
        raise DataError(
            f"{source} and {cfg.qrels} have no query in common; use the qrels of these queries"
        )
    queries: dict[str, list[str | None]] = {}
    status: dict[str, dict[str, str]] = {}
    names, paths = _listed(cfg.query), _listed(cfg.rewrites)
    for name in names:
        texts = [QUERY_TEXTS[name](turn) for turn in judged]
        if not any(texts) and len(names + paths) > 1:  # TopiOCQA has no human rewrites
            print(f"query={name}: no turn of {source} has a {name}; left out", file=sys.stderr)
        else:
            queries[name if cfg.questions else f"turns: {name}"] = texts
    for path in paths:
        title = _title(path, systems | queries)
        rewrites, status[title] = read_rewrites(path, cfg.sample)
        queries[title] = [rewrites.get(turn.query_id) for turn in judged]
    for title, texts in queries.items():
        if not any(texts):
            raise DataError(
                f"{title}: no query for any of the {len(judged)} judged turns of {source}"
            )
    from retriever import open_retriever  # needs torch

    retriever = open_retriever(cfg.retriever)
    if not cfg.qrels:
        with_gold(judged, retriever.passage_ids, cfg.turns)
    elif not cfg.documents:
        own = {turn.query_id: qrels[turn.query_id] for turn in judged}
        check_judgments(own, retriever.passage_ids, cfg.qrels, "the index")
    for title, texts in queries.items():
        before = getattr(retriever, "cut_queries", None)
        run = search(retriever, judged, texts, cfg.k)
        row = {} if before is None else {"cut": retriever.cut_queries - before}
        if cut := getattr(retriever, "cut_passages", 0):
            row["cut_passages"] = cut
        systems[title] = System(run, status.get(title, {}), True, row=row)


# ----------------------------------------------------------------------------------- scored systems


@dataclass
class System:
    """One line of the tables: a run, or the predictions of a file of answers."""

    found: dict[str, Any]  # query id → results or prediction
    status: dict[str, str] = field(default_factory=dict)  # query id → of a rewrites file
    searched: bool = False  # here, not read from a run file
    scores: list[Scores] = field(default_factory=list)  # each with queries of its own
    row: dict = field(default_factory=dict)  # counts, and what metrics.json has beside means


def compare(
    systems: dict[str, System],
    clusters: dict[str, str],
    groups: dict[str, dict[str, list[str]]],
    cfg: EvaluateConfig,
) -> dict[str, dict]:
    """System → row: means, counts, `ci`, `groups` (kind → label → means, queries, ci).

    Tests are against the first system (`paired`) and against the one before (`paired_before`).
    """
    rows: dict[str, dict] = {}
    names = list(systems)
    for number, (title, system) in enumerate(systems.items()):
        row = rows[title] = system.row | {"ci": {}}
        for scores in filter(None, system.scores):
            row |= _means(scores)
            row["ci"] |= bootstrap_interval(scores, clusters, cfg.samples, cfg.seed)
        for key, other in (("paired", 0), ("paired_before", number - 1)):
            if number > (key == "paired_before"):
                row[key] = _paired(system, systems[names[other]], clusters, cfg)
        if groups:
            row["groups"] = {}
        for kind, labels in groups.items():
            parts = {label: {q: system.scores[0][q] for q in labels[label]} for label in labels}
            row["groups"][kind] = {
                label: _group(part, clusters, cfg) for label, part in parts.items()
            }
    return rows


def _means(scores: Scores) -> dict[str, float]:
    names, values = matrix(scores)
    return dict(zip(names, values.mean(axis=0).tolist()))


def _group(scores: Scores, clusters: dict[str, str], cfg: EvaluateConfig) -> dict:
    ci = bootstrap_interval(scores, clusters, min(cfg.samples, 2000), cfg.seed)
    return _means(scores) | {"queries": len(scores), "ci": ci}


def _paired(one: System, other: System, clusters: dict[str, str], cfg: EvaluateConfig) -> dict:
    """Metric → test, for the metrics and queries that both systems have."""
    out: dict[str, dict] = {}
    for scores, baseline in zip(one.scores, other.scores):
        both = [query for query in scores if query in baseline]
        if both:
            names = [name for name in scores[both[0]] if name in baseline[both[0]]]
            pair = [{q: {n: of[q][n] for n in names} for q in both} for of in (scores, baseline)]
            out |= paired_test(*pair, clusters, cfg.samples, cfg.seed)
    return out


def score(cfg: EvaluateConfig) -> dict:
    """Score runs and what is searched, print the tables, write `out`; all systems' rows."""
    turns = read_turns(cfg.turns) if cfg.turns else []
    gold = {turn.query_id: dict.fromkeys(turn.gold_ids, 1) for turn in turns if turn.gold_ids}
    qrels = read_qrels(cfg.qrels) if cfg.qrels else gold
    if not qrels:
        raise DataError(f"{cfg.turns}: no turn has a gold passage; give qrels=FILE")
    if not cfg.qrels and len(qrels) < len(turns):
        left = f"{len(turns) - len(qrels)} of {len(turns)} turns have no gold passage"
        print(f"{cfg.turns}: {left} and are not scored", file=sys.stderr)
    systems: dict[str, System] = {}
    for path in _listed(cfg.baseline) + _listed(cfg.run):
        run = read_run(path)
        _check_queries(path, run, cfg.qrels or cfg.turns, qrels, "the qrels of this run")
        systems[_title(path, systems)] = System(run)
    if _listed(cfg.rewrites) + _listed(cfg.query):
        questions = read_questions(cfg.questions) if cfg.questions else []
        asked = [Turn(q.id, q.id, 1, [], q.question, []) for q in questions] or turns
        _search_all(cfg, asked, qrels, systems)
    for title, system in systems.items():
        _score_run(cfg, title, system, qrels)
    corpus = cfg.corpus or cfg.retriever.corpus
    groups = breakdown.groups(turns, corpus, list(qrels)) if cfg.breakdown and turns else {}
    clusters = {t.query_id: t.conversation_id for t in turns} if cfg.cluster != "query" else {}
    result = _finish(cfg, systems, clusters, groups, list(qrels), "mrr")
    for title, system in systems.items() if cfg.out else ():
        if system.searched:
            write_run(os.path.join(cfg.out, _file_name(title) + ".trec"), system.found)
    return result


def _score_run(cfg: EvaluateConfig, title: str, system: System, qrels: Qrels) -> None:
    """Fill in the scores and counts of a run."""
    if cfg.documents:
        system.found = best_passages(system.found)
    run = system.found
    if cfg.documents or not system.searched:
        passages = {passage for results in run.values() for passage, _ in results}
        judged = {passage for gains in qrels.values() for passage in gains}
        if passages and not passages & judged:
            raise DataError(
                f"{title} and {cfg.qrels or cfg.turns} have no passage in common (for example "
                f"{min(passages)!r} and {min(judged)!r}); use the judgments of the same corpus"
            )
    said = {query: word for query, word in system.status.items() if query in qrels}
    system.scores = [score_run(run, qrels, cfg.relevant_from)]
    missing = sum(not run.get(query) for query in qrels)
    extra = len((system.status or run).keys() - qrels.keys())
    system.row = {"queries": len(qrels), "missing": missing, "extra": extra} | system.row
    if said:
        system.row["status"] = dict(Counter(said.values()))
    if cfg.questions:
        system.scores.append(all_gold_scores(run, qrels))
    else:
        unparsed = {query for query, word in said.items() if word not in ("ok", "unknown")}
        system.row["paper"] = paper_protocol(system.scores[0], run, unparsed)


def score_answers(cfg: EvaluateConfig) -> dict:
    """Score files of answers, print the tables, write `out` and FlashRAG's files; all rows."""
    questions = read_questions(cfg.questions)
    known = {question.id: {} for question in questions}
    qrels = read_qrels(cfg.qrels) if cfg.qrels else {}
    golds = {query: [p for p, gain in gains.items() if gain > 0] for query, gains in qrels.items()}
    if cfg.qrels and not any(golds.get(query) for query in known):
        raise DataError(
            f"{cfg.qrels} judges no question of {cfg.questions}; give the qrels of these questions"
        )
    systems: dict[str, System] = {}
    for path in _listed(cfg.baseline) + _listed(cfg.answers):
        found = answers.read_predictions(path, cfg.sample)
        _check_queries(path, found, cfg.questions, known, "the questions of these answers")
        title = _title(path, systems)
        scores = answers.score_predictions(found, questions, golds)
        row = answers.count_predictions(found, questions) | {"judged": len(scores["golds"])}
        systems[title] = System(found, scores=list(scores.values()), row=row)
        shown = {passage for p in found.values() for passage in p.retrieved or ()}
        if shown and golds and not any(shown.intersection(passages) for passages in golds.values()):
            print(f"warning: {path} retrieved no passage that {cfg.qrels} judges", file=sys.stderr)
    types = answers.by_type(questions)
    result = _finish(cfg, systems, {}, {"type": types} if types else {}, list(known), "f1")
    for title, system in systems.items() if cfg.out else ():
        folder = cfg.out if len(systems) == 1 else os.path.join(cfg.out, _file_name(title))
        answers.write_flashrag(folder, cfg.questions, system.found)
    return result


def _check_queries(path: str, found: dict, other: str, known: dict, use: str) -> None:
    if not found.keys() & known.keys():
        raise DataError(
            f"{path} and {other} have no query in common (for example {next(iter(found))!r} and "
            f"{next(iter(known))!r}); use {use}"
        )


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.-]+", "_", title)


def _finish(
    cfg: EvaluateConfig,
    systems: dict[str, System],
    clusters: dict[str, str],
    groups: dict[str, dict[str, list[str]]],
    queries: list[str],
    main_metric: str,
) -> dict:
    """Compare the systems, print the tables and write them; the last system's row, and all."""
    rows = compare(systems, clusters, groups, cfg)
    unit = "conversation" if clusters else "query"
    title = list(rows)[-1]
    result = {"system": title} | rows[title] | {"ci_unit": unit}
    if len(rows) > 1:
        result |= {"baseline": next(iter(rows)), "systems": rows}
    table = tables(rows, unit, len({clusters.get(query, query) for query in queries}))
    pictures = {}
    for kind in groups:
        table += "\n\n" + group_table(kind, rows, main_metric)
        pictures[f"{kind}.svg"] = group_chart(kind, rows, main_metric)
    print(table)
    _write(cfg, {"table.md": table, **pictures}, result)
    return result


def _write(cfg: EvaluateConfig, texts: dict[str, str], result: dict) -> None:
    if cfg.out:
        texts = texts | {"metrics.json": json.dumps(result, ensure_ascii=False, indent=1)}
        for name, text in texts.items():
            with atomic_write(os.path.join(cfg.out, name)) as f:
                f.write(text + "\n")
        save_config(cfg, os.path.join(cfg.out, "config.yaml"))


# --------------------------------------------------------------------------------- cross evaluation


def cross(cfg: EvaluateConfig) -> dict:
    """Score every data set with every retriever; each one's files go to `out`/SET-RETRIEVER.

    Set and retriever → system → the paper's metrics.
    """
    if cfg.out:
        claim_folder(cfg.out, "evaluate.py")
    sets = _listed(cfg.sets) or [""]
    names = [name for name in cfg.retrievers if "/" not in name] or [""]
    for name in cfg.retrievers:
        base, slash, place = name.partition("/")
        if slash and (base not in cfg.retrievers or place not in sets):
            raise ConfigError(
                f"retrievers.{name} overrides {base!r} on data set {place!r}; there are retrievers "
                f"{', '.join(names)} and sets {', '.join(sets)}"
            )
    if len(sets) > 1 and not any("@set" in str(v) for v in (cfg.turns, cfg.qrels, cfg.run)):
        raise ConfigError(
            f"{len(sets)} sets, but @set occurs in none of turns, qrels and run; write it where "
            "the data set's name stands in the paths"
        )
    jobs = {}
    for place in sets:
        for name in names:
            retriever = cfg.retrievers.get(name, cfg.retriever)
            retriever = cfg.retrievers.get(f"{name}/{place}", retriever)
            job = dataclasses.replace(cfg, sets="", retrievers={}, retriever=retriever, out="")
            text = json.dumps(to_dict(job)).replace("@set", json.dumps(place)[1:-1])
            title = "/".join(filter(None, (place, name)))
            jobs[title] = build(EvaluateConfig, json.loads(text))
            jobs[title].out = cfg.out and os.path.join(cfg.out, title.replace("/", "-"))
            check(jobs[title])
    cells, body = {}, []
    for title, job in jobs.items():
        print(f"\n{title}\n")
        result = score(job)
        cells[title] = result.get("systems") or {result["system"]: result}
        for system, row in cells[title].items():
            values = [cell(m, row[m], row["ci"][m]) for m in METRICS]
            counts = [str(row["queries"]), str(row["missing"]), str(row.get("cut", "–"))]
            body.append([title, system, *values, *counts])
    head = ["set, retriever", "system", *(NAMES[m] for m in METRICS), "queries", "missing", "cut"]
    table = markdown_table(head, body)
    print(f"\nAll, in percent with 95 % intervals:\n\n{table}")
    _write(cfg, {"table.md": table}, {"cells": cells})
    return {
        title: {
            system: {m: round(row[m], 4) for m in PRINTED} | {"queries": row["queries"]}
            for system, row in systems.items()
        }
        for title, systems in cells.items()
    }


def main(cfg: EvaluateConfig) -> dict:
    """Score what the config names: metrics and counts of the last system and of all."""
    out = {"out": cfg.out} if cfg.out else {}
    if not _listed(cfg.answers) and (_listed(cfg.sets) or cfg.retrievers):
        return {"cells": cross(cfg)} | out
    check(cfg)
    result = (score_answers if _listed(cfg.answers) else score)(cfg)
    line = _short(result)
    if "systems" in result:
        line["systems"] = {title: _short(row) for title, row in result["systems"].items()}
    return line | out


def _short(row: dict) -> dict:
    """What the last line repeats of a row."""
    left_out = ("ci", "paired", "paired_before", "groups", "paper", "systems")
    return {key: value for key, value in row.items() if key not in left_out}


if __name__ == "__main__":
    run_entry(EvaluateConfig, main)
