"""`operations` as Triton kernels: the same functions, for a GPU, one or two launches each.

Lengths are read on the device, so a captured kernel serves sequences of any length and reads
nothing beyond them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.operations import BLOCK, TILE_ROWS

TILE = 64  # keys that a program looks at together
PROGRAMS = 512  # of the attention to prompts, at least: their keys are split among them


@triton.jit
def _rotate_kernel(
    x, cos, sin, token_stride, HEADS: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr
):  # fmt: skip
    """A program for a token: all heads, the pairs (d, d + HALF)."""
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    mine = (h < HEADS) & (d < HALF)
    low = x + token * token_stride + h * (2 * HALF) + d
    angle = token * (2 * HALF) + d
    a = tl.load(low, mask=mine, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=mine, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=d < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=d < HALF, other=0.0).to(tl.float32)
    tl.store(low, a * c - b * s, mask=mine)
    tl.store(low + HALF, b * c + a * s, mask=mine)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x (T, heads, D), heads side by side."""
    tokens, heads, d = x.shape
    sizes = triton.next_power_of_2(heads), triton.next_power_of_2(d // 2)
    _rotate_kernel[(tokens,)](
        x, cos.contiguous(), sin.contiguous(), x.stride(0), heads, d // 2, *sizes
    )


@triton.jit
def _silu_kernel(x, out, N, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(x + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, gate * tl.sigmoid(gate) * up, mask=n < N)


def silu_times(x: Tensor) -> Tensor:
    out = x.new_empty(len(x), x.shape[1] // 2)
    _silu_kernel[(len(x), triton.cdiv(out.shape[1], 1024))](x, out, out.shape[1], SIZE=1024)
    return out


@triton.jit
def _logsumexp_kernel(logits, temperature, out, V, BLOCKS, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """A program for MANY blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * MANY + tl.arange(0, MANY)
    n = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * V + n, mask=n < V, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + row)
    highest = tl.max(x, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(x - highest[:, None]), 1)
    tl.store(out + row * BLOCKS + block, highest + tl.log(total), mask=block < BLOCKS)


def block_logsumexp(logits: Tensor, temperature: Tensor) -> Tensor:
    rows, size = logits.shape
    blocks, many = triton.cdiv(size, BLOCK), 16
    out = torch.empty(rows, blocks, device=logits.device)
    _logsumexp_kernel[(rows, triton.cdiv(blocks, many))](
        *(logits.contiguous(), temperature.contiguous(), out, size, blocks), BLOCK=BLOCK, MANY=many
    )
    return out


@triton.jit
def _attend(
    query, keys, values, begin, end, scale, highest, total, mixed, D: tl.constexpr,
    DEEP: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Online softmax over keys begin … end: the highest score so far, the sum of
    exp(score - highest), the values weighted alike."""
    d, s = tl.arange(0, DEEP), tl.arange(0, TILE)
    for start in range(begin, end, TILE):
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
    return highest, total, mixed


@triton.jit
def _prompt_kernel(
    q, prompt_k, prompt_v, part, part_lse, first, count, prompt, begin, scale, q_row, H,
    prompt_stride, head_stride, W: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    DEEP: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """A program for a tile of rows with one prompt, a key/value head and a part of the keys."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    size = tl.load(count + tile)
    if size > 0:
        row = tl.load(first + tile)
        length = tl.load(begin + row).to(tl.int32)
        number = tl.load(prompt + row)
        m, d = tl.arange(0, WIDE), tl.arange(0, DEEP)
        row, h = row + m // W, head * W + m % W
        mine = (m[:, None] < size * W) & (d[None, :] < D)
        query = tl.load(
            q + row[:, None] * q_row + h[:, None] * D + d[None, :], mask=mine, other=0.0
        )
        share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
        cache = number * prompt_stride + head * head_stride
        highest, total, mixed = _attend(
            query, prompt_k + cache, prompt_v + cache, split * share,
            tl.minimum((split + 1) * share, length), scale,
            tl.full([WIDE], float("-inf"), tl.float32), tl.zeros([WIDE], tl.float32),
            tl.zeros([WIDE, DEEP], tl.float32), D, DEEP, TILE, PRECISION
        )  # fmt: skip
        place = (row * H + h) * SPLITS + split
        tl.store(part_lse + place, highest + tl.log(total), mask=m < size * W)
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(part + place[:, None] * D + d[None, :], mixed, mask=mine)


@triton.jit
def _slot_kernel(
    q, k, v, out, slot_k, slot_v, part, part_lse, slot, at, runs, scale, q_row, kv_row,
    slot_stride, head_stride, W: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    DEEP: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """A program for a row and key/value head: the new token, the slot, the prompt's parts."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w, d = tl.arange(0, WIDE), tl.arange(0, DEEP)
    mine = (w[:, None] < W) & (d[None, :] < D)
    query = tl.load(
        q + row * q_row + (head * W + w)[:, None] * D + d[None, :], mask=mine, other=0.0
    )
    own_k = tl.load(k + row * kv_row + head * D + d, mask=d < D, other=0.0)
    own_v = tl.load(v + row * kv_row + head * D + d, mask=d < D, other=0.0)
    length, runs = tl.load(at + row).to(tl.int32), tl.load(runs + row).to(tl.int32)
    cache = tl.load(slot + row) * slot_stride + head * head_stride
    tl.store(slot_k + cache + length * D + d, own_k, mask=d < D)
    tl.store(slot_v + cache + length * D + d, own_v, mask=d < D)
    highest = tl.sum(query.to(tl.float32) * own_k.to(tl.float32)[None, :], 1) * scale  # (W,)
    total = tl.full([WIDE], 1.0, tl.float32)
    mixed = tl.zeros([WIDE, DEEP], tl.float32) + own_v.to(tl.float32)[None, :]
    highest, total, mixed = _attend(
        query, slot_k + cache, slot_v + cache, 0, length * runs, scale, highest, total, mixed, D,
        DEEP, TILE, PRECISION
    )  # fmt: skip
    query_head = (row * tl.num_programs(1) + head) * W + w
    for split in range(SPLITS):
        place = query_head * SPLITS + split
        seen = (w < W) & (runs > 0)
        lse = tl.load(part_lse + place, mask=seen, other=float("-inf"))
        values = tl.load(part + place[:, None] * D + d[None, :], mask=mine & (runs > 0), other=0.0)
        above = tl.maximum(highest, lse)
        weight, kept = tl.exp(lse - above), tl.exp(highest - above)
        mixed = mixed * kept[:, None] + values * weight[:, None]
        total = total * kept + weight
        highest = above
    place = query_head[:, None] * D + d[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(query.dtype), mask=mine)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: list[Tensor], prompts: list[Tensor], rows, scale: float
) -> Tensor:
    """Heads of q, k and v side by side. float32 is computed in float32 proper, not in TF32."""
    count, heads, d = q.shape
    n_kv = k.shape[1]
    q, k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (q, k, v))
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    splits = triton.next_power_of_2(max(4, PROGRAMS // (count * n_kv)))
    part = torch.empty(count, heads, splits, d, device=q.device)
    part_lse = torch.empty(count, heads, splits, device=q.device)
    out = q.new_empty(count, heads, d)
    sizes = dict(
        W=heads // n_kv,
        D=d,
        DEEP=max(16, triton.next_power_of_2(d)),
        TILE=TILE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        SPLITS=splits,
        num_stages=2,
    )
    wide = [max(16, triton.next_power_of_2(n * heads // n_kv)) for n in (TILE_ROWS, 1)]
    _prompt_kernel[(count, n_kv, splits)](
        *(q, *prompts, part, part_lse, rows.first, rows.count, rows.prompt, rows.begin, scale),
        *(q.stride(0), heads, prompts[0].stride(0), prompts[0].stride(1)),
        WIDE=wide[0],
        **sizes,
    )
    _slot_kernel[(count, n_kv)](
        *(q, k, v, out, *slots, part, part_lse, rows.slot, rows.at, rows.runs, scale),
        *(q.stride(0), k.stride(0), slots[0].stride(0), slots[0].stride(1)),
        WIDE=wide[1],
        **sizes,
    )
    return out
