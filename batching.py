"""Rollouts → micro-batches: deal groups out to ranks and pack them to a token budget.

Shapes: B sequences, b of them in a micro-batch, T predicted positions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distributed import Dist, gather_objects
from engines.base import Rollout
from packing import Packed, one_thread, pack
from rollout import RolloutBatch, collate_rollouts


@dataclass
class MicroBatch:
    """Input of one forward and backward pass, on the device."""

    part: RolloutBatch  # (b, …)
    packed: Packed  # the same tokens, laid out for the model
    ref_logprobs: Tensor | None = None  # (b, T) of the reference (grpo.add_reference)
    # (b, T) of the policy that sampled (grpo.update); None: of the present policy
    old_logprobs: Tensor | None = None


@dataclass
class Update:
    """One optimizer step of this rank."""

    micro_batches: list[MicroBatch]
    loss_mask: Tensor  # (B, T), left out sequences included


def training_batch(rollouts: list[Rollout], advantages: list[float], pad_id: int) -> RolloutBatch:
    """The batch of this rank's rollouts, or of one untrained token: all ranks join collectives."""
    idle = Rollout([pad_id], [pad_id], [0.0], [0], 0, "eos")
    return collate_rollouts(rollouts or [idle], advantages or [0.0], pad_id)


def deal_out(
    rollouts: list[Rollout], advantages: list[float | None], dist: Dist
) -> tuple[list[Rollout], list[float]]:
    """The rollouts that this rank trains, and their advantages (a collective).

    Groups go, longest first, to the rank with the fewest tokens so far, and are renumbered. Failed
    rollouts (advantage None) and those without a trained token are left out.
    """
    own: dict[int, list[tuple[Rollout, float]]] = {}
    for r, advantage in zip(rollouts, advantages):
        if advantage is not None and any(r.loss_mask):
            own.setdefault(r.group_id, []).append((r, advantage))
    sizes = {
        group: len(rows[0][0].prompt_ids) + sum(len(r.response_ids) for r, _ in rows)
        for group, rows in own.items()
    }
    owners = assign_groups(gather_objects(sizes))
    leaving = {group: rows for group, rows in own.items() if owners[dist.rank, group] != dist.rank}
    arrived = gather_objects(leaving)
    mine = sorted(key for key, owner in owners.items() if owner == dist.rank)
    held = [
        (replace(r, group_id=number), advantage)
        for number, (home, group) in enumerate(mine)
        for r, advantage in (own if home == dist.rank else arrived[home])[group]
    ]
    return [r for r, _ in held], [advantage for _, advantage in held]


def assign_groups(sizes: list[dict[int, int]]) -> dict[tuple[int, int], int]:
    """(home rank, group) → rank that trains it, from each rank's group → tokens. Ties: the home
    rank, then the lowest."""
    load, owners = [0] * len(sizes), {}
    groups = [(size, rank, group) for rank, own in enumerate(sizes) for group, size in own.items()]
    for size, home, group in sorted(groups, key=lambda g: -g[0]):
        owner = home if load[home] == min(load) else load.index(min(load))
        owners[home, group] = owner
        load[owner] += size
    return owners


def micro_batch_rows(batch: RolloutBatch, rows: list[int], budget: int) -> list[list[int]]:
    """Split `rows` into pieces of at most `budget` packed tokens, or of one sequence; groups stay
    together if they fit, the longest first."""
    lengths, prompts = batch.attention_mask.sum(-1).tolist(), batch.prompt_lengths.tolist()
    groups: dict[int, list[int]] = {}
    for row, group in zip(rows, batch.group_ids[rows].tolist()):
        groups.setdefault(group, []).append(row)
    tokens = batch.tokens.numpy()
    firsts = [tokens[g[0], : prompts[g[0]]].tolist() for g in groups.values()]
    common = len(os.path.commonprefix(firsts))
    parts: list[tuple[int, list[int]]] = []  # tokens after the common beginning, rows
    for members in groups.values():
        for row in members:
            response = lengths[row] - 1 - prompts[row]
            if row == members[0] or common + parts[-1][0] + response > budget:
                parts.append((prompts[row] - common, []))
            parts[-1] = parts[-1][0] + response, parts[-1][1] + [row]
    pieces: list[tuple[int, list[int]]] = []
    for size, members in sorted(parts, key=lambda part: -part[0]):
        i = next((i for i, (used, _) in enumerate(pieces) if used + size <= budget), len(pieces))
        if i == len(pieces):
            pieces.append((common, []))
        pieces[i] = pieces[i][0] + size, pieces[i][1] + members
    return [members for _, members in pieces]


@one_thread()
def plan_updates(
    policy: torch.nn.Module,
    batch: RolloutBatch,
    device: torch.device,
    budget: int,
    updates: int = 1,
    skip_flat: bool = False,
) -> list[Update]:
    """Split a CPU batch into optimizer steps of micro-batches of up to `budget` tokens, equally
    many on all ranks (a collective). `skip_flat` leaves out sequences of advantage 0."""
    plans = []
    for share in torch.arange(len(batch)).tensor_split(updates):
        rows = [i for i in share.tolist() if not skip_flat or float(batch.advantages[i])]
        pieces = micro_batch_rows(batch, rows, budget)
        pieces += [[]] * (max(1, *gather_objects(len(pieces))) - len(pieces))
        # where only other ranks have work
        idle = training_batch([], [], int(batch.tokens[0, 0]))
        parts = [batch.select(torch.tensor(rows)) if rows else idle for rows in pieces]
        micro_batches = []
        for part in parts:
            groups = part.prompt_lengths, part.group_ids
            packed = pack(policy, part.tokens, part.attention_mask, part.loss_mask, groups)
            micro_batches.append(MicroBatch(part.to(device), packed))
        plans.append(Update(micro_batches, batch.loss_mask[share]))
    return plans
