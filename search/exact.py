"""Exact inner products over the shards of an index: the best k passages of a query, and the rank
of its gold.

Shards are fp16, on a CPU or on GPUs, in memory or memory-mapped. On a CPU a block of them becomes
float32 and so does the product; on CUDA queries become fp16 and products are summed in float32.
Memory holds one block however large the index is, and a passage is read once for all queries.

Lists are by (score descending, id ascending); a rank is 1 + the number of other passages whose
score is at least the gold's, and needs no list: product, comparison, count.

Shapes: Q queries, M passages, m passages of a block, D embedding size, K list length, P pairs of a
query and one of its golds.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from search.passages import FAILED, RetrieverError

CPU_BLOCK, GPU_BLOCK = (
    1 << 20,
    1 << 28,
)  # numbers of a block of passages, in a CPU's cache; scores of one on a GPU


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    """Rows of zeros below, up to a multiple. At a ragged edge BLAS kernels use other instructions,
    which round differently; on whole tiles equal vectors get bit-equal scores wherever they
    stand.
    """
    return F.pad(matrix, (0, 0, 0, -len(matrix) % multiple))


def block_rows(queries: Tensor) -> int:
    """Passages of one block for (Q, D) queries."""
    if queries.is_cuda:
        return max(GPU_BLOCK // max(len(queries), 1), 4096) // 64 * 64
    return max(CPU_BLOCK // queries.shape[1], 64) // 64 * 64


def _products(queries: Tensor, shards: Sequence) -> Iterator[tuple[int, Tensor]]:
    """(number of the first passage, (Q, m) float32 scores) of every block of the shards, in order.

    A block's scores are overwritten by the next block's.
    """
    n, rows, first = len(queries), block_rows(queries), 0
    if queries.is_cuda:
        queries = _padded(queries.half(), 8)
        for shard in shards:
            for start in range(0, len(shard), rows):
                part = torch.as_tensor(shard[start : start + rows]).to(
                    queries.device, torch.float16
                )
                scores = torch.mm(queries, _padded(part, 64).T, out_dtype=torch.float32)
                yield first + start, scores[:n, : len(part)]
            first += len(shard)
        return
    if n > 1:  # one alone goes through as a matrix times a vector, at half the cost
        queries = _padded(queries, 8)
    block, scores = torch.zeros(rows, queries.shape[1]), torch.empty(len(queries), rows)
    for shard in shards:
        for start in range(0, len(shard), rows):
            part = torch.as_tensor(shard[start : start + rows])
            block[: len(part)].copy_(part)
            torch.mm(
                queries, block.T, out=scores
            )  # what the last block left below a shorter one is not looked at
            yield first + start, scores[:n, : len(part)]
        first += len(shard)


def _take(shards: Sequence, rows: np.ndarray) -> Tensor:
    """(len(rows), D) float32: the vectors of the passages with those numbers."""
    ends = np.cumsum([len(s) for s in shards])
    out = torch.empty(len(rows), shards[0].shape[1])
    which = np.searchsorted(ends, rows, side="right")
    for s in np.unique(which):
        inside = np.flatnonzero(which == s)
        out[inside] = (
            torch.as_tensor(shards[s][rows[inside] - (ends[s] - len(shards[s]))]).float().cpu()
        )
    return out


def place(shards: Sequence[np.ndarray], device: torch.device) -> Sequence:
    """One shard in the memory of a GPU where all fill at most half of what is free; else the shards
    where they are.

    A passage that is not finite keeps them where they are too: only there is it looked for at every
    call.
    """
    if (
        device.type != "cuda"
        or not shards
        or sum(s.nbytes for s in shards) > torch.cuda.mem_get_info(device)[0] // 2
    ):
        return shards
    whole, first = (
        torch.empty(sum(map(len, shards)), shards[0].shape[1], dtype=torch.float16, device=device),
        0,
    )
    for shard in shards:
        part = whole[first : first + len(shard)]
        part.copy_(torch.as_tensor(shard))
        if not torch.isfinite(part).all():
            return shards
        first += len(shard)
    return [whole]


def _check_size(queries: Tensor, shards: Sequence) -> None:
    if shards and queries.shape[1] != shards[0].shape[1]:
        raise RetrieverError(
            f"query vectors have {queries.shape[1]} dimensions, the index {shards[0].shape[1]}: "
            "both sides need one encoder. Take the encoder that built the index, or build it anew."
        )


# ------------------------------------------------------------------------------------------- search


def _top(scores: Tensor, order: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of (Q, m) scores by (score descending, id ascending), themselves unordered.

    order: (m,) place of each id among all
    """
    value, index = scores.topk(min(k, scores.shape[1]), dim=1)
    last = value[:, -1:]
    spilt = (scores == last).sum(1) > (value == last).sum(
        1
    )  # ties at the edge: topk took any of them
    for q in spilt.nonzero()[:, 0].tolist():
        above = index[q][value[q] > last[q]]
        tied = (scores[q] == last[q]).nonzero()[:, 0]
        index[q] = torch.cat([above, tied[order[tied].argsort()][: index.shape[1] - len(above)]])
        value[q] = scores[q, index[q]]
    return value, index


def merge_best(scores: Tensor, rows: Tensor, order: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of every row of (Q, m) scores and passage numbers, best first, ties by id."""
    by_id = order[rows].argsort(dim=1)
    scores, rows = scores.gather(1, by_id), rows.gather(1, by_id)
    scores, by_score = scores.sort(dim=1, descending=True, stable=True)
    return scores[:, :k], rows.gather(1, by_score)[:, :k]


class _Best:
    """The best k passages of every query so far, on a CPU.

    A score below the k-th best so far can't come in, so of a block only a few are looked at: they
    wait in a list, and are sorted in when there are enough of them.
    """

    def __init__(self, n: int, order: Tensor, k: int):
        self.order, self.k = order, k
        self.scores, self.rows = torch.empty(n, 0), torch.empty(n, 0, dtype=torch.long)
        self.least = torch.full((n, 1), -math.inf)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # query, score, row
        self.count = 0

    def add(self, first: int, scores: Tensor) -> None:
        """(Q, m) scores of the passages from `first` on."""
        if self.scores.shape[1] < self.k:
            value, index = _top(scores, self.order[first : first + scores.shape[1]], self.k)
            self._keep(torch.cat([self.scores, value], 1), torch.cat([self.rows, index + first], 1))
            return
        query, column = (scores >= self.least).nonzero(as_tuple=True)
        if len(query):
            self.waiting.append((query, scores[query, column], column + first))
            self.count += len(query)
            if self.count > 4 * self.scores.numel():
                self.sort_in()

    def _keep(self, scores: Tensor, rows: Tensor) -> None:
        self.scores, self.rows = merge_best(scores, rows, self.order, self.k)
        if self.scores.shape[1] == self.k:
            self.least = self.scores[:, -1:].clone()

    def sort_in(self) -> None:
        """Sort the waiting ones in, as a table filled up with scores of minus infinity."""
        if not self.count:
            return
        query, score, row = (torch.cat(column) for column in zip(*self.waiting))
        self.waiting, self.count = [], 0
        by_query = query.argsort(stable=True)
        query, score, row = query[by_query], score[by_query], row[by_query]
        counts = query.bincount(minlength=len(self.scores))
        place_ = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
        table = torch.full((len(counts), int(counts.max())), -math.inf)
        rows = torch.zeros(table.shape, dtype=torch.long)
        table[query, place_], rows[query, place_] = score, row
        self._keep(torch.cat([self.scores, table], 1), torch.cat([self.rows, rows], 1))


@torch.no_grad()
def exact_search(
    queries: Tensor, shards: Sequence, k: int, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Best k of all passages by inner product, block by block: memory does not grow with M.

    queries: (Q, D) float32; shards: arrays (M_i, D), fp16 or float32; order: (M,) integers, each
    id's place among all
    → (Q, K) scores and passage numbers with K = min(k, M), by (score descending, id ascending);
    (Q,) bool: a NaN was seen
    """
    _check_size(queries, shards)
    n, k = len(queries), min(k, sum(map(len, shards)))
    failed = torch.zeros(n, dtype=torch.bool, device=queries.device)
    if not queries.is_cuda:
        best = _Best(n, order, k)
        for first, scores in _products(queries, shards):
            failed |= scores.amax(1).isnan()
            best.add(first, scores)
        best.sort_in()
        return best.scores, best.rows, failed
    best, rows = queries.new_empty(n, 0), torch.empty(n, 0, dtype=torch.long, device=queries.device)
    for first, scores in _products(queries, shards):
        value, index = _top(scores, order[first : first + scores.shape[1]], k)
        failed |= value[:, 0].isnan()  # topk puts NaN first
        best, rows = merge_best(
            torch.cat([best, value], 1), torch.cat([rows, index + first], 1), order, k
        )
    return best, rows, failed


# --------------------------------------------------------------------------------------- gold ranks


def _kernel(queries: Tensor, shards: Sequence):
    """gold_ranks.py where it runs: a Hopper GPU with the whole index, Triton, D % 8 == 0."""
    if not (
        len(shards) == 1
        and isinstance(shards[0], Tensor)
        and shards[0].dtype == torch.float16
        and queries.is_cuda
        and torch.cuda.get_device_capability(queries.device)[0] == 9
        and queries.shape[1] % 8 == 0
        and importlib.util.find_spec("triton")
    ):
        return None
    from search import gold_ranks

    return gold_ranks


def _count_by_blocks(
    queries: Tensor, shards: Sequence, best: Tensor, pair_query: Tensor, pair_row: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(Q,) numbers of passages that score at least `best` (Q,); (Q,) bool: a NaN was seen; (P,)
    scores of the golds in this pass.
    """
    count = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    failed, seen = (
        torch.zeros_like(count, dtype=torch.bool),
        torch.empty(len(pair_row), device=queries.device),
    )
    for first, scores in _products(queries, shards):
        failed |= scores.amax(1).isnan()
        count += (scores >= best[:, None]).sum(1)
        here = (pair_row >= first) & (pair_row < first + scores.shape[1])
        seen[here] = scores[pair_query[here], pair_row[here] - first]
    return count, failed, seen


def _count_by_kernel(
    queries: Tensor, shards: Sequence, best: Tensor, pair_query: Tensor, pair_row: Tensor
) -> tuple[Tensor, Tensor, None]:
    """As `_count_by_blocks`; the golds' own scores came from the same code already."""
    count = torch.zeros(len(queries), dtype=torch.int32, device=queries.device)
    _kernel(queries, shards).add_counts(count, queries.half(), shards[0], best)
    return count.long(), ~torch.isfinite(queries.half()).all(1), None


def _own_scores(queries: Tensor, shards: Sequence, pair_query: Tensor, pair_row: Tensor) -> Tensor:
    """(P,) scores of pairs of a query and a passage: the kernel's, or of products with them."""
    if len(pair_row) and (kernel := _kernel(queries, shards)):
        return kernel.own_scores(queries.half()[pair_query], shards[0][pair_row])
    out, step = queries.new_empty(len(pair_row)), block_rows(queries)
    for start in range(0, len(pair_row), step):
        query, vectors = (
            pair_query[start : start + step],
            _take(shards, pair_row[start : start + step].cpu().numpy()),
        )
        for offset, scores in _products(queries, [vectors]):
            column = torch.arange(scores.shape[1], device=queries.device)
            out[start + offset + column] = scores[query[offset + column], column]
    return out


def _reduced(values: Tensor, how: dist.ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    """`values` of all ranks of a group, joined on the CPU, apart from what a trainer sends."""
    joined = values.cpu()
    dist.all_reduce(joined, how, group=group)
    return joined.to(values.device)


@torch.no_grad()
def exact_gold_ranks(
    queries: Tensor,
    shards: Sequence,
    golds: Sequence[Sequence[int]],
    cutoff: int = 100,
    first: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> list:
    """Rank of the best gold of every query among all M passages, without a top-k: product,
    comparison, count.

    queries: (Q, D) float32; shards: as in `exact_search`, on a GPU as `place` gave them
    golds: Q non-empty lists of passage numbers
    first: given, this is a collective of `group`: `shards` are the passages from that number on,
    other ranks hold the
        others, queries and golds are the same everywhere; one sum of an integer a query joins what
        the ranks counted
    → Q entries: 1-based rank, None beyond `cutoff`, FAILED where a score is NaN
    """
    _check_size(queries, shards)
    n, device, across = len(queries), queries.device, first is not None
    pairs = [(q, row) for q, gold in enumerate(golds) for row in dict.fromkeys(gold)]
    pairs = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2) - torch.tensor([0, first or 0])
    here = (pairs[:, 1] >= 0) & (
        pairs[:, 1] < sum(map(len, shards))
    )  # the golds among this rank's passages: P of them
    pair_query, pair_row = pairs[here].to(device).T
    all_query = pairs[:, 0].to(device)
    own = _own_scores(queries, shards, pair_query, pair_row)  # (P,)
    count_all = _count_by_kernel if _kernel(queries, shards) else _count_by_blocks
    for _ in range(2):
        gold_score = own
        if across:
            gold_score = torch.full((len(pairs),), -math.inf)
            gold_score[here] = own.cpu()
            gold_score = _reduced(gold_score, dist.ReduceOp.MAX, group).to(device)
        best = torch.full((n,), -math.inf, device=device)
        best = best.scatter_reduce(0, all_query, gold_score, "amax")  # (Q,)
        count, failed, seen = count_all(queries, shards, best, pair_query, pair_row)
        moved = torch.zeros_like(failed)
        if seen is not None:  # by blocks: the golds' own product may have rounded otherwise
            moved[pair_query[seen != own]] = True
            moved, own = moved & ~failed, seen
        count.index_add_(0, pair_query, -(own >= best[pair_query]).long())  # no gold counts
        found = torch.stack([count, failed.long(), moved.long()])  # (3, Q)
        count, failed, moved = _reduced(found, dist.ReduceOp.SUM, group) if across else found
        if not ((moved > 0) & (failed == 0)).any():
            break  # else once more, with the scores that this pass gave the golds
    else:
        raise RuntimeError(
            "the same product gave two results: this machine's arithmetic can't rank"
        )
    ranks = [
        FAILED if bad else others + 1 if others < cutoff else None
        for others, bad in zip(count.tolist(), failed.tolist())
    ]
    if any(others < 0 and not bad for others, bad in zip(count.tolist(), failed.tolist())):
        raise RuntimeError(
            "a gold was not counted among the passages that score at least as high as itself: this "
            "machine's arithmetic can't rank"
        )
    return ranks
