"""BM25 as Lucene scores it: index, search and gold ranks.

Scores equal Lucene 9's (Anserini's defaults) to the bit: one-byte lengths, and float32 terms summed
in float64. Copies out with config.py, data.py, runs.py, search/analysis.py and search/passages.py.

Shapes: M passages, V distinct words, P postings, C distinct pairs of word count and passage length.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Callable, Iterable, Sequence

import numpy as np

from data import Passage
from runs import Progress, atomic_folder, write_json
from search.analysis import make_analyzer
from search.passages import (
    Corpus,
    Hits,
    PassageIds,
    Ranks,
    Retriever,
    RetrieverError,
    Source,
    check_k,
    checksums,
    in_processes,
    mapped,
    opening,
)

FORMAT = "bm25-3"
SHARD = 1 << 17  # passages indexed at a time: about 300 MB of memory at 100 words each
BLOCK = 1 << 24  # postings merged at a time
ARRAYS = ("words", "start", "passages", "codes", "pairs")  # of an index or shard


def word_key(word: str) -> int:
    """Hash a word to 64 bits: 100 million words collide with probability 3e-4."""
    digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def count(part: Iterable[Passage], numbers: range, analyzer: str, folder: Path) -> tuple[int, int]:
    """Write the postings of the passages `numbers` → (words, passages with a word).

    Arrays: words (V,) ascending uint64 keys; start (V + 1,), word v has the postings
    start[v]:start[v + 1]; passages (P,) int32 numbers, ascending per word; codes (P,) indices into
    pairs (C,) int64, word count << 32 | passage length.
    """
    analyse, seen = make_analyzer(analyzer), {}
    words, lengths = [], np.zeros(len(numbers), dtype=np.int64)
    for i, passage in enumerate(part):
        terms = analyse(passage.contents)
        words += [seen.setdefault(term, len(seen)) for term in terms]
        lengths[i] = len(terms)
    keys = np.array([word_key(word) for word in seen], dtype=np.uint64)
    keys, place = np.unique(keys, return_inverse=True)
    row = np.repeat(np.arange(len(lengths)), lengths)
    both = place[np.array(words, dtype=np.int64)] * len(lengths) + row
    both, times = np.unique(both, return_counts=True)  # by word, passage
    word, row = np.divmod(both, len(lengths))
    pairs, codes = np.unique(times << 32 | analyse.lengths(lengths)[row], return_inverse=True)
    starts = np.searchsorted(word, np.arange(len(keys) + 1))
    folder.mkdir()
    values = keys, starts, (row + numbers.start).astype(np.int32), codes.astype(np.uint32), pairs
    for name, array in zip(ARRAYS, values):
        np.save(folder / f"{name}.npy", array)
    return int(lengths.sum()), int(np.count_nonzero(lengths))


def merge(folders: Sequence[Path], folder: Path) -> None:
    """Merge shards into one index, BLOCK postings at a time."""
    shards = [_read_arrays(own) for own in folders]
    words = np.unique(np.concatenate([shard["words"] for shard in shards]))
    pairs = np.unique(np.concatenate([shard["pairs"] for shard in shards]))
    start = np.zeros(len(words) + 1, dtype=np.int64)
    for shard in shards:
        shard["number"] = np.searchsorted(words, shard["words"])  # (shard's V,) index in words
        shard["code"] = np.searchsorted(pairs, shard["pairs"])
        start[shard["number"] + 1] += np.diff(shard["start"])
    np.cumsum(start, out=start)
    for name, array in (("words", words), ("start", start), ("pairs", pairs)):
        np.save(folder / f"{name}.npy", array)
    small = np.uint16 if len(pairs) <= 1 << 16 else np.uint32
    passages, codes = (
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (int(start[-1]),))
        for name, dtype in (("passages", np.int32), ("codes", small))
    )
    free, low = start[:-1].copy(), 0  # where the next posting of a word goes
    while low < len(words):
        high = max(int(np.searchsorted(start, start[low] + BLOCK, "right")) - 1, low + 1)
        for shard in shards:
            a, b = np.searchsorted(shard["number"], (low, high))  # its words in the block
            number, own = shard["number"][a:b], shard["start"][a : b + 1]
            to = np.repeat(free[number] - own[:-1], np.diff(own)) + np.arange(own[0], own[-1])
            passages[to] = shard["passages"][own[0] : own[-1]]
            codes[to] = shard["code"][shard["codes"][own[0] : own[-1]]]
            free[number] += np.diff(own)
        low = high


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    return {name: mapped(folder / f"{name}.npy") for name in ARRAYS}


def build_postings(
    folder: str | os.PathLike, source: Source, analyzer: str = "lucene", workers: int = 1
) -> int:
    """Write the index of a corpus to `folder`, whole or not at all → number of passages.

    Memory holds a shard per worker, then BLOCK postings. RetrieverError: no passage, a repeated id,
    no indexable word.
    """
    make_analyzer(analyzer)  # fails before anything is read
    with atomic_folder(os.fspath(folder)) as temporary:
        temporary = Path(temporary)
        corpus = Corpus(source, ids=True)
        corpus.save_ids(temporary)
        shards = corpus.split(SHARD)
        folders = [temporary / f"shard-{shard.start}" for shard in shards]
        tasks = [(corpus.part(shard), shard, analyzer, own) for shard, own in zip(shards, folders)]
        counted = (count(*task) for task in tasks)
        if workers > 1 and len(tasks) > 1:
            counted = in_processes(count, tasks, min(workers, len(tasks)))
        bar, tokens, documents = Progress(corpus.count, "index words"), 0, 0
        for shard, (words, filled) in zip(shards, counted):
            tokens, documents = tokens + words, documents + filled
            bar.update(len(shard))
        bar.close()
        if not documents:
            raise RetrieverError(
                f"none of the {corpus.count} passages has a word but stop words; look at the corpus"
            )
        merge(folders, temporary)
        for own in folders:
            shutil.rmtree(own)
        meta = {"format": FORMAT, "analyzer": analyzer, "count": corpus.count}
        meta |= {"corpus": corpus.digest, "tokens": tokens, "documents": documents}
        write_json(f"{temporary}/meta.json", meta | corpus.size | {"files": checksums(temporary)})
    return corpus.count


# -------------------------------------------------------------------------------------- search


class BM25Retriever(Retriever):
    """BM25: the sum over the query's words of idf · tf / (tf + k1 (1 - b + b length/mean)).

    Thread-safe. A score of 0 is no hit. k1, b, query_words and workers may change at any time.
    """

    def __init__(
        self,
        passages: Source | Iterable[Passage] | None,
        k1: float = 0.9,
        b: float = 0.4,
        query_words: int | None = None,
        analyzer: str = "lucene",
        workers: int = 1,
    ):
        """Build a temporary index. workers: threads that share a call's queries"""
        super().__init__()
        self.k1, self.b, self.query_words, self.workers = k1, b, query_words, workers
        self._analyse, self._local = make_analyzer(analyzer), threading.local()
        if passages is not None:
            with tempfile.TemporaryDirectory(prefix="bm25-") as folder:
                build_postings(f"{folder}/bm25", passages, analyzer)
                self._map(Path(folder, "bm25"))

    @classmethod
    def open(
        cls, folder: str | os.PathLike, *settings, verify: bool = False, **named
    ) -> BM25Retriever:
        """Memory-map a saved index; `verify` compares its files with their checksums.
        RetrieverError: missing, damaged, or another analyzer."""
        self = cls(None, *settings, **named)
        self._map(Path(folder), verify)
        return self

    def _map(self, folder: Path, verify: bool = False) -> None:
        with opening(folder, verify, format=FORMAT, analyzer=self._analyse.name) as self.meta:
            self.passage_ids, self.arrays = PassageIds.open(folder), _read_arrays(folder)
            arrays, ids = self.arrays, len(self.passage_ids)
            postings = [int(arrays["start"][-1]), len(arrays["passages"]), len(arrays["codes"])]
            if len(set(postings)) > 1 or ids != self.meta["count"]:
                raise ValueError(f"{ids:,} ids and {postings} postings don't fit")
            if self.meta["tokens"] < self.meta["documents"] or self.meta["documents"] < 1:
                raise ValueError("meta.json has no mean length")

    def _divisors(self) -> np.ndarray:
        """(C,) float32 of 1 + tf / (k1 (1 - b + b length/mean)), in Lucene's order."""
        if not (0 <= self.k1 < math.inf and 0 <= self.b <= 1):
            raise RetrieverError(
                f"k1 is {self.k1:g}, b {self.b:g}; BM25 needs a finite k1 >= 0 and 0 <= b <= 1, "
                "such as 0.9 and 0.4"
            )
        k1, b, one = np.float32(self.k1), np.float32(self.b), np.float32(1)
        pairs = self.arrays["pairs"]
        times, length = (part.astype(np.float32) for part in (pairs >> 32, pairs & 0xFFFFFFFF))
        mean = np.float32(self.meta["tokens"] / self.meta["documents"])
        with np.errstate(divide="ignore"):  # k1 = 0 scores idf for any count
            return one + times * (one / (k1 * ((one - b) + b * length / mean)))

    def prepare(self, queries: list[str]) -> tuple[list[str], list[bool]]:
        if self.query_words is None:
            return queries, [False] * len(queries)
        check_k(self.query_words, "query_words")
        words = [query.split() for query in queries]
        cut = [len(w) > self.query_words for w in words]
        return [" ".join(w[: self.query_words]) for w in words], cut

    def _lists(self, query: str, divisors: np.ndarray) -> list[tuple]:
        """(maximum gain, passages, codes, gain per code) of each query word, largest first."""
        arrays, lists = self.arrays, []
        for word, times in Counter(self._analyse(query)).items():
            key = np.uint64(word_key(word))
            number = int(arrays["words"].searchsorted(key))
            if number == len(arrays["words"]) or arrays["words"][number] != key:
                continue
            low, high = arrays["start"][number : number + 2].tolist()
            n = high - low
            idf = np.float32(math.log(1 + (self.meta["documents"] - n + 0.5) / (n + 0.5)))
            weight = np.float32(times) * idf
            passages, codes = arrays["passages"][low:high], arrays["codes"][low:high]
            lists.append((float(weight), passages, codes, weight - weight / divisors))
        return sorted(lists, key=lambda entry: -entry[0])

    def _candidates(
        self, lists: list[tuple], k: int | None = None, floor: float = 0.0, enough: int = 0
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Passages that may be in the top k or reach `floor`, and their float32 scores.

        None once `enough` passages reach `floor`. Turtle and Flood's MaxScore: when the remaining
        words can't lift a new passage to the k-th best score or `floor`, their lists are only
        searched for the passages found so far.
        """
        if getattr(self._local, "totals", None) is None:
            self._local.totals = np.zeros(len(self.passage_ids))
        totals, read, rows = self._local.totals, [], None
        rest = sum(entry[0] for entry in lists)  # most that the remaining words can add
        try:
            for weight, passages, codes, gains in lists:
                least = floor * (1 - 1e-6) - rest  # needed by now, less rounding
                # only if cheaper than reading this list
                if rows is None and least > 0 and sum(map(len, read)) < 4 * len(passages):
                    rows = _above(totals, read, least)
                    if 8 * len(rows) > len(passages):  # too many to look up
                        rows = None
                if rows is None:
                    at = passages.astype(np.intp)  # numpy indexes faster with intp
                    scores = totals.take(at)
                    scores += gains.take(codes)
                    totals[at] = scores
                    read.append(at)
                else:
                    here, found = _look_up(rows, passages, codes, gains)
                    totals[rows[here]] += found
                    scores = totals.take(rows)
                    rows = rows[scores >= least]
                rest -= weight
                if enough and np.count_nonzero(scores >= floor) >= enough:
                    return None
                scores = scores[scores > floor]
                if k and len(scores) >= k:
                    floor = float(np.partition(scores, -k)[-k])
            if rows is None:
                rows = _above(totals, read, max(floor * (1 - 1e-6), 1e-30))
            return rows, totals[rows].astype(np.float32)
        finally:
            for passages in read:
                totals[passages] = 0

    def _best(self, query: str, k: int, divisors: np.ndarray) -> Hits:
        rows, scores = self._candidates(self._lists(query, divisors), k)
        if len(rows) > k:
            kept = scores >= np.partition(scores, -k)[-k]
            rows, scores = rows[kept], scores[kept]
        order = np.lexsort((self.passage_ids.order[rows], -scores))[:k]
        best = zip(rows[order].tolist(), scores[order].tolist())
        return [(self.passage_ids[row], score) for row, score in best]

    def _rank(
        self, query: str, golds: Sequence[int], cutoff: int, divisors: np.ndarray
    ) -> int | None:
        lists, golds = self._lists(query, divisors), np.unique(np.array(golds, dtype=np.int32))
        own = np.zeros(len(golds))
        for _, passages, codes, gains in lists:
            here, found = _look_up(golds, passages, codes, gains)
            own[here] += found
        own = own.astype(np.float32)
        best = own.max()
        if best <= 0:
            return None
        found = self._candidates(lists, floor=float(best), enough=cutoff + len(golds))
        if found is None:
            return None
        rank = 1 + int(np.count_nonzero(found[1] >= best)) - int(np.count_nonzero(own >= best))
        return rank if rank <= cutoff else None

    def _answers(self, work: Callable, entries: Iterable[tuple], number: int) -> list:
        """Run `work` once per distinct entry, in threads."""
        entries, divisors = list(entries), self._divisors()
        once = list(dict.fromkeys(entries))
        check_k(self.workers, "workers")
        with ThreadPoolExecutor(self.workers) as pool:
            share = pool.map if self.workers > 1 else map
            done = dict(zip(once, share(lambda entry: work(*entry, number, divisors), once)))
        return [done[entry] for entry in entries]

    def hits(self, queries: list[str], k: int) -> list[Hits]:
        return [list(hits) for hits in self._answers(self._best, zip(queries), k)]

    def ranks(self, queries: list[str], golds: list[list[int]], cutoff: int) -> Ranks:
        return self._answers(self._rank, zip(queries, map(tuple, golds)), cutoff)


def _look_up(
    rows: np.ndarray, passages: np.ndarray, codes: np.ndarray, gains: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the passages `rows` (R,) a word's list has, and its gains for these."""
    at = np.minimum(passages.searchsorted(rows), len(passages) - 1)
    here = passages.take(at) == rows
    return here, gains[codes[at[here]]]


def _above(totals: np.ndarray, read: list[np.ndarray], least: float) -> np.ndarray:
    """(R,) ascending numbers of the passages read so far that total at least `least`."""
    found = [at[totals.take(at) >= least] for at in read]
    if 16 * sum(map(len, found)) > len(totals):  # a full scan is faster than sorting
        return np.flatnonzero(totals >= least)
    rows = np.sort(np.concatenate([np.empty(0, np.intp), *found]))
    return rows[np.diff(rows, prepend=-1) > 0]
