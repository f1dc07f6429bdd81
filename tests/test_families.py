"""Families beside Qwen and Llama: log-probabilities of every layout and of the engine."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import distributed
import grpo
from batching import plan_updates
from engines.base import RolloutError, Sampling
from engines.torch_engine import TorchEngine
from model import make_optimizer, prepare_causal_lm
from packing import token_logprobs
from rollout import collate_rollouts

SHAPE = dict(
    vocab_size=261,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=2,
    pad_token_id=0,
    bos_token_id=1,
)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=256)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(
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
    num_key_value_heads=4,
)
FAMILIES = {
    "mistral": {"sliding_window": None},
    "phi3": {},
    "phi": {"resid_pdrop": 0.1, "partial_rotary_factor": 0.5},
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8},
    "olmo2": {},
    "gpt_neox": {},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "granite": {},
    "smollm3": {},
    "starcoder2": {},
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "ernie4_5": {},
    "seed_oss": {"head_dim": 8},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": MOE | {"head_dim": 8},
    "olmo": {},
    "gpt_bigcode": GPT2,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "glm": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "deepseek_v3": LATENT,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family):
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2, generator=draw)

    def reference(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float() / 0.7
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]

    def ids(n: int) -> list[int]:
        return torch.randint(5, 261, (n,), generator=draw).tolist()

    prompts = [[7, 8, 9, *ids(5)], [7, 8, 9, *ids(9)]]
    rows = [prompts[group] + ids(n) for group, n in ((0, 6), (0, 3), (1, 8), (1, 2))]
    expected = [reference(row) for row in rows]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    left = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    groups = torch.tensor([len(prompts[g]) for g in (0, 0, 1, 1)]), torch.tensor([0, 0, 1, 1])

    prepare_causal_lm(model, family)
    with torch.no_grad():
        plain = token_logprobs(model, tokens, tokens.ne(0).long(), 0.7)
        packed = token_logprobs(model, tokens, tokens.ne(0).long(), 0.7, groups=groups)
        padded = token_logprobs(model, left, left.ne(0).long(), 0.7)
    for i, row in enumerate(expected):
        for got in (
            plain[i, : len(row)],
            packed[i, : len(row)],
            padded[i, longest - len(row) - 1 :],
        ):
            torch.testing.assert_close(got, row, atol=2e-5, rtol=0)

    sampler = TorchEngine(model, [2], 0)
    first = sampler.generate(prompts, Sampling(n=2, temperature=0.7, max_tokens=10, seed=3))
    more = [r.prompt_ids + r.response_ids + ids(3 + i) for i, r in enumerate(first)]
    again = sampler.generate(more, Sampling(temperature=0.7, max_tokens=5, seed=4))
    assert sampler.stats.held_tokens > 0
    model.set_attn_implementation("eager")
    for r in first + again:
        sampled = reference(r.prompt_ids + r.response_ids)[len(r.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.tensor(r.logprobs), sampled, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["opt", "seed_oss"])
def test_an_update_sees_no_dropout_that_is_a_function(dist, family):
    """Some models drop inside their forward method in train mode: not what was sampled from."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    )
    engine = TorchEngine(prepare_causal_lm(copy.deepcopy(model), family), [2], 0)
    rollouts = engine.generate(
        [[7, 8, 9], [7, 9]], Sampling(n=4, temperature=1.0, max_tokens=12, seed=3)
    )
    policy = distributed.shard_model(prepare_causal_lm(model, family), dist)
    cfg = grpo.GRPOConfig(kl_coef=0.0, temperature=1.0, lr=1e-9)
    batch = collate_rollouts(rollouts, [1.0, -1.0] * 4, 0)
    updates = plan_updates(policy, batch, dist.device, cfg.micro_batch_tokens)
    stats = grpo.update(policy, make_optimizer(policy, 1e-9), updates, cfg, dist)
    assert stats["engine_gap_max"] < 1e-4 and stats["grad_norm"] > 0


def test_a_layer_that_attends_twice_is_refused_by_the_engine():
    """DiffLlama's second call would take the place of the first one's keys and values."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **SHAPE))
    with pytest.raises(RolloutError, match="attends twice in a layer"):
        TorchEngine(prepare_causal_lm(model), [2], 0).generate([[7, 8, 9]], Sampling(max_tokens=4))
