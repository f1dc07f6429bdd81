"""`operations` as Triton kernels for a GPU.

Lengths are read on the device, so a captured graph serves sequences of any length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.operations import BLOCK, TILE_ROWS

TILE = 64  # keys that a program loads together
STAGES, WARPS = 1, 4  # of the attention kernel
SPLITS = 4  # least number of programs that share a prompt's keys
PROGRAMS = 256  # wanted for slots: with few rows up to 8 share one's keys
SLOT_KEYS = 512  # of a slot's capacity that a program is enough for


@triton.jit
def _rotate_kernel(
    x, cos, sin, token_stride, HEADS: tl.constexpr, HALF: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr
):  # fmt: skip
    """One program per token: all heads, pairs (d, d + HALF)."""
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
    """As operations.rotate; the heads of a token must be contiguous."""
    tokens, heads, d = x.shape
    sizes = triton.next_power_of_2(heads), triton.next_power_of_2(d // 2)
    _rotate_kernel[(tokens,)](
        x, cos.contiguous(), sin.contiguous(), x.stride(0), heads, d // 2, *sizes
    )


@triton.jit
def _norm_kernel(x, weight, out, eps, x_row, x_head, N: tl.constexpr, SIZE: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, SIZE)
    values = tl.load(x + token * x_row + head * x_head + n, mask=n < N, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / N + eps)
    weights = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    place = (token * tl.num_programs(1) + head) * N + n
    tl.store(out + place, values * scale * weights, mask=n < N)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = x.stride() if x.dim() == 3 else (x.stride(0), 0)
    n = x.shape[-1]
    grid = (len(x), x.shape[1] if x.dim() == 3 else 1)
    _norm_kernel[grid](x, weight, out, eps, *strides[:2], N=n, SIZE=triton.next_power_of_2(n))
    return out


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
    """Online softmax over keys begin … end - 1; returns the highest score, the sum of
    exp(score - highest), and the sum of values with these weights."""
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
def _store_part(
    part, part_lse, place, highest, total, mixed, mine, D: tl.constexpr, DEEP: tl.constexpr
):
    """Store the normalised output of queries at `place`, and their logsumexp."""
    d = tl.arange(0, DEEP)
    tl.store(part_lse + place, highest + tl.log(total), mask=mine)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    cells = place[:, None] * D + d[None, :]
    tl.store(part + cells, mixed, mask=mine[:, None] & (d[None, :] < D))


@triton.jit
def _part_kernel(
    q, k, v, prompt_k, prompt_v, slot_k, slot_v, part, part_lse, first, count, prompt, begin, slot,
    at, runs, scale, q_row, kv_row, H, prompt_stride, prompt_head, slot_stride, slot_head,
    W: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, DEEP: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Attend to a part of a head's keys: the first SPLITS parts are of a prompt, for a tile of
    rows; the others of a row's slot."""
    number, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DEEP)
    if split < SPLITS:
        m = tl.arange(0, WIDE)
        row, query_head = tl.load(first + number) + m // W, head * W + m % W
        size = tl.load(count + number)
        mine = m < size * W
        if size > 0:
            length = tl.load(begin + tl.load(first + number)).to(tl.int32)
            cache = tl.load(prompt + tl.load(first + number)) * prompt_stride + head * prompt_head
            inside = mine[:, None] & (d[None, :] < D)
            at_q = row[:, None] * q_row + query_head[:, None] * D + d[None, :]
            query = tl.load(q + at_q, mask=inside, other=0.0)
            share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
            highest, total, mixed = _attend(
                query, prompt_k + cache, prompt_v + cache, split * share,
                tl.minimum((split + 1) * share, length), scale,
                tl.full([WIDE], float("-inf"), tl.float32), tl.zeros([WIDE], tl.float32),
                tl.zeros([WIDE, DEEP], tl.float32), D, DEEP, TILE, PRECISION
            )  # fmt: skip
            place = (row * H + query_head) * PARTS + split
            _store_part(part, part_lse, place, highest, total, mixed, mine, D, DEEP)
    else:
        w = tl.arange(0, NARROW)
        h = head * W + w
        at_q = number * q_row + h[:, None] * D + d[None, :]
        query = tl.load(q + at_q, mask=(w[:, None] < W) & (d[None, :] < D), other=0.0)
        length = tl.load(at + number).to(tl.int32)
        cache = tl.load(slot + number) * slot_stride + head * slot_head
        share = tl.cdiv(tl.cdiv(length, PARTS - SPLITS), TILE) * TILE
        start = (split - SPLITS) * share
        end = tl.minimum(start + share, length) * tl.load(runs + number).to(tl.int32)
        # the first part also stores and attends to the new token
        own = split == SPLITS
        own_k = tl.load(k + number * kv_row + head * D + d, mask=d < D, other=0.0)
        own_v = tl.load(v + number * kv_row + head * D + d, mask=(d < D) & own, other=0.0)
        tl.store(slot_k + cache + length * D + d, own_k, mask=(d < D) & own)
        tl.store(slot_v + cache + length * D + d, own_v, mask=(d < D) & own)
        highest = tl.sum(query.to(tl.float32) * own_k.to(tl.float32)[None, :], 1) * scale
        highest, total, mixed = _attend(
            query, slot_k + cache, slot_v + cache, start, end, scale,
            tl.where(own, highest, float("-inf")),
            tl.where(own, tl.full([NARROW], 1.0, tl.float32), 0.0),
            tl.zeros([NARROW, DEEP], tl.float32) + own_v.to(tl.float32)[None, :], D, DEEP, TILE,
            PRECISION
        )  # fmt: skip
        place = (number * H + h) * PARTS + split
        _store_part(part, part_lse, place, highest, total, mixed, w < W, D, DEEP)


@triton.jit
def _merge_kernel(
    part, part_lse, out, runs, D: tl.constexpr, DEEP: tl.constexpr, SPLITS: tl.constexpr,
    PARTS: tl.constexpr, MANY: tl.constexpr
):  # fmt: skip
    """One program per row and query head combines its parts by their logsumexp."""
    row, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += row * tl.num_programs(1)
    p, d = tl.arange(0, MANY), tl.arange(0, DEEP)
    written = (p < PARTS) & ((p >= SPLITS) | (tl.load(runs + row) > 0))
    lse = tl.load(part_lse + query * PARTS + p, mask=written, other=float("-inf"))
    weights = tl.exp(lse - tl.max(lse, 0))
    cells = (query * PARTS + p)[:, None] * D + d[None, :]
    values = tl.load(part + cells, mask=written[:, None] & (d[None, :] < D), other=0.0)
    mixed = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + query * D + d, mixed, mask=d < D)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: list[Tensor], prompts: list[Tensor], rows, scale: float
) -> Tensor:
    """As operations.decode_attention; float32 is computed in full precision, not TF32."""
    count, heads, d = q.shape
    n_kv = k.shape[1]
    q, k, v = (x if x.stride()[1:] == (d, 1) else x.contiguous() for x in (q, k, v))
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    wanted = PROGRAMS // (count * n_kv), slots[0].shape[2] // SLOT_KEYS
    slot_splits = min(8, max(1, triton.next_power_of_2(max(wanted))))
    splits = max(SPLITS, slot_splits)
    sizes = dict(
        D=d,
        DEEP=max(16, triton.next_power_of_2(d)),
        SPLITS=splits,
        PARTS=(parts := splits + slot_splits),
    )
    wide, narrow = (max(16, triton.next_power_of_2(n * heads // n_kv)) for n in (TILE_ROWS, 1))
    part = torch.empty(count, heads, parts, d, device=q.device)
    part_lse = torch.empty(count, heads, parts, device=q.device)
    out = q.new_empty(count, heads, d)
    _part_kernel[(count, n_kv, parts)](
        *(q, k, v, *prompts, *slots, part, part_lse),
        *(rows.first, rows.count, rows.prompt, rows.begin, rows.slot, rows.at, rows.runs),
        *(scale, q.stride(0), k.stride(0), heads),
        *(*prompts[0].stride()[:2], *slots[0].stride()[:2]),
        W=heads // n_kv,
        WIDE=wide,
        NARROW=narrow,
        TILE=TILE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **sizes,
        num_stages=STAGES,
        num_warps=WARPS,
    )
    many = triton.next_power_of_2(parts)
    _merge_kernel[(count, heads)](part, part_lse, out, rows.runs, MANY=many, **sizes, num_warps=1)
    return out
