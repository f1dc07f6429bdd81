"""Reciprocal rank fusion of ranked lists, and the rank of a gold passage in a list."""

from __future__ import annotations

import math
from typing import Collection, Iterator, Sequence

from search.passages import FAILED, Hits, Ranks, Retriever, RetrieverError, check_k


def rank_in(hits: Hits, score: float, golds: Collection[str]) -> int:
    """Return 1 + the number of non-gold passages of a list that score at least `score`."""
    return 1 + sum(other >= score for id_, other in hits if id_ not in golds)


def best_rank(hits: Hits | None, golds: Collection[str], cutoff: int) -> int | float | None:
    """Return the rank of the best gold in a list; None if absent or beyond `cutoff`."""
    if hits is None:
        return FAILED
    best = max((score for id_, score in hits if id_ in golds), default=None)
    rank = math.inf if best is None else rank_in(hits, best, golds)
    return rank if rank <= cutoff else None


def rrf(lists: Sequence[Hits], k: float = 60, weights: Sequence[float] = (1.0, 1.0)) -> Hits:
    """Sum weight / (k + place) over lists: reciprocal rank fusion (Cormack et al. 2009).

    lists: (id, score), best first → the same, ties by ascending id
    """
    terms: dict[str, list[float]] = {}
    for hits, weight in zip(lists, weights, strict=True):
        for place, (id_, _) in enumerate(hits, 1):
            terms.setdefault(id_, []).append(weight / (k + place))
    fused = [(id_, math.fsum(t)) for id_, t in terms.items()]  # exact in any order
    return sorted(fused, key=lambda hit: (-hit[1], hit[0]))


class HybridRetriever(Retriever):
    """Reciprocal rank fusion of the first `depth` places of a dense retriever and of BM25.

    In `gold_ranks` ties count against a gold in both lists and after fusion; other golds don't.
    """

    def __init__(
        self,
        dense: Retriever,
        bm25: Retriever,
        depth: int = 100,
        k: int = 60,
        weights: Sequence[float] = (1.0, 1.0),
    ):
        super().__init__()
        check_k(depth, "depth")
        usable = all(0 <= number < math.inf for number in (*weights, k))
        if len(weights) != 2 or not any(weights) or not usable:
            raise RetrieverError(
                f"weights are {list(weights)} and rrf_k is {k}; give two weights from 0 up, not "
                "both 0, for dense and BM25, and an rrf_k from 0 up (usual is 60)"
            )
        if not dense.passage_ids.same_as(bm25.passage_ids):
            raise RetrieverError(
                f"the dense index holds {len(dense.passage_ids):,} passages, BM25 "
                f"{len(bm25.passage_ids):,}, and their ids differ; both must index one corpus: "
                "build both with kind=hybrid"
            )
        self.dense, self.bm25 = dense, bm25
        self.depth, self.k, self.weights = depth, k, tuple(weights)
        self.passage_ids, self.cut_passages = dense.passage_ids, dense.cut_passages

    def prepare(self, queries: list[str]) -> tuple[tuple, list[bool]]:
        prepared, cut = zip(*(side.prepare(queries) for side in (self.dense, self.bm25)))
        return prepared, list(map(max, *cut))

    def _lists(self, prepared: tuple) -> Iterator[tuple[Hits | None, Hits]]:
        dense, words = prepared
        return zip(self.dense.hits(dense, self.depth), self.bm25.hits(words, self.depth))

    def _fused(self, lists: tuple[Hits, Hits]) -> Hits:
        return rrf(lists, self.k, self.weights)

    def hits(self, prepared: tuple, k: int) -> list[Hits | None]:
        lists = self._lists(prepared)
        return [None if both[0] is None else self._fused(both)[:k] for both in lists]

    def ranks(self, prepared: tuple, golds: list[list[int]], cutoff: int) -> Ranks:
        sets = [{self.passage_ids[row] for row in rows} for rows in golds]
        return [self._rank(both, ids, cutoff) for both, ids in zip(self._lists(prepared), sets)]

    def _rank(
        self, lists: tuple[Hits | None, Hits], golds: set[str], cutoff: int
    ) -> int | float | None:
        if lists[0] is None:
            return FAILED
        best = 0.0
        for gold in golds:
            terms = []
            for hits, weight in zip(lists, self.weights):
                if (own := dict(hits).get(gold)) is not None:
                    terms.append(weight / (self.k + rank_in(hits, own, golds)))
            best = max(best, math.fsum(terms))
        rank = rank_in(self._fused(lists), best, golds)
        return rank if best > 0 and rank <= cutoff else None
