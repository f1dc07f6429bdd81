"""A dense index: built on disk so that a killed build goes on, opened memory-mapped, and searched.

An index folder holds fp16 shards `shard-00000.npy` …, the ids and meta.json. How texts become
vectors is given: a tokenizer and a function from token ids to vectors.

Shapes: M passages, Q queries, D embedding size, B texts, T tokens of a row of texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from data import Passage, located_passages
from distributed import broadcast_object, gather_objects
from runs import Progress, atomic_write, only_writer
from search.exact import exact_gold_ranks, exact_search, merge_best, place
from search.faiss_index import FaissIndex
from search.fusion import best_rank
from search.passages import (
    FAILED,
    Hits,
    PassageIds,
    RetrieverError,
    Survey,
    check_k,
    check_queries,
    check_same,
    corpus_bytes,
    gold_positions,
    mapped,
    read_ids,
    read_meta,
    survey,
    tokens_of,
    write_meta,
)

TASK, WINDOW = 2048, 16384  # passages tokenised together; sorted by length and encoded together
Encode = Callable[[list[np.ndarray], Callable[[int], None]], tuple[Tensor, int]]


@dataclass
class Index:
    """Vectors of a corpus: `shards` are memory-mapped arrays (M_i, D), in the order of `ids`."""

    ids: PassageIds
    shards: list[np.ndarray]
    meta: dict = field(default_factory=dict)
    folder: str = "(in memory)"
    encoded: int = 0  # passages that the call which returned this encoded itself

    @property
    def size(self) -> int:
        """D, the length of a vector."""
        return self.shards[0].shape[1]

    @property
    def cut_passages(self) -> int:
        """Passages that were longer than the encoder reads."""
        return sum(entry["truncated"] for entry in self.meta.get("shards", []))


# --------------------------------------------------------------------------------------- build


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """sha256 over what decides a vector: weights, form of the network, tokens of a probe text."""
    digest = hashlib.sha256()
    keys = (
        "model_type",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "layer_norm_eps",
    )
    form = {k: getattr(model.config, k, None) for k in keys}
    probe = "Où est-ce? The QUICK brown fox's 1,234 jumps; naïve 東京"
    digest.update(json.dumps([form, tokenizer(probe)["input_ids"]]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()


def encoder_identity(model: nn.Module, tokenizer: Any, encoder: Any) -> dict:
    """What of an encoder an index and its queries must share: all but the length of queries."""
    settings = {k: v for k, v in asdict(encoder).items() if k not in ("name", "query_length")}
    dim = {"dim": model.config.hidden_size}
    return dim | settings | {"fingerprint": fingerprint(model, tokenizer)}


def check_encoder(index: Index, model: nn.Module, tokenizer: Any, encoder: Any) -> None:
    """RetrieverError where another encoder, or another setting of it, built the index."""
    name = index.meta.get("encoder") or "unnamed"
    way_out = f"Open it with the encoder that built it ({name}), or build another index."
    check_same(index.folder, index.meta, encoder_identity(model, tokenizer, encoder), way_out)


def build_shards(
    folder: Path,
    corpus: str | os.PathLike | Sequence[Passage],
    tokenizer: Any,
    prefix: str,
    encode: Encode,
    identity: dict,
    notes: dict,
    shard_size: int,
    workers: int,
) -> int:
    """Encode a corpus into `folder`; the number of passages that were encoded now.

    tokenizer, prefix: make token ids, uncut, of prefix + passage
    encode: (token ids of a window, progress) → (fp16 vectors (len, D), texts that were cut)
    identity: what the index is bound to, "dim" (D) among it; notes: more entries of meta.json

    A shard appears whole or not at all, with its checksum beside it, which moves to meta.json when
    all shards are there. A build that goes on makes the shards that are missing or damaged. In a
    process group each rank makes its share. RetrieverError: the folder holds another index.
    """
    if shard_size < 1:
        raise RetrieverError(f"shard_size is {shard_size}; it must be at least 1. Usual is 65536.")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Survey, dict]:
            stack.enter_context(only_writer(os.fspath(folder)))
            found = survey(corpus, folder, lambda i: i % shard_size % TASK == 0)
            meta = read_meta(folder)
            wanted = {"format": "dense-2", "count": found.count, "corpus": found.fingerprint}
            wanted |= {"shard_size": shard_size, **identity}
            if meta is None:
                meta = wanted | notes | {"complete": False, "shards": []} | corpus_bytes(corpus)
                write_meta(folder, meta)
            check_same(folder, meta, wanted, "Choose another folder, or delete this one.")
            return found, meta

        found, meta = _on_first_rank(begin)
        firsts = range(0, found.count, shard_size)
        spans = [range(first, min(first + shard_size, found.count)) for first in firsts]
        mine = range(rank, len(spans), world)
        missing = {n: spans[n] for n in mine if not _is_sound(folder, n, spans[n], meta)}
        encoded = sum(map(len, missing.values()))
        if missing:
            _check_space(folder, encoded * identity["dim"] * 2)
            starts = dict(zip((first for span in spans for first, _ in _tasks(span)), found.starts))
            tasks = [task for span in missing.values() for task in _tasks(span)]
            tokens = _tokens(corpus, tasks, starts, tokenizer, prefix, workers)
            with contextlib.closing(tokens):
                _encode_shards(folder, missing, tokens, encode, identity["dim"])
        if world > 1:
            encoded = sum(gather_objects(encoded))
        _on_first_rank(lambda: _finish(folder, meta, spans, encoded))
    return encoded


def _on_first_rank(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises on rank 0, on every rank."""
    if not dist.is_initialized():
        return work()
    result: Any = None
    if dist.get_rank() == 0:
        try:
            result = work()
        except (ValueError, OSError) as e:
            result = e
    result = broadcast_object(result)
    if isinstance(result, Exception):
        raise result
    return result


def _tasks(span: range) -> list[tuple[int, int]]:
    """(first passage, number of passages) of every task of a shard."""
    return [(n, min(TASK, span.stop - n)) for n in range(span.start, span.stop, TASK)]


def _tokens(
    corpus: str | os.PathLike | Sequence[Passage],
    tasks: Sequence[tuple[int, int]],
    starts: dict[int, tuple[int, int]],
    tokenizer: Any,
    prefix: str,
    workers: int,
) -> Iterator[list[np.ndarray]]:
    """Token ids, uncut, of every passage of every task, in order.

    starts: of a corpus file, the place (line, byte) at which each task begins
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if starts and workers and fast:
        places = [(starts[first], n) for first, n in tasks]
        yield from tokens_of(os.fspath(corpus), places, fast.to_str(), prefix, workers)
        return
    for first, n in tasks:
        if starts:
            rows = islice(located_passages(os.fspath(corpus), starts[first]), n)
            texts = [prefix + passage.contents for _, _, passage in rows]
        else:
            texts = [prefix + passage.contents for passage in corpus[first : first + n]]
        batch = tokenizer(texts, verbose=False)["input_ids"]
        yield [np.array(ids, dtype=np.int32) for ids in batch]


def _one_behind(items: Iterable) -> Iterator:
    """The items of an iterator, each when the next has been made."""
    items = iter(items)
    before = next(items)
    for item in items:
        yield before
        before = item
    yield before


def _encode_shards(
    folder: Path,
    missing: dict[int, range],
    tokens: Iterator[list[np.ndarray]],
    encode: Encode,
    dim: int,
) -> None:
    """Encode shards (number → passages) window by window.

    The device works on the next window while the host copies the last one, and a thread writes a
    shard while the next one is encoded.
    """
    bar = Progress(sum(map(len, missing.values())), f"index {folder}")

    def encoded() -> Iterator[tuple[int, range, range, Tensor, int]]:
        for number, span in missing.items():
            for first in range(span.start, span.stop, WINDOW):
                rows, window = range(first, min(first + WINDOW, span.stop)), []
                while len(window) < len(rows):
                    window += next(tokens)
                yield number, span, rows, *encode(window, bar.update)

    with ThreadPoolExecutor(1) as writer:
        written = None
        for number, span, rows, part, cut in _one_behind(encoded()):
            if rows.start == span.start:
                vectors, truncated = np.empty((len(span), dim), dtype=np.float16), 0
            refuse_nonfinite(part, rows, folder)
            vectors[rows.start - span.start : rows.stop - span.start] = part.cpu().numpy()
            truncated += cut
            if rows.stop == span.stop:
                if written is not None:
                    written.result()
                written = writer.submit(_write_shard, folder, number, vectors, truncated)
        written.result()
    bar.close()


def refuse_nonfinite(vectors: Tensor, rows: range, folder: Path) -> None:
    """RetrieverError that names the first of the passages `rows` whose vector is not finite.

    vectors: (len(rows), D) fp16; a number too large for fp16 is infinite there
    """
    finite = torch.isfinite(vectors).all(1)
    if not finite.all():
        bad = (~finite).nonzero()[:, 0].tolist()
        raise RetrieverError(
            f"the vector of passage {read_ids(folder)[rows[bad[0]]]!r} is not finite in fp16 "
            f"({len(bad)} such among {len(rows)}) and can't be ranked. Look at that passage, or "
            "use another encoder."
        )


def _write_shard(folder: Path, number: int, vectors: np.ndarray, truncated: int) -> None:
    """Write a shard (M_i, D) and then the entry that counts it as made."""
    path = folder / f"shard-{number:05d}.npy"
    with atomic_write(str(path), "wb") as f:
        np.save(f, vectors)
    entry = {"file": path.name, "rows": len(vectors), "truncated": truncated}
    entry |= {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    with atomic_write(str(path.with_suffix(".json"))) as f:
        json.dump(entry, f)


def _sha256(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RetrieverError(
            f"the index at {folder} needs another {needed / 1e9:,.1f} GB, but its disk has "
            f"{free / 1e9:,.1f} GB free; make room, or choose a folder on another disk"
        )


def _entry(folder: Path, number: int, meta: dict) -> dict | None:
    """The entry of a shard: beside it during a build, in meta.json afterwards."""
    path = folder / f"shard-{number:05d}.json"
    if not path.is_file():
        return meta["shards"][number] if meta["complete"] else None
    try:
        return json.loads(path.read_text())
    except ValueError:  # damaged: the shard is made again
        return None


def _is_sound(folder: Path, number: int, span: range, meta: dict) -> bool:
    """Is that shard there, whole and as it was written?"""
    entry, path = _entry(folder, number, meta), folder / f"shard-{number:05d}.npy"
    if entry is None or entry["rows"] != len(span) or not path.is_file():
        return False
    return path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"]


def _finish(folder: Path, meta: dict, spans: Sequence[range], encoded: int) -> None:
    """Move the entries of all shards to meta.json."""
    entries = [_entry(folder, n, meta) for n in range(len(spans))]
    if not all(entries):
        raise RetrieverError(
            f"the index at {folder} lacks {entries.count(None)} of its {len(spans)} shards: all "
            "ranks must see one folder, on a file system that they share. Run the command again."
        )
    if encoded or not meta["complete"]:
        write_meta(folder, meta | {"complete": True, "shards": entries})
    for n in range(len(spans)):
        (folder / f"shard-{n:05d}.json").unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- open


def open_shards(folder: Path, verify: bool = False) -> Index:
    """Open a finished index, memory-mapped.

    Sizes and shapes of all files are looked at; `verify` compares every shard with its checksum.
    RetrieverError: no index, an unfinished or a damaged one.
    """
    meta = read_meta(folder)
    if meta is None or meta.get("format") != "dense-2":
        out = folder.parent if folder.name == "dense" else "OUT"
        raise RetrieverError(
            f"there is no dense index at {folder}; build it with: python retriever.py kind=dense "
            f"corpus=FILE encoder=FOLDER index={out}"
        )
    again = "run the command that builds it again"
    if not meta["complete"]:
        shards = -(-meta["count"] // meta["shard_size"])
        done = sum(entry["rows"] for n in range(shards) if (entry := _entry(folder, n, meta)))
        raise RetrieverError(
            f"the index at {folder} is unfinished ({done:,} of {meta['count']:,} passages); "
            f"{again}: it goes on there"
        )
    try:  # "c": private pages, so that torch takes the arrays without a copy
        shards = [mapped(folder / entry["file"], "c") for entry in meta["shards"]]
        ids = read_ids(folder)
    except (OSError, ValueError) as e:
        raise RetrieverError(
            f"the index at {folder} is damaged ({e}); {again}: it replaces what is missing"
        ) from e
    shapes = [(entry["rows"], meta["dim"]) for entry in meta["shards"]]
    if [shard.shape for shard in shards] != shapes or len(ids) != meta["count"]:
        raise RetrieverError(
            f"the index at {folder} is damaged: its files hold {sum(map(len, shards)):,} vectors "
            f"and {len(ids):,} ids, meta.json says {meta['count']:,}. Delete it and build it again."
        )
    for entry in meta["shards"] if verify else []:
        if _sha256(folder / entry["file"]) != entry["sha256"]:
            raise RetrieverError(
                f"{folder}/{entry['file']} has another checksum than when it was written: it is "
                f"damaged; {again}: it makes that shard anew"
            )
    return Index(ids, shards, meta, os.fspath(folder))


# -------------------------------------------------------------------------------------- search


class VectorRetriever:
    """Inner-product search over an index; `encode_queries`, (Q, D) float32 on the
    CPU, is the subclass's. Safe among threads.

    Exact, on `device`. With `across`, in a process group, every rank holds its share of the shards,
    and `search` and `gold_ranks` are collectives: all ranks call them at the same time, each with
    its own queries (none at all is fine), and each gets its own answers from all passages.
    With `faiss` by that index: what it does not find has no rank, and `gold_ranks` reads the list
    of the best `cutoff` passages (and as many more as there are golds), by FAISS's scores.
    """

    def __init__(
        self,
        index: Index,
        device: torch.device,
        across: bool = False,
        faiss: FaissIndex | None = None,
    ):
        self.index, self.passage_ids, self.device = index, index.ids, device
        self.across, self.faiss = across, faiss
        self.first, shards = 0, index.shards  # number of the first passage held here
        if across:
            self.group = dist.new_group(backend="gloo")  # its own: a trainer may search in a thread
            rank, world = dist.get_rank(), dist.get_world_size()
            first, last = (len(shards) * r // world for r in (rank, rank + 1))
            self.first, shards = sum(map(len, shards[:first])), shards[first:last]
        self.shards = place(shards, device) if faiss is None else shards
        self.cut_queries, self.cut_passages = 0, index.cut_passages  # longer than the encoder reads

    @cached_property
    def _order(self) -> Tensor:
        """(M,) the place of each id in ascending order, on the device of the scores."""
        return torch.from_numpy(self.passage_ids.order).to(self.device)

    def _gathered(self, part: Any) -> list:
        """`part` of every rank of the group."""
        parts: list = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=self.group)
        return parts

    def _of_all_ranks(self, vectors: Tensor, golds: list) -> tuple[Tensor, list, slice]:
        """Query vectors (Q, D) and golds of all ranks, and where this rank's part of them lies."""
        parts = self._gathered((vectors, golds)) if self.across else [(vectors, golds)]
        before = sum(len(part) for part, _ in parts[: dist.get_rank()]) if self.across else 0
        joined = torch.cat([part for part, _ in parts]).to(self.device)
        return joined, sum((part for _, part in parts), []), slice(before, before + len(vectors))

    def _best(self, vectors: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """`exact_search` of (Q, D) vectors over the passages of all ranks."""
        if not self.across:
            return exact_search(vectors, self.shards, k, self._order)
        order = self._order[self.first : self.first + sum(map(len, self.shards))]
        scores, rows, failed = exact_search(vectors, self.shards, k, order)
        parts = self._gathered((scores.cpu(), rows.cpu() + self.first, failed.cpu()))
        scores, rows = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
        failed = torch.stack([part[2] for part in parts]).any(0)
        return *merge_best(scores, rows, self._order.cpu(), k), failed

    def _faiss_hits(self, vectors: Tensor, k: int) -> list[Hits | None]:
        if not len(vectors):
            return []
        out: list[Hits | None] = []
        for vector, scores, rows in zip(vectors, *self.faiss.search(vectors.numpy(), k)):
            pairs = zip(rows.tolist(), scores.tolist())
            found = [(self.passage_ids[row], score) for row, score in pairs if row >= 0]
            found.sort(key=lambda hit: (-hit[1], hit[0]))
            out.append(found if torch.isfinite(vector).all() else None)
        return out

    def hits(self, queries: Sequence[str], k: int) -> list[Hits | None]:
        """As `search`, with None for a query of which a score is NaN."""
        check_k(k)
        vectors = self.encode_queries(queries)
        if self.faiss is not None:
            return self._faiss_hits(vectors, k)
        vectors, _, own = self._of_all_ranks(vectors, [])
        out: list[Hits | None] = []
        for part in vectors.split(2048):
            for scores, rows, bad in zip(*(x.tolist() for x in self._best(part, k))):
                hits = [(self.passage_ids[row], score) for row, score in zip(rows, scores)]
                out.append(None if bad else hits)
        return out[own]

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The min(k, M) best passages of every query, by (score descending, id ascending)."""
        hits = self.hits(queries := check_queries(queries), k)
        if None in hits:
            bad = hits.index(None)
            raise RetrieverError(
                f"query {bad} ({queries[bad][:60]!r}) has a NaN score, so no order; look at the "
                "encoder's weights and at the index"
            )
        return hits

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> list[int | None]:
        """Rank of the best gold of every query; None beyond `cutoff`, FAILED on NaN."""
        check_k(cutoff, "cutoff")
        queries = check_queries(queries)
        golds = gold_positions(self.passage_ids, queries, gold_ids)
        vectors, out = self.encode_queries(queries), []
        if self.faiss is not None:
            lists = self._faiss_hits(vectors, cutoff + max(map(len, golds), default=0))
            for hits, rows in zip(lists, golds):
                gold = {self.passage_ids[row] for row in rows}
                out.append(FAILED if hits is None else best_rank(hits, gold, cutoff))
            return out
        vectors, golds, own = self._of_all_ranks(vectors, golds)
        group = (self.first, self.group) if self.across else ()
        for part in vectors.split(2048):
            some = golds[len(out) : len(out) + len(part)]
            out += exact_gold_ranks(part, self.shards, some, cutoff, *group)
        return out[own]


def faiss_folder(index: str, factory: str) -> Path:
    """Where a FAISS index lies: beside the dense one, named after its factory string."""
    return Path(index, "faiss-" + re.sub(r"\W+", "-", factory))


def faiss_source(index: Index) -> dict:
    """What of a dense index a FAISS index of it depends on."""
    keys = ("count", "dim", "corpus", "fingerprint", "pooling", "normalise")
    return {key: index.meta[key] for key in (*keys, "passage_prefix", "passage_length")}


# ----------------------------------------------------------------------- texts without padding


PACKABLE = ("bert", "roberta", "xlm-roberta", "camembert")  # take positions and pass keywords on


def can_pack(model: nn.Module) -> bool:
    """Can texts go through a model without padding: on CUDA, in a family that can."""
    family = model.config.model_type in PACKABLE and model.config.hidden_size % 8 == 0
    return family and next(model.parameters()).is_cuda


def _packed_attention(
    module, query, key, value, attention_mask, scaling, cu_seq_lens_q, max_length_q, **_
) -> tuple[Tensor, None]:
    """Attention of packed texts, (1, H, T, d) each → (1, T, H, d); every text sees itself alone."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, d)
    texts = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(query, key, value, *texts, scale=scaling)[None], None


class PackedModel:
    """A model that reads texts one behind the other in a row of tokens, without padding.

    With `compiled` every row is filled up to one shape, and the layers are compiled once.
    """

    def __init__(self, model: nn.Module, batch_tokens: int, longest: int, compiled: bool = False):
        """batch_tokens: tokens of a row; longest: of a text"""
        from transformers import AttentionInterface

        AttentionInterface.register("packed_texts", _packed_attention)
        self.model, self.core = model, getattr(model, "roberta", model)  # ANCE has a head beside it
        bert = model.config.model_type == "bert"  # the others begin behind the padding's position
        self.first_position = 0 if bert else model.config.pad_token_id + 1
        limit = model.config.max_position_embeddings - self.first_position
        self.longest, self.compiled = min(longest, limit), compiled
        self.row = max(batch_tokens, self.longest)
        self.texts = max(self.row // 64, 1)  # of a row at most: attention pays for every place
        if compiled:  # layer by layer, in seconds; the model as a whole takes minutes
            for layer in self.core.encoder.layer:
                layer.forward = torch.compile(layer.forward, dynamic=False)

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

    def states(self, input_ids: Tensor, positions: Tensor, starts: Tensor) -> Tensor:
        """(T,) ids and positions, (S + 1,) first tokens of S texts and the end → (T, D) states."""
        config, segments = self.core.config, torch.zeros_like(input_ids)
        texts = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        texts |= {"max_length_q": self.longest, "max_length_k": self.longest}
        tokens = {"input_ids": input_ids, "position_ids": positions, "token_type_ids": segments}
        usual, config._attn_implementation = config._attn_implementation, "packed_texts"
        try:
            out = self.core(**{name: x[None] for name, x in tokens.items()}, **texts)
        finally:
            config._attn_implementation = usual
        return out.last_hidden_state[0]

    def vectors(self, tokens: list[np.ndarray], encoder: Any) -> Tensor:
        """(B, D) float32 vectors of B texts that fill a row, on the device, not waited for."""
        device = next(self.model.parameters()).device
        lengths = np.array([len(t) for t in tokens])
        ends, flat = np.cumsum(lengths), np.concatenate(tokens).astype(np.int64)
        positions = np.arange(len(flat)) - np.repeat(ends - lengths, lengths) + self.first_position
        starts = np.concatenate([[0], ends]).astype(np.int32)
        if self.compiled:  # what is filled up belongs to no text
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
            out = torch.segment_reduce(hidden, "mean", axis=0, unsafe=True, lengths=lengths)
        else:
            first = hidden[first]
            out = (self.model.head(first) if encoder.pooling == "ance" else first).float()
        return F.normalize(out, dim=-1) if encoder.normalise else out
