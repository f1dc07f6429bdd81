"""Reciprocal rank fusion of two retrievers' lists."""

from __future__ import annotations

import math
from itertools import islice
from typing import Sequence

from search.passages import check_k, check_queries, FAILED, gold_positions, Hits, RetrieverError


def rrf(lists: Sequence[Sequence], k: int = 60, depth: int | None = None,
        weights: Sequence[float] | None = None) -> Hits:
    """Reciprocal rank fusion of ranked lists: the score of an id is the sum of weight / (k + its place in a list).

    lists: best first, entries (id, score) or bare ids; their scores do not matter, a repeated id counts once, by its
    best place.  depth: places used of each list (all by default).  → by (score descending, id ascending).
    Cormack, Clarke, Büttcher 2009 (k = 60).  The sum is rounded once, so the order of the lists does not matter.
    """
    weights = [1.0] * len(lists) if weights is None else list(weights)
    if len(weights) != len(lists):
        raise RetrieverError(f"{len(weights)} weights for {len(lists)} lists: give one weight a list")
    terms: dict[str, list[float]] = {}
    for hits, weight in zip(lists, weights):
        places = dict.fromkeys(h if isinstance(h, str) else h[0] for h in islice(hits, depth))
        for number, id_ in enumerate(places, 1):
            terms.setdefault(id_, []).append(weight / (k + number))
    return sorted(((id_, math.fsum(t)) for id_, t in terms.items()), key=lambda hit: (-hit[1], hit[0]))


class HybridRetriever:
    """Reciprocal rank fusion of a dense retriever and BM25 over one corpus.

    A list is `rrf` of the first `depth` of either side (BM25 hits with score 0 are none), ties by id.  In `gold_ranks`
    a gold's place on either side is 1 + the other passages of the list that score at least as high (other golds left
    out), the others keep their places, and fused ties count against the gold.  A gold in neither list has no rank.
    """

    def __init__(self, dense, bm25, depth: int = 100, k: int = 60,
                 weights: Sequence[float] = (1.0, 1.0)):
        if depth < 50:
            raise RetrieverError(f"depth is {depth}; shorter lists lose what one side finds. Give 50 or more.")
        if len(weights) != 2 or min(weights) < 0:
            raise RetrieverError(f"weights are {list(weights)}; give two numbers from 0 up, for dense and BM25")
        if not 0 <= k < math.inf:
            raise RetrieverError(f"rrf_k is {k}; it must be 0 or more, and is added to every place. Usual is 60.")
        if (len(dense.passage_ids) != len(bm25.passage_ids)
                or any(a != b for a, b in zip(dense.passage_ids, bm25.passage_ids))):
            raise RetrieverError(f"the dense index holds {len(dense.passage_ids):,} passages, BM25 "
                                 f"{len(bm25.passage_ids):,}, and their ids differ; both must index one corpus. Build "
                                 "both with kind=hybrid.")
        self.dense, self.bm25, self.depth, self.k, self.weights = dense, bm25, depth, k, tuple(weights)
        self.passage_ids = dense.passage_ids

    @property
    def cut_queries(self) -> int:
        """Queries that were cut so far, those cut on both sides twice."""
        return self.dense.cut_queries + self.bm25.cut_queries

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The k best of the fused list of every query; it has at most 2 · depth entries."""
        check_k(k)
        queries = check_queries(queries)
        both = zip(self.dense.search(queries, self.depth), self.bm25.search(queries, self.depth))
        return [rrf(lists, self.k, weights=self.weights)[:k] for lists in both]

    def gold_ranks(self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100) -> list:
        """Rank of the best gold of every query by the rule of the class; None beyond `cutoff`, FAILED on NaN."""
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        golds = [{self.passage_ids[i] for i in rows} for rows in gold_positions(self.passage_ids, queries, gold_ids)]
        both = zip(self.dense.hits(queries, self.depth), self.bm25.search(queries, self.depth), golds)
        return [FAILED if dense is None else self._rank((dense, sparse), gold, cutoff) for dense, sparse, gold in both]

    def _rank(self, lists: Sequence[Hits], golds: set[str], cutoff: int) -> int | None:
        others = [score for id_, score in rrf(lists, self.k, weights=self.weights) if id_ not in golds]
        best = 0.0
        for gold in golds:
            terms = []
            for hits, weight in zip(lists, self.weights):
                if (own := dict(hits).get(gold)) is not None:
                    place = 1 + sum(score >= own for id_, score in hits if id_ not in golds)
                    terms.append(weight / (self.k + place))
            best = max(best, math.fsum(terms))
        rank = 1 + sum(score >= best for score in others)
        return rank if best > 0 and rank <= cutoff else None
