"""Keys and values of `TorchEngine`'s sequences: each prompt once, each response in a slot.

Shapes: R rows of the running batch, T tokens of a pass, H query heads, K key/value heads, D head
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
    users: int = 0  # requests that wait or run behind it
    last: Tensor | None = None


@dataclass
class Piece:
    """Tokens to compute, of a prompt or in a slot behind one, after `past` others there."""

    ids: tuple[int, ...]
    prompt: Prompt
    slot: int | None = None
    past: int = 0

    @property
    def position(self) -> int:
        """Of the first token in its sequence."""
        return self.past + (0 if self.slot is None else self.prompt.length)


@dataclass
class Rows:
    """Inputs of a decode step for each row, int64 (R,), at fixed addresses (CUDA graphs)."""

    token: Tensor  # the newest
    at: Tensor  # tokens in the row's slot, so where this one will be stored
    runs: Tensor  # 0 where nobody reads the result
    slot: Tensor
    prompt: Tensor  # its number
    begin: Tensor  # its length
    first: Tensor  # of each tile of rows with one prompt: the first row
    count: Tensor  # and the number of rows, 0 for no tile


class KVCache:
    """Keys and values of prompts, and of the sequences behind them in slots.

    Prompt 0 is the common beginning of all prompts of a call, which the others copy. The last slot
    is for idle rows. `held`: slot → ids of a finished request, prompt included, and its prompt.
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
        self.prompts: dict[int, list[Tensor]] = {}  # (prompts + 1, K, prompt_capacity, D) alike
        self.state = torch.zeros(len(fields(Rows)), rows, dtype=torch.int64, device=device)
        self.rows = Rows(*self.state)
        # how each row samples, and its samples so far
        self.temperature, self.top_p = torch.ones(2, rows, device=device)
        self.uniform = torch.zeros(steps, rows, dtype=torch.float64, device=device)
        self.ids = torch.zeros(steps, rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(steps, rows, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.attended: set[int] = set()  # layers that this pass has been through
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.forget()

    # ---- which sequence is where

    def forget(self) -> None:
        """Hold nothing."""
        self.prefix: tuple[int, ...] = ()
        self.held: dict[int, tuple[tuple[int, ...], Prompt]] = {}
        self.stored: dict[tuple[int, ...], Prompt] = {}  # prompts of this call
        self.free_slots = list(range(self.sizes[0]))[::-1]
        self.free_prompts = list(range(1, self.sizes[2] + 1))[::-1]

    def continued(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Prompts that continue a held sequence → the slot of the longest one."""
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
        """A place for a prompt, evicting held sequences if needed; None if all are in use."""
        for slot, (_, prompt) in list(self.held.items()):
            if not self.free_prompts and not prompt.users:
                self._drop(slot)
        if not self.free_prompts:
            return None
        self.stored[ids] = Prompt(self.free_prompts.pop(), len(ids))
        return self.stored[ids]

    def _drop(self, slot: int) -> None:
        """Hold this sequence no longer."""
        _, prompt = self.held.pop(slot)
        self.free_slots.append(slot)
        self._free_unused(prompt)

    def _free_unused(self, prompt: Prompt) -> None:
        if not prompt.users and all(p is not prompt for _, p in self.held.values()):
            self.free_prompts.append(prompt.number)
            self.stored = {ids: p for ids, p in self.stored.items() if p is not prompt}

    def release(self, slot: int, prompt: Prompt, ids: tuple[int, ...]) -> None:
        """End a request; its slot holds `ids` for prompts that continue them."""
        prompt.users -= 1
        self.held[slot] = ids, prompt
        if not ids:
            self._drop(slot)

    def copy(self, smaller: KVCache) -> None:
        """Take over what a smaller cache holds."""
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
        """What the keys and values take."""
        layers = [*self.slots.values(), *self.prompts.values()]
        return sum(x.nbytes for tensors in layers for x in tensors)

    # ---- passes

    def begin_pieces(self, pieces: list[Piece]) -> None:
        """The next pass computes these, one behind the other."""
        self.pieces = pieces

    def begin_steps(self, rows: list[tuple[int, int, int, Prompt]], count: int) -> None:
        """The next passes compute a token per row: (token, tokens in the slot, slot, prompt), rows
        of a prompt side by side; the other rows up to `count` are idle."""
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
        """Store sampled ids (R,) and logprobs (R,); the ids are the next step's input."""
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
        else:  # not a tensor: on a GPU flash attention does it, with a tensor the math kernel
            mask = {"attn_mask": causal_lower_right(q.shape[2], length)}
        out = scaled_dot_product_attention(q, *seen, **mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def copy_prefix(self, prompt: Prompt) -> None:
        """Let a prompt begin with what all begin with."""
        for tensors in self.prompts.values():
            for x in tensors:
                x[prompt.number, :, : len(self.prefix)] = x[0, :, : len(self.prefix)]

    def _allocate(self, layer: int, *like: Tensor) -> None:
        """Make a layer's tensors, for the heads of keys and values (…, K, …, D)."""
        if layer not in self.slots:
            rows, capacity, prompts, shared, _ = self.sizes
            for stored, n, size in ((self.slots, rows, capacity), (self.prompts, prompts, shared)):
                stored[layer] = [x.new_zeros(n + 1, x.shape[1], size, x.shape[3]) for x in like]
