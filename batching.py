"""From rollouts to micro-batches: groups dealt out to the ranks by length, then packed to a budget
of tokens.

Shapes: B sequences, T predicted positions; b sequences of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distributed import Dist, gather_objects
from engines.base import Rollout
from packing import Packed, common_beginning, one_thread, pack
from rollout import RolloutBatch, collate_rollouts


@dataclass
class MicroBatch:
    """What one forward and backward pass takes, on the device."""

    part: RolloutBatch  # (b, …)
    packed: Packed  # the same tokens, laid out for the model
    ref_logprobs: Tensor | None = None  # (b, T) of the reference
    # (b, T) of the policy that sampled; None: the policy as it stands
    old_logprobs: Tensor | None = None


@dataclass
class Update:
    """One optimizer step of this rank."""

    micro_batches: list[MicroBatch]
    loss_mask: Tensor  # (B, T) of all its sequences, those that need no gradient included
    advantages: Tensor  # (B,)


def training_batch(rollouts: list[Rollout], advantages: list[float], pad_id: int) -> RolloutBatch:
    """The batch of this rank's rollouts; where it has none, of a token that is not trained: every
    rank takes part in every collective."""
    if rollouts:
        return collate_rollouts(rollouts, advantages, pad_id)
    return collate_rollouts([Rollout([pad_id], [pad_id], [0.0], [0], 0, "eos")], [0.0], pad_id)


def deal_out(
    rollouts: list[Rollout], advantages: list[float | None], dist: Dist
) -> tuple[list[Rollout], list[float]]:
    """The rollouts that this rank trains, with their advantages. A collective.

    Groups are sampled before their lengths are known, so whole groups change hands afterwards: the
    longest first, each to the rank with the fewest tokens so far. Group ids are numbered anew. A
    rollout whose advantage is None (it failed) or that has no trained token is left out.
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
    """(home rank, group) → the rank that trains it, from the tokens of every rank's groups."""
    load, owners = [0] * len(sizes), {}
    groups = [(size, rank, group) for rank, own in enumerate(sizes) for group, size in own.items()]
    for size, home, group in sorted(groups, key=lambda g: (-g[0], g[1], g[2])):
        owner = home if load[home] == min(load) else load.index(min(load))
        owners[home, group] = owner
        load[owner] += size
    return owners


def micro_batch_rows(batch: RolloutBatch, rows: list[int], budget: int) -> list[list[int]]:
    """`rows` cut into pieces of at most `budget` tokens (at least one sequence each), counted as
    they are packed.

    Groups stay together where they fit, so that their prompt is computed once; pieces are filled
    with the longest groups first, each where there is room.
    """
    lengths, prompts = batch.attention_mask.sum(-1).tolist(), batch.prompt_lengths.tolist()
    groups: dict[int, list[int]] = {}
    for row, group in zip(rows, batch.group_ids[rows].tolist()):
        groups.setdefault(group, []).append(row)
    tokens = batch.tokens.numpy()
    common = (
        common_beginning([tokens[g[0], : prompts[g[0]]] for g in groups.values()]) if groups else 0
    )
    parts: list[tuple[int, list[int]]] = []  # tokens beside the common beginning, rows of one group
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
    """The batch (on the CPU) as optimizer steps of micro-batches of up to `budget` tokens. A
    collective.

    `skip_flat`: sequences whose advantage is 0 need no gradient and are not computed. Every rank
    has as many micro-batches: one that trains nothing where there is nothing else to do.
    """
    plans = []
    for share in torch.arange(len(batch)).tensor_split(updates):
        rows = [i for i in share.tolist() if not skip_flat or float(batch.advantages[i])]
        pieces = micro_batch_rows(batch, rows, budget)
        pieces += [[]] * (max(1, *gather_objects(len(pieces))) - len(pieces))
        parts = [batch.select(torch.tensor(rows)) if rows else idle(batch) for rows in pieces]
        plans.append(
            Update(
                [
                    MicroBatch(
                        part.to(device),
                        pack(
                            policy,
                            part.tokens,
                            part.attention_mask,
                            part.loss_mask,
                            (part.prompt_lengths, part.group_ids),
                        ),
                    )
                    for part in parts
                ],
                batch.loss_mask[share],
                batch.advantages[share],
            )
        )
    return plans


def idle(batch: RolloutBatch) -> RolloutBatch:
    """Two tokens of which nothing is trained: what a rank computes while only others have work."""
    return RolloutBatch(
        batch.tokens[:1, :2],
        batch.attention_mask[:1, :2],
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        torch.zeros(1),
        torch.ones(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
