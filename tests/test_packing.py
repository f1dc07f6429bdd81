"""Every layout of a batch gives the padded computation: the tiles of flex attention, rows of whole sequences, recomputed layers."""

from __future__ import annotations

import random
import threading

import pytest
import tiny
import torch
from torch.nn.attention.flex_attention import create_block_mask

import packing
from engines.base import Rollout
from model import prepare_causal_lm
from packing import (
    BLOCK,
    _varlen,
    block_mask,
    choose_layout,
    key_copies,
    pack,
    packed_logprobs,
    share_prefixes,
    token_logprobs,
    unique_tokens,
)
from rollout import collate_rollouts


def batch_of(seed: int, groups: int, size: int, prompt: int, response: int, shared: int = 0):
    """Groups of responses, lengths drawn up to the given ones; every third prompt ends where the shared beginning does."""
    rng = random.Random(seed)
    rollouts, begin = [], [rng.randrange(5, 200) for _ in range(shared)]
    for g in range(groups):
        own = (
            begin
            + [5 + g] * (g % 3 != 2 or not shared)
            + [rng.randrange(5, 200) for _ in range(rng.randrange(prompt + 1) * (g % 3 != 2))]
        )
        for _ in range(size):
            n = rng.randrange(1, response + 1)
            rollouts.append(
                Rollout(
                    own, [rng.randrange(5, 200) for _ in range(n)], [-1.0] * n, [1] * n, g, "eos"
                )
            )
    rng.shuffle(rollouts)
    return collate_rollouts(rollouts, torch.zeros(len(rollouts)), 0)


def groups_of(batch):
    return batch.prompt_lengths, batch.group_ids


def tensors_of(batch):
    return batch.tokens, batch.attention_mask, batch.loss_mask


SHAPES = [
    (0, 3, 4, 9, 9, 0),
    (1, 4, 3, 300, 40, 0),
    (2, 5, 3, 60, 200, 130),
    (3, 2, 8, 0, 300, 256),
    (4, 1, 1, 5, 5, 0),
    (5, 6, 2, 128, 128, 128),
    (6, 3, 40, 20, 8, 40),
]


def dense_mask(layout) -> torch.Tensor:
    """(S, S) bool, pair by pair: an earlier token of the beginning, the own segment or its prompt."""
    ids, prompts = layout.segment_ids[0], layout.prompt_segment[0]
    own = (ids == 0) | (ids == ids[:, None]) | (ids == prompts[:, None])
    return own.tril()


def tile_ends(seed: int):
    """Prompts and responses that end where tiles of BLOCK tokens do or beside, and empty ones."""
    rng = random.Random(seed)
    rollouts, begin = [], [5] * rng.choice([0, 1, BLOCK, BLOCK + 1])
    for g in range(3):
        own = begin + [10 + g] * rng.choice([1, BLOCK - 1, BLOCK])
        for n in rng.choices([1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 1], k=3):
            rollouts.append(Rollout(own, [20] * n, [-1.0] * n, [1] * n, g, "eos"))
    return collate_rollouts(rollouts, torch.zeros(len(rollouts)), 0)


@pytest.mark.parametrize("shape", [*SHAPES, *range(8)])
def test_tiles_are_those_that_a_search_of_all_pairs_finds(shape):
    batch = tile_ends(shape) if isinstance(shape, int) else batch_of(*shape)
    layout = share_prefixes(batch.tokens, batch.attention_mask, *groups_of(batch), BLOCK)
    width = layout.tokens.shape[1]
    ours, dense = block_mask(layout, torch.device("cpu")), dense_mask(layout)
    assert layout.tokens.shape[0] == 1 and width % BLOCK == 0
    pairs = torch.arange(width)
    assert torch.equal(ours.mask_mod(0, 0, pairs[:, None], pairs[None]), dense)
    theirs = create_block_mask(ours.mask_mod, 1, 1, width, width, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, places = f"{name}_num_blocks", f"{name}_indices"
        assert torch.equal(getattr(ours, counts), getattr(theirs, counts)), name
        for row, n in enumerate(
            getattr(ours, counts)[0, 0].tolist()
        ):  # what stands behind the count is never read
            assert sorted(getattr(ours, places)[0, 0, row, :n].tolist()) == sorted(
                getattr(theirs, places)[0, 0, row, :n].tolist()
            )


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_holds_each_predicting_token_at_its_position(shape):
    batch = batch_of(*shape)
    lengths = batch.attention_mask.sum(-1).tolist()
    shared = share_prefixes(batch.tokens, batch.attention_mask, *groups_of(batch))
    inputs, source = _varlen(batch.tokens, [n - 1 for n in lengths])
    for tokens, positions, source in [
        (shared.tokens, shared.position_ids, shared.state_index),
        (inputs["input_ids"], inputs["position_ids"], source),
    ]:
        for b, n in enumerate(lengths):
            assert torch.equal(tokens.flatten()[source[b, : n - 1]], batch.tokens[b, : n - 1])
            assert positions.flatten()[source[b, : n - 1]].tolist() == list(range(n - 1))
    model = prepare_causal_lm(tiny.tiny_lm())
    for layout in ("varlen", "segments", "prefix_shared"):
        packed = pack(model, *tensors_of(batch), groups_of(batch), layout)
        row, column = packed.entries
        assert torch.equal(
            packed.inputs["input_ids"].flatten()[packed.state_index], batch.tokens[row, column]
        )
        assert torch.equal(packed.targets, batch.tokens[row, column + 1])
    cuts = inputs["cu_seq_lens_q"].tolist()
    assert [b - a for a, b in zip(cuts, cuts[1:])][: len(lengths)] == [
        n - 1 for n in lengths
    ] and cuts[-1] == inputs["input_ids"].shape[1]


@pytest.mark.parametrize("flex", [False, True])
def test_attention_of_a_layout_is_a_softmax_over_what_each_token_sees_at_the_models_scale(flex):
    batch, scale = batch_of(*SHAPES[0]), 0.7  # not 1 / √D
    layout = share_prefixes(batch.tokens, batch.attention_mask, *groups_of(batch), BLOCK)
    width = layout.tokens.shape[1] if flex else int((layout.segment_ids >= 0).sum())
    query, key, value = (torch.randn(1, heads, width, 16) for heads in (4, 2, 2))
    how = {"attention_mask": block_mask(layout, torch.device("cpu"))} if flex else {}
    how = how or {"attention_mask": packing.NO_MASK, "segments": layout.segments}
    found, _ = packing.packed_attention(None, query, key, value, scaling=scale, **how)
    seen = dense_mask(layout)[:width, :width]
    for head in range(4):
        q, k, v = query[0, head].double(), key[0, head // 2].double(), value[0, head // 2].double()
        weights = torch.where(seen, q @ k.T * scale, -torch.inf).softmax(-1)
        assert (found[0, :, head] - weights @ v).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_flex_attention_gives_the_padded_log_probabilities(kind):
    """Its uncompiled form, which the CPU has without a backward pass; with one on a GPU below."""
    model = prepare_causal_lm(tiny.tiny_lm(kind=kind))
    for shape in SHAPES[:3]:
        batch = batch_of(*shape)
        with torch.no_grad():
            packed = pack(
                model,
                batch.tokens,
                batch.attention_mask,
                batch.loss_mask,
                groups_of(batch),
                "prefix_shared",
            )
            a = packed_logprobs(model, packed, 0.7)
            b = token_logprobs(model, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask)
        assert (a - b).abs().max() < 3e-5


def test_keys_are_repeated_until_there_are_heads_enough():
    shapes = [(16, 2), (14, 2), (32, 8), (28, 4), (8, 8), (64, 8), (40, 8)]
    assert [key_copies(*s) for s in shapes] == [8, 7, 2, 7, 1, 2, 5]


def test_the_layout_follows_from_device_dtype_and_tokens_saved(monkeypatch):
    model = prepare_causal_lm(tiny.tiny_lm(hidden_size=64))  # heads of 16
    assert choose_layout(model, [700] * 16, 5000) == "segments"
    model.computes_on = torch.device("cuda"), torch.bfloat16
    assert choose_layout(model, [716] * 16, 330 + 16 * 386) == "prefix_shared"
    assert choose_layout(model, [400] * 8, 8 * 390) == "varlen"
    model.computes_on = torch.device("cuda"), torch.float32
    assert choose_layout(model, [400] * 8, 8 * 390) == "prefix_shared"
    small = prepare_causal_lm(tiny.tiny_lm())  # heads of 8
    own = prepare_causal_lm(tiny.tiny_lm(kind="qwen3", hidden_size=64))  # that its config names
    for model in (small, own):
        model.computes_on = torch.device("cuda"), torch.bfloat16
        assert choose_layout(model, [716] * 16, 330 + 16 * 386) == "segments"


def test_unique_tokens_count_a_prompt_once():
    batch = batch_of(1, 3, 4, 9, 9)
    layout = share_prefixes(batch.tokens, batch.attention_mask, *groups_of(batch))
    assert unique_tokens(batch.attention_mask, *groups_of(batch)) == int(
        (layout.segment_ids >= 0).sum()
    )


@pytest.mark.parametrize("share, recomputed", [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_a_share_of_the_layers_is_recomputed_and_changes_nothing(share, recomputed):
    results = []
    for s in (0.0, share):
        model = prepare_causal_lm(tiny.tiny_lm(num_hidden_layers=4), gradient_checkpointing=s)
        calls = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *a: calls.append(1))
        batch = batch_of(0, 2, 3, 9, 9)
        token_logprobs(
            model, batch.tokens, batch.attention_mask, 0.7, batch.loss_mask, groups=groups_of(batch)
        ).sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert len(calls) == 4 + recomputed
    assert all(torch.equal(a, b) for a, b in zip(*results))


def gradients(model, batch, layout, weights):
    """Log-probabilities and gradients of a weighted sum of them; layout None: padded."""
    packed = pack(
        model,
        batch.tokens,
        batch.attention_mask,
        batch.loss_mask,
        groups_of(batch) if layout else None,
        layout,
    )
    logprobs = packed_logprobs(model, packed, 0.7)
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return logprobs.detach(), [p.grad.float() for p in model.parameters()]


def test_planning_takes_one_cpu_thread_and_gives_the_others_back(monkeypatch):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        share = share_prefixes
        monkeypatch.setattr(
            "packing.share_prefixes",
            lambda *a: (seen.append(torch.get_num_threads()), share(*a))[1],
        )
        batch = batch_of(0, 2, 3, 9, 9)
        pack(
            prepare_causal_lm(tiny.tiny_lm()),
            batch.tokens,
            batch.attention_mask,
            batch.loss_mask,
            groups_of(batch),
        )
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_settings_of_the_compiler_hold_in_every_thread(monkeypatch):
    """What is recomputed for the backward pass is compiled in autograd's thread, which has settings of its own."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 1.0)
    read = packing.compile_function(
        lambda: seen.append(
            (torch._functorch.config.activation_memory_budget, torch._dynamo.config.recompile_limit)
        )
    )
    read()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert seen == [(packing.ACTIVATIONS, packing.RECOMPILES)] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_with_nothing_to_predict_every_weight_has_a_gradient_of_zero(tied):
    """On a rank without work: else the ranks would reduce different sets of gradients."""
    model = prepare_causal_lm(tiny.tiny_lm(tied=tied))
    batch = batch_of(0, 2, 3, 9, 9)
    nothing = torch.zeros_like(batch.loss_mask)
    logprobs = packed_logprobs(
        model, pack(model, batch.tokens, batch.attention_mask, nothing, groups_of(batch))
    )
    assert logprobs.shape == nothing.shape and not logprobs.any()
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


COPIED = """
import sys
import packing, torch, transformers
config = transformers.Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                  num_attention_heads=2, num_key_value_heads=2)
lm = transformers.Qwen2ForCausalLM(config).eval()
tokens = torch.tensor([[7, 8, 9, 10], [7, 8, 11, 12]])
mask, groups = torch.ones_like(tokens), (torch.tensor([2, 2]), torch.tensor([0, 0]))
with torch.no_grad():
    wanted = lm(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
got = packing.token_logprobs(lm, tokens, mask, groups=groups)
got.sum().backward()
assert (got - wanted).abs().max() < 1e-5, (got, wanted)
print(sorted(set(sys.modules) & {"config", "data", "model", "lora", "distributed", "grpo", "rollout"}))
"""


def test_packing_py_works_copied_alone_into_an_empty_folder(tmp_path):
    assert tiny.run_copied("packing.py", tmp_path, COPIED) == "[]"


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "kind, heads",
    [
        ("qwen2", {}),
        ("qwen2", {"num_attention_heads": 14, "hidden_size": 224}),
        ("llama", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_flex_attention_on_a_gpu_is_dense_sdpa_in_float32(kind, heads, compiled):
    torch._dynamo.reset()
    shape = {"hidden_size": 128, "num_attention_heads": 8} | heads
    model = prepare_causal_lm(tiny.tiny_lm(kind=kind, **shape), compiled=compiled).cuda()
    for shape in SHAPES:
        batch = batch_of(*shape)
        weights = torch.randn(
            batch.loss_mask.shape, generator=torch.Generator().manual_seed(0)
        ).cuda()
        (a, ga), (b, gb), (c, gc) = (
            gradients(model, batch, layout, weights)
            for layout in ("prefix_shared", "segments", None)
        )
        assert (a - c).abs().max() < 5e-4 and (
            b - c
        ).abs().max() < 5e-4  # either is up to 1.3e-4 from float64 here
        for x, y, z in zip(ga, gb, gc):
            assert (x - z).abs().max() <= 1e-3 * z.abs().max() + 1e-5 and (
                y - z
            ).abs().max() <= 1e-3 * z.abs().max() + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["prefix_shared", "varlen"])
@pytest.mark.parametrize("compiled, share", [(False, 0.0), (True, 0.5)])
def test_packed_bfloat16_on_a_gpu_is_as_near_to_float32_as_padded_bfloat16(layout, compiled, share):
    torch._dynamo.reset()
    shape = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 4}
    exact = prepare_causal_lm(tiny.tiny_lm(**shape)).cuda()
    model = (
        prepare_causal_lm(tiny.tiny_lm(**shape), gradient_checkpointing=share, compiled=compiled)
        .cuda()
        .bfloat16()
    )
    for shape in SHAPES[:4]:
        batch = batch_of(*shape)
        weights = torch.randn(
            batch.loss_mask.shape, generator=torch.Generator().manual_seed(0)
        ).cuda()
        true, true_grads = gradients(exact, batch, None, weights)
        padded, padded_grads = gradients(model, batch, None, weights)
        ours, our_grads = gradients(model, batch, layout, weights)
        assert (ours - true).abs().mean() <= 1.5 * (padded - true).abs().mean() + 1e-3
        for a, b, c in zip(our_grads, padded_grads, true_grads):
            assert (a - c).norm() <= 1.5 * (b - c).norm() + 0.02 * c.norm()
