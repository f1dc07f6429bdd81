"""Load a causal language model, with a LoRA adapter where one is wanted; log-probabilities of tokens; optimizer and
learning-rate schedule.

Needs torch and transformers alone, and peft where an adapter is trained.  Log-probabilities are computed at the sampling temperature, in float32, in chunks
whose logits are recomputed in the backward pass, so that a (B, T, V) tensor never exists: at V = 152k and 8 x 700
tokens it would take 3.4 GB, and as much again for its gradient.

Shapes: B sequences, T predicted positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
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
    base = adapter_base(path)
    try:
        return AutoTokenizer.from_pretrained(base if base and not _has_tokenizer(path) else path)
    except (OSError, ValueError) as e:
        raise ModelError(f"no tokenizer at {path!r}: {_first_line(e)}; give a Hugging Face folder or a reachable hub "
                         "name") from e


def load_causal_lm(path: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
                   gradient_checkpointing: bool = False, lora: LoRAConfig | None = None, seed: int = 0,
                   keep_start: bool = False) -> nn.Module:
    """A causal LM from a local folder or a hub name, in eval mode, dropout off, attention through sdpa.

    A folder in PEFT's format gives the model it was trained on with the adapter merged into it.  With `lora.r` the
    model is frozen in `dtype` and has a float32 adapter to train (`add_adapter`): a new one made with `seed`, or, of an
    adapter's folder, that one.
    Dropout stays 0 in training too, that of an adapter excepted: the ratio of the first update on a batch is then
    exactly 1.
    Raises ModelError for a path that holds no model, for weights that are damaged, missing or of other shapes than the
    config says (they would be random numbers), and for heads that do more than one matrix product.
    """
    base = adapter_base(path) or path
    try:
        model, report = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="sdpa",
                                                             output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
        there = f"the base model of {path}" if base != path else "no causal LM"
        raise ModelError(f"{there} at {base!r}: {_first_line(e)}; give a Hugging Face folder or a reachable hub name"
                         + (" (base_model_name_or_path of its adapter_config.json)" if base != path else "")) from e
    if report["missing_keys"]:
        raise ModelError(f"{base}: its files lack {len(report['missing_keys'])} weights of {type(model).__name__}, "
                         f"{min(report['missing_keys'])} first: it is damaged, or the folder of an encoder")
    model = prepare_causal_lm(model, base, gradient_checkpointing)
    if lora is not None and lora.r is not None:
        add_adapter(model, lora, path if base != path else "", seed, keep_start)
    elif base != path:
        merge_adapter(model, path)
    return model.to(device)


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


# --------------------------------------------------------------------------------------------------------------- LoRA

@dataclass
class LoRAConfig:
    r: int | None = None
    """rank of a LoRA adapter that is trained on the frozen model; null: no adapter, all weights are trained"""
    alpha: int | None = None
    """its product B·A is scaled by alpha / r; null: 2 r"""
    dropout: float = 0.0
    """share of the adapter's inputs that is set to zero in training"""
    target: str | list[str] = "all-linear"
    """the linear layers that get one, by name (`q_proj`); all-linear: every one but the head"""

    def __post_init__(self):
        for name, ok, rule in (("r", self.r is None or self.r >= 1, "at least 1, or null"),
                               ("alpha", self.alpha is None or self.alpha >= 1, "at least 1, or null for 2 r"),
                               ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
                               ("target", bool(self.target), "all-linear, or names of linear layers")):
            if not ok:
                raise ModelError(f"lora.{name}={getattr(self, name)!r}: it must be {rule}")


ADAPTER, START = "default", "start"  # what PEFT calls the adapter that is trained, and the frozen copy of its start


def adapter_base(path: str) -> str | None:
    """The model that an adapter's folder (PEFT's format) was trained on; None for any other path."""
    return _adapter_config(path)["base_model_name_or_path"] if os.path.isfile(_config_file(path)) else None


def _config_file(folder: str) -> str:
    return os.path.join(folder, "adapter_config.json")


def _has_tokenizer(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in ("tokenizer_config.json", "tokenizer.json"))


def _adapter_config(folder: str) -> dict:
    """An adapter's settings; ModelError for one that is no plain LoRA of linear layers."""
    try:
        with open(_config_file(folder), encoding="utf-8") as f:
            settings = json.load(f)
        if not isinstance(settings, dict) or not isinstance(settings.get("base_model_name_or_path"), str):
            raise ValueError("it names no base_model_name_or_path")
    except ValueError as e:
        raise ModelError(f"{_config_file(folder)} is damaged: {e}; export the adapter again") from e
    plain = {"peft_type": "LORA", "bias": "none"}
    refused = ("modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "use_dora", "lora_bias",
               "trainable_token_indices", "layer_replication", "target_parameters", "use_qalora", "use_bdlora")
    odd = [f"{key}={settings.get(key)!r}" for key, value in plain.items() if settings.get(key, value) != value]
    odd += [f"{key}={settings[key]!r}" for key in refused if settings.get(key)]
    if odd:
        raise ModelError(f"{folder}: an adapter with {odd[0]} is more than one B·A beside each linear layer; merge it "
                         "with the program that made it, and give the merged folder")
    return settings


def _adapter_weights(folder: str) -> dict[str, Tensor]:
    """Parameter name in the model with the adapter → float32 tensor, of an adapter's folder."""
    path = os.path.join(folder, "adapter_model.safetensors")
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"{path}: {_first_line(e)}; an adapter's folder holds its weights there (of an older .bin: "
                         "load and save it with peft once)") from e
    if odd := [name for name in state if not _WEIGHT.fullmatch(name)]:
        raise ModelError(f"{path}: {odd[0]} is no weight of a LoRA of linear layers; merge the adapter with the program "
                         "that made it, and give the merged folder")
    return {_WEIGHT.sub(rf"\1.\2.{ADAPTER}.weight", name): value.float() for name, value in state.items()}


_WEIGHT = re.compile(r"base_model\.model\.(.+)\.(lora_[AB])\.weight")


def merge_adapter(model: nn.Module, folder: str) -> None:
    """Add the adapter of a folder to the weights of the model it was trained on: W + scaling · B·A, in float32.

    One rounding, to the dtype that the model is in.  Raises ModelError where they don't fit together.
    """
    settings, weights = _adapter_config(folder), _adapter_weights(folder)
    rank = settings["r"]
    scaling = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    targets = dict(model.named_parameters())
    for name in [n for n in weights if ".lora_A." in n]:
        layer = name.partition(".lora_A.")[0]
        a, b = weights[name], weights.get(name.replace(".lora_A.", ".lora_B."))
        w = targets.get(f"{layer}.weight")
        if w is None or b is None or w.shape != (b.shape[0], a.shape[1]):
            raise ModelError(f"{folder}: its {layer} does not fit {settings['base_model_name_or_path']}; mend "
                             "base_model_name_or_path in its adapter_config.json")
        w.data.copy_(w.data.float() + scaling * (b @ a).to(w.device))


def add_adapter(model: nn.Module, lora: LoRAConfig, folder: str = "", seed: int = 0, keep_start: bool = False) -> None:
    """Freeze the model and put a float32 LoRA adapter beside its linear layers, in place; it alone is trained.

    A new adapter has A at random (of `seed`, the same on every process) and B = 0; with `folder` it is the one there,
    which must have been made with the same r, alpha and target.  `keep_start`: also a frozen copy of that one, for
    `starting_weights`.  Raises ModelError where peft is missing, for layers that can't have one, and for another shape.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise ModelError(f"lora.r={lora.r} needs the package peft ({e}); pip install -r requirements.txt") from e
    target = lora.target.split(",") if isinstance(lora.target, str) else lora.target
    if target == ["all-linear"]:
        target = sorted({name.rpartition(".")[2] for name, layer in model.named_modules()
                         if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()})
    base = model.config._name_or_path
    settings = LoraConfig(r=lora.r, lora_alpha=lora.alpha or 2 * lora.r, lora_dropout=lora.dropout, bias="none",
                          target_modules=target, task_type="CAUSAL_LM", base_model_name_or_path=base)
    if folder:
        there = _adapter_config(folder)
        settings.use_rslora = bool(there.get("use_rslora"))
    for name in (ADAPTER, START) if folder and keep_start else (ADAPTER,):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # the adapter is made on the CPU
                inject_adapter_in_model(settings, model, name)
        except ValueError as e:
            raise ModelError(f"lora.target={lora.target!r}: {_first_line(e)}; name linear layers of the decoder, or "
                             "all-linear") from e
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if hasattr(layer, "lora_A") or hasattr(layer, "lora_embedding_A"):
            raise ModelError(f"lora.target={lora.target!r} names the embeddings or the head, which may be one matrix; "
                             "name linear layers of the decoder, or all-linear")
    model.peft_config = {ADAPTER: settings}  # of what is exported
    adapted = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    for p in adapted.values():
        p.data = p.data.float()
    if folder:
        weights, alpha = _adapter_weights(folder), there["lora_alpha"]
        shapes = {name: p.shape for name, p in adapted.items() if f".{ADAPTER}." in name}
        if shapes != {name: value.shape for name, value in weights.items()} or alpha != settings.lora_alpha:
            names = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
            raise ModelError(f"{folder} is an adapter with r={there['r']}, alpha={alpha} on {', '.join(sorted(names))}; "
                             f"lora asks for r={lora.r}, alpha={settings.lora_alpha} on {', '.join(target)}: set the "
                             "same to go on with it, or merge it and start a new one")
        for name, p in adapted.items():
            p.data.copy_(weights[name.replace(f".{START}.", f".{ADAPTER}.")])
    _activate(model, ADAPTER)
    for name, p in model.named_parameters():
        p.requires_grad_(name in adapted and f".{ADAPTER}." in name)


def _activate(model: nn.Module, name: str | None) -> None:
    """Let the LoRA layers compute with this adapter, with none for None; what is trained stays as it is.

    PEFT's switches change requires_grad, which FSDP reads once, at the first forward pass.
    """
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name)
    for p, flag in flags:
        p.requires_grad_(flag)


@contextlib.contextmanager
def starting_weights(model: nn.Module) -> Iterator[None]:
    """Within the block a model with an adapter computes as it did before the adapter was trained (no second model is
    kept): with a new one switched off, with the frozen copy of an earlier one.  Other models stay as they are."""
    start = START if any(f".{START}." in name for name, _ in model.named_parameters()) else None
    _activate(model, start)
    try:
        yield
    finally:
        _activate(model, ADAPTER)


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
