"""Engines, training batch, engine gap. Shapes: B sequences, T predicted positions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from config import check_fields
from engines.base import EngineConfig, Rollout, RolloutError, Sampling  # noqa: F401
from engines.torch_engine import TorchEngine
from engines.vllm_engine import VLLMEngine, check_vllm
from lora import ModelError, adapter_base, first_line
from model import load_causal_lm, prepare_causal_lm
from packing import one_thread
from prompts import eos_token_ids, pad_token_id


class EngineGap(RuntimeError):
    """The engine's log-probabilities differ too much from the trainer's."""

    exit_status = 3


def check_engine(cfg: EngineConfig, equal_calls: bool = True) -> None:
    """Raise for invalid settings; `equal_calls`: all ranks call the engine equally often."""
    check_fields(cfg, "engine.")
    world, shared = int(os.environ.get("WORLD_SIZE", 1)), cfg.tensor_parallel > 1
    for wrong, rule in (
        (world % cfg.tensor_parallel, f"a divisor of the {world} processes"),
        (shared and cfg.kind != "vllm", "1 unless engine.kind=vllm"),
        (shared and not equal_calls, "1 for episodes, whose numbers of turns differ"),
    ):
        if wrong:
            raise RolloutError(f"engine.tensor_parallel={cfg.tensor_parallel} has to be {rule}")
    if cfg.kind == "vllm":
        check_vllm()


def end_and_pad_ids(model: str, tokenizer) -> tuple[list[int], int]:
    """(ids that end a response, padding id); ModelError if there is no model."""
    model = adapter_base(model) or model
    try:
        settings = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ModelError(
            f"no model at {model!r}: {first_line(e)}; give a Hugging Face folder or a reachable "
            "hub name"
        ) from e
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # as transformers does without that file
        generation = GenerationConfig.from_model_config(settings)
    eos = eos_token_ids(tokenizer, generation)
    return eos, pad_token_id(tokenizer, eos, settings.get_text_config().vocab_size)


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
    """The engine of `cfg` for a Hugging Face folder or hub name; an adapter is merged.

    `max_length`: most tokens of prompt and response. `seed` of vLLM itself. Without `weights` the
    first `sync_weights` brings them.
    """
    check_engine(cfg)
    base = adapter_base(model_folder) or model_folder
    shared = eos_ids, pad_id, tokenizer, cfg.batch, max_length
    if cfg.kind == "vllm":
        merged = weights and base != model_folder
        memory = {"gpu_memory": cfg.gpu_memory, "tensor_parallel": cfg.tensor_parallel}
        engine = VLLMEngine(base, *shared, dtype, seed, weights=weights and not merged, **memory)
        if merged:
            model = load_causal_lm(model_folder, dtype)
            engine.sync_weights((name, p.detach()) for name, p in model.named_parameters())
    else:
        if weights:
            model = load_causal_lm(model_folder, dtype, device)
        else:
            devices = [device] if torch.device(device).type == "cuda" else []
            config = AutoConfig.from_pretrained(base, trust_remote_code=False)
            with torch.random.fork_rng(devices), torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model = prepare_causal_lm(model, base)
        engine = TorchEngine(model, *shared)
    if cfg.gap_limit is not None:
        engine.gap_limit = cfg.gap_limit
    return engine


def check_engine_gap(mean: float, maximum: float, limit: float) -> None:
    """Raise EngineGap if the mean |difference| to the trainer's log-probabilities exceeds `limit`.

    In nats: rounding gives about 0.05 in bfloat16 and 1e-5 in float32, stale weights or a stale
    prefix cache at least 0.9.
    """
    if not mean <= limit:  # a NaN too
        raise EngineGap(
            f"the engine's log-probabilities differ from the trainer's by {mean:.4g} nats on "
            f"average (at most {maximum:.4g}), the limit is {limit:.4g}: mend the weight sync, or "
            "raise engine.gap_limit where its arithmetic is known to be coarser"
        )


@dataclass
class RolloutBatch:
    """Rollouts as right-padded tensors, with targets shifted by one."""

    tokens: Tensor  # (B, T+1) int64, prompt then response
    attention_mask: Tensor  # (B, T+1) int64, 1 for real tokens
    loss_mask: Tensor  # (B, T) float32, 1 where the model wrote tokens[t+1]
    logprobs: Tensor  # (B, T) float32 of the engine, 0 where loss_mask is 0
    advantages: Tensor  # (B,) float32
    prompt_lengths: Tensor  # (B,) int64
    group_ids: Tensor  # (B,) int64: equal for the same prompt

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> RolloutBatch:
        return RolloutBatch(*(getattr(self, f.name).to(device) for f in fields(self)))

    def select(self, rows: Tensor) -> RolloutBatch:
        """Copy the given rows (M,) int64, cut to the longest of them."""
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
    """The batch of B rollouts and B advantages; RolloutError if lengths do not agree."""
    if not rollouts or len(rollouts) != len(advantages):
        raise RolloutError(
            f"{len(rollouts)} rollouts, {len(advantages)} advantages: a batch needs one for each"
        )
    for i, r in enumerate(rollouts):
        sizes = [len(x) for x in (r.prompt_ids, r.response_ids, r.logprobs, r.loss_mask)]
        if sizes[0] == 0 or len(set(sizes[1:])) > 1:
            raise RolloutError(
                f"rollout {i}: {sizes} prompt ids, response ids, log-probabilities, mask entries: "
                "the last three must agree, and a prompt is needed"
            )

    prompts = np.array([len(r.prompt_ids) for r in rollouts])[:, None]
    ends = prompts + np.array([len(r.response_ids) for r in rollouts])[:, None]
    place = np.arange(ends.max())
    real = place < ends  # (B, T+1)
    written = real & (place >= prompts)

    def spread(rows: Iterable[Iterable], where: np.ndarray, dtype: type, other: int) -> Tensor:
        """(B, T+1): the rows' values, one after the other, where `where`; else `other`."""
        values = np.full(where.shape, other, dtype)
        values[where] = np.fromiter(chain.from_iterable(rows), dtype, int(where.sum()))
        return torch.from_numpy(values)

    ids = (part for r in rollouts for part in (r.prompt_ids, r.response_ids))
    # entry t predicts token t + 1
    loss_mask = spread((r.loss_mask for r in rollouts), written, np.float32, 0)[:, 1:]
    logprobs = spread((r.logprobs for r in rollouts), written, np.float32, 0)[:, 1:]
    return RolloutBatch(
        spread(ids, real, np.int64, pad_id),
        torch.from_numpy(real.astype(np.int64)),
        loss_mask,
        torch.where(loss_mask > 0, logprobs, 0.0),
        torch.as_tensor(advantages, dtype=torch.float32),
        torch.from_numpy(prompts[:, 0]),
        torch.tensor([r.group_id for r in rollouts]),
    )
