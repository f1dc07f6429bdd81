"""What the tests of training on one process and on several share: a batch, steps, comparisons."""

from __future__ import annotations

import os

import torch

import distributed
from model import load_causal_lm, make_optimizer
from packing import token_logprobs

TOKENS = torch.randint(5, 261, (4, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(TOKENS)
MASK[1, 7:] = MASK[3, 10:] = 0


def loss_of(model, rows=slice(None)):
    logprobs = token_logprobs(model, TOKENS[rows], MASK[rows])
    return -(logprobs * MASK[rows][:, 1:]).sum() / float(MASK[:, 1:].sum())


def trained(folder, steps=1, shard=None, seed=0):
    """(model, optimizer) after `steps` AdamW steps on the whole batch."""
    model = load_causal_lm(folder)
    model = model if shard is None else distributed.shard_model(model, shard)
    optimizer = make_optimizer(model, 0.01)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        distributed.clip_grad_norm(model, 1.0)
        optimizer.step()


def weights(model) -> dict:
    return {n: t.clone() for n, t in distributed.full_parameters(model)}


def same(a, b, atol=0.0):
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=atol, rtol=0, msg=lambda m: f"{name}: {m}"
        )


def names(folder):
    return sorted(os.listdir(folder))
