"""One decode step's attention as a Triton kernel: one query a sequence, on cached keys and values.

Triton comes with PyTorch's CUDA builds alone. Lengths are read on the device, so a captured kernel
serves sequences of any length and reads nothing beyond them. It stores the new key and value.

Shapes: R rows, H query heads, K key/value heads, D head size, W = H / K, S slot positions, P
positions of the prefix that all rows share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # keys that a program looks at together


@triton.jit
def _decode_kernel(
    q, k, v, out, slot_k, slot_v, prefix_k, prefix_v, at, runs, shared, scale,
    row_stride, head_stride, prefix_stride, W: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    DEEP: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """A program for a row and key/value head: W queries see the prefix, the slot, the new key."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = row * tl.num_programs(1) + head
    w, d, s = tl.arange(0, WIDE), tl.arange(0, DEEP), tl.arange(0, TILE)
    mine = (w[:, None] < W) & (d[None, :] < D)
    places = pair * W * D + w[:, None] * D + d[None, :]  # of q and out
    query = tl.load(q + places, mask=mine, other=0.0)
    own_k = tl.load(k + pair * D + d, mask=d < D, other=0.0)
    own_v = tl.load(v + pair * D + d, mask=d < D, other=0.0)
    length, runs = tl.load(at + row), tl.load(runs + row)
    slot = row * row_stride + head * head_stride
    tl.store(slot_k + slot + length * D + d, own_k, mask=d < D)
    tl.store(slot_v + slot + length * D + d, own_v, mask=d < D)
    # online softmax: highest score so far, sum of exp(score - highest), values weighted alike
    highest = tl.sum(query.to(tl.float32) * own_k.to(tl.float32)[None, :], 1) * scale  # (W,)
    total = tl.full([WIDE], 1.0, tl.float32)
    mixed = tl.zeros([WIDE, DEEP], tl.float32) + own_v.to(tl.float32)[None, :]
    for part in tl.static_range(2):  # what all rows share, then the row's own
        if part == 0:
            keys, values = prefix_k + head * prefix_stride, prefix_v + head * prefix_stride
            end = tl.load(shared) * runs
        else:
            keys, values, end = slot_k + slot, slot_v + slot, length * runs
        for start in range(0, end, TILE):
            there = start + s < end
            cells = (start + s)[:, None] * D + d[None, :]
            inside = there[:, None] & (d[None, :] < D)
            tile = tl.load(keys + cells, mask=inside, other=0.0)  # (TILE, D)
            scores = tl.dot(query, tl.trans(tile), input_precision=PRECISION) * scale
            scores = tl.where(there[None, :], scores, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, 1))
            weights, kept = tl.exp(scores - above[:, None]), tl.exp(highest - above)
            tile = tl.load(values + cells, mask=inside, other=0.0)
            product = tl.dot(weights.to(tile.dtype), tile, input_precision=PRECISION)
            mixed = mixed * kept[:, None] + product
            total = total * kept + tl.sum(weights, 1)
            highest = above
    tl.store(out + places, (mixed / total[:, None]).to(query.dtype), mask=mine)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: list[Tensor],
    prefix: list[Tensor],
    at: Tensor,
    runs: Tensor,
    shared: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one new token a row; its key and value are stored at at[row] of its slot.

    q (R, H, 1, D), k, v (R, K, 1, D); slots: keys and values (≥ R, K, S, D), prefix: keys and
    values (K, ≥ P, D), all contiguous; at (≥ R,) int64: positions in use of each slot; runs (≥ R,)
    int64: 0 where the result does not matter, else 1; shared () int64: P. Returns (R, H, 1, D).
    float32 is computed in float32 proper, not in TF32.
    """
    rows, heads, _, d = q.shape
    n_kv = k.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    _decode_kernel[(rows, n_kv)](
        *(q, k, v, out, *slots, *prefix, at, runs, shared, scale),
        *(slots[0].stride(0), slots[0].stride(1), prefix[0].stride(0)),
        W=heads // n_kv,
        D=d,
        WIDE=max(16, triton.next_power_of_2(heads // n_kv)),
        DEEP=max(16, triton.next_power_of_2(d)),
        TILE=TILE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )
    return out
