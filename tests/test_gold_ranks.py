"""exact.py and gold_ranks.py against a sort of all scores; whole numbers, so that sums are exact in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from search import exact
from search.exact import exact_gold_ranks, exact_search, place
from search.passages import FAILED

SHAPES = [
    (1, 1, 8),
    (5, 255, 72),
    (64, 256, 64),
    (130, 1000, 768),
    (300, 3001, 384),
    (129, 257, 1024),
]


def whole_numbers(n: int, dim: int, most: int, seed: int) -> torch.Tensor:
    return torch.randint(
        -most, most + 1, (n, dim), generator=torch.Generator().manual_seed(seed)
    ).half()


def sorted_rank(scores: np.ndarray, golds: list[int], cutoff: int) -> int | None:
    """The rule of order by a loop: every other passage that scores at least as high as the best gold is before it."""
    best = max(scores[g] for g in golds)
    rank = 1 + sum(score >= best for i, score in enumerate(scores) if i not in golds)
    return rank if rank <= cutoff else None


@pytest.mark.gpu
@pytest.mark.parametrize("queries,passages,dim", SHAPES)
def test_kernel_counts_what_a_product_counts(queries, passages, dim):
    from search import gold_ranks

    q, p = whole_numbers(queries, dim, 3, 1).cuda(), whole_numbers(passages, dim, 3, 2).cuda()
    truth = q.double() @ p.double().T
    for pick in (
        "some",
        "low",
        "zero",
    ):  # low: every row of zeros beyond the last passage would count, too
        gold = torch.randint(
            passages, (queries,), generator=torch.Generator().manual_seed(3)
        ).cuda()
        if pick == "low":
            gold = truth.argmin(1)
        score = gold_ranks.own_scores(q, p[gold])
        assert torch.equal(score.double(), truth.gather(1, gold[:, None])[:, 0])
        if pick == "zero":
            score = torch.zeros_like(score)
        count = torch.full((queries,), 7, dtype=torch.int32, device="cuda")  # it is added to
        gold_ranks.add_counts(count, q, p, score)
        assert torch.equal(count.long() - 7, (truth >= score.double()[:, None]).sum(1))


@pytest.mark.gpu
def test_kernel_never_places_a_gold_against_itself():
    """Every query's gold is the query itself, far above the others: one passage scores at least as high, the gold."""
    from search import gold_ranks

    torch.manual_seed(0)
    for dim in (96, 384, 768):
        p = torch.randn(5000, dim, device="cuda").half()
        rows = torch.randperm(5000, device="cuda")[:4096]
        score = gold_ranks.own_scores(p[rows], p[rows])
        count = torch.zeros(4096, dtype=torch.int32, device="cuda")
        gold_ranks.add_counts(count, p[rows], p, score)
        assert torch.equal(count, torch.ones_like(count))
        twins = torch.cat([p, p[rows[:100]]])
        count.zero_()
        gold_ranks.add_counts(count, p[rows], twins, score)
        assert (
            count[:100].tolist() == [2] * 100 and count[100:].tolist() == [1] * 3996
        )  # bit for bit, anywhere


@pytest.mark.gpu
def test_gold_ranks_on_a_gpu_equal_a_sort():
    rng = np.random.default_rng(0)
    p, q = whole_numbers(900, 64, 2, 4), whole_numbers(150, 64, 2, 5).float()
    golds = [
        rng.integers(0, 900, rng.integers(1, 5)).tolist() for _ in range(150)
    ]  # several, some twice
    truth = q.double().numpy() @ p.double().numpy().T
    q[7, 3] = math.nan
    for cutoff in (1, 100, 900):
        expected = [
            FAILED if i == 7 else sorted_rank(truth[i], golds[i], cutoff) for i in range(150)
        ]
        for shards in ([p.numpy()], np.array_split(p.numpy(), 4)):
            for held in (
                place(shards, torch.device("cuda")),
                shards,
            ):  # by the kernel, and by blocks from the host
                got = exact_gold_ranks(q.cuda(), held, golds, cutoff)
                assert [str(r) for r in got] == [str(r) for r in expected]
    bad = p.clone()
    bad[5, 5] = math.inf
    held = place([bad.numpy()], torch.device("cuda"))
    assert not isinstance(
        held[0], torch.Tensor
    )  # where something is not finite, every score is looked at
    bad[5] = math.nan
    assert all(
        r is FAILED
        for r in exact_gold_ranks(
            whole_numbers(3, 64, 2, 6).float().cuda(), [bad.cuda().float()], [[0]] * 3
        )
    )


@pytest.mark.gpu
def test_real_numbers_differ_from_float64_within_rounding_only():
    torch.manual_seed(1)
    p = torch.randn(200_000, 768, device="cuda").half()
    rows = torch.randint(200_000, (512,), device="cuda")
    q = (
        p[rows].float() * torch.linspace(0.05, 0.3, 512, device="cuda")[:, None]
        + torch.randn(512, 768, device="cuda")
    ).half()
    got = exact_gold_ranks(q.float(), [p], [[int(r)] for r in rows], cutoff=200_000)
    scores = q.double() @ p.double().T
    gold = scores.gather(1, rows[:, None])
    truth, near = (
        (scores >= gold).sum(1),
        ((scores - gold).abs() < 1e-5 * q.double().abs().sum(1, keepdim=True)).sum(1),
    )
    off = [abs(a - int(b)) for a, b in zip(got, truth)]
    assert all(d <= int(n) - 1 for d, n in zip(off, near)) and sum(d > 0 for d in off) < 26
    found = exact_search(q.float(), [p], 100, torch.arange(200_000, device="cuda"))[1]
    listed = (found == rows[:, None]).any(1)
    assert sum(bool(a) != (r <= 100) for a, r in zip(listed, got)) <= 2


@pytest.mark.gpu
def test_search_on_a_gpu_equals_a_sort(monkeypatch):
    monkeypatch.setattr(exact, "GPU_BLOCK", 4096 * 40)
    p, q = whole_numbers(9000, 16, 2, 7), whole_numbers(40, 16, 2, 8).float()
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(9))
    truth = q.double().numpy() @ p.double().numpy().T
    for held in ([p.numpy()[:5000], p.numpy()[5000:]], place([p.numpy()], torch.device("cuda"))):
        scores, rows, failed = exact_search(q.cuda(), held, 50, order.cuda())
        assert not failed.any()
        for i in range(40):
            assert rows[i].tolist() == np.lexsort((order.numpy(), -truth[i]))[:50].tolist()


@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_long_search_on_a_cpu_equals_a_sort(monkeypatch, k):
    """Many blocks, so that most passages only meet the threshold of the best so far; ties by the thousand."""
    monkeypatch.setattr(exact, "CPU_BLOCK", 64 * 8)
    p, q = whole_numbers(5000, 8, 1, 10).numpy(), whole_numbers(30, 8, 2, 11).float()
    q[4] = 0  # every passage ties
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(12))
    truth = q.numpy() @ p.astype(np.float32).T
    scores, rows, _ = exact_search(q, np.array_split(p, 3), k, order)
    for i in range(30):
        right = np.lexsort((order.numpy(), -truth[i]))[:k]
        assert rows[i].tolist() == right.tolist() and np.array_equal(scores[i], truth[i][right])
