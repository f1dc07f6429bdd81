"""TorchEngine and the training batch: transformers' generate, the trainer, slow loops."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import random
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_lm, tiny_tokenizer
import rollout as R
from config import ConfigError
from engines.base import EngineConfig, GenerateStats, Rollout, RolloutError, Sampling
from engines.vllm_engine import VLLMEngine
from engines.torch_engine import sample_tokens, TorchEngine
from packing import token_logprobs
from rollout import check_engine, collate_rollouts

PROMPTS = [
    [7, 8, 9, 10, 11],
    [7, 8, 9, 40],
    [7, 8, 9, 10, 11],
    [7, 8, 9, 50, 51, 52, 53, 54, 55],
    [7, 8, 9, 10],
]


def engine(
    kind="qwen2", tied=True, eos=(2,), pad=0, max_batch=64, tokenizer=None, seed=0, **changes
):
    return TorchEngine(
        tiny_lm(kind=kind, tied=tied, seed=seed, **changes), eos, pad, tokenizer, max_batch
    )


def reference_greedy(model, prompts, max_new, eos, pad=0):
    """transformers' own greedy search on a left-padded batch, cut after the first EOS."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new,
        eos_token_id=list(eos),
        pad_token_id=pad,
        use_cache=True,
    )[:, width:].tolist()
    return [row[: next((i + 1 for i, t in enumerate(row) if t in eos), max_new)] for row in out]


def plain_logprobs(model, rollout, temperature):
    """One forward pass, log_softmax, pick: a Python loop."""
    ids = rollout.prompt_ids + rollout.response_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / (temperature or 1.0)
    start = len(rollout.prompt_ids)
    return [logits[t - 1].log_softmax(-1)[ids[t]].item() for t in range(start, len(ids))]


def texts(rollouts):
    return [r.response_ids for r in rollouts]


# ---- parity


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_equals_transformers(kind, tied):
    e = engine(kind, tied)
    eos = (
        2,
        reference_greedy(e.model, PROMPTS, 24, (2,))[1][5],
    )  # one id that does occur: sequences of unequal length
    e.eos_ids = frozenset(eos)
    expected = reference_greedy(e.model, PROMPTS, 24, eos)
    for max_batch in (1, 2, 64):
        e.max_batch = max_batch
        got = e.generate(PROMPTS, Sampling(temperature=0, max_tokens=24))
        assert texts(got) == expected
        assert [r.end for r in got] == ["eos" if row[-1] in eos else "length" for row in expected]
    assert len({len(row) for row in expected}) > 1


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
def test_logprobs_equal_the_trainers(kind, temperature):
    e = engine(kind, max_batch=6)
    rollouts = e.generate(PROMPTS, Sampling(n=3, temperature=temperature, max_tokens=20, seed=1))
    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), 0)
    trainer = token_logprobs(e.model, batch.tokens, batch.attention_mask, temperature or 1.0)
    assert ((trainer - batch.logprobs) * batch.loss_mask).abs().max() < 1e-4
    for r in rollouts:
        assert (
            max(abs(a - b) for a, b in zip(r.logprobs, plain_logprobs(e.model, r, temperature)))
            < 1e-4
        )


def test_top_p_logprobs_are_renormalised():
    e = engine()
    for r in e.generate(PROMPTS, Sampling(n=2, temperature=0.7, top_p=0.8, max_tokens=8, seed=3)):
        ids = r.prompt_ids + r.response_ids
        logits = e.model(torch.tensor([ids])).logits[0].float() / 0.7
        for j, (token, logprob) in enumerate(zip(r.response_ids, r.logprobs)):
            p, order = logits[len(r.prompt_ids) + j - 1].softmax(-1).sort(descending=True)
            kept = int((p.cumsum(0) < 0.8).sum()) + 1
            assert token in order[:kept].tolist()
            assert logprob == pytest.approx(
                (p[order.tolist().index(token)] / p[:kept].sum()).log().item(), abs=1e-4
            )


def test_the_callers_attention_is_put_back():
    e = engine()
    before, ids = e.model.config._attn_implementation, torch.tensor([PROMPTS[3]])
    logits = e.model(ids).logits
    e.generate(PROMPTS[:2], Sampling(max_tokens=3))
    assert e.model.config._attn_implementation == before and torch.equal(
        e.model(ids).logits, logits
    )


# ---- sharing, batches and order


def test_shared_prefix_changes_nothing_and_is_computed_once():
    e, s = engine(), Sampling(temperature=0, max_tokens=12)
    alone = [e.generate([p], s)[0].response_ids for p in PROMPTS]
    assert texts(e.generate(PROMPTS, s)) == alone
    # common prefix 7 8 9, then 10 11 | 40 | (equal to the first) | 50..55 | 10
    assert e.stats.prompt_tokens == 3 + 2 + 1 + 6 + 1
    unlike = [[20, 21], *PROMPTS]
    assert texts(e.generate(unlike, s))[1:] == alone
    assert e.stats.prompt_tokens == 2 + 5 + 4 + 9 + 4
    e.generate([PROMPTS[3]], Sampling(n=50, max_tokens=2, seed=0))
    assert e.stats.prompt_tokens == 9


def test_prompt_of_a_group_larger_than_the_batch_is_computed_once():
    e = engine(max_batch=4)
    got = e.generate(
        [PROMPTS[3], PROMPTS[0]],
        [Sampling(n=10, max_tokens=3, seed=5), Sampling(n=2, max_tokens=3, seed=5)],
    )
    # what both begin with, then the rest of each
    assert e.stats.prompt_tokens == 3 + 6 + 2
    assert [r.group_id for r in got] == [0] * 10 + [1] * 2
    wide = engine(max_batch=64).generate(
        [PROMPTS[3], PROMPTS[0]],
        [Sampling(n=10, max_tokens=3, seed=5), Sampling(n=2, max_tokens=3, seed=5)],
    )
    assert texts(got) == texts(wide)


@pytest.mark.parametrize(
    "prompts", [[[5]], [[5], [6]], [[5], [5]], [[5], [5, 6], [5, 6, 7]], [[5, 6, 7], [5, 6]]]
)
def test_short_prompts(prompts):
    """Prompts of one token; a prompt that is the whole common prefix."""
    e = engine("llama")
    assert texts(e.generate(prompts, Sampling(temperature=0, max_tokens=6))) == reference_greedy(
        e.model, prompts, 6, (2,)
    )


def test_order_is_prompt_major_and_requests_have_their_own_limits():
    samplings = [
        Sampling(n=2, max_tokens=3),
        Sampling(n=1, max_tokens=9),
        Sampling(n=3, temperature=0, max_tokens=1),
        Sampling(n=1, max_tokens=30),
        Sampling(n=2, top_p=0.5, max_tokens=5),
    ]
    for max_batch in (2, 3, 64):
        got = engine(eos=(), max_batch=max_batch).generate(PROMPTS, samplings)
        assert [r.group_id for r in got] == [0, 0, 1, 2, 2, 2, 3, 4, 4]
        assert [len(r.response_ids) for r in got] == [3, 3, 9, 1, 1, 1, 30, 5, 5]
        assert {r.end for r in got} == {"length"}
        for r in got:
            assert r.prompt_ids == PROMPTS[r.group_id]
            assert len(r.logprobs) == len(r.loss_mask) == len(r.response_ids) and set(
                r.loss_mask
            ) == {1}


def test_rows_leave_and_join_without_disturbing_others():
    torch.manual_seed(0)
    prompts = [torch.randint(5, 200, (int(n),)).tolist() for n in torch.randint(1, 30, (23,))]
    samplings = [Sampling(temperature=0, max_tokens=int(n)) for n in torch.randint(1, 25, (23,))]
    e = engine(eos=range(100, 120))
    alone = [e.generate([p], s)[0].response_ids for p, s in zip(prompts, samplings)]
    for max_batch in (1, 3, 8, 64):
        e.max_batch = max_batch
        assert texts(e.generate(prompts, samplings)) == alone


def test_long_prompts_are_computed_in_parts(monkeypatch):
    e, s = engine(), Sampling(n=2, temperature=0, max_tokens=6)
    whole = texts(e.generate(PROMPTS, s))
    monkeypatch.setattr("engines.torch_engine.PREFILL_TOKENS", 4)
    assert texts(e.generate(PROMPTS, s)) == whole


def test_nothing_to_do():
    assert engine().generate([], Sampling()) == []


def test_progress_reports_tokens_per_second():
    calls = []
    engine(eos=()).generate(PROMPTS, Sampling(n=2, max_tokens=20), lambda *a: calls.append(a))
    assert (
        calls[-1][:2] == (10, 10)
        and all(done <= total and rate > 0 for done, total, rate in calls)
        and len(calls) > 1
    )


# ---- conversations


def play(e, fresh, rounds, first=PROMPTS, shown=7, n=3, eos=(), **options):
    """Several rounds of conversations on `e`, each compared with an engine that computes all anew.

    After a round every response is followed by `shown` ids (fewer and more by turns); some end.
    Returns the computed and the held prompt tokens of every round but the first.
    """
    draws, counts, prompts = random.Random(0), [], first
    for number in range(rounds):
        s = Sampling(n=1 if number else n, max_tokens=9, seed=number, **options)
        got = e.generate(prompts, s)
        counts.append((e.stats.prompt_tokens, e.stats.held_tokens))
        whole = fresh().generate(prompts, s)
        assert [(r.response_ids, r.end) for r in got] == [(r.response_ids, r.end) for r in whole]
        for r, other in zip(got, whole):
            assert r.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        prompts = [
            r.prompt_ids + r.response_ids + draws.choices(range(5, 200), k=1 + shown * i % 20)
            for i, r in enumerate(got)
            if (i + number) % 5
        ]
    return counts[1:]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_conversation_is_continued_as_if_it_were_computed_anew(kind, temperature):
    """Rows move while others end, the cache grows from round to round, and new tokens are
    ragged."""
    eos = range(100, 120)
    fresh = functools.partial(engine, kind, eos=eos)
    for steps in (1, 8):
        e = fresh()
        e.steps = steps
        counts = play(e, fresh, 4, temperature=temperature)
        assert all(held > 0 for _, held in counts)


def test_only_new_tokens_of_a_conversation_are_computed():
    e, s = engine(eos=()), Sampling(temperature=0, max_tokens=6)
    a, b = e.generate(PROMPTS[:2], s)
    prompts = [r.prompt_ids + r.response_ids + [30, 31, 32] for r in (a, b)]
    again = e.generate([prompts[1], prompts[0]], s)  # in any order
    # the newest sampled token was not stored: one and three of each are new
    assert (e.stats.prompt_tokens, e.stats.held_tokens) == (
        2 * 4,
        len(prompts[0]) + len(prompts[1]) - 2 * 4,
    )
    # an unlike prompt beside them is computed behind the same prefix; several samples are
    # computed anew
    more = [again[0].prompt_ids + again[0].response_ids + [40], [7, 8, 9, 60, 61]]
    e.generate(more, s)
    assert (e.stats.prompt_tokens, e.stats.held_tokens) == (2 + 2, len(more[0]) - 2)
    total = e.total.prompt_tokens
    e.generate([more[0] + [50] * 9], Sampling(n=2, max_tokens=2))
    assert (e.stats.prompt_tokens, e.stats.held_tokens) == (len(more[0]) + 9, 0)
    assert e.total.prompt_tokens == total + len(more[0]) + 9 and e.total.held_tokens > 0
    e.sync_weights(tiny_lm().named_parameters())
    assert e.total == GenerateStats()


def test_conversations_of_a_batch_that_is_full_are_continued_where_they_still_stand():
    """More sequences than rows: later ones took the places of earlier ones."""
    fresh = functools.partial(engine, max_batch=4)
    counts = play(fresh(), fresh, 3, temperature=0)
    assert all(held > 0 for _, held in counts)


@pytest.mark.parametrize("change", ["sync", "sleep", "another call", "error"])
def test_held_conversations_are_forgotten(change):
    """By a sync (other weights), by a sleep (its memory is given back), by a call that continues
    none."""
    e, s = engine(eos=()), Sampling(temperature=0, max_tokens=6)
    got = e.generate(PROMPTS, s)
    prompts = [r.prompt_ids + r.response_ids + [30] for r in got]
    trained = tiny_lm(seed=9 if change == "sync" else 0)
    if change == "sync":
        e.sync_weights(trained.named_parameters())
    elif change == "sleep":
        e.sleep()
        e.wake()
    elif change == "error":
        with pytest.raises(ZeroDivisionError):
            e.generate(prompts, s, lambda *a: 1 / 0)
    else:
        e.generate([[9, 10, 11]], s)
    after = e.generate(prompts, s)
    assert e.stats.held_tokens == 0
    assert texts(after) == texts(TorchEngine(trained, [], 0).generate(prompts, s))


def test_a_caller_that_changes_its_rollouts_changes_nothing_held():
    e, s = engine(eos=()), Sampling(temperature=0, max_tokens=6)
    (r,) = e.generate(PROMPTS[:1], s)
    prompt = r.prompt_ids + r.response_ids + [30]
    r.response_ids[:3] = [50, 51, 52]
    changed = r.prompt_ids + r.response_ids + [30]
    assert texts(e.generate([changed], s)) == texts(engine(eos=()).generate([changed], s))
    assert e.stats.held_tokens == 0
    e.generate([r.prompt_ids], s)
    e.generate([prompt], s)
    assert e.stats.held_tokens == len(prompt) - 2


def test_a_conversation_beside_one_of_logits_that_are_no_numbers():
    e, s = engine(tied=False, eos=(), max_batch=2), Sampling(temperature=0, max_tokens=8)
    first = e.generate([[9, 10], [11, 12, 13]], s)
    prompts = [r.prompt_ids + r.response_ids for r in first]
    bad = next(i for i in range(200, 261) if all(i not in p for p in prompts))
    e.model.get_input_embeddings().weight.data[bad] = math.inf
    got = e.generate([prompts[0] + [30], prompts[1] + [bad]], s)
    assert [r.end for r in got] == ["length", "engine_error"] and e.stats.held_tokens > 0
    prompts = [got[0].prompt_ids + got[0].response_ids + [31], prompts[1] + [32]]
    alone = engine(tied=False, eos=()).generate(prompts, s)
    assert texts(e.generate(prompts, s)) == texts(alone)
    assert e.stats.held_tokens == len(prompts[0]) - 2


# ---- sampling


def test_seeds_decide_the_draws_whatever_else_is_sampled():
    e, s = engine(max_batch=64), Sampling(n=4, temperature=1.0, max_tokens=12, seed=7)
    first = texts(e.generate([PROMPTS[0]], s))
    assert len({tuple(t) for t in first}) >= 2
    assert texts(e.generate([PROMPTS[0]], s)) == first
    assert (
        texts(e.generate([PROMPTS[0]], Sampling(n=4, temperature=1.0, max_tokens=12, seed=8)))
        != first
    )
    # company, batch size, order and a larger n change nothing
    e.max_batch = 3
    assert (
        texts(e.generate([PROMPTS[3], PROMPTS[0]], [Sampling(n=5, max_tokens=30, seed=1), s]))[5:]
        == first
    )
    assert (
        texts(e.generate([PROMPTS[0]], Sampling(n=6, temperature=1.0, max_tokens=12, seed=7)))[:4]
        == first
    )
    assert [t[:5] for t in first] == texts(
        e.generate([PROMPTS[0]], Sampling(n=4, temperature=1.0, max_tokens=5, seed=7))
    )


def test_without_seed_the_global_generator_decides():
    e, s = engine(), Sampling(n=2, max_tokens=12)
    torch.manual_seed(5)
    first, second = texts(e.generate(PROMPTS, s)), texts(e.generate(PROMPTS, s))
    torch.manual_seed(5)
    assert texts(e.generate(PROMPTS, s)) == first != second


def test_frequencies_match_the_distribution():
    torch.manual_seed(0)
    draws, vocabulary = 40_000, 12
    logits = torch.randn(vocabulary) * 2
    logits[3] = float("-inf")
    uniform = torch.rand(draws, dtype=torch.float64)
    for temperature, top_p in ((0.7, 1.0), (1.3, 1.0), (1.0, 0.6), (0.7, 0.01)):
        ids, logprobs = sample_tokens(
            logits.expand(draws, -1),
            torch.full((draws,), temperature),
            torch.full((draws,), top_p),
            uniform,
        )
        p = (logits.double() / temperature).softmax(-1)
        order = p.argsort(descending=True)
        mass, kept = 0.0, []
        for token in order.tolist():  # slow loop: the fewest tokens that reach top_p
            kept.append(token)
            mass += p[token].item()
            if mass >= top_p and top_p < 1:
                break
        expected = torch.zeros(vocabulary, dtype=torch.float64)
        expected[kept] = p[kept] / p[kept].sum()
        counts = ids.bincount(minlength=vocabulary).double()
        assert counts[expected == 0].sum() == 0
        seen = expected > 0
        chi2 = ((counts - draws * expected)[seen] ** 2 / (draws * expected[seen])).sum().item()
        assert chi2 < 3 * vocabulary + 10
        assert (logprobs - expected[ids].log()).abs().max() < 1e-5


def test_top_p_looks_at_more_tokens_where_the_first_do_not_reach_it(monkeypatch):
    torch.manual_seed(0)
    logits, uniform = torch.randn(64, 300), torch.rand(64, dtype=torch.float64)
    arguments = (logits, torch.ones(64), torch.full((64,), 0.95), uniform)
    whole = sample_tokens(*arguments)
    monkeypatch.setattr("engines.torch_engine.CANDIDATES", 2)
    for a, b in zip(sample_tokens(*arguments), whole):
        assert torch.equal(a, b)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(u):
    logits = torch.full((1, 100), float("-inf"))
    logits[0, 40:60] = 0.0
    for top_p in (1.0, 0.999):
        ids, logprobs = sample_tokens(
            logits, torch.ones(1), torch.full((1,), top_p), torch.tensor([u], dtype=torch.float64)
        )
        assert 40 <= ids.item() < 60 and logprobs.item() == pytest.approx(-math.log(20), abs=1e-5)


def test_sampling_does_not_change_the_logits():
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample_tokens(
        logits,
        torch.tensor([0.0, 1.0, 0.7]),
        torch.tensor([1.0, 1.0, 0.5]),
        torch.rand(3, dtype=torch.float64),
    )
    assert torch.equal(logits, before)


# ---- ends


def test_every_eos_id_ends():
    e = engine(eos=())
    first, other = (
        r.response_ids for r in e.generate(PROMPTS[:2], Sampling(temperature=0, max_tokens=12))
    )
    e.eos_ids = frozenset([first[4], other[2]])
    a, b = e.generate(PROMPTS[:2], Sampling(temperature=0, max_tokens=12))
    for r, full in ((a, first), (b, other)):
        stop = min(i for i, t in enumerate(full) if t in e.eos_ids)
        assert (r.response_ids, r.end) == (full[: stop + 1], "eos")


def test_eos_as_the_first_token():
    e = engine(eos=())
    token = e.generate(PROMPTS[:1], Sampling(temperature=0, max_tokens=1))[0].response_ids[0]
    e = engine(eos=(token,), pad=token)
    r = e.generate(PROMPTS[:1], Sampling(temperature=0, max_tokens=3))[0]
    assert (r.response_ids, r.loss_mask, r.end) == ([token], [1], "eos") and math.isfinite(
        r.logprobs[0]
    )


def test_eos_as_the_last_allowed_token_is_an_end():
    e = engine(eos=())
    token = e.generate(PROMPTS[:1], Sampling(temperature=0, max_tokens=1))[0].response_ids[0]
    assert (
        engine(eos=(token,)).generate(PROMPTS[:1], Sampling(temperature=0, max_tokens=1))[0].end
        == "eos"
    )


def test_stop_strings_keep_the_sampled_tokens():
    tokenizer = tiny_tokenizer()
    e = engine(eos=(), tokenizer=tokenizer)
    prompts = [tokenizer.encode("find it"), tokenizer.encode("find")]
    free = e.generate(prompts, Sampling(n=3, max_tokens=60, seed=2))

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=False)

    stops = []
    for r in free:  # a two-token text out of each response, where it is real text
        pairs = (decode(r.response_ids[i : i + 2]) for i in range(8, 40))
        stops.append(next(p for p in pairs if "\ufffd" not in p and p))
    for r, stop in zip(free, stops):
        expected = next(i for i in range(1, 61) if stop in decode(r.response_ids[:i]))
        got = e.generate(
            [r.prompt_ids], Sampling(n=3, max_tokens=60, seed=2, stop=(stop, "never seen here"))
        )
        same = next(g for g in got if g.response_ids == r.response_ids[: len(g.response_ids)])
        assert (same.response_ids, same.end) == (r.response_ids[:expected], "stop")
        assert same.logprobs == pytest.approx(r.logprobs[:expected], abs=1e-4)


def test_engine_error_is_neither_an_exception_nor_token_zero():
    e = engine(eos=())
    with torch.no_grad():
        e.model.get_input_embeddings().weight[77] = float(
            "nan"
        )  # tied: its logit is NaN everywhere
    for r in e.generate([[9, 10], [9, 11]], Sampling(n=2, max_tokens=4)):
        assert (r.response_ids, r.logprobs, r.end) == ([], [], "engine_error")
    # untied: only what reads the token is lost, and what comes after it into the same slot is not
    e = engine(tied=False, eos=(), max_batch=2)
    clean = texts(
        e.generate([[9, 10], [11, 12, 13], [14, 15]], Sampling(temperature=0, max_tokens=20))
    )
    e.model.get_input_embeddings().weight.data[77] = float("inf")
    assert all(77 not in t for t in clean)
    got = e.generate(
        [[9, 10], [11, 12, 13], [77] * 30, [14, 15]], Sampling(temperature=0, max_tokens=20)
    )
    assert (got[2].end, got[2].response_ids) == ("engine_error", [])
    assert [texts(got)[i] for i in (0, 1, 3)] == clean


def test_engine_error_keeps_what_was_sampled():
    e = engine(tied=False, eos=())
    clean = e.generate([[9, 10]], Sampling(temperature=0, max_tokens=8))[0]
    bad = next(i for i, t in enumerate(clean.response_ids) if t not in (9, 10) and i >= 2)
    e.model.get_input_embeddings().weight.data[clean.response_ids[bad]] = float("nan")
    r = e.generate([[9, 10]], Sampling(temperature=0, max_tokens=8))[0]
    first = clean.response_ids.index(clean.response_ids[bad])
    assert (r.response_ids, r.end) == (clean.response_ids[: first + 1], "engine_error") and len(
        r.logprobs
    ) == first + 1


# ---- bad input


def test_an_over_long_prompt_is_refused_before_anything_runs():
    e = engine(max_position_embeddings=64)
    with pytest.raises(RolloutError, match=r"prompt 1 has 60 tokens.*64 positions") as error:
        e.generate([[7] * 10, [7] * 60], Sampling(n=2, max_tokens=5))
    assert error.value.exit_status == 2 and e.stats.steps == 0
    got = e.generate([[7] * 59, [7] * 10], Sampling(n=2, max_tokens=5))
    assert [r.group_id for r in got] == [0, 0, 1, 1]


def test_ids_outside_the_vocabulary_are_refused():
    model = tiny_lm()
    vocabulary = model.config.vocab_size
    with pytest.raises(RolloutError, match=rf"pad_id {vocabulary} is outside.*{vocabulary}"):
        TorchEngine(model, [2], vocabulary)
    with pytest.raises(RolloutError, match="eos id"):
        TorchEngine(model, [2, vocabulary], 0)


@pytest.mark.parametrize(
    "prompts, sampling, message",
    [
        ([[5], []], Sampling(), "prompt 1 is empty"),
        ([[5, 100000]], Sampling(), "outside the vocabulary"),
        ([[5, -1]], Sampling(), "outside the vocabulary"),
        ([[5]], Sampling(stop=("x",)), "tokenizer"),
        ([[5], [6]], [Sampling()], "2 prompts and 1 samplings"),
    ],
)
def test_bad_requests(prompts, sampling, message):
    with pytest.raises(RolloutError, match=message):
        engine().generate(prompts, sampling)


@pytest.mark.parametrize(
    "field",
    [
        {"n": 0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"stop": "x"},
        {"stop": ("",)},
    ],
)
def test_bad_sampling(field):
    with pytest.raises(RolloutError, match=next(iter(field))):
        Sampling(**field)


def test_public_names_and_positions():
    assert [*inspect.signature(Sampling).parameters] == [
        "n",
        "temperature",
        "top_p",
        "max_tokens",
        "stop",
        "seed",
    ]
    assert [*inspect.signature(Rollout).parameters] == [
        "prompt_ids",
        "response_ids",
        "logprobs",
        "loss_mask",
        "group_id",
        "end",
    ]


# ---- sync


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_after_a_sync_the_engine_equals_a_fresh_one(kind, tied):
    e, trained = engine(kind, tied), tiny_lm(kind=kind, tied=tied, seed=9)
    s = Sampling(n=2, temperature=0.7, max_tokens=10, seed=4)
    old = texts(e.generate(PROMPTS, s))
    e.sync_weights(trained.named_parameters())
    fresh = TorchEngine(trained, [2], 0)
    got, expected = e.generate(PROMPTS, s), fresh.generate(PROMPTS, s)
    assert texts(got) == texts(expected) != old
    assert [r.logprobs for r in got] == [r.logprobs for r in expected]


def test_a_tied_head_follows_the_embedding():
    for sent in ("model.embed_tokens.weight", "lm_head.weight"):
        e, trained = engine(), tiny_lm()
        with torch.no_grad():
            trained.get_input_embeddings().weight += 1
        weights = dict(trained.named_parameters())
        weights[sent] = weights.pop("model.embed_tokens.weight")
        e.sync_weights(weights.items())
        head, embedding = (
            e.model.get_output_embeddings().weight,
            e.model.get_input_embeddings().weight,
        )
        assert head.data_ptr() == embedding.data_ptr() and torch.equal(
            head, trained.get_input_embeddings().weight
        )


def test_tied_engine_refuses_an_untied_source():
    with pytest.raises(RolloutError, match="lm_head.weight.*tied"):
        engine(tied=True).sync_weights(tiny_lm(tied=False).state_dict().items())
    engine(tied=True).sync_weights(tiny_lm(tied=True).state_dict().items())  # both names, one value


def test_names_of_wrapped_models_are_understood():
    e, trained = engine(), tiny_lm(seed=3)
    e.sync_weights((f"_orig_mod.base_model.model.{n}", p) for n, p in trained.named_parameters())
    assert torch.equal(e.model.model.norm.weight, trained.model.norm.weight)
    assert torch.equal(
        e.model.model.layers[1].mlp.up_proj.weight, trained.model.layers[1].mlp.up_proj.weight
    )


def test_weights_are_cast_and_the_source_is_not_touched():
    e, trained = TorchEngine(tiny_lm().to(torch.bfloat16), [2], 0), tiny_lm()
    with torch.no_grad():
        for p in trained.parameters():
            p.fill_(1.001)
    e.sync_weights(trained.named_parameters())
    for p in e.model.parameters():
        assert p.dtype == torch.bfloat16 and bool((p == 1.0).all())
    for p in trained.parameters():
        assert p.dtype == torch.float32 and bool((p == 1.001).all()) and p.requires_grad


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w | {"model.extra.weight": torch.zeros(1)}, "model.extra.weight.*unknown"),
        (lambda w: {k: v for k, v in w.items() if "norm" not in k}, "lacked 5 of"),
        (lambda w: w | {"model.norm.weight": torch.zeros(3)}, r"model.norm.weight.*\(3,\)"),
    ],
)
def test_a_failed_sync_leaves_an_engine_that_refuses(change, message):
    e, weights = engine(), dict(tiny_lm(seed=1).named_parameters())
    with pytest.raises(RolloutError, match=message):
        e.sync_weights(change(weights).items())
    with pytest.raises(RolloutError, match="sync"):
        e.generate(PROMPTS, Sampling())
    e.sync_weights(weights.items())
    assert len(e.generate(PROMPTS, Sampling(max_tokens=2))) == len(PROMPTS)


def test_vllm_says_that_a_shared_card_keeps_it_from_sleeping():
    def refuse(level: int):
        raise AssertionError("Memory usage increased after sleeping.")

    engine = object.__new__(VLLMEngine)
    engine.asleep, engine.cuda, engine.llm = False, True, SimpleNamespace(sleep=refuse)
    with pytest.raises(RolloutError, match="increased after sleeping.*a card of its own"):
        engine.sleep()


def test_sleep_and_wake():
    e, s = engine(), Sampling(temperature=0, max_tokens=5)
    before = texts(e.generate(PROMPTS, s))
    e.sleep()
    with pytest.raises(RolloutError, match="wake"):
        e.generate(PROMPTS, s)
    e.sync_weights(tiny_lm().named_parameters())  # weights may come while it sleeps
    with pytest.raises(RolloutError, match="wake"):
        e.generate(PROMPTS, s)
    e.wake()
    assert texts(e.generate(PROMPTS, s)) == before


# ---- collate


def test_collate_equals_a_slow_loop():
    """Model and tool segments: only what the model wrote is trained, whatever the ids are."""
    rollouts = [
        Rollout([5, 6, 7], [8, 9, 2], [-0.1, -0.2, -0.3], [1, 1, 1], 0, "eos"),
        Rollout([5], [8, 30, 31, 9, 2], [-0.5, -3.0, -3.0, -0.7, -0.9], [1, 0, 0, 1, 1], 1, "eos"),
        Rollout([5, 6], [], [], [], 1, "engine_error"),
    ]
    batch = collate_rollouts(rollouts, torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64), 2)
    assert (
        batch.tokens.shape == batch.attention_mask.shape == (3, 6)
        and batch.tokens.dtype == torch.int64
    )
    assert batch.loss_mask.shape == batch.logprobs.shape == (3, 5)
    for i, r in enumerate(rollouts):
        ids = r.prompt_ids + r.response_ids
        for t in range(6):
            assert batch.tokens[i, t] == (ids[t] if t < len(ids) else 2)
            assert batch.attention_mask[i, t] == (t < len(ids))
        for t in range(5):
            j = t + 1 - len(r.prompt_ids)  # the response token that entry t predicts
            trained = 0 <= j < len(r.response_ids) and r.loss_mask[j] == 1
            assert batch.loss_mask[i, t] == trained
            assert batch.logprobs[i, t].item() == pytest.approx(r.logprobs[j] if trained else 0.0)
    assert batch.advantages.tolist() == [0.5, -1.0, 0.0] and batch.advantages.dtype == torch.float32
    assert len(batch) == 3
    for rows in ([2, 0], [2]):  # cut to the longest of them
        chosen = batch.select(torch.tensor(rows))
        whole = collate_rollouts([rollouts[i] for i in rows], batch.advantages[rows], 2)
        for f in dataclasses.fields(batch):
            assert torch.equal(getattr(chosen, f.name), getattr(whole, f.name)), f.name


def test_pad_equal_to_eos_keeps_the_end_token():
    rollouts = [
        Rollout([4], [5, 6, 2], [-1.0] * 3, [1] * 3, 0, "eos"),
        Rollout([4], [5, 6, 7, 8, 9], [-1.0] * 5, [1] * 5, 0, "length"),
    ]
    batch = collate_rollouts(rollouts, [1.0, -1.0], pad_id=2)
    assert batch.tokens[0, 1:].tolist() == [5, 6, 2, 2, 2] and batch.loss_mask[0].tolist() == [
        1,
        1,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize(
    "rollouts, advantages",
    [
        ([], []),
        ([Rollout([1], [2], [0.0], [1], 0, "eos")], [1.0, 2.0]),
        ([Rollout([1], [2], [], [1], 0, "eos")], [1.0]),
        ([Rollout([1], [2], [0.0], [], 0, "eos")], [1.0]),
        ([Rollout([1], [2, 3], [0.0], [1], 0, "eos")], [1.0]),
        ([Rollout([], [2], [0.0], [1], 0, "eos")], [1.0]),
    ],
)
def test_collate_refuses_what_does_not_fit(rollouts, advantages):
    with pytest.raises(RolloutError):
        collate_rollouts(rollouts, advantages, 0)


# ---- engines by configuration


def test_open_engine_with_and_without_the_folders_weights(tmp_path):
    model = tiny_lm(str(tmp_path), seed=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    arguments = (str(tmp_path), tiny_tokenizer(), [2], 0, torch.device("cpu"), 128)
    full, bare = (
        R.open_engine(EngineConfig(batch=8), *arguments, weights=w) for w in (True, False)
    )
    assert torch.equal(
        before, torch.get_rng_state()
    )  # a resumed run draws what it would have drawn
    assert (
        full.max_length == bare.max_length == 128 and full.max_batch == 8 and full.gap_limit == 0.02
    )
    s = Sampling(temperature=0, max_tokens=8)
    assert texts(full.generate(PROMPTS, s)) != texts(bare.generate(PROMPTS, s))
    bare.sync_weights(model.named_parameters())
    assert texts(full.generate(PROMPTS, s)) == texts(bare.generate(PROMPTS, s))
    assert R.open_engine(EngineConfig(gap_limit=0.5), *arguments).gap_limit == 0.5


@pytest.mark.parametrize(
    "field, message",
    [
        ({"batch": 0}, "engine.batch=0.*at least 1"),
        ({"gpu_memory": 1.0}, "engine.gpu_memory=1.0"),
        ({"tensor_parallel": 2}, "engine.tensor_parallel=2.*divisor of the 3"),
        ({"tensor_parallel": 3}, "engine.tensor_parallel=3.*unless engine.kind=vllm"),
        ({"gap_limit": 0.0}, "engine.gap_limit=0.0"),
    ],
)
def test_engine_settings_that_cannot_work(field, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises((RolloutError, ConfigError), match=message) as error:
        check_engine(EngineConfig(**field))
    assert error.value.exit_status == 2


def test_a_gap_of_stale_weights_ends_the_run():
    R.check_engine_gap(0.05, 4.0, 0.3)  # a single token may be far off
    for mean in (0.9, float("nan")):
        with pytest.raises(
            R.EngineGap, match="limit is 0.3.*weight sync.*engine.gap_limit"
        ) as error:
            R.check_engine_gap(mean, 4.0, 0.3)
    assert error.value.exit_status == 3
    e, stale = engine(), tiny_lm(seed=8)
    rollouts = e.generate(PROMPTS, Sampling(n=4, max_tokens=20, seed=1))
    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), 0)
    for model, fits in ((e.model, True), (stale, False)):
        with torch.no_grad():
            logprobs = token_logprobs(model, batch.tokens, batch.attention_mask)
        gap = (logprobs - batch.logprobs).abs()[batch.loss_mask.bool()]
        if fits:
            R.check_engine_gap(float(gap.mean()), float(gap.max()), e.gap_limit)
        else:
            with pytest.raises(R.EngineGap):
                R.check_engine_gap(float(gap.mean()), float(gap.max()), e.gap_limit)
