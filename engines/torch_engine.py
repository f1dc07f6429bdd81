"""`TorchEngine`: sampling in plain PyTorch over a transformers model.

What it saves over `transformers.generate`: the longest common prefix of all prompts of a call is computed once
and its keys and values are stored once; every other prompt token is computed once for all samples of the prompt;
sequences that finish leave the batch and waiting ones take their places; log-probabilities come from the logits sampled
from; on a GPU a decode step is a CUDA graph.

Shapes: B sequences, V vocabulary, R rows of the running batch, U prompts computed together, S positions, P length of
the shared prefix, H query heads, K key/value heads, D head size, W = H / K.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn, Tensor
from transformers import AttentionInterface

from distributed import decoder_layers
from engines.base import (_check_ids, _check_requests, GenerateStats, _HALF_COPIED, hf_name,
                          _request_seed, Rollout, RolloutError, Sampling)

PREFILL_TOKENS = 8192  # prompt tokens (padding included) of one forward pass: bounds the memory of a prefill
STEPS = 8  # on a GPU: steps between two looks of the host at what was sampled
KEPT_CACHE = 1 / 16  # of a card's memory: a sleeping engine keeps a cache up to this size, and with it its graphs
BLOCK = 128  # tokens whose probabilities are summed before one is drawn among them
CANDIDATES = 512  # most probable tokens looked at first for top_p; more are looked at where they don't reach it


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
        from engines.decode_attention import decode_attention

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
