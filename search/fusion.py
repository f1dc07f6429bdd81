"""Reciprocal rank fusion of ranked lists, and the rank of a gold passage in a list."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Collection, Sequence

from search.passages import FAILED, Hits, RetrieverError, check_k, check_queries, gold_positions


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

    lists: best first, entries (id, score) or bare ids; their scores do not matter, and a repeated
    id counts once, by its best place. depth: places used of each list (all by default). Result by
    (score descending, id ascending). Cormack, Clarke, Büttcher 2009. The sum is rounded once, so
    the order of the lists does not matter.
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
    fused = [(id_, math.fsum(t)) for id_, t in terms.items()]
    return sorted(fused, key=lambda hit: (-hit[1], hit[0]))


class HybridRetriever:
    """Reciprocal rank fusion of a dense retriever and BM25 over one corpus.

    A list is `rrf` of the first `depth` of either side (BM25 has no hits with score 0). In
    `gold_ranks` a gold's place on either side is 1 + the other passages of the list that score at
    least as high (other golds left out), the others keep their places, and fused ties count against
    the gold. A gold in neither list has no rank.
    """

    def __init__(
        self,
        dense: Any,
        bm25: Any,
        depth: int = 100,
        k: int = 60,
        weights: Sequence[float] = (1.0, 1.0),
    ):
        check_k(depth, "depth")
        if len(weights) != 2 or min(weights) < 0:
            raise RetrieverError(
                f"weights are {list(weights)}; give two numbers from 0 up, for dense and BM25"
            )
        if not 0 <= k < math.inf:
            raise RetrieverError(
                f"rrf_k is {k}; it must be 0 or more, and is added to every place. Usual is 60."
            )
        sizes = len(dense.passage_ids), len(bm25.passage_ids)
        pairs = zip(dense.passage_ids, bm25.passage_ids)
        if sizes[0] != sizes[1] or any(a != b for a, b in pairs):
            raise RetrieverError(
                f"the dense index holds {sizes[0]:,} passages, BM25 {sizes[1]:,}, and their ids "
                "differ; both must index one corpus. Build both with kind=hybrid."
            )
        self.dense, self.bm25 = dense, bm25
        self.depth, self.k, self.weights = depth, k, tuple(weights)
        self.passage_ids = dense.passage_ids

    @property
    def cut_queries(self) -> int:
        """Queries that either side has cut so far; one that both cut counts twice."""
        return self.dense.cut_queries + self.bm25.cut_queries

    @property
    def cut_passages(self) -> int:
        """Passages that the encoder of the dense side cut."""
        return self.dense.cut_passages

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The k best of the fused list of every query; it has at most 2 · depth entries."""
        check_k(k)
        queries = check_queries(queries)
        both = zip(self.dense.search(queries, self.depth), self.bm25.search(queries, self.depth))
        return [rrf(lists, self.k, weights=self.weights)[:k] for lists in both]

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> list[int | None]:
        """Rank of the best gold of every query; None beyond `cutoff`, FAILED on NaN."""
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        positions = gold_positions(self.passage_ids, queries, gold_ids)
        golds = [{self.passage_ids[row] for row in rows} for rows in positions]
        dense = self.dense.hits(queries, self.depth)
        bm25 = self.bm25.search(queries, self.depth)
        return [
            FAILED if hits is None else self._rank((hits, words), gold, cutoff)
            for hits, words, gold in zip(dense, bm25, golds)
        ]

    def _rank(self, lists: Sequence[Hits], golds: set[str], cutoff: int) -> int | None:
        best = 0.0
        for gold in golds:
            terms = []
            for hits, weight in zip(lists, self.weights):
                if (own := dict(hits).get(gold)) is not None:
                    terms.append(weight / (self.k + rank_in(hits, own, golds)))
            best = max(best, math.fsum(terms))
        rank = rank_in(rrf(lists, self.k, weights=self.weights), best, golds)
        return rank if best > 0 and rank <= cutoff else None
