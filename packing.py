"""Token log-probabilities of packed sequences: no padding, shared prompts computed once.

Needs only torch, numpy and transformers.

Shapes: B sequences, T predicted positions, D hidden size, V vocabulary, R rows of S tokens in a
layout, M requested tokens, H query heads, K key/value heads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCK = 128  # tokens of a tile of flex attention
ROW_MULTIPLE = 128  # GPU rows are padded to a multiple; a multiple of BLOCK
KEY_HEADS = 16  # key/value heads are repeated to at least this number for flex attention
SHARING_PAYS = 1.06  # factor of saved tokens from which flex beats flash attention
CHUNK_TOKENS = 2048  # per chunk of logits: 2048 x 152k x 4 bytes = 1.2 GB
RECOMPILES = 32  # per function: for layouts, dtypes, with and without gradient
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # 4-D, so that transformers makes none
ACTIVATIONS = 0.99  # share that compiled layers keep for backward


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    segments: list[Segment] | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention: query (R, H, S, D), key, value (R, K, S, D) → (R, S, H, D).

    A BlockMask (`prefix_shared`) means flex attention, `cu_seq_lens_q` (`varlen`) flash attention,
    `segments` one sdpa each; else sdpa, with the mask or causal.
    """
    if segments is not None:
        return _attend_segments(query, key, value, segments, scaling).transpose(1, 2), None
    if isinstance(attention_mask, BlockMask):
        cpu = query.device.type == "cpu"
        # In flex attention's backward pass one program handles a tile of keys and all its queries:
        # with few key heads a long prompt keeps few programs busy.
        copies = key_copies(query.shape[1], key.shape[1])
        if copies > 1:
            key, value = (
                x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for x in (key, value)
            )
        plain = cpu or torch.compiler.is_compiling()
        flex = flex_attention if plain else _compiled(flex_attention)
        options = {"enable_gqa": True, "kernel_options": None if cpu else FLEX_OPTIONS}
        out = flex(query, key, value, block_mask=attention_mask, scale=scaling, **options)
        return out.transpose(1, 2), None
    if cu_seq_lens_q is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        out = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=(-1, 0), **_VARLEN_GQA)
        return out[None], None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


@torch.compiler.disable  # each batch has other segments
def _attend_segments(
    query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], scale: float | None
) -> Tensor:
    """query (1, H, S, D), key, value (1, K, S, D) → (1, H, S, D), by segment: most of an S x S
    product would be masked."""
    sizes = [s.end - s.begin for s in segments]
    queries, *stored = (x.split(sizes, dim=2) for x in (query, key, value))
    place = {s.number: i for i, s in enumerate(segments)}
    out = []
    for s, q in zip(segments, queries):
        numbers = dict.fromkeys([0, s.prompt.number if s.prompt else 0, s.number])
        k, v = (torch.cat([parts[place[n]] for n in numbers], dim=2) for parts in stored)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask.tril_(k.shape[2] - q.shape[2])
        out.append(
            scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        )
    return torch.cat(out, dim=2)


def key_copies(heads: int, key_heads: int) -> int:
    """How often to repeat key/value heads: to at least KEY_HEADS, at most `heads`."""
    shared = heads // key_heads
    for n in range(1, shared):  # a form that torch.compile can trace
        if shared % n == 0 and n * key_heads >= KEY_HEADS:
            return n
    return shared


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # for 2-D masks only
FLEX_OPTIONS = {"IS_DIVISIBLE": True}  # `pack` pads to BLOCK

_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch > 2.11 asks for it
_VARLEN_GQA = {"enable_gqa": True} if _GQA else {}


def compile_function(function: Callable, dynamic: bool | None = None) -> Callable:
    """torch.compile with this file's settings in every calling thread: from torch 2.12 on they are
    per thread, and the backward pass compiles in another one."""
    compiled = torch.compile(function, dynamic=dynamic)

    def call(*args, **kwargs):
        dynamo, functorch = torch._dynamo.config, torch._functorch.config
        if dynamo.recompile_limit < RECOMPILES:
            dynamo.recompile_limit = RECOMPILES
        if functorch.activation_memory_budget != ACTIVATIONS:
            functorch.activation_memory_budget = ACTIVATIONS
        return compiled(*args, **kwargs)

    return call


_compiled = functools.cache(compile_function)


class Segment(NamedTuple):
    """tokens[b, begin:end], at `column` of a layout's row."""

    column: int
    b: int
    begin: int
    end: int
    number: int
    prompt: Segment | None = None  # of a response: its prompt's segment

    @property
    def columns(self) -> tuple[int, int]:
        return self.column, self.column + self.end - self.begin


@dataclass
class SharedLayout:
    """Sequences in one row that holds shared prompts once; tensors are on the CPU.

    Its segments are the common beginning of all prompts, then for each prompt its rest and its
    responses. A token attends to its own segment, its prompt's and the common beginning.
    """

    tokens: Tensor  # (1, S) int64
    position_ids: Tensor  # (1, S) int64: position in the sequence
    segment_ids: Tensor  # (1, S) int32: 0 is the common beginning, -1 padding
    prompt_segment: Tensor  # (1, S) int32: segment of a response token's prompt; else -1
    state_index: Tensor  # (B, T) int64: column that predicts tokens[b, t+1]
    segments: list[Segment]  # in the order of the row


def share_prefixes(
    tokens: Tensor,
    attention_mask: Tensor,
    prompt_lengths: Tensor,
    group_ids: Tensor,
    multiple: int = 1,
) -> SharedLayout:
    """Lay out right-padded tokens (B, T+1); sequences of equal group_ids (B,) share a prompt.

    attention_mask (B, T+1), prompt_lengths (B,). The row is padded to a multiple of `multiple`; the
    last token of each sequence, which predicts nothing, is left out.
    """
    ids, prompts = tokens.cpu().numpy(), prompt_lengths.tolist()
    lengths = (attention_mask.sum(-1) - 1).tolist()
    groups: dict[int, list[int]] = {}
    for b, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(b)
    firsts = [ids[b, : prompts[b]].tolist() for b, *_ in groups.values()]
    common = len(os.path.commonprefix(firsts))
    segments: list[Segment] = []
    sequences: dict[int, tuple[Segment, ...]] = {}

    def append(*fields) -> Segment:
        segments.append(Segment(segments[-1].columns[1] if segments else 0, *fields))
        return segments[-1]

    start = append(0, 0, common, 0)
    for number, members in enumerate(groups.values(), 1):
        p = prompts[members[0]]
        prompt = append(members[0], common, p, number)
        for b in members:
            response = append(b, p, max(p, lengths[b]), len(groups) + 1 + b, prompt)
            sequences[b] = start, prompt, response
    width = -(-segments[-1].columns[1] // multiple) * multiple
    token, position = np.zeros((2, 1, width), dtype=np.int64)
    segment_ids, prompt_segment = np.full((2, 1, width), -1, dtype=np.int32)
    for s in segments:
        at = 0, slice(*s.columns)
        token[at], position[at] = ids[s.b, s.begin : s.end], np.arange(s.begin, s.end)
        segment_ids[at], prompt_segment[at] = s.number, s.prompt.number if s.prompt else -1
    state_index = np.zeros((len(ids), ids.shape[1] - 1), dtype=np.int64)
    for b, parts in sequences.items():
        for s in parts:
            state_index[b, s.begin : s.end] = np.arange(*s.columns)
    arrays = (token, position, segment_ids, prompt_segment, state_index)
    return SharedLayout(*map(torch.from_numpy, arrays), segments)


def block_mask(layout: SharedLayout, device: torch.device) -> BlockMask:
    """Flex attention's mask of a layout whose length is a multiple of BLOCK: computed from the ends
    of segments, not from all S x S pairs as by create_block_mask."""
    width = layout.tokens.shape[1]
    count, filled = width // BLOCK, int((layout.segment_ids >= 0).sum())
    ends = [(*s.columns, *(s.prompt.columns if s.prompt else (0, 0))) for s in layout.segments]
    # (N, 4): begin, end, and the prompt's
    ends = np.array([e for e in [*ends, (filled, width, 0, 0)] if e[1] > e[0]])
    first, last = ends[:, 0] // BLOCK, (ends[:, 1] - 1) // BLOCK
    part = np.repeat(np.arange(len(ends)), last - first + 1)  # a segment's part in a row of tiles
    tile_row = np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last)])
    begin, end, prompt_begin, prompt_end = ends[part].T
    common = int((layout.segment_ids == 0).sum())
    common = np.where((begin == 0) & (common > 0), 0, common)  # already its own segment
    edges = np.arange(count + 1) * BLOCK

    def seen(query: np.ndarray) -> np.ndarray:
        """(parts, tiles): how many keys of each tile each part's query at this column sees."""
        total = np.zeros((len(part), count), dtype=np.int64)
        for a, b in ((0 * common, common), (prompt_begin, prompt_end), (begin, query + 1)):
            keys = np.minimum(b[:, None], edges[1:]) - np.maximum(a[:, None], edges[:-1])
            total += keys.clip(min=0)
        return total

    starts = np.searchsorted(tile_row, np.arange(count))  # tile_row is sorted
    some = np.maximum.reduceat(seen(np.minimum(end, (tile_row + 1) * BLOCK) - 1), starts) > 0
    whole = np.minimum.reduceat(seen(np.maximum(begin, tile_row * BLOCK)), starts) == BLOCK
    tiles = []
    # by rows for keys, by columns for queries
    for chosen in (some & ~whole, whole, (some & ~whole).T, whole.T):
        order = np.argsort(~chosen, axis=-1, kind="stable")
        for x in (chosen.sum(-1), order):
            tiles.append(torch.from_numpy(x.astype(np.int32))[None, None].to(device))
    ids, prompts = layout.segment_ids[0].to(device), layout.prompt_segment[0].to(device)

    def visible(b, h, query, key):
        own = (ids[key] == 0) | (ids[key] == ids[query]) | (ids[key] == prompts[query])
        return (query >= key) & own

    return BlockMask((width, width), *tiles, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


@dataclass
class Packed:
    """Sequences laid out for one forward pass, on the model's device."""

    inputs: dict  # of the decoder: input_ids (R, S), position_ids, arguments of the attention
    state_index: Tensor  # (M,) int64: which of the R * S states predicts each requested token
    targets: Tensor  # (M,) int64: those tokens
    entries: Tensor  # (2, M) int64: their rows and columns in (B, T)
    shape: tuple[int, int]  # (B, T)
    computed: int  # tokens through the decoder, without padding


def computes_on(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of the model's computation; shards may be stored in others."""
    weight = model.get_input_embeddings().weight
    return getattr(model, "computes_on", (weight.device, weight.dtype))


def choose_layout(model: nn.Module, lengths: list[int], shared: int) -> str:
    """The layout for sequences of these lengths, `shared` tokens in all if prompts are shared.

    `padded`: without this file's attention. `segments` (one sdpa each): on the CPU, and for head
    sizes below 16. Else `prefix_shared` (flex attention) if it saves enough tokens (SHARING_PAYS,
    bench/results/layout_3b.json) or in float32; else `varlen` (flash attention).
    """
    device, dtype = computes_on(model)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config._attn_implementation != "packed":
        return "padded"
    if device.type != "cuda" or head < 16:
        return "segments"
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if half and sum(lengths) < SHARING_PAYS * shared else "prefix_shared"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread, which is faster for small tensors (bench/results/layout_profile.txt)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def pack(
    model: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    positions: Tensor | None,
    groups: tuple[Tensor, Tensor] | None,
    layout: str | None = None,
) -> Packed:
    """Lay out the arguments of `token_logprobs`, by default as choose_layout says."""
    device, _ = computes_on(model)
    keep = (torch.ones_like(tokens[:, 1:]) if positions is None else positions).bool()
    targets, entries = tokens[:, 1:][keep], keep.nonzero().t()
    inputs, computed = {"input_ids": tokens[:, :-1]}, int(attention_mask[:, 1:].sum())
    state_index = torch.arange(keep.numel(), device=keep.device).view_as(keep)
    if groups is not None:
        lengths = [n - 1 for n in attention_mask.sum(-1).tolist()]
        layout = layout or choose_layout(model, lengths, unique_tokens(attention_mask, *groups))
    if layout == "varlen":
        inputs, state_index = _varlen(tokens, lengths)
    elif layout in ("prefix_shared", "segments"):
        flex = layout == "prefix_shared"
        multiple = ROW_MULTIPLE if flex else 1
        shared = share_prefixes(tokens, attention_mask, *groups, multiple)
        inputs = {"input_ids": shared.tokens, "position_ids": shared.position_ids}
        if flex:
            inputs["attention_mask"] = block_mask(shared, device)
        else:
            inputs |= {"segments": shared.segments, "attention_mask": NO_MASK}
        state_index, computed = shared.state_index, int((shared.segment_ids >= 0).sum())
    elif not bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all()):
        # only padding on the left needs a mask; without one kernels are faster
        inputs["attention_mask"] = mask = attention_mask[:, :-1]
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wanted = (x.to(device) for x in (state_index.to(keep.device)[keep], targets, entries))
    return Packed(inputs, *wanted, tuple(keep.shape), computed)


def unique_tokens(attention_mask: Tensor, prompt_lengths: Tensor, group_ids: Tensor) -> int:
    """Input tokens if each group's prompt counts once: attention_mask (B, T+1), the others (B,)."""
    prompts = dict(zip(group_ids.tolist(), prompt_lengths.tolist()))
    return int((attention_mask.sum(-1) - 1 - prompt_lengths).sum()) + sum(prompts.values())


def _varlen(tokens: Tensor, lengths: list[int]) -> tuple[dict, Tensor]:
    """tokens (B, T+1), each last one dropped, in one row → (decoder inputs, state_index (B, T))."""
    real = torch.arange(tokens.shape[1] - 1) < torch.tensor(lengths)[:, None]  # (B, T)
    total = sum(lengths)
    padding = -total % ROW_MULTIPLE  # one more sequence
    cuts = np.cumsum([0, *lengths] + [padding] * bool(padding))
    position = torch.arange(real.shape[1]).expand_as(real)
    rows = (
        nn.functional.pad(x[real], (0, padding))[None] for x in (tokens[:, :-1].cpu(), position)
    )
    inputs = dict(zip(("input_ids", "position_ids"), rows)) | {
        "cu_seq_lens_q": torch.from_numpy(cuts.astype(np.int32)),
        "max_length_q": int(np.diff(cuts).max()),
        "attention_mask": NO_MASK,
    }
    state_index = torch.zeros(real.shape, dtype=torch.int64)
    state_index[real] = torch.arange(total)
    return inputs, state_index


def _chunk_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, extra: str
) -> tuple[Tensor, Tensor]:
    """States (M, D), targets (M,) → log-probabilities (M,) and (M,) `extra` (else zeros)."""
    logits = head(hidden).float() / temperature  # (M, V)
    normaliser = logits.logsumexp(-1)
    if torch.compiler.is_compiling():  # a gather's backward is another (M, V) tensor
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


def _logprobs_forward(
    model: nn.Module, packed: Packed, temperature: float, extra: str
) -> tuple[Tensor, Tensor]:
    """The computation of `packed_logprobs`: (B, T) log-probabilities and `extra`."""
    states = model.base_model(**packed.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    empty = torch.zeros(packed.shape, device=states.device)
    head = model.get_output_embeddings()
    if not len(packed.targets):  # each rank's backward must reach all weights
        return empty + 0.0 * head(states[:1]).float().sum(), empty
    compiled = getattr(model, "compiled_layers", False)
    chunk = _compiled(_chunk_logprobs) if compiled else _chunk_logprobs
    rows = states.index_select(0, packed.state_index)  # (M, D)
    size = -(-len(rows) // -(-len(rows) // CHUNK_TOKENS))  # chunks of equal size
    if torch.is_grad_enabled() and size < len(rows):  # recompute each chunk's logits
        options = {"use_reentrant": False, "preserve_rng_state": False}
        chunk = functools.partial(checkpoint, chunk, **options)
    chunks = zip(rows.split(size), packed.targets.split(size))
    parts = [chunk(head, h, t, temperature, extra) for h, t in chunks]
    return tuple(empty.index_put(packed.entries.unbind(), torch.cat(p)) for p in zip(*parts))


def packed_logprobs(
    model: nn.Module, packed: Packed, temperature: float = 1.0, extra: str = ""
) -> Tensor | tuple[Tensor, Tensor]:
    """`token_logprobs` of packed sequences: (B, T), zero where not requested.

    `extra` adds another (B, T): `entropy` in nats, or `top`, 1 where the token is the argmax.
    ValueError if temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: log-probabilities need one above 0")
    own = functools.partial(_logprobs_forward, model)
    logprobs, extras = getattr(model, "logprobs_forward", own)(packed, temperature, extra)
    return (logprobs, extras) if extra else logprobs


def token_logprobs(
    model: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    temperature: float = 1.0,
    positions: Tensor | None = None,
    with_entropy: bool = False,
    groups: tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of every next token under softmax(logits / temperature).

    tokens (B, T+1) int64, attention_mask (B, T+1) with 1 for real tokens, padded on either side.
    Returns (B, T) float32: entry t is log p(tokens[t+1] | tokens[..t]); entries that predict
    padding are finite but meaningless. `positions` (B, T) bool: entries to compute (others are 0).
    `with_entropy` also returns the entropy (B, T) in nats. `groups` = (prompt_lengths (B,),
    group_ids (B,)), for right padding: the prompt of a group is computed once, as is the common
    beginning of all prompts.
    """
    packed = pack(model, tokens, attention_mask, positions, groups)
    return packed_logprobs(model, packed, temperature, "entropy" if with_entropy else "")
