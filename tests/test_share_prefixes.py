"""One computation of a group's prompt gives what one computation a response gives: values and gradients."""

from __future__ import annotations

import random

import pytest
import tiny
import torch

from engines.base import Rollout
from model import prepare_causal_lm
from packing import share_prefixes, token_logprobs
from rollout import collate_rollouts


def batch_of(seed: int, groups: int = 3, size: int = 4, shared: int = 0):
    rng = random.Random(seed)
    rollouts, begin = [], [rng.randrange(5, 200) for _ in range(shared)]
    for g in range(groups):
        prompt = begin + [rng.randrange(5, 200) for _ in range(rng.randrange(1, 12))]
        for _ in range(size):
            n = rng.randrange(1, 9)
            rollouts.append(
                Rollout(
                    prompt, [rng.randrange(5, 200) for _ in range(n)], [-1.0] * n, [1] * n, g, "eos"
                )
            )
    rng.shuffle(rollouts)
    return collate_rollouts(rollouts, torch.zeros(len(rollouts)), 0)


@pytest.mark.parametrize("kind, tied", [("qwen2", True), ("llama", False), ("qwen3", True)])
def test_same_log_probabilities_and_gradients(kind, tied):
    model = prepare_causal_lm(tiny.tiny_lm(kind=kind, tied=tied))
    for seed in range(3):
        batch = batch_of(seed, shared=5 * seed)
        weights = torch.randn(batch.loss_mask.shape)
        results = []
        for groups in (None, (batch.prompt_lengths, batch.group_ids)):
            logprobs, entropy = token_logprobs(
                model, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask, True, groups
            )
            model.zero_grad()
            (logprobs * weights + entropy * weights.flip(0)).sum().backward()
            results.append(
                (logprobs.detach(), entropy.detach(), [p.grad.clone() for p in model.parameters()])
            )
        (a, ea, ga), (b, eb, gb) = results
        assert (a - b).abs().max() < 2e-5 and (ea - eb).abs().max() < 2e-5
        assert all((x - y).abs().max() <= 1e-4 * x.abs().max() + 1e-6 for x, y in zip(ga, gb))


def test_prompt_positions_too():
    batch = batch_of(5, groups=2, size=3, shared=4)
    model = prepare_causal_lm(tiny.tiny_lm())
    with torch.no_grad():
        a = token_logprobs(model, batch.tokens, batch.attention_mask)
        b = token_logprobs(
            model,
            batch.tokens,
            batch.attention_mask,
            groups=(batch.prompt_lengths, batch.group_ids),
        )
    real = batch.attention_mask[:, 1:].bool()
    assert (a - b)[real].abs().max() < 2e-5


@pytest.mark.parametrize("shared", [0, 7])
def test_what_is_shared_is_computed_once(shared):
    """The common beginning once, the rest of each prompt once, each response less its last token."""
    batch = batch_of(5, groups=4, size=3, shared=shared)
    layout = share_prefixes(
        batch.tokens, batch.attention_mask, batch.prompt_lengths, batch.group_ids
    )
    rests = {int(g): int(p) - shared for g, p in zip(batch.group_ids, batch.prompt_lengths)}
    responses = batch.attention_mask.sum(-1) - batch.prompt_lengths - 1
    assert layout.tokens.shape == (1, shared + sum(rests.values()) + int(responses.sum()))


def test_one_group_one_sequence_and_a_prompt_that_is_the_whole_beginning():
    prompts = [[7, 8, 9], [7, 8, 9, 10]]
    rollouts = [
        Rollout(p, [11 + i, 2], [-1.0] * 2, [1] * 2, g, "eos")
        for g, p in enumerate(prompts)
        for i in range(2)
    ]
    model = prepare_causal_lm(tiny.tiny_lm())
    for chosen in (rollouts, rollouts[:2], rollouts[:1], rollouts[1:3]):
        batch = collate_rollouts(chosen, torch.zeros(len(chosen)), 0)
        with torch.no_grad():
            a = token_logprobs(model, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask)
            b = token_logprobs(
                model,
                batch.tokens,
                batch.attention_mask,
                0.7,
                batch.loss_mask,
                groups=(batch.prompt_lengths, batch.group_ids),
            )
        assert (a - b).abs().max() < 2e-5


def test_a_sequence_without_a_response_leaves_the_others_alone():
    model = prepare_causal_lm(tiny.tiny_lm())
    rows = [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11], [5, 6, 20, 21, 30, 31]]
    tokens = torch.tensor([row + [0] * (7 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (7 - len(row)) for row in rows])
    groups = (torch.tensor([4, 4, 4]), torch.tensor([0, 0, 1]))
    with torch.no_grad():
        a = token_logprobs(model, tokens, mask)
        b = token_logprobs(model, tokens, mask, groups=groups)
    real = mask[:, 1:].bool()
    assert (a - b)[real].abs().max() < 2e-5
