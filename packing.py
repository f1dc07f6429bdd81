"""Token log-probabilities of packed sequences: no padding, shared prompts computed once.

A leaf: needs torch, numpy and transformers alone.

Shapes: B sequences, T predicted positions, D hidden size, V vocabulary; R rows of S tokens, as they
are laid out; M wanted tokens; H query heads, K key/value heads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ROW_TOKENS = 2048  # in one row of share_prefixes: bounds its attention mask
BLOCK = 128  # tokens of a tile of flex attention
ROW_MULTIPLE = 128  # rows on a GPU are padded to a multiple of it, itself one of BLOCK
KEY_HEADS = 16  # flex attention gets keys and values of so many heads, repeated if there are fewer
SHARING_PAYS = (
    1.06  # factor in tokens saved from which flex attention is as fast as flash attention
)
CHUNK_TOKENS = 2048  # tokens whose logits exist at the same time: 2048 x 152k x 4 bytes = 1.2 GB
RECOMPILES = 32  # of one function: layouts, two dtypes, with and without gradient
ACTIVATIONS = (
    0.99  # share that compiled layers keep for the backward pass; the rest is cheap to redo
)


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
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface by layout: query (R, H, S, D), key and value (R, K, S, D) →
    (R, S, H, D).

    A BlockMask (`prefix_shared`): flex attention; `cu_seq_lens_q` (`varlen`): flash attention of
    variable length; else sdpa, with the mask or causal.
    """
    if isinstance(attention_mask, BlockMask):
        cpu = query.device.type == "cpu"
        # A program of flex attention's backward pass takes a tile of keys through all queries of
        # all heads that share it: with few heads the prompt's tiles run on when the card is idle.
        copies = key_copies(query.shape[1], key.shape[1])
        if copies > 1:
            key, value = (
                x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for x in (key, value)
            )
        plain = cpu or torch.compiler.is_compiling()
        flex = flex_attention if plain else _compiled(flex_attention)
        out = flex(
            query,
            key,
            value,
            block_mask=attention_mask,
            scale=scaling,
            enable_gqa=True,
            kernel_options=None if cpu else FLEX_OPTIONS,
        )
        return out.transpose(1, 2), None
    if cu_seq_lens_q is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (S, H, D) and (S, K, D)
        out = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1, 0),
            **_VARLEN_GQA,
        )
        return out[None], None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


def key_copies(heads: int, key_heads: int) -> int:
    """How often each key/value head is repeated to have KEY_HEADS of them, or one for each query
    head.
    """
    shared = heads // key_heads
    for n in range(1, shared):
        if shared % n == 0 and n * key_heads >= KEY_HEADS:
            return n
    return shared


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # 2-D masks; 4-D ones are not touched
FLEX_OPTIONS = {"IS_DIVISIBLE": True}  # `pack` pads to BLOCK
_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch > 2.11 asks for it
_VARLEN_GQA = {"enable_gqa": True} if _GQA else {}


def compile_function(function: Callable, dynamic: bool | None = None) -> Callable:
    """`function` through torch.compile, with this file's settings in whatever thread calls it.

    From torch 2.12 on settings hold in the thread that makes them alone, and what is recomputed for
    the backward pass is compiled in another thread.
    """
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


@dataclass
class SharedLayout:
    """Sequences whose common prompts are computed once, on the CPU.

    A row is the beginning that all its prompts share, then, prompt by prompt, the rest of the
    prompt and its responses: segments, of which a token sees its own, the prompt's and the common
    beginning.
    """

    tokens: Tensor  # (R, S) int64
    position_ids: Tensor  # (R, S) int64: place in the sequence, not in the row
    segment_ids: Tensor  # (R, S) int32: 0 is the common beginning, -1 padding
    prompt_segment: Tensor  # (R, S) int32: segment of the prompt, of a response's token; else -1
    state_index: Tensor  # (B, T) int64: which of the R * S states predicts tokens[b, t+1]
    segments: list[tuple[int, int, int, int, int]]  # row, begin, end, begin and end of its prompt

    @property
    def mask(self) -> Tensor:
        """(R, 1, S, S) bool: causal, and a token sees its own sequence, never another one's."""
        key, query, prompt = (
            self.segment_ids[:, None],
            self.segment_ids[:, :, None],
            self.prompt_segment[:, :, None],
        )
        return ((key == 0) | (key == query) | (key == prompt)).tril_()[:, None]


def common_beginning(prompts: list[np.ndarray]) -> int:
    """How many tokens all the prompts begin with."""
    common = min(map(len, prompts))
    for prompt in prompts:
        differs = np.flatnonzero(prompt[:common] != prompts[0][:common])
        common = int(differs[0]) if len(differs) else common
    return common


def share_prefixes(
    tokens: Tensor,
    attention_mask: Tensor,
    prompt_lengths: Tensor,
    group_ids: Tensor,
    row_tokens: int | None = None,
    multiple: int = 1,
) -> SharedLayout:
    """Lay out right-padded tokens (B, T+1); those of equal group_ids (B,) have one prompt,
    prompt_lengths (B,) long.

    attention_mask (B, T+1). A row holds up to `row_tokens` (default ROW_TOKENS; at least one
    sequence) and is padded to a multiple of `multiple`. The last token of a sequence is nobody's
    input and is left out.
    """
    limit = ROW_TOKENS if row_tokens is None else row_tokens
    ids, lengths, prompts = (
        tokens.cpu().numpy(),
        attention_mask.sum(-1).tolist(),
        prompt_lengths.tolist(),
    )
    groups: dict[int, list[int]] = {}
    for b, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(b)
    common = common_beginning(
        [ids[members[0], : prompts[members[0]]] for members in groups.values()]
    )
    widths: list[int] = []
    pieces: list[
        tuple[int, int, int, int, int, int, int]
    ] = []  # row, column, b, begin, end, segment, prompt
    segments: list[tuple[int, int, int, int, int]] = []
    column = np.zeros((len(ids), ids.shape[1] - 1), dtype=np.int64)
    row_of = np.zeros((len(ids), 1), dtype=np.int64)

    def append(
        b: int, begin: int, end: int, segment: int, prompt: int, seen: tuple[int, int]
    ) -> int:
        """Put tokens[b, begin:end] behind what the last row has; returns the column."""
        at = widths[-1]
        if end > begin:
            pieces.append((len(widths) - 1, at, b, begin, end, segment, prompt))
            segments.append((len(widths) - 1, at, at + end - begin, *seen))
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
            at = append(
                b, p, lengths[b] - 1, len(groups) + 1 + b, number, (rest, rest + p - common)
            )
            row_of[b] = len(widths) - 1
            column[b, :common] = np.arange(common)
            column[b, common:p] = np.arange(rest, rest + p - common)
            column[b, p : lengths[b] - 1] = np.arange(at, at + lengths[b] - 1 - p)
    width = -(-max(widths) // multiple) * multiple
    token, position = np.zeros((2, len(widths), width), dtype=np.int64)
    segment_ids, prompt_segment = np.full((2, len(widths), width), -1, dtype=np.int32)
    for row, at, b, begin, end, segment, prompt in pieces:
        columns = slice(at, at + end - begin)
        token[row, columns], position[row, columns] = ids[b, begin:end], np.arange(begin, end)
        segment_ids[row, columns], prompt_segment[row, columns] = segment, prompt
    arrays = (token, position, segment_ids, prompt_segment, row_of * width + column)
    return SharedLayout(*map(torch.from_numpy, arrays), segments)


def block_mask(layout: SharedLayout, device: torch.device) -> BlockMask:
    """Flex attention's form of `layout.mask` for a layout of one row, whose length is a multiple of
    BLOCK.

    What create_block_mask finds by trying all S x S pairs follows from the segments' ends: tiles of
    BLOCK x BLOCK are seen wholly, in part, or not at all, and the last are never computed.
    """
    width = layout.tokens.shape[1]
    count, filled = width // BLOCK, int((layout.segment_ids >= 0).sum())
    segments = np.array([segment[1:] for segment in layout.segments] + [(filled, width, 0, 0)])
    segments = segments[
        segments[:, 1] > segments[:, 0]
    ]  # (N, 4): begin, end, the prompt's begin and end
    first, last = segments[:, 0] // BLOCK, (segments[:, 1] - 1) // BLOCK
    part = np.repeat(
        np.arange(len(segments)), last - first + 1
    )  # queries of one segment in one tile row
    tile_row = np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last)])
    begin, end, prompt_begin, prompt_end = segments[part].T
    common = int((layout.segment_ids == 0).sum())
    common = np.where((begin == 0) & (common > 0), 0, common)  # it sees itself as its own segment
    edges = np.arange(count + 1) * BLOCK

    def seen(query: np.ndarray) -> np.ndarray:
        """(parts, tiles): how many keys of each tile the part's query at this column sees."""
        total = np.zeros((len(part), count), dtype=np.int64)
        for a, b in ((0 * common, common), (prompt_begin, prompt_end), (begin, query + 1)):
            total += (np.minimum(b[:, None], edges[1:]) - np.maximum(a[:, None], edges[:-1])).clip(
                min=0
            )
        return total

    starts = np.searchsorted(
        tile_row, np.arange(count)
    )  # parts are in the order of their rows of tiles
    some = np.maximum.reduceat(seen(np.minimum(end, (tile_row + 1) * BLOCK) - 1), starts) > 0
    whole = np.minimum.reduceat(seen(np.maximum(begin, tile_row * BLOCK)), starts) == BLOCK
    tiles = []
    for chosen in (
        some & ~whole,
        whole,
        (some & ~whole).T,
        whole.T,
    ):  # by rows for keys, by columns for queries
        order = np.argsort(~chosen, axis=-1, kind="stable")
        tiles += [
            torch.from_numpy(x.astype(np.int32))[None, None].to(device)
            for x in (chosen.sum(-1), order)
        ]
    ids, prompts = layout.segment_ids[0].to(device), layout.prompt_segment[0].to(device)

    def visible(b, h, query, key):
        return (query >= key) & (
            (ids[key] == 0) | (ids[key] == ids[query]) | (ids[key] == prompts[query])
        )

    return BlockMask((width, width), *tiles, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


@dataclass
class Packed:
    """Sequences ready for one forward pass, in whatever layout, on the model's device."""

    inputs: dict  # of the decoder: input_ids (R, S), position_ids, and what describes the attention
    state_index: Tensor  # (M,) int64: which of the R * S states predicts each wanted token
    targets: Tensor  # (M,) int64: those tokens
    entries: Tensor  # (2, M) int64: their rows and columns in (B, T)
    shape: tuple[int, int]  # (B, T)
    computed: int  # tokens that go through the decoder, padding left out


def computes_on(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that the model computes in; sharded parameters may rest in others."""
    weight = model.get_input_embeddings().weight
    return getattr(model, "computes_on", (weight.device, weight.dtype))


def choose_layout(model: nn.Module, lengths: list[int], shared: int) -> str:
    """How to lay out sequences of these lengths, of which `shared` tokens remain when common
    prompts are laid out once.

    `padded` (sdpa with a dense mask): on the CPU, and for heads that flex attention does not take.
    On a GPU `prefix_shared` (flex attention) where laying prompts out once saves at least 1 -
    1/SHARING_PAYS of the tokens (bench/results/layout_3b.json), or the dtype is float32; else
    `varlen` (flash attention of variable length).
    """
    device, dtype = computes_on(model)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type != "cuda" or config._attn_implementation != "packed" or head < 16:
        return "padded"
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if half and sum(lengths) < SHARING_PAYS * shared else "prefix_shared"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread for torch's own operations, in this Python thread.

    Laying out a batch takes many operations on small tensors; shared out among 32 cores of a busy
    host they took 0.45 s of a step (bench/results/layout_profile.txt).
    """
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
    """Lay out what `token_logprobs` takes (tensors best on the CPU), as `choose_layout` says or in
    `layout`.
    """
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
        else:
            one_row = layout == "prefix_shared"
            rows = (1 << 60, ROW_MULTIPLE) if one_row else ()
            shared = share_prefixes(tokens, attention_mask, *groups, *rows)
            inputs = {
                "input_ids": shared.tokens,
                "position_ids": shared.position_ids,
                "attention_mask": block_mask(shared, device) if one_row else shared.mask,
            }
            state_index, computed = shared.state_index, int((shared.segment_ids >= 0).sum())
    elif not bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all()):
        # padding on the left; on the right the causal mask hides it, with faster kernels
        mask = attention_mask[:, :-1]
        inputs |= {
            "attention_mask": mask,
            "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        }
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wanted = (x.to(device) for x in (state_index.to(keep.device)[keep], targets, entries))
    return Packed(inputs, *wanted, tuple(keep.shape), computed)


def unique_tokens(attention_mask: Tensor, prompt_lengths: Tensor, group_ids: Tensor) -> int:
    """Tokens when the prompt of a group counts once (what all prompts begin with still counts for
    each).

    attention_mask (B, T+1), prompt_lengths (B,), group_ids (B,).
    """
    prompts = dict(zip(group_ids.tolist(), prompt_lengths.tolist()))
    return int((attention_mask.sum(-1) - 1 - prompt_lengths).sum()) + sum(prompts.values())


def _varlen(tokens: Tensor, lengths: list[int]) -> tuple[dict, Tensor]:
    """tokens (B, T+1), each sequence less its last token, in one row: decoder inputs, state_index
    (B, T).
    """
    ends = np.cumsum([0, *lengths])
    padded = -(-int(ends[-1]) // ROW_MULTIPLE) * ROW_MULTIPLE
    cuts = (
        ends if padded == ends[-1] else np.append(ends, padded)
    )  # the padding is one more sequence
    token, position = torch.zeros(2, 1, padded, dtype=torch.int64)
    state_index = torch.zeros(len(lengths), tokens.shape[1] - 1, dtype=torch.int64)
    for b, (n, at) in enumerate(zip(lengths, ends.tolist())):
        token[0, at : at + n], position[0, at : at + n] = tokens[b, :n], torch.arange(n)
        state_index[b, :n] = torch.arange(at, at + n)
    inputs = {
        "input_ids": token,
        "position_ids": position,
        "cu_seq_lens_q": torch.from_numpy(cuts.astype(np.int32)),
        "max_length_q": int(np.diff(cuts).max()),
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    }  # 4-D: transformers then makes none
    return inputs, state_index


def _chunk_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, extra: str
) -> tuple[Tensor, Tensor]:
    """hidden states (M, D), targets (M,) → log-probabilities (M,), what `extra` asks for (M,).

    That is `entropy`; `top`, 1 where the token is the most probable one; or zeros.
    """
    logits = head(hidden).float() / temperature  # (M, V)
    normaliser = logits.logsumexp(-1)
    if (
        torch.compiler.is_compiling()
    ):  # the backward pass of a gather would be a second (M, V) tensor
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
    """The computation behind `packed_logprobs`: log-probabilities (B, T) and what `extra` asks for,
    (B, T).
    """
    states = model.base_model(**packed.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    empty = torch.zeros(packed.shape, device=states.device)
    head = model.get_output_embeddings()
    if not len(packed.targets):  # every rank has a backward pass through every weight, the head too
        return empty + 0.0 * head(states[:1]).float().sum(), empty
    compiled = getattr(model, "compiled_layers", False)
    chunk = _compiled(_chunk_logprobs) if compiled else _chunk_logprobs
    rows = states.index_select(0, packed.state_index)  # (M, D)
    parts = []
    size = -(-len(rows) // -(-len(rows) // CHUNK_TOKENS))  # chunks of equal size
    for h, t in zip(rows.split(size), packed.targets.split(size)):
        if torch.is_grad_enabled():
            parts.append(
                checkpoint(
                    chunk,
                    head,
                    h,
                    t,
                    temperature,
                    extra,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        else:
            parts.append(chunk(head, h, t, temperature, extra))
    return tuple(empty.index_put(packed.entries.unbind(), torch.cat(p)) for p in zip(*parts))


def packed_logprobs(
    model: nn.Module, packed: Packed, temperature: float = 1.0, extra: str = ""
) -> Tensor | tuple[Tensor, Tensor]:
    """`token_logprobs` of packed sequences: (B, T), zero where nothing was wanted.

    With `extra` also the `entropy` of the same distributions, or `top`, 1 for the most probable
    token: (B, T).
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature {temperature}: log-probabilities need one above 0 (greedy has none)"
        )
    forward = getattr(model, "logprobs_forward", None) or functools.partial(
        _logprobs_forward, model
    )
    logprobs, extras = forward(packed, temperature, extra)
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

    tokens (B, T+1) int64, attention_mask (B, T+1) with 1 for real tokens, padded on either side;
    `temperature` as in sampling. Returns (B, T) float32: entry t is log p(tokens[t+1] given
    tokens[..t]); entries that predict padding are finite and meaningless. `positions` (B, T) bool:
    where the head is evaluated at all (zero elsewhere): prompts need none. With `with_entropy` also
    the entropy of the same distributions, (B, T), in nats.
    `groups` = (prompt_lengths (B,), group_ids (B,)), for right-padded sequences: those of one group
    have the same prompt, which is then computed once, and so is what all prompts begin with; the
    results are the same.
    """
    packed = pack(model, tokens, attention_mask, positions, groups)
    return packed_logprobs(model, packed, temperature, "entropy" if with_entropy else "")
