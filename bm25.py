"""BM25 as Lucene scores it: English analysis, the index, search, and the gold's rank by counting.

A file of its own so that it copies out whole: sparse search without torch.

The rule of order is retriever.py's: lists by (score descending, id ascending); a rank is 1 + the number of other passages
whose score is at least the gold's, other golds left out; a score of 0 is no hit.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from array import array
from pathlib import Path
from typing import Any, Iterable, Sequence

import numpy as np

from data import Passage, atomic_folder
from passages import (Hits, PassageIds, RetrieverError, check_k, check_queries, check_same, gold_positions, passages_of,
                      read_ids, read_meta, write_ids, write_meta)

# ----------------------------------------------------------------------------------------------------------------- BM25

def _check_bm25(k1: float, b: float) -> None:
    if not (k1 >= 0 and 0 <= b <= 1):
        raise RetrieverError(f"k1 is {k1}, b {b}; BM25 needs k1 >= 0 and 0 <= b <= 1. The usual values are 0.9 and 0.4 "
                             "(QReCC 0.82 and 0.68).")


ANALYSIS = {"words": r"(?u)\b\w\w+\b", "stop_words": "bm25s english (33)", "stemmer": "snowball english"}


class EnglishTokenizer:
    """Words of two and more characters in lower case, less English stop words, stemmed.  One object for both sides."""

    def __init__(self):
        import Stemmer
        from bm25s.stopwords import STOPWORDS_EN
        self._words, self._stop = re.compile(ANALYSIS["words"]).findall, frozenset(STOPWORDS_EN)
        self._stemmer, self._lock = Stemmer.Stemmer("english"), threading.Lock()  # PyStemmer is not safe among threads

    def __call__(self, text: str) -> list[str]:
        words = [w for w in self._words(text.lower()) if w not in self._stop]
        with self._lock:
            return self._stemmer.stemWords(words)


class BM25Retriever:
    """BM25 as Lucene scores it, by bm25s: the sum over the query's words of idf · tf / (tf + k1 (1 - b + b len/mean)).

    A word that stands n times in the query counts n times.  Of a query the first `query_words` words (split at blanks)
    are used; `counts["truncated"]` says how many queries were cut.  A score of 0 is no hit, in lists and in ranks.
    Unlike in Lucene, passage lengths are exact, not rounded to one byte.  Safe to call from several threads.
    """

    def __init__(self, passages: str | os.PathLike | Iterable[Passage], k1: float = 0.9, b: float = 0.4,
                 query_words: int = 1024):
        """passages: a corpus file, or data.Passage objects."""
        self._setup(k1, b, query_words)
        ids: list[str] = []
        self._documents: list[array] | None = []  # word numbers, kept so that k1 and b can change
        for passage in passages_of(passages):
            ids.append(passage.id)
            words = self._tokenizer(passage.contents)
            self._documents.append(array("i", [self._vocabulary.setdefault(w, len(self._vocabulary)) for w in words]))
        self.passage_ids = PassageIds(ids)
        if not self._vocabulary:
            raise RetrieverError(f"none of the {len(ids)} passages holds a word that can be indexed (two characters, no"
                                 " stop word); look at the corpus file")
        self._scorer, self._scored_with = None, None
        self._score()

    def _setup(self, k1: float, b: float, query_words: int) -> None:
        _check_bm25(k1, b)
        check_k(query_words, "query_words")
        self.k1, self.b, self.query_words = float(k1), float(b), query_words
        self._tokenizer, self._vocabulary = EnglishTokenizer(), {}
        self.counts: dict[str, int] = {"truncated": 0}
        self._lock = threading.Lock()

    def _score(self) -> Any:
        """bm25s' scorer for the k1 and b of now: changing them takes effect at the next query."""
        import bm25s
        with self._lock:
            if (self.k1, self.b) != self._scored_with:
                if self._documents is None:
                    raise RetrieverError(f"a saved BM25 index has its scores computed, with k1, b = {self._scored_with}"
                                         f"; asked for are {(self.k1, self.b)}. Build another index with these.")
                _check_bm25(self.k1, self.b)
                scorer = bm25s.BM25(k1=self.k1, b=self.b, method="lucene")
                words = bm25s.tokenization.Tokenized(ids=self._documents, vocab=dict(self._vocabulary))
                scorer.index(words, create_empty_token=False, show_progress=sys.stderr.isatty())
                self._scorer, self._scored_with = scorer, (self.k1, self.b)
            return self._scorer

    def scores(self, query: str) -> np.ndarray | None:
        """(M,) float32 scores of all passages; None where no word of the query is in the corpus."""
        words = query.split()
        if len(words) > self.query_words:
            with self._lock:
                self.counts["truncated"] += 1
            query = " ".join(words[:self.query_words])
        known = [self._vocabulary[w] for w in self._tokenizer(query) if w in self._vocabulary]
        return self._score().get_scores_from_ids(known) if known else None

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The best k passages of every query whose score is above 0, by (score descending, id ascending)."""
        check_queries(queries)
        check_k(k)
        done: dict[str, Hits] = {}
        for query in dict.fromkeys(queries):
            scores = self.scores(query)
            found = np.flatnonzero(scores > 0) if scores is not None else []
            if len(found) > k:
                kth = np.partition(scores[found], -k)[-k]
                found = found[scores[found] >= kth]
            if len(found):
                found = found[np.lexsort((self.passage_ids.order[found], -scores[found]))][:k]
            done[query] = [(self.passage_ids[i], float(scores[i])) for i in found]
        return [list(done[query]) for query in queries]

    def gold_ranks(self, queries: Sequence[str], gold_ids: Sequence[Sequence[str]], cutoff: int = 100) -> list:
        """Rank of the best gold of every query by the rule of order; None beyond `cutoff` or where its score is 0."""
        check_k(cutoff, "cutoff")
        wanted = list(zip(queries, map(tuple, gold_positions(self.passage_ids, queries, gold_ids))))
        done: dict[tuple, int | None] = {}
        for query, gold in dict.fromkeys(wanted):
            scores, gold_rows = self.scores(query), list(dict.fromkeys(gold))
            best = scores[gold_rows].max() if scores is not None else 0.0
            rank = None
            if best > 0:
                rank = 1 + int((scores >= best).sum()) - int((scores[gold_rows] >= best).sum())
            done[query, gold] = rank if rank is not None and rank <= cutoff else None
        return [done[pair] for pair in wanted]

    def _settings(self) -> dict:
        return {"format": "bm25-1", "k1": self.k1, "b": self.b, "tokenizer": ANALYSIS,
                "count": len(self.passage_ids)}

    def save(self, folder: str | os.PathLike, corpus_print: str = "") -> None:
        """Write the index to `folder`, whole or not at all; `BM25Retriever.open` maps it into memory."""
        with atomic_folder(os.fspath(folder)) as temporary:
            self._score().save(temporary, show_progress=False)
            write_ids(Path(temporary), self.passage_ids)
            write_meta(Path(temporary), self._settings() | {"corpus": corpus_print})

    @classmethod
    def open(cls, folder: str | os.PathLike, k1: float = 0.9, b: float = 0.4, query_words: int = 1024) -> BM25Retriever:
        """A saved index, memory-mapped.  RetrieverError: no index, another k1 or b, another tokenizer."""
        import bm25s
        folder, self = Path(folder), cls.__new__(cls)
        meta = read_meta(folder)
        if meta is None or meta.get("format") != "bm25-1":
            raise RetrieverError(f"there is no BM25 index at {folder}; build it with: python retriever.py kind=bm25 "
                                 f"corpus=FILE index={folder.parent if folder.name == 'bm25' else 'OUT'}")
        self._setup(k1, b, query_words)
        self.passage_ids, self._documents = read_ids(folder), None
        check_same(folder, meta, self._settings(), "Give the values it was built with, or build another index.")
        self._scorer, self._scored_with = bm25s.BM25.load(folder, mmap=True, show_progress=False), (self.k1, self.b)
        self._vocabulary = self._scorer.vocab_dict
        return self
