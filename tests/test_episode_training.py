"""Episodes with real engines, their gradients, inference and training on them."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pathlib import Path

import tiny
import torch
from scripted import (
    EOS,
    Search,
    search_task,
    tokenizer,
)

import config
import data
import distributed
import grpo
import infer
import tasks
from data import DataError
from engines.base import Rollout, Sampling
from engines.torch_engine import TorchEngine
from episodes import tools
from episodes.episode import run_episodes
from episodes.tasks import EpisodeConfig, SearchTask
from model import load_tokenizer, prepare_causal_lm
from packing import token_logprobs
from retriever import RetrieverConfig
from runs import write_jsonl


def noisy_episodes(seed=0, temperature=1.0, engine=None, n=3):
    """Episodes of a tiny random model, whose turns end at a letter or digit and two thirds of which are a search."""

    class Eager(SearchTask):
        def find_calls(self, said, turn, stopped):
            return [] if len(turn) % 3 == 0 else [tools.Call("search", {"query": "Ann Bob"})]

    cfg = EpisodeConfig(max_rounds=4, turn_tokens=40, result_tokens=60)
    task = Eager(cfg, tokenizer(), search_task().tools)
    task.stop = tuple("abcdefghijklmnopqrstuvwxyz0123456789")
    lm = tiny.tiny_lm(seed=seed)
    engine = engine or TorchEngine(lm, [EOS], 0, tokenizer(), 8)
    return (
        run_episodes(
            engine,
            [[5, 6, 7], [8, 9]],
            Sampling(n=n, temperature=temperature, max_tokens=300, seed=3),
            task,
            2048,
        ),
        lm,
        task,
    )


def test_episodes_of_a_real_engine_and_its_log_probabilities():
    """Invariant 6: what the engine reports for the model's tokens is what the trainer computes, across injections."""
    done, lm, _ = noisy_episodes()
    assert sum(len(e.calls) for e in done) >= 3 and any(0 in e.loss_mask for e in done)
    for e in done:
        assert len(e.response_ids) == len(e.loss_mask) == len(e.logprobs)
        tokens = torch.tensor([e.prompt_ids + e.response_ids])
        logprobs = token_logprobs(lm, tokens, torch.ones_like(tokens))[0, len(e.prompt_ids) - 1 :]
        mask = torch.tensor(e.loss_mask).bool()
        torch.testing.assert_close(
            logprobs[mask], torch.tensor(e.logprobs)[mask], atol=1e-4, rtol=1e-4
        )
    again, _, _ = noisy_episodes()
    assert [e.response_ids for e in again] == [e.response_ids for e in done]
    assert len({tuple(e.response_ids) for e in done[:3]}) > 1


def gradients(rollouts, advantages, dist, **changes):
    """The full gradient of one update (nothing is stepped), and its statistics."""
    cfg = grpo.GRPOConfig(
        **{"kl_coef": 0.1, "entropy_coef": 0.01, "max_grad_norm": 1e9, "temperature": 1.0} | changes
    )
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

    run = SimpleNamespace(
        cfg=cfg, dist=dist, engine=SimpleNamespace(pad_id=0), policy=policy, reference=reference
    )
    updates = grpo.build_updates(run, rollouts, list(advantages))
    stats = grpo.update(policy, Recorder(policy.parameters(), lr=0.0), updates, cfg, dist)
    return found, stats


def by_hand(rollouts, advantages, mode, level=None, cap=None):
    """Loss over the model's own tokens in plain loops, float64, no formula of the project; its gradient.

    With `level` the policy's part is weighted by the ratio to the engine, limited by `cap`.
    """
    policy, reference = tiny.tiny_lm(seed=1).double(), tiny.tiny_lm(seed=2).double()
    rows = []
    for r, a in zip(rollouts, advantages):
        ids = torch.tensor([r.prompt_ids + r.response_ids])
        mine, ref = (torch.log_softmax(m(ids).logits[0], -1) for m in (policy, reference))
        losses = []
        ratios = {
            i: math.exp(mine[len(r.prompt_ids) + i - 1, token].item() - r.logprobs[i])
            for i, token in enumerate(r.response_ids)
            if r.loss_mask[i]
        }
        whole = math.prod(ratios.values())
        for i, token in enumerate(r.response_ids):
            if r.loss_mask[i]:
                weight = 1.0
                if level == "token":
                    weight = min(ratios[i], cap)
                if level == "sequence":
                    weight = whole if whole <= cap else 0.0
                at = len(r.prompt_ids) + i - 1
                d = ref[at, token].detach() - mine[at, token]
                kl = torch.exp(d) - d - 1 if d <= 5 else math.exp(5) * (1 + d - 5) - d - 1
                entropy = -(mine[at].exp() * mine[at]).sum()
                losses.append(
                    -a * weight * torch.exp(mine[at, token] - mine[at, token].detach())
                    + 0.1 * kl
                    - 0.01 * entropy
                )
        rows.append(losses)
    trained = [x for x in rows if x]
    loss = {
        "token_mean": sum(sum(x) for x in trained) / sum(map(len, trained)),
        "seq_mean_token_mean": sum(sum(x) / len(x) for x in trained) / len(trained),
        "seq_sum_norm": sum(sum(x) for x in trained) / (len(trained) * 300),
    }[mode]
    loss.backward()
    return {name: p.grad.float() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_sum_norm"])
def test_injected_tokens_are_in_no_loss_kl_entropy_or_denominator(mode, dist):
    """Invariant 5 through the whole update, against loops over the model's own tokens alone."""
    done, _, _ = noisy_episodes()
    advantages = [0.5, -1.0, 0.25, 1.0, -0.5, 0.75]
    found, stats = gradients(done, advantages, dist, loss_mode=mode, max_response_tokens=300)
    expected = by_hand(done, advantages, mode)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3)
    assert (
        stats["tokens"]
        == sum(sum(e.loss_mask) for e in done)
        < sum(len(e.response_ids) for e in done)
    )


@pytest.mark.parametrize("level, cap", [("token", 1.05), ("sequence", 2.0)])
def test_weights_for_the_engine_through_the_whole_update(level, cap, dist):
    """Engine log-probabilities that are off by up to .2: some tokens are cut off, some responses left out."""
    done, lm, _ = noisy_episodes()
    rng = random.Random(0)
    off = [replace(e, logprobs=own_logprobs(e, rng)) for e in done]
    advantages = [0.5, -1.0, 0.25, 1.0, -0.5, 0.75]
    changes = {"importance_cap": cap, "importance_level": level}
    found, stats = gradients(off, advantages, dist, max_response_tokens=300, **changes)
    for name, gradient in by_hand(off, advantages, "token_mean", level, cap).items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3)
    without, _ = gradients(off, advantages, dist, max_response_tokens=300)
    assert any((found[name] - without[name]).abs().max() > 1e-3 for name in found)
    assert 0.2 < stats["effective_samples"] < 0.999


def test_where_every_response_is_left_out_the_weights_stay(dist):
    done, _, _ = noisy_episodes()
    off = [replace(e, logprobs=[lp - 50 for lp in e.logprobs]) for e in done]
    advantages = [0.5, -1.0, 0.25, 1.0, -0.5, 0.75]
    alone = {"kl_coef": 0.0, "entropy_coef": 0.0, "importance_cap": 2.0}
    found, stats = gradients(off, advantages, dist, importance_level="sequence", **alone)
    assert found == {} and stats["tokens"] and stats["effective_samples"] == 0
    found, stats = gradients(off, advantages, dist, **alone)
    assert found and stats["effective_samples"] == pytest.approx(1)  # every token at the cap


def own_logprobs(e, rng):
    """The policy's log-probabilities of an episode's response, each off by up to .2."""
    ids = torch.tensor([e.prompt_ids + e.response_ids])
    with torch.no_grad():
        found = token_logprobs(tiny.tiny_lm(seed=1), ids, torch.ones_like(ids))[0]
    return [lp + rng.uniform(-0.2, 0.2) for lp in found[len(e.prompt_ids) - 1 :].tolist()]


def test_what_stands_at_injected_positions_never_matters(dist):
    """Engine log-probabilities there may be anything; a rollout without a trained token adds nothing; nor do failures."""
    done, _, _ = noisy_episodes()
    advantages = [0.5, -1.0, 0.25, 1.0, -0.5, 0.75]
    found, stats = gradients(done, advantages, dist, importance_cap=2.0)
    wild = [
        Rollout(
            e.prompt_ids,
            e.response_ids,
            [lp if m else math.nan for lp, m in zip(e.logprobs, e.loss_mask)],
            e.loss_mask,
            e.group_id,
            e.end,
        )
        for e in done
    ]
    empty = Rollout(
        done[-1].prompt_ids, [9, 9, 9], [0.0] * 3, [0] * 3, done[-1].group_id, "tool_error"
    )
    again, same = gradients([*wild, empty], [*advantages, None], dist, importance_cap=2.0)
    assert {k: v for k, v in same.items()} == pytest.approx(stats, rel=1e-5)
    for name in found:
        torch.testing.assert_close(again[name], found[name], atol=1e-6, rtol=1e-4)


def test_documents_change_the_context_not_the_targets(dist):
    """Other documents under the same sampled ids: other logits behind them, and no loss of their own.

    With a model whose attention sees nothing before a token's own position there is no context either: then documents
    change nothing at all.
    """
    done, _, _ = noisy_episodes()
    swapped = [
        Rollout(
            e.prompt_ids,
            [t if m else 200 for t, m in zip(e.response_ids, e.loss_mask)],
            e.logprobs,
            e.loss_mask,
            e.group_id,
            e.end,
        )
        for e in done
    ]
    advantages = [0.5, -1.0, 0.25, 1.0, -0.5, 0.75]
    a, first = gradients(done, advantages, dist)
    b, second = gradients(swapped, advantages, dist)
    assert first["tokens"] == second["tokens"] and first["kl"] != second["kl"]
    expected = by_hand(swapped, advantages, "token_mean")
    for name, gradient in expected.items():
        torch.testing.assert_close(b[name], gradient, atol=2e-5, rtol=1e-3)


def write_world(folder, count=6):
    """Questions whose answer stands in the one passage that `what alpha3` finds."""
    write_jsonl(
        folder / "corpus.jsonl",
        [{"id": f"p{i}", "title": f"T{i}", "text": f"alpha{i} is beta{i}"} for i in range(10)],
    )
    for name, first in (("train", 0), ("dev", count)):
        rows = [
            {
                "id": f"{name}{i}",
                "question": f"what is it {first + i}",
                "golden_answers": [f"beta{i % 10}"],
            }
            for i in range(count)
        ]
        write_jsonl(folder / f"{name}.jsonl", rows)
        (folder / f"{name}.qrels").write_text(
            "".join(f"{name}{i} 0 p{i % 10} 1\n" for i in range(count))
        )


CHOICES = 4  # words that the model of `world` searches for, and words that it answers with
SHORT = (
    "<think>a</think><search>alpha{}</search>",
    r"<think>b</think><answer>\boxed{{beta{}}}</answer>",
)


def write_searching_lm(folder):
    """A tiny model that has learnt to search for one of CHOICES words and to answer with one, whatever the prompt.

    Tags are tokens of their own, so that episodes are short. The learning rate falls to zero: the model ends in a flat
    place, from which small steps of training change its choices and not its form.
    """
    tok = tiny.tiny_tokenizer()
    tok.add_tokens(
        [
            f"<{slash}{name}>"
            for name in ("think", "search", "result", "answer")
            for slash in ("", "/")
        ]
    )
    model = tiny.tiny_lm(hidden_size=128, vocab=len(tok))  # vLLM's CPU kernels want heads of 32
    tok.chat_template = "{{ '!' }}"  # one constant token as prompt
    tok.save_pretrained(folder)
    rng, optimizer, steps = random.Random(0), torch.optim.AdamW(model.parameters()), 160
    for step in range(steps):
        rows, masks = [], []
        for _ in range(6):
            i, j = rng.randrange(CHOICES), rng.randrange(CHOICES)
            shown = f' <result>\n"T{i}"\nalpha{i} is beta{i}\n</result>'
            parts = [(SHORT[0].format(i), 1), (shown, 0), (SHORT[1].format(j) + tok.eos_token, 1)]
            encoded = [(tok(text)["input_ids"], mask) for text, mask in parts]
            rows.append([5] + [token for ids, _ in encoded for token in ids])
            masks.append([mask for ids, mask in encoded for _ in ids])
        tokens, mask = torch.tensor(rows), torch.tensor(masks)
        loss = -(token_logprobs(model, tokens, torch.ones_like(tokens)) * mask).sum() / mask.sum()
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    write_world(folder)
    write_searching_lm(folder / "lm")
    return folder


@pytest.mark.vllm
def test_both_engines_give_the_same_greedy_episodes(world):
    """One greedy model, two engines: the same token lists, masks, searches and ends, and log-probabilities alike."""
    import rollout

    tok, made = load_tokenizer(str(world / "lm")), []
    begun = [
        "",
        "<think>a",
        *(f"<think>a</think><search>alpha{i}" for i in range(CHOICES)),
        "<search>",
        "<search>a",
        "<answer>",
    ]
    prompts = [[5] + tok(text)["input_ids"] for text in begun]
    for kind in ("torch", "vllm"):
        device = torch.device("cuda" if torch.cuda.is_available() and kind == "vllm" else "cpu")
        engine = rollout.open_engine(
            rollout.EngineConfig(kind=kind, gpu_memory=0.1),
            str(world / "lm"),
            tok,
            [EOS],
            0,
            device,
            512,
            0,
            torch.float32,
        )
        cfg = infer.InferConfig(
            task="search",
            episode=EpisodeConfig(top_k=1, max_rounds=4, result_tokens=120),
            retriever=RetrieverConfig(corpus=str(world / "corpus.jsonl")),
        )
        task = tasks.open_task(cfg, tok)
        made.append(
            run_episodes(engine, prompts, Sampling(temperature=0.0, max_tokens=400), task, 512)
        )
    for one, two in zip(*made):
        assert (one.response_ids, one.loss_mask, one.end) == (
            two.response_ids,
            two.loss_mask,
            two.end,
        )
        assert [c.arguments for c in one.calls] == [
            c.arguments for c in two.calls
        ] and one.text == two.text
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=5e-2, rtol=0
        )
    assert sum(bool(r.injected) for e in made[0] for r in e.rounds) >= 6 and "answered" in {
        e.end for e in made[0]
    }


def test_inference_writes_trajectories_and_goes_on_where_it_was(world, monkeypatch):
    monkeypatch.chdir(world)
    cfg = dict(
        task="search",
        model="lm",
        questions="dev.jsonl",
        retriever=RetrieverConfig(corpus="corpus.jsonl"),
        samples=2,
        temperature=1.0,
        max_response_tokens=300,
        chunk=2,
        episode=EpisodeConfig(top_k=1, result_tokens=100),
    )
    result = infer.main(infer.InferConfig(out="t.jsonl", **cfg))
    rows = [row for _, row in data.read_jsonl("t.jsonl")]
    assert [r["rollout_id"] for r in rows] == [
        f"dev{i}#{k}" for i in range(6) for k in range(2)
    ] and result["lines"] == 12
    assert (
        sum(r["status"] == "answered" for r in rows) == result["answered"] > 8
        and result["searches"] > 0.7
    )
    assert all(r["reward"] is not None and r["status"] == r["end"] for r in rows)
    lines = open("t.jsonl", "rb").read().splitlines(keepends=True)
    os.remove("t.jsonl")
    open("t.jsonl.rank000", "wb").write(b"".join(lines[:4]) + lines[4][:60])
    again = infer.main(infer.InferConfig(out="t.jsonl", **cfg))
    assert (
        again["generated"] == 8 and open("t.jsonl", "rb").read().splitlines(keepends=True) == lines
    )
    with pytest.raises(DataError, match="episode.top_k was 1 and is 2"):
        infer.main(
            infer.InferConfig(
                out="t.jsonl", **cfg | {"episode": EpisodeConfig(top_k=2, result_tokens=100)}
            )
        )


def test_a_model_used_with_another_prompt_than_it_was_trained_with_is_named(
    world, monkeypatch, capsys
):
    """A checkpoint scored with the wrong template scores near zero: its folder says what it was trained with."""
    monkeypatch.chdir(world)
    cfg = infer.InferConfig(task="search", model="lm")
    assert tasks.other_task(cfg) == ""
    Path("lm/task.json").write_text('{"task": "search", "template": "base"}')
    try:
        cfg.episode.template = "base"
        assert tasks.other_task(cfg) == ""
        infer.main(
            infer.InferConfig(
                task="search",
                model="lm",
                questions="dev.jsonl",
                out="other.jsonl",
                chunk=8,
                retriever=RetrieverConfig(corpus="corpus.jsonl"),
                max_response_tokens=200,
            )
        )
        assert (
            'was trained with another prompt ({"task": "search", "template": "base"})'
            in capsys.readouterr().out
        )
    finally:
        os.remove("lm/task.json")


def test_inference_refuses_what_cannot_work(world, monkeypatch):
    monkeypatch.chdir(world)
    base = dict(task="search", model="lm", questions="dev.jsonl", out="x.jsonl")
    with pytest.raises(config.ConfigError, match="questions is empty"):
        infer.main(infer.InferConfig(**base | {"questions": ""}))
    with pytest.raises(config.ConfigError, match="give retriever.corpus=FILE"):
        infer.main(infer.InferConfig(**base))
    broken = search_task(Search(lambda queries, k: 1 / 0), tok=load_tokenizer("lm"))
    monkeypatch.setattr(infer, "open_task", lambda *a: broken)
    with pytest.raises(tools.ToolsAway, match="failed in their tools"):
        infer.main(infer.InferConfig(**base, chunk=2, temperature=0.0, max_response_tokens=200))


def grpo_words(out, *more):
    return [
        "task=search",
        "model=lm",
        "train=train.jsonl",
        "dev=dev.jsonl",
        "qrels=[train.qrels, dev.qrels]",
        f"out={out}",
        "retriever.kind=bm25",
        "retriever.corpus=corpus.jsonl",
        "episode.top_k=1",
        "episode.result_tokens=100",
        "episode.max_rounds=3",
        "prompts_per_step=3",
        "group_size=4",
        "temperature=1.0",
        "max_response_tokens=300",
        "steps=4",
        "validate_every=2",
        "save_every=2",
        "lr=3e-4",
        "warmup_steps=3",
        *more,
    ]


@pytest.fixture
def train(world, dist, monkeypatch):
    """Trains in `world` with the settings of `grpo_words`; gives the run's summary and the rows of its metrics."""
    monkeypatch.chdir(world)
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda: None
    )  # `dist` is used again

    def run(out, *more):
        result = grpo.main(config.load_config(grpo.GRPOConfig, grpo_words(out, *more)))
        return result, [row for _, row in data.read_jsonl(f"{out}/metrics.jsonl")]

    return run


def test_training_on_episodes_logs_answers_and_resumes(world, train, capsys):
    """The whole loop on `search`: metrics, samples, best policy by F1; a run in two pieces ends where one ends."""
    result, rows = train("whole")
    said = capsys.readouterr().out
    assert (
        result["steps"] == 4
        and 0 <= result["dev_f1_start"]
        and result["dev_f1_best"] >= result["dev_f1_start"]
    )
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4] and {
        "dev_em",
        "dev_all_gold",
        "dev_searches",
    } <= rows[0].keys()
    for row in rows[1:]:
        assert (
            0 <= row["f1"] <= 1
            and row["searches"] > 0.5
            and 0 <= row["all_gold"] <= 1
            and row["failed"] == 0
        )
        assert (
            row["tokens"] == pytest.approx(12 * row["model_tokens"])
            and row["model_tokens"] < row["response_tokens"]
        )
        assert (
            0 < row["seconds_search"] < row["seconds_sample"]
            and row["engine_gap"] < 1e-4
            and "mrr" not in row
        )
    samples = [row for _, row in data.read_jsonl(world / "whole/rollouts/step_000001.jsonl")]
    assert (
        len(samples) == 12
        and {"prediction", "searches", "gold_recall", "query_id"} <= samples[0].keys()
    )
    assert "first prompt: " in said and "| f1 " in said and "| searches " in said
    train("parts", "steps=2")
    _, parts = train("parts")
    for one, two in zip(rows[3:], parts[3:], strict=True):
        assert all(one[key] == two[key] for key in one if not key.startswith("seconds"))


def test_training_learns_what_to_search_for_and_what_to_answer(world, train):
    """Every question wants beta3, which alpha3 finds: both choices, one in four before, are soon made often.

    Margin: over 20 seeds (of model, warm-up and run) and 12 runs with other instruction sets the least gains were 0.64
    of reward, 0.38 of em and 0.36 of all_gold, where 0.25, 0.2 and 0.2 are asked for.
    """
    write_jsonl(
        world / "same.jsonl",
        [{"id": f"s{i}", "question": f"what {i}", "golden_answers": ["beta3"]} for i in range(8)],
    )
    (world / "same.qrels").write_text("".join(f"s{i} 0 p3 1\n" for i in range(8)))
    _, rows = train(
        "learns",
        "train=same.jsonl",
        "dev=",
        "qrels=[same.qrels]",
        "episode.gold_reward=all",
        "steps=14",
        "prompts_per_step=4",
        "group_size=8",
        "kl_coef=0.0",
        "save_every=100",
    )
    first, last = (
        rows[1],
        {key: sum(r[key] for r in rows[-3:]) / 3 for key in ("reward", "em", "all_gold")},
    )
    assert last["reward"] > first["reward"] + 0.25 and last["em"] > first["em"] + 0.2
    assert last["all_gold"] > first["all_gold"] + 0.2


def test_training_refuses_what_cannot_work(world, monkeypatch):
    monkeypatch.chdir(world)
    for more, error, reason in (
        (["qrels=[]", "episode.gold_reward=all"], config.ConfigError, r"give qrels=\[FILE"),
        (["task=agent"], DataError, "cannot be appended token by token|leaves out the message"),
        (["retriever.corpus="], config.ConfigError, "give retriever.corpus=FILE"),
        (["retriever.across_ranks=true"], config.ConfigError, "serve the index"),
        (["qrels=[dev.qrels, wrong.qrels]"], DataError, "'p99' is not in the index"),
        (["qrels=[foreign.qrels]"], DataError, "no gold passage of a question of"),
        (["task=rewrite"], config.ConfigError, "episode.top_k=1: it has an effect with task=sea"),
        (["max_prompt_tokens=1", "episode.template=base"], DataError, "every prompt is longer"),
    ):
        (world / "wrong.qrels").write_text("train0 0 p99 1\n")
        (world / "foreign.qrels").write_text("another 0 p1 1\n")
        with pytest.raises(error, match=reason):
            cfg = config.load_config(grpo.GRPOConfig, grpo_words("never", *more))
            grpo.check_config(cfg, 1)
            grpo.start(cfg, distributed.Dist(0, 1, torch.device("cpu")))
