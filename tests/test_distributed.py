"""distributed.py: FSDP equals the plain model on one process and two; checkpoints survive what disks do.

One gloo group of one process lives in this pytest process; two processes are started by torchrun, once for all their
checks (`TWO` below), with the reference computed here by a plain model.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as c10d
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
)

import distributed
from engines.torch_engine import TorchEngine
from lora import LoRAConfig
from model import load_causal_lm, make_optimizer, prepare_causal_lm
from packing import token_logprobs

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = [("qwen2", True), ("llama", False), ("qwen3", True)]


pytestmark = pytest.mark.usefixtures("dist")


@pytest.fixture(
    scope="module", params=FAMILIES, ids=[f"{k}-{'tied' if t else 'untied'}" for k, t in FAMILIES]
)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("lm")
    tiny.tiny_lm(path, *request.param, seed=3)
    return str(path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    tiny.tiny_lm(path)
    return str(path)


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


# ------------------------------------------------------------------------------------------------------ one process


def test_setup_without_torchrun(dist):
    assert dist == distributed.Dist(0, 1, torch.device("cpu"))
    assert (
        distributed.all_reduce_sum([1, 2.5]) == [1.0, 2.5]
        and distributed.gather_objects({"a": 1}) == [{"a": 1}]
        and distributed.broadcast_object("x") == "x"
    )
    assert distributed.setup() == dist  # a second call joins the same group


def test_one_process_fsdp_is_the_plain_model(dist, folder):
    plain, sharded = load_causal_lm(folder), distributed.shard_model(load_causal_lm(folder), dist)
    assert any(isinstance(p, DTensor) for p in sharded.parameters())
    for a, b in zip(
        token_logprobs(plain, TOKENS, MASK, 0.7, with_entropy=True),
        token_logprobs(sharded, TOKENS, MASK, 0.7, with_entropy=True),
    ):
        assert torch.equal(a, b)
    loss_of(plain).backward()
    loss_of(sharded).backward()
    ours = {
        distributed.clean_name(n): distributed.full_tensor(p.grad)
        for n, p in sharded.named_parameters()
    }
    theirs = {n: p.grad for n, p in plain.named_parameters()}
    assert max(float(g.abs().max()) for g in theirs.values()) > 0.01
    same(ours, theirs, atol=1e-7)
    # one AdamW step, with clipping by the norm that torch computes on the plain model
    norm = float(torch.cat([g.double().flatten() for g in theirs.values()]).norm())
    optimizers = [make_optimizer(model, 0.01) for model in (plain, sharded)]
    assert float(torch.nn.utils.clip_grad_norm_(plain.parameters(), norm / 2)) == pytest.approx(
        norm, rel=1e-5
    )
    assert distributed.clip_grad_norm(sharded, norm / 2) == pytest.approx(norm, rel=1e-5)
    for optimizer in optimizers:
        optimizer.step()
    same(weights(sharded), {n: p.detach() for n, p in plain.named_parameters()}, atol=1e-6)
    assert not torch.equal(
        weights(sharded)["model.norm.weight"], load_causal_lm(folder).model.norm.weight
    )


def test_bf16_compute_keeps_float32_shards(dist, qwen):
    model = distributed.shard_model(load_causal_lm(qwen), dist, bf16=True)
    exact = token_logprobs(load_causal_lm(qwen), TOKENS, MASK).detach()
    got = token_logprobs(model, TOKENS, MASK)
    assert got.dtype == torch.float32 and 0 < float((got.detach() - exact).abs().max()) < 1.5
    got.sum().backward()
    assert (
        {p.dtype for p in model.parameters()}
        == {p.grad.dtype for p in model.parameters()}
        == {torch.float32}
    )


def test_weights_in_host_memory_and_weights_gathered_once_change_nothing(dist, qwen):
    results = []
    for settings, reduce_each in (
        ({}, False),
        ({"gather_once": True}, False),
        ({"cpu_offload": True}, False),
        ({"cpu_offload": True, "gather_once": True}, False),
        ({"gather_once": True}, True),
    ):
        model = distributed.shard_model(load_causal_lm(qwen), dist, **settings)
        optimizer = make_optimizer(model, 0.01)
        for i in range(2):
            for last in (False, True):
                model.set_requires_gradient_sync(last or reduce_each)
                model.set_reshard_after_backward(last or "gather_once" not in settings)
                loss_of(model).backward()
            distributed.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            logprobs = token_logprobs(
                model, TOKENS, MASK
            )  # gathered again, and given back by what follows
        results.append({"logprobs": logprobs} | weights(model))
        assert all(isinstance(p, DTensor) for p in model.parameters())
    for other in results[1:]:
        same(results[0], other)


def test_full_parameters_in_another_dtype(dist, qwen):
    model = distributed.shard_model(load_causal_lm(qwen), dist)
    same(
        {n: t.to(torch.bfloat16) for n, t in distributed.full_parameters(model)},
        dict(distributed.full_parameters(model, torch.bfloat16)),
    )


def test_full_parameters_have_hugging_face_names_and_tied_ones_come_once(dist, folder):
    names = [n for n, _ in load_causal_lm(folder).named_parameters()]
    on_disk = load_file(os.path.join(folder, "model.safetensors"))
    model = distributed.shard_model(load_causal_lm(folder, gradient_checkpointing=True), dist)
    got = weights(model)
    assert list(got) == names and ("lm_head.weight" in got) == (
        not model.config.tie_word_embeddings
    )
    same(got, {n: on_disk[n] for n in names})
    assert not any(isinstance(t, DTensor) for t in got.values())


def test_buffers_of_a_checkpoint_are_exported_and_synced(dist, tmp_path):
    """A router's bias is no parameter, but a folder without it is damaged."""
    config = DeepseekV3Config(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        eos_token_id=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        pad_token_id=0,
    )
    model = DeepseekV3ForCausalLM(config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    with torch.no_grad():
        model.get_buffer(bias).copy_(torch.tensor([0.5, -1.0, 2.0, 0.25]))
    model = distributed.shard_model(prepare_causal_lm(model), dist)
    distributed.export_hf(model, tiny.tiny_tokenizer(), str(tmp_path / "out"))
    assert torch.equal(
        load_causal_lm(str(tmp_path / "out")).get_buffer(bias), model.get_buffer(bias)
    )
    engine = TorchEngine(prepare_causal_lm(DeepseekV3ForCausalLM(config)), [2], 0)
    engine.sync_weights(distributed.full_parameters(model))
    assert torch.equal(engine.model.get_buffer(bias), model.get_buffer(bias))


def test_an_engine_with_tied_weights_gets_the_new_head(dist, qwen):
    model = distributed.shard_model(load_causal_lm(qwen), dist)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    engine = AutoModelForCausalLM.from_pretrained(qwen)
    own = dict(engine.named_parameters())
    with torch.no_grad():
        for name, value in distributed.full_parameters(model):
            own[name].copy_(value)  # no missing name
    assert torch.equal(engine.lm_head.weight, engine.model.embed_tokens.weight)
    assert torch.equal(
        engine.lm_head.weight,
        load_file(os.path.join(qwen, "model.safetensors"))["model.embed_tokens.weight"] + 1,
    )


def test_a_tied_parameter_counts_once_in_the_norm(dist, folder):
    for model in (load_causal_lm(folder), distributed.shard_model(load_causal_lm(folder), dist)):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        grad = torch.zeros_like(load_causal_lm(folder).model.embed_tokens.weight)
        grad[0, 0], grad[5, 1] = 3.0, 4.0
        p = model.get_input_embeddings().weight
        p.grad = (
            torch.distributed.tensor.distribute_tensor(grad, p.device_mesh, p.placements)
            if isinstance(p, DTensor)
            else grad
        )
        assert distributed.clip_grad_norm(model, 1e9) == pytest.approx(5.0, abs=1e-6)
        assert distributed.clip_grad_norm(model, 2.5) == pytest.approx(
            5.0, abs=1e-6
        )  # the norm before
        assert float(distributed.full_tensor(p.grad)[5, 1]) == pytest.approx(2.0, abs=1e-5)


def test_the_small_constant_is_added_once(qwen):
    model = load_causal_lm(qwen)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.model.norm.weight.grad[0] = 1e-6
    assert distributed.clip_grad_norm(model, 1e-6) == pytest.approx(1e-6)
    assert float(model.model.norm.weight.grad[0]) == pytest.approx(0.5e-6, rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_are_reported_and_left_alone(dist, qwen, bad):
    model = distributed.shard_model(load_causal_lm(qwen), dist)
    loss_of(model).backward()
    grad = model.model.layers[0].mlp.up_proj.weight.grad
    with torch.no_grad():
        (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = bad
    before = {n: distributed.full_tensor(p.grad).clone() for n, p in model.named_parameters()}
    norm = distributed.clip_grad_norm(model, 0.1)
    assert norm != norm or norm == float("inf")
    for n, p in model.named_parameters():
        torch.testing.assert_close(
            distributed.full_tensor(p.grad), before[n], atol=0, rtol=0, equal_nan=True
        )


def test_without_gradients_the_norm_is_zero(qwen):
    assert distributed.clip_grad_norm(load_causal_lm(qwen), 1.0) == 0.0


@pytest.mark.parametrize(
    "name, clean",
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("_orig_mod.model.embed_tokens.weight", "model.embed_tokens.weight"),
        (
            "model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("_orig_mod.a.weight", "a.weight"),
        ("module.b.weight", "b.weight"),
        ("_fsdp_wrapped_module.c.weight", "c.weight"),
        ("module._orig_mod.d.weight", "d.weight"),
        ("_orig_mod.module.d.weight", "d.weight"),
        ("model.module.x.weight", "model.module.x.weight"),
        ("model.layers.0._orig_mod._checkpoint_wrapped_module.x", "model.layers.0.x"),
        ("submodule.x", "submodule.x"),
        ("model.my_orig_mod.x", "model.my_orig_mod.x"),
        ("model.base_model.model.x", "model.base_model.model.x"),
    ],
)
def test_names(name, clean):
    assert distributed.clean_name(name) == clean == distributed.clean_name(clean)


def test_a_compiled_models_names_load_into_a_plain_one(qwen):
    wrapped = torch.nn.Module()
    wrapped.add_module("_orig_mod", load_causal_lm(qwen))
    state = dict(distributed.full_parameters(wrapped))
    plain = tiny.tiny_lm(seed=9)
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied: the one name for two


# ------------------------------------------------------------------------------------------------------ checkpoints


def rng_draws():
    return torch.rand(3).tolist(), random.random()


def test_resume_is_bit_equal(dist, folder, tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    model, optimizer = trained(folder, 2, dist)
    path = distributed.save_checkpoint(
        str(tmp_path), 2, model, optimizer, {"best": 0.5, "note": "é"}
    )
    assert path == str(tmp_path / "checkpoint_000002")
    saved, draws = weights(model), rng_draws()
    step(model, optimizer, 2)
    further = weights(model)

    other, fresh = trained(folder, 0, dist)
    torch.manual_seed(99)
    found = distributed.latest_checkpoint(str(tmp_path))
    assert (
        found[0] == path
        and found[1].items() >= {"step": 2, "world": 1, "best": 0.5, "note": "é"}.items()
    )
    distributed.load_checkpoint(path, other, fresh)
    same(weights(other), saved)
    assert rng_draws() == draws
    step(other, fresh, 2)
    same(weights(other), further)
    assert not torch.equal(saved["model.norm.weight"], further["model.norm.weight"])


def test_optimizer_moments_are_restored_not_only_weights(dist, qwen, tmp_path):
    model, optimizer = trained(qwen, 3, dist)
    path = distributed.save_checkpoint(str(tmp_path), 3, model, optimizer, {})
    other, fresh = trained(qwen, 1, dist)
    distributed.load_checkpoint(path, other, fresh)
    for p, q in zip(model.parameters(), other.parameters()):
        a, b = optimizer.state[p], fresh.state[q]
        assert float(a["step"]) == float(b["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert (
                torch.equal(distributed.full_tensor(a[key]), distributed.full_tensor(b[key]))
                and distributed.full_tensor(a[key]).any()
            )


def test_a_forward_pass_without_a_backward_pass_hides_nothing(dist, folder, tmp_path):
    """FSDP then keeps the root's parameters whole, other objects than the optimizer's: their moments were saved as zeros."""

    def look(model):
        with torch.no_grad():
            return loss_of(model)

    model, optimizer = trained(folder, 3, dist)
    look(model)
    path = distributed.save_checkpoint(str(tmp_path), 3, model, optimizer, {})
    assert len(optimizer.state) == len(list(model.parameters()))
    other, fresh = trained(folder, 0, dist)
    look(other)
    distributed.load_checkpoint(path, other, fresh)
    assert torch.equal(look(other), look(model))
    step(model, optimizer)
    step(other, fresh)
    same(weights(other), weights(model))
    plain, its = trained(folder, 4)
    same(weights(other), weights(plain), atol=2e-5)
    for m in (model, plain):
        m.zero_grad()
        loss_of(m).backward()
        look(m)
    assert distributed.clip_grad_norm(model, 1.0) == pytest.approx(
        distributed.clip_grad_norm(plain, 1.0), rel=1e-4
    )


def test_saving_before_the_first_step_changes_nothing(dist, qwen, tmp_path):
    model, optimizer = trained(qwen, 0, dist)
    distributed.save_checkpoint(str(tmp_path), 0, model, optimizer, {})
    step(model, optimizer, 2)
    same(weights(model), weights(trained(qwen, 2, dist)[0]))


@pytest.fixture()
def saver(dist, qwen):
    model, optimizer = trained(qwen, 1, dist)
    return (
        lambda run_dir, n, **kw: distributed.save_checkpoint(
            str(run_dir), n, model, optimizer, {"mark": n}, **kw
        ),
        model,
        optimizer,
    )


def names(folder):
    return sorted(os.listdir(folder))


def test_only_the_newest_are_kept_in_the_order_of_steps(saver, tmp_path):
    save = saver[0]
    for n in (1, 2, 3):
        save(tmp_path, n, keep=2)
    assert names(tmp_path) == ["checkpoint_000002", "checkpoint_000003"]
    for n in (999_999, 1_000_000, 1_000_001):  # as text, 1000000 comes before 999999
        save(tmp_path, n, keep=2)
        assert distributed.latest_checkpoint(str(tmp_path))[1]["mark"] == n
    assert names(tmp_path) == ["checkpoint_1000000", "checkpoint_1000001"]
    save(tmp_path, 1_000_002, keep=1)
    assert names(tmp_path) == ["checkpoint_1000002"]


def test_the_same_step_is_replaced(saver, tmp_path):
    save, model, optimizer = saver
    save(tmp_path, 1)
    step(model, optimizer)
    save(tmp_path, 1)
    other, fresh = trained(model.config._name_or_path, 0, distributed.setup())
    distributed.load_checkpoint(str(tmp_path / "checkpoint_000001"), other, fresh)
    same(weights(other), weights(model))
    assert names(tmp_path) == ["checkpoint_000001"]


def test_no_checkpoint_yet(dist, tmp_path):
    (tmp_path / "checkpoint_12").mkdir()
    (tmp_path / "checkpoint_000012.tmp").mkdir()
    assert (
        distributed.latest_checkpoint(str(tmp_path)) is None
        and distributed.latest_checkpoint(str(tmp_path / "none")) is None
    )


@pytest.mark.parametrize("content", ['{"step": 12', "", "[]", '{"step": 11}', "{}", None])
def test_a_corrupt_state_file_is_passed_over(saver, tmp_path, capsys, content):
    save = saver[0]
    save(tmp_path, 10)
    save(tmp_path, 12)
    state = tmp_path / "checkpoint_000012" / "state.json"
    state.unlink() if content is None else state.write_text(content)
    assert distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 10
    assert str(state) in capsys.readouterr().err
    save(tmp_path, 11, keep=1)  # the damaged one does not push the new one out
    assert distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 11
    shutil.rmtree(tmp_path / "checkpoint_000011")
    with pytest.raises(
        distributed.CheckpointError, match="checkpoint_000012"
    ):  # never a silent restart at step 0
        distributed.latest_checkpoint(str(tmp_path))


class Malicious:
    def __reduce__(self):
        return print, ("this has run",)


@pytest.mark.parametrize(
    "what",
    [
        "rng cut",
        "rng empty",
        "shard cut",
        "shard gone",
        "metadata gone",
        "metadata cut",
        "shard flipped",
        "metadata flipped",
        "rng flipped",
        "metadata replaced",
        "another model",
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_it(saver, dist, qwen, tmp_path, capfd, what):
    path = Path(saver[0](tmp_path, 1))
    shards = sorted(path.glob("*.distcp"))
    assert shards
    if what == "shard cut":
        shards[0].write_bytes(shards[0].read_bytes()[:1000])
    elif what in ("rng cut", "rng empty"):
        (path / "rng_rank000.pt").write_bytes(
            (path / "rng_rank000.pt").read_bytes()[: 100 if what == "rng cut" else 0]
        )
    elif what == "shard gone":
        shards[0].unlink()
    elif what == "metadata gone":
        (path / ".metadata").unlink()
    elif what == "metadata cut":
        (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:50])
    elif what.endswith("flipped"):
        name = {"shard": shards[0], "metadata": path / ".metadata", "rng": path / "rng_rank000.pt"}[
            what.split()[0]
        ]
        content = bytearray(name.read_bytes())
        for at in range(len(content) // 2, len(content) // 2 + 200):
            content[at] ^= 1
        name.write_bytes(content)
    elif what == "metadata replaced":
        (path / ".metadata").write_bytes(pickle.dumps(Malicious()))
    source = qwen
    if what == "another model":
        source = str(tmp_path / "lm")
        tiny.tiny_lm(source, hidden_size=64)
    model, optimizer = trained(source, 0, dist)
    with pytest.raises(distributed.CheckpointError, match=str(path)):
        distributed.load_checkpoint(str(path), model, optimizer)
    assert "this has run" not in capfd.readouterr().out


def test_a_checkpoint_without_checksums_loads(saver, dist, qwen, tmp_path):
    """Of a run that an earlier version began."""
    path = Path(saver[0](tmp_path, 1))
    state = json.loads((path / "state.json").read_text())
    assert set(state.pop("checksums")) == {p.name for p in path.iterdir()} - {"state.json"}
    (path / "state.json").write_text(json.dumps(state))
    model, optimizer = trained(qwen, 0, dist)
    distributed.load_checkpoint(str(path), model, optimizer)
    same(weights(model), weights(saver[1]))


def test_what_killed_runs_left_is_cleared_and_what_they_replaced_comes_back(tmp_path):
    for name in (
        "checkpoint_000002",
        "checkpoint_000001.tmp",
        "checkpoint_000003.tmp",
        "best.tmp",
        "best.old.tmp",
        "final",
        "final.old.tmp",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text(name)
    for name in ("notes.tmp", "metrics.jsonl.123.tmp"):
        (tmp_path / name).write_text("a file")
    distributed.clear_temporaries(str(tmp_path))
    assert names(tmp_path) == [
        "best",
        "checkpoint_000002",
        "final",
        "metrics.jsonl.123.tmp",
        "notes.tmp",
    ]
    assert (tmp_path / "best" / "of").read_text() == "best.old.tmp" and (
        tmp_path / "final" / "of"
    ).read_text() == "final"
    distributed.clear_temporaries(str(tmp_path / "none"))


def test_free_space_is_checked_against_what_a_run_writes(saver, qwen, tmp_path, monkeypatch):
    save, model, _ = saver
    parameters = sum(p.numel() for p in load_causal_lm(qwen).parameters())
    needed = distributed.run_bytes(model, 2, 2, torch.bfloat16)
    assert needed == 12 * parameters * 3 + 2 * parameters * 3
    adapted = load_causal_lm(qwen, lora=LoRAConfig(r=4))
    trained_ = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert (
        distributed.run_bytes(adapted, 1, 1, torch.float32) == 12 * trained_ * 2 + 4 * trained_ * 2
    )
    save(tmp_path / "run", 1)
    written = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert (
        12 * parameters < written < 1.5 * 12 * parameters + 100_000
    )  # the arithmetic is that of the files
    usage = type(shutil.disk_usage(tmp_path))
    for free, enough in ((needed - written, True), (needed - written - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free))
        if enough:
            distributed.check_free_space(str(tmp_path / "run"), needed)
        else:
            with pytest.raises(
                distributed.CheckpointError,
                match="run needs up to .* GB, holds .* free; free some space",
            ):
                distributed.check_free_space(str(tmp_path / "run"), needed)
    distributed.check_free_space(str(tmp_path / "not" / "there"), 0)


def test_collectives_of_the_model_end_in_minutes_and_waits_of_the_host_in_hours(dist):
    def wait(group):
        return group._get_backend(torch.device("cpu")).options._timeout

    assert (
        wait(c10d.group.WORLD)
        == distributed.DEVICE_WAIT
        < timedelta(hours=1)
        < distributed.HOST_WAIT
        == wait(distributed._host)
    )


def test_a_full_disk_leaves_earlier_checkpoints(saver, tmp_path, monkeypatch):
    save = saver[0]
    save(tmp_path, 1)
    small = None
    if os.geteuid() == 0:  # a real full disk where mounting is allowed
        small = tmp_path / "small"
        small.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], capture_output=True
        ).returncode:
            small = None
    if small is not None:
        try:
            (small / "fill").write_bytes(b"x" * 250_000)
            shutil.copytree(
                tmp_path / "checkpoint_000001",
                small / "checkpoint_000000",
                ignore=lambda *a: [n for n in a[1] if n.endswith("distcp")],
            )
            (small / "checkpoint_000000" / "state.json").write_text('{"step": 0}')
            before = names(small)
            with pytest.raises(distributed.CheckpointError, match="checkpoint_000002.*No space"):
                save(small, 2)
            assert (
                names(small) == before and distributed.latest_checkpoint(str(small))[1]["step"] == 0
            )
            with pytest.raises(distributed.CheckpointError, match="final.*No space"):
                distributed.export_hf(saver[1], tiny.tiny_tokenizer(), str(small / "final"))
            assert names(small) == before
        finally:
            subprocess.run(["umount", str(small)], check=True)
            small.rmdir()
    for function in ("torch.save", "json.dump"):  # the disk fills up later: RNG state, state.json
        with monkeypatch.context() as patch:

            def full(*args, **kwargs):
                raise OSError(28, "No space left on device", "x")

            patch.setattr(function, full)
            with pytest.raises(distributed.CheckpointError, match="checkpoint_000002.*No space"):
                save(tmp_path, 2)
        assert (
            names(tmp_path) == ["checkpoint_000001"]
            and distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 1
        )
    save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint_000001", "checkpoint_000002"]


def test_an_error_inside_torchs_own_saving_is_ours_too(saver, tmp_path, monkeypatch):
    """torch wraps it in a BaseException, which `except Exception` would let through."""
    save = saver[0]
    save(tmp_path, 1)
    from torch.distributed.checkpoint import FileSystemWriter

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(
        distributed.CheckpointError,
        match="checkpoint_000002.*No space.*earlier checkpoints are intact",
    ):
        save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint_000001"]


def test_an_unwritable_run_folder(saver, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(distributed.CheckpointError, match="could not be written"):
        saver[0](tmp_path / "file" / "run", 1)


KILLED = """
    import os, shutil, signal, sys
    sys.path[:0] = [{root!r}, {tests!r}]
    import torch, distributed
    from model import load_causal_lm, make_optimizer

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die(when, run):
        dist = distributed.setup()
        lm = distributed.shard_model(load_causal_lm({lm!r}), dist)
        optimizer = make_optimizer(lm, 0.01)
        distributed.save_checkpoint(run, 1, lm, optimizer, {{}})
        rename = os.rename
        if when == "data":
            os.fsync = lambda fd: (os.ftruncate(fd, 1000), die())
        elif when == "rename":
            os.rename = lambda a, b: die() if str(b).endswith("checkpoint_000002") else rename(a, b)
        elif when == "cleaning":
            shutil.rmtree = lambda path, **kw: (os.remove(path + "/.metadata"), die()) if os.path.isdir(path) else None
        distributed.save_checkpoint(run, 2, lm, optimizer, {{}}, keep=1)

    for when in ("data", "rename", "cleaning"):
        child = os.fork()  # torch is imported once
        if not child:
            save_and_die(when, {out!r} + "/" + when)
            os._exit(0)
        print(when, os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(qwen, tmp_path_factory):
    """Run folders, by name, of processes that were killed while they saved checkpoint 2."""
    out = tmp_path_factory.mktemp("killed")
    code = textwrap.dedent(
        KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), lm=qwen, out=str(out))
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        timeout=300,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.split() == ["data", "9", "rename", "9", "cleaning", "9"], done.stderr
    return out


@pytest.mark.parametrize("when, newest", [("data", 1), ("rename", 1), ("cleaning", 2)])
def test_a_kill_in_the_middle_of_a_save(dist, qwen, killed, saver, when, newest):
    run = killed / when
    left = [n for n in names(run) if n != f"checkpoint_{newest:06d}"]
    assert left and all(
        n.endswith(".tmp") for n in left
    )  # something is there, and it bears no checkpoint's name
    found, state = distributed.latest_checkpoint(str(run))
    assert state["step"] == newest
    model, optimizer = trained(qwen, 0, dist)
    distributed.load_checkpoint(found, model, optimizer)
    saver[0](run, 3)
    assert names(run) == [
        f"checkpoint_{newest:06d}",
        "checkpoint_000003",
    ]  # the next save sweeps it up


def test_a_second_resume_starts_where_the_first_one_ended(saver, tmp_path):
    saver[0](tmp_path, 30)
    start = distributed.latest_checkpoint(str(tmp_path))[1]["step"]
    saver[0](tmp_path, start + 10)
    assert distributed.latest_checkpoint(str(tmp_path))[1]["step"] == 40


# ------------------------------------------------------------------------------------------------------ export


def test_export_loads_in_stock_transformers(dist, folder, tmp_path):
    model, _ = trained(folder, 2, dist)
    wanted = weights(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    distributed.export_hf(model, tokenizer, str(tmp_path / "final"))
    assert names(tmp_path) == ["final"]
    stock, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "final", output_loading_info=True
    )
    assert not any(report.values())
    tied = model.config.tie_word_embeddings
    assert (stock.lm_head.weight is stock.model.embed_tokens.weight) == tied
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert list(wanted) == [n for n in wanted if n in stored] and len(stored) == len(wanted)
    same({n: p.detach() for n, p in stock.named_parameters()}, wanted)
    settings = json.loads((tmp_path / "final" / "config.json").read_text())
    assert settings["architectures"] == [
        type(AutoModelForCausalLM.from_pretrained(folder)).__name__
    ]
    assert (
        settings["use_cache"] is True
        and settings["dtype"] == "float32"
        and settings["tie_word_embeddings"] == tied
    )
    with torch.no_grad():
        ours = token_logprobs(model, TOKENS, MASK)
        theirs = torch.log_softmax(stock.eval()(input_ids=TOKENS[:, :-1]).logits, -1).gather(
            -1, TOKENS[:, 1:, None]
        )[..., 0]
    keep = MASK[:, 1:].bool()
    torch.testing.assert_close(ours[keep], theirs[keep], atol=1e-5, rtol=0)
    again = AutoTokenizer.from_pretrained(tmp_path / "final")
    assert (
        again("é")["input_ids"] == tokenizer("é")["input_ids"]
        and again.chat_template == tokenizer.chat_template
    )
    assert again.eos_token_id == tokenizer.eos_token_id


def test_export_dtype_leaves_the_trainer_alone(dist, qwen, tmp_path):
    model, _ = trained(qwen, 0, dist)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.001)
    before = weights(model)
    distributed.export_hf(
        model, AutoTokenizer.from_pretrained(qwen), str(tmp_path / "half"), torch.bfloat16
    )
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16} and float(
        stored["model.norm.weight"][0]
    ) == 1.0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    same(weights(model), before)
    assert model.config.use_cache is False and model.config.dtype == torch.float32


def test_export_of_an_unsharded_model_from_a_bare_config(tmp_path):
    model = tiny.tiny_lm(seed=4)  # never loaded from a folder: its config names no architecture
    distributed.export_hf(model, tiny.tiny_tokenizer(), str(tmp_path / "x"))
    assert json.loads((tmp_path / "x" / "config.json").read_text())["architectures"] == [
        "Qwen2ForCausalLM"
    ]


def test_export_of_a_model_whose_generation_config_transformers_refuses_to_save(
    dist, qwen, tmp_path
):
    model, _ = trained(qwen, 0, dist)
    model.generation_config = GenerationConfig(
        temperature=0.6, top_p=0.9, do_sample=False, eos_token_id=[2, 4]
    )
    with pytest.raises(ValueError):
        model.generation_config.save_pretrained(tmp_path)
    distributed.export_hf(model, AutoTokenizer.from_pretrained(qwen), str(tmp_path / "x"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert (
        stock.generation_config.eos_token_id == [2, 4]
        and stock.generation_config.temperature == 0.6
    )


@pytest.mark.parametrize("where_it_fails", ["weights", "tokenizer", "rename"])
def test_a_failing_export_leaves_the_previous_one(
    dist, qwen, tmp_path, monkeypatch, where_it_fails
):
    model, optimizer = trained(qwen, 0, dist)
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    target = tmp_path / "best"
    distributed.export_hf(model, tokenizer, str(target))
    before = {n: (target / n).read_bytes() for n in names(target)}
    step(model, optimizer)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "x")

    if where_it_fails == "weights":
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    elif where_it_fails == "tokenizer":
        monkeypatch.setattr(tokenizer, "save_pretrained", full)
    else:
        rename = os.rename
        monkeypatch.setattr(
            os,
            "rename",
            lambda a, b: full() if str(b) == str(target) and "old" not in str(a) else rename(a, b),
        )
    with pytest.raises(distributed.CheckpointError, match="best could not be written: .*No space"):
        distributed.export_hf(model, tokenizer, str(target))
    monkeypatch.undo()
    assert (
        names(tmp_path) == ["best"]
        and {n: (target / n).read_bytes() for n in names(target)} == before
    )
    distributed.export_hf(model, AutoTokenizer.from_pretrained(qwen), str(target))
    assert (target / "model.safetensors").read_bytes() != before["model.safetensors"] and names(
        tmp_path
    ) == ["best"]


# ------------------------------------------------------------------------------------------------------ two processes

TWO = """
import json, os, sys, time
sys.path[:0] = sys.argv[1:3]
import torch
torch.set_num_threads(1)
import distributed
from model import load_causal_lm, make_optimizer, token_logprobs
import test_distributed as T


def check(dist, lm, out):
    rank = dist.rank
    facts = {"rank": rank, "world": dist.world, "sum": distributed.all_reduce_sum([rank + 1, 0.5]), "gathered": distributed.gather_objects(chr(97 + rank)),
             "broadcast": distributed.broadcast_object({"from": rank})}
    distributed.print0(f"printed by {rank}")

    # one step: each rank has half of the rows; FSDP averages gradients, so the loss is multiplied by the world size
    model = distributed.shard_model(load_causal_lm(lm), dist)
    optimizer = make_optimizer(model, 0.01)
    mine = slice(2 * rank, 2 * rank + 2)
    (T.loss_of(model, mine) * dist.world).backward()
    grads = {distributed.clean_name(n): distributed.full_tensor(p.grad) for n, p in model.named_parameters()}
    facts["norm"] = distributed.clip_grad_norm(model, 0.5)
    optimizer.step()
    stepped = T.weights(model)
    with torch.no_grad():
        logprobs = token_logprobs(model, T.TOKENS[mine], T.MASK[mine])
    if rank == 0:
        torch.save({"grads": grads, "stepped": stepped}, out + "/step.pt")
    facts["logprobs"] = distributed.gather_objects(logprobs.tolist())

    # the constant is added once, not once a rank
    model.reshard()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    grad = torch.zeros(32)
    grad[0] = 1e-6
    p = model.model.norm.weight
    p.grad = torch.distributed.tensor.distribute_tensor(grad, p.device_mesh, p.placements)
    facts["tiny norm"] = distributed.clip_grad_norm(model, 1e-6)
    facts["tiny grad"] = float(distributed.full_tensor(p.grad)[0])

    # a rank with nothing to train; gradients of every micro-batch reduced at once: the same gradients
    whole = T.MASK[:, 1:].bool().clone()
    whole[2:] = False
    for facts_name, each in (("idle", False), ("idle, reduced each", True)):
        model.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last or each)
            rows = token_logprobs(model, T.TOKENS[mine], T.MASK[mine], positions=whole[mine])
            (-rows.sum() * dist.world).backward()
        facts[facts_name] = distributed.clip_grad_norm(model, 1e9)
    facts["grads"] = sorted(n for n, p in model.named_parameters() if p.grad is None)
    model.zero_grad()

    # a model is loaded and sharded in turn: no two at a time
    with distributed.in_turn():
        began = time.time()
        again = distributed.shard_model(load_causal_lm(lm), dist)
        ended = time.time()
    facts["turn"], facts["in turn"] = [began, ended], all(torch.equal(a, b) for a, b in zip(T.weights(again).values(), load_causal_lm(lm).parameters()))

    # what rank 0 alone runs, or fails at, is known to all
    facts["rank 0"] = distributed.on_rank_0(lambda: f"done by {distributed._rank()}")
    try:
        distributed.on_rank_0(lambda: 1 / 0)
    except ZeroDivisionError as e:
        facts["rank 0 fails"] = str(e)

    # checkpoints: written by two; written by one, loaded by two; bit-equal on the same number
    torch.manual_seed(100 + rank)
    distributed.save_checkpoint(out + "/run2", 1, model, optimizer, {"mark": "two"})
    draws = torch.rand(2).tolist()
    def further():
        optimizer.zero_grad()
        (T.loss_of(model, mine) * dist.world).backward()
        optimizer.step()
        return T.weights(model)
    once = further()
    found = distributed.latest_checkpoint(out + "/run2")
    distributed.load_checkpoint(found[0], model, optimizer)
    facts["rng"] = draws == torch.rand(2).tolist()
    twice = further()
    facts["bit equal"] = all(torch.equal(once[n], twice[n]) for n in once)
    found = distributed.latest_checkpoint(out + "/run1")
    distributed.load_checkpoint(found[0], model, optimizer)
    facts["from one"] = found[1]
    from_one = T.weights(model)
    after = further()
    if rank == 0:
        torch.save({"from_one": from_one, "after": after}, out + "/from_one.pt")

    # many weights in a collective, or one; rows that do not divide by the ranks, or are fewer
    whole, many = T.weights(model), distributed.GATHER_BYTES
    distributed.GATHER_BYTES = 2000
    facts["few at a time"] = [list(whole) == list(few := T.weights(model)), all(torch.equal(whole[n], few[n]) for n in whole)]
    distributed.GATHER_BYTES = many
    shapes = [(3, 5), (1, 4), (7,), (4, 2, 3)]
    odd = [torch.distributed.tensor.distribute_tensor(torch.randn(s), p.device_mesh, p.placements) for s in shapes]
    facts["odd rows"] = [torch.equal(x.to(dtype), y) and y.dtype == dtype for dtype in (torch.float32, torch.bfloat16)
                         for x, y in zip([s.full_tensor() for s in odd], distributed.gather(odd, dtype))]

    # ranks that see different folders; a full disk on one rank alone
    own = out + f"/own{rank}"
    for n in [10, 20] if rank == 0 else [10]:
        os.makedirs(own + f"/checkpoint_{n:06d}")
        json.dump({"step": n}, open(own + f"/checkpoint_{n:06d}/state.json", "w"))
    facts["agreed"] = distributed.latest_checkpoint(own)[1]["step"]
    try:
        distributed.latest_checkpoint(own if rank == 0 else out + "/nothing")
        facts["disagreed"] = "no error"
    except distributed.CheckpointError as e:
        facts["disagreed"] = str(e)
    real = torch.save
    if rank == 1:
        def full(*a, **k):
            raise OSError(28, "No space left on device")
        torch.save = full
    try:
        distributed.save_checkpoint(out + "/run2", 2, model, optimizer, {})
        facts["full"] = "no error"
    except distributed.CheckpointError as e:
        facts["full"] = str(e)
    torch.save = real
    facts["left"] = sorted(os.listdir(out + "/run2"))

    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(lm)
    distributed.export_hf(model, tokenizer, out + "/export")
    if rank == 0:
        def full(*a, **k):
            raise OSError(28, "No space left on device")
        tokenizer.save_pretrained = full
    try:
        distributed.export_hf(model, tokenizer, out + "/export")
        facts["export fails"] = "no error"
    except distributed.CheckpointError as e:
        facts["export fails"] = str(e)
    facts["exported"] = os.path.exists(out + "/export/model.safetensors")  # on every rank: it returns when the folder is there
    json.dump(facts, open(out + f"/facts{rank}.json", "w"))


dist = distributed.setup()
for folder in sys.argv[3:]:
    check(dist, folder + "/lm", folder)
distributed.cleanup()
"""


@pytest.fixture(scope="module")
def torchrun(dist, tmp_path_factory):
    """One start of two processes for all families; a family's folder by its place in PAIRS, and what was printed."""
    out = tmp_path_factory.mktemp("two")
    for i, family in enumerate(PAIRS):
        tiny.tiny_lm(out / str(i) / "lm", *family, seed=3)
        distributed.save_checkpoint(
            str(out / str(i) / "run1"),
            2,
            *trained(str(out / str(i) / "lm"), 2, dist),
            {"mark": "one"},
        )
    (out / "two.py").write_text(TWO)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(out / "two.py"),
            str(ROOT),
            str(ROOT / "tests"),
            *(str(out / str(i)) for i in range(len(PAIRS))),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out, done.stdout


PAIRS = [("qwen2", True), ("llama", False)]


@pytest.fixture(scope="module", params=[0, 1], ids=["qwen2-tied", "llama-untied"])
def two(request, dist, torchrun):
    """(facts of both ranks, the folder they wrote to)."""
    out = torchrun[0] / str(request.param)
    return [json.loads((out / f"facts{r}.json").read_text()) for r in (0, 1)], out


def test_two_processes_talk(two, torchrun):
    for rank, facts in enumerate(two[0]):
        assert (facts["rank"], facts["world"], facts["sum"], facts["gathered"]) == (
            rank,
            2,
            [3.0, 1.0],
            ["a", "b"],
        )
        assert facts["broadcast"] == {"from": 0}
    assert torchrun[1].count("printed by 0") == len(PAIRS) and "printed by 1" not in torchrun[1]


def test_two_processes_take_the_step_of_one(two):
    plain = load_causal_lm(str(two[1] / "lm"))
    optimizer = make_optimizer(plain, 0.01)
    loss_of(plain).backward()
    theirs = torch.load(two[1] / "step.pt")
    same(theirs["grads"], {n: p.grad for n, p in plain.named_parameters()}, atol=1e-6)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert norm > 0.5  # clipping was at work
    optimizer.step()
    same(theirs["stepped"], {n: p.detach() for n, p in plain.named_parameters()}, atol=2e-5)
    with torch.no_grad():
        logprobs = token_logprobs(plain, TOKENS, MASK)
    for facts in two[0]:
        assert facts["norm"] == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(
            torch.tensor(facts["logprobs"]).reshape(4, 11), logprobs, atol=1e-3, rtol=0
        )


def test_a_rank_with_nothing_to_train_takes_part_in_every_collective(two):
    """The head too, which is a parameter of its own where it is not tied."""
    model = load_causal_lm(str(two[1] / "lm"))
    model.load_state_dict(torch.load(two[1] / "step.pt")["stepped"], strict=False)
    keep = MASK[:2, 1:].bool()
    (
        -2 * token_logprobs(model, TOKENS[:2], MASK[:2], positions=keep).sum()
    ).backward()  # two micro-batches
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for facts in two[0]:
        assert facts["grads"] == [] and norm > 0.1
        assert facts["idle"] == pytest.approx(norm, rel=1e-4) == facts["idle, reduced each"]


def test_models_are_loaded_and_sharded_in_turn(two):
    (_, first_ends), (second_begins, _) = sorted(facts["turn"] for facts in two[0])
    assert first_ends <= second_begins and all(facts["in turn"] for facts in two[0])


def test_what_fails_on_rank_0_alone_fails_on_all(two):
    for facts in two[0]:
        assert facts["rank 0"] == "done by 0" and facts["rank 0 fails"] == "division by zero"
        assert "export could not be written: [Errno 28] No space left" in facts["export fails"]


def test_two_processes_add_the_constant_once(two):
    for facts in two[0]:
        assert facts["tiny norm"] == pytest.approx(1e-6) and facts["tiny grad"] == pytest.approx(
            0.5e-6, rel=0.02
        )


def test_two_processes_resume_bit_equally(two):
    assert all(facts["rng"] and facts["bit equal"] for facts in two[0])


def test_two_processes_gather_weights_of_any_shape_many_at_a_time(two):
    for facts in two[0]:
        assert facts["few at a time"] == [True, True] and facts["odd rows"] == [True] * 8


def test_written_by_one_loaded_by_two(dist, two):
    out = two[1]
    model, optimizer = trained(str(out / "lm"), 2, dist)
    assert all(
        facts["from one"].items() >= {"step": 2, "world": 1, "mark": "one"}.items()
        for facts in two[0]
    )
    theirs = torch.load(out / "from_one.pt")
    same(theirs["from_one"], weights(model))
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()  # the moments came along: the next step is the same one
    same(theirs["after"], weights(model), atol=2e-5)


def test_written_by_two_loaded_by_one(dist, two):
    model, optimizer = trained(str(two[1] / "lm"), 0, dist)
    path, state = distributed.latest_checkpoint(str(two[1] / "run2"))
    assert (state["step"], state["world"], state["mark"]) == (1, 2, "two")
    distributed.load_checkpoint(path, model, optimizer)
    same(weights(model), torch.load(two[1] / "step.pt")["stepped"])
    assert all(float(s["step"]) == 1 for s in optimizer.state.values())


def test_all_ranks_agree(two):
    for facts in two[0]:
        assert facts["agreed"] == 10 and "seen by every process" in facts["disagreed"]


def test_a_disk_full_on_one_rank_is_an_error_on_all(two):
    for facts in two[0]:
        assert "checkpoint_000002 could not be written: [Errno 28] No space left" in facts[
            "full"
        ] and facts["left"] == ["checkpoint_000001"]


def test_two_processes_export_one_whole_model(two):
    assert all(facts["exported"] for facts in two[0])
    stock, report = AutoModelForCausalLM.from_pretrained(
        two[1] / "export", output_loading_info=True
    )
    assert not any(report.values())
    same(
        {n: p.detach() for n, p in stock.named_parameters()},
        torch.load(two[1] / "from_one.pt")["after"],
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_noted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with distributed.noted_signals() as noted:
        signal.raise_signal(number)
    assert noted == [number] and signal.getsignal(number) == before


def test_nohup_keeps_a_hangup_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with distributed.noted_signals() as noted:
            signal.raise_signal(signal.SIGHUP)
        assert noted == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    """A scheduler signals the processes and torchrun, which sends it to them again; a later one is meant."""
    with distributed.noted_signals() as noted:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert noted == [signal.SIGINT] * 2
        now = time.monotonic()
        monkeypatch.setattr(distributed.time, "monotonic", lambda: now + 3)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


COPIED = """
import os, sys
import torch
import distributed
dist = distributed.setup()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    model = distributed.shard_model(Net(), dist)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = make()
model(torch.ones(2, 4)).sum().backward()
assert distributed.clip_grad_norm(model, 1.0) > 0
optimizer.step()
distributed.save_checkpoint("run", 1, model, optimizer, {"mark": 1})
other, its = make()
folder, state = distributed.latest_checkpoint("run")
distributed.load_checkpoint(folder, other, its)
pairs = zip(distributed.full_parameters(model), distributed.full_parameters(other))
assert state["mark"] == 1 and all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
distributed.cleanup()
print(sorted(set(sys.modules) & {"config", "data", "model", "lora", "packing", "grpo", "rollout"}))
"""


def test_distributed_py_works_copied_alone_into_an_empty_folder(tmp_path):
    assert tiny.run_copied("distributed.py", tmp_path, COPIED) == "[]"


# ------------------------------------------------------------------------------------------------------ whole runs

IDLE = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import torch
torch.set_num_threads(1)
import grpo, prompts, sft
from retriever import RetrieverConfig
from engines.torch_engine import TorchEngine

prompts.INSTRUCTION = "Rewrite."
out, rank = sys.argv[3], int(__import__("os").environ["RANK"])
if sys.argv[4] == "sft":
    sft.main(sft.SFTConfig(stage="train", model=out + "/lm", records=out + "/train.jsonl", out=out + "/sft", epochs=1,
                           sequences_per_step=2, heldout_fraction=0, save_every=100))
    sys.exit()
generate = TorchEngine.generate


def failing(self, *args, **kwargs):  # rank 1's rollouts fail for a technical reason: it has no group to train
    rollouts = generate(self, *args, **kwargs)
    for r in rollouts:
        r.end = "engine_error" if rank else r.end
    return rollouts


TorchEngine.generate = failing
grpo.main(grpo.GRPOConfig(model=out + "/lm", train=out + "/train.jsonl", out=out + "/grpo", prompts_per_step=2, group_size=4,
                          max_response_tokens=8, steps=2, validate_every=100, warmup_steps=0, retriever=RetrieverConfig(kind="bm25", corpus=out + "/corpus.jsonl"), lr=1e-3))
"""


def test_sft_and_grpo_go_on_where_a_rank_has_nothing_to_train(tmp_path):
    """Two processes and an untied head: a last step with one row, a step with one group."""
    from test_grpo import write_world

    write_world(tmp_path)
    tiny.tiny_lm(tmp_path / "lm", "llama", tied=False)
    rows = [
        json.loads(line) | {"response": "yes"}
        for line in open(tmp_path / "train.jsonl", encoding="utf-8")
    ][:3]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "idle.py").write_text(IDLE)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "idle.py"),
        str(ROOT),
        str(ROOT / "tests"),
        str(tmp_path),
    ]
    for stage in ("sft", "grpo"):
        done = subprocess.run(
            [sys.executable, *command, stage],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stderr[-4000:]
    sft_rows, grpo_rows = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("sft", "grpo")
    )
    assert [row["sequences"] for row in sft_rows] == [2, 1] and all(
        row["grad_norm"] > 0 for row in sft_rows
    )
    assert [row["failed"] for row in grpo_rows if row["step"]] == [4, 4] and all(
        r["tokens"] > 0 for r in grpo_rows if r["step"]
    )
