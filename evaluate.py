"""Retrieval metrics of runs and rewrites, scores of answers, with intervals and paired tests.

    python evaluate.py run=mine.trec baseline=raw.trec qrels=test.qrels
    python evaluate.py query=question,first+question rewrites=rewrites.jsonl turns=test.jsonl \\
        retriever.index=index
    python evaluate.py --config cross.yaml      # data sets and retrievers: `sets` and `retrievers`
    python evaluate.py answers=trajectory.jsonl questions=test.jsonl qrels=test.qrels
    python evaluate.py answers=… questions=… judge=http://HOST:8000 judge_model=NAME out=FOLDER
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Any, Iterable

from config import ConfigError, Only, above, at_least, build, check_fields, save_config, to_dict
from config import run as run_entry
from data import DataError, Turn, as_text, read_questions, read_turns, with_gold
from runs import atomic_write, claim_folder, write_json
from scoring import answers, breakdown
from scoring.judge import Judge
from scoring.ranking import (  # noqa: F401  also names of this module
    DEPTH,
    METRICS,
    PRINTED,
    Qrels,
    Run,
    Scores,
    add_all_gold,
    best_passages,
    bootstrap_interval,
    evaluate_run,
    means,
    paired_test,
    paper_protocol,
    rank_results,
    read_golds,
    read_qrels,
    read_run,
    score_run,
    write_run,
)
from scoring.tables import group_table, tables, tables_page
from search.passages import RetrieverConfig


@dataclass
class EvaluateConfig:
    answers: list[str] = field(default_factory=list)
    """files of predicted answers (infer.py's, or id and prediction), by commas"""
    questions: str = ""
    """questions file with golden answers; without `answers` the questions are searched"""
    run: list[str] = field(default_factory=list)
    """TREC run files, by commas"""
    qrels: str = ""
    """TREC qrels file; unset: the gold passages of `turns`"""
    baseline: str = ""
    """file that the others are compared with; unset: the first system"""
    turns: str = ""
    """turns file: needed to search, and for intervals by conversation"""
    rewrites: list[str] = field(default_factory=list)
    """files with query_id and rewrite (infer.py's), by commas; they are searched"""
    sample: int = 0
    """which sample of a turn or question to score"""
    query: list[str] = field(default_factory=list)
    """rules to search with, by commas: question, first (question of the conversation),
    first+question, previous+question, context (all of it), rewrite (the given one)"""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """the index to search"""
    k: Annotated[int, at_least(1)] = DEPTH
    """results per query; those beyond 100 never count"""
    documents: Annotated[bool, Only("qrels")] = False
    """qrels judge documents, passage ids are DOCUMENT-N: score by the best passage"""
    relevant_from: Annotated[int, at_least(1)] = 1
    """lowest gain that is relevant to MRR and recall"""
    breakdown: bool = True
    """with `turns`: metrics by turn depth and by topic switch too"""
    corpus: str = ""
    """corpus whose titles tell topic switches; unset: retriever.corpus"""
    sets: list[str] = field(default_factory=list)
    """cross evaluation: data sets, by commas; each takes the place of @set in paths"""
    retrievers: dict[str, RetrieverConfig] = field(default_factory=dict)
    """cross evaluation: retrievers by name; NAME/SET stands for NAME on that data set"""
    judge: str = ""
    """answers: address of an OpenAI-compatible server (`vllm serve`), whose model is asked whether
    an answer agrees with the golden ones; a key comes from OPENAI_API_KEY"""
    judge_model: Annotated[str, Only("judge")] = ""
    """the judge's name on that server"""
    judge_requests: Annotated[int, at_least(1), Only("judge")] = 16
    """questions put to the judge at a time"""
    judge_timeout: Annotated[float, above(0), Only("judge")] = 120.0
    """seconds for one answer of the judge"""
    samples: Annotated[int, at_least(1)] = 10_000
    """bootstrap samples and sign flips"""
    out: str = ""
    """folder for report.html, table.md, metrics.json (intervals, tests, groups), searched runs"""


# "context" has the newest turn first: a length limit cuts off the oldest
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

FEW = 50  # units, below which percentile intervals are too narrow


def check(cfg: EvaluateConfig) -> None:
    """ConfigError for settings that cannot be scored; reads nothing."""
    check_fields(cfg)
    if cfg.out:
        claim_folder(cfg.out, "evaluate.py")
    usual = EvaluateConfig()
    given = [name for name, value in vars(cfg).items() if value != getattr(usual, name)]
    shared = "answers questions qrels baseline sample samples out".split()
    others = [name for name in given if name not in shared and not name.startswith("judge")]
    searched = cfg.rewrites + cfg.query
    uses = {"k": searched, "sample": cfg.rewrites}
    idle = [name for name, user in uses.items() if name in given and not user]
    unknown = [name for name in cfg.query if name not in QUERY_TEXTS]
    odd_questions = cfg.turns or cfg.rewrites or not cfg.qrels or cfg.query != ["question"]
    for wrong, message in (
        (cfg.answers and not cfg.questions, "answers need questions=FILE with golden answers"),
        (cfg.answers and others, f"{others} do not go with answers; score them apart"),
        (
            cfg.judge and not (cfg.answers and cfg.judge_model and cfg.out),
            "judge needs answers=FILE, judge_model=NAME, and out=FOLDER, where its verdicts stay",
        ),
        (idle and not cfg.answers, f"{idle} have no effect on what is scored; leave them out"),
        (unknown, f"query={unknown} is unknown; there are {', '.join(QUERY_TEXTS)}"),
        (not cfg.answers + cfg.run + searched, "give run=, rewrites=, query= or answers= to score"),
        (
            searched and not cfg.turns and not cfg.questions,
            f"{searched} has to be searched, which needs turns=FILE and an index",
        ),
        (
            cfg.questions and not cfg.answers and odd_questions,
            "questions go with qrels=FILE and query=question, or with answers=FILE",
        ),
        (
            not cfg.answers and not cfg.qrels and not cfg.turns,
            "no judgments: give qrels=FILE, or turns=FILE, whose gold_ids are used",
        ),
    ):
        if wrong:
            raise ConfigError(message)


def _common(kind: str, one: str, its: Iterable[str], other: str, others: Iterable[str]) -> None:
    """DataError if two files that belong together share no id."""
    its, others = set(its), set(others)
    if its and its.isdisjoint(others):
        raise DataError(
            f"{one} and {other} have no {kind} in common (such as {min(its)!r}); give files of the "
            "same data"
        )


def _title(path: str, taken: dict) -> str:
    """A file's name without its ending; the whole path if files of that name are taken."""
    title = os.path.splitext(os.path.basename(path))[0]
    if title in taken and path in taken:
        raise ConfigError(f"{path} is named once more; as baseline and as run is enough")
    return path if _file_name(title) in map(_file_name, taken) else title


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.-]+", "_", title)


System = tuple[dict[str, Any], Scores]  # a line of the tables: counts and scores

# ------------------------------------------------------------------------------- runs and rewrites


def score(cfg: EvaluateConfig) -> dict:
    """Score runs and searched queries, print the tables, write `out`; returns all rows."""
    turns = read_turns(cfg.turns) if cfg.turns else []
    gold = {turn.query_id: dict.fromkeys(turn.gold_ids, 1) for turn in turns if turn.gold_ids}
    qrels = read_qrels(cfg.qrels) if cfg.qrels else gold
    if not qrels:
        raise DataError(f"{cfg.turns}: no turn has a gold passage; give qrels=FILE")
    if not cfg.qrels and len(qrels) < len(turns):
        left = f"{len(turns) - len(qrels)} of {len(turns)} turns have no gold passage"
        print(f"{cfg.turns}: {left} and are not scored", file=sys.stderr)
    systems: dict[str, System] = {}
    for path in filter(None, [cfg.baseline, *cfg.run]):
        run = read_run(path)
        _common("query", path, run, cfg.qrels or cfg.turns, qrels)
        systems[_title(path, systems)] = _score_run(cfg, path, run, qrels)
    if cfg.rewrites or cfg.query:
        _search_all(cfg, turns, qrels, systems)
    corpus = cfg.corpus or cfg.retriever.corpus
    groups = breakdown.groups(turns, corpus, list(qrels)) if cfg.breakdown and turns else {}
    clusters = {turn.query_id: turn.conversation_id for turn in turns}
    return compare(cfg, systems, clusters, groups, "mrr")


def _score_run(
    cfg: EvaluateConfig, name: str, run: Run, qrels: Qrels, status: dict[str, str] | None = None
) -> System:
    """status: query id → status in a rewrites file; {} for other queries that were searched here,
    None for a run that was read from a file."""
    if cfg.documents:
        run = best_passages(run)
    if cfg.documents or status is None:
        passages = (passage for results in run.values() for passage, _ in results)
        judged = itertools.chain.from_iterable(qrels.values())
        _common("passage", name, passages, cfg.qrels or cfg.turns, judged)
    row: dict[str, Any] = {
        "queries": len(qrels),
        "missing": sum(not run.get(query) for query in qrels),
        "extra": len((status or run).keys() - qrels.keys()),
    }
    scores = score_run(run, qrels, cfg.relevant_from)
    words = {query: word for query, word in (status or {}).items() if query in qrels}
    if words:
        row["status"] = dict(Counter(words.values()))
    if cfg.questions:
        add_all_gold(scores, run, qrels)
    else:
        unparsed = {query for query, word in words.items() if word not in ("ok", "unknown")}
        row["paper"] = paper_protocol(scores, run, unparsed)
    return row, scores


def _search_all(
    cfg: EvaluateConfig, turns: list[Turn], qrels: Qrels, systems: dict[str, System]
) -> None:
    """Search `query` and `rewrites` for the judged turns; add them to `systems`."""
    if cfg.questions:
        turns = [Turn(q.id, q.id, 1, [], q.question, []) for q in read_questions(cfg.questions)]
    source = cfg.turns or cfg.questions
    _common("query", source, (turn.query_id for turn in turns), cfg.qrels, qrels)
    judged = [turn for turn in turns if turn.query_id in qrels]
    queries: dict[str, tuple[dict, dict]] = {}  # title → query id → text, and → status
    for name in cfg.query:
        texts = {turn.query_id: QUERY_TEXTS[name](turn) for turn in judged}
        if any(texts.values()):
            queries[name if cfg.questions else f"turns: {name}"] = texts, {}
        else:  # TopiOCQA has no human rewrites
            print(f"query={name}: no turn of {source} has a {name}; left out", file=sys.stderr)
    for path in cfg.rewrites:
        rewrites, status = read_rewrites(path, cfg.sample)
        texts = {turn.query_id: rewrites.get(turn.query_id) for turn in judged}
        _common("query", path, rewrites, source, texts)
        queries[_title(path, systems | queries)] = texts, status
    if not systems and not queries:
        raise DataError(f"{source}: no query is left to search")
    from retriever import open_retriever  # needs torch

    retriever = open_retriever(cfg.retriever)
    if not cfg.qrels:
        with_gold(judged, retriever.passage_ids, cfg.turns)
    elif not cfg.documents:
        golds = {p for turn in judged for p, gain in qrels[turn.query_id].items() if gain > 0}
        known = golds & retriever.passage_ids
        _common("relevant passage", cfg.qrels, golds, "the index", known)
        if lacking := golds - known:
            what = f"{len(lacking)} of {len(golds)} relevant passages, such as {min(lacking)!r},"
            print(f"warning: {cfg.qrels}: {what} are not in the index", file=sys.stderr)
    for title, (texts, status) in queries.items():
        before = getattr(retriever, "cut_queries", None)
        run = search(retriever, texts, cfg.k)
        row, _ = systems[title] = _score_run(cfg, title, run, qrels, status)
        if before is not None:
            row["cut"] = retriever.cut_queries - before
        if cut := getattr(retriever, "cut_passages", 0):
            row["cut_passages"] = cut
        if cfg.out:
            write_run(os.path.join(cfg.out, _file_name(title) + ".trec"), run)


def read_rewrites(path: str, sample: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """(query id → rewrite, query id → status, "unknown" without one) of a rewrites file."""
    rewrites: dict[str, str] = {}
    status: dict[str, str] = {}
    for location, query, row in answers.rows_of_sample(path, "query_id", sample):
        rewrites[query] = as_text(row.get("rewrite"))
        status[query] = str(row.get("status", "unknown"))
        if rewrites[query] is None:
            raise DataError(f"{location}: rewrite is {row.get('rewrite')!r}; it must be a string")
    return rewrites, status


def search(retriever: Any, queries: dict[str, str | None], k: int) -> Run:
    """Search queries by id into a run; None and blank ones are not searched."""
    asked = {query: text for query, text in queries.items() if text and text.strip()}
    results = retriever.search(list(asked.values()), k) if asked else []
    return {query: [] for query in queries} | dict(zip(asked, results, strict=True))


# ------------------------------------------------------------------------------------------ answers


def score_answers(cfg: EvaluateConfig) -> dict:
    """Score files of answers, print the tables, write `out` and FlashRAG's files; returns rows."""
    questions = read_questions(cfg.questions)
    known = {question.id for question in questions}
    golds = read_golds([cfg.qrels] if cfg.qrels else [])
    if golds:
        _common("query", cfg.questions, known, cfg.qrels, golds)
    relevant = set(itertools.chain.from_iterable(golds.values()))
    systems: dict[str, System] = {}
    files = {}
    for path in filter(None, [cfg.baseline, *cfg.answers]):
        found = answers.read_predictions(path, cfg.sample)
        _common("query", path, found, cfg.questions, known)
        scores = answers.score_predictions(found, questions, golds)
        row = {
            "questions": len(known),
            "missing": len(known - found.keys()),
            "errors": sum(bool(found[id_].error) for id_ in known & found.keys()),
            "extra": len(found.keys() - known),
            "judged": sum("gold_recall" in own for own in scores.values()),
        }
        if cfg.judge:
            kept = os.path.join(cfg.out, "judge.jsonl")
            how = cfg.judge_timeout, cfg.judge_requests
            verdicts = Judge(cfg.judge, cfg.judge_model, kept, *how).score(found, questions)
            row["unjudged"] = len(questions) - len(verdicts)
            for id_, verdict in verdicts.items():
                scores[id_]["judge"] = verdict
        title = _title(path, systems)
        files[title], systems[title] = found, (row, scores)
        shown = {passage for p in found.values() for passage in p.retrieved or ()}
        if shown and relevant and shown.isdisjoint(relevant):
            print(f"warning: {path} retrieved no passage that {cfg.qrels} judges", file=sys.stderr)
    types = defaultdict(list)  # "bridge", "2hop", … → ids
    for question in questions:
        types[str(question.metadata.get("type", "unknown"))].append(question.id)
    groups = {"type": dict(sorted(types.items()))} if len(types) > 1 else {}
    result = compare(cfg, systems, {}, groups, "f1")
    for title, found in files.items() if cfg.out else ():
        folder = cfg.out if len(files) == 1 else os.path.join(cfg.out, _file_name(title))
        answers.write_flashrag(folder, cfg.questions, found)
    return result


# ------------------------------------------------------------------------------- systems compared


def compare(
    cfg: EvaluateConfig,
    systems: dict[str, System],
    clusters: dict[str, str],
    groups: dict[str, dict[str, list[str]]],
    main_metric: str,
) -> dict:
    """Compare the systems, print and write the tables; returns the last row, with all `systems`.

    A row has means, counts, `ci`, paired tests against the first system (`paired`) and the one
    before (`paired_before`), and `groups` (kind → label → means, queries, ci).
    """
    rows: dict[str, dict] = {}
    titles, found = list(systems), [scores for _, scores in systems.values()]
    for n, (title, (row, scores)) in enumerate(systems.items()):
        rows[title] = row = row | _row(scores, clusters, cfg.samples)
        if n > 0:
            row["paired"] = paired_test(scores, found[0], clusters, cfg.samples)
        if n > 1:
            row["paired_before"] = paired_test(scores, found[n - 1], clusters, cfg.samples)
        for kind, labels in groups.items():
            part = row.setdefault("groups", {})[kind] = {}
            for label, queries in labels.items():
                own = {query: scores[query] for query in queries}
                part[label] = _row(own, clusters, min(cfg.samples, 2000)) | {"queries": len(own)}
    title, row = titles[-1], rows[titles[-1]]
    unit = "conversation" if any(c != query for query, c in clusters.items()) else "query"
    units = len({clusters.get(query, query) for query in found[-1]})
    note = f", drawn by {unit} ({units} of them)."
    if units < FEW:
        note += " Percentile intervals of so few are too narrow."
    if cfg.query or cfg.rewrites:
        r = cfg.retriever
        note += f" Searched with {r.kind}: {r.url or r.index or r.corpus}."
    parts = [tables(rows, note), *(group_table(kind, rows, main_metric) for kind in groups)]
    result = {"system": title} | row | {"ci_unit": unit}
    if len(rows) > 1:
        result |= {"baseline": titles[0], "systems": rows}
    _write(cfg, "\n\n".join(parts), result, rows)
    return result


def _row(scores: Scores, clusters: dict[str, str], samples: int) -> dict:
    """Means of all metrics, and `ci`, their intervals."""
    return means(scores) | {"ci": bootstrap_interval(scores, clusters, samples)}


def _write(cfg: EvaluateConfig, table: str, result: dict, rows: dict[str, dict]) -> None:
    """Print the table; write it, the result and their page to `out`."""
    print(table)
    if cfg.out:
        page = tables_page(os.path.basename(os.path.abspath(cfg.out)), table, rows)
        for name, text in (("table.md", table), ("report.html", page)):
            with atomic_write(os.path.join(cfg.out, name)) as f:
                f.write(text + "\n")
        write_json(os.path.join(cfg.out, "metrics.json"), result)
        save_config(cfg, os.path.join(cfg.out, "config.yaml"))


# --------------------------------------------------------------------------------- cross evaluation


def cross(cfg: EvaluateConfig) -> dict:
    """Score every data set with every retriever; each one's files go to `out`/SET-RETRIEVER.

    Set and retriever → system → the paper's metrics.
    """
    if cfg.out:
        claim_folder(cfg.out, "evaluate.py")
    cells = {}
    for title, job in _jobs(cfg).items():
        print(f"\n{title}\n")
        result = score(job)
        cells[title] = result.get("systems") or {result["system"]: result}
        print()
    everything = {f"{title}, {name}": row for title in cells for name, row in cells[title].items()}
    rows = {title: _short(row) | {"ci": row["ci"]} for title, row in everything.items()}
    _write(cfg, tables(rows, "."), {"cells": cells}, rows)
    return {
        title: {
            system: {m: round(row[m], 4) for m in PRINTED} | {"queries": row["queries"]}
            for system, row in systems.items()
        }
        for title, systems in cells.items()
    }


def _jobs(cfg: EvaluateConfig) -> dict[str, EvaluateConfig]:
    """SET/RETRIEVER → the configuration that scores them."""
    sets = cfg.sets or [""]
    names = [name for name in cfg.retrievers if "/" not in name] or [""]
    for name in cfg.retrievers:
        base, slash, place = name.partition("/")
        if slash and (base not in cfg.retrievers or place not in sets):
            raise ConfigError(
                f"retrievers.{name} overrides {base!r} on data set {place!r}; there are {names} "
                f"and {sets}"
            )
    if len(sets) > 1 and "@set" not in f"{cfg.turns}{cfg.qrels}{cfg.run}":
        raise ConfigError(
            f"{len(sets)} sets, but @set occurs in none of turns, qrels and run; write it there"
        )
    jobs = {}
    for place, name in itertools.product(sets, names):
        title = "/".join(filter(None, (place, name)))
        retriever = cfg.retrievers.get(name, cfg.retriever)
        retriever = cfg.retrievers.get(f"{name}/{place}", retriever)
        job = dataclasses.replace(cfg, sets=[], retrievers={}, retriever=retriever, out="")
        text = json.dumps(to_dict(job)).replace("@set", json.dumps(place)[1:-1])
        jobs[title] = build(EvaluateConfig, json.loads(text))
        jobs[title].out = cfg.out and os.path.join(cfg.out, title.replace("/", "-"))
        check(jobs[title])
    return jobs


def main(cfg: EvaluateConfig) -> dict:
    """Score what the configuration names; returns metrics and counts of all systems."""
    out = {"out": cfg.out} if cfg.out else {}
    if not cfg.answers and (cfg.sets or cfg.retrievers):
        return {"cells": cross(cfg)} | out
    check(cfg)
    result = score_answers(cfg) if cfg.answers else score(cfg)
    line = _short(result)
    if "systems" in result:
        line["systems"] = {title: _short(row) for title, row in result["systems"].items()}
    return line | out


def _short(row: dict) -> dict:
    """The part of a row that the last line of stdout shows."""
    left_out = ("ci", "paired", "paired_before", "groups", "paper", "systems")
    return {key: value for key, value in row.items() if key not in left_out}


if __name__ == "__main__":
    run_entry(EvaluateConfig, main)
