"""LoRA adapters in PEFT's format: load, merge, train, disable. Runs alone with torch and peft."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn


class ModelError(ValueError):
    """A model or tokenizer cannot be used; the message says why and what to do."""

    exit_status = 2


def first_line(e: Exception) -> str:
    return str(e).strip().split("\n")[0]


@dataclass
class LoRAConfig:
    r: int | None = None
    """rank of the adapter trained on the frozen model; null: train all weights"""
    alpha: int | None = None
    """the product B·A is scaled by alpha / r; null: 2 r"""
    dropout: float = 0.0
    """dropout probability of the adapter's inputs"""
    target: str | list[str] = "all-linear"
    """names of linear layers (`q_proj`); all-linear: all but the head"""

    def __post_init__(self):
        idle = (self.alpha, self.dropout, self.target) == (None, 0, "all-linear")
        for name, ok, rule in (
            ("r", self.r is None or self.r >= 1, "at least 1, or null"),
            ("alpha", self.alpha is None or self.alpha >= 1, "at least 1, or null for 2 r"),
            ("dropout", 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("target", bool(self.target), "all-linear, or names of linear layers"),
            ("r", self.r or idle, "given with alpha, dropout or target"),
        ):
            if not ok:
                raise ModelError(f"lora.{name}={getattr(self, name)!r}: it must be {rule}")


ADAPTER, START = ("default", "start")  # the trained adapter, and a frozen copy of its start

# Fields of peft's LoraConfig that affect no weights, or that peft itself applies.
TRAINABLE = {
    *("peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "task_type"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora"),
    *("init_lora_weights", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("eva_config", "megatron_core", "qalora_group_size"),  # for other initialisations and layers
}
MERGEABLE = TRAINABLE | {"rank_pattern", "alpha_pattern", "use_dora"}
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # leave the base unchanged
EXACT_STARTS = (*PLAIN_STARTS, "pissa", "olora")  # change it reproducibly


def adapter_base(path: str) -> str | None:
    """The base model of an adapter's folder; None for other paths."""
    config = os.path.join(path, "adapter_config.json")
    return _read_config(config)["base_model_name_or_path"] if os.path.isfile(config) else None


def _read_config(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
        if not isinstance(values, dict) or not isinstance(values["base_model_name_or_path"], str):
            raise KeyError
    except KeyError as e:
        raise ModelError(f"{path} names no base_model_name_or_path; add it") from e
    except ValueError as e:
        raise ModelError(f"{path} is damaged: {e}; export the adapter again") from e
    return values


def _peft():
    try:
        import peft
    except ImportError as e:
        raise ModelError(f"adapters need the package peft ({e}); pip install peft") from e
    return peft


def adapter_config(folder: str, known: set[str] = MERGEABLE, starts: tuple = EXACT_STARTS):
    """peft's LoraConfig of an adapter's folder.

    ModelError for a field outside `known` that is not peft's default, or for an initialisation
    outside `starts`, which would change the base model.
    """
    path = os.path.join(folder, "adapter_config.json")
    values = _read_config(path)
    default = json.loads(json.dumps(_peft().LoraConfig().to_dict(), default=list))
    odd = ["peft_type"] * (values.get("peft_type", "LORA") != "LORA")
    odd += ["init_lora_weights"] * (values.get("init_lora_weights", True) not in starts)
    for key, value in values.items():
        if key not in known and value != default.get(key) and (value or key in default):
            odd.append(key)
    if odd:
        raise ModelError(
            f"{path}: {odd[0]}={values[odd[0]]!r} is not supported here; merge it with the program "
            "that made it" + " (or with stage=merge, if that can)" * (known != MERGEABLE)
        )
    names = {f.name for f in fields(_peft().LoraConfig)} - {"peft_version"}
    return _peft().LoraConfig(**{k: v for k, v in values.items() if k in names & MERGEABLE})


def _inject(model: nn.Module, settings, name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two are intended
        _peft().inject_adapter_in_model(settings, model, name)
    for key, p in model.named_parameters():
        if ".lora_" in key and f".{name}" in key:
            p.data = p.data.float()


def _fill(model: nn.Module, folder: str, name: str) -> None:
    """Load weights into an adapter; ModelError unless all fit."""
    path = os.path.join(folder, "adapter_model.safetensors")
    try:
        found = _peft().set_peft_model_state_dict(model, load_file(path), name)
        odd = [k for k in found.missing_keys if ".lora_" in k and f".{name}" in k]
        odd = [*found.unexpected_keys, *odd]
    except (OSError, SafetensorError) as e:
        raise ModelError(
            f"{path}: {first_line(e)}; an adapter's folder holds its weights there (of an older "
            ".bin: load and save it with peft once)"
        ) from e
    except RuntimeError as e:  # shapes
        odd = [str(e).strip().split("\n")[-1].strip()]
    if odd:
        raise _misfit(folder, odd[0])


def _misfit(folder: str, reason: str) -> ModelError:
    return ModelError(
        f"{folder}: its weights do not fit {adapter_base(folder)} and its adapter_config.json "
        f"({reason}); mend base_model_name_or_path, or export it again"
    )


def load_adapter(model: nn.Module, folder: str) -> None:
    """Add an adapter, unmerged, to its float32 base model. ModelError if it does not fit."""
    settings = adapter_config(folder)
    try:
        _inject(model, settings, ADAPTER)
    except (ValueError, RuntimeError) as e:
        raise _misfit(folder, first_line(e)) from e
    _fill(model, folder, ADAPTER)
    model.eval()


def merge_adapter(model: nn.Module) -> None:
    """Merge the adapter into the float32 weights; plain layers remain."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
    model.requires_grad_(True)


def add_adapter(
    model: nn.Module, lora: LoRAConfig, folder: str = "", seed: int = 0, keep_start: bool = False
) -> None:
    """Freeze the model and add a float32 LoRA adapter to its linear layers, in place.

    A new one has random A (by `seed`) and B = 0. `folder` holds one to load; ModelError unless its
    r, alpha and target agree. `keep_start` adds a frozen copy of it for `starting_weights`.
    """
    head = model.get_output_embeddings()
    target = lora.target
    if isinstance(target, str):
        target = [part.strip() for part in target.split(",") if part.strip()]
    if target == ["all-linear"]:
        linear = (n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head)
        target = list({n.rpartition(".")[2] for n in linear})
    wanted = {"r": lora.r, "lora_alpha": lora.alpha or 2 * lora.r, "target_modules": sorted(target)}
    settings = _peft().LoraConfig(**wanted, task_type="CAUSAL_LM")
    if folder:
        settings = adapter_config(folder, TRAINABLE, PLAIN_STARTS)
        settings.inference_mode = False
    settings.lora_dropout = lora.dropout
    settings.base_model_name_or_path = model.config._name_or_path
    adapters = (ADAPTER, START) if folder and keep_start else (ADAPTER,)
    for name in adapters:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # initialised on the CPU
                _inject(model, settings, name)
        except ValueError as e:
            raise _bad_target(lora, first_line(e)) from e
    layers = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
    if any(
        hasattr(m, "lora_A") for m in (model.get_input_embeddings(), model.get_output_embeddings())
    ):
        raise _bad_target(lora, "it names the embeddings or the head, which may be one matrix")
    names = sorted({name.rpartition(".")[2] for name in layers})
    there = {"r": settings.r, "lora_alpha": settings.lora_alpha, "target_modules": names}
    if there != wanted:
        texts = (
            f"r={x['r']}, alpha={x['lora_alpha']} on {', '.join(x['target_modules'])}"
            for x in (there, wanted)
        )
        raise ModelError(
            "{} is an adapter with {}; lora asks for {}: set the same, or merge it and start a new "
            "one".format(folder, *texts)
        )
    for name in adapters if folder else ():
        _fill(model, folder, name)
    model.peft_config = {ADAPTER: settings}  # for the export
    _activate(model, ADAPTER)
    for name, p in model.named_parameters():
        p.requires_grad_(f".{ADAPTER}." in name)
    model.eval()


def _bad_target(lora: LoRAConfig, reason: str) -> ModelError:
    return ModelError(
        f"lora.target={lora.target!r}: {reason}; name linear layers of the decoder, or all-linear"
    )


def adapter_dropout(model: nn.Module, on: bool) -> None:
    """Switch the adapter's dropout on or off; the base model has none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train(on and module.p > 0)


def _activate(model: nn.Module, name: str | None) -> None:
    """Compute with this adapter or with none. Keeps requires_grad, which PEFT's switches change
    but FSDP reads only once."""
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
    """Within the block the model computes as before training: with the frozen copy of a loaded
    adapter, or without a new one."""
    start = START if any(f".{START}." in name for name, _ in model.named_parameters()) else None
    _activate(model, start)
    try:
        yield
    finally:
        _activate(model, ADAPTER)
