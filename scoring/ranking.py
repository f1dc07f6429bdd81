"""TREC runs and qrels: MRR, NDCG and recall by pytrec_eval, bootstrap intervals, paired tests.

docs/metrics.md explains the rules; ConvSearch-R1's scripts differ in 1, 3, 4 (`paper_protocol`).

1. Means are over ALL queries of the qrels. One without any result, or without a gain above 0,
   scores zero; the former are counted. Queries that the qrels do not know are ignored.
2. Relevant means gain > 0. `ndcg@3` uses the gains; its ideal ranking comes from the qrels.
3. `mrr` looks at the first 100 results, `mrr@3` at three. (The paper calls the former the latter.)
4. Results are ranked by score in double precision, equal scores by passage id, descending, as
   trec_eval does. pytrec_eval is handed that ranking: it keeps scores in single precision.
5. Intervals and tests draw whole conversations where it is known which turns belong together.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator

import numpy as np
import pytrec_eval

from data import DataError, read_lines
from reward import all_gold
from runs import atomic_write

Run = dict[str, list[tuple[str, float]]]  # query id → (passage id, score)
Qrels = dict[str, dict[str, int]]  # query id → passage id → gain
Scores = dict[str, dict[str, float]]  # query id → metric → value

METRICS = ("mrr", "mrr@3", "ndcg@3", "recall@5", "recall@10", "recall@20", "recall@100")
DEPTH = 100  # results of a query that count

# -------------------------------------------------------------------------------------------- files


def _columns(path: str, names: str) -> Iterator[tuple[str, list[str]]]:
    """("file:line", columns) of a TREC file, whose columns stand apart by blanks and tabs."""
    expected, location = len(names.split()), ""
    for number, line in read_lines(path):
        columns = re.split(r"[ \t]+", line.strip(" \t\r"))
        if columns == [""]:
            continue
        location = f"{path}:{number}"
        if "\0" in line:  # pytrec_eval cuts an id there, and may crash over two that are equal then
            raise DataError(f"{location}: a NUL character in {line[:60]!r}; the file is damaged")
        if len(columns) != expected:
            raise DataError(
                f"{location}: {len(columns)} columns; there must be {expected}: {names}"
            )
        yield location, columns
    if not location:
        raise DataError(f"{path}: the file is empty; it needs lines of {expected} columns: {names}")


def _add(table: dict[str, dict], query: str, passage: str, value: float, location: str) -> None:
    if passage in table.setdefault(query, {}):
        raise DataError(
            f"{location}: passage {passage!r} stands a second time for query {query!r}; keep one"
        )
    table[query][passage] = value


def read_qrels(path: str) -> Qrels:
    """Judgments from a TREC file of four columns; ids stay strings ("007" is not "7").

    DataError: a missing or empty file, wrong columns, a passage judged twice for one query.
    """
    qrels: Qrels = {}
    for location, (query, _, passage, gain) in _columns(path, "query-id 0 passage-id gain"):
        # pytrec_eval allocates for every grade up to the greatest
        if not re.fullmatch(r"[+-]?[0-9]{1,4}", gain):
            raise DataError(f"{location}: gain {gain!r} is no whole number of at most four digits")
        _add(qrels, query, passage, int(gain), location)
    return qrels


def read_run(path: str) -> Run:
    """A TREC run of six columns, best first (rule 4); the rank column is not read, as in trec_eval.

    DataError: a missing or empty file, wrong columns, a score that is no number, a passage listed
    twice for one query.
    """
    run: dict[str, dict[str, float]] = {}
    names = "query-id Q0 passage-id rank score tag"
    for location, (query, _, passage, _, text, _) in _columns(path, names):
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if math.isnan(score):
            raise DataError(
                f"{location}: score {text!r} is not a number; results are ordered by it"
            )
        _add(run, query, passage, score, location)
    return {query: rank_results(query, list(results.items())) for query, results in run.items()}


def rank_results(query: str, results: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Results of one query, best first (rule 4). DataError: a NaN score, a passage listed twice."""
    ranked = [(passage, float(score)) for passage, score in results]
    ranked.sort(key=lambda result: (result[1], result[0]), reverse=True)
    if any(math.isnan(score) for _, score in ranked):
        raise DataError(
            f"query {query!r} has a score NaN, which is a failed search: search it again"
        )
    counts = Counter(passage for passage, _ in ranked)
    passage, times = counts.most_common(1)[0] if ranked else ("", 1)
    if times > 1:
        raise DataError(
            f"passage {passage!r} occurs {times} times in the results of query {query!r}"
        )
    return ranked


def best_passages(run: Run) -> Run:
    """A run over passages DOCUMENT-N as a run over documents, each in its best passage's place.

    That is how TREC CAsT 2021, which judged documents, converts runs.
    """
    documents: Run = {}
    for query, results in run.items():
        best: dict[str, float] = {}
        for passage, score in rank_results(query, results):
            document, dash, number = passage.rpartition("-")
            if not dash or not number.isdigit():
                raise DataError(
                    f"passage {passage!r} of query {query!r} is not DOCUMENT-N; documents=true "
                    "needs the passage ids that prepare.py cast21 makes"
                )
            best.setdefault(document, score)
        # places instead of scores: documents whose best passages tie keep the passages' order
        documents[query] = [(document, float(len(best) - i)) for i, document in enumerate(best)]
    return documents


def _write_rows(path: str, rows: Iterator[tuple]) -> None:
    with atomic_write(path) as f:
        for row in rows:
            for column in map(str, row):
                if column.split() != [column]:
                    raise DataError(
                        f"{path}: {column!r} cannot be a column of a TREC file; remove its blanks"
                    )
            f.write(" ".join(map(str, row)) + "\n")


def write_run(path: str, run: Run, tag: str = "nanosearch-r1") -> None:
    """Write a TREC run, best first, whole or not at all; scores keep all their digits.

    A query without results has no line; scoring counts it as missing either way.
    """
    ranked = ((query, enumerate(rank_results(query, results), 1)) for query, results in run.items())
    _write_rows(
        path,
        (
            (query, "Q0", passage, rank, repr(score), tag)
            for query, results in ranked
            for rank, (passage, score) in results
        ),
    )


def write_qrels(path: str, qrels: Qrels) -> None:
    """Write judgments as a TREC file of four columns, whole or not at all."""
    _write_rows(
        path,
        (
            (query, 0, passage, gain)
            for query, gains in qrels.items()
            for passage, gain in gains.items()
        ),
    )


# ------------------------------------------------------------------------------------------ metrics


def score_run(run: Run, qrels: Qrels, relevant_from: int = 1) -> Scores:
    """Every query of the qrels → {metric: value} for METRICS, in the order of the qrels.

    relevant_from: lowest gain that is relevant to MRR and recall; NDCG uses all gains above 0.
    """
    relevant: Qrels = {}
    ranking: dict[str, dict[str, float]] = {}
    for query, gains in qrels.items():
        if any(gain != int(gain) for gain in gains.values()):
            raise DataError(
                f"query {query!r} has a gain that is not a whole number: {gains}; use 0, 1, 2, …"
            )
        # Only queries with something to find: empty judgments spoil the queries behind them in
        # pytrec_eval (its issue 49).
        if run.get(query) and any(gain > 0 for gain in gains.values()):
            relevant[query] = {passage: int(gain) for passage, gain in gains.items()}
            ranked = rank_results(query, run[query])[:DEPTH]
            ranking[query] = {passage: float(DEPTH - i) for i, (passage, _) in enumerate(ranked)}
    evaluator = pytrec_eval.RelevanceEvaluator(
        relevant, {"recip_rank", "ndcg_cut.3", "recall.5,10,20,100"}, relevance_level=relevant_from
    )
    found = evaluator.evaluate(ranking) if ranking else {}

    scores = {query: dict.fromkeys(METRICS, 0.0) for query in qrels}
    for query, row in found.items():
        first = row["recip_rank"]
        recalls = (row[f"recall_{k}"] for k in (5, 10, 20, 100))
        scores[query] = dict(
            zip(METRICS, (first, first if first >= 1 / 3 else 0.0, row["ndcg_cut_3"], *recalls))
        )
    return scores


def evaluate_run(run: Run, qrels: Qrels, relevant_from: int = 1) -> dict[str, float]:
    """Means of METRICS over all queries of the qrels, `queries` (their number) and `missing`."""
    names, values = matrix(score_run(run, qrels, relevant_from))
    counts = {"queries": len(qrels), "missing": sum(not run.get(query) for query in qrels)}
    return dict(zip(names, values.mean(axis=0).tolist())) | counts


# the paper's columns
PRINTED = {"mrr": "MRR@3", "ndcg@3": "NDCG@3", "recall@10": "R@10", "recall@100": "R@100"}


def all_gold_scores(run: Run, qrels: Qrels, k: int = 10) -> Scores:
    """Query with relevant passages → {"all_gold@k": 1.0 if the first k results hold them all}."""
    out: Scores = {}
    for query, gains in qrels.items():
        if golds := [passage for passage, gain in gains.items() if gain > 0]:
            first = [passage for passage, _ in rank_results(query, run.get(query, []))[:k]]
            out[query] = {f"all_gold@{k}": all_gold(first, golds)}
    return out


def check_judgments(qrels: Qrels, passage_ids: Container[str], path: str, place: str) -> None:
    """DataError where none of the relevant passages is among `passage_ids`; a warning for some.

    path, place: what holds the judgments and the passages, for the messages.
    """
    golds = {p for gains in qrels.values() for p, gain in gains.items() if gain > 0}
    among = getattr(passage_ids, "among", None)  # a served index is asked once for all
    known = set(among(golds)) if among else {p for p in golds if p in passage_ids}
    if golds and not known:
        raise DataError(
            f"{path}: none of its {len(golds)} relevant passages (for example {min(golds)!r}) is "
            f"in {place}; use the judgments of the same corpus"
        )
    if len(known) < len(golds):
        print(
            f"warning: {path}: {len(golds) - len(known)} of {len(golds)} relevant passages are not "
            f"in {place} and can't be found (for example {min(golds - known)!r})",
            file=sys.stderr,
        )


def paper_protocol(scores: Scores, run: Run, unparsed: set[str]) -> dict[str, float | int]:
    """The paper's four columns as its scripts compute them, and the number of queries they average.

    The formulas are the same, but queries without results, and those whose response did not parse
    (`unparsed`), are left out of the mean; three decimals; "MRR@3" is the `mrr` of rule 3.
    """
    kept = [row for query, row in scores.items() if run.get(query) and query not in unparsed]
    means = {
        shown: round(sum(row[m] for row in kept) / len(kept), 3) if kept else 0.0
        for m, shown in PRINTED.items()
    }
    return means | {"queries": len(kept)}


# ------------------------------------------------------------------------------ intervals and tests


def matrix(scores: Scores) -> tuple[list[str], np.ndarray]:
    """(metric names (m), values (Q, m)) of per-query scores."""
    if not scores:
        raise DataError("there are no queries to average over; the qrels must hold at least one")
    names = list(next(iter(scores.values())))
    return names, np.array([[row[name] for name in names] for row in scores.values()])


def _units(
    scores: Scores, values: np.ndarray, clusters: dict[str, str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sums (C, m), sizes (C)) over what is drawn as a whole: a cluster's queries, or one query."""
    clusters = clusters or {}
    labels = [(True, clusters[query]) if query in clusters else (False, query) for query in scores]
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    index = np.array([number[label] for label in labels])
    sums = np.zeros((len(number), values.shape[1]))
    np.add.at(sums, index, values)
    return sums, np.bincount(index).astype(float)


def _chunks(samples: int, count: int) -> Iterator[int]:
    """`samples` in pieces whose (drawn, C) arrays take some megabytes."""
    size = max(1, 500_000 // count)
    yield from (min(size, samples - start) for start in range(0, samples, size))


def _bootstrap(
    sums: np.ndarray, sizes: np.ndarray, samples: int, seed: int
) -> list[list[float] | None]:
    """Per column of `sums`, [low, high] of sums.sum() / sizes.sum() over redrawn units."""
    count = len(sums)
    if count < 2:
        return [None] * sums.shape[1]
    generator = np.random.default_rng(seed)
    means = []
    for drawn in _chunks(samples, count):
        picks = generator.integers(0, count, (drawn, count)) + np.arange(drawn)[:, None] * count
        times = (
            np.bincount(picks.ravel(), minlength=drawn * count).reshape(drawn, count).astype(float)
        )  # (drawn, C)
        means.append(times @ sums / (times @ sizes)[:, None])  # (drawn, m)
    return np.quantile(np.concatenate(means), [0.025, 0.975], axis=0).T.tolist()


def bootstrap_interval(
    scores: Scores, clusters: dict[str, str] | None = None, samples: int = 10_000, seed: int = 0
) -> dict[str, list[float] | None]:
    """Metric → [low, high]: the 95 % percentile bootstrap interval of the mean over queries.

    clusters: query id → conversation id; conversations are drawn then. None for a single unit.
    """
    names, values = matrix(scores)
    return dict(zip(names, _bootstrap(*_units(scores, values, clusters), samples, seed)))


def paired_test(
    scores: Scores,
    baseline: Scores,
    clusters: dict[str, str] | None = None,
    samples: int = 10_000,
    seed: int = 0,
) -> dict[str, dict]:
    """Metric → {"difference", "ci", "p"}: mean of `scores` minus that of `baseline`.

    p is two-sided, from sign flips of each unit's difference (a query, or with `clusters` a
    conversation): (1 + flips as far from 0 as observed) / (1 + samples). No correction for testing
    several metrics.
    """
    if scores.keys() != baseline.keys():
        odd = next(iter(scores.keys() ^ baseline.keys()))
        raise DataError(
            f"query {odd!r} is scored for one system only; score both against the same qrels"
        )
    names, values = matrix(scores)
    differences = values - np.array([[baseline[query][name] for name in names] for query in scores])
    sums, sizes = _units(scores, differences, clusters)
    observed = sums.sum(axis=0)  # (m)
    generator = np.random.default_rng(seed)
    as_far = np.zeros(len(names))
    for drawn in _chunks(samples, len(sums)):
        signs = (
            generator.integers(0, 2, (drawn, len(sums)), dtype=np.int8) * 2.0 - 1.0
        )  # (drawn, C)
        as_far += (np.abs(signs @ sums) >= np.abs(observed) - 1e-9).sum(
            axis=0
        )  # equal up to the rounding of sums
    columns = zip(
        names,
        (observed / sizes.sum()).tolist(),
        _bootstrap(sums, sizes, samples, seed),
        as_far.tolist(),
    )
    return {
        name: {"difference": d, "ci": ci, "p": (1 + flips) / (1 + samples)}
        for name, d, ci, flips in columns
    }
