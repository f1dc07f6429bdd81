"""Encoders, passage indexes, exact search, BM25, fusion, and the rank of the gold passage that is the reward.

One rule of order everywhere.  Lists are by score, higher first, then by id.  A rank is 1 + the number of
other passages whose score is at least the gold's: ties count against the gold, other golds of the query do not count,
the best gold counts, beyond the cut-off is None, and a NaN score gives FAILED, never a rank.

Everything is positional: entry i of a result belongs to entry i of `queries`, however often a query is repeated.

Shapes: Q queries, M passages, P pairs of a query and one of its golds, B texts of a batch, L tokens, D embedding size,
K list length.

Run as a program it builds an index:  python retriever.py kind=dense corpus=corpus.jsonl encoder=FOLDER index=OUT
or tells whether an encoder ranks:    python retriever.py check encoder=FOLDER
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Literal, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor

from config import run, save_config
from data import located_lines, located_passages, Passage
from distributed import cleanup, setup
from runs import atomic_write, path_with_digest, only_writer, Progress
from search.bm25 import BM25Retriever, build_postings
from search.client import RemoteRetriever, RetrieverAway  # noqa: F401  both are this module's names, too
from search.exact import exact_gold_ranks, exact_search, merge_best, place
from search.faiss_index import build_faiss, FaissIndex
from search.fusion import HybridRetriever
from search.passages import (check_corpus, check_k, check_queries, check_same, corpus_bytes, FAILED,
                             gold_positions, Hits, mapped, PassageIds, read_ids, read_meta,
                             RetrieverConfig, RetrieverError, Survey, survey, tokens_of, write_meta)


def retriever_settings(r: RetrieverConfig) -> dict:
    """What of a retriever decides its ranks: neither how fast it is nor where it runs."""
    files = {"corpus": r.corpus, "encoder": r.encoder}
    files |= {f"index {kind}": r.index and os.path.join(r.index, kind) for kind in ("bm25", "dense")}
    free = ("corpus", "encoder", "index", "device", "batch_tokens", "shard_size", "url", "timeout", "retries",
            "request_queries", "workers", "verify", "across_ranks", *(() if r.faiss else ("nprobe", "ef_search")))
    return ({f"retriever.{key}": path_with_digest(path) for key, path in files.items()}
            | {f"retriever.{key}": value for key, value in asdict(r).items() if key not in free})


@dataclass(frozen=True)
class Encoder:
    """How texts become vectors with a model.  The presets: ANCE_ENCODER, E5_ENCODER, MEAN_ENCODER."""

    pooling: Literal["ance", "mean", "first"] = "mean"  # ance: the model's own head; mean: over the mask; first token
    normalise: bool = True  # L2, so that the inner product is the cosine
    query_prefix: str = ""
    passage_prefix: str = ""
    query_length: int = 512  # tokens, special tokens included
    passage_length: int = 384
    name: str = field(default="", compare=False)  # where it was loaded from; the fingerprint says what it is

    def __post_init__(self):
        if min(self.query_length, self.passage_length) < 3:
            raise RetrieverError(f"query_length is {self.query_length}, passage_length {self.passage_length}; both "
                                 "must be 3 at least, for two special tokens and a text. Usual are 512 and 384.")


ANCE_ENCODER = Encoder("ance", normalise=False)
E5_ENCODER = Encoder("mean", query_prefix="query: ", passage_prefix="passage: ")
MEAN_ENCODER = Encoder("mean")  # all-MiniLM and its like


class ANCE(nn.Module):
    """RoBERTa, then LayerNorm(Linear(hidden state of the first token)); compared by inner product, not normalised.

    The parameter names are those of the public checkpoints (castorini/ance-msmarco-passage, 3ricL/ad-hoc-ance-msmarco):
    `roberta.*`, `embeddingHead.{weight,bias}`, `norm.{weight,bias}`.  arXiv 2007.00808; Pyserini's AnceEncoder.
    """

    UNUSED = re.compile(r"classifier\.|roberta\.pooler\.|roberta\.embeddings\.(position|token_type)_ids$")

    def __init__(self, config):
        super().__init__()
        from transformers import RobertaModel
        self.config = config
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.embeddingHead = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, L) ids and mask → (B, D) vectors."""
        hidden = self.roberta(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state  # (B, L, D)
        return self.norm(self.embeddingHead(hidden[:, 0]))

    def load_strict(self, state: dict[str, Tensor], source: str = "checkpoint") -> None:
        """Load a public state dict.  A missing, unknown or misshapen tensor is a RetrieverError that names it."""
        state = {k: v for k, v in state.items() if not self.UNUSED.match(k)}
        own = self.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        misshapen = [f"{k} {tuple(state[k].shape)} instead of {tuple(own[k].shape)}"
                     for k in sorted(own.keys() & state.keys()) if state[k].shape != own[k].shape]
        for problem, names in (("lacks", missing), ("has unknown", unknown), ("has misshapen", misshapen)):
            if names:
                raise RetrieverError(f"{source} {problem} {', '.join(names[:5])} ({len(names)} in all): an ANCE "
                                     "checkpoint holds roberta.*, embeddingHead and norm, beside at most a classifier. "
                                     "Use a whole one.")
        self.load_state_dict(state)

    @classmethod
    def from_pretrained(cls, name: str) -> ANCE:
        """From a local folder or a hub name holding config.json and model.safetensors or pytorch_model.bin."""
        from transformers import AutoConfig
        model = cls(AutoConfig.from_pretrained(name))
        model.load_strict(_state_dict(name), name)
        return model.eval()


def _hub_file(name: str, filename: str) -> Path | None:
    """Local path of a model's file, fetched from the hub where `name` is no folder; None where it has no such file."""
    if os.path.isdir(name):
        path = Path(name, filename)
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    try:
        return Path(hf_hub_download(name, filename))
    except EntryNotFoundError as e:
        if isinstance(e, LocalEntryNotFoundError):  # not in the cache and the hub out of reach: nothing is known
            raise
        return None


def _state_dict(name: str) -> dict[str, Tensor]:
    """The single weight file of a model, never unpickled beyond tensors; {} where there is none."""
    if path := _hub_file(name, "model.safetensors"):
        from safetensors.torch import load_file
        return load_file(path)
    path = _hub_file(name, "pytorch_model.bin")
    return torch.load(path, map_location="cpu", weights_only=True) if path else {}


def detect_encoder(name: str, pooling: str | None = None) -> Encoder:
    """The settings a plain (not ANCE) model asks for: E5 by its name, others by their sentence-transformers files.

    A `pooling` that is given overrules the files.  RetrieverError: they ask for something that isn't built here.
    """
    cached = [part for part in Path(name).parts if part.startswith("models--")]  # models--OWNER--NAME/snapshots/COMMIT
    own = (cached[-1].split("--")[-1] if cached else Path(name).name).lower()  # folders above it say nothing of a model
    encoder = E5_ENCODER if re.search(r"(^|[-_.])e5([-_.]|$)", own) else MEAN_ENCODER
    if modules := _hub_file(name, "modules.json"):
        kinds = [m["type"].rsplit(".", 1)[-1] for m in json.loads(modules.read_text())]
        if pooling is None and (unknown := [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]):
            raise RetrieverError(f"{name} has a sentence-transformers module {unknown[0]}; only Transformer, Pooling "
                                 "and Normalize are applied here. Use a model without it, or overrule with pooling=….")
        encoder = replace(encoder, normalise="Normalize" in kinds)
    if pooling is None and (file := _hub_file(name, "1_Pooling/config.json")):
        settings = json.loads(file.read_text())
        modes = [k for k, on in settings.items() if k.startswith("pooling_mode_") and on is True]
        if modern := settings.get("pooling_mode"):  # sentence-transformers 5.4: a name, or several
            modes = [modern] if isinstance(modern, str) else modern
        known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first", "mean": "mean", "cls": "first"}
        if len(modes) != 1 or modes[0] not in known:
            raise RetrieverError(f"{name} pools by {modes}; mean and first (cls) are supported. Give pooling=mean or "
                                 "pooling=first to overrule it.")
        pooling = known[modes[0]]
    if limits := _hub_file(name, "sentence_bert_config.json"):
        most = json.loads(limits.read_text()).get("max_seq_length") or 512
        encoder = replace(encoder, query_length=min(512, most), passage_length=min(384, most))
    return replace(encoder, pooling=pooling or "mean")


def _position_limit(config: Any) -> int:
    """Tokens a model has positions for; RoBERTa's kind spends the first pad_token_id + 1 of them on padding."""
    most = getattr(config, "max_position_embeddings", None) or sys.maxsize
    padded = config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet")
    return most - (config.pad_token_id + 1 if padded else 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar and its report on missing tensors: `load_encoder` judges those itself."""
    from transformers.utils import logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def load_encoder(name: str, device: str = "auto", **overrides) -> tuple[nn.Module, Any, Encoder]:
    """Model (float32, eval), tokenizer and settings from a local folder or a hub name.

    ANCE is recognised by its `embeddingHead`, everything else goes through `detect_encoder`; `overrides` are fields of
    `Encoder`, None meaning "as detected".  Lengths never exceed the model's positions.  RetrieverError: no such model,
    weights that lack a tensor, settings that don't fit the model.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    overrides = {k: v for k, v in overrides.items() if v is not None}
    try:
        config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        state = _state_dict(name) if config.model_type == "roberta" else {}
        if "embeddingHead.weight" in state or overrides.get("pooling") == "ance":
            if config.model_type != "roberta":
                raise RetrieverError(f"pooling is 'ance', but {name} is a {config.model_type} model; ANCE is RoBERTa "
                                     "with embeddingHead and norm. Set pooling=mean, or choose an ANCE checkpoint.")
            model, encoder = ANCE(config), ANCE_ENCODER
            model.load_strict(state, name)
        else:
            encoder = detect_encoder(name, overrides.get("pooling"))
            with _quiet():
                model, info = AutoModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
            if missing := sorted(k for k in info["missing_keys"] if not k.startswith("pooler.")):
                raise RetrieverError(f"{name} lacks {', '.join(missing[:5])} ({len(missing)} tensors): they would be "
                                     "random. Use a whole checkpoint.")
            if hasattr(model, "pooler"):
                model.pooler = None  # never used, often not in the checkpoint and then random
    except OSError as e:
        local = name.startswith((".", "/", "~")) or name.count("/") > 1  # no hub's name, but the library reads it as one
        reason = "there is no such folder" if local and not os.path.exists(name) else str(e).splitlines()[0]
        raise RetrieverError(f"encoder {name!r} can't be loaded ({reason}); give a folder with its config.json, tokenizer "
                             "and weights, or a hub name where the hub can be reached") from e
    encoder = replace(encoder, name=name, **overrides)
    if (encoder.pooling == "ance") != isinstance(model, ANCE):
        raise RetrieverError(f"pooling is {encoder.pooling!r}, but {name} is an ANCE checkpoint with its own head; "
                             "leave pooling unset")
    most = _position_limit(config)
    encoder = replace(encoder, query_length=min(encoder.query_length, most),
                      passage_length=min(encoder.passage_length, most))
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return model.float().eval().to(device), tokenizer, encoder


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """sha256 over what decides a vector: weights, form of the network, and what the tokenizer makes of a probe text."""
    h = hashlib.sha256()
    keys = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps")
    probe = "Où est-ce? The QUICK brown fox's 1,234 jumps; naïve 東京"
    h.update(json.dumps([{k: getattr(model.config, k, None) for k in keys}, tokenizer(probe)["input_ids"]]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        h.update(f"{name} {tuple(tensor.shape)}".encode())
        h.update(tensor.detach().float().cpu().contiguous().numpy())
    return h.hexdigest()


def vector_size(model: nn.Module) -> int:
    """D of a model's vectors."""
    return model.embeddingHead.out_features if isinstance(model, ANCE) else model.config.hidden_size


def truncate_ids(ids: Any, max_length: int, end_ids: Iterable[int]) -> Any:
    """`ids` (a list or an array) cut to `max_length`; an end among `end_ids` (</s>, [SEP]) stays the end."""
    if len(ids) <= max_length:
        return ids
    cut = ids[:max_length].copy()
    if ids[-1] in end_ids:
        cut[-1] = ids[-1]
    return cut


def mean_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, L, D) states and (B, L) mask → (B, D): the mean over masked-in positions; zeros for a row without any."""
    mask = attention_mask.bool().unsqueeze(-1)
    return hidden.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)


def pool(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, encoder: Encoder) -> Tensor:
    """(B, L) ids and mask → (B, D) float32 vectors by the encoder's pooling, normalised where it says so."""
    if encoder.pooling == "ance":
        vectors = model(input_ids, attention_mask).float()
    else:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
        vectors = hidden[:, 0] if encoder.pooling == "first" else mean_pool(hidden, attention_mask)
    return F.normalize(vectors, dim=-1) if encoder.normalise else vectors


def _packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None,
                      scaling: float, cu_seq_lens_q: Tensor, max_length_q: int, **_) -> tuple[Tensor, None]:
    """Attention of packed texts: (1, H, T, d) each → (1, T, H, d); every text sees itself alone."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, d)
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn
        out = varlen_attn(query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling)
    else:
        out, ends = torch.zeros_like(query), cu_seq_lens_q.tolist()
        for first, last in zip(ends, ends[1:]):
            q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
            out[first:last] = F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(0, 1)
    return out.unsqueeze(0), None


PACKABLE = ("bert", "roberta", "xlm-roberta", "camembert")  # families that take positions and pass our words on


class PackedModel:
    """A model that reads texts one after the other in a row of tokens, without padding: less work, and one shape.

    With `compiled` every batch has the same shape (the rest of the row is filled up), so the model is compiled once.
    """

    def __init__(self, model: nn.Module, batch_tokens: int, longest: int, compiled: bool = False):
        """batch_tokens: tokens of a row; longest: of a text"""
        from transformers import AttentionInterface
        AttentionInterface.register("packed_texts", _packed_attention)
        self.model, self.core = model, model.roberta if isinstance(model, ANCE) else model
        limit = _position_limit(model.config)
        self.first_position = model.config.max_position_embeddings - limit
        self.longest, self.compiled = min(longest, limit), compiled
        self.row = max(batch_tokens, self.longest)
        self.texts = max(self.row // 64, 1)  # of a row at most: more places would cost attention more
        if compiled:  # layer by layer: they share what is compiled once, where the model as a whole takes minutes
            for layer in self.core.encoder.layer:
                layer.forward = torch.compile(layer.forward, dynamic=False)

    def states(self, input_ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """(T,) ids and positions, (S + 1,) first tokens of texts → (T, D)."""
        return self.core(input_ids=input_ids[None], position_ids=positions[None],
                         token_type_ids=torch.zeros_like(input_ids)[None], cu_seq_lens_q=starts, cu_seq_lens_k=starts,
                         max_length_q=self.longest, max_length_k=self.longest).last_hidden_state[0]

    def batches(self, lengths: Sequence[int]) -> Iterator[slice]:
        """Runs of texts that fill a row, in order."""
        start = total = 0
        for i, length in enumerate(lengths):
            if total + length > self.row or i - start == self.texts:
                yield slice(start, i)
                start, total = i, 0
            total += length
        if start < len(lengths):
            yield slice(start, len(lengths))

    def vectors(self, tokens: list[np.ndarray], encoder: Encoder) -> Tensor:
        """Pooled vectors of texts that fill one row, (len(tokens), D), on the model's device; doesn't wait for it."""
        device = next(self.model.parameters()).device
        lengths = np.array([len(t) for t in tokens])
        ends, flat = np.cumsum(lengths), np.concatenate(tokens).astype(np.int64)
        positions = np.arange(len(flat)) - np.repeat(ends - lengths, lengths) + self.first_position
        starts = np.concatenate([[0], ends]).astype(np.int32)
        if self.compiled:  # what is filled up belongs to no text
            flat, positions = (np.pad(x, (0, self.row - len(x)), constant_values=x[0]) for x in (flat, positions))
            starts = np.pad(starts, (0, self.texts + 1 - len(starts)), mode="edge")
        arrays = [torch.from_numpy(x) for x in (flat, positions, starts, ends - lengths, lengths)]
        if device.type == "cuda":
            arrays = [x.pin_memory().to(device, non_blocking=True) for x in arrays]
        flat, positions, starts, first, lengths = arrays
        config = self.core.config
        usual, config._attn_implementation = config._attn_implementation, "packed_texts"
        try:
            hidden = self.states(flat, positions, starts)
        finally:
            config._attn_implementation = usual
        if encoder.pooling == "ance":
            out = self.model.norm(self.model.embeddingHead(hidden[first])).float()
        elif encoder.pooling == "first":
            out = hidden[first].float()
        else:
            out = torch.segment_reduce(hidden[:int(ends[-1])].float(), "mean", axis=0, unsafe=True, lengths=lengths)
        return F.normalize(out, dim=-1) if encoder.normalise else out


def _padded_vectors(model: nn.Module, tokens: list[np.ndarray], encoder: Encoder, pad: int) -> Tensor:
    """Pooled vectors of one batch of texts, padded to the longest: (len(tokens), D) float32 on the model's device."""
    device = next(model.parameters()).device
    input_ids = torch.full((len(tokens), max(max(map(len, tokens)), 1)), pad)
    mask = torch.zeros_like(input_ids)
    for r, ids in enumerate(tokens):
        input_ids[r, :len(ids)] = torch.from_numpy(ids)
        mask[r, :len(ids)] = 1  # by position, never by id
    return pool(model, input_ids.to(device), mask.to(device), encoder)


@torch.no_grad()
def encode_tokens(model: nn.Module, tokens: Sequence[np.ndarray], encoder: Encoder, pad: int, batch_tokens: int = 8192,
                  packed: PackedModel | None = None, progress: Callable[[int], None] = lambda n: None) -> Tensor:
    """Token ids of texts, int32 arrays → (len(tokens), D) float32 on the model's device, in order.

    Texts of the same tokens are encoded once.  Sorted by length, so that a batch pads little and runs of texts that
    fill a row are alike; on CUDA bf16 autocast for a float32 model.
    """
    slot: dict[bytes, int] = {}
    which = [slot.setdefault(ids.tobytes(), len(slot)) for ids in tokens]
    distinct = list({number: ids for number, ids in zip(which, tokens)}.values())
    order = sorted(range(len(distinct)), key=lambda i: -len(distinct[i]))
    device, weights = next(model.parameters()).device, next(model.parameters()).dtype
    if packed is None:
        parts, start = [], 0
        while start < len(order):
            step = max(batch_tokens // max(len(distinct[order[start]]), 1), 1)
            parts.append(order[start:start + step])
            start += step
    else:
        parts = [order[part] for part in packed.batches([len(distinct[i]) for i in order])]
    vectors = [torch.empty(0, vector_size(model), device=device)]
    for rows in parts:
        batch = [distinct[i] for i in rows]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and weights == torch.float32):
            vectors.append(packed.vectors(batch, encoder) if packed else _padded_vectors(model, batch, encoder, pad))
        progress(len(rows))
    progress(len(which) - len(distinct))
    made = np.empty(len(order), dtype=np.int64)  # where among the batches each distinct text was encoded
    made[order] = np.arange(len(order))
    places = torch.from_numpy(made[np.array(which, dtype=np.int64)])
    if device.type == "cuda":  # the caller may go on while the device is at work
        places = places.pin_memory().to(device, non_blocking=True)
    return torch.cat(vectors).float()[places]


def encode(model: nn.Module, tokenizer: Any, texts: Sequence[str], encoder: Encoder | None = None, query: bool = False,
           batch_tokens: int = 8192, ids: Sequence[str] | None = None, counts: dict | None = None,
           progress: Progress | None = None) -> Tensor:
    """`texts` → (len(texts), D) float32 on the CPU, in order.  Passages and queries go through here alike.

    encoder: settings; by default ANCE's for an ANCE model, mean pooling and normalisation for any other
    query: take the query side's prefix and length instead of the passage side's
    batch_tokens: tokens of one batch, padding included
    ids: passage ids; given, a NaN or infinite vector (also one beyond fp16) is a RetrieverError that names its passage
    counts: a dict whose "truncated" is raised by the number of texts that were cut to the length
    progress: to be told of every encoded text; by default one of its own

    A text occurring several times is encoded once, so equal texts get equal vectors.  float32; on CUDA bf16 autocast,
    and without padding where the model's family allows it.
    """
    encoder = encoder or (ANCE_ENCODER if isinstance(model, ANCE) else MEAN_ENCODER)
    prefix, length = ((encoder.query_prefix, encoder.query_length) if query else
                      (encoder.passage_prefix, encoder.passage_length))
    length, ends, tokens = min(length, _position_limit(model.config)), set(tokenizer.all_special_ids), []
    for start in range(0, len(texts), 1024):
        batch = tokenizer([prefix + t for t in texts[start:start + 1024]], verbose=False)["input_ids"]
        tokens += [np.array(full, dtype=np.int32) for full in batch]
    if counts is not None:
        counts["truncated"] = counts.get("truncated", 0) + sum(len(t) > length for t in tokens)
    tokens = [truncate_ids(t, length, ends) for t in tokens]
    bar = progress or Progress(len(texts), "encode", "texts")
    packed = PackedModel(model, batch_tokens, length) if can_pack(model, tokens) else None
    vectors = encode_tokens(model.eval(), tokens, encoder, tokenizer.pad_token_id or 0, batch_tokens, packed,
                            bar.update).cpu()
    if progress is None:
        bar.close()
    if ids is not None:
        refuse_nonfinite(vectors, ids)
    return vectors


def can_pack(model: nn.Module, tokens: Sequence[np.ndarray]) -> bool:
    """Do texts go through the model without padding: on CUDA, in a family that can, and none without any token."""
    return (next(model.parameters()).is_cuda and model.config.model_type in PACKABLE
            and model.config.hidden_size % 8 == 0 and all(map(len, tokens)))


def refuse_nonfinite(vectors: Tensor, ids: Sequence[str]) -> None:
    """RetrieverError naming the first passage whose vector (M, D) is NaN, infinite or too large for fp16."""
    bad = (~torch.isfinite(torch.as_tensor(vectors).half()).all(1)).nonzero()
    if len(bad):
        raise RetrieverError(f"the vector of passage {ids[int(bad[0])]!r} is not finite in fp16 ({len(bad)} such among "
                             f"{len(ids)}) and can't be ranked. Look at that passage, or use another encoder.")


# ---------------------------------------------------------------------------------------------------------- dense index

@dataclass
class Index:
    """Vectors of a corpus: `shards`, memory-mapped arrays (M_i, D), row after row the passages of `ids`."""

    ids: PassageIds
    shards: list[np.ndarray]
    meta: dict = field(default_factory=dict)
    folder: str = "(in memory)"
    encoded: int = 0  # passages that the call which returned this encoded itself

    @property
    def size(self) -> int:
        return self.shards[0].shape[1]


def _identity(model: nn.Module, tokenizer: Any, encoder: Encoder) -> dict:
    """What of an encoder an index and its queries must share: all settings but the length of queries."""
    settings = {k: v for k, v in asdict(encoder).items() if k not in ("name", "query_length")}
    return {"dim": vector_size(model), **settings, "fingerprint": fingerprint(model, tokenizer)}


def _sha256(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while part := f.read(1 << 20):
            h.update(part)
    return h.hexdigest()


TASK, WINDOW = 2048, 16384  # passages that are tokenised together; that are sorted by length together


def _spans(count: int, shard_size: int) -> list[range]:
    """The passages of every shard."""
    return [range(first, min(first + shard_size, count)) for first in range(0, count, shard_size)]


def _token_source(corpus: str | os.PathLike | Sequence[Passage], starts: Sequence[tuple[int, int]],
                  spans: Sequence[range], shard_size: int, tokenizer: Any, prefix: str,
                  workers: int) -> Iterator[list[np.ndarray]]:
    """Token ids, uncut, of the passages of some shards, in order, TASK passages at a time."""
    tasks = [(first, min(TASK, span.stop - first)) for span in spans for first in range(span.start, span.stop, TASK)]
    if isinstance(corpus, (str, os.PathLike)):
        path, per_shard = os.fspath(corpus), -(-shard_size // TASK)
        places = [(starts[first // shard_size * per_shard + first % shard_size // TASK], n) for first, n in tasks]
        if workers and hasattr(tokenizer, "backend_tokenizer"):
            yield from tokens_of(path, places, tokenizer.backend_tokenizer.to_str(), prefix, workers)
            return
        texts = ([p.contents for _, _, p in islice(located_passages(path, place), n)] for place, n in places)
    else:
        texts = ([p.contents for p in corpus[first:first + n]] for first, n in tasks)
    for part in texts:
        batch = tokenizer([prefix + text for text in part], verbose=False)["input_ids"]
        yield [np.array(ids, dtype=np.int32) for ids in batch]


def _on_first_rank(work: Callable[[], Any]) -> Any:
    """What `work` gives on rank 0, on every rank; what it raises is raised on every rank, so that none waits."""
    if not dist.is_initialized():
        return work()
    answer: list = [None]
    if dist.get_rank() == 0:
        try:
            answer = [work()]
        except (ValueError, OSError) as e:
            answer = [e]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


def build_index(folder: str | os.PathLike, corpus: str | os.PathLike | Sequence[Passage], model: nn.Module,
                tokenizer: Any, encoder: Encoder | None = None, shard_size: int = 65536, batch_tokens: int = 8192,
                workers: int = 0) -> Index:
    """Encode a corpus (a file, or a list of Passage) into `folder`: fp16 `shard-00000.npy` …, ids, `meta.json`.

    A shard depends on its own passages alone, appears whole or not at all, and has its checksum beside it, in the end
    in meta.json.  So a killed build, started again, makes the missing shards and ends with the same bytes; a finished
    index is checked and left alone.  In a process group every rank makes its share of the shards, and all of them
    are counted at the end.  workers: processes of this rank that read and tokenise ahead; 0: this one does.
    On CUDA the encoder is compiled, in bf16, and texts are packed where its family allows it.

    RetrieverError: the folder holds the index of another corpus or encoder, or of other settings; a vector that is not
    finite; an empty corpus; no space left.  DataError: another build at work in the folder.
    """
    folder, encoder = Path(folder), encoder or (ANCE_ENCODER if isinstance(model, ANCE) else MEAN_ENCODER)
    if shard_size < 1:
        raise RetrieverError(f"shard_size is {shard_size}; a shard holds at least one passage. Usual is 65536.")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    identity = _identity(model, tokenizer, encoder)
    with contextlib.ExitStack() as stack:
        def begin() -> tuple[Survey, dict]:
            stack.enter_context(only_writer(os.fspath(folder)))
            found = survey(corpus, folder, lambda i: i % shard_size % TASK == 0)
            meta = read_meta(folder)
            wanted = {"format": "dense-2", "count": found.count, "corpus": found.fingerprint, "shard_size": shard_size,
                      **identity}
            if meta is None:
                meta = wanted | {"encoder": encoder.name, "query_length": encoder.query_length, "complete": False,
                                 "shards": [], **corpus_bytes(corpus)}
                write_meta(folder, meta)
            check_same(folder, meta, wanted, "Choose another folder, or delete this one.")
            return found, meta

        found, meta = _on_first_rank(begin)
        spans, listed = _spans(found.count, shard_size), {entry["file"]: entry for entry in meta["shards"]}
        mine = [(n, span, _sound(folder, n, span, listed)) for n, span in enumerate(spans) if n % world == rank]
        missing = [(n, span) for n, span, sound in mine if not sound]
        if missing:
            _check_space(folder, sum(len(span) for _, span in missing) * identity["dim"] * 2)
            source = _token_source(corpus, found.starts, [span for _, span in missing], shard_size, tokenizer,
                                   encoder.passage_prefix, workers)
            with contextlib.closing(source):
                _encode_shards(folder, missing, source, model, tokenizer, encoder, batch_tokens)
        encoded = sum(len(span) for _, span in missing)
        if world > 1:
            counts = [0] * world
            dist.all_gather_object(counts, encoded)
            encoded = sum(counts)
        _on_first_rank(lambda: _finish(folder, meta, spans, listed, encoded))
    return replace(open_index(folder), encoded=encoded)


def _encode_shards(folder: Path, missing: Sequence[tuple[int, range]], source: Iterator[list[np.ndarray]],
                   model: nn.Module, tokenizer: Any, encoder: Encoder, batch_tokens: int) -> None:
    """Encode shards (number, passages) from their tokens, window by window; a thread writes one while the next is
    encoded."""
    length, ends = min(encoder.passage_length, _position_limit(model.config)), set(tokenizer.all_special_ids)
    bar = Progress(sum(len(span) for _, span in missing), f"index {folder}")
    packed, model = None, model.eval()
    if can_pack(model, []):
        model = copy.deepcopy(model).to(torch.bfloat16)
        packed = PackedModel(model, batch_tokens, length, compiled=True)

    def encoded() -> Iterator[tuple[int, range, int, Tensor, int]]:
        """(shard, its passages, first of the window, fp16 vectors, texts that were cut), each given away when the next
        window is under way: the device has work while the host waits for it, looks, and makes the next one ready."""
        before = None
        for number, span in missing:
            for first in range(0, len(span), WINDOW):
                window: list[np.ndarray] = []
                while len(window) < min(WINDOW, len(span) - first):
                    window += next(source)
                cut = sum(len(ids) > length for ids in window)
                window = [truncate_ids(ids, length, ends) for ids in window]
                part = encode_tokens(model, window, encoder, tokenizer.pad_token_id or 0, batch_tokens,
                                     packed if all(map(len, window)) else None, bar.update).half()
                if before is not None:
                    yield before
                before = number, span, first, part, cut
        if before is not None:
            yield before

    with ThreadPoolExecutor(1) as writer:
        written = None
        for number, span, first, part, cut in encoded():
            if first == 0:
                vectors, truncated = np.empty((len(span), vector_size(model)), dtype=np.float16), 0
            truncated += cut
            if not torch.isfinite(part).all():
                ids = read_ids(folder)
                refuse_nonfinite(part, [ids[i] for i in span[first:first + len(part)]])
            vectors[first:first + len(part)] = part.cpu().numpy()
            if first + len(part) == len(span):
                if written is not None:
                    written.result()
                written = writer.submit(_write_shard, folder, number, vectors, truncated)
        if written is not None:
            written.result()
    bar.close()


def _write_shard(folder: Path, number: int, vectors: np.ndarray, truncated: int) -> None:
    """A shard and, once it is whole on the disk, the entry that counts it as made."""
    path = folder / f"shard-{number:05d}.npy"
    try:
        with atomic_write(str(path), "wb") as f:
            np.save(f, vectors)
        entry = {"file": path.name, "rows": len(vectors), "truncated": truncated, "bytes": path.stat().st_size,
                 "sha256": _sha256(path)}
        with atomic_write(str(path.with_suffix(".json"))) as f:
            json.dump(entry, f)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise RetrieverError(f"no space left for {path}; its shards before are whole. Make room and start the same "
                             "command again: it goes on there.") from e


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RetrieverError(f"the index at {folder} needs another {needed / 1e9:,.1f} GB, but its disk has "
                             f"{free / 1e9:,.1f} GB free; make room, or choose a folder on another disk")


def _entry(folder: Path, number: int, listed: dict[str, dict]) -> dict | None:
    """The entry of a shard: beside it while an index is made, in meta.json when it is finished."""
    path = folder / f"shard-{number:05d}.json"
    try:
        return json.loads(path.read_text()) if path.is_file() else listed.get(f"shard-{number:05d}.npy")
    except ValueError:  # damaged: the shard is made again
        return None


def _sound(folder: Path, number: int, span: range, listed: dict[str, dict]) -> bool:
    """Is that shard made, whole and as it was written?"""
    entry, path = _entry(folder, number, listed), folder / f"shard-{number:05d}.npy"
    return (entry is not None and entry["rows"] == len(span) and path.is_file()
            and path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"])


def _finish(folder: Path, meta: dict, spans: Sequence[range], listed: dict[str, dict], encoded: int) -> None:
    """Count the shards and write them into meta.json."""
    entries = [_entry(folder, n, listed) for n in range(len(spans))]
    rows = [entry and entry["rows"] for entry in entries]
    if rows != [len(span) for span in spans]:
        raise RetrieverError(f"the index at {folder} holds {sum(filter(None, rows)):,} of {meta['count']:,} passages: "
                             "shards went away while it was built. Run the command again.")
    if encoded or not meta["complete"]:
        write_meta(folder, meta | {"complete": True, "shards": entries})
    for n in range(len(spans)):
        (folder / f"shard-{n:05d}.json").unlink(missing_ok=True)


def open_index(folder: str | os.PathLike, model: nn.Module | None = None, tokenizer: Any = None,
               encoder: Encoder | None = None, verify: bool = False) -> Index:
    """Open a finished index, memory-mapped.  Given a model, also check that it is the one that built it.

    Sizes and shapes of all files are looked at; `verify` reads every shard and compares its checksum as well.
    RetrieverError: no index, an unfinished or damaged one, another model, tokenizer, pooling, prefix or length.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None or meta.get("format") != "dense-2":
        raise RetrieverError(f"there is no dense index at {folder}; build it with: python retriever.py kind=dense "
                             f"corpus=FILE encoder=FOLDER index={folder.parent if folder.name == 'dense' else 'OUT'}")
    if not meta["complete"]:
        entries = [_entry(folder, int(path.stem.removeprefix("shard-")), {}) for path in folder.glob("shard-*.json")]
        done = sum(entry["rows"] for entry in entries if entry)
        raise RetrieverError(f"the index at {folder} is unfinished ({done:,} of {meta['count']:,} passages); run the "
                             "command that builds it again: it goes on there")
    try:  # "c": private pages, so that torch may take the array without a copy; nothing is ever written
        shards = [mapped(folder / s["file"], "c") for s in meta["shards"]]
        ids = read_ids(folder)
    except (OSError, ValueError) as e:
        raise RetrieverError(f"the index at {folder} is damaged ({e}); run the command that builds it again: it "
                             "replaces what is missing") from e
    if [s.shape for s in shards] != [(e["rows"], meta["dim"]) for e in meta["shards"]] or len(ids) != meta["count"]:
        raise RetrieverError(f"the index at {folder} is damaged: its files hold {sum(map(len, shards)):,} vectors and "
                             f"{len(ids):,} ids, meta.json says {meta['count']:,}. Delete it and build it again.")
    for entry in meta["shards"] if verify else []:
        if _sha256(folder / entry["file"]) != entry["sha256"]:
            raise RetrieverError(f"{folder}/{entry['file']} has another checksum than when it was written: it is "
                                 "damaged. Run the command that builds the index again: it makes that shard anew.")
    if model is not None:
        _check_encoder(folder, meta, model, tokenizer, encoder)
    return Index(ids, shards, meta, str(folder))


def _check_encoder(where: Any, meta: dict, model: nn.Module, tokenizer: Any, encoder: Encoder | None) -> None:
    encoder = encoder or (ANCE_ENCODER if isinstance(model, ANCE) else MEAN_ENCODER)
    check_same(where, meta, _identity(model, tokenizer, encoder),
          f"Open it with the encoder that built it ({meta.get('encoder') or 'unnamed'}), or build another index.")


# ----------------------------------------------------------------------------------------------------------- retrievers

class DenseRetriever:
    """Exact inner-product search over an index, on the device of the encoder.  Safe to call from several threads.

    With `across`, in a process group, every rank holds its share of the shards, so that an index may be larger than one
    GPU.  `search` and `gold_ranks` are then collectives: every rank calls them at the same time, each with its own
    queries (none at all is fine), and gets its own answers from all passages.
    """

    def __init__(self, index: Index | str | os.PathLike, model: nn.Module, tokenizer: Any,
                 encoder: Encoder | None = None, batch_tokens: int = 8192, resident: bool = True, across: bool = False):
        """index: a folder or what `open_index` gave; the rest: what `load_encoder` gave, checked against the index.

        resident: hold the vectors in the memory of the encoder's GPU, if they fill at most half of what is free
        """
        self.index = index if isinstance(index, Index) else open_index(index)
        self.model, self.tokenizer, self.encoder, self.batch_tokens = model, tokenizer, encoder, batch_tokens
        if self.index.meta:
            _check_encoder(self.index.folder, self.index.meta, model, tokenizer, encoder)
        self.passage_ids, self.device = self.index.ids, next(model.parameters()).device
        self.across, shards, self.first = across, self.index.shards, 0
        if across:
            self.group = dist.new_group(backend="gloo")  # its own: a trainer may search in a thread
            rank, world = dist.get_rank(), dist.get_world_size()
            first, last = (len(shards) * r // world for r in (rank, rank + 1))
            self.first, shards = sum(map(len, shards[:first])), shards[first:last]
        self.shards = place(shards, self.device) if resident else shards
        self.counts: dict[str, int] = {"truncated": 0}  # queries cut to the encoder's query_length
        self._lock = threading.Lock()  # fast tokenizers may not be borrowed twice

    @property
    def cut_queries(self) -> int:
        """Queries that were cut to the encoder's query_length so far."""
        return self.counts["truncated"]

    @cached_property
    def _order(self) -> Tensor:
        """(M,) the place of each id among all, on the device of the scores."""
        return torch.from_numpy(self.passage_ids.order).to(self.device)

    def encode_queries(self, queries: Sequence[str]) -> Tensor:
        """(Q, D) float32 on the encoder's device."""
        queries = check_queries(queries)
        with self._lock:
            vectors = encode(self.model, self.tokenizer, queries, self.encoder, query=True,
                             batch_tokens=self.batch_tokens, counts=self.counts)
        return vectors.to(self.device)

    def _of_all_ranks(self, *mine: Any) -> tuple[list, slice]:
        """What every rank gives, joined in the order of ranks, and where this rank's part of it lies."""
        if not self.across:
            return list(mine), slice(0, len(mine[0]))
        given: list = [None] * dist.get_world_size()
        dist.all_gather_object(given, mine, group=self.group)
        sizes = [len(parts[0]) for parts in given]
        before = sum(sizes[:dist.get_rank()])
        joined = [torch.cat(parts) if isinstance(parts[0], Tensor) else sum(parts, []) for parts in zip(*given)]
        return joined, slice(before, before + sizes[dist.get_rank()])

    def _best(self, vectors: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """`exact_search` over the passages of all ranks, on the CPU where there are several."""
        order = self._order[self.first:self.first + sum(map(len, self.shards))] if self.across else self._order
        scores, rows, failed = exact_search(vectors, self.shards, k, order)
        if not self.across:
            return scores, rows, failed
        given: list = [None] * dist.get_world_size()
        dist.all_gather_object(given, (scores.cpu(), rows.cpu() + self.first, failed.cpu()), group=self.group)
        scores, rows = (torch.cat([part[i] for part in given], 1) for i in (0, 1))
        return *merge_best(scores, rows, self._order.cpu(), k), torch.stack([part[2] for part in given]).any(0)

    def hits(self, queries: Sequence[str], k: int) -> list[Hits | None]:
        """As `search`, with None for a query of which a score is NaN."""
        check_k(k)
        (vectors,), own = self._of_all_ranks(self.encode_queries(queries).cpu())
        out: list[Hits | None] = []
        for part in vectors.to(self.device).split(2048):
            scores, rows, failed = self._best(part, k)
            out += [None if bad else [(self.passage_ids[i], s) for i, s in zip(row, score)]
                    for row, score, bad in zip(rows.tolist(), scores.tolist(), failed.tolist())]
        return out[own]

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The min(k, M) best passages of every query, by (score descending, id ascending)."""
        hits = self.hits(queries := check_queries(queries), k)
        if None in hits:
            bad = hits.index(None)
            raise RetrieverError(f"query {bad} ({queries[bad][:60]!r}) has a NaN score, so no order; look at the "
                                 "encoder's weights and at the index")
        return hits

    def gold_ranks(self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100) -> list:
        """Rank of the best gold of every query by the rule of order; None beyond `cutoff`, FAILED on NaN."""
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        golds = gold_positions(self.passage_ids, queries, gold_ids)
        (vectors, golds), own = self._of_all_ranks(self.encode_queries(queries).cpu(), golds)
        out: list = []
        for part in vectors.to(self.device).split(2048):
            across = (self.first, self.group) if self.across else ()
            out += exact_gold_ranks(part, self.shards, golds[len(out):len(out) + len(part)], cutoff, *across)
        return out[own]


class FaissRetriever(DenseRetriever):
    """Search by a FAISS index beside the exact one: what it does not find has no rank.

    `gold_ranks` reads the list of the best `cutoff` passages (and as many more as there are golds), by the scores that
    the FAISS index gives; ties count against the gold.
    """

    def __init__(self, index: Index | str | os.PathLike, faiss: FaissIndex | str | os.PathLike, model: nn.Module,
                 tokenizer: Any, encoder: Encoder | None = None, batch_tokens: int = 8192):
        """faiss: a folder that `build_faiss` wrote for this dense index, or what was opened from it."""
        index = index if isinstance(index, Index) else open_index(index)
        self.faiss = faiss if isinstance(faiss, FaissIndex) else FaissIndex(faiss, faiss_source(index))
        super().__init__(index, model, tokenizer, encoder, batch_tokens, resident=False)

    def hits(self, queries: Sequence[str], k: int) -> list[Hits | None]:
        """As `search`, with None for a query whose vector is NaN."""
        check_k(k)
        vectors, out = self.encode_queries(queries).cpu(), []
        if not len(vectors):
            return []
        for vector, scores, rows in zip(vectors, *self.faiss.search(vectors.numpy(), k)):
            found = [(self.passage_ids[row], float(score)) for row, score in zip(rows.tolist(), scores) if row >= 0]
            out.append(sorted(found, key=lambda hit: (-hit[1], hit[0])) if torch.isfinite(vector).all() else None)
        return out

    def gold_ranks(self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100) -> list:
        """Rank of the best gold of every query in the list of its query; None where none is found up to `cutoff`."""
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        golds = [{self.passage_ids[i] for i in rows} for rows in gold_positions(self.passage_ids, queries, gold_ids)]
        out: list = []
        for hits, gold in zip(self.hits(queries, cutoff + max(map(len, golds), default=0)), golds):
            best = max((score for id_, score in hits or [] if id_ in gold), default=None)
            rank = best is not None and 1 + sum(score >= best for id_, score in hits if id_ not in gold)
            out.append(FAILED if hits is None else rank if rank and rank <= cutoff else None)
        return out


def faiss_source(index: Index) -> dict:
    """What of a dense index a FAISS index of it depends on."""
    return {key: index.meta[key] for key in ("count", "dim", "corpus", "fingerprint", "pooling", "normalise",
                                             "passage_prefix", "passage_length")}


# ------------------------------------------------------------------------------------------------- configuration, entry

def _load(cfg: RetrieverConfig) -> tuple[nn.Module, Any, Encoder]:
    if not cfg.encoder:
        raise RetrieverError(f"kind={cfg.kind} needs an encoder: give encoder=FOLDER or a hub name")
    return load_encoder(cfg.encoder, cfg.device, pooling=None if cfg.pooling == "auto" else cfg.pooling,
                        normalise=cfg.normalise, query_prefix=cfg.query_prefix, passage_prefix=cfg.passage_prefix,
                        query_length=cfg.query_length, passage_length=cfg.passage_length)


def faiss_folder(cfg: RetrieverConfig) -> Path:
    """Where the FAISS index of that kind lies: beside the dense one, named after its factory string."""
    return Path(cfg.index, "faiss-" + re.sub(r"\W+", "-", cfg.faiss))


def _batch_tokens(cfg: RetrieverConfig, model: nn.Module) -> int:
    return cfg.batch_tokens or (65536 if next(model.parameters()).is_cuda else 8192)


def open_retriever(cfg: RetrieverConfig) -> BM25Retriever | DenseRetriever | HybridRetriever | RemoteRetriever:
    """The retriever a config describes: its saved indexes, or BM25 in memory from the corpus where none is saved."""
    if cfg.kind == "remote":
        return RemoteRetriever(cfg.url, cfg.timeout, cfg.retries, batch=cfg.request_queries)

    def bm25() -> BM25Retriever:
        folder = Path(cfg.index, "bm25")
        if cfg.corpus and not (cfg.index and folder.is_dir()):
            return BM25Retriever(cfg.corpus, cfg.k1, cfg.b, cfg.query_words, cfg.analyzer, cfg.bm25_workers)
        if not cfg.index:
            raise RetrieverError("BM25 has neither corpus nor index: give retriever.corpus=FILE, or retriever.index=FOLDER of a "
                                 "saved one")
        return BM25Retriever.open(folder, cfg.k1, cfg.b, cfg.query_words, cfg.analyzer, cfg.bm25_workers)

    def dense() -> DenseRetriever:
        if not cfg.index:
            raise RetrieverError(f"kind={cfg.kind} needs an index: build it with python retriever.py kind={cfg.kind} "
                                 "corpus=FILE encoder=FOLDER index=OUT, then give retriever.index=OUT")
        index = open_index(Path(cfg.index, "dense"), verify=cfg.verify)  # before any model is loaded
        faiss = cfg.faiss and FaissIndex(faiss_folder(cfg), faiss_source(index), cfg.nprobe, cfg.ef_search)
        model, tokenizer, encoder = _load(cfg)
        parts = model, tokenizer, encoder, _batch_tokens(cfg, model)
        if faiss:
            return FaissRetriever(index, faiss, *parts)
        return DenseRetriever(index, *parts, across=cfg.across_ranks and dist.is_initialized())

    same_corpus(cfg, cfg.corpus)
    if cfg.kind == "hybrid":
        return HybridRetriever(dense(), bm25(), cfg.depth, cfg.rrf_k, cfg.weights)
    return dense() if cfg.kind == "dense" else bm25()


def same_corpus(cfg: RetrieverConfig, corpus: str) -> None:
    """RetrieverError where a saved index that `cfg` opens was not built from this corpus file as it is now."""
    if corpus and cfg.index:
        folders = [Path(cfg.index, kind) for kind in ("dense", "bm25") if cfg.kind in (kind, "hybrid")]
        check_corpus([folder for folder in folders if folder.is_dir()], corpus, cfg.verify)


def build_bm25(folder: str | os.PathLike, corpus: str | os.PathLike | Sequence[Passage], analyzer: str = "lucene",
               workers: int = 1) -> tuple[int, int]:
    """Save the BM25 index of a corpus → (passages, passages indexed now: 0 where the same index stood there)."""
    folder = Path(folder)
    with only_writer(os.fspath(folder.parent), folder.name):
        if (meta := read_meta(folder)) is not None:
            found = survey(corpus, folder, lambda i: False)
            check_same(folder, meta, {"corpus": found.fingerprint}, "Choose another folder, or delete this one.")
            return len(BM25Retriever.open(folder, analyzer=analyzer).passage_ids), 0
        total = sum(1 for _ in located_lines(corpus)) if isinstance(corpus, (str, os.PathLike)) else len(corpus)
        progress = Progress(total, f"index {folder}")
        count = build_postings(folder, corpus, analyzer, workers, progress.update)
        progress.close()
    return count, count


def main(cfg: RetrieverConfig) -> dict | None:
    """Build what `cfg.kind` needs from `cfg.corpus` under `cfg.index`; what is finished there is left alone.

    Under torchrun every rank encodes its share of a dense index on its own GPU; rank 0 makes BM25 and the report.
    """
    if cfg.kind == "remote":
        raise RetrieverError("kind=remote has no index here; build it where serve.py runs, with the kind it serves")
    if not cfg.corpus or not cfg.index:
        raise RetrieverError(f"building needs corpus and index; corpus is {cfg.corpus!r}, index {cfg.index!r}. Give "
                             "corpus=FILE index=FOLDER.")
    if cfg.kind != "bm25" and not cfg.encoder:
        _load(cfg)  # its error, before anything is built
    where = setup() if "RANK" in os.environ else None
    try:
        return _build(cfg, where.rank if where else 0)
    finally:
        cleanup()


def _build(cfg: RetrieverConfig, rank: int) -> dict | None:
    started, dim, truncated = time.monotonic(), None, 0
    count = indexed = 0
    if cfg.kind != "dense" and rank == 0:
        count, indexed = build_bm25(Path(cfg.index, "bm25"), cfg.corpus, cfg.analyzer, cfg.bm25_workers)
    if cfg.kind != "bm25":
        model, tokenizer, encoder = _load(cfg)
        workers = cfg.workers
        if workers < 0:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            workers = min(16, max(os.cpu_count() // here - 1, 1)) if next(model.parameters()).is_cuda else 0
        index = build_index(Path(cfg.index, "dense"), cfg.corpus, model, tokenizer, encoder, cfg.shard_size,
                            _batch_tokens(cfg, model), workers)
        count, indexed, dim = len(index.ids), index.encoded, index.size
        truncated = sum(shard["truncated"] for shard in index.meta["shards"])
        if cfg.faiss and rank == 0:
            build_faiss(faiss_folder(cfg), index.shards, cfg.faiss, faiss_source(index), cfg.nprobe, cfg.ef_search)
    if rank:
        return None
    save_config(cfg, os.path.join(cfg.index, "config.yaml"))
    seconds = time.monotonic() - started
    size = sum(p.stat().st_size for p in Path(cfg.index).rglob("*") if p.is_file())
    return {"kind": cfg.kind, "index": cfg.index, "count": count, "dim": dim, "indexed": indexed,
            "truncated": truncated, "seconds": round(seconds, 2),
            "passages_per_s": round(indexed / max(seconds, 1e-9), 1), "bytes": size}


# a question, the passage that answers it, and one that shares its words and doesn't
PROBES = (
    ("how do I fix a flat bicycle tire",
     "Remove the wheel, pull out the inner tube, find the puncture and glue a patch over it.",
     "How do I fix the price of a flat in a city where rents rise every year?"),
    ("what is the capital of France",
     "Paris, on the Seine, has been the seat of the country's government for centuries.",
     "What is working capital? It is what a company in France owns less what it owes."),
    ("why do cats purr",
     "Felines make the low, vibrating sound when content, and also to calm themselves when hurt.",
     "Why do people keep cats in films about witches? They look mysterious."),
    ("how long does it take to boil an egg",
     "Leave it in simmering water for six minutes if the yolk should stay soft, ten if hard.",
     "How long does it take an egg of the sea turtle to hatch? About two months on the beach."),
    ("symptoms of the flu",
     "Fever, chills, aching muscles, cough and tiredness begin suddenly after infection with influenza.",
     "Symptoms of a failing battery: the engine turns slowly and the lights are dim."),
    ("who wrote romeo and juliet",
     "Shakespeare finished the tragedy about two young lovers in Verona around 1595.",
     "Romeo and Juliet are the names of two moons in a novel, and nobody knows who wrote it."),
    ("when was the first moon landing",
     "Armstrong and Aldrin stepped onto the lunar surface from Apollo 11 in July 1969.",
     "The first landing of the stairs was painted when the moon was full."),
    ("how to save money on electricity bills",
     "Switch off unused appliances, insulate the house and replace bulbs with LEDs.",
     "How to pay bills for a wedding with money that guests leave in a box."),
)


def check(cfg: RetrieverConfig) -> dict:
    """`python retriever.py check encoder=… [index=…]`: rank a few sentences, to see that the weights are right.

    Prints the rank of every question's answer among 16 passages.  A trained encoder puts nearly every answer above the
    passages of all other questions; random weights, a wrong pooling or a wrong model put about one in fifteen there.
    High scores mean nothing by themselves: ANCE's vectors lie in a narrow cone, strangers have a cosine above 0.95.
    With an index: also whether this encoder built it.
    """
    if not cfg.encoder:
        raise RetrieverError("check needs an encoder: give encoder=FOLDER or a hub name")
    model, tokenizer, encoder = _load(cfg)
    if cfg.index:
        open_index(Path(cfg.index, "dense"), model, tokenizer, encoder)
    queries = encode(model, tokenizer, [p[0] for p in PROBES], encoder, query=True)
    passages = encode(model, tokenizer, [p[1] for p in PROBES] + [p[2] for p in PROBES], encoder)
    scores, n = queries @ passages.T, len(PROBES)  # (n, 2 n)
    print(f"{cfg.encoder}: pooling {encoder.pooling}, {vector_size(model)} dimensions, normalised {encoder.normalise}, "
          f"prefixes {encoder.query_prefix!r} and {encoder.passage_prefix!r}, lengths {encoder.query_length} and "
          f"{encoder.passage_length}\n\n| question | rank of its answer | score | best of the other questions' |\n"
          "|---|---|---|---|")
    first, ranks = 0, []
    for i, (question, *_) in enumerate(PROBES):
        own = scores[i, i]
        strangers = scores[i, [j for j in range(2 * n) if j % n != i]].amax()
        ranks.append(int((scores[i] >= own).sum()))
        first += bool(own > strangers)
        print(f"| {question} | {ranks[-1]} of {2 * n} | {own:.4f} | {strangers:.4f} |")
    cosine = F.normalize(passages, dim=-1) @ F.normalize(passages, dim=-1).T
    mean = (cosine.sum() - 2 * n) / (2 * n * (2 * n - 1))
    print(f"\n{first} of {n} answers stand above all passages of other questions; cosine of two passages {mean:.3f} on "
          "average")
    random_looking = first < 5
    if random_looking:
        print(f"warning: this ranking looks random ({first} of {n}). Look whether {cfg.encoder} holds trained weights "
              "of a retriever, whether pooling and prefixes are those it was trained with, and whether the tokenizer is "
              "its own.", file=sys.stderr)
    return {"encoder": cfg.encoder, "pooling": encoder.pooling, "dim": vector_size(model), "above_strangers": first,
            "questions": n, "mrr": round(sum(1 / r for r in ranks) / n, 4), "random_looking": random_looking}


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        run(RetrieverConfig, check, sys.argv[2:])
    else:
        run(RetrieverConfig, main)
