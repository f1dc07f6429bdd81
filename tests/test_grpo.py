"""The GRPO loop on tiny models: the same update however it is cut, exact resume, learning, and its stated failures."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

import config
import data
import distributed
import grpo
import runs
import tasks
import training
from batching import assign_groups, deal_out, micro_batch_rows, plan_updates
from engines.base import Rollout
from model import load_causal_lm, make_optimizer, prepare_causal_lm
from packing import packed_logprobs, share_prefixes, token_logprobs
from prompts import encode_example, response_text
from rollout import collate_rollouts
from runs import read_metrics, write_jsonl
from scoring.health import step_figures

ROOT = Path(__file__).resolve().parent.parent
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
}


def write_world(folder: Path, turns: int = 16) -> None:
    """A corpus in which `what alpha7` finds passage p7 alone, and one turn for each of its first passages."""
    corpus = [{"id": f"p{i}", "title": "", "text": f"alpha{i} is known"} for i in range(10)]
    rows = [
        {
            "query_id": f"q{i}",
            "conversation_id": f"c{i}",
            "turn": 1,
            "context": [["what is it", f"alpha{i % 10}"]],
            "question": "and this?",
            "gold_ids": [f"p{i % 10}"],
        }
        for i in range(turns)
    ]
    write_jsonl(folder / "corpus.jsonl", corpus)
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(
        folder / "dev.jsonl",
        [
            r | {"query_id": "d" + r["query_id"], "conversation_id": "d" + r["query_id"]}
            for r in rows[:3]
        ],
    )


def write_formatted_lm(folder: Path) -> None:
    """A tiny model that has learnt the response format and picks one of ten queries at random."""
    model, tokenizer = tiny.tiny_lm(folder), tiny.tiny_tokenizer()
    rng, prompt = random.Random(0), [5]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 1e-2 * (
            1 - step / 150
        )  # ends where small steps keep the form
        rows = [
            encode_example(tokenizer, prompt, response_text("a", f"alpha{rng.randrange(10)}"), 2)[0]
            for _ in range(8)
        ]
        tokens = torch.tensor(rows)
        loss = -token_logprobs(model, tokens, torch.ones_like(tokens)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with data and a model that answers in the right form whatever the prompt."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    write_formatted_lm(folder / "lm")
    # the prompt is replaced by one constant token's worth of template, so that a 2-layer model can answer it
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = "{{ '!' }}"  # token 5
    tokenizer.save_pretrained(folder / "lm")
    return folder


def command(world: Path, out: str, *more: str, processes: int = 1) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*start, str(ROOT / "grpo.py"), *settings(out), *more]


def settings(out: str) -> list[str]:
    return [
        "model=lm",
        "train=train.jsonl",
        "dev=dev.jsonl",
        f"out={out}",
        "retriever.kind=bm25",
        "retriever.corpus=corpus.jsonl",
        "prompts_per_step=4",
        "group_size=4",
        "max_response_tokens=64",
        "micro_batch_tokens=256",
        "steps=4",
        "validate_every=2",
        "save_every=1",
        "lr=1e-3",
        "warmup_steps=2",
    ]


def run(world: Path, out: str, *more: str, processes: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(world, out, *more, processes=processes),
        cwd=world,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )


def metrics(world: Path, out: str) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith("seconds_")}
        for _, row in data.read_jsonl(world / out / "metrics.jsonl")
    ]


# ------------------------------------------------------------------------------------------------------------ the update


def make_batch(seed: int = 0):
    """Eight rollouts of two prompts, unequal lengths, a masked stretch inside one (as tool output is)."""
    rng = random.Random(seed)
    rollouts = []
    for group in range(2):
        prompt = [rng.randrange(5, 200) for _ in range(6 + 5 * group)]
        for _ in range(4):
            n = rng.randrange(1, 14)
            response = [rng.randrange(5, 200) for _ in range(n)]
            mask = [0 if n > 8 and 2 <= i < 5 else 1 for i in range(n)]
            rollouts.append(Rollout(prompt, response, [-2.0] * n, mask, group, "eos"))
    advantages = grpo.group_advantages(
        torch.tensor([rng.random() for _ in rollouts]), torch.tensor([r.group_id for r in rollouts])
    )
    return rollouts, advantages


def plans(policy, rollouts, advantages, cfg, skip_flat=False):
    batch = collate_rollouts(rollouts, advantages, 0)
    return plan_updates(
        policy, batch, torch.device("cpu"), cfg.micro_batch_tokens, cfg.updates_per_batch, skip_flat
    )


def gradients(cfg: grpo.GRPOConfig, rollouts, advantages, dist) -> dict[str, torch.Tensor]:
    """One `update` with an optimizer that only records: the gradient, unclipped, as full tensors."""
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    reference = distributed.shard_model(
        prepare_causal_lm(tiny.tiny_lm(seed=2)).requires_grad_(False), dist
    )
    found: dict[str, torch.Tensor] = {}

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            found.update(
                {
                    name: distributed.full_tensor(p.grad).clone()
                    for name, p in policy.named_parameters()
                }
            )

    updates = plans(policy, rollouts, advantages, cfg)
    grpo.add_reference(reference, updates, cfg.temperature)
    stats = grpo.update(policy, Recorder(policy.parameters(), lr=0.0), updates, cfg, dist)
    return found | {"stats": stats}


def updated(policy, optimizer, rollouts, advantages, cfg, dist) -> dict:
    """The statistics of one `update` without a reference."""
    return grpo.update(policy, optimizer, plans(policy, rollouts, advantages, cfg), cfg, dist)


def by_hand(rollouts, advantages, cfg) -> dict[str, torch.Tensor]:
    """The loss written as loops over tokens, without any of the project's formulas, in float64."""
    policy, reference = tiny.tiny_lm(seed=1).double(), tiny.tiny_lm(seed=2).double()
    per_sequence = []
    for r, a in zip(rollouts, advantages.double()):
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        lp, ref = (
            torch.log_softmax(m(ids).logits[0] / cfg.temperature, -1) for m in (policy, reference)
        )
        losses = []
        for i, token in enumerate(r.response_ids):
            if r.loss_mask[i]:
                t = len(r.prompt_ids) + i - 1
                ratio = torch.exp(lp[t, token] - lp[t, token].detach())
                d = ref[t, token].detach() - lp[t, token]
                d0 = torch.tensor(5.0, dtype=torch.float64)
                kl = torch.exp(d) - d - 1 if d <= 5 else torch.exp(d0) * (1 + d - 5) - d - 1
                losses.append(-a * ratio + cfg.kl_coef * kl)
        per_sequence.append(losses)
    filled = [x for x in per_sequence if x]
    loss = {
        "token_mean": lambda: sum(map(sum, filled)) / sum(map(len, filled)),
        "seq_mean_token_mean": lambda: sum(sum(x) / len(x) for x in filled) / len(filled),
        "seq_sum_norm": lambda: sum(map(sum, filled)) / (len(filled) * cfg.max_response_tokens),
    }[cfg.loss_mode]()
    loss.backward()
    return {name: p.grad.float() for name, p in policy.named_parameters()} | {"loss": loss.item()}


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_sum_norm"])
def test_update_equals_loops_and_does_not_depend_on_the_token_budget(dist, mode):
    rollouts, advantages = make_batch()
    cfg = grpo.GRPOConfig(kl_coef=0.5, max_grad_norm=1e9, loss_mode=mode, max_response_tokens=16)
    expected = by_hand(rollouts, advantages, cfg)
    loss = expected.pop("loss")
    for size in (1, 20, 33, 60, 1000):
        cfg.micro_batch_tokens, cfg.gather_once = size, size != 33
        found = gradients(cfg, rollouts, advantages, dist)
        assert found["stats"]["loss"] == pytest.approx(loss, rel=1e-5)
        for name, grad in expected.items():
            assert (found[name] - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-7, (size, name)


def test_two_processes_give_the_gradient_of_one(dist, tmp_path):
    """Groups go to different ranks with different token counts; the loss has one global denominator."""
    rollouts, advantages = make_batch()
    cfg = grpo.GRPOConfig(
        kl_coef=0.5, max_grad_norm=1e9, max_response_tokens=16, micro_batch_tokens=40
    )
    single = gradients(cfg, rollouts, advantages, dist)
    script = tmp_path / "two.py"
    script.write_text(f"""
import torch, distributed, grpo
from batching import deal_out
from test_grpo import make_batch, gradients
dist = distributed.setup()
rollouts, advantages = make_batch()
mine = [i for i, r in enumerate(rollouts) if r.group_id == dist.rank][:4 - dist.rank]  # 4 sequences and 3: uneven on purpose
theirs = [i for i, r in enumerate(rollouts) if r.group_id == 0] + [i for i, r in enumerate(rollouts) if r.group_id == 1][:3]
cfg = grpo.GRPOConfig(kl_coef=0.5, max_grad_norm=1e9, max_response_tokens=16, micro_batch_tokens=1)
found = gradients(cfg, [rollouts[i] for i in mine], advantages[mine], dist)
sampled = [i for i, r in enumerate(rollouts) if r.group_id == 0 or dist.rank == 0]  # two groups, and one
held, given = deal_out([rollouts[i] for i in sampled], [100.0 * dist.rank + i for i in sampled], dist)
exchanged = distributed.gather_objects([(a, r.group_id, r.prompt_ids, r.response_ids) for a, r in zip(given, held)])
if dist.rank == 0:
    torch.save((found, theirs, exchanged), {str(tmp_path / "two.pt")!r})
distributed.all_reduce_sum([0.0])  # nobody leaves while another still works
distributed.cleanup()
""")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
        ],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    double, kept, exchanged = torch.load(tmp_path / "two.pt", weights_only=False)
    rows = [row for part in exchanged for row in part]
    for advantage, _, prompt, response in rows:  # which came along tells which rollout it is
        sampled = rollouts[int(advantage) % 100]
        assert (prompt, response) == (sampled.prompt_ids, sampled.response_ids)
    assert len({a for a, *_ in rows}) == len(rows) == 12  # every rollout has one owner
    assert sorted(map(len, exchanged)) == [4, 8]
    for part in exchanged:  # groups are whole: four of each
        assert all(sum(g == group for _, g, *_ in part) == 4 for _, group, *_ in part)
    single = gradients(cfg, [rollouts[i] for i in kept], advantages[kept], dist)
    assert double["stats"]["tokens"] == single["stats"]["tokens"]
    assert double["stats"]["loss"] == pytest.approx(single["stats"]["loss"], rel=1e-5)
    for name in single:
        if name != "stats":
            assert (double[name] - single[name]).abs().max() <= 1e-5 * single[
                name
            ].abs().max() + 1e-7, name


def test_ratio_is_one_on_the_first_update_even_with_dropout(dist, tmp_path):
    tiny.tiny_lm(tmp_path, attention_dropout=0.1)
    policy = distributed.shard_model(load_causal_lm(str(tmp_path)), dist)
    batch = collate_rollouts(*make_batch(), 0)
    with torch.no_grad():
        old = token_logprobs(policy, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask)
        policy.train()
        new = token_logprobs(policy, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask)
    assert torch.exp(new - old).sub(1).abs().max() <= 1e-5


def test_kl_still_acts_on_flat_groups(dist):
    rollouts, _ = make_batch()
    cfg = grpo.GRPOConfig(kl_coef=0.1, max_grad_norm=1e9)
    found = gradients(cfg, rollouts, torch.zeros(len(rollouts)), dist)
    assert (
        found["stats"]["loss"] == pytest.approx(0.1 * found["stats"]["kl"], rel=1e-5)
        and found["stats"]["kl"] > 0
    )


def test_several_updates_on_a_batch_use_the_policy_before_the_first(dist):
    """With updates_per_batch 2 the second share meets a moved policy: old log-probabilities come from before the first."""
    rollouts, advantages = make_batch()
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    cfg = grpo.GRPOConfig(kl_coef=0.0, updates_per_batch=2, clip_eps=0.01, micro_batch_tokens=40)
    stats = updated(
        policy, torch.optim.SGD(policy.parameters(), lr=1.0), rollouts, advantages, cfg, dist
    )
    assert stats["clipped"] > 0 and math.isnan(
        stats["kl"]
    )  # no reference: KL is not measured, and not 0
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    cfg.updates_per_batch = 1
    assert (
        updated(
            policy, torch.optim.SGD(policy.parameters(), lr=1.0), rollouts, advantages, cfg, dist
        )["clipped"]
        == 0
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_figures_of_a_moved_policy_equal_loops_in_float64(dist, level):
    """Clip, importance weights, KL and entropy at once. The ratio is to the policy before the
    update, the weight that policy's to the engine, the start gap the reference's to the engine."""
    rollouts, advantages = make_batch()
    rng = random.Random(1)
    for r in rollouts:
        r.logprobs = [rng.uniform(-7, -4) for _ in r.logprobs]
    cfg = grpo.GRPOConfig(
        **{"clip_eps": 0.1, "kl_coef": 0.5, "kl_limit": 0.5, "entropy_coef": 0.3},
        **{"importance_cap": 3.0, "importance_level": level, "micro_batch_tokens": 40},
    )
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    before, reference = (prepare_causal_lm(tiny.tiny_lm(seed=s)) for s in (3, 2))
    (one,) = plans(policy, rollouts, advantages, cfg)
    grpo.add_reference(reference, [one], cfg.temperature)
    for micro in one.micro_batches:
        with torch.no_grad():
            micro.old_logprobs = packed_logprobs(before, micro.packed, cfg.temperature)
    parts = [grpo.policy_loss(policy, cfg, 50.0, micro) for micro in one.micro_batches]
    sum(loss for loss, *_ in parts).backward()
    found = dict(zip(grpo.SUMS, sum(sums for _, sums, _ in parts).tolist()))

    models = [tiny.tiny_lm(seed=s).double() for s in (1, 3, 2)]
    total, figures, gaps = 0.0, dict.fromkeys(grpo.SUMS, 0.0), []
    for r, a in zip(rollouts, advantages.tolist()):
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        places = [i for i, written in enumerate(r.loss_mask) if written]
        rows = [len(r.prompt_ids) + i - 1 for i in places]
        dists = [(m(ids).logits[0, rows] / cfg.temperature).log_softmax(-1) for m in models]
        words = torch.tensor([r.response_ids[i] for i in places])
        own, old, ref = (d.gather(1, words[:, None])[:, 0] for d in dists)
        entropy = -(dists[0].exp() * dists[0]).sum(-1)
        engine = torch.tensor([r.logprobs[i] for i in places], dtype=torch.float64)
        ratios = (old - engine).exp().tolist()
        product = math.prod(ratios)
        for t in range(len(places)):
            ratio = (own[t] - old[t].detach()).exp()
            bound = min(max(ratio.item(), 0.9), 1.1)
            free = ratio.item() * a <= bound * a
            d, weight = ref[t].detach() - own[t], min(ratios[t], 3.0)
            if level == "sequence":
                weight = 0.0 if product > 3.0 else product
            kl = d.exp() - d - 1 if d <= 0.5 else math.exp(0.5) * (1 + d - 0.5) - d - 1
            total += weight * -a * (ratio if free else bound) + 0.5 * kl - 0.3 * entropy[t]
            gaps.append(abs(old[t] - engine[t]).item())
            seen = {
                **{"tokens": 1, "kl": kl.item(), "clipped": not free, "entropy": -own[t].item()},
                **{"engine_gap": gaps[-1], "start_gap": abs(ref[t] - engine[t]).item()},
                **{"positive": a > 0, "positive_logprob": own[t].item() * (a > 0)},
                **{"weight": weight, "weight_squared": weight**2},
            }
            figures |= {key: figures[key] + value for key, value in seen.items()}
    (total / 50).backward()
    figures["loss"] = total.item() / 50
    assert 0 < figures["clipped"] < figures["tokens"] and figures["weight"] > 0
    assert found == pytest.approx(figures, rel=1e-4)
    assert max(gap.item() for *_, gap in parts) == pytest.approx(max(gaps), rel=1e-5)
    for p, expected in zip(policy.parameters(), models[0].parameters()):
        grad = distributed.full_tensor(p.grad)
        assert (grad - expected.grad).abs().max() <= 1e-4 * expected.grad.abs().max() + 1e-7


def test_statistics_are_means_over_updates_and_tokens(dist, monkeypatch):
    """Steps of size 0: both updates meet the same policy, whose log-probabilities a loop gives."""
    rollouts, advantages = make_batch()
    rng = random.Random(1)
    for r in rollouts:
        r.logprobs = [rng.uniform(-7, -4) for _ in r.logprobs]
    rollouts[0].logprobs[0] = -20.0  # the largest gap, in the first update
    cfg = grpo.GRPOConfig(kl_coef=0.0, updates_per_batch=2, importance_cap=2.0)
    cfg.micro_batch_tokens = 20
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    still = torch.optim.SGD(policy.parameters(), lr=0.0)
    stats = updated(policy, still, rollouts, advantages, cfg, dist)
    model, losses, gaps, ratios, weights = tiny.tiny_lm(seed=1).double(), [], [], [], []
    for share in (range(4), range(4, 8)):
        losses.append([])
        for r, a in ((rollouts[i], advantages[i].item()) for i in share):
            ids = torch.tensor([r.prompt_ids + r.response_ids])
            logprobs = (model(ids).logits[0, :-1] / cfg.temperature).log_softmax(-1)
            own = logprobs.gather(1, ids[0, 1:, None])[len(r.prompt_ids) - 1 :, 0].tolist()
            for x, engine, written in zip(own, r.logprobs, r.loss_mask):
                if written:
                    gaps.append(abs(x - engine))
                    ratios.append(math.exp(x - engine))
                    weights.append(min(ratios[-1], 2.0))
                    losses[-1].append(-a * weights[-1])
    assert stats["tokens"] == len(gaps) and stats["clipped"] == 0
    assert stats["engine_gap"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    assert stats["engine_gap_max"] == pytest.approx(max(gaps), rel=1e-5)
    assert stats["loss"] == pytest.approx(sum(sum(x) / len(x) for x in losses) / 2, rel=1e-4)
    cfg.importance_cap = None  # without a cap what the weights would be is measured
    uncapped = updated(policy, still, rollouts, advantages, cfg, dist)
    for figures, found in ((stats, weights), (uncapped, ratios)):
        effective = sum(found) ** 2 / sum(w * w for w in found) / len(found)
        assert figures["effective_samples"] == pytest.approx(effective, rel=1e-4)
    monkeypatch.setattr(distributed, "gather_objects", lambda gap: [gap, 99.0])  # another rank's
    worse = updated(policy, still, rollouts, -advantages.abs(), cfg, dist)
    assert worse["engine_gap_max"] == 99.0
    assert math.isnan(worse["positive_logprob"])  # no response was better: unknown, not 0


def test_a_micro_batch_computes_each_prompt_once(dist):
    rollouts, advantages = make_batch()
    policy = prepare_causal_lm(tiny.tiny_lm())
    ((micro,),) = (u.micro_batches for u in plans(policy, rollouts, advantages, grpo.GRPOConfig()))
    assert micro.packed.computed == 6 + 11 + sum(len(r.response_ids) - 1 for r in rollouts)


def test_one_update_needs_no_pass_for_the_policy_before_it(dist):
    rollouts, advantages = make_batch()
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    passes = []
    policy.base_model.register_forward_hook(lambda *_: passes.append(1))
    for updates, expected in ((1, 1), (2, 4)):
        cfg = grpo.GRPOConfig(kl_coef=0.0, updates_per_batch=updates)
        still = torch.optim.SGD(policy.parameters(), lr=0.0)
        updated(policy, still, rollouts, advantages, cfg, dist)
        assert len(passes) == expected
        passes.clear()


def test_an_update_without_a_sequence_of_its_own_changes_nothing(dist):
    """Failed rollouts may leave fewer sequences than updates_per_batch: the update that gets none is no step, no fault."""
    rollouts, advantages = make_batch()
    after = []
    for updates in (2, 3):
        policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0, weight_decay=0.1)
        stats = updated(
            policy,
            optimizer,
            rollouts[:2],
            advantages[:2],
            grpo.GRPOConfig(kl_coef=0.0, updates_per_batch=updates),
            dist,
        )
        assert stats["skipped"] == 0
        after.append([distributed.full_tensor(p.detach()).clone() for p in policy.parameters()])
    assert all(map(torch.equal, *after))


def test_rollouts_that_failed_or_have_no_trained_token_are_not_dealt_out(dist):
    failed = rollouts_of([(0, "x"), (0, "y"), (1, "z")])
    silent = Rollout([5], [6], [0.0], [0], 2, "eos")
    held, advantages = deal_out([*failed, silent], [None, 0.5, None, 1.0], dist)
    assert [r.response_ids for r in held] == [failed[1].response_ids] and advantages == [0.5]
    assert deal_out(failed, [None] * 3, dist) == ([], [])


def test_a_rank_without_rollouts_takes_part_without_training(dist):
    idle = [Rollout([5], [5], [0.0], [0], 0, "eos")]  # what grpo.build_updates puts there
    stats = gradients(grpo.GRPOConfig(kl_coef=0.5), idle, torch.zeros(1), dist)["stats"]
    assert (stats["tokens"], stats["loss"], stats["grad_norm"], stats["skipped"]) == (
        0,
        0.0,
        0.0,
        0,
    )


def test_groups_are_dealt_out_by_tokens_and_never_split():
    rng = random.Random(0)
    for world in (1, 2, 4, 8):
        sizes = [{i: rng.randrange(100, 3000) for i in range(16)} for _ in range(world)]
        owners = assign_groups(sizes)
        assert sorted(owners) == [(r, i) for r in range(world) for i in range(16)]
        loads = [
            sum(sizes[r][i] for (r, i), owner in owners.items() if owner == rank)
            for rank in range(world)
        ]
        assert max(loads) <= 1.03 * sum(loads) / world
    ties = assign_groups([{0: 5, 1: 5}, {0: 5, 1: 5}])  # the home rank, then the lowest
    assert ties == {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 0}
    assert assign_groups([{0: 9}, {}]) == {(0, 0): 0}
    uneven = assign_groups([{0: 32, 1: 9, 2: 11}, {0: 10}])
    assert uneven == {(0, 0): 0, (0, 2): 1, (1, 0): 1, (0, 1): 1}
    assert assign_groups([{0: 3, 1: 1}, {0: 2}]) == {(0, 0): 0, (1, 0): 1, (0, 1): 1}
    assert assign_groups([{0: 2, 1: 9, 2: 3}, {}]) == {(0, 1): 0, (0, 2): 1, (0, 0): 1}


def test_a_group_goes_whole_to_its_new_rank_in_the_order_of_home_and_number(monkeypatch):
    """Two ranks as threads. A prompt counts once, masked tokens as much as others: of (home, group)
    = tokens, longest first, (0, 2) = 11 stays, (0, 0) = 10 goes to rank 1, where (1, 0) = 10 is,
    and (0, 1) = 9 stays."""
    groups = [[(0, 8, 1), (1, 1, 4), (2, 1, 5)], [(0, 6, 2)]]  # number, prompt, response tokens
    box, barrier, held = [None, None], threading.Barrier(2), [None, None]

    def gather(value):
        box[int(threading.current_thread().name)] = value
        barrier.wait(60)
        out = list(box)
        barrier.wait(60)
        return out

    def rank(r):
        rollouts = [
            Rollout([10 * r + g] * p, [side] * n, [0.0] * n, [1] + [0] * (n - 1), g, "eos")
            for side in (1, 2)
            for g, p, n in groups[r]
        ]
        advantages = [10.0 * r + x.group_id + x.response_ids[0] / 8 for x in rollouts]
        held[r] = deal_out(rollouts, advantages, SimpleNamespace(rank=r))

    monkeypatch.setattr("batching.gather_objects", gather)
    threads = [threading.Thread(target=rank, args=(r,), name=str(r)) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [
        [(r.group_id, r.prompt_ids[0], r.response_ids[0], a) for r, a in zip(*h)] for h in held
    ]
    for own, expected in zip(found, ([(0, 1, 1.0), (1, 2, 2.0)], [(0, 0, 0.0), (1, 10, 10.0)])):
        assert own == [(n, p, side, a + side / 8) for n, p, a in expected for side in (1, 2)]


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_sum_norm"])
def test_flat_groups_left_out_of_the_update_change_neither_loss_nor_gradient(dist, mode):
    rollouts, advantages = make_batch()
    advantages = torch.where(torch.tensor([r.group_id for r in rollouts]) == 0, 0.0, advantages)
    cfg = grpo.GRPOConfig(kl_coef=0.0, max_grad_norm=1e9, loss_mode=mode, max_response_tokens=16)
    seen = []
    for skip_flat in (False, True):
        policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
        updates = plans(policy, rollouts, advantages, cfg, skip_flat)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        stats = grpo.update(policy, optimizer, updates, cfg, dist)
        seen.append((stats, [distributed.full_tensor(p.detach()) for p in policy.parameters()]))
    model, means = tiny.tiny_lm(seed=1), []
    for r, advantage in zip(rollouts, advantages):
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        logprobs = (model(ids).logits[0, :-1] / cfg.temperature).log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[len(r.prompt_ids) - 1 :, 0]
        means += own[torch.tensor(r.loss_mask).bool()].tolist() if advantage > 0 else []
    (kept, weights), (left_out, same) = seen
    for stats in (kept, left_out):
        assert stats["positive_logprob"] == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert left_out["tokens"] < kept["tokens"]
    assert left_out["loss"] == pytest.approx(kept["loss"], abs=1e-6)
    assert left_out["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-5)
    assert all((a - b).abs().max() <= 1e-6 for a, b in zip(weights, same))


def test_a_step_without_a_gradient_moves_nothing(dist):
    """With kl_coef=0 and flat groups alone, momentum and weight decay would still move the weights."""
    rollouts, advantages = make_batch()
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    optimizer = make_optimizer(policy, 1e-2, weight_decay=0.1)
    cfg = grpo.GRPOConfig(kl_coef=0.0)
    updated(policy, optimizer, rollouts, advantages, cfg, dist)  # there is momentum now
    before = [distributed.full_tensor(p.detach()).clone() for p in policy.parameters()]
    flat = torch.zeros(len(rollouts))
    stats = grpo.update(policy, optimizer, plans(policy, rollouts, flat, cfg, True), cfg, dist)
    assert stats["tokens"] == 0 and math.isnan(stats["entropy"])  # unknown: 0 would be a collapse
    updated(policy, optimizer, rollouts, flat, cfg, dist)
    after = [distributed.full_tensor(p.detach()) for p in policy.parameters()]
    assert all(map(torch.equal, before, after))


def test_micro_batches_hold_the_budget_and_keep_groups_together():
    rng = random.Random(1)
    begin = [5, 6, 7]
    rollouts = [
        Rollout(
            begin + [10 + g] * 4,
            [rng.randrange(5, 200) for _ in range(n)],
            [0.0] * n,
            [1] * n,
            g,
            "eos",
        )
        for g in range(6)
        for n in rng.choices(range(2, 20), k=4)
    ]
    batch = collate_rollouts(rollouts, torch.zeros(24), 0)
    lengths = [len(r.response_ids) - 1 for r in rollouts]
    exact = 3 + 4 + sum(lengths[:4])
    for budget, first in itertools.product((1, 30, 80, exact, 150, 10000), (2, 0)):
        pieces = micro_batch_rows(batch, list(range(first, 24)), budget)
        assert sorted(r for p in pieces for r in p) == list(range(first, 24))
        for piece in pieces:
            laid_out = share_prefixes(
                batch.tokens[piece],
                batch.attention_mask[piece],
                batch.prompt_lengths[piece],
                batch.group_ids[piece],
            )
            size = int((laid_out.segment_ids >= 0).sum())
            assert size <= budget or len(piece) == 1
        for g in range(6):  # a group that fits is in one piece
            if 3 + 4 + sum(lengths[max(first, 4 * g) : 4 * g + 4]) <= budget:
                assert sum(any(r // 4 == g for r in p) for p in pieces) == 1
    assert len(pieces) == 1
    # one response a group, n tokens beyond the common beginning: the longest finds its place first
    four = [Rollout([*begin, 10 + n], [20] * n, [0.0] * n, [1] * n, n, "eos") for n in (2, 3, 5, 4)]
    batch = collate_rollouts(four, [0.0] * 4, 0)
    assert micro_batch_rows(batch, [0, 1, 2, 3], 3 + 7) == [[2, 0], [3, 1]]
    # equal responses to one question asked twice: prompts are shared, responses are not
    twice = [Rollout(begin, [20] * 4, [0.0] * 4, [1] * 4, g, "eos") for g in (0, 1)]
    batch = collate_rollouts(twice, [0.0] * 2, 0)
    assert micro_batch_rows(batch, [0, 1], 3 + 6) == [[0, 1]]
    assert micro_batch_rows(batch, [0, 1], 3 + 5) == [[0], [1]]


def test_a_non_finite_gradient_skips_the_step(dist):
    rollouts, advantages = make_batch()
    model = tiny.tiny_lm(seed=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    policy = distributed.shard_model(prepare_causal_lm(model), dist)
    before = [distributed.full_tensor(p.detach()).clone() for p in policy.parameters()]
    stats = updated(
        policy,
        make_optimizer(policy, 1e-2),
        rollouts,
        advantages,
        grpo.GRPOConfig(kl_coef=0.0),
        dist,
    )
    assert stats["skipped"] == 1
    assert all(
        torch.equal(a.nan_to_num(), distributed.full_tensor(p.detach()).nan_to_num())
        for a, p in zip(before, policy.parameters())
    )


def test_a_skipped_step_leaves_the_next_one_alone(dist):
    """The first of two updates has no finite gradient: its rest would spoil the second."""
    rollouts, advantages = make_batch()
    cfg, after = grpo.GRPOConfig(kl_coef=0.0, updates_per_batch=2), []
    for first, skipped in ((math.nan, 1), (0.0, 0)):
        given = torch.cat([torch.full((4,), first), advantages[4:]])
        policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        assert updated(policy, optimizer, rollouts, given, cfg, dist)["skipped"] == skipped
        after.append([distributed.full_tensor(p.detach()).clone() for p in policy.parameters()])
    assert all(map(torch.equal, *after))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_every_skipped_step_is_counted(dist, monkeypatch, norm):
    policy = distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=1)), dist)
    monkeypatch.setattr(distributed, "clip_grad_norm", lambda *_: norm)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    monkeypatch.setattr(optimizer, "step", lambda: pytest.fail("a step was taken"))
    cfg = grpo.GRPOConfig(kl_coef=0.0, updates_per_batch=3)
    assert updated(policy, optimizer, *make_batch(), cfg, dist)["skipped"] == 3


# ------------------------------------------------------------------------------------------------------------ the scoring


class Ranker:
    """Stands where a retriever stands and remembers what it was asked."""

    def __init__(self, ranks: dict):
        self.ranks, self.asked = ranks, []

    def gold_ranks(self, queries, gold_ids, cutoff=100):
        self.asked += queries
        return [self.ranks[q] for q in queries]


def rollouts_of(texts: list[tuple[int, str]], end: str = "eos") -> list[Rollout]:
    tokenizer = tiny.tiny_tokenizer()
    return [
        Rollout(
            [5], ids := tokenizer(t)["input_ids"] + [2], [0.0] * len(ids), [1] * len(ids), g, end
        )
        for g, t in texts
    ]


def turn(i: int, golds: list[str]) -> data.Turn:
    return data.Turn(f"q{i}", f"c{i}", 1, [], "raw", golds)


def scored(rollouts, ranker) -> list[grpo.Score]:
    """What grpo.score gives for responses to one turn, ranked by `ranker`."""
    task = tasks.Rewrite(grpo.GRPOConfig(), tiny.tiny_tokenizer())
    task.retriever = ranker
    return grpo.score(SimpleNamespace(task=task), rollouts, [turn(0, ["p"])])


def test_scoring_searches_each_well_formed_query_once_and_never_a_malformed_one():
    good = response_text("a", "alpha")
    ranker = Ranker({"alpha": 1, "beta": None})
    rollouts = rollouts_of(
        [
            (0, good),
            (0, good),
            (0, "no tags"),
            (0, "<think>a</think>\n<rewrite>  </rewrite>"),
            (0, response_text("a", "beta")),
        ]
    )
    scores = scored(rollouts, ranker)
    assert ranker.asked == ["alpha", "beta"]  # the empty rewrite is not searched either
    assert [s.reward for s in scores] == [2.0, 2.0, -0.1, -0.1, 0.0]
    assert [s.figures["rank"] for s in scores] == [1, 1, None, None, None]


def test_a_failed_search_is_left_out_and_counted_never_scored(dist):
    from retriever import FAILED

    rollouts = rollouts_of([(0, response_text("t", q)) for q in "abcd"])
    scores = scored(rollouts, Ranker({"a": 1, "b": FAILED, "c": 2, "d": None}))
    assert scores[1].reward is None and [s.reward is None for s in scores].count(True) == 1
    assert scores[1].figures["rank"] is None  # JSON has no NaN
    advantages = grpo.rollout_advantages(rollouts, scores)
    assert [a is None for a in advantages] == [False, True, False, False] and sum(
        a for a in advantages if a is not None
    ) == pytest.approx(0, abs=1e-6)
    run = type("R", (), {"dist": dist})
    figures = step_figures(
        training.rollout_rows(run, rollouts, scores, advantages, [turn(0, ["p"])])
    )
    assert figures["failed"] == 1 and figures["reward"] == pytest.approx((2 + 17 / 9 + 0) / 3)


def test_an_engine_error_is_left_out_and_a_step_of_them_stops_with_a_reason(dist):
    rollouts = rollouts_of([(0, response_text("t", "a")), (0, "x")], end="engine_error")
    scores = scored(rollouts, Ranker({"a": 1}))
    assert [s.reward for s in scores] == [None, None]
    rollouts[1].end = "eos"  # this one's search failed
    with pytest.raises(grpo.Stopped, match="all 2 rollouts.*failed, 1 in the engine.* 1 in search"):
        grpo.rollout_advantages(rollouts, scores)


def test_a_rank_samples_its_places_of_the_steps_order_with_seeds_of_their_own():
    """What world size does not change: which items, in which order, with which seeds."""
    cfg = grpo.GRPOConfig(prompts_per_step=4, group_size=3, temperature=0.9, max_response_tokens=7)
    seeds = set()
    for cfg.seed, step in ((0, 0), (0, 1), (5, 0)):
        order = training.step_items(9, step, 4, cfg.seed)
        drawn = []
        for world in (1, 2, 4):
            asked, samplings, items = [], [], []
            for rank in range(world):
                run = SimpleNamespace(cfg=cfg, items=list("abcdefghi"), engine="engine")
                run.prompts, run.dist = [[i] for i in range(9)], SimpleNamespace(rank=rank)
                run.dist.world, run.task = world, SimpleNamespace(rollouts=lambda *given: given)
                (engine, prompts, how), own = grpo.sample(run, step)
                asked, samplings, items = asked + prompts, samplings + how, items + own
                assert engine == "engine" and len(own) == 4 // world
            assert asked == [[i] for i in order] and items == ["abcdefghi"[i] for i in order]
            given = {(s.n, s.temperature, s.top_p, s.max_tokens) for s in samplings}
            assert given == {(3, 0.9, 1.0, 7)}
            drawn.append([s.seed for s in samplings])
        assert drawn[0] == drawn[1] == drawn[2]
        seeds |= set(drawn[0])
    assert len(seeds) == 12  # another for each place, step and run


def test_advantages_go_to_the_rollouts_that_did_not_fail(dist, monkeypatch):
    rollouts = rollouts_of([(0, "a"), (0, "b"), (0, "c"), (1, "d"), (1, "e"), (1, "f")])
    scores = [grpo.Score("", r, {}) for r in (None, 1.0, 0.0, 5.0, None, 6.0)]
    plain = [None, 0.5, -0.5, -0.5, None, 0.5]
    assert grpo.rollout_advantages(rollouts, scores, False) == plain
    scaled = grpo.rollout_advantages(rollouts, scores)
    for found, difference in zip(scaled, plain):  # over their standard deviation
        if difference is None:
            assert found is None
        else:
            assert found == pytest.approx(difference / (math.sqrt(0.5) + 1e-6), rel=1e-6)
    # all of this rank failed, but not all of another
    monkeypatch.setattr(distributed, "gather_objects", lambda kept: [kept, True])
    assert grpo.rollout_advantages(rollouts[:1], scores[:1]) == [None]


def test_updates_hold_the_reference_and_leave_flat_groups_out_where_nothing_pulls_on_them(dist):
    """A flat group has a gradient by KL and entropy bonus alone."""
    rollouts, advantages = make_batch()
    flat = [0.0 if r.group_id else a for r, a in zip(rollouts, advantages.tolist())]
    models = [
        distributed.shard_model(prepare_causal_lm(tiny.tiny_lm(seed=s)), dist) for s in (1, 2)
    ]
    for reference, entropy_coef, kept in (
        (None, 0.0, 4),
        (None, 0.1, 8),
        (models[1], 0.0, 8),
        (models[1], 0.1, 8),
    ):
        cfg = grpo.GRPOConfig(entropy_coef=entropy_coef, micro_batch_tokens=1, updates_per_batch=2)
        run = SimpleNamespace(cfg=cfg, dist=dist, policy=models[0], reference=reference)
        run.engine = SimpleNamespace(pad_id=0)
        updates = grpo.build_updates(run, rollouts, flat)
        trained = [m for u in updates for m in u.micro_batches if m.part.loss_mask.any()]
        assert len(updates) == 2 and len(trained) == kept  # one sequence each
        for micro in trained:
            assert (micro.ref_logprobs is None) == (reference is None)
            if reference is not None:
                tokens, mask = micro.part.tokens, micro.part.attention_mask
                expected = token_logprobs(reference, tokens, mask, cfg.temperature)
                wrong = (micro.ref_logprobs - expected)[micro.part.loss_mask.bool()]
                assert wrong.abs().max() < 2e-5 and not micro.ref_logprobs.requires_grad


# --------------------------------------------------------------------------------------------------------------- the loop


@pytest.fixture(scope="module")
def finished(world):
    """An undisturbed run of four steps."""
    done = run(world, "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_run_folder_and_last_line(world, finished):
    last = json.loads(finished.stdout.strip().splitlines()[-1])
    assert last["steps"] == 4 and last["final"] == "whole/final"
    rows = metrics(world, "whole")
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4] and rows[0]["dev_mrr"] == last[
        "dev_mrr_start"
    ]
    assert any(r["grad_norm"] > 0 for r in rows[1:]) and all(
        r["prompt_tokens"] > 0 for r in rows[1:]
    )
    rollouts = [row for _, row in data.read_jsonl(world / "whole/rollouts/step_000001.jsonl")]
    assert len(rollouts) == 16 and {"query_id", "response", "rank", "reward", "advantage"} <= set(
        rollouts[0]
    )
    assert "4 prompts × 4 samples / 1 process = 16 sequences" in finished.stdout
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(world / "whole/final")


def test_a_killed_run_continues_bit_identically(world, finished):
    process = subprocess.Popen(
        command(world, "killed"),
        cwd=world,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wanted = world / "killed/checkpoint_000002"
    deadline = time.time() + 300
    while not wanted.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert (
        wanted.exists()
        or (world / "killed/checkpoint_000003").exists()
        or (world / "killed/checkpoint_000004").exists()
    )
    again = run(world, "killed")
    assert again.returncode == 0 and "resumed from" in again.stdout, again.stderr[-2000:]
    assert metrics(world, "killed") == metrics(world, "whole")
    weights = [
        (world / name / "final/model.safetensors").read_bytes() for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1]


def test_sigterm_finishes_the_step_saves_and_leaves_with_143(world):
    process = subprocess.Popen(
        command(world, "terminated", "steps=50", "save_every=100"),
        cwd=world,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not process.stdout.readline().startswith("step 00002"):
        pass
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err[-2000:]
    assert (
        "stopped by signal 15" in out
        and len(list((world / "terminated").glob("checkpoint_*"))) == 1
    )


def test_a_continuation_differs_only_in_what_does_not_decide_the_result(
    world, finished, dist, monkeypatch
):
    shutil.copytree(world / "whole", world / "changed")
    (world / "elsewhere").mkdir()
    shutil.copy(world / "train.jsonl", world / "elsewhere")
    monkeypatch.chdir(world)

    def resume(*more):
        run = grpo.start(config.load_config(grpo.GRPOConfig, [*settings("changed"), *more]), dist)
        return run, training.resume(run)["step"]

    for more, words in [
        ("lr=1e-4", "lr was 0.001 and is 0.0001"),
        ("train=dev.jsonl", "train was 'train.jsonl' and is"),
        ("retriever.k1=0.5", "retriever.k1 was 0.9 and is 0.5"),
        ("steps=3", "has 4 steps done"),
    ]:
        with monkeypatch.context() as m, pytest.raises(config.ConfigError, match=words):
            if "steps" not in more:  # refused before anything is loaded
                m.setattr(training, "load", None)
            resume(more)
    with runs.only_writer("changed"), monkeypatch.context() as m:  # it is running
        m.setattr(training, "load", None)
        with pytest.raises(runs.FolderInUse):
            grpo.main(config.load_config(grpo.GRPOConfig, [*settings("changed"), "lr=1e-4"]))
    (world / "changed/rollouts/step_000009.jsonl").write_text("of a step that is taken again")
    (world / "changed/rollouts/step_000004.jsonl.12.tmp").write_text("half")
    with open(world / "changed/metrics.jsonl", "a") as f:
        f.write('{"step": 5, "rew')  # a kill in the middle of the line
    run, done = resume(
        "steps=9",
        "micro_batch_tokens=99",
        "engine.batch=3",
        "retriever.device=cpu",
        "model=./lm",
        "train=elsewhere/train.jsonl",
    )
    assert done == 4 and [row["step"] for row in run.history] == [1, 2, 3, 4]
    assert "dev_mrr" in run.history[-1]  # logged after the checkpoint; step 4 is not due any more
    assert sorted(os.listdir("changed/rollouts")) == [
        f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)
    ]
    state = world / "changed/checkpoint_000004/state.json"
    state.write_text(json.dumps({"step": 4, "best": {}}))
    with pytest.raises(config.ConfigError, match="no checkpoint of this version"):
        resume()
    for folder in (world / "changed").glob("checkpoint_*"):
        shutil.rmtree(folder)
    with pytest.raises(config.ConfigError, match="finished run without a checkpoint"):
        resume()
    assert len(list(data.read_jsonl("changed/metrics.jsonl"))) == 4  # the last is logged anew
    shutil.rmtree("changed/final")
    os.makedirs("changed/best", exist_ok=True)
    with pytest.raises(config.ConfigError, match="best is of a run with other settings: lr was"):
        resume("lr=1e-4")
    assert resume()[1] == 0 and not os.path.exists(
        "changed/best"
    )  # another run's: bench scripts would take it


@pytest.mark.parametrize("name", training.FILES)
def test_what_a_file_says_is_part_of_the_settings(tmp_path, name):
    cfg, path = grpo.GRPOConfig(), tmp_path / "file"
    path.write_text("a")
    place, _, key = name.rpartition(".")
    value = [str(path)] if name == "qrels" else str(path)
    setattr(cfg.episode if place else cfg, key, value)
    before = json.loads(json.dumps(training.settings(cfg)))
    assert runs.changed_setting(before, training.settings(cfg)) == ""
    path.write_text("b")
    assert runs.changed_setting(before, training.settings(cfg)) == f"{name}={str(path)!r} has " + (
        "other content"
    )
    setattr(cfg.episode if place else cfg, key, [] if name == "qrels" else "")
    assert runs.changed_setting(before, training.settings(cfg)).startswith(f"{name} was")


def test_a_resumed_run_remembers_what_it_saw(world, finished, dist, monkeypatch):
    """Three bad steps in a row stop it, wherever the kill came; null in the log is not a number."""
    shutil.copytree(world / "whole", world / "bad")
    rows = [
        row | {"skipped": 1, "grad_norm": None, "kl": None}
        for row in read_metrics(str(world / "whole/metrics.jsonl"))
    ]
    write_jsonl(world / "bad/metrics.jsonl", rows)
    state = world / "bad/checkpoint_000004/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"row": rows[-1]}))
    monkeypatch.chdir(world)
    run = grpo.start(config.load_config(grpo.GRPOConfig, [*settings("bad"), "steps=9"]), dist)
    training.resume(run)
    with pytest.raises(grpo.Stopped, match="not finite in three steps"):
        training.guard(run, run.history)
    run.history = [row | {"skipped": 0} for row in run.history * 5]
    training.guard(run, run.history)


def test_a_run_that_dead_tools_stopped_goes_on_when_they_are_mended(
    world, finished, dist, monkeypatch
):
    """Its checkpoint and log may hold the very steps that stopped it."""
    shutil.copytree(world / "whole", world / "mended")
    old = read_metrics(str(world / "whole/metrics.jsonl"))
    rows = [row | {"failed": 3, "searches": 0.0} for row in old]
    write_jsonl(world / "mended/metrics.jsonl", rows)
    state = world / "mended/checkpoint_000004/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"row": rows[-1]}))
    monkeypatch.chdir(world)
    words = [*settings("mended"), "steps=9", "save_every=100", "validate_every=100"]
    run = grpo.start(config.load_config(grpo.GRPOConfig, words), dist)
    taken = []

    def take(run, step):
        taken.append(step)
        return rows[-1] | {"step": step + 1}

    with pytest.raises(grpo.Stopped, match="step 7: in three steps in a row episodes failed"):
        training.steps(run, training.resume(run), take, lambda run, step: {}, [])
    assert taken == [4, 5, 6]


def test_two_processes_take_the_same_steps_as_one(world, finished):
    done = run(world, "double", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = metrics(world, "whole"), metrics(world, "double")
    for a, b in zip(one[1:3], two[1:3]):
        for key in ("reward", "format_rate", "mrr", "tokens", "loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (a["step"], key)


def test_a_run_of_one_process_continues_on_two(world):
    assert run(world, "moved", "steps=2").returncode == 0
    done = run(world, "moved", "steps=3", processes=2)
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr[-2000:]
    assert [r["step"] for r in metrics(world, "moved")] == [0, 1, 2, 3]


def test_grpo_learns_to_name_what_is_rewarded(world, dist, monkeypatch):
    """One prompt, ten possible queries, one of them right: the policy finds it."""
    rows = [row for _, row in data.read_jsonl(world / "train.jsonl")][:1]
    write_jsonl(world / "one.jsonl", rows)
    monkeypatch.chdir(world)
    monkeypatch.setattr(distributed, "cleanup", lambda: None)
    grpo.main(
        config.load_config(
            grpo.GRPOConfig,
            [
                *settings("learns"),
                "train=one.jsonl",
                "dev=",
                "steps=30",
                "prompts_per_step=2",
                "group_size=16",
                "lr=2e-3",
                "warmup_steps=1",
                "micro_batch_tokens=4096",
                "save_every=100",
                "temperature=1.0",
            ],
        )
    )
    rewards = [r["reward"] for r in metrics(world, "learns") if r["step"]]
    # a random choice earns 0.2; of 20 seeds the best beginning has 0.32, the worst end 1.02
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.8, rewards


@pytest.mark.parametrize(
    "more, words",
    [
        ("group_size=1", ["group_size=1", "at least 2"]),
        ("train=missing.jsonl", ["missing.jsonl"]),
        ("model=./nowhere", ["nowhere"]),
        ("temperature=0", ["temperature"]),
        ("temperature=1e-9", ["temperature"]),
        ("kl_limit=100", ["kl_limit", "80"]),
        ("retriever.corpus=", ["corpus"]),
        ("group_sise=4", ["group_size"]),
        ("max_response_tokens=5000", ["2048 positions"]),
        ("train=foreign.jsonl", ["elsewhere-1", "foreign.jsonl"]),
        ("train=", ["train"]),
        ("lr=-1", ["lr=-1"]),
        ("lr=.inf", ["lr=inf"]),
        ("max_grad_norm=-1", ["max_grad_norm"]),
        ("kl_limit=.inf", ["kl_limit"]),
        ("weight_decay=-1", ["weight_decay"]),
        ("malformed_reward=.inf", ["malformed_reward"]),
        ("warmup_steps=-1", ["warmup"]),
        ("out=corpus.jsonl", ["corpus.jsonl is a file"]),
        ("model=window", ["16 positions"]),
        ("train=empty.jsonl", ["empty.jsonl"]),
        ("train=bad.jsonl", ["bad.jsonl:2"]),
        ("clip_eps=2", ["clip_eps"]),
    ],
)
def test_bad_input_is_refused_with_status_2(world, dist, monkeypatch, more, words):
    rows = [row for _, row in data.read_jsonl(world / "train.jsonl")]
    write_jsonl(world / "foreign.jsonl", [rows[0] | {"gold_ids": ["elsewhere-1"]}])
    tiny.tiny_lm(world / "window", use_sliding_window=True, sliding_window=16)
    (world / "empty.jsonl").write_text("")
    (world / "bad.jsonl").write_text(json.dumps(rows[0]) + "\n{broken\n")
    monkeypatch.chdir(world)
    with pytest.raises(ValueError) as caught:
        grpo.main(config.load_config(grpo.GRPOConfig, [*settings("refused"), more]))
    assert caught.value.exit_status == 2 and all(w in str(caught.value) for w in words), (
        caught.value
    )
    assert not (world / "refused").exists()


def test_turns_without_gold_and_long_prompts_are_left_out_and_counted(
    world, dist, monkeypatch, capsys
):
    rows = [row for _, row in data.read_jsonl(world / "train.jsonl")]
    write_jsonl(world / "some.jsonl", [rows[0] | {"gold_ids": []}, *rows[1:5]])
    monkeypatch.chdir(world)
    run = grpo.start(
        config.load_config(grpo.GRPOConfig, [*settings("some"), "train=some.jsonl"]), dist
    )
    assert (
        len(run.items) == 4 and "1 turns without a gold passage left out" in capsys.readouterr().out
    )
    write_jsonl(world / "long.jsonl", [rows[0], rows[1] | {"context": [["long " * 200, "a"]]}])
    run.task.tokenizer = tiny.tiny_tokenizer()  # the world's own has one token for every prompt
    run.cfg.max_prompt_tokens = len(run.task.prompt(run.items[0])) + 100
    kept, prompts = training.load_items(run.cfg, "long.jsonl", run.task)
    assert [t.query_id for t in kept] == [rows[0]["query_id"]] and len(prompts) == 1
    assert "1 of 2 left out" in capsys.readouterr().out


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused_before_loading(world):
    cfg = config.load_config(grpo.GRPOConfig, [*settings("uneven"), "prompts_per_step=3"])
    with pytest.raises(
        config.ConfigError, match="prompts_per_step=3 over 2 processes.* such as 2$"
    ):
        grpo.check_config(cfg, 2)


def test_a_run_that_cannot_learn_says_so(capsys):
    """Format rate 0 makes every group flat while validation shows the raw question's figures: easily taken for a result."""
    run = type(
        "R",
        (),
        {
            "cfg": grpo.GRPOConfig(),
            "best": {"step": -1},
            "history": [{"skipped": 0, "flat_groups": 1.0, "format_rate": 0.0}] * 3,
        },
    )
    training.guard(run, run.history)
    assert "every group was flat (format rate 0.00)" in capsys.readouterr().out
    run.history = [{"skipped": 0, "flat_groups": 0.9, "format_rate": 0.5}] * 3
    training.guard(run, run.history)
    assert not capsys.readouterr().out


def test_what_stops_a_run_and_what_does_not(capsys):
    """Three in a row of non-finite gradients or dead tools, and a collapse where that is wanted."""
    good = {"skipped": 0, "failed": 0, "searches": 1.0, "flat_groups": 0.5, "format_rate": 0.9}
    good |= {"reward": 1.0, "entropy": 0.5, "kl": 0.01, "step": 7}
    skipped, flat = good | {"skipped": 1}, good | {"flat_groups": 1.0}
    dead, unasked = good | {"failed": 2, "searches": 0.0}, good | {"searches": 0.0}
    cfg = grpo.GRPOConfig()

    def reason(history, own=None):
        run = SimpleNamespace(cfg=cfg, best={"step": -1}, history=history)
        try:
            training.guard(run, history if own is None else own)
        except training.Stopped as e:
            return str(e)

    for history in ([skipped] * 3, [good, skipped, skipped, skipped]):
        assert "not finite in three steps" in reason(history)
    for history in ([skipped] * 2, [good, skipped, skipped], [skipped] * 3 + [good]):
        assert reason(history) is None
    assert "tools" in reason([good, dead, dead, dead])
    for history in ([dead] * 2, [dead, good, dead], [unasked] * 3, [good | {"failed": 2}] * 3):
        assert reason(history) is None
    assert reason([dead] * 3, own=[dead] * 2) is None  # the first was another process's
    assert not capsys.readouterr().out
    for history in ([flat, flat, good], [flat] * 4):  # one warning, not one a step
        assert reason(history) is None and not capsys.readouterr().out
    collapsed = [good] * 20 + [good | {"format_rate": 0.1}] * 10
    assert "collapsed: format_rate" in reason(collapsed)
    cfg.stop_on_collapse = False
    assert reason(collapsed) is None


def test_the_first_of_equal_validations_is_the_best(monkeypatch):
    exported, run = [], SimpleNamespace(kept="best", best={"value": -math.inf, "step": -1})
    monkeypatch.setattr(training, "export", lambda run, name, notes: exported.append(notes))
    for step, value in ((0, 0.5), (20, 0.5), (40, 0.6), (60, 0.6), (80, math.nan)):
        training.keep_best(run, step, value)
    assert run.best == {"value": 0.6, "step": 40} and exported == [{"best.json": run.best}]


def test_a_step_goes_in_its_order_with_its_learning_rate(dist, monkeypatch):
    cfg, calls = grpo.GRPOConfig(lr=1e-3, warmup_steps=2, scale_by_std=False), []
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    run = SimpleNamespace(cfg=cfg, dist=dist, policy=torch.nn.Linear(1, 1), optimizer=optimizer)
    run.steps, run.task = 9, SimpleNamespace(seconds=dict)
    run.engine = SimpleNamespace(
        total=SimpleNamespace(prompt_tokens=0, held_tokens=0),
        sleep=lambda: calls.append("sleep"),
        sync_weights=lambda named: calls.append([name for name, _ in named]),
        wake=lambda: calls.append("wake"),
    )
    scored = [SimpleNamespace(reward=r, text="", figures={}) for r in (1.0, 0.0)]
    rollouts = rollouts_of([(0, "a"), (0, "b")])
    monkeypatch.setattr(grpo, "sample", lambda run, step: (rollouts, [turn(0, ["p"])]))
    monkeypatch.setattr(grpo, "score", lambda *_: scored)
    monkeypatch.setattr(grpo, "build_updates", lambda run, rollouts, advantages: advantages)
    monkeypatch.setattr(grpo, "step_figures", lambda rows: {})
    monkeypatch.setattr(training, "check_weights", lambda engine, stats: calls.append(stats))

    def update(policy, optimizer, advantages, cfg, dist):
        calls.append((optimizer.param_groups[0]["lr"], advantages))
        return {"skipped": 0}

    monkeypatch.setattr(grpo, "update", update)
    for step, lr in enumerate((5e-4, 1e-3, 1e-3)):
        row, _ = grpo.train_step(run, step)
        update_and_sync = [(lr, [0.5, -0.5]), {"skipped": 0}, ["weight", "bias"], "wake"]
        assert calls == ["sleep", *update_and_sync]
        assert (row["step"], row["lr"]) == (step + 1, lr)
        calls.clear()


@pytest.mark.parametrize("rank, mine", [(0, [0, 2, 4]), (1, [1, 3])])
def test_validation_is_greedy_and_shared_by_the_ranks(dist, monkeypatch, rank, mine):
    asked, kept = [], []

    def rollouts(engine, prompts, sampling, progress):
        asked.append((prompts, sampling.temperature, sampling.n, sampling.max_tokens))
        return "rollouts"

    def validated(found, own, dev):
        assert found == "rollouts"
        return {"own": own, "mrr": 0.5}

    task = SimpleNamespace(rollouts=rollouts, validate=validated, best="dev_mrr")
    run = SimpleNamespace(task=task, engine=None, dev=list("abcde"), steps=9, best={})
    run.dist, run.dev_prompts = SimpleNamespace(rank=rank, world=2), [[i] for i in range(5)]
    run.cfg = grpo.GRPOConfig(max_response_tokens=7)
    monkeypatch.setattr(training, "keep_best", lambda run, *found: kept.append(found))
    monkeypatch.setattr(grpo, "validation_line", lambda *_: "")
    assert grpo.validate(run, 3) == {"dev_own": ["abcde"[i] for i in mine], "dev_mrr": 0.5}
    assert asked == [([[i] for i in mine], 0.0, 1, 7)] and kept == [(3, 0.5)]


def loaded(world, out, dist, *more):
    return grpo.start(config.load_config(grpo.GRPOConfig, [*settings(out), *more]), dist)


def test_best_is_what_its_folder_says(world, finished, dist, monkeypatch):
    """A kill between an export and the next checkpoint: the folder holds a step that is taken again."""
    shutil.copytree(world / "whole", world / "lost")
    monkeypatch.chdir(world)
    run = loaded(world, "lost", dist, "steps=9")
    training.keep_best(run, 7, 0.9)
    again = loaded(world, "lost", dist, "steps=9")
    training.resume(again)
    assert again.best == {"value": 0.9, "step": 7}
    shutil.rmtree(world / "lost/best")
    training.resume(again)
    start = metrics(world, "lost")[0]["dev_mrr"]
    assert again.best == {
        "value": start,
        "step": 0,
    }  # the start has no folder: its figure is in the log


class Away(RuntimeError):
    exit_status = 1


def test_a_step_is_checkpointed_before_it_is_validated(world, dist, monkeypatch):
    """A search server that is away, or a full disk while best/ is written, loses no step."""
    monkeypatch.chdir(world)
    validate = grpo.validate

    def away(run, step):
        if step:
            raise Away("the search server is away")
        return validate(run, step)

    cfg = config.load_config(grpo.GRPOConfig, [*settings("away"), "save_every=2"])
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "validate", away)
        patch.setattr(distributed, "cleanup", lambda: None)
        with pytest.raises(Away):
            grpo.main(cfg)
        assert [row["step"] for row in metrics(world, "away")] == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "cleanup", lambda: None)
        assert grpo.main(cfg)["steps"] == 4
    rows = metrics(world, "away")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and "dev_mrr" in rows[2]


def test_without_validation_the_last_policy_is_offered(world, dist, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setattr(distributed, "cleanup", lambda: None)
    result = grpo.main(config.load_config(grpo.GRPOConfig, [*settings("nodev"), "dev=", "steps=1"]))
    assert result["best"] == result["final"] == os.path.join("nodev", "final")
    out = capsys.readouterr().out
    assert "nodev holds no checkpoint: the run begins at step 0" in out
    assert "warning: warmup_steps=2 of 1 steps: the learning rate ends at 0.0005 of 0.001" in out


def test_missing_rows_of_the_log_are_told(world, finished, dist, monkeypatch, capsys):
    shutil.copytree(world / "whole", world / "unlogged")
    (world / "unlogged/metrics.jsonl").unlink()
    monkeypatch.chdir(world)
    training.resume(loaded(world, "unlogged", dist, "steps=9"))
    assert "lacks 3 of 4 steps" in capsys.readouterr().out
    (world / "unlogged/metrics.jsonl").write_text('{"reward": 1.0}\n')
    with pytest.raises(data.DataError, match="metrics.jsonl:1: the row has no step"):
        training.resume(loaded(world, "unlogged", dist, "steps=9"))
