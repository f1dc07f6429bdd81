"""Gold ranks on a Hopper GPU: one kernel that multiplies, compares and counts.

Scores of a tile of 128 queries and 256 passages stay in registers, are compared there with each
query's gold score, and only counts are written. Query tiles vary fastest, so a passage is read
once. Gold scores come from the same code (`OWN`) and round alike. Needs Triton at import.

Shapes: Q queries, M passages, D embedding size, P (query, gold) pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE_M = gl.constexpr(256)  # passages per tile
TILE_D = gl.constexpr(64)  # columns per part
STAGES = gl.constexpr(4)  # parts in flight


@gluon.jit
def _tiles(n_queries, n_passages, OWN: gl.constexpr):
    tiles_q = gl.cdiv(n_queries, 128)
    return tiles_q, tiles_q if OWN else tiles_q * gl.cdiv(n_passages, TILE_M)


@gluon.jit
def _load(tensors, D: gl.constexpr, OWN: gl.constexpr):
    """Load 2 x 64 queries and the passages of every tile, TILE_D columns at a time."""
    q_desc, p_desc, q_bufs, p_bufs, ready, empty, _, _, n_queries, n_passages = tensors
    tiles_q, tiles = _tiles(n_queries, n_passages, OWN)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        q0 = tile % tiles_q * 128
        p0 = q0 // TILE_M * TILE_M if OWN else tile // tiles_q * TILE_M
        for column in range(0, D, TILE_D):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, 2 * q_desc.block_type.nbytes + p_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [q0, column], bar, q_bufs.index(2 * slot))
            second = q_bufs.index(2 * slot + 1)
            tma.async_copy_global_to_shared(q_desc, [q0 + 64, column], bar, second)
            tma.async_copy_global_to_shared(p_desc, [p0, column], bar, p_bufs.index(slot))
            step += 1


@gluon.jit
def _count(half: gl.constexpr, tensors, D: gl.constexpr, OWN: gl.constexpr):
    """Multiply half of every tile's queries and count scores >= the gold's."""
    _, _, q_bufs, p_bufs, ready, empty, gold_ptr, count_ptr, n_queries, n_passages = tensors
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16]
    )
    tiles_q, tiles = _tiles(n_queries, n_passages, OWN)
    step = 0
    scores = gl.zeros((64, TILE_M), gl.float32, layout=layout)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        q0 = tile % tiles_q * 128
        rows = q0 + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        here = rows < n_queries
        gold = gl.load(gold_ptr + rows, mask=here, other=0.0)  # loads during multiplication
        scores = warpgroup_mma_init(scores)
        for column in range(0, D, TILE_D):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            queries, passages = q_bufs.index(2 * slot + half), p_bufs.index(slot).permute((1, 0))
            scores = warpgroup_mma(queries, passages, scores, use_acc=column > 0, is_async=True)
            scores = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(scores,)))  # the part before
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=column > 0)
            step += 1
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if OWN:  # pair i is query i and passage i
            passage = q0 // TILE_M * TILE_M + gl.arange(0, TILE_M, layout=gl.SliceLayout(0, layout))
            own = gl.sum(gl.where(rows.expand_dims(1) == passage.expand_dims(0), scores, 0.0), 1)
            gl.store(gold_ptr + rows, own, mask=here)
        else:
            count = gl.sum((scores >= gold.expand_dims(1)).to(gl.int32), 1)
            # zero rows below the last passage
            beyond = gl.maximum(tile // tiles_q * TILE_M + TILE_M - n_passages, 0)
            count -= gl.where(gold <= 0, beyond, 0)
            gl.atomic_add(count_ptr + rows, count, mask=here, sem="relaxed")


@gluon.jit
def specialised(
    q_desc, p_desc, gold_ptr, count_ptr, n_queries, n_passages, D: gl.constexpr, OWN: gl.constexpr
):
    """Add counts of scores >= gold (Q,) to count_ptr; if OWN, write (q_i, p_i) scores to gold_ptr.

    Persistent programs take every n-th tile. One warp loads; two warp groups multiply 64 queries
    each without waiting for each other, so that one counts while the other multiplies.
    """
    q_bufs = gl.allocate_shared_memory(gl.float16, [2 * STAGES, 64, TILE_D], q_desc.layout)
    p_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, TILE_M, TILE_D], p_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)  # filled
        mbarrier.init(empty.index(i), count=2)  # read by both halves
    buffers = (q_desc, p_desc, q_bufs, p_bufs, ready, empty)
    tensors = buffers + (gold_ptr, count_ptr, n_queries, n_passages)
    gl.warp_specialize(
        [
            (_count, (0, tensors, D, OWN)),
            (_count, (1, tensors, D, OWN)),
            (_load, (tensors, D, OWN)),
        ],
        [4, 1],  # warps of the second and the third
        [240, 24],  # their registers
    )


def _run(queries: Tensor, passages: Tensor, gold: Tensor, count: Tensor, own: bool) -> None:
    def tiles(matrix: Tensor, rows: int) -> TensorDescriptor:
        shape = [rows, TILE_D.value]
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float16)
        return TensorDescriptor.from_tensor(matrix, shape, layout)

    tensors = tiles(queries, 64), tiles(passages, TILE_M.value), gold, count
    sizes = len(queries), len(passages), queries.shape[1]
    programs = torch.cuda.get_device_properties(queries.device).multi_processor_count
    specialised[(programs,)](*tensors, *sizes, own, num_warps=4, maxnreg=168)


def own_scores(queries: Tensor, passages: Tensor) -> Tensor:
    """Return (P,) products of (P, D) fp16 pairs in float32, rounded as by `add_counts`."""
    out = torch.zeros(len(queries), dtype=torch.float32, device=queries.device)
    unused = torch.zeros(1, dtype=torch.int32, device=out.device)
    _run(queries.contiguous(), passages.contiguous(), out, unused, True)
    return out


def add_counts(count: Tensor, queries: Tensor, passages: Tensor, gold: Tensor) -> None:
    """Add to count (Q,) int32 the passages (M, D) fp16 that score at least gold (Q,) float32.

    queries: (Q, D) fp16, D a multiple of 8. Counts are only right for finite values.
    """
    _run(queries.contiguous(), passages, gold.contiguous(), count, False)
