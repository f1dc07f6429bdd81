"""A dense index: a resumable build, memory-mapped opening, and search.

Callers give a tokenizer and a function from token ids to vectors.

Shapes: M passages, Q queries, D embedding size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import gather_objects, on_rank_0
from runs import Progress, atomic_write, only_writer, write_json
from search.exact import as_hits, best_of, exact_gold_ranks, exact_search, place
from search.faiss_index import FaissIndex
from search.fusion import best_rank
from search.passages import (
    PART,
    Corpus,
    Hits,
    PassageIds,
    Ranks,
    Retriever,
    RetrieverError,
    Source,
    check_k,
    check_same,
    checksum,
    checksums,
    in_processes,
    mapped,
    opening,
    read_meta,
    tokenise,
)

WINDOW = 8 * PART  # passages sorted by length and encoded together
FORMAT = "dense-2"
Encode = Callable[[list[np.ndarray], Callable[[int], None]], tuple[Tensor, int]]


@dataclass
class Index:
    """Vectors of a corpus in the order of `ids`; `shards` are memory-mapped (M_i, D)."""

    ids: PassageIds
    shards: list[np.ndarray]
    meta: dict = field(default_factory=dict)
    folder: str = "(in memory)"
    encoded: int = 0  # passages encoded by this build

    @property
    def cut_passages(self) -> int:
        """Number of passages cut to the encoder's limit."""
        return sum(entry["truncated"] for entry in self.meta.get("shards", []))


def encoder_identity(model: nn.Module, tokenizer: Any, encoder: Any) -> dict:
    """Return what an index and its queries must share (not the query length).

    fingerprint: sha256 of the weights, the architecture and the tokens of a probe text
    """
    digest = hashlib.sha256()
    keys = "model_type num_hidden_layers num_attention_heads hidden_act layer_norm_eps".split()
    form = {k: getattr(model.config, k, None) for k in keys}
    probe = "Où est-ce? The QUICK brown fox's 1,234 jumps; naïve 東京"
    digest.update(json.dumps([form, tokenizer(probe)["input_ids"]]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy())
    settings = {k: v for k, v in asdict(encoder).items() if k not in ("name", "query_length")}
    return {"dim": model.config.hidden_size, **settings, "fingerprint": digest.hexdigest()}


# --------------------------------------------------------------------------------------- build


def build_shards(
    folder: Path,
    source: Source,
    model: nn.Module,
    tokenizer: Any,
    encoder: Any,
    encode: Encode,
    shard_size: int,
    workers: int,
) -> int:
    """Encode missing or damaged shards into `folder`; return the number of passages encoded.

    encode: (uncut token ids of a window, progress) → (fp16 vectors (len, D), number of cut texts)

    Shards are written atomically, with entries that move to meta.json at the end.
    """
    check_k(shard_size, "shard_size")
    identity = encoder_identity(model, tokenizer, encoder)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def begin() -> tuple[dict, Corpus]:
        stack.enter_context(only_writer(os.fspath(folder)))
        before = read_meta(folder) or {}
        corpus = Corpus(source, ids=before.get("files") != checksums(folder, "ids.txt"))
        wanted = {"format": FORMAT, "count": corpus.count, "corpus": corpus.digest}
        wanted |= {"shard_size": shard_size} | identity
        notes = {"encoder": encoder.name, "query_length": encoder.query_length}
        meta = before or wanted | notes | {"complete": False, "shards": []} | corpus.size
        check_same(folder, meta, wanted)
        for entry in folder.glob("shard-*.json") if not before else ():
            entry.unlink()  # an index that lost its meta.json
        corpus.save_ids(folder)
        meta = meta | {"files": checksums(folder, "ids.txt")}
        if meta != before:
            write_json(f"{folder}/meta.json", meta)
        return meta, corpus

    with contextlib.ExitStack() as stack:
        meta, corpus = on_rank_0(begin)
        spans = corpus.split(shard_size)
        mine = range(rank, len(spans), world)
        missing = {n: spans[n] for n in mine if not _is_sound(folder, n, spans[n], meta)}
        encoded = sum(map(len, missing.values()))
        if missing:
            needed, free = encoded * identity["dim"] * 2 / 1e9, shutil.disk_usage(folder).free / 1e9
            if free < needed:
                raise RetrieverError(
                    f"the index at {folder} needs another {needed:,.1f} GB, its disk has "
                    f"{free:,.1f} GB free; make room, or choose another folder"
                )
            tokens = _tokens(corpus, missing.values(), tokenizer, encoder.passage_prefix, workers)
            with contextlib.closing(tokens):
                _encode_shards(folder, missing, tokens, encode)
        if world > 1:
            encoded = sum(gather_objects(encoded))
        on_rank_0(_finish, folder, meta, len(spans), encoded)
        return encoded


def _tokens(
    corpus: Corpus, spans: Sequence[range], tokenizer: Any, prefix: str, workers: int
) -> Iterator[list[np.ndarray]]:
    """Yield the uncut token ids of all shards' passages in order, PART at a time."""
    parts = (
        corpus.part(span[at : at + PART]) for span in spans for at in range(0, len(span), PART)
    )
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if corpus.path and workers and fast:
        form = fast.to_str()
        yield from in_processes(tokenise, ((part, prefix, form) for part in parts), workers)
        return
    for part in parts:
        batch = tokenizer([prefix + passage.contents for passage in part], verbose=False)
        yield [np.array(ids, dtype=np.int32) for ids in batch["input_ids"]]


def _encode_shards(
    folder: Path, missing: dict[int, range], tokens: Iterator[list[np.ndarray]], encode: Encode
) -> None:
    """Encode shards (number → passages) while a thread writes the previous one."""
    bar, kept = Progress(sum(map(len, missing.values())), f"index {folder}"), None
    with ThreadPoolExecutor(1) as keeper:
        for number, span in missing.items():
            parts, cut = [], 0
            for start in range(0, len(span), WINDOW):
                texts = []
                while len(texts) < len(span[start : start + WINDOW]):
                    texts += next(tokens)
                vectors, more = encode(texts, bar.update)
                parts, cut = [*parts, vectors], cut + more
            if kept is not None:
                kept.result()
            kept = keeper.submit(_keep, folder, number, span, torch.cat(parts), cut)
        kept.result()
    bar.close()


def _keep(folder: Path, number: int, span: range, vectors: Tensor, cut: int) -> None:
    """Write a shard (len(span), D), fp16, and its entry."""
    finite = torch.isfinite(vectors).all(1)  # fp16 overflow is infinite
    if not finite.all():
        bad = (~finite).nonzero()[:, 0].tolist()
        raise RetrieverError(
            f"the vector of passage {PassageIds.open(folder)[span[bad[0]]]!r} is not finite in "
            f"fp16 ({len(bad)} such of {len(span)}); look at that passage, or use another encoder"
        )
    path = folder / f"shard-{number:05d}.npy"
    with atomic_write(str(path), "wb") as f:
        np.save(f, vectors.cpu().numpy())
    entry = {"file": path.name, "rows": len(span), "truncated": cut}
    entry |= {"bytes": path.stat().st_size, "sha256": checksum(path)}
    write_json(str(path.with_suffix(".json")), entry)


def _entry(folder: Path, number: int, meta: dict) -> dict | None:
    """Read a shard's entry: its own .json during a build, then meta.json."""
    path = folder / f"shard-{number:05d}.json"
    if not path.is_file():
        return meta["shards"][number] if meta["complete"] else None
    with contextlib.suppress(ValueError):  # damaged: make the shard again
        return json.loads(path.read_text())


def _is_sound(folder: Path, number: int, span: range, meta: dict) -> bool:
    entry, path = _entry(folder, number, meta), folder / f"shard-{number:05d}.npy"
    if entry is None or entry["rows"] != len(span) or not path.is_file():
        return False
    return path.stat().st_size == entry["bytes"] and checksum(path) == entry["sha256"]


def _finish(folder: Path, meta: dict, shards: int, encoded: int) -> None:
    entries = [_entry(folder, n, meta) for n in range(shards)]
    if not all(entries):
        raise RetrieverError(
            f"the index at {folder} lacks {entries.count(None)} of its {shards} shards; give all "
            "ranks one folder, on a file system that they share"
        )
    if encoded or not meta["complete"]:
        write_json(f"{folder}/meta.json", meta | {"complete": True, "shards": entries})
    for path in folder.glob("shard-*.json"):
        path.unlink()


# ---------------------------------------------------------------------------------------- open


def open_shards(folder: Path, verify: bool = False) -> Index:
    """Memory-map a finished index; `verify` compares its files with their checksums.

    RetrieverError: missing, unfinished or damaged.
    """
    with opening(folder, verify, format=FORMAT) as meta:
        shards = [mapped(folder / entry["file"]) for entry in meta["shards"]]
        ids = PassageIds.open(folder)
        for entry, shard in zip(meta["shards"], shards):
            if shard.shape != (entry["rows"], meta["dim"]):
                raise ValueError(f"{entry['file']} has the shape {shard.shape}")
        counts = len(ids), sum(map(len, shards)), meta["count"]
        if len(set(counts)) > 1:
            raise ValueError("{:,} ids and {:,} vectors for {:,} passages".format(*counts))
    return Index(ids, shards, meta, os.fspath(folder))


# -------------------------------------------------------------------------------------- search


class VectorRetriever(Retriever):
    """Thread-safe inner-product search: exact on `device`, or by `faiss`, approximately.

    Subclasses define `prepare`: (Q, D) float32 on the CPU, and which queries were cut.
    With `across` each rank holds a share of the shards; `search` and `gold_ranks` are then
    collectives, which each rank calls with its own queries, or none.
    """

    def __init__(
        self,
        index: Index,
        device: torch.device,
        across: bool = False,
        faiss: FaissIndex | None = None,
    ):
        super().__init__()
        self.index, self.passage_ids, self.device = index, index.ids, device
        self.faiss, self.cut_passages = faiss, index.cut_passages
        self.first, self.group, shards = 0, None, index.shards  # first passage held here
        if across:
            self.group = dist.new_group(backend="gloo")  # own: trainers may search in a thread
            rank, world = dist.get_rank(), dist.get_world_size()
            first, last = (len(shards) * r // world for r in (rank, rank + 1))
            self.first, shards = sum(map(len, shards[:first])), shards[first:last]
        self.shards = place(shards, device) if faiss is None else shards

    @cached_property
    def _order(self) -> Tensor:
        """(M,) place of each id."""
        return torch.from_numpy(self.passage_ids.order).to(self.device)

    def _gathered(self, part: Any) -> list:
        """Return `part` of every rank (a collective)."""
        if self.group is None:
            return [part]
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=self.group)
        return parts

    def _of_all_ranks(self, vectors: Tensor, golds: list) -> tuple[Tensor, list, slice]:
        """Join (Q, D) vectors and golds of all ranks; slice: this rank's own."""
        parts = self._gathered((vectors, golds))
        before = sum(len(part) for part, _ in parts[: dist.get_rank()]) if self.group else 0
        everyone, golds = zip(*parts)
        own = slice(before, before + len(vectors))
        return torch.cat(everyone).to(self.device), sum(golds, []), own

    def _exact_hits(self, vectors: Tensor, k: int) -> list[Hits | None]:
        """Best k passages of all ranks for (Q, D) vectors; None on NaN."""
        order = self._order[self.first : self.first + sum(map(len, self.shards))]
        found = scores, rows, failed = exact_search(vectors, self.shards, k, order)
        if self.group:
            parts = self._gathered((scores.cpu(), rows.cpu() + self.first, failed.cpu()))
            hits = [as_hits(scores, rows) for scores, rows, _ in parts]
            k = min(k, len(self.passage_ids))
            failed = torch.stack([part[2] for part in parts]).any(0)
            found = *best_of(hits, self._order.cpu(), len(vectors), k), failed
        return [
            None if bad else [(self.passage_ids[row], score) for row, score in zip(rows, scores)]
            for scores, rows, bad in zip(*(x.tolist() for x in found))
        ]

    def _faiss_hits(self, vectors: Tensor, k: int) -> list[Hits | None]:
        lists = zip(*self.faiss.search(vectors.numpy(), k)) if len(vectors) else ()
        out = []
        for finite, (scores, rows) in zip(torch.isfinite(vectors).all(1).tolist(), lists):
            pairs = zip(rows.tolist(), scores.tolist())
            found = [(self.passage_ids[row], score) for row, score in pairs if row >= 0]
            out.append(sorted(found, key=lambda hit: (-hit[1], hit[0])) if finite else None)
        return out

    def hits(self, vectors: Tensor, k: int) -> list[Hits | None]:
        """Return the best min(k, M) passages, None on NaN."""
        if self.faiss is not None:
            return self._faiss_hits(vectors, k)
        vectors, _, own = self._of_all_ranks(vectors, [])
        found = [self._exact_hits(part, k) for part in vectors.split(2048)]
        return sum(found, [])[own]

    def ranks(self, vectors: Tensor, golds: list[list[int]], cutoff: int) -> Ranks:
        if self.faiss is not None:  # what FAISS misses has no rank; golds don't count
            lists = self._faiss_hits(vectors, cutoff + max(map(len, golds), default=0))
            sets = [{self.passage_ids[row] for row in rows} for rows in golds]
            return [best_rank(hits, gold, cutoff) for hits, gold in zip(lists, sets)]
        vectors, golds, own = self._of_all_ranks(vectors, golds)
        ranks = []
        for part in vectors.split(2048):
            some = golds[len(ranks) : len(ranks) + len(part)]
            ranks += exact_gold_ranks(part, self.shards, some, cutoff, self.first, self.group)
        return ranks[own]


def faiss_place(index: Index, root: str, factory: str) -> tuple[Path, dict]:
    """Return a FAISS index's folder and the settings of the dense index that it needs."""
    keys = "count dim corpus fingerprint pooling normalise passage_prefix passage_length".split()
    folder = Path(root, "faiss-" + re.sub(r"\W+", "-", factory))
    return folder, {key: index.meta[key] for key in keys}
