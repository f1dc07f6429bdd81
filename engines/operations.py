"""The operations of `TorchEngine` in plain PyTorch; `kernels` has them for a GPU.

Shapes: R rows (running sequences), T tokens of a pass, H query heads, K key/value heads, D head
size, W = H / K, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK = 128  # tokens per block: first a block is drawn, then a token
TILE_ROWS = 8  # most rows that attend to their prompt together


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary embeddings in place: x (T, heads, D), cos, sin (T, D)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    x.copy_(x * cos[:, None] + turned * sin[:, None])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: x (T, N) or (T, heads, N), weight (N,) → the shape of x."""
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


def silu_times(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate, up]: (T, 2 N) → (T, N)."""
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def block_logsumexp(logits: Tensor, temperature: Tensor) -> Tensor:
    """logsumexp of logits / temperature per BLOCK: (R, V), (R,) → (R, ⌈V / BLOCK⌉) float32."""
    scaled = logits.float() / temperature[:, None]
    padded = nn.functional.pad(scaled, (0, -scaled.shape[1] % BLOCK), value=float("-inf"))
    return padded.view(len(logits), -1, BLOCK).logsumexp(-1)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: list[Tensor], prompts: list[Tensor], rows, scale: float
) -> Tensor:
    """Store a new token's key and value in each row's slot, and attend to prompt and slot.

    q (R, H, D), k, v (R, K, D); slots, prompts: keys and values (count, K, capacity, D);
    `rows`: kv_cache.Rows. Returns (R, H, D); idle rows are meaningless.
    """
    count, heads, d = q.shape
    n_kv = k.shape[1]
    slot, at = rows.slot[:count], rows.at[:count]
    for stored, x in zip(slots, (k, v)):
        stored[slot, :, at] = x
    end, longest = int(at.max()) + 1, int(rows.begin[:count].max())
    own_keys, own_values = (x[slot, :, :end] for x in slots)  # (R, K, L, D)
    unseen = (torch.arange(end) > at[:, None])[:, None, :, None]  # (R, 1, L, 1)
    own_values.masked_fill_(unseen, 0)  # a weight of 0 hides no NaN
    q = q.view(count, n_kv, -1, d) * scale  # (R, K, W, D)
    scores = q.new_full((*q.shape[:3], longest + end), float("-inf"))
    own = (q @ own_keys.transpose(2, 3)).masked_fill_(unseen.transpose(2, 3), float("-inf"))
    scores[..., longest:] = own
    tiles = []  # (rows, keys, values (K, P, D)) of prompts
    tables = (x[:count].tolist() for x in (rows.first, rows.count, rows.prompt, rows.begin))
    firsts, sizes, numbers, lengths = tables
    for first, size in zip(firsts, sizes):
        if size:
            own_prompt = (x[numbers[first], :, : lengths[first]] for x in prompts)
            tiles.append((slice(first, first + size), *own_prompt))
    for tile, keys, _ in tiles:  # all rows of a prompt in one product
        found = q[tile].transpose(0, 1).flatten(1, 2) @ keys.transpose(1, 2)  # (K, N W, P)
        found = found.unflatten(1, (-1, q.shape[2])).transpose(0, 1)
        scores[tile, ..., : keys.shape[1]] = found
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    out = weights[..., longest:] @ own_values
    for tile, _, values in tiles:
        mixed = weights[tile, ..., : values.shape[1]].transpose(0, 1).flatten(1, 2) @ values
        out[tile] += mixed.unflatten(1, (-1, q.shape[2])).transpose(0, 1)
    return out.flatten(1, 2)
