"""`TorchEngine`: sampling in plain PyTorch over a transformers model.

The common beginning of all prompts is computed once, and each prompt once for all its samples. For
a prompt that continues a sequence of the last call (a conversation) only new tokens are computed.
Waiting requests join as others finish. On a GPU a decode step, sampling included, is a CUDA graph.

Shapes: V vocabulary, R rows (running sequences), N blocks of the vocabulary.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from engines.base import (
    Engine,
    GenerateStats,
    Rollout,
    RolloutError,
    Sampling,
    cache_bytes,
    checked_weights,
    operations,
    weight_names,
)
from engines.decoder import make_decoder
from engines.kv_cache import KVCache, Piece, Prompt
from engines.operations import BLOCK

PREFILL_TOKENS = 8192  # most prompt tokens of a forward pass
STEPS = 16  # decode steps per transfer to the host, on a GPU
KEPT_CACHE = 1 / 16  # of the card: smaller caches stay during sleep
CANDIDATES = 512  # most probable tokens that top_p tries first


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    kinds: tuple[bool, bool, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution at `uniform`.

    logits (R, V), temperature (R,) (0: greedy), top_p (R,), uniform (R,) float64 in [0, 1) → ids
    (R,) int64, logprobs (R,) float32: log_softmax(logits / temperature), at temperature 1 for
    greedy rows, renormalised where top_p < 1. NaN or +infinite logits give a NaN log-probability
    and a meaningless id; tokens of probability 0 are never drawn. `kinds`: whether any row is
    greedy, drawn, drawn with top_p < 1; None computes it, which waits for a GPU.
    """
    greedy = temperature == 0
    if kinds is None:
        kinds = bool(greedy.any()), not bool(greedy.all()), bool(((top_p < 1) & ~greedy).any())
    some_greedy, some_drawn, some_nucleus = kinds
    temperature = torch.where(greedy, 1.0, temperature)
    blocks = operations(logits.device).block_logsumexp(logits, temperature)  # (R, N)
    normaliser = blocks.logsumexp(-1)  # (R,)
    normaliser = torch.where(normaliser.isfinite(), normaliser, math.nan)
    if some_greedy:
        ids = logits.argmax(-1)
    if some_drawn:
        drawn = _draw(logits, temperature, blocks, normaliser, uniform)
        ids = torch.where(greedy, ids, drawn) if some_greedy else drawn
    logprobs = logits.gather(-1, ids[:, None])[:, 0].float() / temperature - normaliser
    if some_nucleus:
        nucleus = ((top_p < 1) & ~greedy).nonzero().squeeze(-1)  # rows
        ids[nucleus], logprobs[nucleus] = _sample_nucleus(
            logits[nucleus].float() / temperature[nucleus, None] - normaliser[nucleus, None],
            top_p[nucleus],
            uniform[nucleus],
        )
    return ids, logprobs


def _draw(
    logits: Tensor, temperature: Tensor, blocks: Tensor, normaliser: Tensor, uniform: Tensor
) -> Tensor:
    """Draw a block, blocks (R, N), then a token of it → (R,): a float64 cumulative sum over V
    would cost more than two decoder layers."""
    size = logits.shape[1]
    block, uniform = _first_above((blocks - normaliser[:, None]).double().exp(), uniform)
    index = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = logits.gather(1, index.clamp(max=size - 1)).float() / temperature[:, None]
    inside = (inside - blocks.gather(1, block[:, None])).masked_fill_(index >= size, -math.inf)
    token, _ = _first_above(inside.double().exp(), uniform)
    return (block * BLOCK + token).clamp_(max=size - 1)  # clamps NaN rows only


def _first_above(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(R, N) float64 → (R,) first index whose cumulative sum exceeds uniform × total, and (R,) the
    position within it, 0 to 1."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(
        max=weights.shape[1] - 1
    )
    weight, above = weights.gather(-1, index).squeeze(-1), cumulative.gather(-1, index).squeeze(-1)
    return index.squeeze(-1), ((target - (above - weight)) / weight).clamp(0, 1)


def _sample_nucleus(logprobs: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`sample_tokens` among the fewest tokens whose mass reaches top_p."""
    count = CANDIDATES
    while True:
        count = min(count, logprobs.shape[1])
        top, order = logprobs.topk(count, dim=-1)  # (R, count), descending
        mass = top.double().exp()
        before = mass.cumsum(-1) - mass  # mass of more probable tokens
        if count == logprobs.shape[1] or bool((before[:, -1] >= top_p).all()):
            break
        count *= 8
    kept = top.masked_fill(before >= top_p[:, None], -math.inf)
    kept[:, 0] = top[:, 0]
    choice = _first_above(kept.double().exp(), uniform)[0][:, None]
    logprobs = kept.gather(-1, choice) - kept.logsumexp(-1, keepdim=True)
    return order.gather(-1, choice).squeeze(-1), logprobs.squeeze(-1)


@dataclass
class _Request:
    """One response being sampled."""

    rollout: Rollout
    sampling: Sampling
    draws: random.Random
    stop_window: int  # last tokens that can hold a stop string
    slot: int | None = None  # where what follows `prompt` is stored
    prompt: Prompt | None = None
    held: int = 0  # prompt tokens stored by an earlier call

    @property
    def in_slot(self) -> int:
        """Number of tokens in the slot: all but the stored prompt's and the newest."""
        r = self.rollout
        return len(r.prompt_ids) + len(r.response_ids) - 1 - self.prompt.length


def _share_done(requests: Sequence[_Request]) -> float:
    """Estimated share of the work done, 0 before the first response ends: the mean of the share of
    finished responses (too low) and of the expected tokens (too high)."""
    lengths = [len(r.rollout.response_ids) for r in requests]
    ended = sum(bool(r.rollout.end) for r in requests)
    if not ended:
        return 0.0
    every = sum(lengths) / ended
    expected = sum(
        n if r.rollout.end else min(r.sampling.max_tokens, max(n + 1, every))
        for r, n in zip(requests, lengths)
    )
    return (ended / len(requests) + sum(lengths) / max(1, expected)) / 2


class TorchEngine(Engine):
    """Samples from a transformers causal LM that it owns, on the model's device, in its dtype.

    At most `max_batch` responses run together. With `graphs` (None: on a GPU) steps are CUDA graphs
    for 8, 16, 32, … rows, and the host reads samples every STEPS steps.
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
    ):
        if max_batch < 1:
            raise RolloutError(f"max_batch={max_batch}: at least one row has to run")
        self.model, self.max_batch = model.eval().requires_grad_(False), max_batch
        weight = model.get_input_embeddings().weight
        dtype = next(model.parameters()).dtype
        super().__init__(len(weight), model.config, eos_ids, pad_id, tokenizer, max_length, dtype)
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        self.steps = STEPS if self.graphs else 1
        self.decoder, self.head = make_decoder(model), model.get_output_embeddings()
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

        `sampling`: one for all prompts, or one per prompt. `progress(done, total,
        tokens_per_second)` gets an estimate of the responses done. RolloutError, before anything
        runs, for invalid requests and for a batch that does not fit the card.
        """
        prompts, samplings = self.check_requests(prompts, sampling)
        self.stats, started = GenerateStats(), time.perf_counter()
        requests = []
        for group_id, (prompt, s) in enumerate(zip(prompts, samplings)):
            seed = s.request_seed()
            # a token is at least a byte; 8 more for slack
            window = max((len(x.encode()) for x in s.stop), default=0) + 8
            for i in range(s.n):
                rollout = Rollout(list(prompt), [], [], [], group_id, "")
                draws = random.Random(f"{seed}/{i}/{prompt}")
                requests.append(_Request(rollout, s, draws, window))

        def report() -> None:
            self.stats.seconds = time.perf_counter() - started
            if progress is not None:
                done = int(_share_done(requests) * len(requests))
                progress(done, len(requests), self.stats.sampled_tokens / self.stats.seconds)

        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("rollout")
        try:
            if requests:
                self._run(requests, report)
        except BaseException:
            self._cache = None  # its requests will never end
            raise
        finally:
            self.model.set_attn_implementation(implementation)
        report()
        self.add_stats()
        return [r.rollout for r in requests]

    def _run(self, requests: list[_Request], report: Callable[[], None]) -> None:
        rows = min(self.max_batch, len(requests))
        queue, cache = self._begin(requests, rows)
        running: list[_Request] = []
        while queue or running:
            # requests join once a quarter of the batch is free: a join costs a pass
            enough = min(max(1, rows // 4), len(queue)) if running else 1
            if queue and rows - len(running) >= enough:
                running += self._join(queue, rows - len(running), cache)
            steps, ended = self.stats.steps, False
            if unfinished := [r for r in running if not r.rollout.end]:
                self._decode(unfinished, cache)
            for r in running:
                if r.rollout.end:
                    ids = (*r.rollout.prompt_ids, *r.rollout.response_ids[:-1])
                    bad = r.rollout.end == "engine_error"
                    cache.release(r.slot, r.prompt, () if bad else ids)
                    ended = True
            running = [r for r in running if not r.rollout.end]
            if ended or self.stats.steps // 16 > steps // 16:
                report()

    def _begin(self, requests: list[_Request], rows: int) -> tuple[list[_Request], KVCache]:
        """Order the requests, with equal prompts together, and prepare the cache.

        Requests that continue a sequence of the last call come first and get its slot. The common
        beginning of the other prompts is computed.
        """
        groups: dict[tuple[int, ...], list[_Request]] = {}
        for r in requests:
            groups.setdefault(tuple(r.rollout.prompt_ids), []).append(r)
        alone = [prompt for prompt, group in groups.items() if len(group) == 1]
        found = self._cache.continued(alone) if self._cache else {}
        new = [prompt for prompt in groups if prompt not in found]
        cache = self._reserve(groups, found, rows)
        if not found:
            cache.forget()
        cache.stored = {}
        for prompt, slot in found.items():
            (r,) = groups[prompt]
            ids, r.prompt = cache.held.pop(slot)
            r.slot, r.held = slot, len(ids)
            r.prompt.users += 1
            self.stats.held_tokens += r.held
        length = len(cache.prefix)
        if not length or any(len(p) <= length or p[:length] != cache.prefix for p in new):
            # it leaves every prompt at least one token
            cache.prefix = os.path.commonprefix([p[:-1] for p in new]) if len(new) > 1 else ()
            if cache.prefix:
                self._prefill([Piece(cache.prefix, Prompt(0, len(cache.prefix)))], cache)
        return [r for p in [*found, *new] for r in groups[p]], cache

    def _bucket(self, rows: int) -> int:
        """Rows of the step that computes `rows`: 8, 16, 32, … with graphs."""
        return max(8, 1 << (rows - 1).bit_length()) if self.graphs else rows

    def _reserve(self, groups: dict, found: dict[tuple[int, ...], int], rows: int) -> KVCache:
        """A cache that is large enough; held sequences stay if one is continued.

        With graphs the cache only grows, so that different calls share its graphs.
        """
        have = self._cache
        new = {prompt: len(group) for prompt, group in groups.items() if prompt not in found}
        behind = [0] + [len(p) - have.held[slot][1].length for p, slot in found.items()]
        capacity = max(behind) + max(r.sampling.max_tokens for g in groups.values() for r in g)
        # uneven lengths mix groups in a full batch: room for the prompts of twice as many
        prompts = min(len(new), rows, 2 * -(-rows * len(new) // max(1, sum(new.values()))))
        prompts += len({have.held[slot][1].number for slot in found.values()})
        lengths = capacity + self.steps, max(map(len, new), default=1)
        capacity, shared = (-(-n // 64) * 64 if self.graphs else n for n in lengths)
        sizes = (self._bucket(rows), capacity, prompts, shared, self.steps)
        if have is not None and (self.graphs or found):
            sizes = tuple(map(max, sizes, have.sizes))
        if have is None or have.sizes != sizes:
            if not found:
                have = self._cache = None  # freed first
            self._check_room(sizes)
            self._cache = KVCache(*sizes, self.device)
            if found:
                self._cache.copy(have)
        return self._cache

    def _check_room(self, sizes: tuple[int, ...]) -> None:
        if self.device.type != "cuda":
            return
        rows, capacity, prompts, shared, _ = sizes
        itemsize = self.model.get_input_embeddings().weight.itemsize
        tokens = (rows + 1) * capacity + (prompts + 1) * shared
        needed = cache_bytes(self.model.config, itemsize) * tokens
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        free -= torch.cuda.memory_allocated(self.device)
        if needed > free:
            raise RolloutError(
                f"keys and values of {rows} responses of {capacity} tokens and {prompts} prompts "
                f"of {shared} take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free: lower "
                "engine.batch or the lengths"
            )

    def _join(self, queue: list[_Request], free: int, cache: KVCache) -> list[_Request]:
        """Take the requests that fit from the queue, sample their first tokens, return them."""
        joined, pieces = [], []
        while queue and len(joined) < free:
            r, ids = queue[0], tuple(queue[0].rollout.prompt_ids)
            if r.held:
                pieces.append(Piece(ids[r.held :], r.prompt, r.slot, r.held - r.prompt.length))
            else:
                r.slot = cache.take_slot()
                r.prompt = cache.stored.get(ids)
                if r.slot is not None and r.prompt is None and (new := cache.new_prompt(ids)):
                    r.prompt, begin = new, len(cache.prefix)
                    if begin:
                        cache.copy_prefix(new)
                    pieces.append(Piece(ids[begin:], new, past=begin))
                if r.slot is None or r.prompt is None:  # others must end first
                    cache.free_slots += [] if r.slot is None else [r.slot]
                    break
                r.prompt.users += 1
            joined.append(queue.pop(0))
        states = {}  # by slot, of requests that continue
        for piece, state in zip(pieces, self._prefill(pieces, cache)):
            if piece.slot is None:
                piece.prompt.last = state
            else:
                states[piece.slot] = state
        if joined:
            last = torch.stack([states.get(r.slot, r.prompt.last) for r in joined])
            *options, uniform, kinds = self._draws(joined, 1)
            ids, logprobs = sample_tokens(self.head(last), *options, uniform[0], kinds)
            for r, *new in zip(joined, ids[:, None].tolist(), logprobs[:, None].tolist()):
                self._append(r, *new)
        return joined

    def _prefill(self, pieces: list[Piece], cache: KVCache) -> list[Tensor]:
        """Compute and store the pieces; returns each one's last state (hidden size,)."""
        waiting, states = pieces[::-1], []
        self.stats.prompt_tokens += sum(len(piece.ids) for piece in pieces)
        while waiting:
            taken, ends, room = [], [], PREFILL_TOKENS
            while waiting and room:  # long pieces are cut
                piece = waiting.pop()
                now, rest = piece.ids[:room], piece.ids[room:]
                taken.append(replace(piece, ids=now))
                room -= len(now)
                if rest:
                    waiting.append(replace(piece, ids=rest, past=piece.past + len(now)))
                else:
                    ends.append(PREFILL_TOKENS - room - 1)
            cache.begin_pieces(taken)
            tokens = torch.tensor([t for piece in taken for t in piece.ids], device=self.device)
            positions = torch.cat([torch.arange(len(p.ids)) + p.position for p in taken])
            hidden = self.decoder(tokens, positions.to(self.device), cache)
            states += hidden[torch.tensor(ends, dtype=torch.int64, device=self.device)].unbind()
        return states

    def _decode(self, running: list[_Request], cache: KVCache) -> None:
        """Sample up to STEPS tokens for each request."""
        running.sort(key=lambda r: r.prompt.number)  # for the tiles of `begin_steps`
        count, active = self._bucket(len(running)), len(running)
        steps = min(
            self.steps, max(r.sampling.max_tokens - len(r.rollout.response_ids) for r in running)
        )
        rows = [(r.rollout.response_ids[-1], r.in_slot, r.slot, r.prompt) for r in running]
        cache.begin_steps(rows, count)
        temperature, top_p, uniform, kinds = self._draws(running, steps)
        cache.temperature[:active], cache.top_p[:active] = temperature, top_p
        cache.uniform[:steps, :active] = uniform
        for _ in range(steps):
            self._step(cache, count, kinds)
        self.stats.steps += steps
        ids, logprobs = (x[:steps, :active].T.tolist() for x in (cache.ids, cache.logprobs))
        for r, *new in zip(running, ids, logprobs):
            self._append(r, *new)

    def _draws(self, requests: list[_Request], steps: int) -> tuple:
        """temperature (R,), top_p (R,), uniform (steps, R), and kinds, for sample_tokens."""
        options = [(r.sampling.temperature, r.sampling.top_p) for r in requests]
        kinds = (
            any(t == 0 for t, _ in options),
            any(t > 0 for t, _ in options),
            any(t > 0 and p < 1 for t, p in options),
        )
        rows = [
            [*option, *(r.draws.random() for _ in range(steps))]
            for r, option in zip(requests, options)
        ]
        rows = torch.from_numpy(np.array(rows).T.copy()).to(self.device)
        return *rows[:2].float(), rows[2:], kinds

    def _step(self, cache: KVCache, count: int, kinds: tuple[bool, bool, bool]) -> None:
        """Sample one token for each of the first `count` rows."""

        def compute() -> Tensor:
            positions = (cache.rows.begin + cache.rows.at).clamp(max=self.max_length - 1)
            hidden = self.decoder(cache.rows.token[:count], positions[:count], cache)
            logits = self.head(hidden)
            if not kinds[2]:
                draw(logits)
            return logits

        def draw(logits: Tensor) -> None:
            uniform = cache.uniform.index_select(0, cache.step)[0, :count]
            options = cache.temperature[:count], cache.top_p[:count]
            cache.take(*sample_tokens(logits, *options, uniform, kinds))

        logits = self._replay(cache, (count, kinds), compute) if self.graphs else compute()
        if kinds[2]:  # top_p: shapes depend on values
            draw(logits)

    def _replay(self, cache: KVCache, key: tuple, compute: Callable[[], Tensor]) -> Tensor:
        """Run `compute` as the CUDA graph of this key, captured at the first call."""
        if key not in cache.graphs:
            before = cache.state.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # warm-up
                    compute()
            torch.cuda.current_stream().wait_stream(side)
            pool = next(iter(cache.graphs.values()))[0].pool() if cache.graphs else None
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # freeing an old graph would spoil the capture
            try:  # thread_local: other threads may use the card meanwhile
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    logits = compute()
            finally:
                gc.enable()
            cache.graphs[key] = graph, logits
            cache.state.copy_(before)
            cache.step.zero_()
        graph, logits = cache.graphs[key]
        graph.replay()
        return logits

    def _append(self, r: _Request, ids: list[int], logprobs: list[float]) -> None:
        out, count, end = r.rollout, 0, ""
        room = r.sampling.max_tokens - len(out.response_ids)
        for token, logprob in zip(ids[:room], logprobs):
            if math.isnan(logprob):  # non-finite logits
                end = "engine_error"
                break
            count += 1
            if token in self.eos_ids:
                end = "eos"
                break
        if not end and count == room:
            end = "length"
        if self._stopped(r, out.response_ids + ids[:count], r.stop_window + count):
            for i in range(1, count + (end != "eos")):
                if self._stopped(r, out.response_ids + ids[:i], r.stop_window):
                    count, end = i, "stop"
                    break
        out.response_ids += ids[:count]
        out.logprobs += logprobs[:count]
        out.loss_mask += [1] * count
        out.end = end
        self.stats.sampled_tokens += count

    def _stopped(self, request: _Request, ids: list[int], window: int) -> bool:
        if not request.sampling.stop:
            return False
        text = self.tokenizer.decode(
            ids[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in request.sampling.stop)

    # ---- weights and memory

    @torch.no_grad()
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a stream of (Hugging Face name, full tensor) into the engine, cast to its dtype.

        Cached conversations are dropped. RolloutError as in `checked_weights`; the engine then
        refuses to generate until a sync succeeds.
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
        """Free memory for training; `generate` refuses until `wake`. Weights stay, and with graphs
        a small cache."""
        self.asleep = True
        if not self.graphs:
            self._cache = None
        elif self._cache:
            if self._cache.bytes() > KEPT_CACHE * torch.cuda.mem_get_info(self.device)[1]:
                self._cache = None
                torch.cuda.empty_cache()  # for the trainer's allocations

    def wake(self) -> None:
        self.asleep = False
