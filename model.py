"""Load a causal language model; log-probabilities of tokens; optimizer and learning-rate schedule.

Needs torch and transformers alone.  Log-probabilities are computed at the sampling temperature, in float32, in chunks
whose logits are recomputed in the backward pass, so that a (B, T, V) tensor never exists: at V = 152k and 8 x 700
tokens it would take 3.4 GB, and as much again for its gradient.

Shapes: B sequences, T predicted positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer


class ModelError(ValueError):
    """A model or tokenizer that cannot be used: the message says which, why and what to do."""

    exit_status = 2


ROW_TOKENS = 2048  # in one row of share_prefixes: bounds its attention mask
CHUNK_TOKENS = 2048  # tokens whose logits exist at the same time: 2048 x 152k x 4 bytes = 1.2 GB


def load_tokenizer(path: str):
    """The tokenizer of a local folder or a hub name."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise ModelError(f"no tokenizer at {path!r}: {_first_line(e)}; give a Hugging Face folder or a reachable hub "
                         "name") from e


def load_causal_lm(path: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
                   gradient_checkpointing: bool = False) -> nn.Module:
    """A causal LM from a local folder or a hub name, in eval mode, dropout off, attention through sdpa.

    Dropout stays 0 in training too: the ratio of the first update on a batch is then exactly 1.
    Raises ModelError for a path that holds no model, for weights that are damaged, missing or of other shapes than the
    config says (they would be random numbers), and for heads that do more than one matrix product.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa",
                                                             output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
        raise ModelError(f"no causal LM at {path!r}: {_first_line(e)}; give a Hugging Face folder or a reachable hub "
                         "name") from e
    if report["missing_keys"]:
        raise ModelError(f"{path}: its files lack {len(report['missing_keys'])} weights of {type(model).__name__}, "
                         f"{min(report['missing_keys'])} first: it is damaged, or the folder of an adapter or encoder")
    return prepare_causal_lm(model, path, gradient_checkpointing).to(device)


def prepare_causal_lm(model: nn.Module, name: str = "the model", gradient_checkpointing: bool = False) -> nn.Module:
    """Make a transformers causal LM ready for `token_logprobs`: eval mode, dropout 0, a forward method for FSDP.

    Raises ModelError for heads that do more than one matrix product; `name` stands in its message.
    """
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise ModelError(f"{name}: the config sets {key}={getattr(model.config, key)}: its logits are not "
                             "head(hidden states), which token_logprobs computes; use a Qwen2/2.5/3, Llama or SmolLM2 "
                             "model")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # FSDP gathers parameters around forward(); distributed.shard_model registers this method to be treated alike.
    model.logprobs_forward = functools.partial(_logprobs_forward, model)
    return model.eval()


def _first_line(e: Exception) -> str:
    return str(e).strip().split("\n")[0]


def _chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float,
                    entropy: bool) -> tuple[Tensor, Tensor]:
    """(M, D) hidden states, (M,) next tokens → (M,) log-probabilities and (M,) entropies (zeros unless asked for)."""
    logits = head(hidden).float() / temperature  # (M, V)
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, normaliser - (torch.softmax(logits, -1) * logits).sum(-1)


@dataclass
class SharedLayout:
    """Sequences laid out so that what their prompts share is computed once: a row is the beginning that all its prompts
    share, then, prompt by prompt, the rest of the prompt and its responses."""

    tokens: Tensor  # (R, S) int64
    position_ids: Tensor  # (R, S) int64: place in the sequence, not in the row
    mask: Tensor  # (R, 1, S, S) bool: causal, and a token sees its own sequence, never another one's
    source: Tensor  # (B, T) int64: which of the R * S states predicts tokens[b, t+1]


def share_prefixes(tokens: Tensor, attention_mask: Tensor, prompt_lengths: Tensor, group_ids: Tensor) -> SharedLayout:
    """Lay out right-padded tokens (B, T+1); those of equal group_ids (B,) have one prompt, prompt_lengths (B,) long.

    A row holds up to ROW_TOKENS (at least one sequence), which bounds the S x S mask.  The last token of a sequence is
    nobody's input and is left out.
    """
    ids, lengths, prompts = tokens.tolist(), attention_mask.sum(-1).tolist(), prompt_lengths.tolist()
    groups: dict[int, list[int]] = {}
    for b, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(b)
    first = [ids[members[0]][:prompts[members[0]]] for members in groups.values()]  # each group's prompt
    common = min(map(len, first))
    while any(p[:common] != first[0][:common] for p in first):
        common -= 1
    rows: list[list[tuple[int, int, int, int]]] = []  # a row's entries: token, position, own segment, parent segment

    def append(segment: int, parent: int, values: list[int], position: int) -> int:
        begin = len(rows[-1])
        rows[-1] += [(v, position + i, segment, parent) for i, v in enumerate(values)]
        return begin

    places = torch.zeros(len(ids), 3, dtype=torch.int64)  # row, where in it the prompt's rest and the response begin
    for number, (members, prompt) in enumerate(zip(groups.values(), first), 1):
        rest: int | None = None
        for b in members:
            response = ids[b][len(prompt):lengths[b] - 1]
            needed = len(response) + (len(prompt) - common if rest is None else 0)
            if not rows or len(rows[-1]) + needed > ROW_TOKENS:
                rows.append([])
                append(0, 0, prompt[:common], 0)
                rest = None
            if rest is None:
                rest = append(number, 0, prompt[common:], common)
            places[b] = torch.tensor([len(rows) - 1, rest, append(len(groups) + 1 + b, number, response, len(prompt))])
    width = max(map(len, rows))
    table = torch.tensor([row + [(0, 0, -1, -1)] * (width - len(row)) for row in rows], device=tokens.device)
    token, position, own, parent = table.unbind(-1)  # (R, S) each
    causal = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    seen = (own[:, None, :] == 0) | (own[:, None, :] == own[:, :, None]) | (own[:, None, :] == parent[:, :, None])
    row, rest_at, response_at = (c[:, None] for c in places.to(tokens.device).unbind(-1))  # (B, 1) each
    t, p = torch.arange(tokens.shape[1] - 1, device=tokens.device), prompt_lengths[:, None]
    column = torch.where(t < common, t, torch.where(t < p, rest_at + t - common, response_at + t - p))  # (B, T)
    return SharedLayout(token, position, (causal & seen)[:, None], row * width + column.clamp(max=width - 1))


def _logprobs_forward(model: nn.Module, tokens: Tensor, attention_mask: Tensor, temperature: float,
                      positions: Tensor | None, entropy: bool,
                      groups: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The computation behind `token_logprobs`; returns log-probabilities (B, T) and entropies (B, T)."""
    inputs, mask = tokens[:, :-1], attention_mask[:, :-1]
    keep = torch.ones_like(inputs, dtype=torch.bool) if positions is None else positions.bool()
    if groups is not None:
        layout = share_prefixes(tokens, attention_mask, *groups)
        states = model.base_model(input_ids=layout.tokens, attention_mask=layout.mask, position_ids=layout.position_ids,
                                  use_cache=False).last_hidden_state.flatten(0, 1)
        rows = states[layout.source[keep]]
    elif bool((mask[:, 1:] <= mask[:, :-1]).all()):  # padding on the right: the causal mask hides it: fast kernels
        states = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        rows = states[keep]
    else:
        position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
        states = model.base_model(input_ids=inputs, attention_mask=mask, position_ids=position_ids,
                                  use_cache=False).last_hidden_state
        rows = states[keep]
    targets = tokens[:, 1:][keep]  # (M,) beside rows (M, D)
    head = model.get_output_embeddings()
    parts = []
    for h, t in zip(rows.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS)):
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk_logprobs, head, h, t, temperature, entropy, use_reentrant=False))
        else:
            parts.append(_chunk_logprobs(head, h, t, temperature, entropy))
    empty = rows.new_zeros(inputs.shape, dtype=torch.float32)
    if not len(rows):  # nothing to predict: keep the graph, so that every rank has a backward pass to run
        return empty + 0.0 * states.sum(), empty
    logprobs, entropies = (torch.cat(p) for p in zip(*parts))
    return empty.masked_scatter(keep, logprobs), empty.masked_scatter(keep, entropies)


def token_logprobs(model: nn.Module, tokens: Tensor, attention_mask: Tensor, temperature: float = 1.0,
                   positions: Tensor | None = None, with_entropy: bool = False,
                   groups: tuple[Tensor, Tensor] | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of every next token under softmax(logits / temperature).

    tokens (B, T+1) int64, attention_mask (B, T+1) with 1 for real tokens, padded on either side; `temperature` as in
    sampling.  Returns (B, T) float32: entry t is log p(tokens[t+1] given tokens[..t]); entries that predict padding are
    finite and meaningless.
    `positions` (B, T) bool: where the head is evaluated at all (zero elsewhere): prompts need none.
    With `with_entropy` also the entropy of the same distributions, (B, T), in nats.
    `groups` = (prompt_lengths (B,), group_ids (B,)), for right-padded sequences: those of one group have the same
    prompt, which is then computed once, and so is what all prompts begin with; the results are the same.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: log-probabilities need one above 0 (greedy sampling has none)")
    forward = getattr(model, "logprobs_forward", None) or functools.partial(_logprobs_forward, model)
    logprobs, entropies = forward(tokens, attention_mask, temperature, positions, with_entropy, groups)
    return (logprobs, entropies) if with_entropy else logprobs


def make_optimizer(model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                   weight_decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, weight decay on all of them (as verl does with its flat parameters)."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=1e-8, weight_decay=weight_decay,
                             fused=params[0].device.type == "cuda")


def lr_at(step: int, peak: float, warmup_steps: int, total_steps: int, schedule: str = "constant") -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then `constant`, or `cosine` / `linear` to 0.

    The first step already moves (1 / warmup_steps of the peak); verl's moves by 0.
    """
    if schedule not in ("constant", "cosine", "linear"):
        raise ValueError(f"schedule {schedule!r}: use constant, cosine or linear")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if schedule == "linear":
        return peak * max(0.0, 1 - progress)
    return peak
