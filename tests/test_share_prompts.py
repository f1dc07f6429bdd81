"""One computation of a group's prompt gives what one computation a response gives: values, gradients, any cut of the rows."""

from __future__ import annotations

import random

import pytest
import torch

import model as M
import tiny
from rollout import Rollout, collate_rollouts


def batch_of(seed: int, groups: int = 3, size: int = 4):
    rng = random.Random(seed)
    rollouts = []
    for g in range(groups):
        prompt = [rng.randrange(5, 200) for _ in range(rng.randrange(1, 12))]
        for _ in range(size):
            n = rng.randrange(1, 9)
            rollouts.append(Rollout(prompt, [rng.randrange(5, 200) for _ in range(n)], [-1.0] * n, [1] * n, g, "eos"))
    rng.shuffle(rollouts)
    return collate_rollouts(rollouts, torch.zeros(len(rollouts)), 0)


@pytest.mark.parametrize("kind, tied", [("qwen2", True), ("llama", False), ("qwen3", True)])
@pytest.mark.parametrize("row_tokens", [1, 15, 2048])
def test_same_log_probabilities_and_gradients(kind, tied, row_tokens, monkeypatch):
    monkeypatch.setattr(M, "ROW_TOKENS", row_tokens)
    model = M.prepare_causal_lm(tiny.tiny_lm(kind=kind, tied=tied))
    for seed in range(3):
        batch = batch_of(seed)
        weights = torch.randn(batch.loss_mask.shape)
        results = []
        for groups in (None, (batch.prompt_lengths, batch.group_ids)):
            logprobs, entropy = M.token_logprobs(model, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask, True, groups)
            model.zero_grad()
            (logprobs * weights + entropy * weights.flip(0)).sum().backward()
            results.append((logprobs.detach(), entropy.detach(), [p.grad.clone() for p in model.parameters()]))
        (a, ea, ga), (b, eb, gb) = results
        assert (a - b).abs().max() < 2e-5 and (ea - eb).abs().max() < 2e-5
        assert all((x - y).abs().max() <= 1e-4 * x.abs().max() + 1e-6 for x, y in zip(ga, gb))


def test_prompt_positions_too_and_each_prompt_once_a_row():
    batch = batch_of(5, groups=2, size=3)
    layout = M.share_prompts(batch.tokens, batch.attention_mask, batch.prompt_lengths, batch.group_ids)
    responses = batch.attention_mask.sum(-1) - batch.prompt_lengths
    prompts = {int(g): int(p) for g, p in zip(batch.group_ids, batch.prompt_lengths)}
    assert len(layout.tokens) == 2  # one row a group, and in it the prompt once and every response less its last token
    assert int((layout.mask[:, 0].diagonal(dim1=-2, dim2=-1)).sum()) >= sum(prompts.values()) + int((responses - 1).sum())
    model = M.prepare_causal_lm(tiny.tiny_lm())
    with torch.no_grad():
        a = M.token_logprobs(model, batch.tokens, batch.attention_mask)
        b = M.token_logprobs(model, batch.tokens, batch.attention_mask, groups=(batch.prompt_lengths, batch.group_ids))
    real = batch.attention_mask[:, 1:].bool()
    assert (a - b)[real].abs().max() < 2e-5
