"""Sequences in one forward pass without padding, shared prompts computed once; log-probabilities of their tokens.

A leaf: needs torch and transformers alone.

Shapes: B sequences, T predicted positions, D hidden size, V vocabulary; R rows of S tokens, as they are laid out; M
wanted tokens; H query heads, K key/value heads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn, Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


ROW_TOKENS = 2048  # in one row of share_prefixes: bounds its attention mask
BLOCK = 128  # tokens of a tile of flex attention
ROW_MULTIPLE = 128  # rows on a GPU are padded to a multiple of it, itself one of BLOCK
KEY_HEADS = 16  # flex attention gets keys and values of so many heads, repeated where the model has fewer
SHARING_PAYS = 1.06  # where laying prompts out once saves this factor in tokens, flex attention is as fast as flash
CHUNK_TOKENS = 2048  # tokens whose logits exist at the same time: 2048 x 152k x 4 bytes = 1.2 GB


def _chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float,
                    extra: str) -> tuple[Tensor, Tensor]:
    """(M, D) hidden states, (M,) next tokens → (M,) log-probabilities, and (M,) what `extra` asks for: `entropy`;
    `top`, 1 where the token is the most probable one; or zeros."""
    logits = head(hidden).float() / temperature  # (M, V)
    normaliser = logits.logsumexp(-1)
    if torch.compiler.is_compiling():  # the backward pass of a gather would be a second (M, V) tensor
        words = torch.arange(logits.shape[-1], device=logits.device)
        chosen = torch.where(words == targets[:, None], logits, 0.0).sum(-1)
    else:
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    logprobs = chosen - normaliser
    if extra == "top":
        return logprobs, (logits.argmax(-1) == targets).float()
    if not extra:
        return logprobs, torch.zeros_like(logprobs)
    return logprobs, normaliser - (torch.softmax(logits, -1) * logits).sum(-1)


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *,
                     scaling: float | None = None, cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None,
                     **kwargs) -> tuple[Tensor, None]:
    """transformers' attention interface, query (B, H, S, D) → (B, S, H, D), by what describes the sequences.

    A BlockMask (one row of sequences with shared prompts): flex attention; `cu_seq_lens_q` (one row of whole
    sequences): flash attention of variable length; else sdpa, with the mask or causal.
    """
    if isinstance(attention_mask, BlockMask):
        cpu = query.device.type == "cpu"
        # One program of its backward pass takes a tile of keys through all queries of all heads that share it: a tile
        # of the prompt, which everyone sees, is still at work when the card has long been idle.
        copies = key_copies(query.shape[1], key.shape[1])
        if copies > 1:
            key, value = (x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for x in (key, value))
        flex = flex_attention if cpu or torch.compiler.is_compiling() else _compiled_flex()
        out = flex(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True,
                   kernel_options=None if cpu else FLEX_OPTIONS)
        return out.transpose(1, 2), None
    if cu_seq_lens_q is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, H, D) and (S, K, D)
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling,
                          window_size=(-1, 0), **_VARLEN_GQA)
        return out[None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def key_copies(heads: int, key_heads: int) -> int:
    """How often each key/value head is repeated: no more than it takes to have KEY_HEADS, up to one a query head."""
    shared = heads // key_heads
    for n in range(1, shared):
        if shared % n == 0 and n * key_heads >= KEY_HEADS:
            return n
    return shared


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # for 2-D masks; what is packed brings a 4-D one: not touched
FLEX_OPTIONS = {"IS_DIVISIBLE": True}  # `pack` pads to BLOCK; ROWS_GUARANTEED_SAFE would mean: of every tile looked at
_VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # torch > 2.11


@functools.cache
def _compiled_flex():
    return torch.compile(flex_attention)


@dataclass
class SharedLayout:
    """Sequences laid out so that what their prompts share is computed once: a row is the beginning that all its prompts
    share, then, prompt by prompt, the rest of the prompt and its responses.  On the CPU."""

    tokens: Tensor  # (R, S) int64
    position_ids: Tensor  # (R, S) int64: place in the sequence, not in the row
    own: Tensor  # (R, S) int32: segment of a token; 0 is the common beginning, -1 padding
    parent: Tensor  # (R, S) int32: segment of the prompt that a response's token sees beside its own, else -1
    source: Tensor  # (B, T) int64: which of the R * S states predicts tokens[b, t+1]
    spans: list[tuple[int, int, int, int, int]]  # row, begin and end of a segment, begin and end of its parent

    @property
    def mask(self) -> Tensor:
        """(R, 1, S, S) bool: causal, and a token sees its own sequence, never another one's."""
        own, parent = self.own, self.parent
        seen = (own[:, None, :] == 0) | (own[:, None, :] == own[:, :, None]) | (own[:, None, :] == parent[:, :, None])
        return seen.tril_()[:, None]


def common_beginning(prompts: list[np.ndarray]) -> int:
    """How many tokens all the prompts begin with."""
    common = min(map(len, prompts))
    for prompt in prompts:
        differs = np.flatnonzero(prompt[:common] != prompts[0][:common])
        common = int(differs[0]) if len(differs) else common
    return common


def share_prefixes(tokens: Tensor, attention_mask: Tensor, prompt_lengths: Tensor, group_ids: Tensor,
                   row_tokens: int | None = None, multiple: int = 1) -> SharedLayout:
    """Lay out right-padded tokens (B, T+1); those of equal group_ids (B,) have one prompt, prompt_lengths (B,) long.

    A row holds up to `row_tokens` (default ROW_TOKENS; at least one sequence), which bounds its S x S mask, and is
    padded to a multiple of `multiple`.  The last token of a sequence is nobody's input and is left out.
    """
    limit = ROW_TOKENS if row_tokens is None else row_tokens
    ids, lengths, prompts = tokens.cpu().numpy(), attention_mask.sum(-1).tolist(), prompt_lengths.tolist()
    groups: dict[int, list[int]] = {}
    for b, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(b)
    common = common_beginning([ids[members[0], :prompts[members[0]]] for members in groups.values()])
    widths: list[int] = []
    pieces: list[tuple[int, int, int, int, int, int, int]] = []  # row, column, sequence, from, to, segment, parent
    spans: list[tuple[int, int, int, int, int]] = []
    column = np.zeros((len(ids), ids.shape[1] - 1), dtype=np.int64)
    row_of = np.zeros((len(ids), 1), dtype=np.int64)

    def append(b: int, begin: int, end: int, segment: int, parent: int, seen: tuple[int, int]) -> int:
        """Put tokens[b, begin:end] behind what the last row has; returns the column."""
        at = widths[-1]
        if end > begin:
            pieces.append((len(widths) - 1, at, b, begin, end, segment, parent))
            spans.append((len(widths) - 1, at, at + end - begin, *seen))
            widths[-1] += end - begin
        return at

    for number, members in enumerate(groups.values(), 1):
        p = prompts[members[0]]
        rest: int | None = None
        for b in members:
            needed = lengths[b] - 1 - p + (p - common if rest is None else 0)
            if not widths or widths[-1] + needed > limit:
                widths.append(0)
                append(b, 0, common, 0, -1, (0, 0))
                rest = None
            if rest is None:
                rest = append(b, common, p, number, -1, (0, 0))
            at = append(b, p, lengths[b] - 1, len(groups) + 1 + b, number, (rest, rest + p - common))
            row_of[b] = len(widths) - 1
            column[b, :common] = np.arange(common)
            column[b, common:p] = np.arange(rest, rest + p - common)
            column[b, p:lengths[b] - 1] = np.arange(at, at + lengths[b] - 1 - p)
    width = -(-max(widths) // multiple) * multiple
    token, position = np.zeros((2, len(widths), width), dtype=np.int64)
    own, parent_of = np.full((2, len(widths), width), -1, dtype=np.int32)
    for row, at, b, begin, end, segment, parent in pieces:
        where = slice(at, at + end - begin)
        token[row, where], position[row, where] = ids[b, begin:end], np.arange(begin, end)
        own[row, where], parent_of[row, where] = segment, parent
    return SharedLayout(*map(torch.from_numpy, (token, position, own, parent_of, row_of * width + column)), spans)


def block_mask(layout: SharedLayout, device: torch.device) -> BlockMask:
    """Flex attention's form of `layout.mask` for a layout of one row, whose length is a multiple of BLOCK.

    What create_block_mask finds by trying all S x S pairs follows from the segments' ends: tiles of BLOCK x BLOCK are
    seen wholly, in part, or not at all, and the last are never computed.
    """
    width = layout.tokens.shape[1]
    count = width // BLOCK
    spans = np.array([span[1:] for span in layout.spans] + [(int((layout.own >= 0).sum()), width, 0, 0)])
    spans = spans[spans[:, 1] > spans[:, 0]]  # (N, 4): begin, end, the parent's begin and end
    first, last = spans[:, 0] // BLOCK, (spans[:, 1] - 1) // BLOCK
    part = np.repeat(np.arange(len(spans)), last - first + 1)  # a part: the queries of one segment in one tile row
    tile_row = np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last)])
    begin, end, parent_begin, parent_end = spans[part].T
    common = int((layout.own == 0).sum())
    common = np.where((begin == 0) & (common > 0), 0, common)  # the common beginning sees itself as its own segment
    edges = np.arange(count + 1) * BLOCK

    def seen(query: np.ndarray) -> np.ndarray:
        """(parts, tiles): how many keys of each tile the part's query at this column sees."""
        total = np.zeros((len(part), count), dtype=np.int64)
        for a, b in ((0 * common, common), (parent_begin, parent_end), (begin, query + 1)):
            total += (np.minimum(b[:, None], edges[1:]) - np.maximum(a[:, None], edges[:-1])).clip(min=0)
        return total

    starts = np.searchsorted(tile_row, np.arange(count))  # parts are in the order of their rows of tiles
    some = np.maximum.reduceat(seen(np.minimum(end, (tile_row + 1) * BLOCK) - 1), starts) > 0
    whole = np.minimum.reduceat(seen(np.maximum(begin, tile_row * BLOCK)), starts) == BLOCK
    tiles = []
    for chosen in (some & ~whole, whole, (some & ~whole).T, whole.T):  # by rows for keys, by columns for queries
        order = np.argsort(~chosen, axis=-1, kind="stable")
        tiles += [torch.from_numpy(x.astype(np.int32))[None, None].to(device) for x in (chosen.sum(-1), order)]
    own, parent = layout.own[0].to(device), layout.parent[0].to(device)

    def visible(b, h, query, key):
        other = own[key]
        return (query >= key) & ((other == 0) | (other == own[query]) | (other == parent[query]))

    return BlockMask((width, width), *tiles, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


@dataclass
class Packed:
    """Sequences ready for one forward pass, in whatever layout, on the model's device."""

    inputs: dict  # of the decoder: input_ids (R, S), position_ids, and what describes the attention
    states: Tensor  # (M,) int64: which of the R * S states predicts each wanted token
    targets: Tensor  # (M,) int64: those tokens
    entries: Tensor  # (2, M) int64: their places in (B, T)
    shape: tuple[int, int]  # (B, T)
    computed: int  # tokens that go through the decoder, padding left out


def compute_place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where and in what dtype the model computes; its parameters may rest elsewhere (distributed.shard_model)."""
    weight = model.get_input_embeddings().weight
    return getattr(model, "compute_place", (weight.device, weight.dtype))


def choose_layout(model: nn.Module, lengths: list[int], shared: int) -> str:
    """How to lay out sequences of these lengths, of which `shared` tokens remain when common prompts are laid out once.

    `dense` (sdpa with a dense mask): on the CPU, and for heads that flex attention does not take.  On a GPU `shared`
    (flex attention) where laying prompts out once saves at least 1 - 1/SHARING_PAYS of the tokens
    (bench/results/layout_3b.json), or the dtype is float32; else `whole` (flash attention of variable length).
    """
    device, dtype = compute_place(model)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type != "cuda" or config._attn_implementation != "packed" or head < 16:
        return "dense"
    half = dtype in (torch.bfloat16, torch.float16)
    return "whole" if half and sum(lengths) < SHARING_PAYS * shared else "shared"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch's own operations, in this Python thread.

    Batches are laid out with many operations on small tensors, which torch would share out among all cores.  On a host
    of 32 with other work that took 0.45 s of a step, most likely in waits for the slowest core
    (bench/results/layout_profile.txt).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def pack(model: nn.Module, tokens: Tensor, attention_mask: Tensor, positions: Tensor | None,
         groups: tuple[Tensor, Tensor] | None, layout: str | None = None) -> Packed:
    """Arguments as of `token_logprobs`; tensors on the CPU cost no wait for the device; `layout` as choose_layout's."""
    device, _ = compute_place(model)
    keep = (torch.ones_like(tokens[:, 1:]) if positions is None else positions).bool()
    targets, entries = tokens[:, 1:][keep], keep.nonzero().t()
    inputs, computed = {"input_ids": tokens[:, :-1]}, int(attention_mask[:, 1:].sum())
    source = torch.arange(keep.numel(), device=keep.device).view_as(keep)
    if groups is not None:
        whole = [n - 1 for n in attention_mask.sum(-1).tolist()]
        layout = layout or choose_layout(model, whole, unique_tokens(attention_mask, *groups))
        if layout == "whole":
            inputs, source = _whole_sequences(tokens, whole)
        else:
            one_row = layout == "shared"
            shared = share_prefixes(tokens, attention_mask, *groups, *((1 << 60, ROW_MULTIPLE) if one_row else ()))
            inputs = {"input_ids": shared.tokens, "position_ids": shared.position_ids,
                      "attention_mask": block_mask(shared, device) if one_row else shared.mask}
            source, computed = shared.source, int((shared.own >= 0).sum())
    elif not bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all()):  # padding on the left; on the right the
        mask = attention_mask[:, :-1]                                        # causal mask hides it: fast kernels
        inputs |= {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    states = source.to(keep.device)[keep]
    return Packed(inputs, *(x.to(device) for x in (states, targets, entries)), tuple(keep.shape), computed)


def unique_tokens(attention_mask: Tensor, prompt_lengths: Tensor, group_ids: Tensor) -> int:
    """Tokens of the sequences when the prompt of a group counts once (their common beginning still counts for each)."""
    prompts = dict(zip(group_ids.tolist(), prompt_lengths.tolist()))
    return int((attention_mask.sum(-1) - 1 - prompt_lengths).sum()) + sum(prompts.values())


def _whole_sequences(tokens: Tensor, lengths: list[int]) -> tuple[dict, Tensor]:
    """All sequences, less their last tokens, behind each other in one row: decoder inputs, and SharedLayout.source."""
    ends = np.cumsum([0, *lengths])
    padded = -(-int(ends[-1]) // ROW_MULTIPLE) * ROW_MULTIPLE
    cuts = ends if padded == ends[-1] else np.append(ends, padded)  # what fills the row up is a sequence of its own
    token, position = torch.zeros(2, 1, padded, dtype=torch.int64)
    source = torch.zeros(len(lengths), tokens.shape[1] - 1, dtype=torch.int64)
    for b, (n, at) in enumerate(zip(lengths, ends.tolist())):
        token[0, at:at + n], position[0, at:at + n] = tokens[b, :n], torch.arange(n)
        source[b, :n] = torch.arange(at, at + n)
    inputs = {"input_ids": token, "position_ids": position, "cu_seq_lens_q": torch.from_numpy(cuts.astype(np.int32)),
              "max_length_q": int(np.diff(cuts).max()),
              "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}  # 4-D: transformers then makes none
    return inputs, source


def _logprobs_forward(model: nn.Module, packed: Packed, temperature: float, extra: str) -> tuple[Tensor, Tensor]:
    """The computation behind `packed_logprobs`: log-probabilities (B, T) and what `extra` asks for, (B, T)."""
    states = model.base_model(**packed.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    empty = torch.zeros(packed.shape, device=states.device)
    if not len(packed.targets):  # nothing to predict: keep the graph, so that every rank has a backward pass to run
        return empty + 0.0 * states.sum(), empty
    rows = states.index_select(0, packed.states)  # (M, D)
    head, chunk = model.get_output_embeddings(), _chunk_logprobs
    if getattr(model, "compiled_layers", False):
        chunk = _compiled_chunk()
    parts = []
    size = -(-len(rows) // -(-len(rows) // CHUNK_TOKENS))  # chunks of equal size
    for h, t in zip(rows.split(size), packed.targets.split(size)):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, head, h, t, temperature, extra, use_reentrant=False,
                                    preserve_rng_state=False))
        else:
            parts.append(chunk(head, h, t, temperature, extra))
    return tuple(empty.index_put(packed.entries.unbind(), torch.cat(p)) for p in zip(*parts))


@functools.cache
def _compiled_chunk():
    return torch.compile(_chunk_logprobs)


def packed_logprobs(model: nn.Module, packed: Packed, temperature: float = 1.0,
                    extra: str = "") -> Tensor | tuple[Tensor, Tensor]:
    """`token_logprobs` of sequences that are packed already: (B, T), zero where nothing was wanted.

    With `extra` also, (B, T), the `entropy` of the same distributions, or `top`: 1 for the most probable token.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: log-probabilities need one above 0 (greedy sampling has none)")
    forward = getattr(model, "logprobs_forward", None) or functools.partial(_logprobs_forward, model)
    logprobs, extras = forward(packed, temperature, extra)
    return (logprobs, extras) if extra else logprobs


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
    packed = pack(model, tokens, attention_mask, positions, groups)
    return packed_logprobs(model, packed, temperature, "entropy" if with_entropy else "")
