"""What both sampling engines share: settings, requests and what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


class RolloutError(ValueError):
    """A request, rollout or weight set that cannot be used: the message says which, why and what to do."""

    exit_status = 2


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
class GenerateStats:
    """What the last `generate` did."""

    seconds: float = 0.0
    prompt_tokens: int = 0  # computed, not given: shared tokens count once
    sampled_tokens: int = 0
    steps: int = 0


def _check_requests(
    engine, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
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


_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "base_layer"}


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter seen through DDP, FSDP, torch.compile, checkpointing or PEFT wrappers."""
    parts = [p for p in name.split(".") if p not in _WRAPPERS]
    if parts[0] == "module":
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(parts)
