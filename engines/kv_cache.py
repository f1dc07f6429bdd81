"""Keys and values of `TorchEngine`'s sequences, and the attention of its passes over them.

Shapes: R rows of the running batch, U prompts computed together, B rows of a pass (R or U), S new
positions of a pass, P length of the shared prefix, L slot positions that are looked at, H query
heads, K key/value heads, D head size, W = H / K.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engines.base import RolloutError

causal_attention = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)


class KVCache:
    """Keys and values: of the shared prefix once, of every sequence behind it in a slot of its own.

    The rows of the running batch are the first slots. What a decode step reads stays at its place
    for as long as the cache lives, so that a CUDA graph of the step can be replayed; `fused`: its
    attention is decode_attention's kernel.
    """

    def __init__(self, rows: int, capacity: int, prefix_capacity: int, device, fused: bool):
        self.sizes, self.fused = (rows, capacity, prefix_capacity), fused
        self.prefix: dict[int, list[Tensor]] = {}  # layer → (K, prefix_capacity, D) keys and values
        self.slots: dict[int, list[Tensor]] = {}  # layer → (rows, K, capacity, D) keys and values
        # of each row: its newest token, where this will be stored, whether the row runs (1 or 0)
        self.tokens, self.at, self.runs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.shared = torch.zeros((), dtype=torch.int64, device=device)  # P, for the kernel
        self.index = torch.arange(rows, device=device)
        self.attended: set[int] = set()  # layers whose keys and values this pass has stored
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # rows → step, its logits
        self.begin(())

    def begin(self, prefix: tuple[int, ...]) -> None:
        """Forget all. Sequences to come begin with `prefix`, which the next pass computes."""
        self.prefix_ids, self.prefix_length = prefix, len(prefix)
        self.shared.fill_(len(prefix))
        self.forget()
        # not bound methods: a cycle would keep a replaced cache, and its graphs, alive
        self.attend = KVCache.attend_prefix

    def forget(self) -> None:
        """Hold no conversations."""
        self.held: list[tuple[int, ...]] = [()] * self.sizes[0]  # ids that the last call left

    def begin_prompts(self, rows: list[int], source: list[int], past: list[int], size: int) -> None:
        """The next pass computes `size` positions (padding included) of U prompts.

        rows, source (R,): a row, and the prompt it takes over; past (U,): positions that the
        prompt's (only) row has already.
        """
        device = self.at.device
        self.targets = torch.tensor(rows, device=device)[:, None]
        self.source = torch.tensor(source, device=device)
        self.first = self.targets[[source.index(u) for u in range(len(past))], 0]
        self.end, self.continues = min(max(past) + size, self.sizes[1]), any(past)
        places = torch.tensor(past, device=device)[:, None] + torch.arange(size, device=device)
        self.places = places.clamp(max=self.sizes[1] - 1)  # (U, S); the clamp cuts padding off
        seen = torch.arange(self.end, device=device) <= places[:, :, None]  # (U, S, L)
        self.unseen = ~seen[:, None, -1, :, None]  # (U, 1, L, 1)
        seen = seen if self.continues else seen[:1]
        self.mask = nn.functional.pad(seen[:, None], (self.prefix_length, 0), value=True)
        if not self.fused:  # a weight of 0 does not hide a NaN that was left there
            fresh = [row for row, u in zip(rows, source) if not past[u]]
            for _, values in self.slots.values():
                values[fresh] = 0
        self.attend = KVCache.attend_prompts

    def begin_steps(self, tokens: list[int], lengths: list[int], runs: list[bool]) -> None:
        """The next passes compute a token a row, first `tokens`, behind `lengths` stored positions.

        Rows that don't run compute what nobody reads, and store it behind what is held.
        """
        state = torch.tensor([tokens, lengths, runs], device=self.at.device)
        self.tokens[: len(tokens)], self.at[: len(tokens)], self.runs[: len(tokens)] = state
        self.end = max(lengths) + 1
        self.attend = KVCache.attend_fused if self.fused else KVCache.attend_step

    def step_taken(self, tokens: Tensor) -> None:
        """`tokens` (R,) were sampled: they are what the next step computes."""
        self.tokens[: len(tokens)] = tokens
        self.at += 1
        self.end += 1

    def store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store a pass's keys and values and attend: q (B, H, S, D), k, v (B, K, S, D) → as q."""
        self.allocate(layer, k, v)
        return self.attend(self, layer, q, k, v, scale)

    def allocate(self, layer: int, *like: Tensor) -> None:
        """Make a layer's tensors, for the heads of keys and values (…, K, …, D)."""
        rows, capacity, shared = self.sizes
        if layer not in self.slots:
            self.prefix[layer] = [x.new_zeros(x.shape[1], shared, x.shape[3]) for x in like]
            self.slots[layer] = [x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in like]

    def attend_prefix(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        for stored, x in zip(self.prefix[layer], (k, v)):
            stored[:, : x.shape[2]] = x[0]
        return causal_attention(q, k, v, scale=scale)

    def attend_prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        for slot, x in zip(self.slots[layer], (k, v)):
            slot[self.targets, :, self.places[self.source]] = x.transpose(1, 2)[self.source]
        if self.continues:
            k, v = (slot[self.first, :, : self.end] for slot in self.slots[layer])
            v = v.masked_fill(self.unseen, 0)
        elif not self.prefix_length:
            return causal_attention(q, k, v, scale=scale)
        k, v = (
            torch.cat([p[None, :, : self.prefix_length].expand(len(x), -1, -1, -1), x], dim=2)
            for p, x in zip(self.prefix[layer], (k, v))
        )
        return scaled_dot_product_attention(q, k, v, self.mask, scale=scale, enable_gqa=True)

    def attend_fused(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from engines.decode_attention import decode_attention

        slots, prefix = self.slots[layer], self.prefix[layer]
        return decode_attention(q, k, v, slots, prefix, self.at, self.runs, self.shared, scale)

    def attend_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """One query a row: the W query heads of a key/value head become W queries."""
        (rows, heads, _, d), n_kv, shared = q.shape, k.shape[1], self.prefix_length
        index, at = self.index[:rows], self.at[:rows]
        for slot, x in zip(self.slots[layer], (k, v)):
            slot[index, :, at] = x[:, :, 0]
        k, v = (slot[:rows, :, : self.end] for slot in self.slots[layer])
        hidden = (torch.arange(self.end, device=at.device) > at[:, None])[:, None, None]
        q = q.view(rows, n_kv, heads // n_kv, d) * scale
        scores = (q @ k.transpose(2, 3)).masked_fill_(hidden, float("-inf"))  # (R, K, W, L)
        if not shared:
            weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
            return (weights @ v).view(rows, heads, 1, -1)
        prefix_k, prefix_v = (x[:, :shared] for x in self.prefix[layer])  # (K, P, D)
        # all rows' queries against the one prefix: (K, R*W, D)
        folded = q.transpose(0, 1).reshape(n_kv, -1, d) @ prefix_k.transpose(1, 2)
        folded = folded.view(n_kv, rows, -1, shared).transpose(0, 1)
        weights = torch.cat([folded, scores], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        folded = weights[..., :shared].transpose(0, 1).reshape(n_kv, -1, shared) @ prefix_v
        out = weights[..., shared:] @ v  # (R, K, W, D)
        out += folded.view(n_kv, rows, heads // n_kv, -1).transpose(0, 1)
        return out.view(rows, heads, 1, -1)

    def bring_to_front(self, chosen: list[int], used: int) -> list[int]:
        """Exchange slots (their first `used` positions) so that `chosen` are the first ones.

        Returns the former number of every slot. Moves no more slots than it must.
        """
        order, count = list(range(len(self.held))), len(chosen)
        holes = sorted(set(range(count)) - set(chosen))
        for hole, slot in zip(holes, [i for i in chosen if i >= count]):
            order[hole], order[slot] = slot, hole
        moved = [i for i, former in enumerate(order) if i != former]
        if moved:
            to, source = torch.tensor([moved, [order[i] for i in moved]], device=self.at.device)
            for slots in self.slots.values():
                for slot in slots:
                    slot[to, :, :used] = slot[source, :, :used]
        self.held = [self.held[i] for i in order]
        return order

    def copy(self, smaller: KVCache) -> None:
        """Take over what a smaller cache holds."""
        self.begin(smaller.prefix_ids)
        for layer, slots in smaller.slots.items():
            self.allocate(layer, *slots)
            for new, old in zip(self.slots[layer], slots):
                new[: old.shape[0], :, : old.shape[2]] = old
            for new, old in zip(self.prefix[layer], smaller.prefix[layer]):
                new[:, : old.shape[1]] = old

    def bytes(self) -> int:
        """What the keys and values take."""
        layers = [*self.slots.values(), *self.prefix.values()]
        return sum(x.nbytes for tensors in layers for x in tensors)


@torch.compiler.disable  # inside a compiled layer the layer's number would compile each anew
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: KVCache | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface over `KVCache`: query (B, H, S, D) → (B, S, H, D)."""
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd:
        problem = f"uses {odd[0]}"
    elif kv is None:
        problem = "does not hand on what it is called with"
    elif module.layer_idx in kv.attended:
        problem = "attends twice in a layer"
    elif kv.fused and key.shape[3] != value.shape[3]:
        problem = f"has keys of size {key.shape[3]} and values of size {value.shape[3]}"
    else:
        kv.attended.add(module.layer_idx)
        return kv.store(module.layer_idx, query, key, value, scaling).transpose(1, 2), None
    raise RolloutError(
        f"{type(module).__name__} {problem}, which TorchEngine cannot do; use a Qwen2/2.5/3, Llama "
        "or SmolLM2 model"
    )


AttentionInterface.register("rollout", _attention)
