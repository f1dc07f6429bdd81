"""What `TorchEngine`'s steps are made of, in plain PyTorch; `kernels` has the same for a GPU.

Shapes: R rows of the running batch, T tokens of a pass, H query heads, K key/value heads, D head
size, W = H / K, V vocabulary.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

BLOCK = 128  # tokens whose probabilities are summed before one is drawn among them
TILE_ROWS = 8  # at most so many rows attend to their prompt together


def operations(device: torch.device) -> ModuleType:
    """The module with these functions for a device."""
    if device.type == "cuda":  # Triton comes with PyTorch's CUDA builds alone
        from engines import kernels as module
    else:
        from engines import operations as module
    return module


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding in place: x (T, heads, D), cos, sin (T, D)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    x.copy_(x * cos[:, None] + turned * sin[:, None])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (T, N) or (T, heads, N), weight (N,) → as x."""
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


def silu_times(x: Tensor) -> Tensor:
    """silu(gate) * up of x = gate, up side by side: (T, 2 N) → (T, N)."""
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def block_logsumexp(logits: Tensor, temperature: Tensor) -> Tensor:
    """logsumexp of logits / temperature a block: (R, V), (R,) → (R, V / BLOCK) float32."""
    scaled = logits.float() / temperature[:, None]
    padded = nn.functional.pad(scaled, (0, -scaled.shape[1] % BLOCK), value=float("-inf"))
    return padded.view(len(logits), -1, BLOCK).logsumexp(-1)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: list[Tensor], prompts: list[Tensor], rows, scale: float
) -> Tensor:
    """Attention of one new token a row over its prompt, its slot and itself; stores key and value.

    q (R, H, D), k, v (R, K, D); slots: keys and values (slots, K, capacity, D), prompts alike;
    `rows`: kv_cache.Rows. Returns (R, H, D); of rows that don't run nothing is read.
    """
    count, heads, d = q.shape
    n_kv = k.shape[1]
    slot, at = rows.slot[:count], rows.at[:count]
    for stored, x in zip(slots, (k, v)):
        stored[slot, :, at] = x
    out = torch.zeros(count, n_kv, heads // n_kv, v.shape[2], dtype=q.dtype)
    tiles = zip(rows.first[:count].tolist(), rows.count[:count].tolist())
    for first, size in ((first, size) for first, size in tiles if size):
        tile = slice(first, first + size)
        number, shared = int(rows.prompt[first]), int(rows.begin[first])
        keys, values = (x[number, :, :shared] for x in prompts)  # (K, P, D)
        end = int(at[tile].max()) + 1
        own_keys, own_values = (x[slot[tile], :, :end] for x in slots)  # (N, K, L, D)
        unseen = torch.arange(end) > at[tile, None]  # (N, L)
        own_values.masked_fill_(unseen[:, None, :, None], 0)  # a weight of 0 hides no NaN
        query = q[tile].view(size, n_kv, -1, d) * scale  # (N, K, W, D)
        own = (query @ own_keys.transpose(2, 3)).masked_fill_(unseen[:, None, None], float("-inf"))
        # the queries of all rows against the one prompt: (K, N W, P)
        prompt = query.transpose(0, 1).reshape(n_kv, -1, d) @ keys.transpose(1, 2)
        prompt = prompt.view(n_kv, size, -1, shared).transpose(0, 1)
        weights = torch.cat([prompt, own], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        prompt = weights[..., :shared].transpose(0, 1).reshape(n_kv, -1, shared) @ values
        out[tile] = weights[..., shared:] @ own_values
        out[tile] += prompt.view(n_kv, size, heads // n_kv, -1).transpose(0, 1)
    return out.flatten(1, 2)
