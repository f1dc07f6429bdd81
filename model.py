"""Load a causal language model, with a LoRA adapter where one is wanted; optimizer and schedule."""

from __future__ import annotations

import difflib
import functools
import math
import os
import pickle
import re
from collections.abc import Callable

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distributed import decoder_layers
from lora import (
    LoRAConfig,
    ModelError,
    adapter_base,
    add_adapter,
    first_line,
    load_adapter,
    merge_adapter,
)
from packing import _logprobs_forward, compile_function, token_logprobs  # noqa: F401

DYNAMIC = None  # for torch.compile: the second length makes it variable
BAD_FILES = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, pickle.UnpicklingError)


def _reason(path: str, e: Exception) -> str:
    """Why loading failed; the libraries take a missing folder for a hub name."""
    parent, name = os.path.split(path)
    local = path.startswith((".", "/", "~")) or path.count("/") > 1 or os.path.isdir(parent)
    if local and not os.path.exists(path):
        near = difflib.get_close_matches(name, os.listdir(parent)) if os.path.isdir(parent) else []
        return "; did you mean ".join(["there is no such folder", *near[:1]])
    return first_line(e)


def load_tokenizer(path: str):
    """The tokenizer of a folder or hub name; for an adapter without one, that of its base.

    ModelError if its files are missing (the library would make one up) or a token has no embedding.
    """
    base = adapter_base(path)
    has_own = os.path.exists(os.path.join(path, "tokenizer.json"))
    source = base if base and not has_own else path
    try:
        files = os.listdir(source) if os.path.isdir(source) else ["tokenizer.json"]
        if not re.search(r"tokenizer\.|vocab|piece", " ".join(files)):
            raise ValueError("it has no tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = AutoConfig.from_pretrained(base or path, trust_remote_code=False)
        slow = [v for k, v in tokenizer.vocab_files_names.items() if k != "tokenizer_file"]
        if "tokenizer.json" not in files and not (slow and set(slow) <= set(files)):
            other = f" (nor {' and '.join(slow)})" * bool(slow)
            raise ValueError(f"it has no tokenizer.json{other}")
    except (OSError, ValueError, KeyError) as e:
        raise ModelError(
            f"no tokenizer at {source!r}: {_reason(source, e)}; give a Hugging Face folder with "
            "its tokenizer's files, or a reachable hub name"
        ) from e
    special = set(tokenizer.all_special_tokens)  # padding may lie outside
    largest = max((i for t, i in tokenizer.get_vocab().items() if t not in special), default=0)
    if largest >= (size := model.get_text_config().vocab_size):
        raise ModelError(
            f"the tokenizer at {source!r} has token {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}), outside the vocabulary of {size}; "
            "use the model's own tokenizer"
        )
    return tokenizer


def load_causal_lm(
    path: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradient_checkpointing: float = 0.0,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    keep_start: bool = False,
    compiled: bool = False,
    merge: bool = True,
) -> nn.Module:
    """A causal LM from a local folder or a hub name, ready for `token_logprobs`.

    An adapter's folder (PEFT) gives its base with the adapter merged in float32 (kept apart if not
    `merge`). With `lora.r` the model is frozen in `dtype` and gets a float32 adapter to train: the
    folder's, or a new one made with `seed`. ModelError for a missing model, damaged or missing
    weights, and models that prepare_causal_lm refuses.
    """
    base = adapter_base(path) or path
    trained = lora is not None and lora.r is not None
    adapted = base != path and not trained
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=torch.float32 if adapted else dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            trust_remote_code=False,
        )
    except BAD_FILES as e:
        there = f"the base model of {path}" if base != path else "no causal LM"
        key = " (base_model_name_or_path of its adapter_config.json)" * (base != path)
        raise ModelError(
            f"{there} at {base!r}: {_reason(base, e)}; give a Hugging Face folder or a reachable "
            f"hub name{key}"
        ) from e
    if report["missing_keys"]:
        raise ModelError(
            f"{base}: its files lack {len(report['missing_keys'])} weights of "
            f"{type(model).__name__}, {min(report['missing_keys'])} first: damaged, or an encoder"
        )
    model = prepare_causal_lm(model, base, gradient_checkpointing, compiled)
    if trained:
        add_adapter(model, lora, path if base != path else "", seed, keep_start)
    elif adapted:
        load_adapter(model, path)
        if merge:
            merge_adapter(model)
        for name, p in model.named_parameters():
            if ".lora_" not in name:
                p.data = p.data.to(dtype)
    return model.to(device)


def prepare_causal_lm(
    model: nn.Module,
    name: str = "the model",
    gradient_checkpointing: float = 0.0,
    compiled: bool = False,
) -> nn.Module:
    """Prepare a transformers causal LM for `token_logprobs`: eval mode, no dropout, our attention.

    `gradient_checkpointing`: share of the decoder layers, evenly spread, that recompute
    activations. `compiled`: compile decoder layers and head. ModelError if the head is more than a
    matrix product or layers are not plain attention.
    """
    config, way_out = model.config, "use a Qwen2/2.5/3, Llama or SmolLM2 model"
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if (value := getattr(config, key, None)) not in (None, 1, 1.0):
            raise ModelError(
                f"{name}: the config sets {key}={value}: its logits are not head(hidden states); "
                f"{way_out}"
            )
    odd = set(getattr(config.get_text_config(), "layer_types", None) or ())
    odd -= {"full_attention", "sliding_attention", "chunked_attention"}
    odd |= {"attention sinks" for module in model.modules() if hasattr(module, "sinks")}
    if getattr(config, "attn_logit_softcapping", None):
        odd.add("soft-capped attention")
    if odd or model._is_stateful or not model._supports_attention_backend:
        found = f" ({', '.join(sorted(odd))})" if odd else ""
        raise ModelError(
            f"{name}: {type(model).__name__} has layers that are not plain attention{found}; "
            f"{way_out}"
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.config.use_cache = False
    model.set_attn_implementation("packed")
    model.compiled_layers = compiled
    for i, layer in enumerate(decoder_layers(model)):
        if compiled:
            # Only forward: FSDP's hooks stay uncompiled. Not dynamic=True: flex attention of torch
            # 2.11 can't have a variable head size.
            layer.forward = compile_function(layer.forward, DYNAMIC)
        if int((i + 1) * gradient_checkpointing) > int(i * gradient_checkpointing):
            layer.forward = functools.partial(_recomputed, layer.forward)
    # registered by shard_model: FSDP gathers parameters around it
    model.logprobs_forward = functools.partial(_logprobs_forward, model)
    return model.eval()


def _recomputed(forward: Callable[..., Tensor], *args, **kwargs) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def make_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with weight decay on all of them, as in verl."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr, betas, 1e-8, weight_decay, fused=True)


def lr_at(
    step: int, peak: float, warmup_steps: int, total_steps: int, schedule: str = "constant"
) -> float:
    """Learning rate of optimizer step `step`, 0 to total_steps - 1: linear warm-up, then constant,
    or cosine or linear to 0. Step 0 has 1 / warmup_steps of the peak (verl: 0)."""
    if schedule not in ("constant", "cosine", "linear"):
        raise ValueError(f"schedule {schedule!r}: use constant, cosine or linear")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return peak * (1 - progress)
    return peak
