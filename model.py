"""Load a causal language model, with a LoRA adapter where one is wanted; optimizer and learning-rate schedule.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable

import torch
import torch._functorch.config
from safetensors import SafetensorError
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora import adapter_base, add_adapter, LoRAConfig, merge_adapter, ModelError, _reason
from packing import _logprobs_forward, compute_place, token_logprobs  # noqa: F401


DYNAMIC = None  # torch.compile's: from the second length on, length is a variable; False: each length is compiled
ACTIVATIONS = 0.99  # share compiled layers keep for the backward pass; the rest is cheap to redo (3B: 8 GiB for 3 %)


def load_tokenizer(path: str):
    """The tokenizer of a local folder or a hub name."""
    base = adapter_base(path)
    try:
        return AutoTokenizer.from_pretrained(base if base and not _has_tokenizer(path) else path)
    except (OSError, ValueError) as e:
        raise ModelError(f"no tokenizer at {path!r}: {_reason(path, e)}; give a Hugging Face folder or a reachable hub "
                         "name") from e


def load_causal_lm(path: str, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
                   gradient_checkpointing: float = 0.0, lora: LoRAConfig | None = None, seed: int = 0,
                   keep_start: bool = False, compiled: bool = False) -> nn.Module:
    """A causal LM from a local folder or a hub name, in eval mode, dropout off; `prepare_causal_lm` for the last words.

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
        raise ModelError(f"{there} at {base!r}: {_reason(base, e)}; give a Hugging Face folder or a reachable hub name"
                         + (" (base_model_name_or_path of its adapter_config.json)" if base != path else "")) from e
    if report["missing_keys"]:
        raise ModelError(f"{base}: its files lack {len(report['missing_keys'])} weights of {type(model).__name__}, "
                         f"{min(report['missing_keys'])} first: it is damaged, or the folder of an encoder")
    model = prepare_causal_lm(model, base, gradient_checkpointing, compiled)
    if lora is not None and lora.r is not None:
        add_adapter(model, lora, path if base != path else "", seed, keep_start)
    elif base != path:
        merge_adapter(model, path)
    return model.to(device)


def prepare_causal_lm(model: nn.Module, name: str = "the model", gradient_checkpointing: float = 0.0,
                      compiled: bool = False) -> nn.Module:
    """Make a transformers causal LM ready for `token_logprobs`: eval mode, dropout 0, a forward method for FSDP.

    `gradient_checkpointing`: share of the decoder layers, evenly spread, whose activations are recomputed in the
    backward pass.  `compiled`: decoder layers and head go through torch.compile (at the first pass, a minute).
    Raises ModelError for heads that do more than one matrix product; `name` stands in its message.
    """
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise ModelError(f"{name}: the config sets {key}={getattr(model.config, key)}: its logits are not "
                             "head(hidden states), which token_logprobs computes; use a Qwen2/2.5/3, Llama or SmolLM2 "
                             "model")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    odd = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    odd |= {"attention sinks" for module in model.modules() if hasattr(module, "sinks")}
    odd |= {"soft-capped attention"} if getattr(model.config, "attn_logit_softcapping", None) else set()
    if odd or model._is_stateful or not model._supports_attention_backend:
        raise ModelError(f"{name}: {type(model).__name__} has layers that are not plain attention"
                         f"{' (' + ', '.join(sorted(odd)) + ')' if odd else ''}: packed sequences and the engine's keys "
                         "and values know nothing else; use a Qwen2/2.5/3, Llama or SmolLM2 model")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):  # a module elsewhere, see above
            module.attention_dropout = 0.0
    model.config.use_cache = False
    model.set_attn_implementation("packed")
    model.compiled_layers = compiled
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for i, layer in enumerate(max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))):  # the decoder layers
        if compiled:
            # Not the call: FSDP's hooks stay outside.  Not dynamic=True, which makes the head size a variable as well
            # (flex attention of torch 2.11 does not lower then): the second length makes the length one, and it alone.
            layer.forward = torch.compile(layer.forward, dynamic=DYNAMIC)
            torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)  # layouts, two dtypes
            torch._functorch.config.activation_memory_budget = ACTIVATIONS
        if int((i + 1) * gradient_checkpointing) > int(i * gradient_checkpointing):
            layer.forward = functools.partial(_recomputed, layer.forward)
    # FSDP gathers parameters around forward(); distributed.shard_model registers this method to be treated alike.
    model.logprobs_forward = functools.partial(_logprobs_forward, model)
    return model.eval()


def _recomputed(forward: Callable[..., Tensor], *args, **kwargs) -> Tensor:
    """`forward`, which keeps its inputs alone where a backward pass will follow, and runs again in it."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _has_tokenizer(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in ("tokenizer_config.json", "tokenizer.json"))


def make_optimizer(model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                   weight_decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, weight decay on all of them (as verl does with its flat parameters)."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=1e-8, weight_decay=weight_decay,
                             fused=compute_place(model)[0].type == "cuda")


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
