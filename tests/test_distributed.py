"""distributed.py on one process: FSDP is the plain model; names, norms, time-outs, signals."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import tiny
import torch
import torch.distributed as c10d
from safetensors.torch import load_file
from tiny_training import MASK, TOKENS, loss_of, same, weights
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import distributed
from engines.torch_engine import TorchEngine
from model import load_causal_lm, make_optimizer, prepare_causal_lm
from packing import token_logprobs

pytestmark = pytest.mark.usefixtures("dist")


def test_setup_without_torchrun(dist):
    assert dist == distributed.Dist(0, 1, torch.device("cpu"))
    assert (
        distributed.all_reduce_sum([1, 2.5]) == [1.0, 2.5]
        and distributed.gather_objects({"a": 1}) == [{"a": 1}]
        and distributed.broadcast_object("x") == "x"
    )
    assert distributed.setup() == dist  # a second call joins the same group


def test_one_process_fsdp_is_the_plain_model(dist, family_lm):
    plain, sharded = (
        load_causal_lm(family_lm),
        distributed.shard_model(load_causal_lm(family_lm), dist),
    )
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
        weights(sharded)["model.norm.weight"], load_causal_lm(family_lm).model.norm.weight
    )


def test_bf16_compute_keeps_float32_shards(dist, qwen_lm):
    model = distributed.shard_model(load_causal_lm(qwen_lm), dist, bf16=True)
    exact = token_logprobs(load_causal_lm(qwen_lm), TOKENS, MASK).detach()
    got = token_logprobs(model, TOKENS, MASK)
    assert got.dtype == torch.float32 and 0 < float((got.detach() - exact).abs().max()) < 1.5
    got.sum().backward()
    assert (
        {p.dtype for p in model.parameters()}
        == {p.grad.dtype for p in model.parameters()}
        == {torch.float32}
    )


def test_weights_in_host_memory_and_weights_gathered_once_change_nothing(dist, qwen_lm):
    results = []
    for settings, reduce_each in (
        ({}, False),
        ({"gather_once": True}, False),
        ({"cpu_offload": True}, False),
        ({"cpu_offload": True, "gather_once": True}, False),
        ({"gather_once": True}, True),
    ):
        model = distributed.shard_model(load_causal_lm(qwen_lm), dist, **settings)
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


def test_full_parameters_in_another_dtype(dist, qwen_lm):
    model = distributed.shard_model(load_causal_lm(qwen_lm), dist)
    same(
        {n: t.to(torch.bfloat16) for n, t in distributed.full_parameters(model)},
        dict(distributed.full_parameters(model, torch.bfloat16)),
    )


def test_full_parameters_have_hugging_face_names_and_tied_ones_come_once(dist, family_lm):
    names = [n for n, _ in load_causal_lm(family_lm).named_parameters()]
    on_disk = load_file(os.path.join(family_lm, "model.safetensors"))
    model = distributed.shard_model(load_causal_lm(family_lm, gradient_checkpointing=True), dist)
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


def test_an_engine_with_tied_weights_gets_the_new_head(dist, qwen_lm):
    model = distributed.shard_model(load_causal_lm(qwen_lm), dist)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    engine = AutoModelForCausalLM.from_pretrained(qwen_lm)
    own = dict(engine.named_parameters())
    with torch.no_grad():
        for name, value in distributed.full_parameters(model):
            own[name].copy_(value)  # no missing name
    assert torch.equal(engine.lm_head.weight, engine.model.embed_tokens.weight)
    assert torch.equal(
        engine.lm_head.weight,
        load_file(os.path.join(qwen_lm, "model.safetensors"))["model.embed_tokens.weight"] + 1,
    )


def test_a_tied_parameter_counts_once_in_the_norm(dist, family_lm):
    for model in (
        load_causal_lm(family_lm),
        distributed.shard_model(load_causal_lm(family_lm), dist),
    ):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        grad = torch.zeros_like(load_causal_lm(family_lm).model.embed_tokens.weight)
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


def test_the_small_constant_is_added_once(qwen_lm):
    model = load_causal_lm(qwen_lm)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.model.norm.weight.grad[0] = 1e-6
    assert distributed.clip_grad_norm(model, 1e-6) == pytest.approx(1e-6)
    assert float(model.model.norm.weight.grad[0]) == pytest.approx(0.5e-6, rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_are_reported_and_left_alone(dist, qwen_lm, bad):
    model = distributed.shard_model(load_causal_lm(qwen_lm), dist)
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


def test_without_gradients_the_norm_is_zero(qwen_lm):
    assert distributed.clip_grad_norm(load_causal_lm(qwen_lm), 1.0) == 0.0


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


def test_a_compiled_models_names_load_into_a_plain_one(qwen_lm):
    wrapped = torch.nn.Module()
    wrapped.add_module("_orig_mod", load_causal_lm(qwen_lm))
    state = dict(distributed.full_parameters(wrapped))
    plain = tiny.tiny_lm(seed=9)
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied: the one name for two


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
