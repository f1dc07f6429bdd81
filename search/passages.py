"""The passages of an index: their ids on disk, one pass over a corpus, and the settings that an index folder keeps.

A file of its own because the dense index, BM25 and worker processes share it: it needs numpy and the standard library
alone, so a process that only reads and tokenises starts at once.  Nothing here grows in memory with the text of a
corpus; at 54 million passages the ids take their text and 16 bytes a passage on disk, and what is in use in memory.

Shapes: M passages.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import mmap
import multiprocessing
import os
from array import array
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Callable, Iterable, Iterator, Literal, Sequence

import numpy as np

from data import DataError, located_lines, located_passages, Passage, read_corpus, _scrub
from runs import atomic_write, path_with_digest


FAILED = float("nan")  # in a list of ranks: a technical failure; the caller excludes and counts the rollout
Hits = list[tuple[str, float]]  # one ranked list: (id, score), best first


class RetrieverError(ValueError):
    """Bad input to the retriever: the message names the value, the rule and the way out."""

    exit_status = 2


@dataclass
class RetrieverConfig:
    kind: Literal["bm25", "dense", "hybrid", "remote"] = "bm25"
    """which retriever: words (bm25), vectors (dense), both fused (hybrid), what serve.py serves elsewhere (remote)"""
    corpus: str = ""
    """corpus file (JSONL or TSV): what an index is built from; without a saved one, BM25 is built from it in memory"""
    index: str = ""
    """folder of saved indexes, with subfolders dense/ and bm25/"""
    encoder: str = ""
    """local folder or hub name of the encoder (ANCE, E5, MiniLM, …)"""
    pooling: Literal["auto", "ance", "mean", "first"] = "auto"
    """how token states become a vector; auto: as the model's files say"""
    normalise: bool | None = None
    """L2-normalise vectors; unset: as the model's files say"""
    query_prefix: str | None = None
    """text put before queries; unset: 'query: ' for E5, none otherwise"""
    passage_prefix: str | None = None
    """text put before passages; unset: 'passage: ' for E5, none otherwise"""
    query_length: int | None = None
    """tokens a query may have; unset: 512 or the model's limit"""
    passage_length: int | None = None
    """tokens a passage may have; unset: 384 or the model's limit"""
    batch_tokens: int = 0
    """tokens of one encoder batch; 0: 8192 on a CPU, 65536 on a GPU"""
    shard_size: int = 65536
    """passages of one index file; a killed build loses at most one or two of them on every rank"""
    workers: int = -1
    """processes of a rank that read and tokenise while it encodes; -1: its share of the cores with a GPU, else none"""
    across_ranks: bool = False
    """dense, under torchrun: each rank holds its share of the vectors, all ranks search together (task rewrite)"""
    verify: bool = False
    """when an index is opened: compare the checksums of a dense one, and corpus with what was indexed; reads all"""
    faiss: str = ""
    """factory string of a FAISS index beside the exact one (SQfp16, IVF4096,PQ64, HNSW32, …); empty: exact search"""
    nprobe: int | None = None
    """FAISS: lists of an IVF index that a search looks at; unset: as the index was saved, 32 when it is built"""
    ef_search: int | None = None
    """FAISS: width of the front in an HNSW graph; unset: as the index was saved, 128 when it is built"""
    device: str = "auto"
    """where the encoder runs and the product is taken; auto: cuda where there is one, else cpu"""
    k1: float = 0.9
    """BM25: saturation of word counts (TopiOCQA 0.9, QReCC 0.82)"""
    b: float = 0.4
    """BM25: share of length normalisation (TopiOCQA 0.4, QReCC 0.68)"""
    query_words: int = 1024
    """BM25: words of a query that are used"""
    analyzer: Literal["lucene", "snowball"] = "lucene"
    """BM25: lucene agrees with Lucene and Anserini to the bit; snowball is bm25s' tokeniser with PyStemmer's English"""
    bm25_workers: int = 1
    """BM25: processes that build an index, and that share the queries of one batch"""
    depth: int = 100
    """hybrid: places used of either list, at least 50"""
    rrf_k: int = 60
    """hybrid: the constant of reciprocal rank fusion"""
    weights: list[float] = field(default_factory=lambda: [1.0, 1.0])
    """hybrid: weights of dense and BM25"""
    url: str = ""
    """remote: address of the server, such as http://127.0.0.1:8000"""
    timeout: float = 120.0
    """remote: seconds for the answer to one request"""
    retries: int = 8
    """remote: further tries of a request, after 1, 2, 4, … up to 30 seconds: 8 bridge a restart of about two minutes"""
    request_queries: int = 128
    """remote: queries of one request"""


def retriever_settings(r: RetrieverConfig) -> dict:
    """What of a retriever decides its ranks: not how fast it is or where it runs."""
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
    """RetrieverError where a saved index of `cfg` was not built from this corpus file as it is."""
    if corpus and cfg.index:
        folders = [
            Path(cfg.index, kind) for kind in ("dense", "bm25") if cfg.kind in (kind, "hybrid")
        ]
        check_corpus([folder for folder in folders if folder.is_dir()], corpus, cfg.verify)


# ---------------------------------------------------------------------------------------------------------------- files

def mapped(path: Path, mode: str = "r") -> np.ndarray:
    """An .npy file, memory-mapped; ValueError that names it where it is empty or damaged, as numpy's own does not."""
    try:
        return np.load(path, mmap_mode=mode)
    except (EOFError, ValueError) as e:
        raise ValueError(f"{path}: {e}") from e


def mapped_text(path: Path) -> mmap.mmap:
    """The bytes of a file, memory-mapped; ValueError that names it where it is empty."""
    with open(path, "rb") as f:
        if os.path.getsize(path) == 0:
            raise ValueError(f"{path} is empty")
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


# ------------------------------------------------------------------------------------------------------------------ ids

class PassageIds:
    """The ids of an index in its order: `ids[i]`, `id in ids`, `ids.position(id)`; unique, free of blanks."""

    def __init__(self, ids: Sequence[str]):
        self._ids = list(ids)
        self._position = {id_: i for i, id_ in enumerate(self._ids)}
        if not self._ids:
            raise RetrieverError("the corpus has no passages; an index needs at least one")
        if len(self._position) < len(self._ids):
            twice = next(id_ for i, id_ in enumerate(self._ids) if self._position[id_] != i)
            raise _twice(twice)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> str:
        return self._ids[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __contains__(self, id_: object) -> bool:
        return self._find(id_) is not None

    def _find(self, id_: object) -> int | None:
        return self._position.get(id_)

    def position(self, id_: str) -> int:
        """The number of the passage with that id; RetrieverError where there is none."""
        row = self._find(id_)
        if row is None:
            raise RetrieverError(f"gold passage {id_!r} is not among the {len(self):,} passages of the index; index the"
                                 " corpus that the gold ids come from, or correct the id")
        return row

    @cached_property
    def order(self) -> np.ndarray:
        """(M,) integers: the place of each id in ascending order of ids, for ties."""
        place = np.empty(len(self), dtype=np.int64)
        place[sorted(range(len(self)), key=self._ids.__getitem__)] = np.arange(len(self))
        return place


class StoredIds(PassageIds):
    """The ids that `write_ids` wrote to a folder, memory-mapped: text, line starts, and the rows in order of ids.

    An id is found by bisection in the sorted rows.  UTF-8 bytes sort as Python's strings do.
    """

    def __init__(self, folder: Path):
        self._text = mapped_text(folder / "ids.txt")
        self._start = mapped(folder / "ids.start.npy")  # (M + 1,) first bytes of the lines
        self._sorted = mapped(folder / "ids.sorted.npy")  # (M,) rows by ascending id
        self._place = mapped(folder / "ids.order.npy", "c")  # (M,) its inverse
        if not len(self._start) - 1 == len(self._sorted) == len(self._place) or self._start[-1] != len(self._text):
            raise ValueError(f"{folder}/ids.txt and its ids.*.npy do not belong together")

    def __len__(self) -> int:
        return len(self._sorted)

    def _bytes(self, i: int) -> bytes:
        return self._text[int(self._start[i]):int(self._start[i + 1]) - 1]

    def __getitem__(self, i: int) -> str:
        if not -len(self) <= i < len(self):
            raise IndexError(f"passage {i} of {len(self)}")
        return self._bytes(i % len(self)).decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self._bytes(i).decode("utf-8") for i in range(len(self)))

    def _find(self, id_: object) -> int | None:
        if not isinstance(id_, str):
            return None
        wanted, low, high = id_.encode("utf-8", "surrogatepass"), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(int(self._sorted[middle])) < wanted:
                low = middle + 1
            else:
                high = middle
        row = int(self._sorted[low]) if low < len(self) else None
        return row if row is not None and self._bytes(row) == wanted else None

    @property
    def order(self) -> np.ndarray:
        """(M,) integers, memory-mapped: the place of each id in ascending order of ids, for ties."""
        return self._place


def _twice(id_: str) -> RetrieverError:
    return RetrieverError(f"passage id {id_!r} occurs more than once; ids must be unique: rename or drop one")


def write_ids(folder: Path, ids: Iterable[str], run: int = 1 << 20) -> int:
    """Write the ids of an index for `read_ids`; their number.  RetrieverError: none, or one that occurs twice.

    `run` ids at a time are sorted in memory, the runs then merged, so memory holds one run and 20 bytes a passage.
    """
    starts = [0]
    start = np.zeros(1, dtype=np.int64)
    with atomic_write(str(folder / "ids.txt"), "wb") as f:
        for id_ in ids:
            starts.append(starts[-1] + f.write(f"{id_}\n".encode()))
            if len(starts) > run:
                start, starts = np.concatenate([start, starts[1:]]), starts[-1:]
    start = np.concatenate([start, np.array(starts[1:], dtype=np.int64)])
    if (count := len(start) - 1) == 0:
        os.remove(folder / "ids.txt")
        raise RetrieverError("the corpus has no passages; an index needs at least one")
    with open(folder / "ids.txt", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as text:
        def id_at(row: int) -> bytes:
            return text[start[row]:start[row + 1] - 1]

        runs = [sorted(range(first, min(first + run, count)), key=id_at) for first in range(0, count, run)]
        runs = [np.array(rows, dtype=np.int32 if count < 1 << 31 else np.int64) for rows in runs]
        rows, last = np.empty(count, dtype=runs[0].dtype), None
        for place, (id_, row) in enumerate(heapq.merge(*(((id_at(r), r) for r in rows_) for rows_ in runs))):
            if id_ == last:
                os.remove(folder / "ids.txt")
                raise _twice(id_.decode("utf-8"))
            rows[place], last = row, id_
    inverse = np.empty_like(rows)
    inverse[rows] = np.arange(count, dtype=rows.dtype)
    for name, array in (("start", start), ("sorted", rows), ("order", inverse)):
        with atomic_write(str(folder / f"ids.{name}.npy"), "wb") as f:
            np.save(f, array)
    return count


def read_ids(folder: Path) -> StoredIds:
    """The ids of an index folder, memory-mapped; OSError or ValueError where its files are missing or damaged."""
    return StoredIds(folder)


def gold_positions(ids: PassageIds, queries: Sequence[str], gold_ids: Sequence[Sequence[str]]) -> list[list[int]]:
    """Passage numbers of every query's golds; a bare string is a list of one."""
    golds = gold_lists(queries, gold_ids)
    if empty := [i for i, g in enumerate(golds) if not g]:
        raise RetrieverError(f"query {empty[0]} ({queries[empty[0]][:60]!r}) has no gold passage, so no rank; leave "
                             "such queries out")
    return [[ids.position(g) for g in gold] for gold in golds]


def gold_lists(queries: Sequence[str], gold_ids: Iterable[str | Iterable[str]]) -> list[list[str]]:
    """The gold ids of every query; a bare string is a list of one."""
    golds = [[g] if isinstance(g, str) else list(g) for g in gold_ids]
    if len(queries) != len(golds):
        raise RetrieverError(f"{len(queries)} queries but {len(golds)} lists of gold ids: give one list a query")
    return golds


def check_queries(queries: Iterable[str]) -> list[str]:
    """The queries as a list, lone surrogates replaced: tokenizers and JSON don't take them."""
    if isinstance(queries, str):  # each of its characters would be searched
        raise RetrieverError(f"queries is the text {queries[:60]!r}; give a list of queries, [{queries[:60]!r}]")
    queries = list(queries)
    for i, query in enumerate(queries):
        if not isinstance(query, str):
            raise RetrieverError(f"query {i} is {query!r}; every query must be a text (an empty one finds nothing, or "
                                 "what its vector is near to)")
    return [_scrub(query) for query in queries]


def check_k(k: int, name: str = "k") -> None:
    if k < 1:
        raise RetrieverError(f"{name} is {k}; it must be at least 1")


# -------------------------------------------------------------------------------------------------------------- corpora

def passages_of(corpus: str | os.PathLike | Iterable[Passage]) -> Iterator[Passage]:
    """The passages of a corpus: of a file, or as they are given."""
    return read_corpus(os.fspath(corpus)) if isinstance(corpus, (str, os.PathLike)) else iter(corpus)


@dataclass
class Survey:
    """What one pass over a corpus found."""

    count: int = 0
    fingerprint: str = ""  # sha256 over ids and contents, in order
    starts: list[tuple[int, int]] = field(default_factory=list)  # of a file: line and byte where each task begins


def survey(corpus: str | os.PathLike | Sequence[Passage], folder: Path | None,
           begins: Callable[[int], bool]) -> Survey:
    """One pass over a corpus that writes its ids into `folder`, unless meta.json says that they are there.

    begins: does passage i begin a task (of reading and tokenising, `tokens_of`)?
    """
    from_file, h = isinstance(corpus, (str, os.PathLike)), hashlib.sha256()
    found = Survey()

    def ids() -> Iterator[str]:
        rows = located_passages(os.fspath(corpus)) if from_file else ((0, 0, passage) for passage in corpus)
        for line, byte, passage in rows:
            if passage.id.split() != [passage.id]:
                raise RetrieverError(f"passage id {passage.id!r} must be non-empty and free of blanks: it becomes a "
                                     "column of TREC files. Rename it.")
            if from_file and begins(found.count):
                found.starts.append((line, byte))
            found.count += 1
            h.update(f"{passage.id}\x1f{passage.contents}\x1e".encode())
            yield passage.id

    try:
        there = folder is None or read_meta(folder) is not None and bool(read_ids(folder))
    except (OSError, ValueError):  # missing or damaged
        there = False
    if there:
        deque(ids(), maxlen=0)
    else:
        write_ids(folder, ids())
    found.fingerprint = h.hexdigest()
    return found


def corpus_bytes(corpus: str | os.PathLike | Sequence[Passage]) -> dict:
    """{"corpus_bytes": size} of a corpus file, for meta.json; nothing of passages that come from no file."""
    if not isinstance(corpus, (str, os.PathLike)):
        return {}
    try:
        return {"corpus_bytes": os.path.getsize(corpus)}
    except OSError as e:
        raise RetrieverError(f"{corpus}: {e.strerror}; give the path of an existing corpus file") from e


def check_corpus(folders: Iterable[Path], corpus: str | os.PathLike, verify: bool = False) -> None:
    """RetrieverError where an index in one of `folders` is not of this corpus file.

    A file of the size that was indexed is taken for the same, and every file by an index that knows no size; else, and
    with `verify`, it is read (once), and the passages are compared.
    """
    size = corpus_bytes(corpus)["corpus_bytes"]
    metas = {folder: meta for folder in folders if "corpus" in (meta := read_meta(folder) or {})}
    doubtful = [folder for folder, meta in metas.items() if verify or meta.get("corpus_bytes", size) != size]
    found = survey(corpus, None, lambda i: False).fingerprint if doubtful else ""
    for folder in doubtful:
        if found != metas[folder]["corpus"]:
            raise RetrieverError(f"the index at {folder} was not built from {corpus} as it is; build the index again "
                                 "from this corpus, in a new folder, or give the file it was built from")


# ----------------------------------------------------------------------------------------------------------- tokenising

_worker: dict = {}  # of a tokenising process: its corpus file, prefix and tokenizer


def _start_worker(corpus: str, prefix: str, tokenizer_json: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _worker.update(corpus=corpus, prefix=prefix, tokenizer=tokenizer)


def _work(start: tuple[int, int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of `count` passages of the worker's file from a place on, in a row, and how many each has."""
    rows = islice(located_passages(_worker["corpus"], start), count)
    texts = [_worker["prefix"] + passage.contents for _, _, passage in rows]
    rows = [np.array(e.ids, dtype=np.int32) for e in _worker["tokenizer"].encode_batch_fast(texts)]
    return np.concatenate(rows), np.array([len(row) for row in rows])


def tokens_of(corpus: str, tasks: Sequence[tuple[tuple[int, int], int]], tokenizer_json: str, prefix: str,
              workers: int) -> Iterator[list[np.ndarray]]:
    """The token ids of every passage of every task (place in the corpus file, number of passages), uncut, in order.

    `workers` processes read and tokenise; they work ahead of the caller by four tasks each.  They are forked from a
    process that imported the caller's modules once and never touches a GPU; a tokenizer travels as the JSON text of the
    tokenizers library.
    """
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, context, _start_worker, (corpus, prefix, tokenizer_json)) as pool:
        waiting: deque = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(_work, *task))
                if len(waiting) > 4 * workers:
                    flat, lengths = waiting.popleft().result()
                    yield np.split(flat, np.cumsum(lengths)[:-1])
            while waiting:
                flat, lengths = waiting.popleft().result()
                yield np.split(flat, np.cumsum(lengths)[:-1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# -------------------------------------------------------------------------------------------------------- index folders

def read_meta(folder: Path) -> dict | None:
    """meta.json of an index folder; None where there is none."""
    try:
        return json.loads((folder / "meta.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise RetrieverError(f"{folder}/meta.json is not valid JSON ({e}); delete the folder and build again") from e


def write_meta(folder: Path, meta: dict) -> None:
    with atomic_write(str(folder / "meta.json")) as f:
        json.dump(meta, f, indent=1, ensure_ascii=False)
        f.write("\n")


def check_same(folder: Path, have: dict, want: dict, way_out: str) -> None:
    """RetrieverError naming the first setting in which an index on disk differs from what is asked for."""
    for key, value in want.items():
        if have.get(key) != value:
            raise RetrieverError(f"the index at {folder} was built with {key} {have.get(key)!r}, asked for is {value!r}"
                                 f"; they must be equal. {way_out}")


class Texts:
    """Passages by id, read from the corpus file when asked for: memory holds 12 bytes a passage."""

    def __init__(self, path: str, ids: PassageIds):
        self.path, self.ids, self.numbers, self.offsets = path, ids, array("I"), array("q")
        for number, byte, line in located_lines(path):
            columns = line.lower().split("\t") if number == 1 and path.endswith(".tsv") else []
            if line.strip() and [column.strip() for column in columns] != ["id", "text", "title"]:
                self.numbers.append(number)
                self.offsets.append(byte)
        if len(self.offsets) != len(ids):
            raise DataError(f"{path}: {len(self.offsets):,} passages, but the index has {len(ids):,}; give the file "
                            "that it was built from")
        for i in range(0, len(ids), max(len(ids) // 100, 1)):
            self.document(ids[i])

    def document(self, id_: str) -> dict[str, str]:
        """{"id", "contents"}.  DataError: in its place stands another passage."""
        i = self.ids.position(id_)
        passage = next((p for _, _, p in located_passages(self.path, (self.numbers[i], self.offsets[i]))), None)
        if (found := passage and passage.id) != id_:
            raise DataError(f"{self.path}: {found!r} stands where the index has {id_!r}; give the file that it was built "
                            "from")
        return {"id": id_, "contents": f'"{passage.title}"\n{passage.text}' if passage.title else passage.text}
