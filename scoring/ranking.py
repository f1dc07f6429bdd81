"""Runs, qrels and what is measured on them: MRR, NDCG and recall by pytrec_eval, bootstrap intervals, paired tests.

A file of its own because training, reports and the server measure and read these files without the command in
`evaluate.py`, which hands all of its names on.

pytrec_eval computes the numbers. What this file decides around it (the original system differs in 1, 3, 4 and 7):

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
7. Beside these stands the protocol of ConvSearch-R1's own scripts (`paper_protocol`), for comparison with its tables:
   the same formulas, but a query without results, and one whose response did not parse, are left out of the mean
   instead of scoring zero (or searching the raw question), and what it prints as "MRR@3" is the `mrr` of rule 3. Of a
   query that occurs twice it keeps the last; here that is an error.
8. Where judgments are of documents and results are passages DOCUMENT-N (`documents`: TREC CAsT 2021), a document stands
   where its best passage stands, as in the track's own converter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytrec_eval

from data import DataError, read_lines
from runs import atomic_write

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
        if "\0" in line:  # pytrec_eval cuts an id there, and may crash over two that are equal then
            raise DataError(f"{where}: a NUL character in {line[:60]!r}; the file is damaged")
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
        if not re.fullmatch(r"[+-]?[0-9]{1,4}", gain):  # pytrec_eval allocates for every grade up to the greatest
            raise DataError(f"{where}: gain {gain!r} is not a whole number of four digits at most; write 0, 1, 2, …")
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


def best_passages(run: Run) -> Run:
    """A run over passages DOCUMENT-N as a run over documents: each stands where its best passage stands (rule 8)."""
    documents: Run = {}
    for query, results in run.items():
        best: dict[str, float] = {}
        for passage, score in rank_results(query, results):
            document, dash, number = passage.rpartition("-")
            if not dash or not number.isdigit():
                raise DataError(f"passage {passage!r} of query {query!r} is not DOCUMENT-N; documents=true needs the "
                                "passage ids that prepare.py cast21 makes")
            best.setdefault(document, score)
        # places instead of scores: two documents whose best passages tie keep the passages' order
        documents[query] = [(document, float(len(best) - i)) for i, document in enumerate(best)]
    return documents


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


def score_run(run: Run, qrels: Qrels, relevant_from: int = 1) -> Scores:
    """Every query of the qrels → {metric: value} for METRICS, in the order of the qrels (rules 1 to 4 of this file).

    relevant_from: lowest gain that is relevant to MRR and recall; NDCG uses all gains above 0
    """
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
    evaluator = pytrec_eval.RelevanceEvaluator(relevant, {"recip_rank", "ndcg_cut.3", "recall.5,10,20,100"},
                                               relevance_level=relevant_from)
    found = evaluator.evaluate(ranking) if ranking else {}

    scores = {query: dict.fromkeys(METRICS, 0.0) for query in qrels}
    for query, row in found.items():
        first = row["recip_rank"]
        recalls = (row[f"recall_{k}"] for k in (5, 10, 20, 100))
        scores[query] = dict(zip(METRICS, (first, first if first >= 1 / 3 else 0.0, row["ndcg_cut_3"], *recalls)))
    return scores


def evaluate_run(run: Run, qrels: Qrels, relevant_from: int = 1) -> dict[str, float]:
    """Means of METRICS over all queries of the qrels, their number (`queries`), those without a result (`missing`)."""
    names, values = matrix(score_run(run, qrels, relevant_from))
    counts = {"queries": len(qrels), "missing": sum(not run.get(query) for query in qrels)}
    return dict(zip(names, values.mean(axis=0).tolist())) | counts


PRINTED = {"mrr": "MRR@3", "ndcg@3": "NDCG@3", "recall@10": "R@10", "recall@100": "R@100"}  # the paper's columns


def paper_protocol(scores: Scores, run: Run, unparsed: set[str]) -> dict[str, float | int]:
    """The paper's four columns, under its names, as its scripts compute them (rule 7), and the queries they average.

    scores: of `score_run`.  unparsed: queries whose response did not parse, which those scripts never write down.
    Values are rounded to three decimals as there.  (Its reader of responses is looser than the strict parser, so a
    response that only the strict one refuses is left out here and was not there.)
    """
    kept = [row for query, row in scores.items() if run.get(query) and query not in unparsed]
    means = {shown: round(sum(row[m] for row in kept) / len(kept), 3) if kept else 0.0 for m, shown in PRINTED.items()}
    return means | {"queries": len(kept)}


# ---------------------------------------------------------------------------------------------- intervals and tests


def matrix(scores: Scores) -> tuple[list[str], np.ndarray]:
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
    names, values = matrix(scores)
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
    names, values = matrix(scores)
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
