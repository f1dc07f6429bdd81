"""Exact inner-product search and gold ranks over an index.

Shards are fp16, in memory or memory-mapped. A CPU multiplies in float32, a GPU in fp16 summed in
float32, one block of passages at a time. Ranks are counted without making lists.

Shapes: Q queries, M passages, m of a block, D embedding size, K list length, P (query, gold) pairs.
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

from search.passages import FAILED

CPU_BLOCK = 1 << 20  # numbers of a block: fits the cache
GPU_BLOCK = 1 << 28  # scores of a block


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    """Append zero rows up to a multiple, as BLAS rounds differently at ragged edges."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % multiple))


def _products(queries: Tensor, shards: Sequence) -> Iterator[tuple[int, Tensor]]:
    """Yield (first passage number, (Q, m) float32 scores) per block; the next overwrites them."""
    n, dim = queries.shape
    if queries.is_cuda:
        rows = max(GPU_BLOCK // max(n, 1), 4096) // 64 * 64
        queries = _padded(queries.half(), 8)
    else:
        rows = max(CPU_BLOCK // dim, 64) // 64 * 64
        queries = _padded(queries, 8) if n > 1 else queries  # one query: matrix times vector
        block, out = torch.zeros(rows, dim), torch.empty(len(queries), rows)
    first = 0
    for shard in shards:
        for start in range(0, len(shard), rows):
            part = torch.as_tensor(shard[start : start + rows])
            if queries.is_cuda:
                part = _padded(part.to(queries.device, torch.float16), 64)
                scores = torch.mm(queries, part.T, out_dtype=torch.float32)
            else:
                block[: len(part)].copy_(part)  # rows below a short part are ignored
                scores = torch.mm(queries, block.T, out=out)
            yield first + start, scores[:n, : min(rows, len(shard) - start)]
        first += len(shard)


def _take(shards: Sequence, rows: np.ndarray) -> Tensor:
    """Return (len(rows), D) float32 vectors of the passages `rows`."""
    out, first = torch.empty(len(rows), shards[0].shape[1]), 0
    for shard in shards:
        inside = np.flatnonzero((rows >= first) & (rows < first + len(shard)))
        out[inside] = torch.as_tensor(shard[rows[inside] - first]).float().cpu()
        first += len(shard)
    return out


def place(shards: Sequence[np.ndarray], device: torch.device) -> Sequence:
    """Join shards on a GPU if they are finite and fit half its free memory, else return `shards`.

    The GPU kernel does not check passages for NaN.
    """
    size = sum(s.nbytes for s in shards)
    if device.type != "cuda" or not shards or size > torch.cuda.mem_get_info(device)[0] // 2:
        return shards
    shape = sum(map(len, shards)), shards[0].shape[1]
    whole, first = torch.empty(shape, dtype=torch.float16, device=device), 0
    for shard in shards:
        part = whole[first : first + len(shard)]
        part.copy_(torch.as_tensor(shard))
        if not torch.isfinite(part).all():
            return shards
        first += len(shard)
    return [whole]


# ------------------------------------------------------------------------------------------- search


def best_of(
    found: Sequence[tuple[Tensor, Tensor, Tensor]], order: Tensor, n: int, k: int
) -> tuple[Tensor, Tensor]:
    """Top k of hits (query, score, passage number), (H,) each → (n, k) scores and numbers.

    Best first, ties by `order` (M,), the place of each id; -inf and 0 for missing hits.
    """
    query, score, row = (torch.cat(column) for column in zip(*found))
    by = order[row].argsort()
    by = by[score[by].argsort(descending=True, stable=True)]
    by = by[query[by].argsort(stable=True)]
    query, score, row = query[by], score[by], row[by]
    counts = query.bincount()
    rank = torch.arange(len(query), device=query.device) - (counts.cumsum(0) - counts)[query]
    kept = rank < k
    scores, rows = score.new_full((n, k), -math.inf), row.new_zeros(n, k)
    scores[query[kept], rank[kept]], rows[query[kept], rank[kept]] = score[kept], row[kept]
    return scores, rows


def as_hits(scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn (Q, K) scores and passage numbers into hits for `best_of`."""
    query = torch.arange(len(scores), device=scores.device).repeat_interleave(scores.shape[1])
    return query, scores.flatten(), rows.flatten()


@torch.no_grad()
def exact_search(
    queries: Tensor, shards: Sequence, k: int, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best k passages by inner product.

    queries: (Q, D) float32; shards: arrays (M_i, D), fp16 or float32; order: (M,) place of each id
    → (Q, K) scores and passage numbers, K = min(k, M), best first, ties by id; (Q,) NaN flags
    """
    n, k = len(queries), min(k, sum(map(len, shards)))
    failed = torch.zeros(n, dtype=torch.bool, device=queries.device)
    least = queries.new_full((n, 1), -math.inf)  # lower scores are not in the top k
    found = [as_hits(least[:, :0], order.new_zeros(n, 0))]
    for first, scores in _products(queries, shards):
        failed |= scores.amax(1).isnan()
        if scores.shape[1] >= k and (first == 0 or scores.is_cuda):  # a GPU's blocks are large
            least = torch.maximum(least, scores.topk(k, dim=1).values[:, -1:])
        query, column = (scores >= least).nonzero(as_tuple=True)
        found.append((query, scores[query, column], column + first))
        if sum(len(hits[0]) for hits in found) > 4 * n * k:
            found = [as_hits(*best_of(found, order, n, k))]
            least = found[0][1].view(n, k)[:, -1:]
    return *best_of(found, order, n, k), failed


# --------------------------------------------------------------------------------------- gold ranks


def _kernel(queries: Tensor, shards: Sequence):
    """gold_ranks.py if usable: whole index on a Hopper GPU, Triton, D % 8 == 0; else None."""
    whole = len(shards) == 1 and getattr(shards[0], "dtype", None) == torch.float16
    hopper = queries.is_cuda and torch.cuda.get_device_capability(queries.device)[0] == 9
    if whole and hopper and queries.shape[1] % 8 == 0 and importlib.util.find_spec("triton"):
        from search import gold_ranks

        return gold_ranks
    return None


def _gold_scores(queries: Tensor, shards: Sequence, query: Tensor, row: Tensor) -> Tensor:
    """(P,) scores of (query, passage) pairs, by the kernel if it is used."""
    if len(row) and (kernel := _kernel(queries, shards)):
        return kernel.own_scores(queries.half()[query], shards[0][row])
    out = queries.new_empty(len(row))
    golds = [_take(shards, row.cpu().numpy())] if len(row) else []
    for first, scores in _products(queries, golds):
        pair = torch.arange(first, first + scores.shape[1], device=out.device)
        out[pair] = scores[query[pair], pair - first]
    return out


def _count(
    queries: Tensor, shards: Sequence, best: Tensor, query: Tensor, row: Tensor, gold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(Q,) counts of passages scoring at least `best` (Q,); (Q,) NaN flags; (P,) gold scores.

    gold: (P,) scores of the pairs (query, row) from `_gold_scores`
    """
    if kernel := _kernel(queries, shards):
        count = torch.zeros(len(queries), dtype=torch.int32, device=queries.device)
        kernel.add_counts(count, queries.half(), shards[0], best)
        return count.long(), ~torch.isfinite(queries.half()).all(1), gold
    count = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    failed, seen = torch.zeros_like(count, dtype=torch.bool), torch.empty_like(gold)
    for first, scores in _products(queries, shards):
        failed |= scores.amax(1).isnan()
        count += (scores >= best[:, None]).sum(1)
        here = (row >= first) & (row < first + scores.shape[1])
        seen[here] = scores[query[here], row[here] - first]
    return count, failed, seen


@torch.no_grad()
def exact_gold_ranks(
    queries: Tensor,
    shards: Sequence,
    golds: Sequence[Sequence[int]],
    cutoff: int = 100,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> list:
    """Return every query's best gold rank: None beyond `cutoff`, FAILED on NaN.

    queries: (Q, D) float32; shards: as in `exact_search`, on a GPU from `place`
    golds: Q non-empty lists of passage numbers
    With a `group` a collective: `shards` begin at passage `first`, other ranks hold the rest;
    queries and golds are equal on all ranks. RuntimeError: arithmetic is not reproducible.
    """

    def over_ranks(values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if group is None:
            return values
        joined = values.cpu()  # gloo: apart from a trainer's traffic
        dist.all_reduce(joined, how, group=group)
        return joined.to(values.device)

    pairs = [(q, row - first) for q, gold in enumerate(golds) for row in set(gold)]
    query, row = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).to(queries.device).T
    here = (row >= 0) & (row < sum(map(len, shards)))
    query, row = query[here], row[here]  # (P,) golds among the passages held here
    gold = _gold_scores(queries, shards, query, row)
    for _ in range(2):  # again if the full pass rounds golds differently
        best = torch.full((len(queries),), -math.inf, device=queries.device)
        best = over_ranks(best.scatter_reduce(0, query, gold, "amax"), dist.ReduceOp.MAX)
        others, failed, seen = _count(queries, shards, best, query, row, gold)
        others = others.index_add(0, query, -(seen >= best[query]).long())  # golds don't count
        moved = torch.zeros_like(others).index_add(0, query, (seen != gold).long())
        found = torch.stack([others, failed.long(), moved])  # (3, Q)
        others, failed, moved = over_ranks(found, dist.ReduceOp.SUM)
        gold = seen
        if not (moved.bool() & ~failed.bool()).any():
            break
    if ((moved.bool() | (others < 0)) & ~failed.bool()).any():
        raise RuntimeError("a product gave two results: this machine's arithmetic can't rank")
    return [
        FAILED if bad else None if number >= cutoff else number + 1
        for number, bad in zip(others.tolist(), failed.tolist())
    ]
