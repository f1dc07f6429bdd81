"""`TorchEngine`: sampling in plain PyTorch over a transformers model.

What it saves over `transformers.generate`: the longest common prefix of all prompts of a call is
computed and stored once; every other prompt token is computed once for all samples of the prompt;
a prompt that continues a sequence of the last call (a conversation) computes its new tokens alone;
sequences that finish leave the batch and waiting ones take their places; log-probabilities come
from the logits sampled from; on a GPU a decode step is a CUDA graph.

Shapes: V vocabulary, R rows of the running batch, B sequences and S positions of a pass, P length
of the shared prefix.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distributed import decoder_layers
from engines.base import (
    Engine,
    GenerateStats,
    Rollout,
    RolloutError,
    Sampling,
    checked_weights,
    weight_names,
)
from engines.kv_cache import KVCache

PREFILL_TOKENS = 8192  # prompt tokens (padding included) of one forward pass: bounds its memory,
PREFILL_KEYS = 1 << 17  # and so do the keys that continued conversations look at
STEPS = 8  # on a GPU: steps between two looks of the host at what was sampled
KEPT_CACHE = 1 / 16  # of a card's memory: a sleeping engine keeps a cache up to this size
BLOCK = 128  # tokens whose probabilities are summed before one is drawn among them
CANDIDATES = 512  # most probable tokens looked at first for top_p


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    kinds: tuple[bool, bool, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, where the cumulative distribution passes `uniform`; or the best one.

    logits (R, V) float32, temperature (R,), top_p (R,), uniform (R,) float64 in [0, 1) → ids (R,)
    int64, logprobs (R,) float32: log_softmax(logits / temperature) (temperature 1 for greedy rows),
    renormalised over the kept tokens where top_p < 1. A row with NaN or +infinite logits has a NaN
    log-probability and a meaningless id. A token of probability 0 is never drawn.
    `kinds`: whether any row is greedy, is drawn, is drawn with top_p < 1; None looks, which makes
    the host wait for a GPU.
    """
    greedy = temperature == 0
    if kinds is None:
        kinds = bool(greedy.any()), not bool(greedy.all()), bool(((top_p < 1) & ~greedy).any())
    some_greedy, some_drawn, some_nucleus = kinds
    # (R, V); one NaN makes a row NaN
    logp = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    if some_greedy:
        ids = logp.argmax(-1)
    if some_drawn:
        drawn = _invert(logp.exp(), uniform)
        ids = torch.where(greedy, ids, drawn) if some_greedy else drawn
    logprobs = logp.gather(-1, ids[:, None]).squeeze(-1)
    if some_nucleus:
        nucleus = ((top_p < 1) & ~greedy).nonzero().squeeze(-1)  # rows
        ids[nucleus], logprobs[nucleus] = _sample_nucleus(
            logp[nucleus], top_p[nucleus], uniform[nucleus]
        )
    return ids, logprobs


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """(R, V) weights, (R,) → (R,) first index whose cumulative weight is above uniform × total.

    Two steps, blocks and then the tokens of one: a float64 cumulative sum over all of V costs more
    than two decoder layers.
    """
    rows, size = probabilities.shape
    padded = nn.functional.pad(probabilities, (0, -size % BLOCK)) if size % BLOCK else probabilities
    blocks = padded.view(rows, -1, BLOCK)
    block, uniform = _first_above(blocks.sum(-1).double(), uniform)
    token, _ = _first_above(
        blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].double(), uniform
    )
    return (block * BLOCK + token).clamp_(max=size - 1)  # the clamp matters for NaN weights only


def _first_above(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(R, N) float64 → (R,) first index with a sum above uniform × total, how far into it."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(
        max=weights.shape[1] - 1
    )
    weight, above = weights.gather(-1, index).squeeze(-1), cumulative.gather(-1, index).squeeze(-1)
    return index.squeeze(-1), ((target - (above - weight)) / weight).clamp(0, 1)


def _sample_nucleus(logprobs: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`sample_tokens` among the fewest tokens whose mass reaches top_p (at least one)."""
    count = CANDIDATES
    while True:
        count = min(count, logprobs.shape[1])
        top, order = logprobs.topk(count, dim=-1)  # (R, count), descending
        before = (
            top.exp().cumsum(-1, dtype=torch.float64) - top.exp()
        )  # mass of the more probable tokens
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

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are in the cache: all but the newest."""
        return len(self.rollout.prompt_ids) + len(self.rollout.response_ids) - 1

    def held(self) -> tuple[int, ...]:
        """The ids of these tokens, for a prompt that continues them."""
        r = self.rollout
        return () if r.end == "engine_error" else (*r.prompt_ids, *r.response_ids[:-1])


Groups = list[tuple[tuple[int, ...], list[_Request]]]  # prompts, and the requests of each


class TorchEngine(Engine):
    """Samples from a transformers causal LM that it owns, on the model's device, in its dtype.

    `max_batch` rows run at the same time. On a GPU a decode step is replayed as a CUDA graph, for
    8, 16, 32, … rows, and the host looks at what was sampled every STEPS steps; `graphs` False
    leaves that out. `compiled`: the decoder layers of the graph go through torch.compile (some 20 s
    once; fewer, larger kernels).
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
        if max_batch < 1:
            raise RolloutError(f"max_batch={max_batch}: at least one row has to run")
        self.model, self.max_batch = model.eval().requires_grad_(False), max_batch
        weight = model.get_input_embeddings().weight
        dtype = next(model.parameters()).dtype
        super().__init__(len(weight), model.config, eos_ids, pad_id, tokenizer, max_length, dtype)
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        self.steps = STEPS if self.graphs else 1
        if self.graphs:
            _fuse_norms(self.model)
        if compiled and self.graphs:
            for layer in decoder_layers(model):
                layer.compile(dynamic=True)
        self._cache: KVCache | None = None

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
        """Sample every prompt (a list of token ids); returns sum(n) rollouts, prompt-major.

        `sampling`: one for all prompts or one a prompt. `progress(finished, total,
        tokens_per_second)` is called now and then. Raises RolloutError before anything runs: an
        empty or over-long prompt, an unknown id, stop strings without tokenizer; an engine that
        sleeps or whose sync failed.
        """
        prompts, samplings = self.check_requests(prompts, sampling)
        self.stats, started = GenerateStats(), time.perf_counter()
        waiting: dict[tuple[int, ...], list[_Request]] = {}  # equal prompts are one
        requests = []
        for group_id, (prompt, s) in enumerate(zip(prompts, samplings)):
            seed = s.request_seed()
            # a token is a byte at least; 8 for slack
            window = max((len(x.encode()) for x in s.stop), default=0) + 8
            for i in range(s.n):
                rollout = Rollout(list(prompt), [], [], [], group_id, "")
                draws = random.Random(f"{seed}/{i}/{prompt}")
                requests.append(_Request(rollout, s, draws, window))
                waiting.setdefault(tuple(prompt), []).append(requests[-1])

        def report() -> None:
            self.stats.seconds = time.perf_counter() - started
            if progress is not None:
                finished = sum(bool(r.rollout.end) for r in requests)
                progress(finished, len(requests), self.stats.sampled_tokens / self.stats.seconds)

        # A group larger than the batch runs alone: its whole prompt is then the shared prefix.
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
        self.add_stats()
        return [r.rollout for r in requests]

    def _run(self, groups: Groups, report: Callable[[], None]) -> None:
        """Sample all requests of `groups`; groups join whenever enough rows are free."""
        total = sum(len(requests) for _, requests in groups)
        rows = min(self.max_batch, total)
        held = self._continued(groups, rows)
        prefix = self._cache.prefix_ids if held else _common_prefix([p for p, _ in groups])
        longest = max(len(p) + max(r.sampling.max_tokens for r in group) for p, group in groups)
        cache = self._reserve(rows, longest - len(prefix) + self.steps, len(prefix), bool(held))
        if not held:
            cache.begin(prefix)
            if prefix:
                self._hidden([prefix], torch.arange(len(prefix), device=self.device)[None], cache)
                self.stats.prompt_tokens += len(prefix)
        if len(groups) == 1:  # may be larger than the batch: cut it
            prompt, requests = groups[0]
            groups = [(prompt, requests[i : i + rows]) for i in range(0, total, rows)]
        order = list(held)  # those that are held join first, a row each
        groups.sort(key=lambda group: order.index(group[0]) if group[0] in held else len(order))
        # the newest request of every slot; the first `active` are the batch, ended ones among them
        batch: list[_Request | None] = [None] * len(cache.held)
        active = 0
        while groups or active:
            running = [i for i in range(active) if not batch[i].rollout.end]
            # Joining is worth a pass of its own once a quarter of the batch is free.
            joins = groups and rows - len(running) >= min(max(len(groups[0][1]), rows // 4), rows)
            if active and (joins or self._bucket(len(running)) < self._bucket(active)):
                used = max(r.stored for r in batch[:active]) - len(prefix)
                batch = [batch[i] for i in cache.bring_to_front(running, used)]
                active = len(running)
            if joins:
                joined = self._join(groups, held, active, rows - active, cache)
                batch[active : active + len(joined)] = joined
                active += len(joined)
            elif active:
                steps = self.stats.steps
                self._decode(batch, active, cache)
                ended = any(batch[i].rollout.end for i in running)
                if ended or self.stats.steps // 16 > steps // 16:
                    report()
        cache.held = [r.held() if r else () for r in batch]

    def _continued(self, groups: Groups, rows: int) -> dict[tuple[int, ...], int]:
        """Prompts that continue what the cache holds → held tokens; moved to the first slots."""
        cache = self._cache
        if cache is None or any(p[: cache.prefix_length] != cache.prefix_ids for p, _ in groups):
            return {}
        slots: dict[int, tuple[int, ...]] = {}
        for prompt, requests in groups:
            fits = [
                (len(ids), slot)
                for slot, ids in enumerate(cache.held)
                if ids and prompt[len(ids) - 1 :][:1] == ids[-1:] and slot not in slots
                if len(ids) < len(prompt) and prompt[: len(ids)] == ids
            ]
            if fits and len(requests) == 1 and len(slots) < rows:
                slots[max(fits)[1]] = prompt
        used = max(map(len, cache.held)) - cache.prefix_length
        order = cache.bring_to_front(list(slots), used)
        return {slots[order[row]]: len(cache.held[row]) for row in range(len(slots))}

    def _bucket(self, rows: int) -> int:
        """Rows that a step computes for so many: 8, 16, 32, … with graphs."""
        return max(8, 1 << (rows - 1).bit_length()) if self.graphs and rows else rows

    def _reserve(self, rows: int, capacity: int, prefix: int, held: bool) -> KVCache:
        """A cache of at least this size; where `held`, with all that the present one holds.

        With graphs, caches only grow, or two kinds of calls would throw out each other's.
        """
        sizes, have = (rows, capacity, prefix), self._cache
        if self.graphs:
            sizes = (self._bucket(rows), -(-capacity // 64) * 64, -(-max(1, prefix) // 64) * 64)
        if have is not None and (self.graphs or held):
            sizes = tuple(map(max, sizes, have.sizes))
        if have is None or have.sizes != sizes:
            if not held:
                have = self._cache = None  # freed before the new one is made
            self._cache = KVCache(*sizes, self.device, fused=self.graphs)
            if held:
                self._cache.copy(have)
        self._cache.forget()
        return self._cache

    def _join(
        self, groups: Groups, held: dict, row: int, free: int, cache: KVCache
    ) -> list[_Request]:
        """Take as many of the first groups as fit, from `row` on, and sample their first tokens.

        Computed is what comes behind the shared prefix and the `held` tokens. Returns the requests.
        """
        taken, joined = [], []
        while groups and len(groups[0][1]) <= free:
            prompt, requests = groups.pop(0)
            begin = held.get(prompt, cache.prefix_length)
            taken.append((prompt[begin:], begin - cache.prefix_length, row + len(joined), requests))
            joined += requests
            free -= len(requests)
            self.stats.prompt_tokens += len(prompt) - begin
            self.stats.held_tokens += held.get(prompt, 0)
        taken.sort(key=lambda t: len(t[0]), reverse=True)
        logits, computed = [], []
        while taken:
            width = len(taken[0][0])
            keys = width + max(past for _, past, _, _ in taken)
            count = max(1, min(PREFILL_TOKENS // width, PREFILL_KEYS // keys))
            new, past, first, parts = zip(*taken[:count])
            taken = taken[count:]
            rows = [r + i for r, requests in zip(first, parts) for i in range(len(requests))]
            source = [u for u, requests in enumerate(parts) for _ in requests]
            cache.begin_prompts(rows, source, past, width)
            ids = [[*p, *[self.pad_id] * (width - len(p))] for p in new]
            positions = torch.tensor(past)[:, None] + torch.arange(width) + cache.prefix_length
            positions = positions.clamp(max=self.max_length - 1).to(self.device)
            hidden = self._hidden(ids, positions, cache)
            last = torch.tensor([len(p) - 1 for p in new], device=self.device)
            last = hidden[torch.arange(len(new), device=self.device), last]
            logits.append(self._logits(last)[cache.source])
            computed += [r for requests in parts for r in requests]
        self._sample(computed, lambda step: torch.cat(logits), 1)
        return joined

    def _hidden(self, ids: Sequence[Sequence[int]], positions: Tensor, cache: KVCache) -> Tensor:
        """(B, S) ids at (B, S) positions → (B, S, hidden size) last hidden states."""
        tokens = torch.tensor(ids, device=self.device)
        with torch.compiler.set_stance("force_eager"):  # prompts have many shapes
            return self._forward(tokens, positions, cache)

    def _forward(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        decoder = self.model.get_decoder()
        cache.attended.clear()
        return decoder(
            input_ids=tokens, position_ids=positions, use_cache=False, kv=cache
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        """(R, hidden size) → (R, V) float32."""
        return self.model.get_output_embeddings()(hidden).float()

    def _decode(self, batch: list[_Request | None], active: int, cache: KVCache) -> None:
        """The next STEPS tokens of the batch (fewer where none wants so many)."""
        rows = batch[: self._bucket(active)]
        runs = [r is not None and not r.rollout.end for r in rows]
        left = [
            r.sampling.max_tokens - len(r.rollout.response_ids) for r, on in zip(rows, runs) if on
        ]
        steps = min(self.steps, max(left))
        tokens = [r.rollout.response_ids[-1] if on else self.pad_id for r, on in zip(rows, runs)]
        lengths = [r.stored - cache.prefix_length if r else 0 for r in rows]
        cache.begin_steps(tokens, lengths, runs)
        step = functools.partial(self._step, cache, len(rows))
        self._sample(batch[:active], lambda i: step()[:active], steps, cache)
        self.stats.steps += steps

    def _step(self, cache: KVCache, rows: int) -> Tensor:
        """Logits (rows, V) behind the cache's newest tokens."""

        def compute() -> Tensor:
            positions = cache.at[:rows] + cache.shared
            hidden = self._forward(cache.tokens[:rows, None], positions[:, None], cache)
            return self._logits(hidden[:, 0])

        return self._replay(cache, rows, compute) if self.graphs else compute()

    def _replay(self, cache: KVCache, rows: int, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, by a graph for so many rows, captured at its first use."""
        if rows not in cache.graphs:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # whatever a first run sets up; the replay stores the same again
                    compute()
            torch.cuda.current_stream().wait_stream(side)
            pool = next(iter(cache.graphs.values()))[0].pool() if cache.graphs else None
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # an old graph freed by the collector would spoil the one being captured
            try:  # thread_local: other threads may use the card meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    logits = compute()
            finally:
                gc.enable()
            cache.graphs[rows] = graph, logits
        graph, logits = cache.graphs[rows]
        graph.replay()
        return logits

    def _sample(
        self,
        requests: list[_Request],
        logits: Callable[[int], Tensor],
        steps: int,
        cache: KVCache | None = None,
    ) -> None:
        """Append `steps` tokens to every request that has not ended, and note which end where.

        logits(step) → (R, V); the tokens of a step go into the cache, and to the host all at once.
        """
        options = [(r.sampling.temperature, r.sampling.top_p) for r in requests]
        kinds = (
            any(t == 0 for t, _ in options),
            any(t > 0 for t, _ in options),
            any(t > 0 and p < 1 for t, p in options),
        )
        draws = [[r.draws.random() for _ in range(steps)] for r in requests]
        temperature, top_p = torch.tensor(options, device=self.device).T
        uniform = torch.tensor(draws, dtype=torch.float64, device=self.device)
        ids, logprobs = [], []
        for step in range(steps):
            sampled = sample_tokens(logits(step), temperature, top_p, uniform[:, step], kinds)
            ids.append(sampled[0])
            logprobs.append(sampled[1])
            if cache is not None:
                cache.step_taken(sampled[0])
        rows = zip(requests, torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist())
        for request, new, new_logprobs in rows:
            if not request.rollout.end:
                self._append(request, new, new_logprobs)

    def _append(self, r: _Request, ids: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens up to the first at which the response ends."""
        out, before = r.rollout, len(r.rollout.response_ids)
        stops = self._stopped(r, out.response_ids + ids, r.stop_window + len(ids))
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
        if not request.sampling.stop:
            return False
        text = self.tokenizer.decode(
            ids[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in request.sampling.stop)

    # ---- weights and memory

    @torch.no_grad()
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy (Hugging Face name, full tensor) pairs into the engine, cast to its dtype.

        The source is only read. Names and sets: see `checked_weights`. The tensors come as a
        stream, so an error may leave some of them copied: the engine then refuses to generate until
        a sync succeeds. Held conversations, computed with the old weights, are forgotten.
        """
        self.unusable, started = self.HALF_COPIED, time.perf_counter()
        self.total = GenerateStats()
        if self._cache:
            self._cache.forget()
        targets = self.model.state_dict()
        for name, tensor in checked_weights(named_tensors, *weight_names(self.model)):
            targets[name].copy_(tensor)
        self.unusable, self.sync_seconds = "", {"weights": time.perf_counter() - started}

    def sleep(self) -> None:
        """Give memory back for training; `generate` refuses until `wake`. Weights stay.

        With graphs a small cache stays too, and the graphs with it.
        """
        self.asleep = True
        if not self.graphs:
            self._cache = None
        elif self._cache:
            if self._cache.bytes() > KEPT_CACHE * torch.cuda.mem_get_info(self.device)[1]:
                self._cache = None
                torch.cuda.empty_cache()  # its pieces would not fit the trainer's

    def wake(self) -> None:
        self.asleep = False


def _fuse_norms(model: nn.Module) -> None:
    """Let every RMSNorm be one kernel: in transformers' form it is eight."""
    for module in model.modules():
        # Llama's and Qwen's form
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_rms_norm, module)


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest common prefix that leaves every prompt at least one token."""
    low, high = min(prompts), max(prompts)  # what all share, the lexicographic extremes share
    limit = min(map(len, prompts)) - 1
    return low[: next((i for i in range(limit) if low[i] != high[i]), limit)]
