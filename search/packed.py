"""Encode texts without padding, concatenated to rows of tokens, on CUDA.

Shapes: B texts of a row, T tokens, S maximum texts, H heads, D embedding size.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

PACKABLE = ("bert", "roberta", "xlm-roberta", "camembert")  # accept positions and more keywords


def can_pack(model: nn.Module) -> bool:
    family = model.config.model_type in PACKABLE and model.config.hidden_size % 8 == 0
    return family and next(model.parameters()).is_cuda


def _packed_attention(
    module, query, key, value, attention_mask, scaling, cu_seq_lens_q, max_length_q, **_
) -> tuple[Tensor, None]:
    """(1, H, T, d) each → (1, T, H, d); a text attends only to itself."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, d)
    texts = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(query, key, value, *texts, scale=scaling)[None], None


class PackedModel:
    """Encodes rows of concatenated texts without padding."""

    def __init__(self, model: nn.Module, batch_tokens: int, longest: int, compiled: bool = False):
        """batch_tokens: per row; longest: per text; compiled: fill rows up to one shape"""
        from transformers import AttentionInterface

        AttentionInterface.register("packed_texts", _packed_attention)
        self.model, self.core = model, getattr(model, "roberta", model)  # ANCE has a head beside it
        bert = model.config.model_type == "bert"  # others start after the padding position
        self.first_position = 0 if bert else model.config.pad_token_id + 1
        limit = model.config.max_position_embeddings - self.first_position
        self.longest, self.compiled = min(longest, limit), compiled
        self.row = max(batch_tokens, self.longest)
        self.texts = max(self.row // 64, 1)  # most per row: attention pays for unused ones
        if compiled:  # by layer: takes seconds, the whole model minutes
            for layer in self.core.encoder.layer:
                layer.forward = torch.compile(layer.forward, dynamic=False)

    def batches(self, lengths: Sequence[int]) -> Iterator[slice]:
        """Split texts into rows, in order."""
        start = total = 0
        for i, length in enumerate(lengths):
            if total + length > self.row or i - start == self.texts:
                yield slice(start, i)
                start, total = i, 0
            total += length
        if start < len(lengths):
            yield slice(start, len(lengths))

    def states(self, input_ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """(T,) ids and positions, (S + 1,) starts of texts and the end → (T, D) states."""
        config = self.core.config
        tokens = {"input_ids": input_ids, "position_ids": positions}
        tokens["token_type_ids"] = torch.zeros_like(input_ids)
        texts = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        texts |= {"max_length_q": self.longest, "max_length_k": self.longest}
        usual, config._attn_implementation = config._attn_implementation, "packed_texts"
        try:
            out = self.core(**{name: x[None] for name, x in tokens.items()}, **texts)
        finally:
            config._attn_implementation = usual
        return out.last_hidden_state[0]

    def vectors(self, tokens: list[np.ndarray], encoder: Any) -> Tensor:
        """Encode a row of B texts → (B, D), not normalised, without waiting for the device."""
        device = next(self.model.parameters()).device
        lengths = np.array([len(t) for t in tokens])
        ends, flat = np.cumsum(lengths), np.concatenate(tokens).astype(np.int64)
        positions = np.arange(len(flat)) - np.repeat(ends - lengths, lengths) + self.first_position
        starts = np.concatenate([[0], ends]).astype(np.int32)
        if self.compiled:  # the fill belongs to no text
            fill = (0, self.row - len(flat))
            flat, positions = (np.pad(x, fill, constant_values=x[0]) for x in (flat, positions))
            starts = np.pad(starts, (0, self.texts + 1 - len(starts)), mode="edge")
        arrays = [torch.from_numpy(x) for x in (flat, positions, starts, ends - lengths, lengths)]
        if device.type == "cuda":
            arrays = [x.pin_memory().to(device, non_blocking=True) for x in arrays]
        flat, positions, starts, first, lengths = arrays
        hidden = self.states(flat, positions, starts)
        if encoder.pooling == "mean":
            hidden = hidden[: int(ends[-1])].float()
            return torch.segment_reduce(hidden, "mean", axis=0, unsafe=True, lengths=lengths)
        return self.model.head(hidden[first]) if encoder.pooling == "ance" else hidden[first]
