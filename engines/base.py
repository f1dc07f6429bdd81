"""Settings, requests, results and checks that both sampling engines share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from config import above, at_least
from distributed import clean_name


class RolloutError(ValueError):
    """A request, rollout, weight set or setting is invalid."""

    exit_status = 2


@dataclass
class EngineConfig:
    kind: Literal["torch", "vllm"] = "torch"
    """torch: our own engine; vllm: vLLM in this process (requirements-gpu.txt)"""
    batch: Annotated[int, at_least(1)] = 256
    """sequences decoded together; affects only speed and memory"""
    gpu_memory: Annotated[float, above(0, at_most=0.99)] = 0.4
    """vllm: share of the card for weights, keys and values; freed for training"""
    tensor_parallel: Annotated[int, at_least(1)] = 1
    """vllm: neighbouring processes of a host that share one copy of the weights"""
    gap_limit: Annotated[float | None, above(0)] = None
    """a run ends (status 3) if the mean |engine - trainer log-probability| exceeds this, in nats;
    unset: 0.3 for an engine in bfloat16, 0.02 in float32"""


@dataclass(frozen=True)
class Sampling:
    """How to sample one prompt; invalid values raise RolloutError."""

    n: int = 1
    """number of responses"""
    temperature: float = 1.0
    """logits are divided by it; 0 is greedy"""
    top_p: float = 1.0
    """sample among the most probable tokens up to this mass; 1: among all"""
    max_tokens: int = 256
    """most new tokens, end token included"""
    stop: tuple[str, ...] = ()
    """strings that end the response; their tokens are kept"""
    seed: int | None = None
    """draws depend on seed, prompt, sample index and position; None: seed from torch's generator"""

    def __post_init__(self):
        if isinstance(self.stop, str) or not all(self.stop):
            raise RolloutError(f"stop={self.stop!r}: give a tuple of non-empty strings, ('</a>',)")
        object.__setattr__(self, "stop", tuple(self.stop))
        t = self.temperature
        for name, ok, rule in (
            ("n", self.n >= 1, "at least 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", t == 0 or 1e-3 <= t < float("inf"), "0 (greedy) or from 0.001"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise RolloutError(f"{name}={getattr(self, name)} must be {rule}")

    def request_seed(self) -> int:
        """The seed, or a new one from torch's global generator."""
        return int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed


@dataclass
class Rollout:
    """One sampled response; `logprobs` and `loss_mask` are as long as `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]  # as sampled, end token included
    logprobs: list[float]  # at the sampling temperature (greedy: 1), after top_p
    loss_mask: list[int]  # 1 where the model wrote the token
    group_id: int  # index of the prompt in the call
    end: str  # eos, stop, length, or engine_error (non-finite logits: exclude it)


@dataclass
class GenerateStats:
    """Counts and time of calls of `generate`."""

    seconds: float = 0.0
    prompt_tokens: int = 0  # computed ones; a shared prompt counts once
    held_tokens: int = 0  # prompt tokens found in the cache of the last call
    sampled_tokens: int = 0
    steps: int = 0


class Engine:
    """State and checks of both engines.

    `eos_ids` end a response; stop strings need a `tokenizer`; `max_length`: most tokens of prompt
    and response (None: the model's limit).
    """

    HALF_COPIED = "the engine's last weight sync failed; sync the full set of weights again"

    def __init__(
        self,
        vocabulary: int,
        config,
        eos_ids: int | Iterable[int],
        pad_id: int,
        tokenizer,
        max_length: int | None,
        dtype: torch.dtype,
    ):
        self.eos_ids = frozenset([eos_ids] if isinstance(eos_ids, int) else eos_ids)
        for name, token in [("pad_id", pad_id), *(("eos id", e) for e in self.eos_ids)]:
            if not 0 <= token < vocabulary:
                raise RolloutError(
                    f"{name} {token} is outside the model's vocabulary of {vocabulary}; use an id "
                    "below it"
                )
        self.vocabulary, self.pad_id, self.tokenizer = vocabulary, pad_id, tokenizer
        limits = [getattr(config, k, None) for k in ("max_position_embeddings", "sliding_window")]
        # sequences end before a sliding window would slide
        self.max_length = min((x for x in [*limits, max_length] if x), default=1 << 30)
        self.gap_limit = 0.02 if dtype == torch.float32 else 0.3  # for check_engine_gap
        self.stats = GenerateStats()  # of the last call
        self.total = GenerateStats()  # since the last weight sync
        self.sync_seconds: dict[str, float] = {}  # of the last sync, by phase
        self.asleep, self.unusable = False, ""  # why it needs a sync

    def add_stats(self) -> None:
        both = zip(astuple(self.total), astuple(self.stats))
        self.total = GenerateStats(*(a + b for a, b in both))

    def check_requests(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> tuple[list[list[int]], list[Sampling]]:
        """Prompts as lists, and a Sampling for each; RolloutError for invalid requests."""
        if self.asleep or self.unusable:
            raise RolloutError(self.unusable or "the engine sleeps; call wake() before generate()")
        one = isinstance(sampling, Sampling)
        samplings = [sampling] * len(prompts) if one else list(sampling)
        prompts = [[int(t) for t in p] for p in prompts]
        if len(prompts) != len(samplings):
            raise RolloutError(
                f"{len(prompts)} prompts and {len(samplings)} samplings: give one, or one a prompt"
            )
        for i, (prompt, s) in enumerate(zip(prompts, samplings)):
            if not prompt:
                problem = "is empty: a response needs a token (BOS for example) to follow"
            elif len(prompt) + s.max_tokens > self.max_length:
                problem = (
                    f"has {len(prompt)} tokens; with max_tokens={s.max_tokens} that is above the "
                    f"engine's {self.max_length} positions: shorten it or lower max_tokens"
                )
            elif not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
                problem = (
                    f"holds an id outside the vocabulary of {self.vocabulary}: use the model's own "
                    "tokenizer"
                )
            elif s.stop and self.tokenizer is None:
                problem = f"has stop strings {s.stop}, matched on text: give the engine a tokenizer"
            else:
                continue
            raise RolloutError(f"prompt {i} {problem}")
        return prompts, samplings


def operations(device: torch.device) -> ModuleType:
    """The module of TorchEngine's operations: `kernels` for a GPU, else `operations`."""
    if device.type == "cuda":  # only PyTorch's CUDA builds have Triton
        from engines import kernels as module
    else:
        from engines import operations as module
    return module


def cache_bytes(config, itemsize: float) -> float:
    """Bytes of one token's keys and values, with `itemsize` bytes per number."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * n_kv * head * itemsize


def weight_names(model: nn.Module) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """(name → shape of every weight, other name of a tied weight → its first name)."""
    shapes: dict[str, torch.Size] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(weight), name) == name:
            shapes[name] = weight.shape
        else:
            tied[name] = first[id(weight)]
    return shapes, tied


def checked_weights(
    named_tensors: Iterable[tuple[str, Tensor]], shapes: dict[str, torch.Size], tied: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, weight), each once; RolloutError for unknown names, other shapes,
    tied weights that differ and, at the end, missing weights."""
    sent: dict[str, Tensor] = {}  # some values of tied ones
    for given, tensor in named_tensors:
        name = clean_name(given)
        name = tied.get(name, name)
        if name not in shapes:
            raise RolloutError(
                f"weight {given!r} (read as {name!r}) is unknown to the engine's model: send "
                "merged full weights under their Hugging Face names"
            )
        if shapes[name] != tensor.shape:
            raise RolloutError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, the engine's "
                f"{tuple(shapes[name])}: send full tensors of the same architecture"
            )
        part = tensor.detach().flatten()[::997].clone() if name in tied.values() else None
        if name not in sent:
            sent[name] = part
            yield name, tensor
        elif part is not None and not torch.equal(sent[name], part):
            raise RolloutError(
                f"weight {given!r} is tied in the engine, and its other name brought other values: "
                "build the engine from a config with tie_word_embeddings=false"
            )
    if missing := [name for name in shapes if name not in sent]:
        raise RolloutError(
            f"the sync lacked {len(missing)} of {len(shapes)} weights, {missing[0]!r} first"
        )
