"""LoRA adapters: load, merge, train and switch off (PEFT's format). A leaf: needs torch, safetensors and peft."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn, Tensor


class ModelError(ValueError):
    """A model or tokenizer that cannot be used: the message says which, why and what to do."""

    exit_status = 2


def _reason(path: str, e: Exception) -> str:
    """Why nothing could be loaded from `path`, in a line; the libraries call a missing folder a bad repository name."""
    if not os.path.exists(path) and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        return "there is no such folder"
    return _first_line(e)


def _first_line(e: Exception) -> str:
    return str(e).strip().split("\n")[0]


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


def adapter_settings(folder: str) -> LoRAConfig:
    """The r, alpha and targets of an adapter's folder: what `load_causal_lm` takes to load it unmerged."""
    settings = _adapter_config(folder)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in _adapter_weights(folder)}
    return LoRAConfig(settings["r"], settings["lora_alpha"], target=sorted(names))


def _config_file(folder: str) -> str:
    return os.path.join(folder, "adapter_config.json")


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
        raise ModelError(f"{path}: {odd[0]} is no weight of a LoRA of linear layers; merge the adapter with the "
                         "program that made it, and give the merged folder")
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
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two adapters are meant
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
            raise ModelError(f"{folder} is an adapter with r={there['r']}, alpha={alpha} on "
                             f"{', '.join(adapter_settings(folder).target)}; lora asks for r={lora.r}, "
                             f"alpha={settings.lora_alpha} on {', '.join(target)}: set the same to go on with it, or "
                             "merge it and start a new one")
        for name, p in adapted.items():
            p.data.copy_(weights[name.replace(f".{START}.", f".{ADAPTER}.")])
    _activate(model, ADAPTER)
    for name, p in model.named_parameters():
        p.requires_grad_(name in adapted and f".{ADAPTER}." in name)
    model.eval()  # the new layers too


def adapter_dropout(model: nn.Module, on: bool) -> None:
    """Let the dropout of a LoRA adapter work or rest; the model itself is always in eval mode, without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train(on and module.p > 0)


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
