"""Opening a sampling engine, the training batch, the check that the engine has the policy's
weights.

`TorchEngine` is plain PyTorch over a transformers model; `VLLMEngine` is vLLM in this process.
Engines see token ids only, and sampled ids are never encoded again.

Shapes: B sequences, T predicted positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from config import check_ranges
from engines.base import EngineConfig, Rollout, RolloutError, Sampling  # noqa: F401
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VLLMEngine, check_vllm
from lora import adapter_base
from model import load_causal_lm, prepare_causal_lm
from packing import one_thread


class EngineGap(RuntimeError):
    """The engine's log-probabilities are not the trainer's: it samples from another policy."""

    exit_status = 3


def check_engine(cfg: EngineConfig, equal_calls: bool = True) -> None:
    """Raise for engine settings that cannot work with torchrun's processes; loads nothing.

    `equal_calls`: whether all processes call the engine equally often, as sharing one demands
    (episodes do not).
    """
    check_ranges(cfg, "engine.")
    world, shared = int(os.environ.get("WORLD_SIZE", 1)), cfg.tensor_parallel > 1
    if world % cfg.tensor_parallel:
        rule = f"a divisor of the {world} processes"
    elif shared and cfg.kind != "vllm":
        rule = "1 unless engine.kind=vllm"
    elif shared and not equal_calls:
        rule = "1 for episodes, whose numbers of turns differ"
    else:
        rule = ""
    if rule:
        raise RolloutError(f"engine.tensor_parallel={cfg.tensor_parallel}: it has to be {rule}")
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

    `max_length`: tokens of a prompt and its response at most (None: as many as the model has
    positions); `seed`: of draws without one of their own. Without `weights` only config.json is
    read: the first `sync_weights` brings them. An adapter's folder means its merged weights.
    """
    check_engine(cfg)
    base = adapter_base(model_folder) or model_folder
    merged = weights and base != model_folder
    if cfg.kind == "vllm":
        engine = VLLMEngine(
            *(base, eos_ids, pad_id, tokenizer, cfg.batch, max_length, dtype, seed),
            gpu_memory=cfg.gpu_memory,
            tensor_parallel=cfg.tensor_parallel,
            weights=weights and not merged,
        )
        if merged:
            model = load_causal_lm(model_folder, dtype)
            engine.sync_weights((name, p.detach()) for name, p in model.named_parameters())
    else:
        if weights:
            model = load_causal_lm(model_folder, dtype, device)
        else:
            devices = [device] if torch.device(device).type == "cuda" else []
            with torch.random.fork_rng(devices), torch.device(device):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(base, trust_remote_code=False), dtype=dtype
                )
            model = prepare_causal_lm(model, base)
        engine = TorchEngine(model, eos_ids, pad_id, tokenizer, cfg.batch, max_length)
    if cfg.gap_limit is not None:
        engine.gap_limit = cfg.gap_limit
    return engine


def check_engine_gap(mean: float, maximum: float, limit: float) -> None:
    """Raise EngineGap where the engine's and the trainer's log-probabilities differ too much.

    mean, maximum: of |difference| in nats over a step's sampled tokens; limit: an engine's
    `gap_limit`, on the mean. Rounding shows a mean near 0.05 in bfloat16 and 1e-5 in float32; stale
    weights or a stale prefix cache 0.9 and more.
    """
    if not mean <= limit:  # a NaN too
        raise EngineGap(
            f"the engine's log-probabilities differ from the trainer's by {mean:.4g} nats on "
            f"average (at most {maximum:.4g}), the limit is {limit:.4g}: it samples from other "
            "weights or at another temperature. Mend the weight sync; where its arithmetic is "
            "known to be coarser, raise engine.gap_limit"
        )


@dataclass
class RolloutBatch:
    """Rollouts as tensors, padded on the right; targets are shifted by one here alone."""

    tokens: Tensor  # (B, T+1) int64, prompt then response
    attention_mask: Tensor  # (B, T+1) int64, 1 for real tokens (pad may equal EOS)
    loss_mask: Tensor  # (B, T) float32, 1 where the model wrote tokens[t+1]
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
def collate_rollouts(
    rollouts: Sequence[Rollout], advantages: Sequence[float] | Tensor, pad_id: int
) -> RolloutBatch:
    """The batch of B rollouts and their B advantages; RolloutError where lengths don't fit."""
    if not rollouts or len(rollouts) != len(advantages):
        raise RolloutError(
            f"{len(rollouts)} rollouts and {len(advantages)} advantages: a batch needs at least "
            "one rollout, and one advantage for each"
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
                f"rollout {i}: {p} prompt ids, {n} response ids, {len(r.logprobs)} "
                f"log-probabilities, {len(r.loss_mask)} mask entries: the last three must agree, "
                "and a prompt is needed"
            )
        tokens[i, : p + n] = torch.tensor(r.prompt_ids + r.response_ids)
        attention_mask[i, : p + n] = 1
        mask = torch.tensor(r.loss_mask, dtype=torch.float32)
        loss_mask[i, p - 1 : p - 1 + n] = mask  # the token at p + j is predicted at entry p + j - 1
        logprobs[i, p - 1 : p - 1 + n] = torch.where(
            mask > 0, torch.tensor(r.logprobs, dtype=torch.float32), 0.0
        )
    return RolloutBatch(
        tokens,
        attention_mask,
        loss_mask,
        logprobs,
        torch.as_tensor(advantages, dtype=torch.float32).detach().clone(),
        torch.tensor([len(r.prompt_ids) for r in rollouts]),
        torch.tensor([r.group_id for r in rollouts]),
    )
