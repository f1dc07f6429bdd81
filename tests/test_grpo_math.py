"""grpo.py's mathematics against slow loops, float64, autograd and hand values."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import training
from scoring.health import collapse_reason, mean, step_figures
from engines.torch_engine import sample_tokens
from rollout import EngineGap
from grpo import (
    importance_weights,
    aggregate,
    clipped_policy_loss,
    difference,
    group_advantages,
    loss_denominator,
    low_var_kl,
)


def slow_advantages(rewards, groups, scale):
    out = []
    for r, g in zip(rewards, groups):
        mates = [x for x, h in zip(rewards, groups) if h == g]
        mean = sum(mates) / len(mates)
        if len(mates) < 2 or max(mates) == min(mates):
            out.append(0.0)
            continue
        std = math.sqrt(sum((x - mean) ** 2 for x in mates) / (len(mates) - 1))
        out.append((r - mean) / (std + 1e-6) if scale else r - mean)
    return torch.tensor(out)


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_equal_a_slow_loop_in_any_order(scale):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rewards = torch.randint(0, 5, (24,), generator=generator).double() / 3
        groups = torch.randint(0, 6, (24,), generator=generator)
        expected = slow_advantages(rewards.tolist(), groups.tolist(), scale)
        assert torch.allclose(group_advantages(rewards, groups, scale), expected, atol=1e-6)


def test_inside_each_group():
    rewards, groups = (
        torch.tensor([1.0, 0, 0, 1, 5, 5, 3, 3]),
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
    )
    expected = torch.tensor(
        [0.865875, -0.865875, -0.865875, 0.865875, 0.86595, 0.86595, -0.86595, -0.86595]
    )
    assert torch.allclose(group_advantages(rewards, groups), expected, atol=2e-3)


def test_equal_questions_stay_two_groups():
    """The group is the row of the data set (an id), never the text of the prompt."""
    assert group_advantages(
        torch.tensor([1.0, 0, 1, 1]), torch.tensor([11, 11, 12, 12]), False
    ).tolist() == [0.5, -0.5, 0, 0]


@pytest.mark.parametrize(
    "rewards", [[0.30000000000000004, 0.3] * 4, [0.1] * 8, [41 / 90.0] * 16, [-0.1]]
)
def test_flat_groups_give_exactly_zero(rewards):
    for dtype in (torch.float32, torch.float64):
        assert (
            group_advantages(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards)))
            .eq(0)
            .all()
        )


def test_every_reachable_rank_repeated_gives_exactly_zero():
    from reward import rank_incentive

    for rank in [*range(1, 102), None]:
        for n in (2, 3, 8, 16):
            rewards = torch.full((n,), rank_incentive(rank), dtype=torch.float32)
            assert group_advantages(rewards, torch.zeros(n)).abs().max() == 0


def test_lone_advantage_is_bounded():
    a = group_advantages(torch.tensor([0.35] * 7 + [0.0]), torch.zeros(8))
    assert torch.allclose(a, torch.tensor([0.353551] * 7 + [-2.474854]), atol=2e-3)
    assert a.abs().max() <= 7 / math.sqrt(8) + 1e-6


def test_advantages_of_small_differences_by_hand():
    """Close rewards far from 0 keep their differences; of tiny ones 1e-6 counts beside the std."""
    far = group_advantages(torch.tensor([1000.0, 1000.01, 1000.03], dtype=torch.float64), [0] * 3)
    std = math.sqrt(7 / 3) / 100
    expected = torch.tensor([-4 / 300, -1 / 300, 5 / 300]) / (std + 1e-6)
    assert torch.allclose(far, expected, rtol=1e-5)
    tiny = group_advantages(torch.tensor([0.0, 1e-6], dtype=torch.float64), [0] * 2)
    assert tiny.tolist() == pytest.approx([-0.292893, 0.292893], rel=1e-4)
    rounded = torch.tensor([1 / 3, float(torch.tensor(1 / 3))], dtype=torch.float64)
    assert rounded[0] != rounded[1] and group_advantages(rounded, [0] * 2).tolist() == [0, 0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_are_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, reward]), torch.tensor([0, 0]))


def test_differences_of_infinite_log_probabilities_by_hand():
    inf = math.inf
    a, b = torch.tensor([[inf, -inf, inf, -inf, 2.0]]), torch.tensor([[inf, -inf, -inf, inf, 5.0]])
    assert difference(a, b).tolist() == [[0.0, 0.0, 1e4, -1e4, -3.0]]


def test_the_sum_over_one_global_count():
    losses = [[0.5], [1.0] * 7, [2.0] * 3, [0.2] * 5]
    width = max(map(len, losses))
    per_token = torch.tensor([row + [99.0] * (width - len(row)) for row in losses])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in losses])
    for split in ([4], [1, 1, 1, 1], [3, 1], [2, 2]):
        total = sum(
            aggregate(p, m, "token_mean", mask.sum().item())
            for p, m in zip(per_token.split(split), mask.split(split))
        )
        assert abs(total.item() - 0.90625) < 1e-5
    ranks = [
        (torch.full((1, 10), 3.0), torch.ones(1, 10)),
        (torch.full((1, 2), 0.5), torch.ones(1, 2)),
    ]
    count = sum(loss_denominator(m, "token_mean", 0) for _, m in ranks)
    assert sum(aggregate(p, m, "token_mean", count) for p, m in ranks).item() == pytest.approx(
        31 / 12
    )


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_sum_norm"])
def test_aggregate_modes_equal_slow_loops_and_ignore_what_is_masked(mode):
    torch.manual_seed(1)
    per_token, mask = torch.randn(6, 9), (torch.rand(6, 9) > 0.4).float()
    mask[3] = 0  # a sequence with nothing trained
    poisoned = torch.where(mask.bool(), per_token, torch.tensor(float("nan")))
    rows = [[per_token[b, t].item() for t in range(9) if mask[b, t]] for b in range(6)]
    filled = [r for r in rows if r]
    expected = {
        "token_mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "seq_mean_token_mean": sum(sum(r) / len(r) for r in filled) / len(filled),
        "seq_sum_norm": sum(map(sum, rows)) / (len(filled) * 20),
    }[mode]
    denominator = loss_denominator(mask, mode, 20)
    assert aggregate(poisoned, mask, mode, denominator).item() == pytest.approx(expected, abs=1e-6)
    for size in (1, 2, 4):
        parts = sum(
            aggregate(p, m, mode, denominator)
            for p, m in zip(poisoned.split(size), mask.split(size))
        )
        assert parts.item() == pytest.approx(expected, abs=1e-6)


def test_everything_masked():
    x = torch.tensor([[1.0, 2.0], [5.0, 5.0]], requires_grad=True)
    mask = torch.zeros(2, 2)
    loss = aggregate(x, mask, "token_mean", loss_denominator(mask, "token_mean", 0))
    loss.backward()
    assert loss.item() == 0 and x.grad.eq(0).all()


def test_truncated_left_out_of_both():
    per_token, mask = (
        torch.tensor([[1.0, 1, 0, 0], [9.0, 9, 9, 9]]),
        torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]),
    )
    assert (
        aggregate(per_token, mask, "token_mean", loss_denominator(mask, "token_mean", 0)).item()
        == 1.0
    )


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="token_mean"):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), "mean", 1)


def test_kl_far_apart_is_finite():
    logprobs = torch.tensor([[-120.0, -1.0]], requires_grad=True)
    k = low_var_kl(logprobs, torch.tensor([[-0.5, -1.0]]))
    k.sum().backward()
    assert torch.isfinite(k).all() and torch.isfinite(logprobs.grad).all() and k[0, 1].item() == 0


def test_kl_formula_value_and_slope():
    """k3 below the limit, its tangent beyond; the gradient pulls back for every d > 0, beyond the limit as at it."""
    d = torch.cat(
        [torch.linspace(-30, 4.99, 200), torch.tensor([5.0]), torch.linspace(5.01, 200, 200)]
    ).double()
    logprobs = (-d).clone().requires_grad_()
    k = low_var_kl(logprobs[None], torch.zeros_like(d)[None])[0]
    expected = torch.where(d <= 5, d.exp() - d - 1, math.exp(5) * (1 + d - 5) - d - 1)
    assert torch.allclose(k, expected, rtol=1e-12, atol=1e-12)
    k.sum().backward()
    slope = torch.where(
        d <= 5, 1 - d.exp(), torch.tensor(1 - math.exp(5), dtype=torch.float64)
    )  # d k / d logprob
    assert torch.allclose(logprobs.grad, slope, rtol=1e-10)
    assert (
        (k >= 0).all()
        and (logprobs.grad[d > 0] < 0).all()
        and (logprobs.grad[d > 5] == logprobs.grad[d == 5]).all()
    )


def test_kl_limit_is_a_parameter_and_small_differences_keep_precision():
    d = torch.tensor([[1e-4, 1.0, 3.0]])
    k = low_var_kl(-d, torch.zeros(1, 3), limit=2.0)
    assert k[0, 0].item() == pytest.approx(
        5.0002e-9, rel=2e-2
    )  # exp(d) - d - 1 in float32 would be 0 or 1e-7
    assert k[0, 2].item() == pytest.approx(math.exp(2) * 2 - 4, rel=1e-6)


@pytest.mark.parametrize("limit", [2.0, 5.0, 10.0, 20.0, 80.0])
def test_kl_pulls_in_float32_whatever_the_limit(limit):
    """The gradient of small differences does not drown in that of the tangent: float32 against float64's formula."""
    d = torch.tensor([-1e-4, 1e-4, 1e-3, 0.1, 1.0, limit - 0.5, limit + 30])
    logprobs = (-d).requires_grad_()
    k = low_var_kl(logprobs[None], torch.zeros(1, len(d)), limit)[0]
    k.sum().backward()
    slope = -torch.expm1(d.double().clamp(max=limit))
    assert torch.isfinite(k).all() and torch.allclose(logprobs.grad.double(), slope, rtol=1e-3)


def test_clipped_objective():
    points = [[1.5, 1.0], [1.5, -1.0], [0.5, 1.0], [0.5, -1.0], [1.1, 1.0], [0.9, -2.0]]
    new = torch.tensor([[math.log(r)] for r, _ in points])
    loss, clipped = clipped_policy_loss(
        new, torch.zeros(6, 1), torch.tensor([a for _, a in points]), 0.2
    )
    assert torch.allclose(loss[:, 0], torch.tensor([-1.2, 1.5, -0.5, 0.8, -1.1, 1.8]))
    assert clipped[:, 0].tolist() == [True, False, False, True, False, False]
    far, _ = clipped_policy_loss(  # a bad token that became likely: nothing bounds its loss
        torch.tensor([[3.0]]), torch.zeros(1, 1), torch.tensor([-1.0]), 0.2
    )
    assert far.item() == pytest.approx(math.exp(3))


def test_clipped_loss_is_finite_for_any_difference_and_leaves_its_inputs_alone():
    new = torch.tensor([[0.0, -1e4, 300.0, -float("inf")]], requires_grad=True)
    old = torch.tensor([[-1e4, 0.0, -300.0, -2.0]])
    for a in (1.0, -1.0):
        before = old.clone()
        loss, _ = clipped_policy_loss(new, old, torch.tensor([a]), 0.2)
        assert torch.isfinite(loss).all() and torch.equal(old, before)


def test_on_policy_gradient_is_the_policy_gradient():
    """At ratio 1 the loss is -A and its gradient -A · grad log p, unclipped."""
    new = torch.randn(3, 5, requires_grad=True)
    a = torch.tensor([1.0, -2.0, 0.0])
    loss, clipped = clipped_policy_loss(new, new.detach(), a, 0.2)
    loss.sum().backward()
    assert torch.allclose(loss, -a[:, None].expand(3, 5)) and not clipped.any()
    assert torch.allclose(new.grad, -a[:, None].expand(3, 5))


def test_kl_is_applied_once():
    per_token = torch.full((1, 4), 0.5) + 0.1 * torch.full((1, 4), 2.0)
    assert aggregate(per_token, torch.ones(1, 4), "token_mean", 4).item() == pytest.approx(0.7)


def test_importance_weights_by_hand():
    trainer = torch.tensor([[0.0, -1.0, 5.0, 0.0], [0.3, 0.2, -0.1, 9.0], [0.4, 0.4, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1]])
    engine = torch.zeros(3, 4)
    token = importance_weights(trainer, engine, mask, 2.0)
    e = math.exp
    assert torch.allclose(token[0, :3], torch.tensor([1.0, e(-1), 2.0]))
    assert torch.allclose(token[1, :3], torch.tensor([e(0.3), e(0.2), e(-0.1)]))
    whole = importance_weights(trainer, engine, mask, 2.0, "sequence")
    assert whole.shape == (3, 4)
    assert torch.allclose(whole, torch.tensor([[0.0], [e(0.4)], [0.0]]).expand(3, 4))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_at_the_cap_far_apart_and_without_gradient(level):
    same, mask = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3)
    weights = importance_weights(same, same.detach(), mask, 1.0, level)
    assert weights.tolist() == [[1.0] * 3] * 2 and not weights.requires_grad
    apart = importance_weights(
        torch.zeros(1, 2), torch.full((1, 2), -1e4), mask[:1, :2], math.inf, level
    )
    assert torch.isfinite(apart).all()


def test_step_turns_cover_every_turn_once_an_epoch_and_ignore_the_world():
    seen = [i for step in range(10) for i in training.step_items(25, step, 5, seed=3)]
    assert (
        sorted(seen[:25]) == list(range(25))
        and sorted(seen[25:]) == list(range(25))
        and seen[:25] != seen[25:]
    )
    ragged = [i for step in range(7) for i in training.step_items(25, step, 7, seed=3)]
    assert ragged == seen[:49]  # the stream is the same however it is cut
    assert training.step_items(25, 0, 5, seed=4) != seen[:5]
    assert len(training.step_items(3, 2, 8, seed=0)) == 8


def test_collapse_reason():
    good = dict(format_rate=0.9, reward=1.0, entropy=0.5, kl=0.01)
    assert collapse_reason([good] * 60) is None and collapse_reason([good] * 5) is None
    for change in (dict(format_rate=0.1), dict(reward=0.1), dict(entropy=4.0), dict(kl=3.0)):
        assert collapse_reason([good] * 30 + [good | change] * 10)
    rising = [
        dict(format_rate=0.2 + i / 100, reward=i / 50, entropy=1.0, kl=i / 1000) for i in range(80)
    ]
    assert collapse_reason(rising) is None


@pytest.mark.parametrize(
    "key, best, fine, collapsed",
    [
        ("format_rate", 0.9, 0.46, 0.44),
        ("format_rate", 0.22, 0.12, 0.1),
        ("format_rate", 0.19, 0.0, None),  # never had the form
        ("reward", 1.0, 0.26, 0.24),
        ("reward", 0.22, 0.06, 0.05),
        ("reward", 0.19, -0.1, None),
        ("entropy", 0.5, 1.9, 2.1),
        ("entropy", 0.0, 0.4, 0.6),
        ("kl", 0.0, 1.9, 2.1),
    ],
)
def test_a_collapse_begins_at_its_limit_and_is_against_the_best_window(key, best, fine, collapsed):
    def history(*values):
        rows = dict(format_rate=0.9, reward=1.0, entropy=0.5, kl=0.01)
        return [rows | {key: value} for value in values]

    now = fine if collapsed is None else collapsed
    between = best + (now - best) / 2
    assert collapse_reason(history(*[best] * 10, *[fine] * 10)) is None
    found = collapse_reason(history(*[best] * 10, *[between] * 10, *[now] * 10))
    assert (found is None) == (collapsed is None)
    if collapsed is not None:
        assert found.startswith(key) and collapse_reason(history(*[best] * 10, *[now] * 10))
        assert collapse_reason(history(*[best] * 9, *[now] * 10)) is None  # two whole windows
        assert collapse_reason(history(*[best] * 29, now)) is None  # one step is no window
        assert collapse_reason(history(*[best] * 15, *[now] * 5), window=5)


def test_log_probabilities_under_top_p_are_of_what_was_kept():
    """Of another distribution than the trainer's, therefore: GRPO samples without top_p."""
    logits, one = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.ones(1)
    (ids, logprobs), (_, whole) = (
        sample_tokens(logits, one, torch.tensor([p]), torch.zeros(1, dtype=torch.float64))
        for p in (0.79, 1.0)
    )  # .5 + .3 is .8, give or take a rounding
    assert ids.tolist() == [0] and float(logprobs) == pytest.approx(-0.470004, abs=1e-6)
    assert float(whole) == pytest.approx(-0.693147, abs=1e-6)


def test_a_nan_in_a_window_does_not_switch_the_guard_off():
    good = dict(format_rate=0.9, reward=1.0, entropy=0.5, kl=0.01)
    for key, change in (("entropy", dict(entropy=4.0)), ("kl", dict(kl=3.0))):
        for place in (0, 15, 35):
            rows = [dict(good) for _ in range(30)] + [good | change for _ in range(10)]
            rows[place][key] = math.nan
            assert collapse_reason(rows), (key, place)


@pytest.mark.parametrize(
    "rewards, flat",
    [
        ([math.exp(1 - 20), math.exp(1 - 15), math.exp(1 - 40), 0, 0, 0, 0, 0], False),
        ([1e-9, 2e-9], False),
        ([1e6, 1e6 + 0.01], True),
        ([0.0, 0.0], True),
        ([-0.1, -0.1], True),
    ],
)
def test_equal_is_judged_by_the_size_of_the_rewards(rewards, flat):
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)))
    assert bool((found == 0).all()) == flat
    rows = [
        dict(
            group=0,
            response="",
            reward=r,
            advantage=a,
            well_formed=True,
            tokens=1,
            end="eos",
            rank=None,
            rewrite="",
        )
        for r, a in zip(rewards, found.tolist())
    ]
    assert step_figures(rows)["flat_groups"] == flat


def test_a_think_block_that_shrinks_to_a_set_phrase_is_seen():
    row = dict(group=0, reward=1.0, advantage=0.0, well_formed=True, tokens=1, end="eos")
    row |= dict(rank=1, rewrite="q")
    several = [
        row | {"response": f"<think>{t}</think><rewrite>q</rewrite>"} for t in ("a b", "c\nd")
    ]
    figures = step_figures([*several, row | {"response": "no <think> block"}])
    assert figures["think_words"] == pytest.approx(4 / 3) and figures["think_distinct"] == 1.0
    figures = step_figures([row | {"response": "<think>as asked</think>"}] * 8)
    assert figures["think_words"] == 2.0 and figures["think_distinct"] == 2 / 16
    cut = row | {"response": "<think>cut off <search>q</search> <result>a b c</result>"}
    figures = step_figures([cut, row | {"response": "<think>as asked</think>"}])
    assert figures["think_words"] == 1.0  # neither results nor another response's words count
    assert step_figures([row | {"response": ""}])["think_distinct"] == 0.0


def test_figures_of_a_step_by_hand():
    """One of seven rollouts failed, alone in its group; one group of three is flat."""
    table = [
        (0, 2.0, 0.7, True, 1, "a b c", 10, "eos"),
        (0, 1.0, -0.7, True, 10, "a b", 20, "eos"),
        (1, 0.5, 0.0, True, 55, "a", 30, "stop"),
        (1, 0.5, 0.0, False, None, None, 40, "length"),
        (2, None, None, True, None, "a b c d", 50, "eos"),
        (3, 1.0, -1.0, True, 2, "a b c d", 60, "eos"),
        (3, 1.0, 0.0, True, 100, "a b c d", 70, "length"),
    ]
    names = ("group", "reward", "advantage", "well_formed", "rank", "rewrite", "tokens", "end")
    rows = [dict(zip(names, row)) | {"response": ""} for row in table]
    figures = step_figures(rows)
    rewards = [2.0, 1.0, 0.5, 0.5, 1.0, 1.0]
    std = math.sqrt(sum((x - 1.0) ** 2 for x in rewards) / 5)
    expected = {
        **{"reward": 1.0, "reward_std": std, "format_rate": 5 / 6, "failed": 1},
        **{"flat_groups": 1 / 3, "response_tokens": 40.0, "length_stops": 2 / 7},
        **{"hit@1": 1 / 6, "hit@10": 3 / 6, "hit@100": 5 / 6, "rewrite_words": 14 / 6},
        "mrr": (1 + 1 / 10 + 1 / 55 + 1 / 2 + 1 / 100) / 6,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    assert step_figures(rows[:2])["reward_std"] == pytest.approx(math.sqrt(0.5))
    assert step_figures(rows[:1])["reward_std"] == 0.0  # unknown, and no fault


def test_means_are_of_what_is_known():
    assert mean([1.0, None, math.nan, math.inf, 4.0]) == 2.5
    assert math.isnan(mean([])) and math.isnan(mean([None, math.nan]))
    good = dict(format_rate=0.9, reward=1.0, entropy=0.5, kl=0.01)
    unknown = good | dict(entropy=math.nan, kl=math.nan)  # steps that trained nothing
    for change in (dict(entropy=4.0), dict(kl=3.0)):
        assert collapse_reason([unknown] * 10 + [good] * 10 + [good | change] * 10)
    assert collapse_reason([good] * 10 + [unknown] * 10) is None


INFINITE = [
    (-math.inf, -math.inf),
    (-math.inf, -3.0),
    (-3.0, -math.inf),
    (math.inf, -1.0),
    (math.inf, math.inf),
    (-1e30, 0.0),
]


@pytest.mark.parametrize("a, b", INFINITE)
def test_loss_and_kl_are_finite_for_infinite_log_probabilities(a, b):
    logprobs, other = torch.tensor([[a, -1.0]], requires_grad=True), torch.tensor([[b, -1.0]])
    loss, _ = clipped_policy_loss(logprobs, other, torch.tensor([1.5]), 0.2)
    kl = low_var_kl(logprobs, other)
    assert torch.isfinite(loss).all() and torch.isfinite(kl).all()
    assert all(
        torch.isfinite(importance_weights(logprobs, other, torch.ones(1, 2), 2.0, level)).all()
        for level in ("token", "sequence")
    )
    (loss.sum() + kl.sum()).backward()
    assert torch.isfinite(logprobs.grad).all() and float(logprobs.grad[0, 1]) == pytest.approx(-1.5)


def test_a_nan_log_probability_stays_one():
    """It is a fault, which the gradient's norm shows; nothing hides it."""
    nan, one = torch.tensor([[math.nan]]), torch.tensor([[-1.0]])
    assert (
        low_var_kl(nan, one).isnan().all()
        and clipped_policy_loss(nan, one, torch.ones(1), 0.2)[0].isnan().all()
    )


def test_the_example_in_the_readme_is_what_the_functions_give():
    from pathlib import Path

    from reward import rank_incentive

    lines = (
        (Path(__file__).resolve().parent.parent / "README.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[
            lines.index(next(line for line in lines if line.startswith("| the rewrite"))) + 2 :
        ][:4]
    ]
    rewards = [rank_incentive(1), rank_incentive(12), rank_incentive(None), -0.1]
    assert [float(row[2]) for row in rows] == [round(r, 2) for r in rewards]
    found = group_advantages(torch.tensor(rewards), torch.zeros(4))
    assert [float(row[3]) for row in rows] == [round(a, 2) for a in found.tolist()]


def test_a_step_that_computes_nothing_does_not_accuse_the_engine():
    """Without KL a step of flat groups has no token: its gap is unknown, not large."""
    engine = SimpleNamespace(gap_limit=0.02)
    stats = {"skipped": 0, "engine_gap": math.nan, "engine_gap_max": 0.0, "start_gap": math.nan}
    training.check_weights(engine, stats | {"tokens": 0})
    training.check_weights(engine, stats | {"tokens": 7, "skipped": 1})  # nor one of NaN
    with pytest.raises(EngineGap):
        training.check_weights(engine, stats | {"tokens": 7})
