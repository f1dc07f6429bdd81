"""A transformers decoder over `KVCache`: our own loop for plain Llama layers, else the model's.

Shapes: T tokens of a pass, of any sequences; M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface

from distributed import decoder_layers
from engines.base import RolloutError, operations
from engines.kv_cache import KVCache

PLAIN = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}
Decoder = Callable[[Tensor, Tensor, KVCache], Tensor]  # ids (T,), positions (T,) → states (T, M)


class Layer(NamedTuple):
    """A decoder layer with fused q, k, v and fused gate, up."""

    module: nn.Module
    qkv: tuple[Tensor, Tensor | None]  # weight and bias
    gate_up: tuple[Tensor, Tensor | None]


def make_decoder(model: nn.Module) -> Decoder:
    """The fastest decoder for the model.

    For PLAIN layers it fuses q, k, v and gate, up; the model's parameters become views of the fused
    weights, so a sync fills both.
    """
    layers = list(decoder_layers(model))
    linears = {type(m) for layer in layers for m in layer.modules() if hasattr(m, "in_features")}
    silu = getattr(model.config, "hidden_act", None) == "silu"
    if {type(layer).__name__ for layer in layers} <= PLAIN and linears == {nn.Linear} and silu:
        return PlainDecoder(model.get_decoder(), layers)
    decoder = model.get_decoder()

    def call(tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        given = {"input_ids": tokens[None], "position_ids": positions[None]}
        cache.attended.clear()
        return decoder(**given, use_cache=False, kv=cache).last_hidden_state[0]

    return call


class PlainDecoder:
    def __init__(self, decoder: nn.Module, layers: list[nn.Module]):
        self.decoder = decoder
        self.operations = operations(decoder.embed_tokens.weight.device)
        self.layers = [
            Layer(
                layer,
                _side_by_side(layer.self_attn, "q_proj", "k_proj", "v_proj"),
                _side_by_side(layer.mlp, "gate_proj", "up_proj"),
            )
            for layer in layers
        ]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the unfused weights' blocks fit no later tensor

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        x = self.decoder.embed_tokens(tokens)
        cos, sin = (part[0] for part in self.decoder.rotary_emb(x, positions[None]))
        for layer in self.layers:
            self._attention(layer, x, cos, sin, cache)
            h = linear(self._norm(layer.module.post_attention_layernorm, x), *layer.gate_up)
            _add_linear(x, layer.module.mlp.down_proj, self.operations.silu_times(h))
        return self._norm(self.decoder.norm, x)

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        return self.operations.rms_norm(x, norm.weight, norm.variance_epsilon)

    def _attention(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache) -> None:
        """Add the layer's attention to x (T, M) in place."""
        attention = layer.module.self_attn
        h = linear(self._norm(layer.module.input_layernorm, x), *layer.qkv)
        h = h.view(len(x), -1, attention.head_dim)
        n_kv = h.shape[1] // (attention.num_key_value_groups + 2)
        q, k, v = h.split([h.shape[1] - 2 * n_kv, n_kv, n_kv], dim=1)
        if hasattr(attention, "q_norm"):
            q.copy_(self._norm(attention.q_norm, q))
            k.copy_(self._norm(attention.k_norm, k))
        self.operations.rotate(h[:, :-n_kv], cos, sin)
        mixed = cache.attend(attention.layer_idx, q, k, v, attention.scaling)
        _add_linear(x, attention.o_proj, mixed.flatten(1))


def _side_by_side(module: nn.Module, *names: str) -> tuple[Tensor, Tensor | None]:
    """Fuse linear layers into one weight and bias; their own become views of it."""
    linears = [module.get_submodule(name) for name in names]
    whole = []
    for kind in ("weight", "bias"):
        parts = [getattr(m, kind) for m in linears]
        if parts[0] is None:
            return whole[0], None
        whole.append(torch.cat([p.data for p in parts]))
        for p, view in zip(parts, whole[-1].split([len(p) for p in parts])):
            p.data = view
    return tuple(whole)


def _add_linear(x: Tensor, layer: nn.Linear, h: Tensor) -> None:
    """x (T, M) += layer(h)."""
    x.addmm_(h, layer.weight.t())
    if layer.bias is not None:
        x += layer.bias


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: KVCache | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention over `KVCache`: query (1, H, T, D) → (1, T, H, D)."""
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd:
        problem = f"uses {odd[0]}"
    elif kv is None:
        problem = "does not hand on what it is called with"
    elif module.layer_idx in kv.attended:
        problem = "attends twice in a layer"
    elif query.is_cuda and key.shape[3] != value.shape[3]:
        problem = f"has keys of size {key.shape[3]} and values of size {value.shape[3]}"
    else:
        kv.attended.add(module.layer_idx)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return kv.attend(module.layer_idx, q, k, v, scaling)[None], None
    raise RolloutError(
        f"{type(module).__name__} {problem}, which TorchEngine cannot do; use a Qwen2/2.5/3, Llama "
        "or SmolLM2 model"
    )


AttentionInterface.register("rollout", _attention)
