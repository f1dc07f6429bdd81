"""Encoders, dense indexes, and the command that builds a retriever's index.

    python retriever.py kind=dense corpus=FILE encoder=FOLDER index=OUT   # build
    python retriever.py check encoder=FOLDER                              # test an encoder

docs/retrieval.md defines the order of lists and ranks.

Shapes: B texts, L tokens, D embedding size, Q queries.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Literal, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import run, save_config
from distributed import cleanup, setup
from runs import Progress, claim_folder, only_writer
from search.bm25 import BM25Retriever, build_postings
from search.client import RemoteRetriever, RetrieverAway  # noqa: F401  names of this module, too
from search.dense_index import (  # noqa: F401
    WINDOW,
    Index,
    VectorRetriever,
    build_shards,
    encoder_identity,
    faiss_place,
    open_shards,
)
from search.faiss_index import FaissIndex, build_faiss
from search.fusion import HybridRetriever
from search.packed import PackedModel, can_pack
from search.passages import (  # noqa: F401
    FAILED,
    Corpus,
    RetrieverConfig,
    RetrieverError,
    Source,
    check_same,
    read_meta,
    retriever_settings,
    same_corpus,
)
from search.probes import PROBES, rank_probes

# ------------------------------------------------------------------------------------ encoders
# Copies out alone with the non-project imports and a ValueError named RetrieverError.


@dataclass(frozen=True)
class Encoder:
    """How a model turns texts into vectors."""

    pooling: Literal["ance", "mean", "first"] = "mean"  # ANCE's head, token mean, first token
    normalise: bool = True  # to an L2 norm of 1
    query_prefix: str = ""
    passage_prefix: str = ""
    query_length: int = 512  # tokens, special ones included
    passage_length: int = 384
    name: str = field(default="", compare=False)  # folder or hub name


ANCE_ENCODER = Encoder("ance", normalise=False)
E5_ENCODER = Encoder("mean", query_prefix="query: ", passage_prefix="passage: ")
MEAN_ENCODER = Encoder("mean")  # all-MiniLM and its like


class ANCE(nn.Module):
    """LayerNorm(Linear(RoBERTa's first token state)), arXiv 2007.00808.

    Parameters are named as in castorini/ance-msmarco-passage.
    """

    UNUSED = re.compile(r"classifier\.|roberta\.pooler\.|roberta\.embeddings\.\w+_ids$")

    def __init__(self, config):
        super().__init__()
        from transformers import RobertaModel

        self.config = config
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.embeddingHead = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)

    def head(self, first: Tensor) -> Tensor:
        """Map (B, D) first-token states to (B, D) vectors."""
        return self.norm(self.embeddingHead(first))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode (B, L) ids and mask to (B, D) vectors."""
        states = self.roberta(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(states[:, 0])

    @classmethod
    def from_pretrained(cls, name: str) -> ANCE:
        """Load a checkpoint. RuntimeError: missing, unknown or misshapen tensors."""
        from transformers import AutoConfig

        model = cls(AutoConfig.from_pretrained(name, trust_remote_code=False))
        state = _state_dict(name)
        model.load_state_dict({k: v for k, v in state.items() if not cls.UNUSED.match(k)})
        return model.eval()


def _model_file(name: str, filename: str) -> Path | None:
    """A file of the folder or hub model `name`; None if it is not there."""
    from transformers.utils import cached_file

    path = cached_file(name, filename, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None


def _model_json(name: str, filename: str) -> Any:
    path = _model_file(name, filename)
    return json.loads(path.read_text("utf-8")) if path else None


def _state_dict(name: str) -> dict[str, Tensor]:
    """Load the one weight file; {} if there is none."""
    if path := _model_file(name, "model.safetensors"):
        return load_file(path)
    path = _model_file(name, "pytorch_model.bin")
    return torch.load(path, map_location="cpu", weights_only=True) if path else {}


def detect_encoder(name: str, pooling: str | None = None) -> Encoder:
    """Read settings from the name (E5) and sentence-transformers files; a given `pooling` wins."""
    cached = re.findall(r"models--[^/]*--([^/]*)", name)  # a folder of the hub's cache
    own = (cached[-1] if cached else Path(name).name).lower()
    encoder = E5_ENCODER if re.search(r"(^|[-_.])e5([-_.]|$)", own) else MEAN_ENCODER
    if modules := _model_json(name, "modules.json"):
        kinds = {module["type"].rsplit(".", 1)[-1] for module in modules}
        unknown = kinds - {"Transformer", "Pooling", "Normalize"}
        if pooling is None and unknown:
            raise RetrieverError(
                f"{name} has the module {min(unknown)}, which is not built here; use another "
                "model, or give pooling=mean or first"
            )
        encoder = replace(encoder, normalise="Normalize" in kinds)
    if pooling is None and (settings := _model_json(name, "1_Pooling/config.json")):
        flags = [k for k, on in settings.items() if k.startswith("pooling_mode_") and on is True]
        modes = settings.get("pooling_mode") or flags  # since 5.4: one name or several
        mode = modes if isinstance(modes, str) else " ".join(modes)
        known = {"mean": "mean", "cls": "first"}
        pooling = known.get(re.sub("pooling_mode_|_tokens?$", "", mode))
        if pooling is None:
            raise RetrieverError(
                f"{name} pools by {modes}, which is not built here; give pooling=mean or first"
            )
    if limits := _model_json(name, "sentence_bert_config.json"):
        most = limits.get("max_seq_length") or 512
        encoder = replace(encoder, query_length=min(512, most), passage_length=min(384, most))
    return replace(encoder, pooling=pooling or "mean")


def position_limit(config: Any) -> int:
    """Longest input in tokens (RoBERTa-like models reserve positions for padding)."""
    most = getattr(config, "max_position_embeddings", None) or sys.maxsize
    padded = config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet")
    return most - (config.pad_token_id + 1 if padded else 0)


def _load_tokenizer(name: str) -> Any:
    """Load the tokenizer; fail without its files, as transformers would invent one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    files = list(type(tokenizer).vocab_files_names.values())
    invented = type(tokenizer) is not PreTrainedTokenizerFast and files
    if invented and not any(_model_file(name, file) for file in files):
        raise RetrieverError(
            f"{name} has no {' and no '.join(reversed(files))}: its tokenizer is missing; copy it "
            "from where the weights came from"
        )
    return tokenizer


def _load_model(name: str, config: Any, pooling: str | None) -> tuple[nn.Module, Encoder]:
    from transformers import AutoModel
    from transformers.utils import logging

    is_ance = config.model_type == "roberta" and "embeddingHead.weight" in _state_dict(name)
    if pooling is not None and (pooling == "ance") != is_ance:
        raise RetrieverError(
            f"pooling is {pooling!r}, but {name} is {'an' if is_ance else 'no'} ANCE checkpoint "
            "(RoBERTa with embeddingHead); leave pooling unset"
        )
    if is_ance:
        return ANCE.from_pretrained(name), ANCE_ENCODER
    decoders = [a for a in config.architectures or [] if re.search("CausalLM|LMHead|Generation", a)]
    if decoders and pooling is None and not _model_file(name, "modules.json"):
        raise RetrieverError(
            f"{name} is a language model ({decoders[0]}), no encoder; give an encoder's folder, or "
            "pooling=mean to use it all the same"
        )
    encoder, level = detect_encoder(name, pooling), logging.get_verbosity()
    logging.set_verbosity_error()  # missing tensors are handled below
    model, info = AutoModel.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    logging.set_verbosity(level)
    if missing := sorted(k for k in info["missing_keys"] if not k.startswith("pooler.")):
        raise RetrieverError(
            f"{name} lacks {len(missing)} tensors ({', '.join(missing[:5])}); complete the folder"
        )
    if hasattr(model, "pooler"):
        model.pooler = None  # unused, may be random
    return model, encoder


def load_encoder(name: str, device: str = "auto", **overrides) -> tuple[nn.Module, Any, Encoder]:
    """Load a model (float32, eval mode), tokenizer and settings from a folder or hub name.

    overrides: fields of `Encoder`; None keeps the detected value
    RetrieverError: missing files or tensors, an unfit tokenizer or pooling.
    """
    from transformers import AutoConfig

    overrides = {k: v for k, v in overrides.items() if v is not None}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = _load_tokenizer(name)
        model, encoder = _load_model(name, config, overrides.get("pooling"))
    except RetrieverError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as e:
        local = name.startswith((".", "/", "~")) or name.count("/") > 1  # not a hub name
        local = local or os.path.isdir(os.path.dirname(name))
        gone = local and not os.path.exists(name)
        reason = "there is no such folder" if gone else " ".join(str(e).split())[:200]
        raise RetrieverError(
            f"encoder {name!r} can't be loaded ({reason}); give a folder with config.json, "
            "tokenizer and weights, or a hub name"
        ) from e
    rows = getattr(model, "roberta", model).get_input_embeddings().num_embeddings
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise RetrieverError(
            f"{name}: its tokenizer has ids up to {highest}, its model {rows} embeddings; use the "
            "tokenizer that the model was trained with"
        )
    encoder, most = replace(encoder, name=name, **overrides), position_limit(config)
    lengths = {k: min(getattr(encoder, k), most) for k in ("query_length", "passage_length")}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.float().eval().to(device), tokenizer, replace(encoder, **lengths)


def default_encoder(model: nn.Module) -> Encoder:
    return ANCE_ENCODER if isinstance(model, ANCE) else MEAN_ENCODER


def truncate(tokens: list[np.ndarray], length: int, ends: set[int]) -> list[np.ndarray]:
    """Cut token ids to `length`, but keep a final token of `ends` (</s>, [SEP])."""

    def cut(ids: np.ndarray) -> np.ndarray:
        return np.append(ids[: length - 1], ids[-1] if ids[-1] in ends else ids[length - 1])

    return [cut(ids) if len(ids) > length else ids for ids in tokens]


def mean_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Average (B, L, D) states over a (B, L) mask → (B, D), 0 for an empty mask."""
    mask = attention_mask.bool().unsqueeze(-1)
    return hidden.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp(min=1)


class PaddedModel:
    """Encodes texts in batches padded to the longest text."""

    def __init__(self, model: nn.Module, batch_tokens: int, pad: int):
        self.model, self.batch_tokens, self.pad = model, batch_tokens, pad

    def batches(self, lengths: Sequence[int]) -> Iterator[slice]:
        """Split texts, longest first, into batches."""
        start = 0
        while start < len(lengths):
            step = max(self.batch_tokens // max(lengths[start], 1), 1)
            yield slice(start, start + step)
            start += step

    def vectors(self, tokens: list[np.ndarray], encoder: Encoder) -> Tensor:
        """Encode B texts → (B, D) on the model's device, not normalised."""
        device = next(self.model.parameters()).device
        texts = [torch.from_numpy(ids).long() for ids in tokens]
        input_ids = pad_sequence(texts, True, self.pad)
        if not input_ids.shape[1]:  # all are empty: one padding token
            input_ids = input_ids.new_full((len(texts), 1), self.pad)
        input_ids = input_ids.to(device)  # (B, L)
        lengths = torch.tensor([len(ids) for ids in tokens], device=device)
        mask = (torch.arange(input_ids.shape[1], device=device) < lengths[:, None]).long()
        if encoder.pooling == "ance":
            return self.model(input_ids, mask)
        hidden = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state.float()
        return hidden[:, 0] if encoder.pooling == "first" else mean_pool(hidden, mask)


def packed_model(model: nn.Module, batch_tokens: int, length: int) -> Any:
    """Return a `PackedModel`, or None where packing is not available."""
    try:
        from search.packed import PackedModel, can_pack
    except ImportError:
        return None
    return PackedModel(model, batch_tokens, length) if can_pack(model) else None


@torch.no_grad()
def encode_tokens(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    encoder: Encoder,
    pad: int,
    batch_tokens: int = 8192,
    packed: Any = None,
    progress: Callable[[int], Any] = lambda n: None,
) -> Tensor:
    """Encode int32 token ids → (len(tokens), D) float32 on the model's device, in order.

    Equal texts are encoded once; on CUDA a float32 model uses bf16 autocast.
    packed: from `packed_model`; progress: called with the number of texts just encoded
    """
    keys = [ids.tobytes() for ids in tokens]
    distinct = sorted(dict(zip(keys, tokens)).values(), key=len, reverse=True)
    reader = packed if all(map(len, tokens)) and packed else PaddedModel(model, batch_tokens, pad)
    device, weights = next(model.parameters()).device, next(model.parameters()).dtype
    mixed = device.type == "cuda" and weights == torch.float32
    vectors = [torch.empty(0, model.config.hidden_size, device=device)]
    for rows in reader.batches([len(ids) for ids in distinct]):
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            out = reader.vectors(distinct[rows], encoder).float()
            vectors.append(F.normalize(out, dim=-1) if encoder.normalise else out)
        progress(len(out))
    progress(len(tokens) - len(distinct))
    row = {ids.tobytes(): i for i, ids in enumerate(distinct)}
    rows = torch.tensor([row[key] for key in keys], dtype=torch.long)
    if device.type == "cuda":  # does not wait for the device
        rows = rows.pin_memory().to(device, non_blocking=True)
    return torch.cat(vectors)[rows]


def encode(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    encoder: Encoder | None = None,
    query: bool = False,
    batch_tokens: int = 8192,
    cut: list[bool] | None = None,
    progress: Callable[[int], Any] = lambda n: None,
) -> Tensor:
    """Encode texts → (len(texts), D) float32 on the CPU, in order.

    encoder: by default `ANCE_ENCODER` for an ANCE model, else `MEAN_ENCODER`
    query: use the prefix and length of queries
    cut: extended by a flag per text, whether it was cut; progress: see `encode_tokens`
    """
    encoder = encoder or default_encoder(model)
    prefix = encoder.query_prefix if query else encoder.passage_prefix
    length = encoder.query_length if query else encoder.passage_length
    tokens = []
    for start in range(0, len(texts), 1024):
        batch = tokenizer([prefix + t for t in texts[start : start + 1024]], verbose=False)
        tokens += [np.array(ids, dtype=np.int32) for ids in batch["input_ids"]]
    length = min(length, position_limit(model.config))
    if cut is not None:
        cut += [len(ids) > length for ids in tokens]
    tokens = truncate(tokens, length, set(tokenizer.all_special_ids))
    packed, pad = packed_model(model, batch_tokens, length), tokenizer.pad_token_id or 0
    return encode_tokens(model.eval(), tokens, encoder, pad, batch_tokens, packed, progress).cpu()


# --------------------------------------------------------------------------------- dense index


def build_index(
    folder: str | os.PathLike,
    corpus: Source,
    model: nn.Module,
    tokenizer: Any,
    encoder: Encoder | None = None,
    shard_size: int = 65536,
    batch_tokens: int = 8192,
    workers: int = 0,
) -> Index:
    """Encode a corpus into `folder`: fp16 shards of `shard_size` passages, ids, meta.json.

    Makes only missing or damaged shards, always with the same bytes. In a process group each rank
    makes its share (a collective).

    workers: processes that read and tokenise; 0: this one
    RetrieverError: the folder has another index, a vector is not finite, the corpus is empty or
    repeats an id, the disk is full. DataError: another build is at work in the folder.
    """
    encoder = encoder or default_encoder(model)
    length, fast, packed = min(encoder.passage_length, position_limit(model.config)), model, None
    if can_pack(model):
        fast = copy.deepcopy(model).to(torch.bfloat16)
        packed = PackedModel(fast, batch_tokens, length, compiled=True)

    def vectors(tokens: list[np.ndarray], progress: Callable[[int], Any]) -> tuple[Tensor, int]:
        short = truncate(tokens, length, set(tokenizer.all_special_ids))
        pad = tokenizer.pad_token_id or 0
        part = encode_tokens(fast.eval(), short, encoder, pad, batch_tokens, packed, progress)
        return part.half(), sum(len(ids) > length for ids in tokens)

    parts = model, tokenizer, encoder, vectors, shard_size, workers
    encoded = build_shards(Path(folder), corpus, *parts)
    return replace(open_index(folder), encoded=encoded)


def open_index(
    folder: Index | str | os.PathLike,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    encoder: Encoder | None = None,
    verify: bool = False,
) -> Index:
    """Open an index; RetrieverError as by `open_shards`, or if `model` did not build it."""
    index = folder if isinstance(folder, Index) else open_shards(Path(folder), verify)
    if model is not None and index.meta:
        identity = encoder_identity(model, tokenizer, encoder or default_encoder(model))
        name = index.meta.get("encoder") or "unnamed"
        way_out = f"Open it with the encoder that built it ({name}), or build another index."
        check_same(index.folder, index.meta, identity, way_out)
    return index


class DenseRetriever(VectorRetriever):
    """Search with the encoder that built the index."""

    def __init__(
        self,
        index: Index | str | os.PathLike,
        model: nn.Module,
        tokenizer: Any,
        encoder: Encoder | None = None,
        batch_tokens: int = 8192,
        across: bool = False,
        faiss: FaissIndex | None = None,
    ):
        """index: a folder or an open index"""
        index = open_index(index, model, tokenizer, encoder)
        super().__init__(index, next(model.parameters()).device, across, faiss)
        self.encoding = model, tokenizer, encoder, batch_tokens
        self._encoding = threading.Lock()  # fast tokenizers are not thread-safe

    def prepare(self, queries: list[str]) -> tuple[Tensor, list[bool]]:
        model, tokenizer, encoder, batch_tokens = self.encoding
        bar, cut = Progress(len(queries), "encode", "queries"), []
        with self._encoding:
            settings = encoder, True, batch_tokens, cut, bar.update
            vectors = encode(model, tokenizer, queries, *settings)
        bar.close()
        return vectors, cut


# --------------------------------------------------------------------------- configuration, entry


def _load(cfg: RetrieverConfig) -> tuple[nn.Module, Any, Encoder, int]:
    if not cfg.encoder:
        raise RetrieverError("an encoder is needed: give encoder=FOLDER or a hub name")
    keys = ("normalise", "query_prefix", "passage_prefix", "query_length", "passage_length")
    settings = {key: getattr(cfg, key) for key in keys}
    settings["pooling"] = None if cfg.pooling == "auto" else cfg.pooling
    model, tokenizer, encoder = load_encoder(cfg.encoder, cfg.device, **settings)
    batch_tokens = cfg.batch_tokens or (65536 if next(model.parameters()).is_cuda else 8192)
    return model, tokenizer, encoder, batch_tokens


def warn_of_idle(cfg: RetrieverConfig) -> None:
    """Name settings that speak for another `kind`, which is bm25 unless it is given."""
    for key, kinds in (("encoder", ("dense", "hybrid")), ("url", ("remote",))):
        if (value := getattr(cfg, key)) and cfg.kind not in kinds:
            print(
                f"warning: {key}={value} has no effect with kind={cfg.kind}; it is for "
                f"kind={' or '.join(kinds)}",
                file=sys.stderr,
            )


def open_retriever(
    cfg: RetrieverConfig,
) -> BM25Retriever | DenseRetriever | HybridRetriever | RemoteRetriever:
    """Open the configured retriever: saved indexes, or for BM25 just a corpus."""
    warn_of_idle(cfg)
    if cfg.kind == "remote":
        return RemoteRetriever(cfg.url, cfg.timeout, cfg.retries, batch=cfg.request_queries)
    if not cfg.index and not (cfg.kind == "bm25" and cfg.corpus):
        raise RetrieverError(
            f"kind={cfg.kind} needs an index; build it with python retriever.py kind={cfg.kind} "
            "corpus=FILE index=OUT (and encoder=FOLDER), then give retriever.index=OUT; for bm25 "
            "retriever.corpus=FILE does"
        )
    same_corpus(cfg, cfg.corpus)
    if cfg.kind != "bm25":
        index, faiss = open_index(Path(cfg.index, "dense"), verify=cfg.verify), None
        if cfg.faiss:  # before any model is loaded
            faiss = FaissIndex(*faiss_place(index, cfg.index, cfg.faiss), cfg.nprobe, cfg.ef_search)
        across = cfg.across_ranks and dist.is_initialized()
        dense = DenseRetriever(index, *_load(cfg), across, faiss)
        if cfg.kind == "dense":
            return dense
    folder = Path(cfg.index, "bm25")
    settings = cfg.k1, cfg.b, cfg.query_words, cfg.analyzer, cfg.bm25_workers
    if cfg.index and (folder.is_dir() or not cfg.corpus):
        bm25 = BM25Retriever.open(folder, *settings, verify=cfg.verify)
    else:
        bm25 = BM25Retriever(cfg.corpus, *settings)
    if cfg.kind == "bm25":
        return bm25
    return HybridRetriever(dense, bm25, cfg.depth, cfg.rrf_k, cfg.weights)


def build_bm25(cfg: RetrieverConfig) -> dict[str, int]:
    """Build a missing BM25 index; return the numbers of passages and of newly indexed ones."""
    folder = Path(cfg.index, "bm25")
    with only_writer(cfg.index, "bm25"):
        if meta := read_meta(folder):
            now = {"corpus": Corpus(cfg.corpus).digest, "analyzer": cfg.analyzer}
            check_same(folder, meta, now)
            with contextlib.suppress(RetrieverError):  # damaged or another version: rebuild
                index = BM25Retriever.open(folder, analyzer=cfg.analyzer, verify=True)
                return {"count": len(index.passage_ids), "indexed": 0}
        count = build_postings(folder, cfg.corpus, cfg.analyzer, cfg.bm25_workers)
        return {"count": count, "indexed": count}


def main(cfg: RetrieverConfig) -> dict | None:
    """Build what `cfg.kind` needs in `cfg.index`, except finished parts.

    Under torchrun all ranks encode; rank 0 does the rest and reports.
    """
    if cfg.kind == "remote":
        raise RetrieverError("kind=remote has no index here; build it where serve.py runs")
    if not cfg.corpus or not cfg.index:
        raise RetrieverError("building needs a corpus and an index: give corpus=FILE index=FOLDER")
    claim_folder(cfg.index, "retriever.py")
    warn_of_idle(cfg)
    if "RANK" in os.environ:
        setup()
    try:
        return _build(cfg)
    finally:
        cleanup()


def _build(cfg: RetrieverConfig) -> dict | None:
    started, first = time.monotonic(), not dist.is_initialized() or dist.get_rank() == 0
    report = {"kind": cfg.kind, "index": cfg.index, "dim": None, "truncated": 0}
    if cfg.kind != "bm25":
        model, tokenizer, encoder, batch_tokens = _load(cfg)
        workers = cfg.workers
        if workers < 0:
            share = os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1
            workers = min(16, max(share, 1)) if next(model.parameters()).is_cuda else 0
        parts = model, tokenizer, encoder, cfg.shard_size, batch_tokens, workers
        index = build_index(Path(cfg.index, "dense"), cfg.corpus, *parts)
        report |= {"count": len(index.ids), "indexed": index.encoded, "dim": index.meta["dim"]}
        report["truncated"] = index.cut_passages
        if cfg.faiss and first:
            folder, source = faiss_place(index, cfg.index, cfg.faiss)
            build_faiss(folder, index.shards, cfg.faiss, source, cfg.nprobe, cfg.ef_search)
    if not first:
        return None
    if cfg.kind != "dense":
        report = build_bm25(cfg) | report  # hybrid: dense figures
    save_config(cfg, os.path.join(cfg.index, "config.yaml"))
    seconds = time.monotonic() - started
    size = sum(p.stat().st_size for p in Path(cfg.index).rglob("*") if p.is_file())
    report |= {"seconds": round(seconds, 2), "bytes": size}
    return report | {"passages_per_s": round(report["indexed"] / max(seconds, 1e-9), 1)}


def check(cfg: RetrieverConfig) -> dict:
    """Rank test sentences; RetrieverError if the encoder did not build `cfg.index`."""
    model, tokenizer, encoder, _ = _load(cfg)
    if cfg.index:
        open_index(Path(cfg.index, "dense"), model, tokenizer, encoder)
    questions, answers, others = zip(*PROBES)
    queries = encode(model, tokenizer, questions, encoder, query=True)
    passages = encode(model, tokenizer, answers + others, encoder)
    print(encoder)
    report = {"encoder": cfg.encoder, "pooling": encoder.pooling, "dim": queries.shape[1]}
    return report | rank_probes(queries, passages)


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        run(RetrieverConfig, check, sys.argv[2:])
    else:
        run(RetrieverConfig, main)
