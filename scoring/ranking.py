"""TREC runs and qrels: MRR, NDCG and recall by pytrec_eval, bootstrap intervals, paired tests.

As in trec_eval, equal scores are ordered by descending passage id. pytrec_eval, which has single
precision, gets the ranking by double precision. See docs/metrics.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytrec_eval

from data import DataError, read_lines
from reward import all_gold
from runs import atomic_write

Run = dict[str, list[tuple[str, float]]]  # query id → (passage id, score)
Qrels = dict[str, dict[str, int]]  # query id → passage id → gain
Scores = dict[str, dict[str, float]]  # query id → metric → value, where it has one

METRICS = ("mrr", "mrr@3", "ndcg@3", "recall@5", "recall@10", "recall@20", "recall@100")
DEPTH = 100  # results scored per query
# the paper's columns
PRINTED = {"mrr": "MRR@3", "ndcg@3": "NDCG@3", "recall@10": "R@10", "recall@100": "R@100"}

# -------------------------------------------------------------------------------------------- files


def _read(path: str, names: str, name: str, convert: Callable, rule: str) -> dict[str, dict]:
    """Read {query: {passage: convert(column `name`)}}; DataError if `convert` returns None."""
    table: dict[str, dict[str, float]] = {}
    columns = names.split()
    for number, line in read_lines(path):
        cells = re.split(r"[ \t]+", line.strip(" \t\r"))
        if cells == [""]:
            continue
        location = f"{path}:{number}"
        if "\0" in line:  # pytrec_eval cuts ids here, and may crash if two become equal
            raise DataError(f"{location}: a NUL character in {line[:60]!r}; the file is damaged")
        if len(cells) != len(columns):
            raise DataError(
                f"{location}: {len(cells)} columns; there must be {len(columns)}: {names}"
            )
        query, passage, text = cells[0], cells[2], cells[columns.index(name)]
        if passage in table.setdefault(query, {}):
            raise DataError(
                f"{location}: passage {passage!r} stands a second time for query {query!r}"
            )
        table[query][passage] = convert(text)
        if table[query][passage] is None:
            raise DataError(f"{location}: {name} {text!r}; it must be {rule}")
    if not table:
        raise DataError(f"{path}: the file is empty; it needs lines of {names}")
    return table


def _gain(text: str) -> int | None:
    # pytrec_eval allocates memory up to the largest gain
    return int(text) if re.fullmatch("[+-]?[0-9]{1,4}", text) else None


def _score(text: str) -> float | None:
    try:
        return None if math.isnan(float(text)) else float(text)
    except ValueError:
        return None


def read_qrels(path: str) -> Qrels:
    """Read four-column TREC qrels; ids stay strings ("007" is not "7")."""
    return _read(
        path, "query-id 0 passage-id gain", "gain", _gain, "an integer of at most 4 digits"
    )


def read_golds(paths: list[str], passage_ids=None) -> dict[str, list[str]]:
    """Query id → gold passages (gain above 0), from qrels files. DataError: a file without any, or
    with one that is not in the index."""
    golds: dict[str, list[str]] = {}
    for path in paths:
        own = {q: [p for p, gain in js.items() if gain > 0] for q, js in read_qrels(path).items()}
        wanted = {passage for passages in own.values() for passage in passages}
        if not wanted:
            raise DataError(f"{path}: no passage has a gain above 0; give qrels with gold passages")
        if passage_ids is not None and (foreign := wanted - (wanted & passage_ids)):
            raise DataError(f"{path}: passage {min(foreign)!r} is not in the index; give its qrels")
        golds |= {q: passages for q, passages in own.items() if passages}
    return golds


def read_run(path: str) -> Run:
    """Read a six-column TREC run, sorted by score; the rank column is ignored."""
    run = _read(path, "query-id Q0 passage-id rank score tag", "score", _score, "a number")
    return {query: rank_results(query, list(results.items())) for query, results in run.items()}


def rank_results(query: str, results: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort results, best first; DataError for a NaN score or a repeated passage."""
    ranked = sorted(((float(score), passage) for passage, score in results), reverse=True)
    if any(math.isnan(score) for score, _ in ranked):
        raise DataError(f"query {query!r} has a score NaN, a failed search: search it again")
    counts = Counter(passage for _, passage in ranked)
    if len(counts) < len(ranked):
        passage, times = counts.most_common(1)[0]
        raise DataError(f"passage {passage!r} occurs {times} times for query {query!r}")
    return [(passage, score) for score, passage in ranked]


def write_run(path: str, run: Run, tag: str = "nanosearch-r1") -> None:
    """Write a TREC run atomically, with all digits; DataError for blanks in an id."""
    with atomic_write(path) as f:
        for query, results in run.items():
            for rank, (passage, score) in enumerate(rank_results(query, results), 1):
                columns = (query, "Q0", passage, str(rank), repr(score), tag)
                if odd := [column for column in columns if column.split() != [column]]:
                    raise DataError(f"{path}: {odd[0]!r} is no TREC column; remove its blanks")
                f.write(" ".join(columns) + "\n")


def best_passages(run: Run) -> Run:
    """Rank documents by their best passage DOCUMENT-N (TREC CAsT 2021's rule)."""
    documents: Run = {}
    for query, results in run.items():
        best: dict[str, None] = {}
        for passage, _ in rank_results(query, results):
            document, dash, number = passage.rpartition("-")
            if not dash or not number.isdigit():
                raise DataError(
                    f"passage {passage!r} of query {query!r} is not DOCUMENT-N, as documents=true "
                    "needs it (prepare.py cast21)"
                )
            best[document] = None
        # scores by place keep the order of ties
        documents[query] = [(document, float(len(best) - i)) for i, document in enumerate(best)]
    return documents


# ------------------------------------------------------------------------------------------ metrics


def score_run(run: Run, qrels: Qrels, relevant_from: int = 1) -> Scores:
    """Return {query: {metric: value}} for METRICS, in the order of the qrels.

    relevant_from: lowest relevant gain in MRR and recall; NDCG uses all gains above 0.
    """
    relevant: Qrels = {}
    ranking: dict[str, dict[str, float]] = {}
    for query, gains in qrels.items():
        if any(gain != int(gain) for gain in gains.values()):
            raise DataError(f"query {query!r} has a gain that is not a whole number: {gains}")
        # in pytrec_eval, empty judgments spoil later queries (its issue 49)
        if run.get(query) and gains:
            relevant[query] = {passage: int(gain) for passage, gain in gains.items()}
            ranked = rank_results(query, run[query])[:DEPTH]
            ranking[query] = {passage: float(DEPTH - i) for i, (passage, _) in enumerate(ranked)}
    evaluator = pytrec_eval.RelevanceEvaluator(
        relevant, {"recip_rank", "ndcg_cut.3", "recall.5,10,20,100"}, relevance_level=relevant_from
    )
    scores = {query: dict.fromkeys(METRICS, 0.0) for query in qrels}
    for query, row in evaluator.evaluate(ranking).items():
        first = row["recip_rank"]
        recalls = (row[f"recall_{k}"] for k in (5, 10, 20, 100))
        values = (first, first if first >= 1 / 3 else 0.0, row["ndcg_cut_3"], *recalls)
        scores[query] = dict(zip(METRICS, values))
    return scores


def evaluate_run(run: Run, qrels: Qrels, relevant_from: int = 1) -> dict[str, float]:
    """Average METRICS over the qrels' queries; count `queries` and those `missing`."""
    counts = {"queries": len(qrels), "missing": sum(not run.get(query) for query in qrels)}
    return means(score_run(run, qrels, relevant_from)) | counts


def add_all_gold(scores: Scores, run: Run, qrels: Qrels) -> None:
    """Add all_gold@10 to queries with gold passages: 1.0 if all are in the top ten."""
    for query, gains in qrels.items():
        if golds := [passage for passage, gain in gains.items() if gain > 0]:
            first = [passage for passage, _ in rank_results(query, run.get(query, []))[:10]]
            scores[query]["all_gold@10"] = all_gold(first, golds)


def paper_protocol(scores: Scores, run: Run, unparsed: set[str]) -> dict[str, float | int]:
    """Return the paper's four columns and the number of queries averaged; as in its scripts, those
    without results or in `unparsed` are left out."""
    kept = [row for query, row in scores.items() if run.get(query) and query not in unparsed]
    columns = {
        shown: round(sum(row[m] for row in kept) / len(kept), 3) if kept else 0.0
        for m, shown in PRINTED.items()
    }
    return columns | {"queries": len(kept)}


# ------------------------------------------------------------------------------ intervals and tests


def _parts(scores: Scores) -> Iterator[tuple[list[str], Sequence[str], np.ndarray]]:
    """Yield (metrics (m), their queries (Q), values (Q, m)), metrics of the same queries together;
    DataError if there are none."""
    queries: dict[str, list[str]] = {}
    for query, row in scores.items():
        for name in row:
            queries.setdefault(name, []).append(query)
    if not queries:
        raise DataError("there are no queries to average over; the qrels must hold at least one")
    parts: dict[tuple[str, ...], list[str]] = {}
    for name, own in queries.items():
        parts.setdefault(tuple(own), []).append(name)
    for own, names in parts.items():
        yield names, own, np.array([[scores[query][name] for name in names] for query in own])


def means(scores: Scores) -> dict[str, float]:
    """Average each metric over the queries that have it."""
    found: dict[str, float] = {}
    for names, _, values in _parts(scores):
        found |= zip(names, values.mean(axis=0).tolist())
    return found


def _units(
    queries: Sequence[str], values: np.ndarray, clusters: dict[str, str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sums (C, m) of `values` (Q, m) and sizes (C) per cluster; others are their own."""
    clusters, number = clusters or {}, {}
    labels = [(query in clusters, clusters.get(query, query)) for query in queries]
    index = np.array([number.setdefault(label, len(number)) for label in labels])
    sums = np.zeros((len(number), values.shape[1]))
    np.add.at(sums, index, values)
    return sums, np.bincount(index).astype(float)


def _pieces(samples: int, count: int) -> list[int]:
    """Split `samples`, to limit memory to a few megabytes."""
    size = max(1, 500_000 // count)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _bootstrap(
    sums: np.ndarray, sizes: np.ndarray, samples: int, seed: int
) -> list[list[float] | None]:
    """[low, high] of the resampled mean for each column of `sums` (C, m)."""
    count = len(sums)
    if count < 2:
        return [None] * sums.shape[1]
    generator = np.random.default_rng(seed)
    drawn_means = []
    for drawn in _pieces(samples, count):
        picks = generator.integers(0, count, (drawn, count)) + np.arange(drawn)[:, None] * count
        times = np.bincount(picks.ravel(), minlength=drawn * count).astype(float)
        times = times.reshape(drawn, count)  # draws per unit
        drawn_means.append(times @ sums / (times @ sizes)[:, None])  # (drawn, m)
    return np.quantile(np.concatenate(drawn_means), [0.025, 0.975], axis=0).T.tolist()


def bootstrap_interval(
    scores: Scores, clusters: dict[str, str] | None = None, samples: int = 10_000, seed: int = 0
) -> dict[str, list[float] | None]:
    """Return each metric's 95 % percentile bootstrap interval [low, high] of the mean.

    clusters: query id → conversation id, to draw whole conversations. None for a single unit.
    """
    found: dict[str, list[float] | None] = {}
    for names, queries, values in _parts(scores):
        found |= zip(names, _bootstrap(*_units(queries, values, clusters), samples, seed))
    return found


def paired_test(
    scores: Scores,
    baseline: Scores,
    clusters: dict[str, str] | None = None,
    samples: int = 10_000,
    seed: int = 0,
) -> dict[str, dict]:
    """Return {"difference", "ci", "p"} of each metric: mean of `scores` minus that of `baseline`,
    over the queries that have it in both.

    Two-sided p from random sign flips of queries or clusters, uncorrected for several metrics:
    (1 + flips at least as far from 0) / (1 + samples). DataError: the queries differ.
    """
    if odd := scores.keys() ^ baseline.keys():
        raise DataError(f"query {min(odd)!r} is scored for one system only; use the same qrels")
    differences = {
        query: {
            name: v - baseline[query][name] for name, v in row.items() if name in baseline[query]
        }
        for query, row in scores.items()
    }
    tests: dict[str, dict] = {}
    for names, queries, values in _parts(differences):
        sums, sizes = _units(queries, values, clusters)
        observed = sums.sum(axis=0)  # (m)
        generator = np.random.default_rng(seed)
        as_far = np.zeros(len(names))
        for drawn in _pieces(samples, len(sums)):
            signs = generator.integers(0, 2, (drawn, len(sums)), dtype=np.int8) * 2.0 - 1.0
            # tolerates rounding of sums
            as_far += (np.abs(signs @ sums) >= np.abs(observed) - 1e-9).sum(axis=0)
        found = zip(names, observed / sizes.sum(), _bootstrap(sums, sizes, samples, seed), as_far)
        for name, d, ci, flips in found:
            p = (1 + float(flips)) / (1 + samples)
            tests[name] = {"difference": float(d), "ci": ci, "p": p}
    return tests
