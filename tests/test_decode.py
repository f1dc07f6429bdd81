"""Decode steps: in blocks, with padded row counts, as kernels and CUDA graphs, against plain ones."""

from __future__ import annotations

import functools
import gc
import math
import os
import subprocess
import sys
import types
import weakref

import pytest
import torch
from test_rollout import PROMPTS, engine, play, texts
from tiny import tiny_lm, tiny_tokenizer
import rollout as R
from engines import operations
from engines.base import Sampling
from engines.kv_cache import KVCache, Piece, Prompt
from engines.torch_engine import TorchEngine
from packing import token_logprobs
from rollout import collate_rollouts

# ---- what a GPU adds: steps in blocks, the kernel, graphs


def ragged(count=23):
    torch.manual_seed(0)
    prompts = [
        [5, 6, 7] + torch.randint(5, 200, (int(n),)).tolist()
        for n in torch.randint(1, 30, (count,))
    ]
    return prompts, [
        Sampling(temperature=0, max_tokens=int(n)) for n in torch.randint(1, 25, (count,))
    ]


def test_looking_at_the_tokens_every_eight_steps_changes_nothing():
    """Responses end in the middle of a block, by EOS, stop string and length; draws stay those of
    their position."""
    tokenizer = tiny_tokenizer()
    one, eight = (engine(eos=range(100, 120), max_batch=6, tokenizer=tokenizer) for _ in range(2))
    eight.steps = 8
    prompts, samplings = ragged()
    sampled = [
        Sampling(n=2, temperature=0.9, max_tokens=s.max_tokens, seed=4, stop=("a", "Q", "z"))
        for s in samplings
    ]
    for s in (samplings, sampled):
        a, b = one.generate(prompts, s), eight.generate(prompts, s)
        assert [(r.response_ids, r.end, r.loss_mask) for r in a] == [
            (r.response_ids, r.end, r.loss_mask) for r in b
        ]
        assert one.stats.sampled_tokens == eight.stats.sampled_tokens
        for r, other in zip(a, b):
            assert r.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert {r.end for r in b} == {"eos", "stop", "length"}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_weights_are_laid_side_by_side_and_held_once(kind):
    model, ids = tiny_lm(kind=kind), torch.tensor(PROMPTS[3:4])
    before, names = model(ids).logits, list(model.state_dict())
    layers = TorchEngine(model, [2], 0).decoder.layers
    assert torch.equal(model(ids).logits, before) and list(model.state_dict()) == names
    for layer in layers:
        attention, mlp = layer.module.self_attn, layer.module.mlp
        for whole, parts in (
            (layer.qkv[0], (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.gate_up[0], (mlp.gate_proj, mlp.up_proj)),
        ):
            assert torch.equal(whole, torch.cat([part.weight for part in parts]))
            storage = whole.untyped_storage().data_ptr()
            assert all(part.weight.untyped_storage().data_ptr() == storage for part in parts)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Engines that work as with CUDA graphs, on a CPU: row counts of 8, 16, …, one cache that
    grows, steps of eight. Only capture and replay are left out."""
    monkeypatch.setattr(TorchEngine, "_replay", lambda self, cache, key, compute: compute())

    def make(kind="qwen2", tied=True, eos=(2,), max_batch=64, **options):
        model = tiny_lm(kind=kind, tied=tied)
        return TorchEngine(model, eos, 0, tiny_tokenizer(), max_batch, graphs=True, **options)

    return make


@pytest.mark.parametrize("max_batch", [64, 16, 5])
def test_padded_row_counts_and_a_lasting_cache_change_nothing(as_on_gpu, max_batch):
    prompts, samplings = ragged()
    e = as_on_gpu(eos=range(100, 120), max_batch=max_batch)
    plain = engine(eos=range(100, 120), max_batch=max_batch, tokenizer=tiny_tokenizer())
    sampled = Sampling(n=2, temperature=0.7, max_tokens=17, seed=3, stop=("a", "Q"))
    for request in (samplings, sampled, Sampling(temperature=0, max_tokens=9)):
        a, b = e.generate(prompts, request), plain.generate(prompts, request)
        assert [(r.response_ids, r.end) for r in a] == [(r.response_ids, r.end) for r in b]
        for r, other in zip(a, b):
            assert r.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        prompts = prompts[::-1][:15]
        samplings = samplings[:15]


@pytest.mark.parametrize("max_batch, n", [(64, 1), (64, 3), (4, 3)])
def test_rows_that_have_ended_keep_what_they_hold(as_on_gpu, max_batch, n):
    """While others go on in the same graph, and in the unused rows of the next one."""
    fresh = functools.partial(engine, eos=range(100, 120), max_batch=max_batch)
    e = as_on_gpu(eos=range(100, 120), max_batch=max_batch)
    counts = play(e, fresh, 4, temperature=0.7, n=n)
    assert all(held > 0 for _, held in counts)


def test_kernels_equal_plain_pytorch_in_tritons_interpreter():
    """In a process of its own: the interpreter has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    code = (
        f"import sys; sys.path[:0] = {sys.path[:2]!r}; import test_decode as t; "
        "t.check_kernels('cpu', [t.torch.float32])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stderr[-2000:]


def check_kernels(device, dtypes):
    """Every kernel against its form in plain PyTorch, computed in float32 on the CPU."""
    from engines import kernels

    torch.manual_seed(0)
    for dtype in dtypes:
        limit = 1e-5 if dtype == torch.float32 else 4e-2

        def random(*shape):
            return torch.randn(*shape).to(device, dtype)

        def near(got, expected):
            assert (got.cpu().float() - expected.float()).abs().max() < limit

        for d in (8, 48, 128):
            x, angles = random(7, 11, d)[:, :9], torch.randn(7, d // 2).repeat(1, 2)
            cos, sin = (f(angles).to(device, dtype) for f in (torch.cos, torch.sin))
            expected = x.cpu().float()
            operations.rotate(expected, cos.cpu().float(), sin.cpu().float())
            kernels.rotate(x, cos, sin)
            near(x, expected)
        for n in (24, 1030):
            x, weight = random(5, 3, 2 * n), random(2 * n)
            for x in (x[:, 1], x[:, 1:]):
                expected = operations.rms_norm(x.cpu().float(), weight.cpu().float(), 1e-6)
                near(kernels.rms_norm(x, weight, 1e-6), expected)
            x = random(5, 2 * n)
            near(kernels.silu_times(x), operations.silu_times(x.cpu().float()))
        logits, temperature = random(4, 2500) * 3, torch.tensor([0.7, 1.0, 1.3, 1.0]).to(device)
        logits[0, :300], logits[1, 5] = -math.inf, math.nan
        logits[2, 2400] = math.inf
        expected = operations.block_logsumexp(logits.cpu(), temperature.cpu())
        got = kernels.block_logsumexp(logits, temperature).cpu()
        finite = expected.isfinite()
        near(got[finite], expected[finite])
        assert not got[1:3][~finite[1:3]].isfinite().any() and (got[0, :2] == -math.inf).all()
        for sizes in (
            ([3, 2, 1], 4, 2, 8, 200, 70),
            ([1, 1, 1], 9, 3, 64, 150, 1),
            ([11], 14, 2, 64, 90, 300),
            ([1, 9, 2], 16, 2, 128, 300, 130),
            ([2], 4, 4, 48, 10, 5),
        ):
            check_decode_attention(kernels, random, near, *sizes)


def check_decode_attention(kernels, random, near, groups, heads, n_kv, d, size, longest):
    """What lies beyond a row's or a prompt's length is NaN and must not matter."""
    count = sum(groups) + 2  # two rows don't run
    device = random(1).device
    cache = KVCache(count, size, len(groups), longest, 8, device)
    qkv = random(count, heads + 2 * n_kv, d)
    q, k, v = qkv.split([heads, n_kv, n_kv], 1)
    cache._allocate(0, *(x[None].transpose(1, 2) for x in (k, v)))
    stored = [x.fill_(math.nan) for x in (*cache.slots[0], *cache.prompts[0])]
    rows, slots = [], torch.randperm(count).tolist()
    for number, group in enumerate(groups, 1):
        prompt = Prompt(number, max(1, longest - 3 * number))
        for x in cache.prompts[0]:
            x[number, :, : prompt.length] = random(n_kv, prompt.length, d)
        for _ in range(group):
            at, slot = int(torch.randint(0, size - 1, ())) * bool(rows), slots.pop()
            for x in cache.slots[0]:
                x[slot, :, :at] = random(n_kv, at, d)
            rows.append((7, at, slot, prompt))
    cache.begin_steps(rows, count)
    plain = [x.cpu().float() for x in stored]
    table = types.SimpleNamespace(**{k: x.cpu() for k, x in vars(cache.rows).items()})
    expected = operations.decode_attention(
        *(x.cpu().float() for x in (q, k, v)), plain[:2], plain[2:], table, d**-0.5
    )
    got = kernels.decode_attention(q, k, v, stored[:2], stored[2:], cache.rows, d**-0.5)
    near(got[: len(rows)], expected[: len(rows)])
    assert got.isfinite().all()
    for x, y in zip(stored[:2], plain):  # the new keys and values are where they belong
        assert torch.equal(x[:-1].cpu().float().nan_to_num(7), y[:-1].nan_to_num(7))


def test_a_cache_that_is_let_go_is_freed_at_once():
    """Its CUDA graphs too: left to the garbage collector, they were freed inside the capture of
    another one."""
    cache = KVCache(2, 8, 1, 8, 1, torch.device("cpu"))
    prompt = cache.new_prompt((7, 8))
    cache.begin_pieces([Piece((7, 8), prompt)])
    cache.begin_steps([(1, 0, 0, prompt)], 1)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_kernels_equal_plain_pytorch_on_a_gpu():
    check_kernels("cuda", [torch.float32, torch.bfloat16])


def on_gpu(kind="qwen2", eos=(2,), max_batch=64, dtype=torch.float32, tied=True, **options):
    return TorchEngine(
        tiny_lm(kind=kind, tied=tied).to("cuda", dtype),
        eos,
        0,
        tiny_tokenizer(),
        max_batch,
        **options,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_graphs_equal_eager_and_transformers(kind):
    """float32: tokens are the same with CUDA graphs, without, and on a CPU, whatever leaves and
    joins; log-probabilities are the trainer's."""
    prompts, samplings = ragged()
    graphs, eager = (on_gpu(kind, range(100, 120), graphs=g) for g in (True, False))
    for max_batch in (64, 16, 5):
        graphs.max_batch = eager.max_batch = max_batch
        for s in (
            samplings,
            Sampling(n=2, temperature=0.7, max_tokens=17, seed=3),
            Sampling(n=2, temperature=0.7, top_p=0.8, max_tokens=11, seed=3),
        ):
            a, b = graphs.generate(prompts, s), eager.generate(prompts, s)
            assert [(r.response_ids, r.end) for r in a] == [(r.response_ids, r.end) for r in b]
            assert (
                max(abs(x - y) for r, t in zip(a, b) for x, y in zip(r.logprobs, t.logprobs)) < 1e-4
            )
    cpu = engine(kind, eos=range(100, 120))
    assert texts(graphs.generate(prompts, samplings)) == texts(cpu.generate(prompts, samplings))
    rollouts = graphs.generate(PROMPTS, Sampling(n=3, temperature=0.7, max_tokens=20, seed=1))
    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), 0).to("cuda")
    trainer = token_logprobs(graphs.model, batch.tokens, batch.attention_mask, 0.7)
    assert ((trainer - batch.logprobs) * batch.loss_mask).abs().max() < 1e-4


@pytest.mark.gpu
def test_graphs_see_synced_weights_and_survive_sleep():
    e, other = on_gpu(), tiny_lm(seed=9).to("cuda")
    s = Sampling(temperature=0, max_tokens=20)
    old = texts(e.generate(PROMPTS, s))
    cache = e._cache
    e.sleep()
    e.sync_weights(other.named_parameters())
    e.wake()
    assert (
        texts(e.generate(PROMPTS, s))
        == texts(TorchEngine(other, [2], 0, graphs=False).generate(PROMPTS, s))
        != old
    )
    assert e._cache is cache  # small: it stays, and its graphs with it
    long = e.generate(
        [[7] * 300, [8] * 200], Sampling(n=40, temperature=0, max_tokens=9)
    )  # a larger cache, new graphs
    alone = TorchEngine(other, [2], 0, graphs=False).generate(
        [[7] * 300], Sampling(temperature=0, max_tokens=9)
    )
    assert texts(long)[0] == texts(alone)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("max_batch", [64, 4])
def test_graphs_continue_conversations_like_an_engine_that_computes_all_anew(max_batch):
    fresh = functools.partial(on_gpu, eos=range(100, 120), max_batch=max_batch)
    counts = play(fresh(), functools.partial(fresh, graphs=False), 4, temperature=0.7)
    assert all(held > 0 for _, held in counts)


@pytest.mark.gpu
def test_graphs_end_responses_like_eager():
    """EOS, stop strings and logits that are no numbers inside a block of steps."""
    e, plain = (on_gpu(eos=(77,), tied=False, graphs=g) for g in (True, False))
    s = Sampling(n=4, temperature=0.9, max_tokens=40, seed=2, stop=("a", "Q"))
    got, expected = (x.generate(PROMPTS, s) for x in (e, plain))
    assert [(r.response_ids, r.end) for r in got] == [(r.response_ids, r.end) for r in expected]
    clean = e.generate(PROMPTS[:2], Sampling(temperature=0, max_tokens=20))
    with torch.no_grad():
        for x in (e, plain):
            x.model.get_input_embeddings().weight[clean[0].response_ids[5]] = math.nan
    got, expected = (
        x.generate(PROMPTS[:2], Sampling(temperature=0, max_tokens=20)) for x in (e, plain)
    )
    assert [(r.response_ids, r.end) for r in got] == [(r.response_ids, r.end) for r in expected]
    assert got[0].end == "engine_error"


@pytest.mark.gpu
def test_graphs_in_bfloat16():
    """For several row counts: the trainer's log-probabilities up to rounding."""
    e = on_gpu(dtype=torch.bfloat16)
    for n in (1, 3, 12):
        rollouts = e.generate(PROMPTS, Sampling(n=n, temperature=0.7, max_tokens=20, seed=1))
        batch = collate_rollouts(rollouts, [0.0] * len(rollouts), 0).to("cuda")
        with torch.no_grad():
            trainer = token_logprobs(e.model, batch.tokens, batch.attention_mask, 0.7)
        gap = (trainer - batch.logprobs).abs()[batch.loss_mask.bool()]
        R.check_engine_gap(float(gap.mean()), float(gap.max()), 0.1)
