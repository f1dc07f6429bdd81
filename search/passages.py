"""The passages of an index: settings, ids on disk, one pass over a corpus, texts by id, meta.json.

Needs no torch, so that a process which only reads and tokenises starts at once. Shapes: M passages.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import threading
from array import array
from bisect import bisect_left
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Callable, Iterable, Iterator, Literal, Sequence

import numpy as np

from config import above, at_least, between
from data import DataError, Passage, _scrub, located_lines, located_passages
from runs import atomic_write, path_with_digest

FAILED = float("nan")  # in a list of ranks: a technical failure, excluded and counted by the caller
Hits = list[tuple[str, float]]  # one ranked list: (id, score), best first
Corpus = str | os.PathLike | Sequence[Passage]  # a corpus file, or passages in memory


class RetrieverError(ValueError):
    """Bad input to the retriever: the message names the value, the rule and the way out."""

    exit_status = 2


@dataclass
class RetrieverConfig:
    kind: Literal["bm25", "dense", "hybrid", "remote"] = "bm25"
    """words (bm25), vectors (dense), both fused (hybrid), what a serve.py serves (remote)"""
    corpus: str = ""
    """corpus file (JSONL or TSV) that an index is built from; all that bm25 needs"""
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
    query_length: Annotated[int | None, at_least(3)] = None
    """tokens a query may have; unset: 512 or the model's limit"""
    passage_length: Annotated[int | None, at_least(3)] = None
    """tokens a passage may have; unset: 384 or the model's limit"""
    batch_tokens: Annotated[int, at_least(0)] = 0
    """tokens of one encoder batch; 0: 8192 on a CPU, 65536 on a GPU"""
    shard_size: Annotated[int, at_least(1)] = 65536
    """passages of one index file; a killed build loses one or two files of every rank"""
    workers: Annotated[int, at_least(-1)] = -1
    """processes of a rank that tokenise ahead; -1: a share of the cores with a GPU, else none"""
    across_ranks: bool = False
    """dense, under torchrun: each rank holds its share of the vectors, all search together"""
    verify: bool = False
    """compare an index with its checksums, and the corpus with what was indexed"""
    faiss: str = ""
    """factory string of a FAISS index beside the exact one, such as HNSW32; empty: exact search"""
    nprobe: Annotated[int | None, at_least(1)] = None
    """FAISS: lists of an IVF index that a search looks at; unset: as saved, 32 when it is built"""
    ef_search: Annotated[int | None, at_least(1)] = None
    """FAISS: width of the front in an HNSW graph; unset: as saved, 128 when it is built"""
    device: str = "auto"
    """where the encoder runs and vectors are compared; auto: cuda where there is one, else cpu"""
    k1: Annotated[float, at_least(0)] = 0.9
    """BM25: saturation of word counts (TopiOCQA 0.9, QReCC 0.82)"""
    b: Annotated[float, between(0, 1)] = 0.4
    """BM25: share of length normalisation (TopiOCQA 0.4, QReCC 0.68)"""
    query_words: Annotated[int | None, at_least(1)] = None
    """BM25: words of a query that are used; unset: all"""
    analyzer: Literal["lucene", "snowball"] = "lucene"
    """BM25: as Lucene and Anserini, to the bit; or as bm25s with PyStemmer (snowball)"""
    bm25_workers: Annotated[int, at_least(1)] = 1
    """BM25: processes that build an index, threads that share the queries of one batch"""
    depth: Annotated[int, at_least(1)] = 100
    """hybrid: places used of either list"""
    rrf_k: Annotated[int, at_least(0)] = 60
    """hybrid: the constant of reciprocal rank fusion"""
    weights: list[float] = field(default_factory=lambda: [1.0, 1.0])
    """hybrid: weights of dense and BM25"""
    url: str = ""
    """remote: address of the server, such as http://127.0.0.1:8000"""
    timeout: Annotated[float, above(0)] = 120.0
    """remote: seconds for the answer to one request"""
    retries: Annotated[int, at_least(0)] = 8
    """remote: further tries of a request, after 1, 2, 4, … 30 s: 8 bridge about two minutes"""
    request_queries: Annotated[int, at_least(1)] = 128
    """remote: queries of one request"""


def retriever_settings(r: RetrieverConfig) -> dict:
    """What of a retriever decides its ranks."""
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
    """RetrieverError where a saved index of `cfg` was not built from this corpus file as it is.

    A file of the size that was indexed is taken for the same, unless `verify` has it read.
    """
    if not (corpus and cfg.index):
        return
    size, now = corpus_bytes(corpus)["corpus_bytes"], ""
    for kind in ("dense", "bm25") if cfg.kind == "hybrid" else (cfg.kind,):
        meta = read_meta(folder := Path(cfg.index, kind)) or {}
        if "corpus" in meta and (cfg.verify or meta.get("corpus_bytes", size) != size):
            now = now or survey(corpus)[1]
            if now != meta["corpus"]:
                raise RetrieverError(
                    f"the index at {folder} was not built from {corpus} as it is; build it again "
                    "from this corpus, in a new folder, or give the file it was built from"
                )


def mapped(path: Path, mode: str = "r") -> np.ndarray:
    """An .npy file, memory-mapped; ValueError names it where it is damaged."""
    try:
        return np.load(path, mmap_mode=mode).view(np.ndarray)  # slices of np.memmap are slow
    except (EOFError, ValueError) as e:
        raise ValueError(f"{path}: {e}") from e


# ----------------------------------------------------------------------------------------- ids


class PassageIds:
    """The unique ids of an index in its order: `ids[i]`, `id in ids`, `ids.position(id)`."""

    def __init__(self, ids: Sequence[str]):
        self._ids = list(ids)
        self._position = {id_: i for i, id_ in enumerate(self._ids)}
        if len(self._position) < len(self._ids):
            raise _repeated(next(p for i, p in enumerate(self._ids) if self._position[p] != i))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> str:
        return self._ids[i]

    def __contains__(self, id_: object) -> bool:
        return self._find(id_) is not None

    def _find(self, id_: object) -> int | None:
        return self._position.get(id_)

    def position(self, id_: str) -> int:
        """The number of the passage with that id; RetrieverError where there is none."""
        row = self._find(id_)
        if row is None:
            raise RetrieverError(
                f"gold passage {id_!r} is not among the {len(self):,} passages of the index; index "
                "the corpus that it comes from, or correct the id"
            )
        return row

    @cached_property
    def order(self) -> np.ndarray:
        """(M,) integers: the place of each id in ascending order of ids."""
        place = np.empty(len(self), dtype=np.int64)
        place[sorted(range(len(self)), key=self._ids.__getitem__)] = np.arange(len(self))
        return place


class StoredIds(PassageIds):
    """The ids that `write_ids` wrote to a folder, memory-mapped and found by bisection.

    OSError or ValueError where its files are missing or damaged.
    """

    def __init__(self, folder: Path):
        self._start = mapped(folder / "ids.start.npy")  # (M + 1,) first bytes of the lines
        self._sorted = mapped(folder / "ids.sorted.npy")  # (M,) passage numbers by ascending id
        self.order = mapped(folder / "ids.order.npy", "c")  # (M,) its inverse
        with open(folder / "ids.txt", "rb") as f:
            size = os.path.getsize(folder / "ids.txt")
            together = len(self._start) - 1 == len(self._sorted) == len(self.order)
            if not together or size == 0 or self._start[-1] != size:
                raise ValueError(f"{folder}/ids.txt and its ids.*.npy do not belong together")
            self._text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._sorted)

    def _bytes(self, i: int) -> bytes:
        return self._text[self._start[i] : self._start[i + 1] - 1]

    def __getitem__(self, i: int) -> str:
        return self._bytes(range(len(self))[i]).decode()

    def _find(self, id_: object) -> int | None:
        if not isinstance(id_, str):
            return None
        wanted = id_.encode("utf-8", "surrogatepass")  # UTF-8 bytes sort as Python's strings do
        at = bisect_left(self._sorted, wanted, key=self._bytes)
        row = int(self._sorted[at]) if at < len(self) else None
        return row if row is not None and self._bytes(row) == wanted else None


def _repeated(id_: str, corpus: Corpus = ()) -> RetrieverError:
    """Names the lines of an id that a corpus file has twice."""
    problem = f"passage id {id_!r} occurs more than once"
    if is_file(corpus):
        lines = (n for n, _, p in located_passages(os.fspath(corpus)) if p.id == id_)
        first, second = islice(lines, 2)
        problem = f"{corpus}:{second}: {problem} (first in line {first})"
    return RetrieverError(f"{problem}; ids must be unique: rename one")


def write_ids(folder: Path, ids: Iterable[str], corpus: Corpus = ()) -> int:
    """Write the ids of an index; their number. RetrieverError: none, or one that occurs twice."""
    start = array("q", [0])
    with atomic_write(str(folder / "ids.txt"), "wb") as f:
        for id_ in ids:
            start.append(start[-1] + f.write(f"{id_}\n".encode()))
    count, dtype = len(start) - 1, np.int32 if len(start) < 1 << 31 else np.int64
    if count == 0:
        os.remove(folder / "ids.txt")
        name = corpus if is_file(corpus) else "the corpus"
        raise RetrieverError(f"{name} has no passages; an index needs at least one")
    with (
        open(folder / "ids.txt", "rb") as f,
        mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):

        def id_at(row: int) -> bytes:
            return text[start[row] : start[row + 1] - 1]

        rows = sorted(range(count), key=id_at)
        twice = next((id_at(a) for a, b in pairwise(rows) if id_at(a) == id_at(b)), None)
    if twice is not None:
        os.remove(folder / "ids.txt")
        raise _repeated(twice.decode(), corpus)
    rows = np.array(rows, dtype=dtype)
    order = np.empty_like(rows)
    order[rows] = np.arange(count, dtype=dtype)
    for name, values in (("start", np.array(start)), ("sorted", rows), ("order", order)):
        with atomic_write(str(folder / f"ids.{name}.npy"), "wb") as f:
            np.save(f, values)
    return count


# --------------------------------------------------------------------------------------- calls


class CutCounter:
    """Counts the queries that a retriever cut, each once; safe among threads."""

    def __init__(self):
        self.cut_queries, self._counting = 0, threading.Lock()

    def count_cut(self, cut: Iterable[bool]) -> None:
        with self._counting:
            self.cut_queries += sum(cut)


def check_queries(queries: Iterable[str]) -> list[str]:
    """The queries as a list, lone surrogates replaced: tokenizers and JSON don't take them."""
    if isinstance(queries, str):  # each of its characters would be searched
        raise RetrieverError(f"queries is the text {queries[:60]!r}; give a list of queries")
    queries = list(queries)
    for i, query in enumerate(queries):
        if not isinstance(query, str):
            raise RetrieverError(f"query {i} is {query!r}; every query must be a text")
    return [_scrub(query) for query in queries]


def check_k(k: int, name: str = "k") -> None:
    if k < 1:
        raise RetrieverError(f"{name} is {k}; it must be at least 1")


def without_nan(queries: list[str], hits: list[Hits | None]) -> list[Hits]:
    """The lists of a search; RetrieverError where one is None, for a NaN score."""
    if None in hits:
        i = hits.index(None)
        raise RetrieverError(
            f"query {i} ({queries[i][:60]!r}) has a NaN score; look at the encoder's weights and "
            "at the index"
        )
    return hits


def gold_lists(queries: Sequence[str], gold_ids: Iterable[str | Iterable[str]]) -> list[list[str]]:
    """The gold ids of every query; a bare string is a list of one."""
    golds = [[g] if isinstance(g, str) else list(g) for g in gold_ids]
    if len(queries) != len(golds):
        raise RetrieverError(
            f"{len(queries)} queries but {len(golds)} lists of gold ids: give as many"
        )
    return golds


def check_golds(
    ids: PassageIds, queries: Iterable[str], gold_ids: Iterable, cutoff: int
) -> tuple[list[str], list[list[int]]]:
    """What `gold_ranks` is asked: the queries, and the passage numbers of every query's golds."""
    check_k(cutoff, "cutoff")
    queries = check_queries(queries)
    golds = gold_lists(queries, gold_ids)
    if [] in golds:
        i = golds.index([])
        raise RetrieverError(
            f"query {i} ({queries[i][:60]!r}) has no gold passage, so no rank; leave it out"
        )
    return queries, [[ids.position(g) for g in gold] for gold in golds]


# ------------------------------------------------------------------------------------- corpora


def is_file(corpus: Corpus) -> bool:
    return isinstance(corpus, (str, os.PathLike))


def survey(
    corpus: Corpus, folder: Path | None = None, begins: Callable[[int], bool] = lambda i: False
) -> tuple[int, str, dict[int, tuple[int, int]]]:
    """One pass over a corpus that writes its ids into `folder`, unless an index has them there.

    → number of passages; sha256 over ids and contents; {i: (line, byte) in the file, if begins(i)}
    """
    starts, digest, count = {}, hashlib.sha256(), 0
    rows = located_passages(os.fspath(corpus)) if is_file(corpus) else ((0, 0, p) for p in corpus)

    def ids() -> Iterator[str]:
        nonlocal count
        for line, byte, passage in rows:
            if passage.id.split() != [passage.id]:  # in memory; a reader has looked at a file's
                raise RetrieverError(
                    f"passage id {passage.id!r} must be free of blanks (a column of TREC files)"
                )
            if line and begins(count):
                starts[count] = line, byte
            count += 1
            digest.update(f"{passage.id}\x1f{passage.contents}\x1e".encode("utf-8", "replace"))
            yield passage.id

    try:
        there = folder is None or read_meta(folder) is not None and len(StoredIds(folder)) > 0
    except (OSError, ValueError):  # missing or damaged
        there = False
    if there:
        deque(ids(), maxlen=0)
    else:
        write_ids(folder, ids(), corpus)
    return count, digest.hexdigest(), starts


def passages_at(corpus: Corpus, start: tuple[int, int] | None, count: int) -> Iterable[Passage]:
    """`count` passages of a file from a start of `survey` on; without one, those of a list."""
    if start is None:
        return corpus
    return (p for _, _, p in islice(located_passages(os.fspath(corpus), start), count))


def corpus_bytes(corpus: Corpus) -> dict:
    """{"corpus_bytes": size} of a corpus file; {} for passages in memory."""
    if not is_file(corpus):
        return {}
    try:
        return {"corpus_bytes": os.path.getsize(corpus)}
    except OSError as e:
        raise RetrieverError(f"{corpus}: {e.strerror}; give the path of a corpus file") from e


class Texts:
    """Passages by id, read from the corpus file when asked for: 12 bytes a passage in memory."""

    def __init__(self, path: str, ids: PassageIds):
        self.path, self.ids, self.numbers, self.offsets = path, ids, array("I"), array("q")
        tsv = path.removesuffix(".gz").endswith(".tsv")
        for number, byte, line in located_lines(path):
            columns = line.lower().split("\t") if number == 1 and tsv else []
            header = [column.strip() for column in columns] == ["id", "text", "title"]
            if line.strip() and not header:
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
        """{"id", "contents"}. DataError: in its place stands another passage."""
        i = self.ids.position(id_)
        rows = located_passages(self.path, (self.numbers[i], self.offsets[i]))
        passage = next((p for _, _, p in rows), None)
        if (found := passage and passage.id) != id_:
            raise DataError(
                f"{self.path}: {found!r} stands where the index has {id_!r}; give its corpus"
            )
        title = f'"{passage.title}"\n' if passage.title else ""
        return {"id": id_, "contents": title + passage.text}


# ------------------------------------------------------------------------------- in processes


def in_processes(
    call: Callable, tasks: Iterable[tuple], workers: int, ahead: int = 4, start: tuple = (None, ())
) -> Iterator:
    """`call(*task)` of every task, in order, by processes that work ahead by so many tasks each.

    start: function and arguments that each process begins with
    """
    context = multiprocessing.get_context("forkserver")  # which never touches a GPU
    with ProcessPoolExecutor(workers, context, *start) as pool:
        waiting: deque = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(call, *task))
                if len(waiting) > ahead * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as e:
            problem = (
                "a worker process ended without an answer; if it lacked memory, use fewer workers"
            )
            raise RuntimeError(problem) from e
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker: dict = {}  # of a tokenising process: its corpus file, prefix and tokenizer


def _start_worker(corpus: str, prefix: str, tokenizer_json: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _worker.update(corpus=corpus, prefix=prefix, tokenizer=tokenizer)


def _tokenise(start: tuple[int, int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of `count` passages in a row, and their lengths."""
    rows = passages_at(_worker["corpus"], start, count)
    texts = [_worker["prefix"] + passage.contents for passage in rows]
    tokens = [np.array(e.ids, np.int32) for e in _worker["tokenizer"].encode_batch_fast(texts)]
    return np.concatenate(tokens), np.array([len(ids) for ids in tokens])


def tokens_of(
    corpus: str, tasks: Iterable[tuple], tokenizer_json: str, prefix: str, workers: int
) -> Iterator[list[np.ndarray]]:
    """Uncut token ids of the passages of every task: (start in the file, number of passages)."""
    start = (_start_worker, (corpus, prefix, tokenizer_json))
    for flat, lengths in in_processes(_tokenise, tasks, workers, start=start):
        yield np.split(flat, np.cumsum(lengths)[:-1])


# ------------------------------------------------------------------------------- index folders


def read_meta(folder: Path) -> dict | None:
    """meta.json of an index folder; None where there is none."""
    try:
        return json.loads((folder / "meta.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise RetrieverError(f"{folder}/meta.json is damaged ({e}); build the index again") from e


def write_meta(folder: Path, meta: dict) -> None:
    with atomic_write(str(folder / "meta.json")) as f:
        json.dump(meta, f, indent=1, ensure_ascii=False)
        f.write("\n")


def check_same(folder: Path, have: dict, want: dict, way_out: str) -> None:
    """RetrieverError names the first setting of an index that is not the one asked for."""
    for key, value in want.items():
        if have.get(key) != value:
            raise RetrieverError(
                f"the index at {folder} was built with {key} {have.get(key)!r}, asked for is "
                f"{value!r}. {way_out}"
            )
