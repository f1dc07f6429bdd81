"""Reciprocal rank fusion of ranked lists, and the rank of a gold passage in a list."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Collection, Sequence

from search.passages import (
    FAILED,
    CutCounter,
    Hits,
    RetrieverError,
    check_golds,
    check_k,
    check_queries,
    without_nan,
)


def rank_in(hits: Hits, score: float, golds: Collection[str]) -> int:
    """1 + the passages of a list that score at least as high; golds of the query do not count."""
    return 1 + sum(other >= score for id_, other in hits if id_ not in golds)


def best_rank(hits: Hits, golds: Collection[str], cutoff: int) -> int | None:
    """Rank of the best gold in a list; None where none is found up to `cutoff`."""
    best = max((score for id_, score in hits if id_ in golds), default=None)
    rank = math.inf if best is None else rank_in(hits, best, golds)
    return rank if rank <= cutoff else None


def rrf(
    lists: Sequence[Sequence],
    k: int = 60,
    depth: int | None = None,
    weights: Sequence[float] | None = None,
) -> Hits:
    """Reciprocal rank fusion: the score of an id is the sum of weight / (k + its place in a list).

    lists: best first, entries (id, score) or bare ids; a repeated id counts by its best place
    depth: places used of each list, all by default
    → by (score descending, id ascending). Cormack, Clarke, Büttcher 2009.
    """
    weights = [1.0] * len(lists) if weights is None else list(weights)
    if len(weights) != len(lists):
        raise RetrieverError(
            f"{len(weights)} weights for {len(lists)} lists: give one weight a list"
        )
    terms: dict[str, list[float]] = {}
    for hits, weight in zip(lists, weights):
        ids = dict.fromkeys(h if isinstance(h, str) else h[0] for h in islice(hits, depth))
        for place, id_ in enumerate(ids, 1):
            terms.setdefault(id_, []).append(weight / (k + place))
    fused = [(id_, math.fsum(t)) for id_, t in terms.items()]  # in any order of the lists the same
    return sorted(fused, key=lambda hit: (-hit[1], hit[0]))


class HybridRetriever(CutCounter):
    """Reciprocal rank fusion of the first `depth` places of a dense retriever and of BM25.

    In `gold_ranks` a gold's place on either side is 1 + the other passages of the list that score
    at least as high, and fused ties count against it; golds of the query do not.
    """

    def __init__(
        self,
        dense: Any,
        bm25: Any,
        depth: int = 100,
        k: int = 60,
        weights: Sequence[float] = (1.0, 1.0),
    ):
        super().__init__()
        check_k(depth, "depth")
        if len(weights) != 2 or min(weights) < 0:
            raise RetrieverError(
                f"weights are {list(weights)}; give two numbers from 0 up, for dense and BM25"
            )
        if not 0 <= k < math.inf:
            raise RetrieverError(f"rrf_k is {k}; it must be 0 or more, usual is 60")
        sizes = len(dense.passage_ids), len(bm25.passage_ids)
        pairs = zip(dense.passage_ids, bm25.passage_ids)
        if sizes[0] != sizes[1] or any(a != b for a, b in pairs):
            raise RetrieverError(
                f"the dense index holds {sizes[0]:,} passages, BM25 {sizes[1]:,}, and their ids "
                "differ; both must index one corpus: build both with kind=hybrid"
            )
        self.dense, self.bm25 = dense, bm25
        self.depth, self.k, self.weights = depth, k, tuple(weights)
        self.passage_ids, self.cut_passages = dense.passage_ids, dense.cut_passages

    def _lists(self, queries: list[str]) -> list[tuple[Hits | None, Hits]]:
        """Both lists of every query; a query that either side cuts counts once."""
        (dense, long), (words, many) = (
            side.hits(queries, self.depth) for side in (self.dense, self.bm25)
        )
        self.count_cut(map(max, long, many))
        return list(zip(dense, words))

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The k best of the fused list of every query; it has at most 2 · depth entries."""
        check_k(k)
        lists = self._lists(queries := check_queries(queries))
        without_nan(queries, [hits for hits, _ in lists])
        return [rrf(both, self.k, weights=self.weights)[:k] for both in lists]

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> list[int | None]:
        """Rank of the best gold of every query; None beyond `cutoff`, FAILED on NaN."""
        queries, rows = check_golds(self.passage_ids, queries, gold_ids, cutoff)
        ranks = []
        for (dense, words), numbers in zip(self._lists(queries), rows):
            golds, best = {self.passage_ids[row] for row in numbers}, 0.0
            if dense is None:
                ranks.append(FAILED)
                continue
            for gold in golds:
                terms = []
                for hits, weight in zip((dense, words), self.weights):
                    if (own := dict(hits).get(gold)) is not None:
                        terms.append(weight / (self.k + rank_in(hits, own, golds)))
                best = max(best, math.fsum(terms))
            rank = rank_in(rrf((dense, words), self.k, weights=self.weights), best, golds)
            ranks.append(rank if best > 0 and rank <= cutoff else None)
        return ranks
