"""Micro-batches of one update, and the groups dealt out to the ranks by their length."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import distributed
from engines.base import Rollout
from packing import common_beginning, one_thread, pack, Packed
from rollout import RolloutBatch


@dataclass
class MicroBatch:
    """What one forward and backward pass takes, on the device: b sequences of T positions."""

    rows: list[int]  # which of the batch they are; none where this rank only keeps the others company
    part: RolloutBatch  # (b, …)
    packed: Packed  # the same tokens, laid out
    ref_logprobs: Tensor | None = None  # (b, T) of the reference
    old_logprobs: Tensor | None = None  # (b, T) of the policy that sampled; None where that is the policy as it stands


def micro_batch_rows(batch: RolloutBatch, rows: list[int], budget: int) -> list[list[int]]:
    """`rows` cut into pieces of at most `budget` tokens (at least one sequence each), counted as they are laid out.

    Groups stay together where they fit, so that their prompt is computed once; pieces are filled with the longest
    groups first, each where there is room.
    """
    lengths, prompts = batch.attention_mask.sum(-1).tolist(), batch.prompt_lengths.tolist()
    groups: dict[int, list[int]] = {}
    for row, group in zip(rows, batch.group_ids[rows].tolist()):
        groups.setdefault(group, []).append(row)
    tokens = batch.tokens.numpy()
    common = common_beginning([tokens[g[0], :prompts[g[0]]] for g in groups.values()]) if groups else 0
    whole: list[tuple[int, list[int]]] = []  # tokens beside the common beginning, rows of one group
    for members in groups.values():
        for row in members:
            own = lengths[row] - 1 - prompts[row]
            if row == members[0] or common + whole[-1][0] + own > budget:
                whole.append((prompts[row] - common, []))
            whole[-1] = whole[-1][0] + own, whole[-1][1] + [row]
    pieces: list[tuple[int, list[int]]] = []
    for size, members in sorted(whole, key=lambda w: -w[0]):
        at = next((i for i, (used, _) in enumerate(pieces) if used + size <= budget), None)
        if at is None:
            pieces.append((common, []))
            at = len(pieces) - 1
        pieces[at] = pieces[at][0] + size, pieces[at][1] + members
    return [members for _, members in pieces]


@one_thread()
def plan_updates(policy, batch: RolloutBatch, cfg, where: distributed.Dist) -> list[list[MicroBatch]]:
    """The batch (on the CPU) as `updates_per_batch` optimizer steps of micro-batches, as many on every rank.

    Everyone joins every collective: with a sequence that trains nothing where there is nothing else to do.
    """
    plans = []
    for share in torch.arange(len(batch)).tensor_split(cfg.updates_per_batch):
        pieces = micro_batch_rows(batch, share.tolist(), cfg.micro_batch_tokens)
        pieces += [[]] * (max(1, *distributed.gather_objects(len(pieces))) - len(pieces))
        plan = []
        for rows in pieces:
            part = batch.select(torch.tensor(rows or [0]))
            if not rows:
                part = replace(part, tokens=part.tokens[:, :2], attention_mask=part.attention_mask[:, :2],
                               loss_mask=torch.zeros(1, 1), logprobs=torch.zeros(1, 1),
                               prompt_lengths=torch.ones(1, dtype=torch.int64))
            packed = pack(policy, part.tokens, part.attention_mask, part.loss_mask,
                            (part.prompt_lengths, part.group_ids))
            plan.append(MicroBatch(rows, part.to(where.device), packed))
        plans.append(plan)
    return plans


def assign_groups(tokens: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Who trains which group: tokens[rank][i] of the groups as sampled → for each rank its groups (rank, i).

    The rank with the most and the rank with the least swap groups, or one moves, whatever makes them most alike, until
    they differ by less than a hundredth of the mean: few groups travel.
    """
    owned = [[(n, rank, i) for i, n in enumerate(own)] for rank, own in enumerate(tokens)]
    for _ in range(sum(map(len, tokens))):
        loads = [sum(n for n, *_ in own) for own in owned]
        high, low = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[low]
        swaps = [(abs(2 * (a[0] - b[0]) - gap), a, b) for a in owned[high] for b in [(0, -1, -1), *owned[low]]
                 if 0 < a[0] - b[0] < gap]
        if gap * len(loads) <= 0.01 * sum(loads) or not swaps:
            break
        _, a, b = min(swaps)
        owned[high].remove(a)
        owned[low].append(a)
        if b[0]:
            owned[low].remove(b)
            owned[high].append(b)
    return [sorted((rank, i) for _, rank, i in own) for own in owned]


def share_rollouts(rollouts: list[Rollout], pad_id: int, where: distributed.Dist) -> tuple[list[Rollout], list[tuple[int, int]]]:
    """The rollouts that this rank trains, and where each was sampled: (rank, its number there).  A collective.

    Prompts are dealt out before their responses' lengths are known, so whole groups change hands after sampling until
    every rank has about the same number of tokens.  Rollouts that the engine could not finish are left out; a rank
    without any takes part with one token that is not trained, sampled nowhere: (-1, 0).
    """
    groups: dict[int, list[int]] = {}
    for i, r in enumerate(rollouts):
        if r.end != "engine_error" and any(r.loss_mask):
            groups.setdefault(r.group_id, []).append(i)
    sizes = [len(rollouts[g[0]].prompt_ids) + sum(len(rollouts[i].response_ids) for i in g) for g in groups.values()]
    plan, own = assign_groups(distributed.gather_objects(sizes)), list(groups.values())
    leaving = {i: [(k, rollouts[k]) for k in own[i]] for rank, part in enumerate(plan) if rank != where.rank
               for home, i in part if home == where.rank}
    moved = distributed.gather_objects(leaving)
    held, origins = [], []
    for number, (home, i) in enumerate(plan[where.rank]):
        for k, r in [(k, rollouts[k]) for k in own[i]] if home == where.rank else moved[home][i]:
            held.append(replace(r, group_id=number))
            origins.append((home, k))
    return (held, origins) if held else ([Rollout([pad_id], [pad_id], [0.0], [0], 0, "eos")], [(-1, 0)])
