"""What retrievers share. Needs no torch, so that worker processes start fast.

Shapes: M passages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import multiprocessing
import numbers
import os
import threading
from array import array
from bisect import bisect_left
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Callable, Iterable, Iterator, Literal, Sequence

import numpy as np

from config import above, at_least, between
from data import DataError, Passage, _scrub, located_lines, located_passages, open_input
from runs import atomic_write, path_with_digest

FAILED = float("nan")  # a rank that failed; callers exclude and count it
Hits = list[tuple[str, float]]  # one ranked list: (id, score), best first
Ranks = list[int | float | None]  # a rank per query
Source = str | os.PathLike | Sequence[Passage]  # a corpus file, or passages in memory
PART = 2048  # passages between recorded offsets of a corpus file


class RetrieverError(ValueError):
    """Bad input; the message names the value, the rule and the fix."""

    exit_status = 2


@dataclass
class RetrieverConfig:
    kind: Literal["bm25", "dense", "hybrid", "remote"] = "bm25"
    """BM25, dense vectors, both fused (hybrid) or a serve.py server (remote)"""
    corpus: str = ""
    """corpus file (JSONL or TSV) to index; bm25 needs nothing else"""
    index: str = ""
    """folder of saved indexes (subfolders dense/ and bm25/)"""
    encoder: str = ""
    """local folder or hub name of the encoder (ANCE, E5, MiniLM, …)"""
    pooling: Literal["auto", "ance", "mean", "first"] = "auto"
    """pooling of token states; auto: as the model's files say"""
    normalise: bool | None = None
    """L2-normalise vectors; unset: as the model's files say"""
    query_prefix: str | None = None
    """text before queries; unset: 'query: ' for E5, else none"""
    passage_prefix: str | None = None
    """text before passages; unset: 'passage: ' for E5, else none"""
    query_length: Annotated[int | None, at_least(3)] = None
    """most tokens of a query; unset: 512 or the model's limit"""
    passage_length: Annotated[int | None, at_least(3)] = None
    """most tokens of a passage; unset: 384 or the model's limit"""
    batch_tokens: Annotated[int, at_least(0)] = 0
    """tokens per encoder batch; 0: 8192 on a CPU, 65536 on a GPU"""
    shard_size: Annotated[int, at_least(1)] = 65536
    """passages per index file; a killed build loses up to two per rank"""
    workers: Annotated[int, at_least(-1)] = -1
    """tokenising processes per rank; -1: a share of the cores with a GPU, else 0"""
    across_ranks: bool = False
    """dense, under torchrun: split vectors among ranks, which search together"""
    verify: bool = False
    """compare index files and the corpus with their checksums"""
    faiss: str = ""
    """FAISS factory string, such as HNSW32; empty: exact search"""
    nprobe: Annotated[int | None, at_least(1)] = None
    """FAISS IVF: lists searched; unset: as saved, 32 at a build"""
    ef_search: Annotated[int | None, at_least(1)] = None
    """FAISS HNSW: search width; unset: as saved, 128 at a build"""
    device: str = "auto"
    """where to encode and search; auto: cuda if available, else cpu"""
    k1: Annotated[float, at_least(0)] = 0.9
    """BM25: saturation of word counts (TopiOCQA 0.9, QReCC 0.82)"""
    b: Annotated[float, between(0, 1)] = 0.4
    """BM25: length normalisation (TopiOCQA 0.4, QReCC 0.68)"""
    query_words: Annotated[int | None, at_least(1)] = None
    """BM25: words used of a query; unset: all"""
    analyzer: Literal["lucene", "snowball"] = "lucene"
    """BM25: Lucene's analysis, or that of bm25s with PyStemmer (snowball)"""
    bm25_workers: Annotated[int, at_least(1)] = 1
    """BM25: processes that build an index, threads that search"""
    depth: Annotated[int, at_least(1)] = 100
    """hybrid: passages used of each list"""
    rrf_k: Annotated[int, at_least(0)] = 60
    """hybrid: constant of reciprocal rank fusion"""
    weights: list[float] = field(default_factory=lambda: [1.0, 1.0])
    """hybrid: weights of dense and BM25"""
    url: str = ""
    """remote: server address, such as http://127.0.0.1:8000"""
    timeout: Annotated[float, above(0)] = 120.0
    """remote: seconds for the answer to a request"""
    retries: Annotated[int, at_least(0)] = 8
    """remote: retries of a request, after 1, 2, 4, … 30 s (8: two minutes)"""
    request_queries: Annotated[int, at_least(1)] = 128
    """remote: queries per request"""


def retriever_settings(r: RetrieverConfig) -> dict:
    """Return the settings that decide ranks, with file digests."""
    files = {"corpus": r.corpus, "encoder": r.encoder}
    for kind in ("bm25", "dense"):
        files[f"index {kind}"] = r.index and os.path.join(r.index, kind)
    free = {"corpus", "encoder", "index", "device", "batch_tokens", "shard_size", "url", "timeout"}
    free |= {"retries", "request_queries", "workers", "verify", "across_ranks"}
    free |= set() if r.faiss else {"nprobe", "ef_search"}
    settings = {key: path_with_digest(path) for key, path in files.items()}
    settings |= {key: value for key, value in asdict(r).items() if key not in free}
    return {f"retriever.{key}": value for key, value in settings.items()}


def same_corpus(cfg: RetrieverConfig, corpus: str) -> None:
    """RetrieverError if an index has another corpus; without `verify` only sizes count."""
    if not (corpus and cfg.index):
        return
    with open_input(corpus):  # fails if missing
        size, digest = os.path.getsize(corpus), ""
    for kind in ("dense", "bm25") if cfg.kind == "hybrid" else (cfg.kind,):
        meta = read_meta(folder := Path(cfg.index, kind)) or {}
        if "corpus" in meta and (cfg.verify or meta.get("corpus_bytes", size) != size):
            digest = digest or Corpus(corpus).digest
            if digest != meta["corpus"]:
                raise RetrieverError(
                    f"the index at {folder} was not built from {corpus} as it is; build it again "
                    "from this corpus, in a new folder, or give the file it was built from"
                )


# ----------------------------------------------------------------------------------------- ids


class PassageIds:
    """An index's unique ids in order, found by bisection: `ids[i]`, `id in ids`, `set & ids`."""

    def __init__(self, ids: Iterable[str], lines: Callable[[str], list[str]] = lambda id_: []):
        """lines: where an id stands, for the RetrieverError if it repeats"""
        text, start = bytearray(), array("q", [0])
        for id_ in ids:
            text += f"{id_}\n".encode()
            start.append(len(text))
        self._text, self._start = bytes(text), np.array(start)  # (M + 1,) offsets
        rows = sorted(range(len(start) - 1), key=self._bytes)  # UTF-8 sorts like str
        for one, other in pairwise(rows):
            if self._bytes(one) == self._bytes(other):
                first, second = lines(self[one]) or ("", "")
                raise RetrieverError(
                    f"{second}passage id {self[one]!r} occurs more than once{first}; ids must be "
                    "unique: rename one"
                )
        self._sorted = np.array(rows, dtype=np.int32 if len(rows) < 1 << 31 else np.int64)  # (M,)
        self.order = np.empty_like(self._sorted)  # (M,) place of each id in sorted order
        self.order[self._sorted] = np.arange(len(rows))

    @classmethod
    def open(cls, folder: Path) -> PassageIds:
        """Memory-map the ids of an index folder. OSError, ValueError: missing or damaged."""
        self, path = cls.__new__(cls), folder / "ids.txt"
        arrays = (mapped(folder / f"ids.{name}.npy") for name in ("start", "sorted", "order"))
        self._start, self._sorted, self.order = arrays
        together = len(self._start) - 1 == len(self._sorted) == len(self.order)
        if not together or self._start[-1] != path.stat().st_size or not len(self):
            raise ValueError(f"{path} and its ids.*.npy do not belong together")
        with open(path, "rb") as f:
            self._text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return self

    def save(self, folder: Path) -> None:
        arrays = {"start": self._start, "sorted": self._sorted, "order": self.order}
        for name, values in arrays.items():
            with atomic_write(str(folder / f"ids.{name}.npy"), "wb") as f:
                np.save(f, values)
        with atomic_write(str(folder / "ids.txt"), "wb") as f:
            f.write(self._text)

    def same_as(self, other: PassageIds) -> bool:
        """Are these the same ids in the same order?"""
        return np.array_equal(self._start, other._start) and self._text[:] == other._text[:]

    def __len__(self) -> int:
        return len(self._sorted)

    def _bytes(self, i: int) -> bytes:
        return self._text[self._start[i] : self._start[i + 1] - 1]

    def __getitem__(self, i: int) -> str:
        return self._bytes(range(len(self._start) - 1)[i]).decode()

    def __rand__(self, ids: set[str]) -> set[str]:
        return {id_ for id_ in ids if id_ in self}

    def __contains__(self, id_: object) -> bool:
        return self._find(id_) is not None

    def _find(self, id_: object) -> int | None:
        if not isinstance(id_, str):
            return None
        wanted = id_.encode("utf-8", "surrogatepass")
        at = bisect_left(self._sorted, wanted, key=self._bytes)
        found = self._sorted[at : at + 1].tolist()
        return found[0] if found and self._bytes(found[0]) == wanted else None

    def position(self, id_: str) -> int:
        """Return the passage number of an id. RetrieverError: unknown id."""
        if (row := self._find(id_)) is None:
            raise RetrieverError(
                f"gold passage {id_!r} is not among the {len(self):,} passages of the index; index "
                "the corpus that it comes from, or correct the id"
            )
        return row


# --------------------------------------------------------------------------------------- calls


def check_queries(queries: Iterable[str]) -> list[str]:
    """Return the queries without lone surrogates, which tokenizers and JSON reject."""
    if isinstance(queries, str):
        raise RetrieverError(f"queries is the text {queries[:60]!r}; give a list of queries")
    queries = list(queries)
    for i, query in enumerate(queries):
        if not isinstance(query, str):
            raise RetrieverError(f"query {i} is {query!r}; every query must be a text")
    return [_scrub(query) for query in queries]


def check_k(k: int, name: str = "k") -> None:
    if not isinstance(k, numbers.Integral) or k < 1:
        raise RetrieverError(f"{name} is {k!r}; it must be a whole number of at least 1")


def check_golds(
    queries: Iterable[str], gold_ids: Iterable[str | Iterable[str]], cutoff: int
) -> tuple[list[str], list[list[str]]]:
    """Return the queries, and a list of gold ids for each; a bare string is one id."""
    check_k(cutoff, "cutoff")
    queries = check_queries(queries)
    golds = [[g] if isinstance(g, str) else list(g) for g in gold_ids]
    if len(queries) != len(golds):
        raise RetrieverError(f"{len(queries)} queries but {len(golds)} gold lists: give as many")
    if [] in golds:
        i = golds.index([])
        raise RetrieverError(
            f"query {i} ({queries[i][:60]!r}) has no gold passage, so no rank; leave it out"
        )
    return queries, golds


class Retriever:
    """Thread-safe base class. Subclasses define `passage_ids` and, for prepared queries, `hits`
    (None on a NaN score) and `ranks` (of gold passage numbers)."""

    passage_ids: PassageIds
    prepare: Callable[[list[str]], tuple[Any, list[bool]]]  # cuts queries, and tells which
    hits: Callable[[Any, int], list[Hits | None]]
    ranks: Callable[[Any, list[list[int]], int], Ranks]

    def __init__(self):
        self.cut_queries, self._counting = 0, threading.Lock()

    def _prepared(self, queries: list[str]) -> Any:
        prepared, cut = self.prepare(queries)
        with self._counting:
            self.cut_queries += sum(cut)
        return prepared

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """Return the best k passages of every query, ties by ascending id."""
        check_k(k)
        queries = check_queries(queries)
        hits = self.hits(self._prepared(queries), k)
        if None in hits:
            i = hits.index(None)
            raise RetrieverError(
                f"query {i} ({queries[i][:60]!r}) has a NaN score; look at the encoder's weights"
            )
        return hits

    def gold_ranks(
        self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100
    ) -> Ranks:
        """Return every query's best gold rank: None beyond `cutoff`, FAILED on a NaN score."""
        queries, golds = check_golds(queries, gold_ids, cutoff)
        rows = [[self.passage_ids.position(g) for g in gold] for gold in golds]
        return self.ranks(self._prepared(queries), rows, cutoff)


# ------------------------------------------------------------------------------------- corpora


@dataclass
class FilePart:
    """`count` passages of a corpus file, after `skip` passages from `start` (line, byte)."""

    path: str
    start: tuple[int, int]
    skip: int
    count: int

    def __iter__(self) -> Iterator[Passage]:
        rows = located_passages(self.path, self.start)
        return (passage for _, _, passage in islice(rows, self.skip, self.skip + self.count))


class Corpus:
    """A corpus file or passages in memory: read once, then given out in parts.

    digest: sha256 over ids and contents; size: {"corpus_bytes": …}, {} in memory
    """

    def __init__(self, source: Source, ids: bool = False):
        """ids: check and keep them. RetrieverError: no passage, a bad or repeated id."""
        self.path = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
        self.passages = [] if self.path else list(source)
        self._starts, self.count, digest = [], 0, hashlib.sha256()
        rows = self._read(digest)
        self._ids = PassageIds(rows, self._lines) if ids else None
        deque(rows, maxlen=0)
        if not self.count:
            name = self.path or "the corpus"
            raise RetrieverError(f"{name} has no passages; an index needs at least one")
        self.digest = digest.hexdigest()
        self.size = {"corpus_bytes": os.path.getsize(self.path)} if self.path else {}

    def save_ids(self, folder: Path) -> None:
        """Write and release the ids if kept."""
        if self._ids is not None:
            self._ids.save(folder)
            self._ids = None

    def _read(self, digest: Any) -> Iterator[str]:
        rows = located_passages(self.path) if self.path else ((0, 0, p) for p in self.passages)
        for self.count, (line, byte, passage) in enumerate(rows, 1):
            if passage.id.split() != [passage.id]:  # file readers check this
                raise RetrieverError(
                    f"passage id {passage.id!r} must be free of blanks (a column of TREC files)"
                )
            if self.count % PART == 1:
                self._starts.append((line, byte))
            content = f"{passage.id}\x1f{passage.contents}\x1e"
            digest.update(content.encode("utf-8", "replace"))
            yield passage.id

    def _lines(self, id_: str) -> list[str]:
        rows = located_passages(self.path) if self.path else ()
        lines = [number for number, _, passage in rows if passage.id == id_]
        return [f" (first in line {lines[0]})", f"{self.path}:{lines[1]}: "] if lines else []

    def split(self, size: int) -> list[range]:
        """Return the numbers of all passages, `size` at a time."""
        return [range(self.count)[first : first + size] for first in range(0, self.count, size)]

    def part(self, numbers: range) -> Iterable[Passage]:
        """Return those passages; a file's are cheap to pickle."""
        if not self.path:
            return self.passages[numbers.start : numbers.stop]
        before, skip = divmod(numbers.start, PART)
        return FilePart(self.path, self._starts[before], skip, len(numbers))


class Texts:
    """Reads passages of a corpus file by id; takes 12 bytes a passage."""

    def __init__(self, path: str, ids: PassageIds):
        self.path, self.ids, self.numbers, self.offsets = path, ids, array("I"), array("q")
        first = next(located_passages(path), (1, 0))  # behind a header
        for number, byte, line in located_lines(path, first[:2]):
            if line.strip():
                self.numbers.append(number)
                self.offsets.append(byte)
        if len(self.offsets) != len(ids):
            raise DataError(
                f"{path}: {len(self.offsets):,} passages, but the index has {len(ids):,}; give its "
                "corpus file"
            )
        for i in range(0, len(ids), max(len(ids) // 100, 1)):
            self.document(ids[i])

    def document(self, id_: str) -> dict[str, str]:
        """Return {"id", "contents"}. DataError: the file differs from the index."""
        i = self.ids.position(id_)
        rows = located_passages(self.path, (self.numbers[i], self.offsets[i]))
        passage = next((passage for _, _, passage in rows), Passage("", "", ""))
        if passage.id != id_:
            raise DataError(
                f"{self.path}: {passage.id!r} stands where the index has {id_!r}; give its corpus"
            )
        title = f'"{passage.title}"\n' if passage.title else ""
        return {"id": id_, "contents": title + passage.text}


# ------------------------------------------------------------------------------- in processes


def in_processes(call: Callable, tasks: Iterable[tuple], workers: int) -> Iterator[Any]:
    """Yield `call(*task)` in order from processes, up to four tasks ahead each."""
    context = multiprocessing.get_context("forkserver")  # inherits no CUDA state
    with ProcessPoolExecutor(workers, context) as pool:
        waiting = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(call, *task))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as e:
            raise RuntimeError(
                "a worker process ended without an answer; if it lacked memory, use fewer workers"
            ) from e
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@lru_cache(1)
def _uncut(tokenizer_json: str) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenise(part: FilePart, prefix: str, tokenizer_json: str) -> list[np.ndarray]:
    """Return the uncut token ids of every passage."""
    texts = [prefix + passage.contents for passage in part]
    return [np.array(e.ids, np.int32) for e in _uncut(tokenizer_json).encode_batch_fast(texts)]


# ------------------------------------------------------------------------------- index folders


def mapped(path: Path) -> np.ndarray:
    """Memory-map an .npy file, writable in memory, as torch wants it. ValueError: damaged."""
    try:
        return np.load(path, mmap_mode="c").view(np.ndarray)  # slices of np.memmap are slow
    except (EOFError, ValueError) as e:
        raise ValueError(f"{path}: {e}") from e


def read_meta(folder: Path) -> dict | None:
    """Read meta.json of an index folder; None if missing or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return meta if isinstance(meta, dict) else None


def checksum(path: Path) -> str:
    """Return the sha256 of a file, "" if missing or empty."""
    try:
        return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()
    except (FileNotFoundError, ValueError):
        return ""


def checksums(folder: Path, kind: str = "*.npy") -> dict[str, str]:
    """Map the id files, and files that match `kind`, to their sha256."""
    paths = {folder / "ids.txt", *folder.glob("ids.*.npy"), *folder.glob(kind)}
    return {path.name: checksum(path) for path in sorted(paths)}


def check_same(
    folder: Path | str,
    have: dict,
    want: dict,
    way_out: str = "Choose another folder, or delete this one.",
) -> None:
    """RetrieverError if the index has another value for a setting."""
    for key, value in want.items():
        if have.get(key) != value:
            raise RetrieverError(
                f"the index at {folder} was built with {key} {have.get(key)!r}, asked for is "
                f"{value!r}. {way_out}"
            )


@contextlib.contextmanager
def opening(folder: Path, verify: bool = False, **wanted: Any) -> Iterator[dict]:
    """Yield meta.json; an error of the block that opens the index means damage.

    RetrieverError: missing, unfinished, damaged (`verify`: by checksum), or other settings.
    """
    if (meta := read_meta(folder)) is None:
        there = (folder / "meta.json").exists()
        state = "the index at {} is damaged (meta.json)" if there else "there is no index at {}"
        raise RetrieverError(
            f"{state.format(folder)}; build it with: python retriever.py kind=… corpus=FILE "
            f"index={folder.parent} (encoder=FOLDER, faiss=FACTORY)"
        )
    check_same(folder, meta, wanted, "Give what it was built with, or build it again.")
    again = "run the command that builds it again: it makes what is missing"
    if not meta.get("complete", True):
        raise RetrieverError(f"the index at {folder} is unfinished; {again}")
    try:
        if verify and "files" not in meta:
            raise ValueError("it was built without checksums")
        shards = {entry["file"]: entry["sha256"] for entry in meta.get("shards", ())}
        for name, digest in (meta["files"] | shards).items() if verify else ():
            if checksum(folder / name) != digest:
                raise ValueError(f"{name} has another checksum than when it was written")
        yield meta
    except RetrieverError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[-1]
        raise RetrieverError(f"the index at {folder} is damaged ({reason}); {again}") from e
