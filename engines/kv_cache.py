"""Keys and values of `TorchEngine`'s sequences: each prompt once, each response in a slot.

Shapes: R rows (running sequences), T tokens of a pass, H query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from engines.base import operations
from engines.operations import TILE_ROWS


@dataclass(eq=False)
class Prompt:
    """A stored prompt; `last`: the hidden state of its last token."""

    number: int
    length: int
    users: int = 0  # its unfinished requests
    last: Tensor | None = None


@dataclass
class Piece:
    """Tokens to compute, of a prompt (slot None) or of a slot, where `past` tokens precede them."""

    ids: tuple[int, ...]
    prompt: Prompt
    slot: int | None = None
    past: int = 0

    @property
    def position(self) -> int:
        """Position of the first token in its sequence."""
        return self.past + (0 if self.slot is None else self.prompt.length)


@dataclass
class Rows:
    """Inputs of a decode step per row, int64 (R,), at fixed addresses for CUDA graphs."""

    token: Tensor  # the newest
    at: Tensor  # index in the slot where it is stored
    runs: Tensor  # 0 for idle rows
    slot: Tensor
    prompt: Tensor  # its number
    begin: Tensor  # its length
    first: Tensor  # first row of each tile (neighbouring rows of one prompt)
    count: Tensor  # rows of each tile, 0 for no tile


class KVCache:
    """Keys and values of prompts, and of what follows them in slots.

    Prompt 0 is the common beginning of a call's prompts, which the others copy; the last slot is
    for idle rows. `held`: slot → (ids of a finished request with its prompt, Prompt).
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        prompts: int,
        prompt_capacity: int,
        steps: int,
        device: torch.device,
    ):
        self.sizes, self.device = (rows, capacity, prompts, prompt_capacity, steps), device
        self.operations = operations(device)
        self.slots: dict[int, list[Tensor]] = {}  # layer → (rows + 1, K, capacity, D) keys, values
        self.prompts: dict[int, list[Tensor]] = {}  # (prompts + 1, K, prompt_capacity, D)
        self.state = torch.zeros(len(fields(Rows)), rows, dtype=torch.int64, device=device)
        self.rows = Rows(*self.state)
        # sampling options and samples of each row
        self.temperature, self.top_p = torch.ones(2, rows, device=device)
        self.uniform = torch.zeros(steps, rows, dtype=torch.float64, device=device)
        self.ids = torch.zeros(steps, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(steps, rows, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.attended: set[int] = set()  # layers done in this pass
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.forget()

    # ---- which sequence is where

    def forget(self) -> None:
        """Drop everything stored."""
        self.prefix: tuple[int, ...] = ()
        self.held: dict[int, tuple[tuple[int, ...], Prompt]] = {}
        self.stored: dict[tuple[int, ...], Prompt] = {}  # prompts of this call
        self.free_slots = list(range(self.sizes[0]))[::-1]
        self.free_prompts = list(range(1, self.sizes[2] + 1))[::-1]

    def continued(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Prompt → slot of the longest held sequence that it continues, each slot once."""
        found: dict[tuple[int, ...], int] = {}
        for prompt in prompts:
            fits = [
                (len(ids), slot)
                for slot, (ids, _) in self.held.items()
                if len(ids) < len(prompt) and prompt[len(ids) - 1] == ids[-1]
                if slot not in found.values() and prompt[: len(ids)] == ids
            ]
            if fits:
                found[prompt] = max(fits)[1]
        return found

    def take_slot(self) -> int | None:
        """A free slot, else the one held longest, else None."""
        if not self.free_slots and self.held:
            self._drop(next(iter(self.held)))
        return self.free_slots.pop() if self.free_slots else None

    def new_prompt(self, ids: tuple[int, ...]) -> Prompt | None:
        """Reserve a place for a prompt, evicting held sequences if needed; None if all are used."""
        for slot, (_, prompt) in list(self.held.items()):
            if not self.free_prompts and not prompt.users:
                self._drop(slot)
        if not self.free_prompts:
            return None
        self.stored[ids] = Prompt(self.free_prompts.pop(), len(ids))
        return self.stored[ids]

    def _drop(self, slot: int) -> None:
        _, prompt = self.held.pop(slot)
        self.free_slots.append(slot)
        self._free_unused(prompt)

    def _free_unused(self, prompt: Prompt) -> None:
        if not prompt.users and all(p is not prompt for _, p in self.held.values()):
            self.free_prompts.append(prompt.number)
            self.stored = {ids: p for ids, p in self.stored.items() if p is not prompt}

    def release(self, slot: int, prompt: Prompt, ids: tuple[int, ...]) -> None:
        """End a request and hold `ids` in its slot; without ids the slot is freed."""
        prompt.users -= 1
        self.held[slot] = ids, prompt
        if not ids:
            self._drop(slot)

    def copy(self, smaller: KVCache) -> None:
        """Copy the content of a smaller cache."""
        self.prefix, self.held, self.stored = smaller.prefix, smaller.held, smaller.stored
        for name in ("slots", "prompts"):
            for layer, tensors in getattr(smaller, name).items():
                self._allocate(layer, *tensors)
                for new, old in zip(getattr(self, name)[layer], tensors):
                    new[: len(old), :, : old.shape[2]] = old
        taken = {prompt.number for _, prompt in self.held.values()}
        self.free_slots = [i for i in self.free_slots if i not in self.held]
        self.free_prompts = [i for i in self.free_prompts if i not in taken]

    def bytes(self) -> int:
        """Bytes of all keys and values."""
        layers = [*self.slots.values(), *self.prompts.values()]
        return sum(x.nbytes for tensors in layers for x in tensors)

    # ---- passes

    def begin_pieces(self, pieces: list[Piece]) -> None:
        """Let the next pass compute these, concatenated."""
        self.pieces = pieces

    def begin_steps(self, rows: list[tuple[int, int, int, Prompt]], count: int) -> None:
        """Let the next passes compute a token per row: (token, tokens in the slot, slot, prompt),
        sorted by prompt; more rows, up to `count`, are idle."""
        state = [[token, at, 1, slot, p.number, p.length] for token, at, slot, p in rows]
        state += [[0, 0, 0, self.sizes[0], 0, 0]] * (count - len(rows))
        tiles: list[list[int]] = []
        for row, (*_, prompt) in enumerate(rows):
            if tiles and tiles[-1][1] < TILE_ROWS and rows[row - 1][3] is prompt:
                tiles[-1][1] += 1
            else:
                tiles.append([row, 1])
        tiles += [[0, 0]] * (count - len(tiles))
        state = np.array([s + t for s, t in zip(state, tiles)]).T.copy()
        self.state[:, :count] = torch.from_numpy(state).to(self.device)
        self.step.zero_()
        self.pieces = []

    def take(self, ids: Tensor, logprobs: Tensor) -> None:
        """Store sampled ids (R,) and logprobs (R,); the ids are the next input."""
        count = len(ids)
        self.rows.token[:count] = ids
        self.rows.at[:count] += 1
        self.ids[:, :count].index_copy_(0, self.step, ids[None])
        self.logprobs[:, :count].index_copy_(0, self.step, logprobs[None])
        self.step += 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store a pass's keys and values and attend: q (T, H, D), k, v (T, K, D) → (T, H, D)."""
        self._allocate(layer, k[None].transpose(1, 2), v[None].transpose(1, 2))
        slots, prompts = self.slots[layer], self.prompts[layer]
        if not self.pieces:
            return self.operations.decode_attention(q, k, v, slots, prompts, self.rows, scale)
        sizes = [len(piece.ids) for piece in self.pieces]
        parts = zip(self.pieces, *(x.split(sizes) for x in (q, k, v)))
        return torch.cat([self._attend_piece(layer, *part, scale) for part in parts])

    def _attend_piece(
        self, layer: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        behind, seen = piece.slot is not None, []
        end = piece.past + len(q)
        for prompts, slots, x in zip(self.prompts[layer], self.slots[layer], (k, v)):
            prompt = prompts[piece.prompt.number]
            own = slots[piece.slot] if behind else prompt  # (K, capacity, D)
            own[:, piece.past : end] = x.transpose(0, 1)
            own = own[:, :end]
            if behind:
                own = torch.cat([prompt[:, : piece.prompt.length], own], 1)
            seen.append(own[None])
        q, length = q.transpose(0, 1)[None], seen[0].shape[2]
        if length == q.shape[2]:
            mask = {"is_causal": True}
        else:  # a tensor mask would rule out flash attention
            mask = {"attn_mask": causal_lower_right(q.shape[2], length)}
        out = scaled_dot_product_attention(q, *seen, **mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def copy_prefix(self, prompt: Prompt) -> None:
        """Copy the common beginning into a prompt's place."""
        for tensors in self.prompts.values():
            for x in tensors:
                x[prompt.number, :, : len(self.prefix)] = x[0, :, : len(self.prefix)]

    def _allocate(self, layer: int, *like: Tensor) -> None:
        """Allocate a layer's tensors for keys and values like these (…, K, …, D)."""
        if layer not in self.slots:
            rows, capacity, prompts, shared, _ = self.sizes
            for stored, n, size in ((self.slots, rows, capacity), (self.prompts, prompts, shared)):
                stored[layer] = [x.new_zeros(n + 1, x.shape[1], size, x.shape[3]) for x in like]
